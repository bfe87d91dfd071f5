"""Steps of a body that one call may compute. They are found in time that grows with the number of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from seqblocks.graph import Node, OpNode
from seqblocks.kernels.joined import Matrix


class Together:
    """The steps of a body, and those that one call may compute with an earlier one.

    nodes: all steps, by the value that each makes. products: linear maps of one input, by the value that the first of
    them makes.
    """

    def __init__(
        self, nodes: Sequence[Node], known: Collection[int], matrix: Callable[[OpNode], Matrix | None],
        joins: Callable[[OpNode], Hashable | None],
    ) -> None:
        """known: the values of the body's inputs. matrix: the map of a step, None for others. joins: equal for steps
        that can run as one on their joined features, None for others.
        """
        self.nodes = {node.outputs[0]: node for node in nodes}
        self._places = {made: place for place, made in enumerate(self.nodes)}
        ops = [node for node in nodes if isinstance(node, OpNode) and not node.split]
        self.products = {found[0][0].outputs[0]: found for found in _of_one_input(ops, matrix)}
        keys = ((node.outputs[0], joins(node)) for node in ops if node.op.joins_features)
        self._keys = {value: key for value, key in keys if key is not None}
        self._ready = defaultdict[Hashable, dict[int, OpNode]](dict)  # steps whose inputs are computed
        self._missing = {made: {*self.nodes[made].reads}.difference(known) for made in self._keys}
        self._waiting = defaultdict[int, list[int]](list)  # by the value that they wait for
        for made, missing in self._missing.items():
            for value in missing:
                self._waiting[value].append(made)
            if not missing:
                self._note_ready(made)

    def note(self, computed: Iterable[int]) -> None:
        """Note that values are computed."""
        for value in computed:
            if value in self._keys:
                self._ready[self._keys[value]].pop(value, None)
            for made in self._waiting.pop(value, ()):
                self._missing[made].remove(value)
                if not self._missing[made]:
                    self._note_ready(made)

    def joined(self, node: Node) -> list[OpNode]:
        """Return the steps to join with a step that is next, itself included, in their order."""
        ready = self._ready.get(self._keys.get(node.outputs[0]), {})
        return [ready[made] for made in sorted(ready, key=self._places.__getitem__)]

    def cannot_join(self, node: Node) -> None:
        """Note that the steps to join with a step cannot run as one."""
        self._ready[self._keys[node.outputs[0]]].clear()

    def _note_ready(self, made: int) -> None:
        node = self.nodes[made]
        assert isinstance(node, OpNode)
        self._ready[self._keys[made]][made] = node


def _of_one_input(
    ops: Sequence[OpNode], matrix: Callable[[OpNode], Matrix | None]
) -> Iterator[list[tuple[OpNode, Matrix]]]:
    """Yield the steps that multiply the same input by a matrix, with their matrices."""
    readers = defaultdict[tuple[int, ...], list[OpNode]](list)
    for node in ops:
        readers[node.reads].append(node)
    for nodes in readers.values():
        found = [(node, made) for node in nodes if (made := matrix(node))] if len(nodes) > 1 else []
        if len(found) > 1:
            yield found
