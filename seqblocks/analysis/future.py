"""Language models that see the tokens they are to predict."""

from __future__ import annotations

from seqblocks.analysis import lookahead
from seqblocks.errors import Fault, Note, Report, Span
from seqblocks.graph import ModelSpec, Node


def check_future(model: ModelSpec, warnings: Report) -> None:
    """Warn of a model of token numbers that predicts a token from what follows it."""
    if model.input.kind != "tokens":
        return
    for value, ahead in lookahead.of_outputs(model).items():
        wire = model.types[value]
        expected = ("sequence", model.input.features, model.input.rate)
        predicts = wire and (wire.kind, wire.features, wire.rate) == expected
        if predicts and ahead.first:
            warnings.fault(*_seen(model, ahead, *ahead.first))


def _seen(model: ModelSpec, ahead: lookahead.Ahead, path: str, node: Node) -> tuple[Fault, Span]:
    """Return the warning and its place: the step where the future enters, or the user's own step around it."""
    notes = [Note(f"the future enters at {path}", node.span)] if node.span.source.bundled else []
    own = node if not notes else next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    many = "the whole sequence" if ahead.tokens == lookahead.WHOLE else f"{ahead.tokens:g} later tokens"
    message = f"the model predicts tokens and sees the future: from here on an output depends on {many}"
    wanted = f"`expect: {{lookahead: {lookahead.shown(ahead.tokens)}}}`"
    hint = f"if that is intended, as in a model that fills in masked tokens, say so: {wanted}"
    return Fault("W903", message, notes=notes, hint=hint), own.span
