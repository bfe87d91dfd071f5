"""Lower `choose`: the steps run on the tokens that are chosen by a score."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.wires import read_wires
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.combinators.copies import copies_of, give_copies
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators.choose import Choose
from seqblocks.errors import Fault, Note
from seqblocks.types import Facts, Origin, Wire, has_same_tokens, length_at

CHOSEN = "chosen"  # the length of the chosen tokens, if their number is known only in a call


@combines(Choose)
def lower_choose(ctx: Context, step: Step, arguments: Choose, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if the scores or the output do not fit the input; reports steps that do not fit."""
    _check_choice(arguments)
    run, wire = ctx.run, ctx.run.types[x]
    (by,) = read_wires(ctx, arguments.by)
    if wire and wire.prefix:
        hint = "put the tokens before the sequence after `choose`, or remove them first with `slice`"
        message = "tokens before a stream cannot be chosen: only a call would know how many of them are left"
        raise Fault("E419", message, found=f"{wire}", hint=hint)
    if wire and (scores := run.types[by]):
        _check_scores(scores, wire, run.labels[by])
    chosen = _chosen(arguments, wire)._replace(origin=Origin(step.verb, step.span)) if wire else None
    inner = run.value(chosen, "input")

    def copy(outer: Wire) -> Wire | None:
        assert wire
        assert chosen
        if has_same_tokens(outer, wire):
            return outer._replace(length=chosen.length, grid=None)
        return outer if outer.context and outer.lanes == wire.lanes else None

    copies = copies_of(ctx, {x: inner}, copy, is_known=chosen is not None)
    outside = ctx.body._replace(wires=copies, layers={}, hidden=ctx.body.wires)
    body = lower_inside(ctx._replace(body=outside), arguments.steps, inner)
    if run.full:  # already reported
        return None
    run.has_constants = True  # the scores have no gradient by the choice
    run.may_look_ahead |= not arguments.is_causal
    inputs = {"x": (x,), "by": (by,), **give_copies(ctx, body, copies, ("x", "by"))}
    if not (wire and chosen and _check_steps(ctx, step, body, chosen)):
        return None
    result = run.types[body.result]
    made = _result(wire, chosen, result) if result else None
    return make_node(
        ctx, step, graph.ChooseNode, inputs, made, bodies={"": body}, arguments=arguments, wires=(wire,)
    )  # fmt: skip


def _check_choice(arguments: Choose) -> None:
    """Raise Fault (E202, E209) unless it is said which tokens are chosen."""
    if arguments.top is None and arguments.above is None:
        hint = "`top: 0.125` chooses a share of a sequence; `above: 0` chooses by a threshold, also in streams"
        raise Fault("E202", "`choose` needs `top`, `above` or both", hint=hint)
    if arguments.top is not None and arguments.top > 1 and not arguments.top.is_integer():
        message, expected = "`top` is a share of the tokens or their number", "a number below 1, or a whole number"
        raise Fault("E209", message, at="top", expected=expected, found=f"{arguments.top:g}")


def _check_scores(scores: Wire, x: Wire, label: str) -> None:
    """Raise Fault (E402, E406) unless there is one score for each token of the input."""
    note = scores.origin_note(f"`{label}`")
    notes = [note] if note else []
    if scores.kind != "sequence" or (scores.places, scores.context, scores.prefix) != (x.places, x.context, x.prefix):
        message, expected = "`by` needs a score for each token of the input", f"{x.with_features(1)}"
        hint = "one of them is of an input that does not stream" if scores.context != x.context else None
        raise Fault("E406", message, at="by", expected=expected, found=f"{scores}", notes=notes, hint=hint)
    if scores.features != 1:
        message, hint = "`by` needs one score for each token", "compute it in a step above: `linear: {features: 1}`"
        raise Fault("E402", message, at="by", expected="1", found=f"{scores.features}", notes=notes, hint=hint)


def _chosen(arguments: Choose, x: Wire) -> Wire:
    """Return the type of the chosen tokens, which have no rows and columns."""
    if isinstance(x.length, int) and arguments.top is not None and arguments.above is None:
        return x._replace(length=arguments.count(x.length), grid=None)
    return x._replace(length=length_at(CHOSEN, x.rate), grid=None)


# --- the steps --------------------------------------------------------------------------------------------------------


def _check_steps(ctx: Context, step: Step, body: graph.Graph, chosen: Wire) -> bool:
    """Report the first step that cannot run on chosen tokens (E421). Return whether all can."""
    for node in graph.walk(body):
        if why := _does_not_fit(node, chosen):
            notes = [Note("it is in this `choose`", step.span)]
            ctx.report(Fault("E421", f"{node.name} {why}", notes=notes, hint="move it before `choose`"), node.span)
            return False
    return True


def _does_not_fit(node: graph.Node, chosen: Wire) -> str | None:
    """Return why a step cannot run on the chosen tokens, or None."""
    if node.type and node.type.context and not chosen.context:
        return "does not depend on the chosen tokens"
    if node.type and node.type.prefix:
        return "puts tokens before the chosen ones, which a stream would read only once"
    if node.type and node.type.rate != chosen.rate:
        return "merges or splits tokens, but a stream does not know how many of them will be chosen"
    if isinstance(node, graph.EachNode) and node.arguments.in_frames and (wire := node.wires[0]):
        size, why = node.arguments.width, "but the number of chosen tokens is only known in a call"
        return None if isinstance(wire.length, int) else f"cuts frames of {size} tokens, {why}"
    return None


def _result(x: Wire, chosen: Wire, result: Wire) -> Wire:
    """Return the type of the output. Raises Fault (E404, E406) if the steps changed the shape of their input."""
    if (result.kind, result.length) != (chosen.kind, chosen.length):
        message, expected = "the steps of `choose` must keep its tokens", f"{chosen.with_features(result.features)}"
        raise Fault("E406", message, at="steps", expected=expected, found=f"{result}")
    if result.features != x.features:
        note = result.origin_note("the result")
        raise Fault(
            "E404", "the result of `choose` replaces tokens of its input, so their widths must match", at="steps",
            expected=f"{chosen}", found=f"{result}", notes=[note] if note else [],
            hint=f"end the steps with `linear: {{features: {x.features}}}`",
        )  # fmt: skip
    low, high = min(x.facts.low, result.facts.low), max(x.facts.high, result.facts.high)
    return x._replace(origin=None, facts=Facts(low, high))
