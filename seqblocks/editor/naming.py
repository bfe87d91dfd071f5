"""Add `name:` or another argument to a step, in each of the ways in which a step can be written."""

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
    return with_key(opened, step, "name", name, verb)


def with_key(opened: Opened, step: Written, key: str, value: str, verb: str) -> Edit | None:
    """Return the edit that adds an argument to a step; the rest is as in `with_name`."""
    new = f"{key}: {value}"
    match step.arguments:
        case Mapping(entries=entries) if entries:
            return before_key(opened, next(iter(entries.values()))[0], step.arguments, new)
        case Mapping(span=span) if span.text.startswith("{"):
            return Edit(span, f"{{{new}}}")
        case None:
            text = f"{verb}: {{{new}}}"
            before = opened.text[: opened.lines.offset_of(Spot(step.span.line, step.span.column))]
            return Edit(step.span, f"{{{text}}}" if open_brackets(before)[-1:] == "[" else text)
        case Scalar(value=None):
            end = step.span.within(len(step.verb) - 1, 1)  # its colon follows
            after = end._replace(column=end.end_column + 1, end_column=end.end_column + 1)
            colon = opened.source.line(step.span.line)[step.span.end_column - 1 :].startswith(":")
            return Edit(after, f" {{{new}}}") if colon else None
    return None


def before_key(opened: Opened, key: Span, arguments: Node, new: str) -> Edit:
    """Return the edit that writes another key with its value before a key of the arguments."""
    in_braces = opened.source.line(arguments.span.line)[arguments.span.column - 1] == "{"
    return inserted(key, f"{new}, " if in_braces else f"{new}\n{' ' * (key.column - 1)}")
