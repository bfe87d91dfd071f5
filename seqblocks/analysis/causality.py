"""Warn of language models that are not causal."""

from __future__ import annotations

from seqblocks.analysis import lookahead
from seqblocks.errors import Fault, Note, Report, Span
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
    notes = [Note(f"the lookahead is introduced by {path}", node.span)] if node.span.source.bundled else []
    own = node if not notes else next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    many = f"{ahead.tokens:g} later token{'s' if ahead.tokens > 1 else ''}"
    many = "the whole sequence" if ahead.tokens == lookahead.WHOLE else many
    message = f"the model predicts tokens but is not causal: from here on, an output depends on {many}"
    declaration = f"`expect: {{lookahead: {lookahead.shown(ahead.tokens)}}}`"
    hint = f"if that is intended, as in a masked language model, declare it: {declaration}"
    return Fault("W903", message, notes=notes, hint=hint), own.span
