"""Warn of language models that are not causal."""

from __future__ import annotations

from seqblocks import messages
from seqblocks.analysis import lookahead
from seqblocks.errors import Fault, Report, Span
from seqblocks.graph import ModelSpec, Node


def check_future(model: ModelSpec, warnings: Report) -> None:
    """Warn of a model over token ids whose outputs depend on the tokens that it should predict."""
    if model.input.kind != "tokens":
        return
    for value, ahead in lookahead.of_outputs(model).items():
        wire = model.types[value]
        expected = ("sequence", model.input.features, model.input.rate)
        predicts = wire and (wire.kind, wire.features, wire.rate) == expected
        if predicts and ahead.first:
            warnings.fault(*_seen(model, ahead, *ahead.first))


def _seen(model: ModelSpec, ahead: lookahead.Ahead, path: str, node: Node) -> tuple[Fault, Span]:
    """Return the warning and its span: the step that introduces the lookahead, or the user's step around it."""
    tokens = None if ahead.tokens == lookahead.WHOLE else ahead.tokens
    declared = lookahead.shown(ahead.tokens)
    if not node.span.source.bundled:
        return messages.unused.not_causal(tokens, declared, None), node.span
    own = next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    return messages.unused.not_causal(tokens, declared, (path, node.span)), own.span
