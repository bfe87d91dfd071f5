"""Warn of language models that are not causal."""

from __future__ import annotations

from collections.abc import Container

from seqblocks.analysis.passes import lookahead
from seqblocks.errors import Fault, Note, Report, Span, listing
from seqblocks.graph import ModelSpec, Node


def check_future(model: ModelSpec, warnings: Report, declared: Container[str] = ()) -> None:
    """Warn of a model over token ids whose outputs depend on the tokens that it should predict.

    There is one warning for each step that introduces a lookahead, which names the outputs. declared: outputs that are
    known to look ahead.
    """
    if model.input.kind != "tokens":
        return
    expected = ("sequence", model.input.features, model.input.rate)
    wires = model.outputs or {"": model.output}
    seen: dict[tuple[str, Node], dict[str, int | str]] = {}
    for name, ahead in lookahead.of_outputs(model).items():
        wire = wires[name]
        predicts = wire and (wire.kind, wire.features, wire.rate) == expected
        if predicts and ahead.first and name not in declared:
            seen.setdefault(ahead.first, {})[name] = lookahead.shown(ahead.tokens)
    for (path, node), outputs in seen.items():
        warnings.fault(*_seen(model, outputs, path, node))


def _seen(model: ModelSpec, outputs: dict[str, int | str], path: str, node: Node) -> tuple[Fault, Span]:
    """Return the warning and its span: the step that introduces the lookahead, or the user's step around it."""
    if not node.span.source.bundled:
        return _not_causal(outputs, None), node.span
    own = next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    return _not_causal(outputs, (path, node.span)), own.span


def _not_causal(outputs: dict[str, int | str], inside: tuple[str, Span] | None) -> Fault:
    """Return the warning of a model that predicts tokens which it sees.

    outputs: the lookahead of each output, as `expect:` takes it, by its name, "" if it has none; inside: the step of a
    bundled block that introduces the lookahead.
    """
    names = {name: f"`{name}`" if name else "an output" for name in outputs}
    if len(set(outputs.values())) == 1 < len(names):
        depend = f"{listing(names.values())} depend on {_later_tokens(*{*outputs.values()})}"
    else:
        depend = listing(f"{names[name]} depends on {_later_tokens(ahead)}" for name, ahead in outputs.items())
    by_name = ", ".join(f"{name}: {ahead}" for name, ahead in outputs.items())
    declared = outputs.get("", f"{{{by_name}}}")
    declaration = f"`expect: {{lookahead: {declared}}}`"
    return Fault(
        "W903",
        f"the model predicts tokens but is not causal: from here on, {depend}",
        notes=[Note(f"the lookahead is introduced by {inside[0]}", inside[1])] if inside else [],
        hint=f"if that is intended, as in a masked language model, declare it: {declaration}",
    )


def _later_tokens(ahead: int | str) -> str:
    return f"{ahead} later token{'s' if ahead != 1 else ''}" if isinstance(ahead, int) else "the whole sequence"
