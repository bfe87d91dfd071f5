"""Lower `scan`: run steps in another order of the sequence, or in several orders at once."""

from __future__ import annotations

from itertools import accumulate, chain

from seqblocks import graph, messages
from seqblocks.analysis.combinators.common import combines
from seqblocks.analysis.context import Context
from seqblocks.analysis.init_and_tie import with_initialisers
from seqblocks.analysis.nodes import make_node
from seqblocks.analysis.step import Step
from seqblocks.analysis.steps import count_steps, lower_inside
from seqblocks.combinators import GRID_ORDERS
from seqblocks.combinators.scan import Scan
from seqblocks.parameters import Init
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
        step, "scan", {"x": (x,)}, result, bodies={"": body}, arguments=arguments, owned=owned, starts=starts
    )


def _check_orders(arguments: Scan, wire: Wire | None) -> None:
    orders = arguments.orders
    if not orders:
        raise messages.combinators.no_orders()
    if twice := next((order for at, order in enumerate(orders) if order in orders[:at]), None):
        raise messages.combinators.order_twice(twice, orders)
    over_grid = [order for order in orders if order in GRID_ORDERS]
    if wire and over_grid:
        first = over_grid[0]
        must_have_grid(wire, f"order {first}", at="order", instead="forward or reverse", entry=first)
    if arguments.own not in ("none", []) and len(orders) < 2:
        raise messages.combinators.own_needs_orders()


def _check_length(wire: Wire | None, result: Wire | None) -> None:
    if result and wire and (result.kind, result.length) != (wire.kind, wire.length):
        raise messages.combinators.scan_changes_length(wire, result)


# --- column orders --------------------------------------------------------------------------------------------------


def _check_columns(ctx: Context, arguments: Scan, wire: Wire | None, body: graph.Graph) -> None:
    """Check that a column scan only reorders tokens of one image, and that its steps can process them transposed.

    Raises Fault (E407).
    """
    order = next((order for order in arguments.orders if order.startswith("columns")), None)
    if order is None or wire is None:
        return
    for node in graph.walk(body):
        if node.op and node.type and node.op.is_upright(*node.wires):
            raise messages.combinators.upright_step(node.verb, order, node.span)
    for value in body.captures:
        other = ctx.run.types[value]
        if other and other.kind in ("sequence", "tokens") and (other.grid, other.places) != (wire.grid, wire.places):
            raise messages.combinators.other_image(order, wire, other, ctx.run.labels[value])


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
    below: dict[str, list[str]] = {name: [] for name in own}
    for name in names:
        for prefix in accumulate(name.split("."), "{}.{}".format):
            if prefix in below:
                below[prefix].append(name)
    unnamed = [name for name in own if not below[name]]
    if unnamed and all(node.type for node in graph.walk(body)):  # otherwise a faulty step may own the missing parameter
        from seqblocks.analysis.sharing import owner_of  # only for the message

        shared = {item.name: item for item in graph.parameters(body, shared=True) if item.shared}
        for name in unnamed:
            ctx.report(messages.combinators.nothing_to_own(name, names, owner_of(name, shared)), step)
    return set(chain.from_iterable(below.values()))


def _check_can_own(body: graph.Graph, owned: set[str], names: list[str]) -> None:
    """Raise Fault (E208) if a nested scan owns parameters too, or if a tie shares them."""
    for node in graph.walk(body) if owned else ():
        if node.directions and node.owned and owned != set(names):
            raise messages.combinators.two_scans_own()
        if node.ties:
            raise messages.combinators.tied_and_owned(node.name)


def _starts(
    ctx: Context, step: Step, arguments: Scan, body: graph.Graph, owned: frozenset[str]
) -> dict[str, Init]:
    """Return the initialisers that `init:` assigns to parameters of individual orders."""
    inside = [item for item in graph.parameters(body) if item.name in owned]
    directions = map(graph.direction_name, arguments.orders)
    table = {graph.join(name, item.name): item.parameter for name in directions for item in inside}
    known = ctx.run.types[body.result] is not None and all(node.type for node in graph.walk(body))
    if "init" in step.common and known and not table:
        ctx.report(messages.combinators.orders_own_nothing(arguments.orders), step.key_span("init"))
    given = with_initialisers(ctx, step, table, known)
    return {name: given[name].init for name in table if given[name] is not table[name]}
