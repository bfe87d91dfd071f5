"""Checks of steps that run token by token: those of experts and of cells."""

from __future__ import annotations

from collections.abc import Container

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.errors import Fault, Note, quote
from seqblocks.types import Wire


def check_by_token(
    ctx: Context, step: Step, body: graph.Graph, x: Wire, what: str, note: str, hint: str, vectors: bool = False
) -> None:
    """Report the first wire from outside with other tokens than the input (E418), or else the first step that cannot
    process tokens one by one (E417).

    what: "an expert", for the message. vectors: whether the steps may read those that are the same for all tokens.
    """
    fixed: set[int] = set()
    for value in body.captures:
        wire, label = ctx.run.types[value], ctx.run.labels[value]
        if wire is None or (wire.kind, wire.places) == (x.kind, x.places):
            continue
        if vectors and wire.kind == "vector" and wire.context:
            fixed.add(value)
            continue
        message = f"{what} reads the wire {quote(label)}, whose tokens are not those of its input"
        expected, origin = f"{x.with_features(wire.features)}", wire.origin_note(f"`{label}`")
        fault = Fault("E418", message, at="steps", expected=expected, found=f"{wire}", notes=[origin] if origin else [])
        if vectors and wire.kind == "vector":
            fault.hint = "this vector depends on the whole sequence: combine it with a sequence in a step above"
        ctx.report(fault, step)
        return
    for node in graph.walk(body):
        if why := _mixes_tokens(node, x, fixed):
            notes = [Note(note, step.span)]
            if isinstance(node, graph.CellNode) and what == "a cell":
                hint = "give the outer cell the states of both, and write the steps of the inner one there"
            ctx.report(Fault("E417", f"{node.name} in {what} {why}", notes=notes, hint=hint), node.span)
            return


def _mixes_tokens(node: graph.Node, x: Wire, fixed: Container[int]) -> str | None:
    """Return why a step cannot process tokens one by one, or None if it can.

    fixed: vectors that are the same for all tokens of all calls, which a step may therefore read.
    """
    if node.op and (node.op.reads == "past" or node.state) and x.kind == "sequence":
        return "reads earlier tokens"
    if isinstance(node, graph.ChooseNode):
        return "chooses among several tokens"
    if isinstance(node, graph.CellNode):
        return "carries a state from token to token"
    if node.type and (node.type.kind, node.type.places) != (x.kind, x.places):
        return f"changes the tokens: {x} becomes {node.type}"
    if isinstance(node, graph.ScanNode) and not node.is_forward:
        return f"reads the sequence in the order {node.orders}"
    if node.type and node.type.context and not x.context:
        return "does not depend on its token"
    if node.op is None or node.type is None or x.kind == "vector":
        return None
    op, wires = node.op, node.wires
    if any(value not in fixed for value in node.whole_inputs) or op.looks_ahead(*wires):
        return "reads other tokens"
    if op.cannot_stream(*wires) or op.ignores_resets(*wires):
        return "reads other tokens"
    return None
