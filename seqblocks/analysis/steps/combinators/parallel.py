"""Lower `parallel`: several branches read the same input, and their results are merged."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.nodes import make_node, may_own
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators.parallel import Parallel
from seqblocks.errors import Fault, listing, quote
from seqblocks.language.document import Mapping, Node, Sequence, kind_of
from seqblocks.types import UNBOUNDED, Wire
from seqblocks.widths import ids_have_no_features


def _bodies(ctx: Context, branches: Node, x: int) -> dict[str, graph.Graph]:
    """Lower the branches, and return those without faults in their names. Raises Fault (E203) if there is none."""
    if not isinstance(branches, Sequence) or not branches.items:
        found = "an empty list" if isinstance(branches, Sequence) else kind_of(branches)
        hint = "[{left: [silu]}, {right: [gelu]}]"
        if isinstance(branches, Mapping) and branches.entries:
            hint = f"each branch is an item of a list: put '- ' before {listing(branches.entries)}"
        raise Fault("E203", "branches must be a list of at least one", at="branches", found=found, hint=hint)
    bodies: dict[str, graph.Graph] = {}
    for item in branches.items:
        name, steps = _branch(ctx, item)
        if name in bodies:
            ctx.report(Fault("E304", f"two branches are named {quote(name)}"), item.span)
            name = ""
        if name:
            bodies[name] = lower_inside(ctx, steps, x, name)
        elif isinstance(steps, Sequence):
            lower_inside(ctx, steps, x)
    return bodies


@combines(Parallel, check=_bodies)
def lower_parallel(ctx: Context, step: Step, arguments: Parallel, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if there is no branch (E203), or if results cannot be merged (E403, E406)."""
    bodies = _bodies(ctx, arguments.branches, x)
    results = {name: ctx.run.types[body.result] for name, body in bodies.items()}
    merged = _merged(arguments.merge, results) if len(bodies) == len(arguments.branches.items) else None
    return make_node(ctx, step, graph.ParallelNode, {"x": (x,)}, merged, bodies=bodies, arguments=arguments)


def _branch(ctx: Context, item: Node) -> tuple[str, Node | None]:
    """Return the name and the steps of a branch: no name after a fault in it, and no steps if there are none."""
    if isinstance(item, Mapping) and len(item.entries) == 1:
        ((name, span, steps),) = list(item)
        return (name, steps) if may_own(ctx, name, span) else ("", steps)
    fault = Fault("E203", "a branch is written `name: [steps]`", found=kind_of(item), hint="- left: [silu]")
    ctx.report(fault, item.span)
    return "", None


def _merged(merge: str, results: dict[str, Wire | None]) -> Wire | None:
    """Return the type of the merged results, or None if one of them is unknown."""
    known = [(name, wire) for name, wire in results.items() if wire]
    if not known or len(known) < len(results):
        return None
    name, first = known[0]
    if first.kind == "tokens" and len(known) > 1:
        done = {"concat": "joined", "product": "multiplied", "sum": "added", "mean": "added"}[merge]
        raise ids_have_no_features(first, done, name)
    for other, wire in known[1:]:
        alike = wire.with_features(first.features) if merge == "concat" else wire
        if (alike.kind, alike.axes) != (first.kind, first.axes):
            message = f"branches {quote(name)} and {quote(other)} cannot be merged by {merge}"
            notes = [note for note in (first.origin_note(name), wire.origin_note(other)) if note]
            raise Fault("E406", message, at="branches", expected=str(first), found=str(wire), notes=notes)
    if merge == "concat":
        return first.with_features(sum(wire.features for _, wire in known))
    return first if len(known) == 1 else first.with_facts(UNBOUNDED)
