"""The parameters and buffers of a graph, by their names in the state_dict."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from seqblocks.graph.nodes import Graph, Node, ScanNode, Source, join
from seqblocks.parameters import Parameter
from seqblocks.record import Record
from seqblocks.state_layout import State


class Named(Record):
    """A parameter with its full name. `tied`: the name of the parameter that it is tied to or shared with, if any.

    shared: whether it is read from that parameter, so that state_dict has no entry with this name.
    """

    name: str
    parameter: Parameter
    node: Node
    tied: str | None = None
    shared: bool = False


def owner_of(own: str, source: Source) -> str:
    """Return the name of a shared parameter from that of the step's own. It begins with ^ if it is outside both."""
    level, name = source
    parts = own.split(".")
    outside = "^" * max(0, level - len(parts))
    return join(*parts[: max(0, len(parts) - level)], outside + name)


def parameters(graph: Graph, prefix: str = "", shared: bool = False) -> Iterator[Named]:
    """Yield each parameter of a graph by its state_dict name, tied ones included.

    shared: also those that a step shares with another, by the names that they would have.
    """
    return (item for item in _inside(graph, prefix) if shared or not item.shared)


def buffers(graph: Graph, prefix: str = "") -> Iterator[tuple[str, State]]:
    """Yield each buffer of a graph, by its state_dict name: what is saved besides parameters."""
    for node in graph.nodes:
        name = join(prefix, node.name)
        for own, buffer in (node.op.buffers(*node.wires) if node.op else {}).items():
            yield join(name, own), buffer
        for label, body in node.bodies.items():
            # if each direction is a module, it has buffers of its own; otherwise they are shared
            separate = isinstance(node, ScanNode) and _is_separate(node, list(_inside(body, name)), name)
            for direction in node.directions if separate else [""]:
                yield from buffers(body, join(name, direction, label))


def children(place: Node | Graph) -> dict[str, Node | Graph]:
    """Return the steps and layers in a step, a layer or a body, by the next part of their names."""
    if isinstance(place, Graph):
        return {node.name: node for node in place.nodes}
    out: dict[str, Node | Graph] = {}
    for label, body in place.bodies.items():
        out |= {label: body} if label else children(body)
        out |= dict.fromkeys(place.directions, body)
    return out


def node_parameters(node: Node, name: str, shared: bool = False, active: bool = False) -> Iterator[Named]:
    """Yield each parameter of a node whose namespace is `name`; see `parameters`. active: those that a token uses."""
    return (item for item in _of_node(node, name, active) if shared or not item.shared)


def _inside(graph: Graph, prefix: str, active: bool = False) -> Iterator[Named]:
    for node in graph.nodes:
        yield from _of_node(node, join(prefix, node.name), active)


def _of_node(node: Node, name: str, active: bool) -> Iterator[Named]:
    if isinstance(node, ScanNode) and node.directions:
        found = _by_direction(node, name, active)
    else:
        found = _declared(node, name, active)
    return map(partial(_from_owner, node, name), found) if node.shared else found


def _declared(node: Node, name: str, active: bool) -> Iterator[Named]:
    for own, parameter in node.parameters.items():
        yield Named(join(name, own), parameter, node, node.ties.get(own))
    for label, body in (node.active if active else node.bodies).items():
        yield from _inside(body, join(name, label), active)


def _by_direction(node: ScanNode, name: str, active: bool) -> Iterator[Named]:
    """Yield the parameters of a scan that has several orders: those that all orders share, then those of each."""
    (body,) = node.bodies.values()
    inside = list(_inside(body, name, active))
    of_each = set(directed(node, inside, name))
    for item in inside:
        if item.name not in of_each:
            yield item
    for direction in node.directions:
        for item in inside:
            if item.name in of_each:
                yield _in_direction(node, name, direction, item)


def directed(node: ScanNode, inside: list[Named], name: str = "") -> list[str]:
    """Return the names in `inside`, the parameters of a scan's steps, that are another parameter in each direction.

    Those are the owned ones, and the shared ones that owned ones stand for, or all where each direction is a module.
    """
    separate = _is_separate(node, inside, name)
    return [
        item.name for item in inside
        if _within(name, item.name) in node.owned
        or (item.shared and (separate or _within(name, item.tied or "") in node.owned))
    ]  # fmt: skip


def _is_separate(node: ScanNode, inside: list[Named], name: str) -> bool:
    """Return whether a scan owns all parameters of its steps, so that each direction is a module."""
    return bool(node.owned) and node.owned == {_within(name, item.name) for item in inside if not item.shared}


def _in_direction(node: ScanNode, name: str, direction: str, item: Named) -> Named:
    own = join(direction, _within(name, item.name))
    parameter, tied = item.parameter, item.tied
    if own in node.starts:
        parameter = parameter._replace(init=node.starts[own])
    if tied and _within(name, tied) in node.owned:
        tied = join(name, direction, _within(name, tied))
    return item._replace(name=join(name, own), parameter=parameter, tied=tied)


def _from_owner(node: Node, name: str, item: Named) -> Named:
    """Return a parameter of a node as the one that the node shares in its place, if it does."""
    if source := node.shared.get(_within(name, item.name)):
        return item._replace(tied=owner_of(item.name, source), shared=True)
    if item.tied and (source := node.shared.get(_within(name, item.tied))):
        return item._replace(tied=owner_of(item.tied, source))
    return item


def _within(prefix: str, name: str) -> str:
    """Return a full name as it is inside `prefix`; empty where it is elsewhere."""
    return name[len(prefix) + 1 :] if prefix and name.startswith(f"{prefix}.") else "" if prefix else name


def count(graph: Graph, known: dict[int, int] | None = None, active: bool = False) -> int:
    """Return the number of parameters of a graph, counting tied and shared ones once.

    known: cached counts of bodies used by several layers. active: count only the experts selected per token.
    """
    known = {} if known is None else known
    if graph.like:
        return count(graph.like, known, active)
    if id(graph) not in known:
        known[id(graph)] = sum(count_node(node, known, active) for node in graph.nodes)
    return known[id(graph)]


def count_node(node: Node, known: dict[int, int] | None = None, active: bool = False) -> int:
    """Return the number of parameters of a node, counting tied and shared ones once."""
    if node.shared or (isinstance(node, ScanNode) and node.owned):
        return sum(item.parameter.numel for item in node_parameters(node, "", active=active) if item.tied is None)
    known = {} if known is None else known
    own = sum(p.numel for name, p in node.parameters.items() if name not in node.ties)
    return own + sum(count(body, known, active) for body in (node.active if active else node.bodies).values())
