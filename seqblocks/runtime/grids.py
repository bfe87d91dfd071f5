"""Where the rows and columns of tokens come from: an input of the model, or a step that cuts an image into tokens."""

from __future__ import annotations

from collections.abc import Mapping

from seqblocks.graph import BlockNode, Graph, Node, ParallelNode, RepeatNode, ScanNode, moves_tokens
from seqblocks.roles import makes_grid
from seqblocks.types import Wire

Types = Mapping[int, Wire | None]


def grid_sources(body: Graph, types: Types) -> dict[int, int]:
    """Map each value whose tokens have rows and columns to the value that its grid comes from.

    Values whose grid has more than one source are left out.
    """
    found = {value: value for value in body.reads if has_grid(types.get(value))}
    _trace(body, types, found)
    return found


def has_grid(wire: Wire | None) -> bool:
    """Return whether a value is a sequence of tokens with rows and columns."""
    return wire is not None and wire.grid is not None and wire.kind != "image"


def is_moved(node: ScanNode) -> bool:
    """Return whether a scan reads the tokens of an image in another order than row by row."""
    return any(map(moves_tokens, node.arguments.orders))


def _trace(body: Graph, types: Types, found: dict[int, int]) -> None:
    for node in body.nodes:
        for inner in node.bodies.values():
            if isinstance(node, BlockNode):  # other bodies use the value numbers of the enclosing body
                found |= {value: found[outer] for outer, value in node.links if outer in found}
            _trace(inner, types, found)
        found |= {value: found[inside] for value, inside in node.exports.items() if inside in found}
        source = _source(node, found)
        if source is not None:
            found |= {value: source for value in node.outputs if has_grid(types.get(value))}


def _source(node: Node, found: dict[int, int]) -> int | None:
    """Return the value that the grid of a step's output comes from, or None."""
    if node.op and makes_grid(node.op):
        return node.outputs[0]
    results = [found.get(body.result) for body in node.bodies.values()]
    if results and (isinstance(node, BlockNode | RepeatNode) or (isinstance(node, ScanNode) and not is_moved(node))):
        return results[-1]
    if isinstance(node, ParallelNode):
        return results[0] if len(set(results)) == 1 else None
    return next((found[value] for value in node.reads if value in found), None)
