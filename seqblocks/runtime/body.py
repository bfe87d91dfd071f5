"""A body of steps as a module: it calls its children in order, each with the values that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from seqblocks.graph import Graph, Node
from seqblocks.runtime import fusion
from seqblocks.runtime.call import Call
from seqblocks.runtime.fusion import Following, Fused
from seqblocks.runtime.primitive import Primitive
from seqblocks.runtime.step import Place, StepModule, call_child, is_hooked, make, makes
from seqblocks.state import States
from seqblocks.types import Wire


class Planned(NamedTuple):
    """A node as a body runs it. `spent`: the values that no later step reads, so that their memory can be freed."""

    node: Node
    name: str
    reads: tuple[int, ...]
    axis: int  # along which the output is split
    spent: tuple[int, ...]


class Group(NamedTuple):
    """A step, or several that one kernel computes together where nobody observes them."""

    steps: tuple[Planned, ...]
    fused: Fused | None = None


def _plan(body: Graph, types: dict[int, Wire | None]) -> list[Group]:
    reads = [node.reads for node in body.nodes]
    steps = [
        Planned(node, node.name, values, node.type.feature_axis if node.split and node.type else -1, tuple(spent))
        for node, values, spent in zip(body.nodes, reads, _spent(body, reads), strict=True)
    ]
    return list(_grouped(steps, fusion.find(body, types)))


def _grouped(steps: list[Planned], fused: dict[int, Fused]) -> Iterator[Group]:
    at = 0
    while at < len(steps):
        found = fused.get(at)
        end = at + (len(found.nodes) if found else 1)
        yield Group(tuple(steps[at:end]), found)
        at = end


def _spent(body: Graph, reads: list[tuple[int, ...]]) -> list[list[int]]:
    """For each node, the values that are not read after it."""
    last: dict[int, int] = {}
    for at, (node, values) in enumerate(zip(body.nodes, reads, strict=True)):
        last |= dict.fromkeys((*values, *node.outputs), at)
    last.pop(body.result, None)
    spent: list[list[int]] = [[] for _ in body.nodes]
    for value, at in last.items():
        spent[at].append(value)
    return spent


class Body(StepModule):
    """Runs the nodes of a graph in order. Children carry the nodes' names."""

    def __init__(self, body: Graph, place: Place, label: str) -> None:
        super().__init__()
        self._label, self._reads, self._result = label, body.reads, body.result
        for node in body.nodes:
            # add_module would refuse names that nn.Module has; the analysis has refused those that matter
            self._modules[node.name] = make(node, place.at(node.name))
        self._plan = _plan(body, place.types)

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        return self._run(dict(zip(self._reads, tensors, strict=True)), call)

    def _forward_with(self, tensors: list[Tensor], call: Call, following: Following) -> tuple[Tensor, States]:
        """Run the body, its last step together with the steps that follow the body."""
        return self._run(dict(zip(self._reads, tensors, strict=True)), call, following)

    def _run(
        self, values: dict[int, Tensor], call: Call, following: Following | None = None
    ) -> tuple[Tensor, States]:
        """Return the result and the states. `values` holds what the body reads, by number, and is used up."""
        states: States = {}
        last = self._plan[-1] if following else None
        for group in self._plan:
            if group.fused and self._is_unobserved(group):
                self._run_fused(group, group.fused, values, states, call)
                continue
            for step in group.steps:
                child, inputs, inner = self._modules[step.name], [values[v] for v in step.reads], call.into(step.name)
                if following and group is last:
                    y, state = child._forward_with(inputs, inner, following)  # type: ignore[operator,union-attr]
                else:
                    y, state = call_child(child, inputs, inner, step.name, step.node)
                if state:
                    states[step.name] = state
                _store(step, y, values)
        return values[self._result], states

    def _is_unobserved(self, group: Group) -> bool:
        """Whether the steps of a group are those that were built, without hooks."""
        if nn.modules.module._has_any_global_hook():
            return False
        return all(_is_as_built(self._modules[step.name], step.node) for step in group.steps)

    def _run_fused(
        self, group: Group, fused: Fused, values: dict[int, Tensor], states: States, call: Call
    ) -> None:
        """Run the steps of a group by one kernel. Only the first of them may have a state."""
        first, *others = group.steps
        parts: list[fusion.Part] = []
        for step in others:
            _, *reads = step.reads  # the main input is what the step before it makes
            child = self._modules[step.name]
            assert isinstance(child, Primitive)
            parts.append((child.op, child.parameters_by_name(call), [None, *(values[v] for v in reads)]))
        module = self._modules[first.name]
        inputs = [values[v] for v in first.reads]
        y, state = module._forward_with(  # type: ignore[operator,union-attr]
            inputs, call.into(first.name), Following(fused.run, parts)
        )
        if state:
            states[first.name] = state
        for step in group.steps:
            _store(step, y, values)

    def _get_name(self) -> str:
        return self._label


def _store(step: Planned, y: Tensor, values: dict[int, Tensor]) -> None:
    """Note a step's output among the values, and forget those that no later step reads."""
    node = step.node
    if node.split:
        values.update(zip(node.outputs, y.split(node.split, step.axis), strict=True))
    else:
        values[node.outputs[0]] = y
    for value in step.spent:
        values.pop(value, None)


def _is_as_built(module: nn.Module | None, node: Node) -> bool:
    """Whether a module, and the last step of a block, is the one that was built and has no hooks."""
    while type(module) is Block and not is_hooked(module):
        node = node.bodies[""].nodes[-1]
        module = module._modules[node.name]
    return type(module) is Primitive and type(module.op) is type(node.op) and not is_hooked(module)


@makes("block")
class Block(Body):
    """A block that somebody defined in YAML."""

    def __init__(self, node: Node, place: Place) -> None:
        super().__init__(node.bodies[""], place, node.verb)
