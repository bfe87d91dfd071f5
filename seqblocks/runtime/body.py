"""The module of a body of steps: it calls its children in order, each with the values that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from seqblocks import graph
from seqblocks.graph import BlockNode, Graph, Node, is_context, is_prefixed, spent_values
from seqblocks.roles import may_be_matrix
from seqblocks.runtime import fusion, long_sequences, residual_sums
from seqblocks.runtime.call import Call
from seqblocks.runtime.fusion import Following, Fused
from seqblocks.runtime.modules import (
    Place,
    StepModule,
    call_child,
    draws_now,
    is_hooked,
    is_linear,
    make,
    makes,
    take_exports,
)
from seqblocks.runtime.primitive import Primitive, compute
from seqblocks.runtime.residual_sums import Ends
from seqblocks.runtime.torch_modules import is_built
from seqblocks.state import States, compact


class Planned(NamedTuple):
    """A node as run by a body.

    spent: the values that no later step reads, so that their memory can be freed. once: whether the node depends on the
    context only, in a body that also reads the stream. is_split_map: whether it may be a matrix whose output is split.
    """

    node: Node
    name: str
    reads: tuple[int, ...]
    axis: int  # axis along which the output is split
    spent: tuple[int, ...]
    once: bool
    is_split_map: bool


class Group(NamedTuple):
    """A step, or several that one kernel computes together unless hooks observe them."""

    steps: tuple[Planned, ...]
    fused: Fused | None = None


def _plan(body: Graph, place: Place) -> list[Group]:
    reads = [node.reads for node in body.nodes]
    steps = [planned(*each, place) for each in zip(body.nodes, reads, spent_values(body, reads), strict=True)]
    fused = {at: found for at, found in fusion.find(body, place.types).items() if not steps[at].once}
    return list(_grouped(steps, fused))


def planned(node: Node, reads: tuple[int, ...], spent: list[int], place: Place) -> Planned:
    axis = node.type.feature_axis if node.split and node.type else -1
    split_map = bool(node.split) and axis == -1 and node.op is not None and may_be_matrix(node.op)
    return Planned(node, node.name, reads, axis, tuple(spent), place.streams and is_context(node), split_map)


def _grouped(steps: list[Planned], fused: dict[int, Fused]) -> Iterator[Group]:
    at = 0
    while at < len(steps):
        found = fused.get(at)
        end = at + (len(found.nodes) if found else 1)
        yield Group(tuple(steps[at:end]), found)
        at = end


class Phases(NamedTuple):
    """The steps of a body with context, divided into those that run once in a stream and those that run at each token.

    Steps on a prefix are in both: they run once on it, and then at each token with the state that it leaves.

    kept: the steps that run once and whose output the others read. values: all values that steps read, and the results.
    """

    context: list[Group]
    stream: list[Group]
    kept: list[Planned]
    values: frozenset[int]


def _phases(body: Graph, plan: list[Group]) -> Phases:
    steps = [step for group in plan for step in group.steps]
    once = [Group((step,)) for step in steps if step.once or is_prefixed(step.node) or _runs_inside_once(step.node)]
    stream = [group for group in plan if not group.steps[0].once]
    values = frozenset([*body.results, *(value for step in steps for value in step.reads)])
    kept = [step._replace(spent=()) for step in steps if step.once and step.node.kept]
    return Phases(once, stream, kept, values)


def _runs_inside_once(node: Node) -> bool:
    """Return whether a step that reads the stream contains steps on the context only, or on a prefix."""
    return any(is_context(each) or is_prefixed(each) for body in node.bodies.values() for each in graph.walk(body))


def first_of_tail(plan: list[Group]) -> str | None:
    """Return the name of the first of the final steps that compute each token separately, such as a head."""
    first = None
    for group in reversed(plan):
        op = group.steps[0].node.op
        if len(group.steps) > 1 or op is None or op.reads != "token" or group.steps[0].node.state:
            break
        first = group.steps[0].name
    return first


def tail_of(module: nn.Module) -> str | None:
    """Return the name of the first of a model's steps that compute only the last token of a prompt."""
    return getattr(module, "_first_of_tail", None)


def _last_token(x: Any) -> Any:
    return x if x is None else residual_sums.added_up(x)[:, -1:]


class Body(StepModule):
    """Run the nodes of a graph in order. Children have the names of the nodes."""

    _first_of_tail: str | None = None  # with `last_only`, this step and later ones compute only the last token
    _timed: frozenset[int] = frozenset()  # values with one token for each token of the input

    def __init__(self, body: Graph, place: Place, label: str) -> None:
        super().__init__()
        self._label, self._reads, self._result = label, body.reads, body.result
        self._outputs, self._arity, self._exports = body.outputs, len(body.reads), body.exports
        for node in body.nodes:
            # add_module rejects names of nn.Module's attributes; the analysis has already rejected those that clash
            self._modules[node.name] = make(node, place.at(node))
        self._plan = _plan(body, place)
        fused = [group for group in self._plan if group.fused]
        self._ends = Ends(body, {step.name for group in fused for step in group.steps})
        self._phases = _phases(body, self._plan) if place.streams else None
        self._in_chunks = long_sequences.find(body, place)

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        return self._run(dict(zip(self._reads, tensors, strict=True)), call)

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Any, States]:
        """Run the body on an input that may be a `Sum`. leaves: the result may be one too."""
        first, *others = inputs
        first = first if self._ends.input else residual_sums.added_up(first)
        values = dict(zip(self._reads, [first, *others], strict=True))
        return self._run(values, call, ends=self._ends, leaves=leaves)

    def _forward_with(self, tensors: list[Tensor], call: Call, following: Following) -> tuple[Tensor, States]:
        """Run the body, with its last step fused with the steps that follow the body."""
        return self._run(dict(zip(self._reads, tensors, strict=True)), call, following)

    def _run(
        self, values: dict[int, Any], call: Call, following: Following | None = None, ends: Ends | None = None,
        leaves: bool = False,
    ) -> tuple[Any, States]:
        """Return the result, a dict where the outputs have names, and the states.

        values: the values that the body reads, by number; the dict is modified. ends: the steps that accept or return a
        `Sum`; leaves: whether the result may be one.
        """
        if not call.compiling and self._in_chunks and not following and len(values) == 1:
            done = self._run_in_chunks(values, call)
            if done is not None:
                return done
        return self._run_at_once(values, call, following, ends, leaves)

    def _run_at_once(
        self, values: dict[int, Any], call: Call, following: Following | None = None, ends: Ends | None = None,
        leaves: bool = False,
    ) -> tuple[Any, States]:
        """Run all steps once, with the arguments and results of `_run`."""
        states: States = {}
        if ends is None and self._ends.leaves and residual_sums.has_fused_norm(values, call):
            ends = self._ends
        opened = ends.leaves if ends else ()
        plan = self._begin_phase(values, call, states) if call.phase else self._plan
        last = plan[-1].steps[0].name if following else ""
        for group in plan:
            if call.last_only and group.steps[0].name == self._first_of_tail:
                values.update({value: _last_token(values[value]) for value in self._timed & values.keys()})
            if group.fused and self._is_unobserved(group):
                self._run_fused(group, group.fused, values, states, call)
                continue
            for step in group.steps:
                if step.once:
                    self._run_once(step, values, states, call)
                    continue
                child, inputs, inner = self._modules[step.name], [values[v] for v in step.reads], call.into(step.name)
                if following and group.steps[0].name == last:
                    y, state = child._forward_with(inputs, inner, following)  # type: ignore[operator,union-attr]
                elif step.name in opened:
                    ending = self._ends.leaves[step.name] or (leaves and step.name == self._ends.last)
                    y, state = residual_sums.call_open(child, inputs, inner, step.name, step.node, ending)
                elif (step.is_split_map or is_linear(child)) and not call.compiling and self._is_unobserved(group):
                    y, state = compute(child, inputs, inner, step.node.split), {}
                else:
                    y, state = call_child(child, inputs, inner, step.name, step.node)
                if state:
                    states[step.name] = state
                add_exports(step, values, inner)
                store(step, y, values)
        return self._results(values, call), states

    def _results(self, values: dict[int, Any], call: Call) -> Any:
        """Return the result, or the outputs by name; put what steps outside read into the call."""
        if self._exports:
            call.exports = {value: values[value] for value in self._exports}
        if self._outputs:
            return {name: values[value] for name, value in self._outputs.items()}
        return values[self._result]

    def _run_in_chunks(self, values: dict[int, Any], call: Call) -> tuple[Any, States] | None:
        """Return the result of `_run` for a long sequence, or None if it is to run at once."""
        assert self._in_chunks
        (value, x), = values.items()
        if not isinstance(x, Tensor) or not (size := self._in_chunks.size(x, call)):
            return None
        if self._in_chunks.draws and draws_now(self):
            return None
        if not self._is_all_unobserved():
            return None
        return long_sequences.run(x, size, call, lambda chunk, inner: self._run_at_once({value: chunk}, inner))

    def _begin_phase(self, values: dict[int, Any], call: Call, states: States) -> list[Group]:
        """Return the steps to run in a phase of a stream. Values of the other phase are set to None, unless kept."""
        assert self._phases is not None
        assert call.phase is not None
        for value in self._phases.values:
            values.setdefault(value, None)
        if call.phase == "context":
            return self._phases.context
        for step in self._phases.kept:
            assert call.state is not None
            states[step.name] = kept = call.state[step.name]
            values.update((value, kept[part]) for part, value in step.node.kept_exports.items())
            store(step, kept["output"], values)
        return self._phases.stream

    def _run_once(self, step: Planned, values: dict[int, Any], states: States, call: Call) -> None:
        """Run a step that depends on the context only."""
        inputs = [values[v] for v in step.reads]
        inner = call.for_context()
        y, _ = call_child(self._modules[step.name], inputs, inner, step.name, step.node)
        add_exports(step, values, inner)
        if step.node.kept and call.phase:
            parts = {"output": y} | {part: values[value] for part, value in step.node.kept_exports.items()}
            states[step.name] = {part: compact(x) for part, x in parts.items()}
        store(step, y, values)

    def _is_unobserved(self, group: Group) -> bool:
        """Return whether the steps of a group are unmodified and have no hooks."""
        if nn.modules.module._has_any_global_hook():
            return False
        return all(_is_as_built(self._modules[step.name], step.node) for step in group.steps)

    def _is_all_unobserved(self) -> bool:
        """Return whether all steps, also those in blocks, are unmodified and have no hooks."""
        blocks = (child for child in self._modules.values() if isinstance(child, Body))
        return all(map(self._is_unobserved, self._plan)) and all(block._is_all_unobserved() for block in blocks)

    def _run_fused(
        self, group: Group, fused: Fused, values: dict[int, Tensor], states: States, call: Call
    ) -> None:
        """Run the steps of a group by one kernel. Only the first of them may have a state."""
        first, *others = group.steps
        parts: list[fusion.FusedStep] = []
        for step in others:
            _, *reads = step.reads  # the main input is the output of the previous step
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
            store(step, y, values)

    def _get_name(self) -> str:
        return self._label


def add_exports(step: Planned, values: dict[int, Any], call: Call) -> None:
    """Add the values inside a step that later steps read. call: the one that the step has just had."""
    if step.node.exports:
        values.update(take_exports(call, step.node.exports, step.name))


def store(step: Planned, y: Any, values: dict[int, Tensor]) -> None:
    """Store the output of a step, or the list of its parts, and delete the values that no later step reads."""
    node = step.node
    if node.split and y is None:  # not yet computed
        values.update(dict.fromkeys(node.outputs, y))  # type: ignore[arg-type]
    elif node.split:
        separate = y if isinstance(y, list) else y.split(node.split, step.axis)
        values.update(zip(node.outputs, separate, strict=True))
    else:
        values[node.outputs[0]] = y
    for value in step.spent:
        values.pop(value, None)


def _is_as_built(module: nn.Module | None, node: Node) -> bool:
    """Return whether a module, and a block's last step, is the one that was built and has no hooks."""
    while type(module) is Block and not is_hooked(module):
        if not (nodes := node.bodies[""].nodes):
            return True
        node = nodes[-1]
        module = module._modules[node.name]
    return is_built(module) and type(module.op) is type(node.op) and not is_hooked(module)


@makes(BlockNode)
class Block(Body):
    """A block defined in YAML."""

    def __init__(self, node: BlockNode, place: Place) -> None:
        super().__init__(node.bodies[""], place, node.verb)
