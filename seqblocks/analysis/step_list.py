"""List the steps of an analysed model by their place in the file, also if the spec has faults."""

from __future__ import annotations

from typing import Any

from seqblocks import graph
from seqblocks.cost import count_state, node_macs
from seqblocks.errors import Span
from seqblocks.record import Record


class LocatedStep(Record):
    """One step as it is written: a step in a `repeat` or a block is one place in the file and many nodes.

    span: of the verb. path: of the first node, in the names of the state_dict. type: of its output as text, None if it
    is unknown after a fault. params, macs (per token) and state (elements per sequence): of the first node; None if
    unknown. times: number of nodes. varies: whether the types or the counts of the nodes differ.
    """

    span: Span
    path: str
    verb: str
    type: str | None
    params: int | None
    macs: float | None
    state: int | None
    times: int = 1
    varies: bool = False

    def as_data(self) -> dict[str, Any]:
        """Return the step as plain data."""
        keys = ("path", "verb", "type", "params", "macs", "state", "times", "varies")
        return {key: getattr(self, key) for key in keys} | {"range": self.span.as_data()}


def list_steps(body: graph.Graph, tokens: int | None) -> list[LocatedStep]:
    """Return the steps of a body and of all bodies inside it, in execution order."""
    found: dict[Span, LocatedStep] = {}
    figures: dict[int, _Figures] = {}
    for path, node in graph.walk_named(body):
        if id(node) not in figures:
            figures[id(node)] = _figures(node, tokens)
        own = figures[id(node)]
        step = found.get(node.span)
        if step is None:
            found[node.span] = LocatedStep(node.span, path, node.verb, *own)
        else:
            step.times += 1
            step.varies |= (step.type, step.params, step.macs, step.state) != own
    return list(found.values())


_Figures = tuple[str | None, int | None, float | None, int | None]


def _figures(node: graph.Node, tokens: int | None) -> _Figures:
    kind = str(node.type) if node.type else None
    if not all(inner.type for inner in graph.walk(graph.Graph(0, [node], 0))):
        return kind, None, None, None
    state = sum(each.numel for each in node.state.values()) + sum(map(count_state, node.bodies.values()))
    return kind, graph.count_node(node), node_macs(node, tokens), state
