"""Lower `residual`: x + steps(x)."""

from __future__ import annotations

from seqblocks import graph, messages
from seqblocks.analysis.combinators.common import combines
from seqblocks.analysis.context import Context
from seqblocks.analysis.nodes import make_node
from seqblocks.analysis.step import Step
from seqblocks.analysis.steps import lower_inside
from seqblocks.combinators.residual import Residual
from seqblocks.types import UNBOUNDED


@combines(Residual)
def lower_residual(ctx: Context, step: Step, arguments: Residual, x: int) -> graph.Node | None:
    """Return the node. Raises Fault (E403) if token ids would be added; reports steps that change the shape (E404)."""
    body = lower_inside(ctx, arguments.steps, x)
    before, after = ctx.run.types[x], ctx.run.types[body.result]
    made = before and before.with_facts(UNBOUNDED)
    node = make_node(ctx, step, "residual", {"x": (x,)}, made, bodies={"": body}, arguments=arguments)
    if before and after and before.kind == after.kind == "tokens":
        raise messages.wires.ids_have_no_features(before, "added", "the input")
    if before and after and (before.kind, before.axes) != (after.kind, after.axes):
        fault = messages.combinators.residual_changes_shape(before, after, ctx.file.source.bundled)
        ctx.report(fault, step)
    return node
