"""Lower `scan`: run steps in another order of the sequence, or in several orders at once."""

from __future__ import annotations

from itertools import accumulate, chain

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.init_and_tie import with_initialisers
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import count_steps, lower_inside
from seqblocks.combinators import GRID_ORDERS
from seqblocks.combinators.scan import Scan, check_key
from seqblocks.errors import Fault, Note, listing, quote
from seqblocks.parameters import Init
from seqblocks.roles import is_upright, makes_grid
from seqblocks.suggestions import did_you_mean
from seqblocks.types import UNBOUNDED, Wire
from seqblocks.widths import must_have_grid


@combines(Scan)
def lower_scan(ctx: Context, step: Step, arguments: Scan, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if the orders do not fit the input, the steps, or the parameters in `own`."""
    wire = ctx.run.types[x]
    _check_orders(arguments, wire)
    ctx.run.may_look_ahead |= arguments.orders != ("forward",)
    before = ctx.run.steps
    body = lower_inside(ctx, arguments.steps, x)
    count_steps(ctx, (len(arguments.orders) - 1) * (ctx.run.steps - before))  # each order runs them
    result = ctx.run.types[body.result]
    _check_length(wire, result)
    _check_columns(ctx, arguments, wire, body)
    if result and len(arguments.orders) > 1:
        result = result.with_facts(UNBOUNDED)
    if result and arguments.merge == "concat":
        result = result.with_features(result.features * len(arguments.orders))
    owned = _owned(ctx, step, arguments, body)
    starts = _starts(ctx, step, arguments, body, owned)
    return make_node(ctx,
        step, graph.ScanNode, {"x": (x,)}, result, bodies={"": body}, arguments=arguments, owned=owned, starts=starts
    )


def _check_orders(arguments: Scan, wire: Wire | None) -> None:
    orders = arguments.orders
    if not orders:
        raise Fault("E208", "the list of orders is empty", at="order", hint="for instance [forward, reverse]")
    if twice := next((order for at, order in enumerate(orders) if order in orders[:at]), None):
        raise Fault("E208", "an order appears twice", at="order", entry=twice, found=listing(orders))
    over_grid = [order for order in orders if order in GRID_ORDERS]
    if wire and over_grid:
        first = over_grid[0]
        must_have_grid(wire, f"order {first}", at="order", instead="forward or reverse", entry=first)
    _check_key(arguments, wire)
    if arguments.own not in ("none", []) and len(orders) < 2:
        raise Fault("E208", "`own` needs several orders", at="own", hint="order: [forward, reverse]")


def _check_key(arguments: Scan, wire: Wire | None) -> None:
    """Raise Fault (E202, E210, and what expressions raise) unless the order sorted has a key, and only that."""
    is_sorted = any(order.startswith("sorted") for order in arguments.orders)
    if is_sorted and arguments.key is None:
        raise Fault("E202", "the order sorted needs a `key`", hint='key: "row + column"')
    if arguments.key is not None and not is_sorted:
        raise Fault("E210", "`key` belongs to the order sorted", at="key", hint="add `order: sorted`")
    if arguments.key is not None and wire and wire.grid:
        check_key(arguments.key, wire.grid)


def _check_length(wire: Wire | None, result: Wire | None) -> None:
    if result and wire and (result.kind, result.length) != (wire.kind, wire.length):
        message = "the output of a scan must be a sequence of the same length as its input"
        raise Fault("E406", message, at="steps", expected=f"{wire.with_features(result.features)}", found=str(result))


# --- column orders --------------------------------------------------------------------------------------------------


def _check_columns(ctx: Context, arguments: Scan, wire: Wire | None, body: graph.Graph) -> None:
    """Check that a column scan only reorders tokens of one image, and that its steps can process them transposed.

    Raises Fault (E407).
    """
    order = next(filter(graph.moves_tokens, sorted(arguments.orders, reverse=True)), None)
    if order is None or wire is None:
        return
    for node in graph.walk(body):
        if order.startswith("sorted") and node.type and _reads_grid(node):
            message = f"{node.verb} reads rows and columns, but the order {order} has none"
            notes, hint = [Note("the step is here", node.span)], f"move {node.verb} out of the scan"
            raise Fault("E407", message, at="order", entry=order, notes=notes, hint=hint)
        if node.type and (is_upright(node.op, node.wires) if node.op else _is_on_grid(node)):
            message = f"{node.verb} distinguishes rows from columns, but the order {order} exchanges them"
            notes, hint = [Note("the step is here", node.span)], f"move {node.verb} out of the scan"
            raise Fault("E407", message, at="order", entry=order, notes=notes, hint=hint)
    for value in body.captures:
        other = ctx.run.types[value]
        if other and other.kind in ("sequence", "tokens") and (other.grid, other.places) != (wire.grid, wire.places):
            raise _other_image(order, wire, other, ctx.run.labels[value])


def _is_on_grid(node: graph.Node) -> bool:
    """Return whether a step cuts the rows and columns of an image into sequences."""
    return isinstance(node, graph.EachNode) and node.arguments.on_grid


def _reads_grid(node: graph.Node) -> bool:
    """Return whether a step reads or makes rows and columns."""
    if node.op:
        return makes_grid(node.op) or is_upright(node.op, node.wires)
    if isinstance(node, graph.ScanNode):
        return any(order in GRID_ORDERS for order in node.arguments.orders)
    return _is_on_grid(node)


def _other_image(order: str, wire: Wire, other: Wire, label: str) -> Fault:
    """Return the fault of a wire from outside a scan of columns, whose tokens are not those of its input, `wire`."""
    note = other.origin_note(f"`{label}`")
    return Fault(
        "E407",
        f"order {order} reorders every sequence that its steps read, "
        f"but {quote(label)} does not have the rows and columns of its input",
        at="order",
        entry=order,
        expected=f"{wire.with_features(other.features)}, {_rows_by_columns(wire)}",
        found=f"{other}, {_rows_by_columns(other)}",
        notes=[note] if note else [],
    )


def _rows_by_columns(wire: Wire) -> str:
    return f"{wire.grid[0]} x {wire.grid[1]}" if wire.grid else "without rows and columns"


# --- parameters owned by each order -----------------------------------------------------------------------------------


def _owned(ctx: Context, step: Step, arguments: Scan, body: graph.Graph) -> frozenset[str]:
    """Return the parameters selected by `own:`, by their names in the body. Raises Fault (E208)."""
    names = [item.name for item in graph.parameters(body)]
    owned = set(names) if arguments.own == "all" else _named_by(ctx, step, arguments, body, names)
    _check_can_own(body, owned, names)
    return frozenset(owned)


def _named_by(ctx: Context, step: Step, arguments: Scan, body: graph.Graph, names: list[str]) -> set[str]:
    """Return the parameters named by the entries of `own:`; an entry is a parameter, or a step with all of its own.

    Entries that name nothing are reported.
    """
    own = arguments.own if isinstance(arguments.own, list) else []
    if ctx.run.references is not None:
        ctx.run.references.paths(step.get("own"), (body,))
    below: dict[str, list[str]] = {name: [] for name in own}
    for name in names:
        for prefix in accumulate(name.split("."), "{}.{}".format):
            if prefix in below:
                below[prefix].append(name)
    unnamed = [name for name in own if not below[name]]
    if unnamed and all(node.type for node in graph.walk(body)):  # otherwise a faulty step may own the missing parameter
        shared = {item.name: item for item in graph.parameters(body, shared=True) if item.shared}
        for name in unnamed:
            ctx.report(_nothing_to_own(name, names, shared), step)
    return set(chain.from_iterable(below.values()))


def _nothing_to_own(name: str, names: list[str], shared: dict[str, graph.Named]) -> Fault:
    """names: the parameters in the scan. shared: those that steps inside only share."""
    from seqblocks.analysis.steps.sharing import name_the_owner, owner_of  # few specs need it

    owner = owner_of(name, shared)
    steps = {each.rpartition(".")[0] for each in names}
    return Fault(
        "E312",
        f"there is no parameter {quote(name)} inside this scan",
        at="own",
        entry=name,
        expected=f"one of {listing(names)}" if names else "the steps have no parameters",
        hint=name_the_owner(name, owner) if owner else lambda: did_you_mean(name, [*names, *steps]),
    )


def _check_can_own(body: graph.Graph, owned: set[str], names: list[str]) -> None:
    """Raise Fault (E208) if a nested scan owns parameters too, or if a tie shares them."""
    for node in graph.walk(body) if owned else ():
        if isinstance(node, graph.ScanNode) and node.owned and owned != set(names):
            message = "a scan that owns some parameters cannot contain another that does"
            hint = "use `own: all`, or let only one of the two scans own parameters"
            raise Fault("E208", message, at="own", hint=hint)
        if node.ties:
            message = f"{node.name} is tied, so a direction cannot own its parameters"
            raise Fault("E208", message, at="own", hint="tie outside the scan, or set `own: none`")


def _starts(
    ctx: Context, step: Step, arguments: Scan, body: graph.Graph, owned: frozenset[str]
) -> dict[str, Init]:
    """Return the initialisers that `init:` assigns to parameters of individual orders."""
    inside = [item for item in graph.parameters(body) if item.name in owned]
    directions = map(graph.direction_name, arguments.orders)
    table = {graph.join(name, item.name): item.parameter for name in directions for item in inside}
    known = ctx.run.types[body.result] is not None and all(node.type for node in graph.walk(body))
    if "init" in step.common and known and not table:
        hint = f"{'set `own: all`, or ' if len(arguments.orders) > 1 else ''}use `init` of the step inside"
        fault = Fault("E201", "no order of this scan owns parameters to initialise", hint=hint)
        ctx.report(fault, step.key_span("init"))
    given = with_initialisers(ctx, step, table, known)
    return {name: given[name].init for name in table if given[name] is not table[name]}
