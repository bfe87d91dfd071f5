"""Lower `each`: the steps run on every window, row, frame or feature of a sequence, as if each were a sequence."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.combinators.copies import copies_of, give_copies
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators.each import Each
from seqblocks.errors import Fault, Note
from seqblocks.ops.rate import merged_tokens
from seqblocks.roles import keeps_apart
from seqblocks.types import Wire, has_same_tokens
from seqblocks.widths import must_divide, must_have_grid


@combines(Each)
def lower_each(ctx: Context, step: Step, arguments: Each, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if the axis does not fit the input, or the steps do not fit the axis."""
    _check_size(arguments)
    wire = ctx.run.types[x]
    folded = _folded(arguments, wire) if wire else None
    inner = ctx.run.value(folded, "input")
    ctx.run.may_look_ahead = True

    def copy(outer: Wire) -> Wire | None:
        assert wire
        assert folded
        return _copied(arguments, outer, wire, folded)

    own = {} if arguments.axis == "features" else {x: inner}  # over features, `input` is a part of this wire
    copies = copies_of(ctx, own, copy, is_known=folded is not None)
    outside = ctx.body._replace(wires=copies, layers={}, hidden=ctx.body.wires)
    body = lower_inside(ctx._replace(body=outside), arguments.steps, inner)
    if ctx.run.full:  # already reported
        return None
    inputs = {"x": (x,), **give_copies(ctx, body, copies, ("x",))}
    if not (wire and folded and _check_steps(ctx, step, arguments, body, folded)):
        return None
    result = ctx.run.types[body.result]
    made = _restored(arguments, wire, folded, result) if result else None
    return make_node(
        ctx, step, graph.EachNode, inputs, made, bodies={"": body}, arguments=arguments, wires=(wire,)
    )  # fmt: skip


def _check_size(arguments: Each) -> None:
    """Raise Fault (E202, E210, E209) unless `size` and `shift` fit the axis."""
    axis, size = arguments.axis, arguments.size
    if size is None and axis in ("windows", "frames", "places"):
        example = "size: 7" if axis == "windows" else "size: 16"
        raise Fault("E202", f"`each` over {axis} needs `size`", hint=f"add `{example}`")
    if size is not None and axis in ("rows", "columns"):
        raise Fault("E210", f"{axis} have no `size`: each is as long as the image", at="size", hint="remove `size:`")
    if arguments.shift and axis != "windows":
        raise Fault("E210", f"only windows can be shifted, not {axis}", at="shift", hint="remove `shift:`")
    if arguments.pad and axis != "windows":
        raise Fault("E210", f"only windows can be padded, not {axis}", at="pad", hint="remove `pad:`")
    if arguments.shift >= arguments.width and axis == "windows":
        found, expected = str(arguments.shift), f"less than the size ({arguments.width})"
        raise Fault("E209", "windows are shifted by less than their size", at="shift", found=found, expected=expected)


def _folded(arguments: Each, x: Wire) -> Wire:
    """Return the type of the sequences on which the steps run. Raises Fault if the axis does not fit the input."""
    axis, size = arguments.axis, arguments.width
    if x.prefix:
        hint = "put the tokens before the sequence after `each`, or remove them first with `slice`"
        raise Fault("E419", "tokens before a stream cannot be part of `each`", found=f"{x}", hint=hint)
    if axis == "features":
        count = must_divide(size, x.features, "size", "the width of the input")
        return x._replace(features=size, lanes=(*x.lanes, count), facts=x.facts.range, origin=None)
    if arguments.in_frames:
        places = merged_tokens(x, size, "size")
        if axis == "places":
            return places._replace(lanes=(*x.lanes, size))
        return x._replace(length=size, grid=None, lanes=(*x.lanes, axis), origin=None)
    must_have_grid(x, f"`each` over {axis}", at="axis", instead="frames or places")
    assert x.grid
    rows, columns = x.grid
    lanes = (*x.lanes, axis)
    if axis != "windows":
        return x._replace(length=columns if axis == "rows" else rows, grid=None, lanes=lanes, origin=None)
    if arguments.pad and arguments.padded(x.grid) != x.grid:
        facts = x.facts.or_zero()
        return x._replace(length=size * size, grid=(size, size), lanes=lanes, origin=None, facts=facts)
    if rows % size or columns % size:
        message = f"windows of {size} x {size} do not tile {rows} rows and {columns} columns"
        fitting = [side for side in range(1, min(x.grid) + 1) if rows % side == 0 == columns % side]
        near = sorted(sorted(fitting, key=lambda side: (abs(side - size), side))[:4])
        hint = f"add `pad: true`; sizes that tile both: {', '.join(map(str, near))}"
        raise Fault("E401", message, at="size", hint=hint)
    return x._replace(length=size * size, grid=(size, size), lanes=lanes, origin=None)


def _copied(arguments: Each, outer: Wire, x: Wire, folded: Wire) -> Wire | None:
    """Return the type of a wire from outside, or None if the steps cannot read it.

    A wire with the tokens of the input is cut like the input, except over features, where each sequence reads all of
    it, as it does a context.
    """
    if not (outer.kind == "sequence" and has_same_tokens(outer, x) and outer.grid == x.grid):
        return outer._replace(lanes=folded.lanes) if outer.context and outer.lanes == x.lanes else None
    if arguments.axis == "features":
        return outer._replace(lanes=folded.lanes)
    facts = outer.facts.or_zero() if arguments.pad else outer.facts
    return folded._replace(features=outer.features, facts=facts, origin=outer.origin)


# --- the steps --------------------------------------------------------------------------------------------------------


def _check_steps(ctx: Context, step: Step, arguments: Each, body: graph.Graph, x: Wire) -> bool:
    """Report the first step that cannot run on the sequences (E420). Return whether all can."""
    for node in graph.walk(body):
        mixes = any((wire := ctx.run.types[value]) and not wire.context for value in node.whole_inputs)
        if why := _does_not_fit(node, arguments, x, mixes):
            notes = [Note("it is in this `each`", step.span)]
            instead = "remove `shift:`, or use attention with `causal: false`"
            hint = instead if arguments.shift else "move it before `each`"
            ctx.report(Fault("E420", f"{node.name} {why}", notes=notes, hint=hint), node.span)
            return False
    return True


def _does_not_fit(node: graph.Node, arguments: Each, x: Wire, mixes: bool) -> str | None:
    """Return why a step cannot run on the sequences, or None. mixes: whether it reads all tokens of a sequence."""
    if node.type and (node.type.context and not x.context):
        return "does not depend on the tokens of `each`"
    if node.type and node.type.prefix:
        return "puts tokens before the sequences of `each`, which a stream would read only once"
    if not (arguments.shift and node.type):
        return None
    if isinstance(node, graph.CellNode):
        return "carries a state from token to token, but shifted windows may hold tokens of two edges of the image"
    if isinstance(node, graph.ChooseNode):
        return "chooses among tokens, but shifted windows may hold tokens of two edges of the image"
    if isinstance(node, graph.EachNode) or (isinstance(node, graph.ScanNode) and not node.is_forward):
        return "reorders tokens, but shifted windows may hold tokens of two edges of the image"
    op, wires = node.op, node.wires
    if op is None or keeps_apart(op, wires):
        return None
    if op.reads == "token" and not (mixes or op.looks_ahead(*wires) or node.type.kind == "vector"):
        return None
    return "reads other tokens, but shifted windows may hold tokens of two edges of the image, which it mixes"


# --- the result -------------------------------------------------------------------------------------------------------


def _restored(arguments: Each, x: Wire, folded: Wire, result: Wire) -> Wire:
    """Return the type of the output. Raises Fault (E406) if the steps changed the tokens."""
    axis = arguments.axis
    if axis == "features" and result.kind in ("sequence", "vector") and (x.grid is None or _is_alike(result, folded)):
        count = folded.lanes[-1]
        assert isinstance(count, int)
        made = result.with_features(result.features * count)
        return made._replace(lanes=x.lanes, facts=result.facts.range)
    if axis == "frames" and result.kind == "vector":
        return x.at_rate(x.rate * arguments.width)._replace(features=result.features, facts=result.facts)
    if _is_alike(result, folded):
        return x.with_features(result.features).with_facts(result.facts)
    more = {"features": "", "frames": ", or a vector"}.get(axis, "")
    message = f"the steps of `each` over {axis} must keep its tokens"
    expected = f"{folded.with_features(result.features)}{more}"
    raise Fault("E406", message, at="steps", expected=expected, found=f"{result}")


def _is_alike(result: Wire, folded: Wire) -> bool:
    """Return whether a result has the tokens that the steps read."""
    same = (result.kind, result.length, result.grid) == (folded.kind, folded.length, folded.grid)
    return same and result.kind == "sequence"
