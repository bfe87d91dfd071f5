"""Format the typed graph as text, one line per step, as printed by `seqblocks show --stage graph`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from seqblocks import graph
from seqblocks.analysis.passes import lookahead
from seqblocks.combinators import Order
from seqblocks.errors import visible
from seqblocks.graph import Graph, ModelSpec, Node

DIRECTIONS = frozenset(map(graph.direction_name, get_args(Order)))  # no step has such a name

Notes = dict[str, str]  # text appended to the line of a step or a parameter, by its path


def text(model: ModelSpec) -> str:
    """Return the listing: values by number, shapes, parameters and their initialisers.

    The rate of a wire is shown if it is not 1, its lookahead if it is not 0.
    """
    body = model.graph
    values = dict(zip(model.inputs, (body.input, *body.ports.values()), strict=False)) or {"": body.input}
    inputs = (_input(name, value, model) for name, value in values.items())
    head = f"{visible(model.name)}: {', '.join(inputs)}"
    ahead = {path: found.tokens for path, found in lookahead.by_step(model).items()}
    notes = {path: f", lookahead {lookahead.shown(tokens)}" for path, tokens in ahead.items() if tokens}
    shared = (item for item in graph.parameters(model.graph, shared=True) if item.shared)
    notes |= {_without_directions(item.name): f" = {_without_directions(str(item.tied))}" for item in shared}
    return "\n".join([head, *_body(model.graph, notes, "", "  ")])


def _without_directions(name: str) -> str:
    """Remove scan directions from the name of a parameter, since the steps of a scan are listed once."""
    return ".".join(part for part in name.split(".") if part not in DIRECTIONS)


def _input(name: str, value: int, model: ModelSpec) -> str:
    wire = model.inputs.get(name, model.input)
    rate = f", {wire.sample_rate:,g} Hz" if wire.sample_rate else ""
    return f"{name} %{value} {wire.kind} {wire}{rate}".strip()


def _body(body: Graph, notes: Notes, path: str, pad: str) -> Iterator[str]:
    for node in body.nodes:
        own = graph.join(path, node.name)
        yield f"{pad}{_step(node)}{notes.get(own, '')}"
        for name, parameter in node.parameters.items():
            tie = f" = {node.ties[name]}" if name in node.ties else f" {parameter.init}"
            tie += "" if parameter.trained else ", not trained"
            yield f"{pad}    {name} {list(parameter.shape)}{notes.get(graph.join(own, name), tie)}"
        labels: dict[int, list[str]] = {}
        for label, inner in node.bodies.items():
            labels.setdefault(id(inner), []).append(label)
        for label, inner in node.bodies.items():
            if label != labels[id(inner)][0]:  # one body serves several: experts
                continue
            if label:
                yield f"{pad}  {', '.join(labels[id(inner)])}:"
            yield from _body(inner, notes, graph.join(own, label), pad + "  " * (2 if label else 1))
    named = (f"{name}=%{value}" for name, value in body.outputs.items())
    yield f"{pad}return {', '.join(named) or f'%{body.result}'}"


def _step(node: Node) -> str:
    values = ", ".join(f"%{value}" for value in node.outputs)
    verb = f":{node.verb}" if node.name != node.verb else ""
    wires = ", ".join(f"{port}={'+'.join(f'%{value}' for value in read)}" for port, read in node.inputs.items())
    split = f" split {list(node.split)}" if node.split else ""
    once = (", once, kept" if node.kept else ", once") if graph.is_context(node) else ""
    rate = f", rate {node.type.rate}" if node.type and node.type.rate != 1 else ""
    return f"{values} = {node.name}{verb}({wires}) -> {node.type or '?'}{split}{rate}{once}"
