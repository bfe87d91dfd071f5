"""A cell on a tape: what runs before its loop, the loop or the scan of its states, and what runs after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from seqblocks import graph
from seqblocks.analysis.steps.combinators.cell import Stages, stages_of
from seqblocks.architect.replay.steps import Paths, Replay, replays
from seqblocks.graph import Graph, Node
from seqblocks.language import linear_forms
from seqblocks.language.keys import namespace_of
from seqblocks.ops.calc import Calc, applied, computed, program_of, recorded
from seqblocks.tape import Tape, Value
from seqblocks.workspace import associative_scan

LOOP_MAX_STEPS = 8  # steps of a loop that are replayed: each stands for several tokens


@replays(graph.CellNode)
def _cell(replay: Replay, node: graph.CellNode, inputs: list[Value], paths: Paths) -> Value:
    """Run a cell in parts."""
    tape, body = replay.tape, node.bodies[""]
    parts = stages_of(body, replay.spec.types)
    batch, tokens = inputs[0].shape[:2]
    size = parts.chunk(tokens, node.arguments.chunk)
    states = _starts_of(replay, node, batch, paths)
    if size >= tokens:
        y, _ = _part_of_cell(replay, node, parts, inputs, states, paths)
        tape.step = paths[-1]
        return tape.cast(y, replay.item) if replay.item <= 2 else y
    results = []
    sizes = [min(size, tokens - at) for at in range(0, tokens, size)]
    divided = [tape.split(x, sizes, 1) if len(x.shape) == 3 else [x] * len(sizes) for x in inputs]
    for own in zip(*divided, strict=True):
        run = partial(_part_of_cell, replay, node, parts, [*own], states, paths)
        y, states = tape.layer(run, [*own, *states.values()])
        results.append(y)
        del own, run, y
    tape.step = paths[-1]
    y = tape.cat(results, 1)
    return tape.cast(y, replay.item) if replay.item <= 2 else y


def _starts_of(replay: Replay, node: graph.CellNode, batch: int, paths: Paths) -> dict[str, Value]:
    """Return the states [batch, features] of a cell before the first token."""
    tape, body, item, found = replay.tape, node.bodies[""], max(replay.item, 4), dict[str, Value]()
    for name, number in body.ports.items():
        wire = replay.spec.types[number]
        assert wire
        learned = f"start_{name}" in node.parameters
        start = tape.cast(replay.parameter(f"start_{name}", paths), item) if learned else tape.new((1,), item)
        found[name] = tape.expand(start, (batch, wire.features))
    return found


def _part_of_cell(
    replay: Replay, node: graph.CellNode, parts: Stages, inputs: list[Value], states: dict[str, Value],
    paths: Paths,
) -> tuple[Value, dict[str, Value]]:
    """Run some tokens of a cell. Returns the output, and the states after them."""
    body, replay.part = node.bodies[""], inputs[0].shape[1]
    values = dict(zip((body.input, *body.captures), inputs, strict=True))
    _nodes(replay, parts.before, values, paths)
    if parts.groups:
        after = _scanned(replay, body, parts, values, states, paths)
        _nodes(replay, parts.from_states, values, paths)
    else:
        after = _looped(replay, body, parts, values, states, paths)
        _nodes(replay, parts.after, values, paths)
    replay.part = None
    return values[body.result], after


def _looped(
    replay: Replay, body: Graph, parts: Stages, values: dict[int, Value], states: dict[str, Value], paths: Paths
) -> dict[str, Value]:
    """Record the loop, and add what later steps read of it to the values. Returns the states after it."""
    tape, first = replay.tape, values[body.input]
    batch, tokens = first.shape[:2]
    size = -(-tokens // LOOP_MAX_STEPS)
    sizes = [*(min(size, tokens - 1 - at) for at in range(0, tokens - 1, size)), 1]  # the last state is kept alone
    given = [tape.split(x, sizes, 1) if len(x.shape) == 3 else [x] * len(sizes)
             for x in map(values.__getitem__, parts.into_loop)]
    kept: dict[int, list[Value]] = {value: [] for value in parts.out_of_loop}
    for at, count in enumerate(sizes):
        replay.part = tape.merged = count
        own = {value: divided[at] for value, divided in zip(parts.into_loop, given, strict=True)}
        for name, state in states.items():
            width = state.shape[-1]
            own[body.ports[name]] = tape.expand(tape.view(state, (batch, 1, width)), (batch, count, width))
        _nodes(replay, parts.loop, own, paths)
        tape.step, new = paths[-1], dict[str, Value]()
        for name, state in states.items():
            after = tape.cast(own[body.carried[name]], state.item)
            new[name] = tape.view(after, state.shape) if count == 1 else tape.slice(after, state.shape)
        states = new
        for value, found in kept.items():
            found.append(own[value])
    replay.part, tape.merged = tokens, 1
    values |= {value: tape.cat(found, 1) for value, found in kept.items()}
    return states


def _scanned(
    replay: Replay, body: Graph, parts: Stages, values: dict[int, Value], before: dict[str, Value], paths: Paths
) -> dict[str, Value]:
    """Record the associative scan of states that are set by linear formulas. Returns those of the last token."""
    tape, tokens = replay.tape, values[body.input].shape[1]
    forms: dict[int, Any] = {number: linear_forms.Form({name: 1.0}, None) for name, number in body.ports.items()}
    apply = partial(linear_forms.apply, partial(_in_formula, tape))
    for node in parts.loop:
        op, tape.step = node.op, graph.join(paths[-1], node.name)
        assert isinstance(op, Calc)
        given = {}
        for name, (value,) in node.inputs.items():
            x: Any = forms.get(value, values.get(value))
            given[name] = tape.view(x, (x.shape[0], 1, x.shape[1])) if value in node.vectors else x
        names = tuple(graph.join(path, node.name) for path in paths)
        given |= {name: replay.parameter(namespace_of(name), names) for name in op.learned}
        forms[node.outputs[0]] = computed(program_of(op.formula), given, apply)
    tape.step = paths[-1]
    new = {name: forms.get(number, values.get(number)) for name, number in body.carried.items()}
    states: dict[str, Value] = {}
    for group in parts.groups or ():
        found = associative_scan.states(tape, [new[name] for name in group], group, before, tokens)
        states |= dict(zip(group, found, strict=True))
    for name, state in states.items():
        batch, _, width = state.shape
        earlier = [tape.view(before[name], (batch, 1, width)), tape.slice(state, (batch, tokens - 1, width))]
        values[body.ports[name]] = tape.cat(earlier, 1)
    values |= {number: states[name] for name, number in body.carried.items()}
    return {name: tape.slice(state, (state.shape[0], state.shape[2])) for name, state in states.items()}


def _nodes(replay: Replay, nodes: Sequence[Node], values: dict[int, Value], paths: Paths) -> None:
    """Run some steps of a body, and add their outputs to the values."""
    for node in nodes:
        y = replay.node(node, [values[value] for value in node.reads], tuple(graph.join(p, node.name) for p in paths))
        if not isinstance(y, list):
            y = replay.tape.split(y, node.split, -1) if node.split else [y]
        values.update(zip(node.outputs, y, strict=True))


def _in_formula(tape: Tape, name: str, *operands: Any) -> Any:
    """Record an operator or a function of a formula, or compute one of numbers."""
    if any(isinstance(each, Value) for each in operands):
        return recorded(tape, name, *operands)
    return applied(name, *operands)
