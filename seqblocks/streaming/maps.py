"""Block-diagonal maps that the step reading them computes, so that its own products and theirs share a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from seqblocks.graph import Graph, Node
from seqblocks.op import Op


class Reader(NamedTuple):
    """A step whose inputs are all maps that nothing else reads, one for each port."""

    node: Node
    maps: list[Node]

    @property
    def sources(self) -> list[int]:
        """The values that the maps read, each once."""
        return [*dict.fromkeys(value for node in self.maps for value in node.reads)]

    def prepare(self, parameters: Callable[[Node], Mapping[str, Tensor]]) -> Callable[..., Any] | None:
        """Return a function for one token of the step and its maps, of the step's state and `sources`, or None."""
        maps, sources = [], self.sources
        for node in self.maps:
            blocks = node.op.block_weights(parameters(node)) if node.op else None
            if blocks is None:
                return None
            maps.append((*blocks, sources.index(node.reads[0])))
        assert self.node.op
        run: Callable[..., Any] | None = self.node.op.prepare_step_of_maps(parameters(self.node), maps)
        return run

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


def readers(body: Graph, nodes: Sequence[Node], is_plain: Callable[[Node], bool]) -> Iterator[Reader]:
    """Yield the steps among the nodes of a body that compute their inputs.

    is_plain: whether the module of a step is neither replaced nor observed.
    """
    used = Counter(value for node in body.nodes for value in node.reads) + Counter(body.results)
    made = {node.outputs[0]: node for node in nodes if used[node.outputs[0]] == 1 and _is_map(node)}
    for node in nodes:
        if node.op is None or type(node.op).prepare_step_of_maps is Op.prepare_step_of_maps or node.split:
            continue
        maps = [made[value] for value in node.reads if value in made]
        if len(maps) == len(node.reads) == len(node.op.ports) and all(map(is_plain, [node, *maps])):
            yield Reader(node, maps)


def _is_map(node: Node) -> bool:
    if node.op is None or type(node.op).block_weights is Op.block_weights:
        return False
    return not node.split and len(node.reads) == 1
