"""Describe what is at a position of a spec: a verb, an argument, a wire, a name."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks.analysis.passes.budgets import written
from seqblocks.analysis.passes.expectations import figures
from seqblocks.analysis.scope.references import Reference
from seqblocks.descriptions import reference
from seqblocks.editor import steps
from seqblocks.editor.calls import block_of, key_at
from seqblocks.editor.hints import PARTS, facts
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.values import type_of_wire, value_of
from seqblocks.errors import Span
from seqblocks.language.document import Scalar
from seqblocks.language.spec import Block


class Hover(NamedTuple):
    """Markdown about a range of the text."""

    span: Span
    text: str


def hover(opened: Opened, spot: Spot) -> Hover | None:
    """Return what is known of the word at a position, or None."""
    known = opened.before(spot)
    if known is None:
        return None
    found = opened.reference_at(known)
    text = _of_reference(opened, found) if found else None
    span = found.span if found else None
    if text is None:
        span, text = _of_key(opened, known)
    now = opened.now(span) if span else None
    return Hover(now, text) if now and text else None


def _of_reference(opened: Opened, found: Reference) -> str | None:
    if found.kind == "verb":
        verb = reference.verbs().get(found.name)
        return None if verb is None else _joined([f"**{found.name}**", _here(opened, found.span), about_verb(verb)])
    if found.kind == "block":
        block = block_of(opened, found)
        return _joined([f"**{found.name}**", _here(opened, found.span), about_block(block) if block else None])
    if found.kind == "wire":
        kind = type_of_wire(opened, found)
        maker = f"made in line {found.definition.line}" if found.definition else "the input"
        return _joined([f"wire **{found.name}**" + (f": `{kind}`" if kind else ""), maker])
    if found.kind == "step":
        return f"step **{found.name}**, in line {found.definition.line}" if found.definition else None
    return _of_name(opened, found)


def _of_name(opened: Opened, found: Reference) -> str:
    value = value_of(opened, found)
    written = _line(found.definition) if found.definition else None
    return _joined([f"**{found.name}**" + (f" = `{value}`" if value is not None else ""), written and f"`{written}`"])


def _line(span: Span) -> str:
    return span.source.line(span.line).strip()


def _here(opened: Opened, span: Span) -> str | None:
    """Return shape and counts of the step whose verb is at a span."""
    step = next((each for each in opened.steps if each.span == span), None)
    return facts(step, PARTS) if step else None


def _joined(parts: list[str | None]) -> str:
    return "\n\n".join(part for part in parts if part)


def about_verb(verb: reference.Verb) -> str:
    """Return the description of a verb as Markdown: what it does, its inputs, arguments and source."""
    out = [reference.about(verb)]
    inputs = [
        f"- `{reference.port_key(port)}`{'' if reference.is_required(port) else ' (optional)'}: "
        f"{reference.describe_port(port)}"
        for port in reference.ports(verb)
    ]
    arguments = [f"- `{each.name}`: {about_argument(each)}" for each in reference.arguments(verb)]
    for title, lines in (("Inputs", inputs), ("Arguments", arguments)):
        if lines:
            out.append("\n".join([f"{title}:", *lines]))
    source = getattr(verb, "source", "")
    return _joined([*out, f"Source: {source}" if source else None])


def about_argument(argument: reference.Argument) -> str:
    """Return the description of an argument in one line."""
    default = reference.describe_default(argument)
    more = " (required)" if argument.required else f" (default {default})" if default else ""
    return f"{reference.describe_type(argument)}{more}. {argument.about}".rstrip(". ") + "."


def about_block(block: Block) -> str:
    """Return the description of a block as Markdown."""
    lines = []
    for name, argument in block.args.items():
        default = argument.default.text if isinstance(argument.default, Scalar) else "…"
        more = " (required)" if argument.default is None else f" (default {default})"
        meaning = argument.meaning()
        lines.append(f"- `{name}`: {argument.type}{more}{'. ' + meaning if meaning else ''}")
    return _joined([block.about, "\n".join(["Arguments:", *lines]) if lines else None])


def _of_key(opened: Opened, spot: Spot) -> tuple[Span | None, str | None]:
    """Return the range and the description of a key: an argument of a step, or a figure that is expected."""
    found = key_at(opened, spot)
    if found is None:
        return _of_figure(opened, spot)
    step, last = found
    assert last.key is not None
    about = _argument_of(opened, step, last.key)
    value = value_of(opened, last.node.text) if isinstance(last.node, Scalar) else None
    shown = f" = `{value}`" if value is not None else ""
    return last.key_span, about and f"**{last.key}**{shown}\n\n{about}"


def _of_figure(opened: Opened, spot: Spot) -> tuple[Span | None, str | None]:
    """Return the range of a key of `expect:`, and what the model has."""
    path = steps.trail(opened.root, spot) if opened.root else []
    model = opened.known.analysis.model
    if len(path) != 3 or path[1].key != "expect" or not path[2].on_key or not (model and model.output):
        return None, None
    value = figures(model).get(path[2].key or "")
    return path[2].key_span, None if value is None else f"**{path[2].key}**\n\nthe model has {written(value)}"


def _argument_of(opened: Opened, step: Reference, key: str) -> str | None:
    if key in COMMON:
        return COMMON[key]
    if step.kind == "block":
        block = block_of(opened, step)
        argument = block.args.get(key) if block else None
        return f"{argument.type}. {argument.meaning()}".strip() if argument else None
    verb = reference.verbs().get(step.name)
    if verb is None:
        return None
    for port in reference.ports(verb):
        if reference.port_key(port) == key:
            return reference.describe_port(port)
    return next((about_argument(each) for each in reference.arguments(verb) if each.name == key), None)


COMMON = {  # keys of every step
    "from": "The wire that the step reads; without it, the output of the step above.",
    "as": "Names the output, so that later steps can read it; several names split it along the features.",
    "name": "The step's name in the state_dict.",
    "init": "Initialisers of its parameters.",
    "tie": "Parameters that are those of an earlier step.",
    "share": "The earlier step whose parameters it uses.",
    "when": "A condition; the step is left out if it is false.",
}
