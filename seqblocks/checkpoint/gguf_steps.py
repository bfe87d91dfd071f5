"""The steps of a language model in the order in which they are computed, to compare what two models compute."""

from __future__ import annotations

from typing import Any, NamedTuple

from seqblocks.errors import RunError, listing
from seqblocks.graph import BlockNode, Graph, ModelSpec, Node, OpNode, ParallelNode, RepeatNode, ResidualNode, join


class Step(NamedTuple):
    """A step of a model, with the blocks around it resolved.

    inputs, outputs: numbers of values, in the order in which they are computed. parameters: their full names.
    """

    name: str
    verb: str
    node: Node
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    parameters: dict[str, str]


class _Walk:
    """List the steps of a model, with values numbered in the order of execution.

    `identity` is no step. A block whose result is split is one, after its steps.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.count = 0

    def body(self, body: Graph, values: dict[int, int], prefix: str) -> int:
        """Add the steps of a body and return its result. values: the numbers of the values that it reads."""
        for node in body.nodes:
            name = join(prefix, node.name)
            inputs = tuple((port, tuple(values[at] for at in read)) for port, read in node.inputs.items())
            values.update(zip(node.outputs, self._outputs(node, inputs, values, name), strict=True))
        return values[body.result]

    def _outputs(self, node: Node, inputs: Any, values: dict[int, int], name: str) -> tuple[int, ...]:
        where = f"{name} ({node.span})"
        if node.shared or node.owner:
            raise RunError(f"{where} shares the parameters of another step")
        if node.exports:
            raise RunError(f"later steps read values inside {where}")
        if isinstance(node, OpNode):
            if node.verb == "identity" and not node.split:
                return dict(inputs)["x"][:1]
            return self._add(node, inputs, name)
        if isinstance(node, BlockNode):
            result = self.body(node.bodies[""], {inside: values[value] for value, inside in node.links}, name)
            return self._add(node, (("x", (result,)),), name) if node.split else (result,)
        if not isinstance(node, ResidualNode | RepeatNode | ParallelNode) or node.split:
            raise RunError(f"{where} is a `{node.verb}`")
        (at,) = dict(inputs)["x"]
        if isinstance(node, ParallelNode):
            if node.arguments.merge != "concat":
                raise RunError(f"{where} merges by {node.arguments.merge}")
            results = tuple(
                self.body(inner, values | {inner.input: at}, join(name, label)) for label, inner in node.bodies.items()
            )
            return self._add(node, (("x", results),), name)
        if isinstance(node, ResidualNode):
            (inner,) = node.bodies.values()
            result = self.body(inner, values | {inner.input: at}, name)
            return self._add(node, (("x", (at, result)),), name)
        for label, inner in node.bodies.items():
            at = self.body(inner, values | {inner.input: at}, join(name, label))
        return (at,)

    def _add(self, node: Node, inputs: Any, name: str) -> tuple[int, ...]:
        outputs = tuple(range(self.count + 1, self.count + 1 + len(node.outputs)))
        self.count += len(outputs)
        parameters = {own: join(name, own) for own in node.parameters}
        self.steps.append(Step(name, _verb(node), node, inputs, outputs, parameters))
        return outputs


def _verb(node: Node) -> str:
    return node.op.verb if node.op else node.kind


def steps_of(model: ModelSpec) -> list[Step]:
    """Return the steps of a language model. Raises RunError for a step that no architecture has."""
    if len(model.inputs) > 1 or len(model.graph.results) > 1 or model.input.kind != "tokens":
        raise RunError("it is not a language model with one input of tokens and one output of logits")
    walk = _Walk()
    walk.body(model.graph, {model.graph.input: 0}, "")
    return walk.steps


def difference(ours: list[Step], theirs: list[Step]) -> str | None:
    """Return where two models whose steps have the same verbs compute different functions, or None."""
    for mine, other in zip(ours, theirs, strict=True):
        where = f"{mine.name} ({mine.node.span})"
        if mine.node.op is not None and mine.node.op != other.node.op:
            pairs = [(name, value, getattr(other.node.op, name)) for name, value in mine.node.op]
            changed = [f"{name} is {value}, not {usual}" for name, value, usual in pairs if value != usual]
            return f"{where}: {listing(changed)}"
        if mine.node.split != other.node.split:
            return f"{where}: its output is split into {list(mine.node.split)}, not {list(other.node.split)}"
        if (mine.inputs, mine.outputs) != (other.inputs, other.outputs):
            return f"{where} reads other values"
    return None
