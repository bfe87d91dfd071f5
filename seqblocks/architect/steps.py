"""The steps of a model as a tree without numbers of values: what two models are compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.descriptions.layer_wires import LayerWire, layer_wires
from seqblocks.graph import Graph, Node
from seqblocks.record import Record

PREVIOUS = "the step before"  # what a port reads unless the spec says otherwise


class Read(NamedTuple):
    """A wire that a port reads. names: by which it is known in the body. source: what makes it, as in `part 2 of qkv`;
    empty for an input of the body."""

    value: int
    names: frozenset[str]
    source: str


class Step(Record):
    """One step of a model.

    own: what defines the step itself, as texts by name: its arguments, the type of its output, the number of parts into
    which it is split (their widths if they differ), the shapes and the initialisers of its parameters. reads: the wires
    of each port. outputs: the names of the values that it makes, by their numbers. bodies: its own steps by namespace.
    params: of the step and its bodies.
    """

    name: str
    verb: str
    own: dict[str, str]
    reads: dict[str, tuple[Read, ...]]
    outputs: dict[int, str]
    bodies: dict[str, list[Step]]
    params: int
    named: bool  # whether its name is a part of names in state_dict

    def key(self) -> tuple[Any, ...]:
        """What equal steps have in common, whatever their names and the wires they read."""
        bodies = tuple((label, tuple(step.key() for step in steps)) for label, steps in self.bodies.items())
        return self.verb, tuple(self.own.items()), bodies

    def loose_key(self) -> tuple[Any, ...]:
        """The key without the types of outputs, which follow from the wires that are read."""
        bodies = tuple((label, tuple(step.loose_key() for step in steps)) for label, steps in self.bodies.items())
        return self.verb, tuple(item for item in self.own.items() if item[0] != "output"), bodies

    def from_layers(self) -> tuple[Any, ...]:
        """What the step, and those inside it, read from other layers."""
        own = [name for wires in self.reads.values() for wire in wires for name in wire.names if "." in name]
        return (*own, *(step.from_layers() for steps in self.bodies.values() for step in steps))


def steps_of(body: Graph, labels: dict[int, str]) -> list[Step]:
    """Return the steps of a model. labels: the names of all its values."""
    return _steps(body, _Names(labels, layer_wires(body, labels), "", {}))


class _Names(NamedTuple):
    """The names of values in a body: of all, and of those that other layers read. path: of the body. sources: what
    makes the values of the steps so far."""

    labels: Mapping[int, str]
    exports: Mapping[int, LayerWire]
    path: str
    sources: dict[int, str]

    def of(self, value: int) -> set[str]:
        wire = self.exports.get(value)
        other = wire.seen_from(self.path) if wire else ""
        return {other or self.labels[value]} if value in self.labels else set()


def _steps(body: Graph, names: _Names) -> list[Step]:
    steps, current = [], body.input
    for node in body.nodes:
        steps.append(_step(node, names._replace(path=graph.join(names.path, node.name)), current))
        current = node.outputs[0] if node.outputs else current
    return steps


def _step(node: Node, known: _Names, current: int) -> Step:
    def read(value: int) -> Read:
        own = known.of(value)
        names = frozenset(own | {PREVIOUS} if value == current else own)
        return Read(value, names, known.sources.get(value, ""))

    def inside(body: Graph, label: str) -> list[Step]:
        return _steps(body, known._replace(path=graph.join(known.path, label)))

    params = graph.count_node(node)
    reads = {port: tuple(map(read, values)) for port, values in node.inputs.items()}
    for part, value in enumerate(node.outputs, 1):
        known.sources[value] = f"part {part} of {node.name}" if node.split else f"the output of {node.name}"
    return Step(
        node.name, node.verb, dict(_own(node)), reads, {value: known.labels.get(value, "") for value in node.outputs},
        {label: inside(inner, label) for label, inner in node.bodies.items()},
        params, bool(params or node.shared),
    )  # fmt: skip


def _own(node: Node) -> Iterator[tuple[str, str]]:
    given = node.op or getattr(node, "arguments", None)  # a block has neither
    arguments = given.model_dump() if given else {}
    for name, value in arguments.items():
        if name != "steps" and (value is None or isinstance(value, str | int | float | list | tuple | dict)):
            yield name, _shown(value)
    if node.type is not None:
        yield "output", str(node.type)
    if node.split:
        yield "parts", str(len(node.split) if len({*node.split}) == 1 else [*node.split])
    for name, parameter in node.parameters.items():
        yield f"{name} shape" if name in arguments else name, str([*parameter.shape])
        yield f"initial {name}", str(parameter.init)
        if name in node.ties:
            yield f"{name} tied to", node.ties[name]
    if node.owner_name:
        yield "shares with", node.owner_name


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(each)}' for key, each in value.items())}}}"
    return str(value)


def lines(steps: list[Step], depth: int = 0) -> Iterator[str]:
    """Yield the steps as indented text, equal bodies of a step as one. It changes only where the model does."""
    space = "  " * depth
    for step in steps:
        title = step.name if step.name == step.verb else f"{step.name}: {step.verb}"
        own = "".join(f" {name}={value}" for name, value in step.own.items() if name != "output")
        reads = "".join(
            f" {port}<-{'+'.join(min(wire.names) for wire in wires)}" for port, wires in step.reads.items()
            if not all(PREVIOUS in wire.names for wire in wires)
        )  # fmt: skip
        named = ", ".join(step.outputs.values())
        output = step.own.get("output", "unknown") + f" as {named}" * (named not in (step.name, step.verb, ""))
        yield f"{space}{title}{own}{reads} -> {output}"
        for labels, body in _alike(step.bodies):
            if labels != [""]:
                yield f"{space}  {labels[0] if len(labels) == 1 else f'{labels[0]} to {labels[-1]}'}:"
            yield from lines(body, depth + 1 + (labels != [""]))


def _shape(item: tuple[str, list[Step]]) -> tuple[Any, ...]:
    return tuple((step.name, step.key(), step.from_layers()) for step in item[1])


def _alike(bodies: dict[str, list[Step]]) -> Iterator[tuple[list[str], list[Step]]]:
    """Yield runs of equal bodies by their namespaces."""
    for _, run in groupby(bodies.items(), _shape):
        same = list(run)
        yield [label for label, _ in same], same[0][1]
