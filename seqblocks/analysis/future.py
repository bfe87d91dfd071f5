"""Language models that see the tokens they are to predict."""

from __future__ import annotations

from seqblocks.analysis import lookahead
from seqblocks.errors import Fault, Note, Report
from seqblocks.graph import ModelSpec


def check_future(model: ModelSpec, warnings: Report) -> None:
    """Warn of a model of token numbers that predicts a token from what follows it."""
    ahead = lookahead.find(model)
    if model.input.kind != "tokens" or not any(_predicts(model, value) for value in model.graph.results):
        return
    if ahead is None or not ahead.tokens or ahead.first is None:
        return
    path, node = ahead.first
    notes = [Note(f"the future enters at {path}", node.span)] if node.span.source.bundled else []
    own = node if not notes else next(each for each in model.graph.nodes if each.name == path.partition(".")[0])
    many = "the whole sequence" if ahead.tokens == lookahead.WHOLE else f"{ahead.tokens:g} later tokens"
    message = f"the model predicts tokens and sees the future: from here on an output depends on {many}"
    wanted = f"`expect: {{lookahead: {lookahead.shown(ahead.tokens)}}}`"
    hint = f"if that is intended, as in a model that fills in masked tokens, say so: {wanted}"
    warnings.fault(Fault("W903", message, notes=notes, hint=hint), own.span)


def _predicts(model: ModelSpec, value: int) -> bool:
    """Whether an output has a number for each token of the vocabulary, at each token of the input."""
    wire = model.types[value]
    alike = wire is not None and (wire.features, wire.rate) == (model.input.features, model.input.rate)
    return alike and wire is not None and wire.kind == "sequence" and not wire.context
