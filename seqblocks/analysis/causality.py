"""Warn of language models that are not causal."""

from __future__ import annotations

from collections.abc import Container

from seqblocks import messages
from seqblocks.analysis import lookahead
from seqblocks.errors import Fault, Report, Span
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
        return messages.unused.not_causal(outputs, None), node.span
    own = next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    return messages.unused.not_causal(outputs, (path, node.span)), own.span
