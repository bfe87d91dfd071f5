"""Lower `residual`: x + steps(x)."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators.residual import Residual
from seqblocks.errors import Fault
from seqblocks.types import UNBOUNDED, Wire
from seqblocks.widths import ids_have_no_features


@combines(Residual)
def lower_residual(ctx: Context, step: Step, arguments: Residual, x: int) -> graph.Node | None:
    """Return the node. Raises Fault (E403) if token ids would be added; reports steps that change the shape (E404)."""
    body = lower_inside(ctx, arguments.steps, x)
    before, after = ctx.run.types[x], ctx.run.types[body.result]
    made = before and before.with_facts(UNBOUNDED)
    node = make_node(ctx, step, graph.ResidualNode, {"x": (x,)}, made, bodies={"": body}, arguments=arguments)
    if before and after and before.kind == after.kind == "tokens":
        raise ids_have_no_features(before, "added", "the input")
    if before and after and (before.kind, before.axes) != (after.kind, after.axes):
        fault = _residual_changes_shape(before, after, ctx.file.source.bundled)
        ctx.report(fault, step)
    return node


def _residual_changes_shape(before: Wire, after: Wire, bundled: bool) -> Fault:
    """bundled: whether the residual is in a bundled block, which users cannot change."""
    hint = f"end the branch with `proj_down: {{features: {before.features}}}`"
    if bundled:
        hint = f"the block is used on {before.features} features: give it arguments that fit"
    only_features = before.kind == after.kind and before.length == after.length
    return Fault(
        "E404",
        "a residual adds the output of its steps to its input, so their shapes must match",
        expected=str(before),
        found=str(after),
        notes=[note for note in (before.origin_note("the input"), after.origin_note("the result")) if note],
        hint=hint if only_features else None,
    )
