"""Block-diagonal maps that the step reading them computes, so that its own products and theirs share a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from seqblocks.graph import Graph, Node, OpNode
from seqblocks.token_function import TokenFunction


class Reader(NamedTuple):
    """A step whose inputs are all maps that nothing else reads, one for each port."""

    node: OpNode
    maps: list[OpNode]

    @property
    def sources(self) -> list[int]:
        """The values that the maps read, each once."""
        return [*dict.fromkeys(value for node in self.maps for value in node.reads)]

    def prepare(self, function: Callable[[OpNode], TokenFunction | None]) -> TokenFunction | None:
        """Return a function for one token of the step and its maps, of the step's state and `sources`, or None.

        function: returns that of a node.
        """
        reader = function(self.node)
        if reader is None or reader.of_maps is None:
            return None
        maps, sources = [function(node) for node in self.maps], self.sources
        blocks = [(*made.blocks, sources.index(node.reads[0])) for made, node in zip(maps, self.maps, strict=True)
                  if made and made.blocks]
        return reader.of_maps(blocks) if len(blocks) == len(maps) else None

    def of_several(self, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """Return a function like that of `prepare` for several tokens, made of those of the step and of its maps.

        All take the batch, then the state and the inputs.
        """
        cell, *maps = functions
        count, read = len(self.node.state), [self.sources.index(node.reads[0]) for node in self.maps]

        def several(batch: int, *given: Tensor) -> Any:
            sources = given[count:]
            inputs = (each(batch, sources[at]) for each, at in zip(maps, read, strict=True))
            return cell(batch, *given[:count], *inputs)

        return several


def readers(body: Graph, nodes: Sequence[Node], is_plain: Callable[[OpNode], bool]) -> Iterator[Reader]:
    """Yield the steps among the nodes of a body that may compute their inputs.

    is_plain: whether the module of a step is neither replaced nor observed.
    """
    used = Counter(value for node in body.nodes for value in node.reads) + Counter(body.results)
    ops = [node for node in nodes if isinstance(node, OpNode) and not node.split]
    made = {node.outputs[0]: node for node in ops if used[node.outputs[0]] == 1 and _may_be_map(node)}
    for node in ops:
        if not node.state or len(node.reads) < len(node.op.ports):
            continue
        maps = [made[value] for value in node.reads if value in made]
        if len(maps) == len(node.reads) == len(node.op.ports) and all(map(is_plain, [node, *maps])):
            yield Reader(node, maps)


def _may_be_map(node: OpNode) -> bool:
    return not node.state and len(node.reads) == 1 and bool(node.parameters)
