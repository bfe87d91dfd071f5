"""Name the wires that steps read from layers of a repeat, as a spec may write them: `layers[-1].v`, `blocks.0.v`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from seqblocks import graph
from seqblocks.graph import Graph, RepeatNode


class LayerWire(NamedTuple):
    """A wire of a layer: the name of the repeat, the number of the layer, and the label of the wire.

    entered: the numbers of the layers whose input it is.
    """

    repeat: str
    layer: int
    label: str
    entered: frozenset[int]

    def seen_from(self, path: str) -> str:
        """Return the wire as a step at this path may name it; empty if it is one of its layer, or the layer's input."""
        parts = path.split(".")
        at = parts.index(self.repeat) + 1 if self.repeat in parts else len(parts)
        if at == len(parts):
            return f"{self.repeat}.{self.layer}.{self.label}"
        here = int(parts[at])
        away = 0 if here in self.entered else self.layer - here
        return f"layers[{away}].{self.label}" if self.layer and away else f"layers.0.{self.label}" if away else ""


def layer_wires(body: Graph, labels: Mapping[int, str]) -> dict[int, LayerWire]:
    """Return the values of layers that steps of other layers, or after the repeat, read."""
    found: dict[int, LayerWire] = {}
    for node in (each for inner in graph.bodies(body) for each in inner.nodes if isinstance(each, RepeatNode)):
        inputs = {int(label): layer.input for label, layer in node.bodies.items()}
        for label, layer in node.bodies.items():
            for value in layer.exports:
                name = "input" if value == layer.input else labels.get(value, "?")
                entered = frozenset(number for number, each in inputs.items() if each == value)
                found.setdefault(value, LayerWire(node.name, int(label), name, entered))
    return found
