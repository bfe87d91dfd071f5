"""Lower `cell`: steps for one token, with state wires that they read and set; which of them run token by token."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import argument, number
from seqblocks.analysis.steps.combinators.by_token import check_by_token
from seqblocks.analysis.steps.combinators.common import combines
from seqblocks.analysis.steps.init_and_tie import read_initial
from seqblocks.analysis.steps.nodes import make_node, may_be_name
from seqblocks.analysis.steps.steps import lower_inside
from seqblocks.combinators.cell import Cell, CellState
from seqblocks.errors import Fault, Note, Span, quote
from seqblocks.language.document import Mapping, Node, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.keys import known_keys
from seqblocks.op import fields_of
from seqblocks.ops.calc import Calc, computed, program_of
from seqblocks.parameters import Init, Parameter
from seqblocks.record import Record
from seqblocks.state_layout import State
from seqblocks.suggestions import did_you_mean
from seqblocks.types import Origin, Wire

KEYS = tuple(fields_of(CellState))
FIXED = ("zeros", "ones", "constant")  # initialisers that draw one number
STARTED = "started"  # the part of a state that counts whether a token came before, if a start is learned
GROUP_MAX_STATES = 3  # states that read each other: combining two tokens takes as many products as the cube of this
KEPT_MAX_TOKENS = 64  # tokens of a loop that are kept for the backward pass: the memory of 4,096 tokens in parts of 64

Groups = tuple[tuple[str, ...], ...]


class _Declared(Record):
    """A state wire as written. features: its width, or UNKNOWN; start: a number or an Init, or UNKNOWN."""

    span: Span
    features: Any
    start: Any = 0.0
    learned: Any = False

    @property
    def is_known(self) -> bool:
        return UNKNOWN not in (self.features, self.start, self.learned)


def _check_inside(ctx: Context, node: Node, x: int) -> None:
    """Report the faults of the steps, of which any wire may be a state."""
    lower_inside(ctx, node, x, incomplete=True)


@combines(Cell, check=_check_inside)
def lower_cell(ctx: Context, step: Step, arguments: Cell, x: int) -> graph.Node | None:
    """Return the node. Raises Fault if `state` is no mapping; reports faulty states, and steps that mix tokens."""
    wire = ctx.run.types[x]
    if not isinstance(arguments.state, Mapping) or not (arguments.state.entries or arguments.state.incomplete):
        hint = "name each state with its width: `state: {s: 64}`"
        raise Fault("E203", "`state` maps names to widths", at="state", found=kind_of(arguments.state), hint=hint)
    declared = _read_states(ctx, arguments.state)
    states = {name: _value(ctx, name, each, wire) for name, each in declared.items()}
    incomplete = arguments.state.incomplete or len(declared) < len(arguments.state.entries)
    body = lower_inside(ctx, arguments.steps, x, states=states, incomplete=incomplete)
    if ctx.run.full:  # already reported
        return None
    if not incomplete:
        _check_use(ctx, body, declared)
    made = _result(ctx, step, body, wire, declared)
    if incomplete or not all(each.is_known for each in declared.values()):
        return None
    body.states = _states(declared)
    return make_node(
        ctx, step, graph.CellNode, {"x": (x,)}, made, bodies={"": body}, arguments=arguments,
        parameters=_parameters(ctx, body, declared), state=dict(body.states),
    )  # fmt: skip


# --- the states -------------------------------------------------------------------------------------------------------


def _read_states(ctx: Context, node: Mapping) -> dict[str, _Declared]:
    found: dict[str, _Declared] = {}
    for name, span, value in node:
        if not may_be_name(ctx, name, span):
            continue
        if name == STARTED:
            hint = "a stream keeps a part with this name: choose another one"
            ctx.report(Fault("E311", f"{quote(name)} is reserved for the states of cells", hint=hint), span)
            continue
        if name in ctx.body.wires:
            maker = ctx.run.makers.get(ctx.body.wires[name])
            notes = [Note("it is defined here", maker.span)] if maker and maker.span else []
            message, hint = f"there is already a wire {quote(name)}", "choose another name for the state"
            ctx.report(Fault("E305", message, notes=notes, hint=hint), span)
            continue
        found[name] = _read_state(ctx, span, value)
    return found


def _read_state(ctx: Context, span: Span, node: Node) -> _Declared:
    """Return a state that is written as its width, or as a mapping."""
    kinds = fields_of(CellState)
    if not isinstance(node, Mapping):
        return _Declared(span, _width(ctx, node))
    known_keys(ctx.run.report, node, KEYS, "a state")
    width, start, learned = node.get("features"), node.get("start"), node.get("learned")
    if width is None and not node.incomplete:
        ctx.report(Fault("E202", "a state needs 'features', its width", hint="{features: 64}"), span)
    made = _Declared(
        span,
        UNKNOWN if width is None else _width(ctx, width),
        0.0 if start is None else read_initial(ctx, start),
        False if learned is None else argument(ctx, learned, kinds["learned"]),
    )
    if isinstance(made.start, Init) and made.learned is False:
        if made.start.name not in FIXED:
            message = f"the start {made.start} is drawn, so it must be learned"
            ctx.report(Fault("E209", message, hint="add `learned: true`, or write a number"), start)
        made = made._replace(start={"zeros": 0.0, "ones": 1.0}.get(made.start.name, _first(made.start)))
    return made if not node.incomplete else made._replace(features=UNKNOWN)


def _first(init: Init) -> float:
    return float(init.values[0]) if init.values else 0.0


def _width(ctx: Context, node: Node) -> Any:
    value = number(ctx, node, whole=True)
    if value is UNKNOWN or value >= 1:
        return value
    ctx.report(Fault("E209", "the width of a state must be at least 1", found=f"{value}"), node)
    return UNKNOWN


def _value(ctx: Context, name: str, declared: _Declared, x: Wire | None) -> int:
    """Return the value of a state after the previous token. For the steps, it is a sequence as long as the input."""
    origin = Origin("state", declared.span)
    wire = x.with_features(declared.features)._replace(origin=origin) if x and declared.is_known else None
    value = ctx.run.value(wire, name)
    ctx.run.makers[value] = origin
    if ctx.run.references is not None:
        ctx.run.references.define([value], [(name, declared.span)])
    return value


def _parameters(ctx: Context, body: graph.Graph, declared: dict[str, _Declared]) -> dict[str, Parameter]:
    """Return the starts that are learned. Reports steps with the same name as one (E304)."""
    found: dict[str, Parameter] = {}
    for name, each in declared.items():
        if each.learned:
            own = f"start_{name}"
            init = each.start if isinstance(each.start, Init) else Init("constant", (each.start,))
            found[own] = Parameter((each.features,), init, decay=False)
            if clash := next((node for node in body.nodes if node.name == own), None):
                notes = [Note("it is the learned start of this state", each.span)]
                message, hint = f"a step of the cell has the name {quote(own)}", "give the step another `name:`"
                ctx.report(Fault("E304", message, notes=notes, hint=hint), clash.span)
    return found


def _states(declared: dict[str, _Declared]) -> dict[str, State]:
    """Return the declarations of the state of a stream."""
    found = {
        name: State((each.features,), fill=0.0 if each.learned else each.start) for name, each in declared.items()
    }
    return found | ({STARTED: State((1,), "int64")} if any(each.learned for each in declared.values()) else {})


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_use(ctx: Context, body: graph.Graph, declared: dict[str, _Declared]) -> None:
    """Report states that no step sets, and states that no step reads (E315)."""
    known = all(not isinstance(node, graph.UnknownNode) for node in graph.walk(body))
    read = {value for node in body.nodes for value in node.reads} | {body.result}
    may_be_absent = {name for each in ctx.body.steps for name in each.defined_wires()} if body.absent else set()
    for name, each in declared.items():
        old, new = body.ports[name], body.carried[name]
        if old == new and known and name not in may_be_absent and not body.absent:
            names = [label for label in map(ctx.run.labels.__getitem__, _outputs(body)) if label not in declared]
            hint = did_you_mean(name, names) or f"name the output of a step in the cell `as: {name}`"
            ctx.report(Fault("E315", f"no step sets the state {quote(name)}", hint=hint), each.span)
        elif known and read.isdisjoint((old, new)) and not body.absent:
            hint = f"read it in a step of the cell: `from: {name}`, or by a port; or remove it"
            ctx.report(Fault("E315", f"no step reads the state {quote(name)}", hint=hint), each.span)


def _outputs(body: graph.Graph) -> list[int]:
    return [value for node in body.nodes for value in node.outputs]


def _result(
    ctx: Context, step: Step, body: graph.Graph, x: Wire | None, declared: dict[str, _Declared]
) -> Wire | None:
    """Return the type of the output. Reports what does not process tokens one by one, or changes a state's width."""
    result = ctx.run.types[body.result]
    if x is None:
        return None
    hint = "move the step out of the cell, whose steps run token by token, and read its output by name"
    check_by_token(ctx, step, body, x, "a cell", "the cell is here", hint, vectors=True)
    for name, each in declared.items():
        new = ctx.run.types[body.carried[name]]
        if new and each.is_known and (new.kind, new.places) == (x.kind, x.places) and new.features != each.features:
            note, maker = new.origin_note(f"the new `{name}`"), ctx.run.makers.get(body.carried[name])
            message = f"the state {quote(name)} must keep its width"
            fault = Fault(
                "E402", message, expected=f"{each.features}", found=f"{new.features}",
                notes=[Note("the state is declared here", each.span), *([note] if note else [])],
            )  # fmt: skip
            ctx.report(fault, maker.span if maker and maker.span else each.span)
    return x.with_features(result.features) if result and result.kind == x.kind else None


# --- how it is computed -----------------------------------------------------------------------------------------------


class Stages(NamedTuple):
    """The steps of a cell: those on all tokens before the loop, those in the loop, and those on all tokens after it.

    groups: the states that read each other, if all states are set by linear formulas; the loop is then a scan, and
    `from_states` are the steps that compute the output from the states of all tokens.
    into_loop, out_of_loop: the values that the loop reads from outside, and those that later steps read of it.
    """

    before: list[graph.Node]
    loop: list[graph.Node]
    after: list[graph.Node]
    groups: Groups | None
    from_states: list[graph.Node]
    into_loop: list[int]
    out_of_loop: list[int]

    def chunk(self, tokens: int, given: int | None) -> int:
        """Return the tokens of a part that is computed again in the backward pass. given: the argument `chunk`."""
        if given is not None:
            return given or tokens
        return tokens if self.groups or tokens <= KEPT_MAX_TOKENS else math.isqrt(tokens - 1) + 1


def stages_of(body: graph.Graph, types: dict[int, Wire | None]) -> Stages:
    """Divide the steps of a cell."""
    states = {*body.ports.values()}
    reading = set(states)
    for node in body.nodes:
        if not reading.isdisjoint(node.reads):
            reading.update(node.made)
    needed = {*body.carried.values()}
    for node in reversed(body.nodes):
        if not needed.isdisjoint(node.made):
            needed.update(node.reads)
    dependent = [node for node in body.nodes if not reading.isdisjoint(node.made)]
    loop = [node for node in dependent if not needed.isdisjoint(node.made)]
    after = [node for node in dependent if needed.isdisjoint(node.made)]
    made = {value for node in loop for value in node.made} | states
    read = {value for node in loop for value in node.reads} | {*body.carried.values()}
    later = {value for node in after for value in node.reads} | {body.result}
    return Stages(
        [node for node in body.nodes if reading.isdisjoint(node.made)], loop, after,
        _groups(body, loop, types), _from_states(body, dependent), sorted(read - made), sorted(later & made),
    )  # fmt: skip


def _from_states(body: graph.Graph, dependent: list[graph.Node]) -> list[graph.Node]:
    """Return the steps that compute the output, if all old and new states are known."""
    known, wanted = {*body.carried.values(), *body.ports.values()}, {body.result}
    found: list[graph.Node] = []
    for node in reversed(dependent):
        if not (wanted - known).isdisjoint(node.made):
            wanted.update(node.reads)
            found.insert(0, node)
    return found


# --- linear formulas --------------------------------------------------------------------------------------------------


class NotLinear(Exception):
    """Raised where a formula is not linear in the states."""


def _groups(body: graph.Graph, loop: list[graph.Node], types: dict[int, Wire | None]) -> Groups | None:
    """Return the states that read each other, or None if they are not set by linear formulas."""
    reads: dict[int, frozenset[str]] = {value: frozenset([name]) for name, value in body.ports.items()}
    try:
        for node in loop:
            if not isinstance(node.op, Calc) or node.split:
                return None
            given = {name: reads.get(value, frozenset()) for name, (value,) in node.inputs.items()}
            given |= dict.fromkeys(node.op.learned, frozenset())
            reads[node.outputs[0]] = computed(program_of(node.op.formula), given, _states_in)
    except NotLinear:
        return None
    groups = _joined({name: reads.get(value, frozenset()) for name, value in body.carried.items()})
    widths = {name: wire and wire.features for name, wire in ((name, types[v]) for name, v in body.ports.items())}
    small = all(len(group) <= GROUP_MAX_STATES and len({widths[name] for name in group}) == 1 for group in groups)
    return groups if small else None


def _states_in(name: str, *parts: Any) -> frozenset[str]:
    """Return the states that a part of a formula reads. Raises NotLinear."""
    read = [part if isinstance(part, frozenset) else frozenset[str]() for part in parts]
    if not any(read):
        return frozenset()
    if name in ("+", "-") or (name == "*" and not (read[0] and read[1])) or (name == "/" and not read[1]):
        return frozenset[str]().union(*read)
    raise NotLinear


def _joined(reads: dict[str, frozenset[str]]) -> Groups:
    """Return the states in groups: each with those that it reads, and that read it."""
    group = {name: {name} for name in reads}
    for name, others in reads.items():
        for other in others:
            if group[name] is not group[other]:
                group[name] |= group[other]
                group |= dict.fromkeys(group[other], group[name])
    return tuple(dict.fromkeys(tuple(sorted(each)) for each in group.values()))
