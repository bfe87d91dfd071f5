"""Invariants of every graph that the analysis returns."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.graph import Graph, ModelSpec


def verify(model: ModelSpec) -> None:
    """Check the invariants of a graph. Raises AssertionError, which indicates a bug."""
    found = list(graph.parameters(model.graph, shared=True))
    stored = {item.name for item in found if not item.shared}
    for item in found:
        assert not item.shared or item.tied in stored, f"{item.name} is shared with {item.tied}, which is not stored"
    _verify(model, model.graph, {model.graph.input})


def _verify(model: ModelSpec, body: Graph, known: set[int]) -> None:
    known = set(known) | {body.input} | set(body.ports.values())
    names: set[str] = set()
    for node in body.nodes:
        assert node.name not in names, f"two nodes are called {node.name}"
        names.add(node.name)
        for port, values in node.inputs.items():
            assert set(values) <= known, f"{node.name}.{port} reads a value that is not there yet"
        assert not set(node.outputs) & known, f"{node.name} writes a value twice"
        assert node.type is None or node.type.features > 0, f"{node.name} has no width"
        inside = set(known)
        for inner in node.bodies.values():
            assert set(inner.captures) <= inside, f"{node.name} captures a value that is not there"
            _verify(model, inner, inside)
            inside |= set(inner.exports)  # which later layers may read
        exported = {value for inner in node.bodies.values() for value in inner.exports}
        assert set(node.exports.values()) <= exported, f"{node.name} exports a value that its bodies do not return"
        known |= set(node.made)
    assert set(body.results) <= known, "a result is not a value of the graph"
