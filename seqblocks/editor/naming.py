"""Add `name:` to a step, in each of the ways in which a step can be written."""

from __future__ import annotations

from seqblocks.editor.cursor import open_brackets
from seqblocks.editor.edits import Edit, inserted
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.steps import Written
from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Node, Scalar


def with_name(opened: Opened, step: Written, name: str, verb: str) -> Edit | None:
    """Return the edit that names a step. verb: what is then written as its verb, if that is edited too.

    None if its arguments are written without their keys, so that another key has no place.
    """
    match step.arguments:
        case Mapping(entries=entries) if entries:
            return before_key(opened, next(iter(entries.values()))[0], step.arguments, name)
        case None:
            text = f"{verb}: {{name: {name}}}"
            before = opened.text[: opened.lines.offset_of(Spot(step.span.line, step.span.column))]
            return Edit(step.span, f"{{{text}}}" if open_brackets(before)[-1:] == "[" else text)
        case Scalar(value=None):
            end = step.span.within(len(step.verb) - 1, 1)  # its colon follows
            after = end._replace(column=end.end_column + 1, end_column=end.end_column + 1)
            colon = opened.source.line(step.span.line)[step.span.end_column - 1 :].startswith(":")
            return Edit(after, f" {{name: {name}}}") if colon else None
    return None


def before_key(opened: Opened, key: Span, arguments: Node, name: str) -> Edit:
    """Return the edit that writes `name:` before another key of the arguments."""
    text = f"name: {name}"
    in_braces = opened.source.line(arguments.span.line)[arguments.span.column - 1] == "{"
    return inserted(key, f"{text}, " if in_braces else f"{text}\n{' ' * (key.column - 1)}")
