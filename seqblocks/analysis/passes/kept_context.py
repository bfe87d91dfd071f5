"""Find the context values that a stream keeps in its state: computed once, and read at each token."""

from __future__ import annotations

from collections.abc import Collection

from seqblocks import graph
from seqblocks.graph import Graph, ModelSpec, Node, is_context, is_prefix_join
from seqblocks.state_layout import kept_state


def mark_kept(model: ModelSpec) -> None:
    """Mark the steps and inputs whose values a stream keeps, and declare them as state."""
    read = _Reads(model).of_body(model.graph)
    kept = {name: value for name, value in model.graph.ports.items() if value in read}
    model.graph.kept = {name: kept_state(wire) for name, value in kept.items() if (wire := model.types[value])}


class _Reads:
    """A walk over the bodies that read a streaming input; each is visited once."""

    def __init__(self, model: ModelSpec) -> None:
        self._types = model.types
        self._known: dict[int, set[int]] = {}

    def of_body(self, body: Graph, later: Collection[int] = ()) -> set[int]:
        """Return the values that the steps of a body read at each token, and its results; mark the kept ones.

        later: the values that steps outside the body, after it, read at each token.
        """
        if id(body) not in self._known:
            read = {body.result, *body.outputs.values(), *(value for value in body.exports if value in later)}
            for node in reversed(body.nodes):
                if not is_context(node):
                    read |= self.of_node(node, read)
            for node in body.nodes:
                if is_context(node) and not read.isdisjoint(node.made):
                    self._keep(node, read)
            self._known[id(body)] = read
        return self._known[id(body)]

    def _keep(self, node: Node, read: Collection[int]) -> None:
        assert node.type
        node.kept, node.state = True, {"output": kept_state(node.type)}
        for at, value in enumerate(node.exports):
            wire = self._types[value]
            if value in read and wire:
                node.state[f"wire_{at}"] = kept_state(wire)

    def of_node(self, node: Node, later: Collection[int]) -> set[int]:
        """Return the outer values that a node reads at each token. later: those that steps after it read."""
        if is_prefix_join(node):
            return {node.inputs["x"][-1]}
        at_ports = {*node.at_ports}
        if not node.bodies or isinstance(node, graph.ChooseNode):
            return at_ports
        if isinstance(node, graph.BlockNode):
            body = node.bodies[""]
            read = self.of_body(body, body.exports)  # other uses of the block may need them
            return {value for value, number in node.links if number in read}
        inside = set[int]()
        for body in reversed(node.bodies.values()):
            inside |= self.of_body(body, {*later, *inside})
        return inside | (at_ports if isinstance(node, graph.ResidualNode | graph.EachNode) else set())
