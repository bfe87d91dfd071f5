"""Find the context values that a stream keeps in its state: computed once, and read at each token."""

from __future__ import annotations

from seqblocks.graph import Graph, ModelSpec, Node, is_context, is_prefix_join
from seqblocks.state_layout import kept_state


def mark_kept(model: ModelSpec) -> None:
    """Mark the steps and inputs whose values a stream keeps, and declare them as state."""
    read = _Reads().of_body(model.graph)
    kept = {name: value for name, value in model.graph.ports.items() if value in read}
    model.graph.kept = {name: kept_state(wire) for name, value in kept.items() if (wire := model.types[value])}


class _Reads:
    """A walk over the bodies that read a streaming input; each is visited once."""

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}

    def of_body(self, body: Graph) -> set[int]:
        """Return the values that the steps of a body read at each token, and its results; mark the kept ones."""
        if id(body) not in self._known:
            read = set(body.results)
            for node in body.nodes:
                if not is_context(node):
                    read |= self.of_node(node)
            for node in body.nodes:
                if is_context(node) and not read.isdisjoint(node.outputs):
                    assert node.type
                    node.kept, node.state = True, {"output": kept_state(node.type)}
            self._known[id(body)] = read
        return self._known[id(body)]

    def of_node(self, node: Node) -> set[int]:
        """Return the outer values that a node reads at each token."""
        if is_prefix_join(node):
            return {node.inputs["x"][-1]}
        at_ports = {value for values in node.inputs.values() for value in values}
        if not node.bodies:
            return at_ports
        if node.kind == "block":
            body = node.bodies[""]
            read = self.of_body(body)
            ports = {"x": body.input, **body.ports}
            return {value for port, values in node.inputs.items() for value in values if ports[port] in read}
        inside = set[int]().union(*(self.of_body(body) for body in node.bodies.values()))
        return inside | (at_ports if node.kind in ("residual", "each") else set())
