"""Lower `experts`: a router sends each token to some of several bodies with separate parameters."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.combinators.by_token import check_by_token
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.init_and_tie import with_initialisers
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import count_steps, lower_inside
from seqblocks.combinators.experts import Experts
from seqblocks.errors import Fault
from seqblocks.ops.router import Router
from seqblocks.types import Wire
from seqblocks.widths import must_divide


@combines(Experts)
def lower_experts(ctx: Context, step: Step, arguments: Experts, x: int) -> graph.Node | None:
    """Return the node. Raises Fault (E209) if routing fails; reports steps mixing tokens (E417, E418)."""
    _check_choice(arguments)
    if caution := _untrained(arguments):
        ctx.report(caution, step)
    wire = ctx.run.types[x]
    router = _router(ctx, step, arguments, x, wire)
    bodies = _bodies(ctx, arguments, x)
    if ctx.run.full:  # already reported
        return None
    shared = {} if arguments.shared is None else {graph.SHARED: lower_inside(ctx, arguments.shared, x, graph.SHARED)}
    if wire:
        hint = "move the step out of the experts, which process tokens one by one"
        check_by_token(ctx, step, bodies["0"], wire, "an expert", "the experts are here", hint)
        if shared:
            check_by_token(ctx, step, shared[graph.SHARED], wire, "the shared expert", "the experts are here", hint)
    result = ctx.run.types[bodies["0"].result]
    if shared and result and (added := ctx.run.types[shared[graph.SHARED].result]):
        _check_width(added, result)
    result = wire.with_features(result.features) if wire and result else None
    return make_node(
        ctx, step, graph.ExpertsNode, {"x": (x,)}, result, bodies={"": router, **bodies, **shared}, arguments=arguments
    )  # fmt: skip


def _check_choice(arguments: Experts) -> None:
    """Raise Fault (E209, E401) unless there are enough experts, and groups of equal size."""
    count, groups, chosen = arguments.count, arguments.groups, arguments.top_groups
    if arguments.top > count:
        message, expected = "a token cannot go to more experts than there are", f"at most {count}, the count"
        raise Fault("E209", message, at="top", expected=expected, found=str(arguments.top))
    must_divide(groups, count, "groups", "count", at="groups")
    if chosen > groups:
        message, expected = "a token cannot go to more groups than there are", f"at most {groups}, the groups"
        raise Fault("E209", message, at="top_groups", expected=expected, found=str(chosen))
    most = chosen * count // groups
    if arguments.top > most:
        message = "a token cannot go to more experts than its groups have"
        expected = f"at most {most}: {chosen} of {groups} groups of {count // groups}"
        raise Fault("E209", message, at="top", expected=expected, found=str(arguments.top))


def _check_width(added: Wire, result: Wire) -> None:
    """Raise Fault (E404) unless the shared expert's output can be added to that of the experts."""
    if added.features != result.features:
        message = "the output of `shared` is added to that of the experts, so their widths must match"
        expected, found = f"{result.features} features", str(added.features)
        raise Fault("E404", message, at="shared", expected=expected, found=found)


def _untrained(arguments: Experts) -> Fault | None:
    """Return a warning (W905) if the weight of a token's expert is always 1, or None."""
    if arguments.count == 1 and arguments.score == "softmax":
        message = "the score of the only expert is always 1 and the router is never trained"
        return Fault("W905", message, at="count", hint="use more experts, or write the steps without `experts`")
    if arguments.count == 1 and arguments.normalize:
        message = "the normalised weight of the only expert is always 1 and the router is never trained"
        return Fault("W905", message, at="count", hint="use more experts, or set `normalize: false`")
    if arguments.top == 1 and arguments.normalize:
        message = "with one expert per token, the normalised weight is always 1 and the router is never trained"
        hint = "set `normalize: false` to weight the expert by its score, as in Switch Transformers"
        return Fault("W905", message, at="normalize", hint=hint)
    return None


def _router(ctx: Context, step: Step, arguments: Experts, x: int, wire: Wire | None) -> graph.Graph:
    """Return the body with the router as its only step."""
    run, op = ctx.run, Router(count=arguments.count, bias=arguments.bias, corrected=arguments.corrected)
    kind = op.shape(wire) if wire else None
    value = run.value(kind, "scores")
    parameters = op.parameters(wire) if wire else {}
    if "init" in step.common:
        named = {f"router.{name}": parameter for name, parameter in parameters.items()}
        given = with_initialisers(ctx, step, named, known=wire is not None)
        parameters = {name: given[f"router.{name}"] for name in parameters}
    node = graph.OpNode(
        "router", "router", step.span, {"x": (x,)}, (value,), kind, op=op, parameters=parameters,
        macs=op.macs(wire) if wire else 0, wires=(wire,),
    )  # fmt: skip
    return graph.Graph(x, [node], value)


def _bodies(ctx: Context, arguments: Experts, x: int) -> dict[str, graph.Graph]:
    """Return the experts by number. They share one body, unless it contains ties, which are names of the model."""
    run = ctx.run
    steps, ties = run.steps, run.ties
    first = lower_inside(ctx, arguments.steps, x, "0")
    others = [str(number) for number in range(1, arguments.count)]
    if run.ties == ties:
        count_steps(ctx, len(others) * (run.steps - steps))
        return {"0": first, **dict.fromkeys(others, first)}
    return {"0": first, **{name: lower_inside(ctx, arguments.steps, x, name) for name in others}}
