"""Lower a step whose verb is a primitive: read its inputs and arguments, and evaluate the op's declarations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import read_arguments
from seqblocks.analysis.scope.wires import broadcast, check_lengths, read_port, wire_at
from seqblocks.analysis.steps.init_and_tie import find_ties, initialised
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import files_of_blocks, lowers
from seqblocks.errors import Fault, listing, quote
from seqblocks.language.expressions import MAX_MAGNITUDE
from seqblocks.op import Op, Port, check_declared
from seqblocks.parameters import Parameter
from seqblocks.record import Record
from seqblocks.state_layout import State
from seqblocks.types import UNBOUNDED, Wire

MAX_STATE = 10**12  # limit on the state of one step, in elements per sequence


@lowers(Op)
def lower_op(ctx: Context, step: Step, cls: type[Op]) -> graph.Node | None:
    """Return the node of an op, or None after a fault: its inputs do not fit its arguments, or it is too large."""
    inputs: dict[str, tuple[int, ...]] = {}
    wires: list[Wire | None] = []
    early = read_arguments(ctx, step, cls) if hasattr(cls, "joins_tokens") else None
    for port in cls.ports:
        values = read_port(ctx, step, port)
        if values is None and not port.optional:
            values = _report_no_input(ctx, step, cls, port)
        if values is not None:
            inputs[port.name] = values
        wires.append(wire_at(ctx, step, port, values, early))
        if port.length:
            ctx.run.may_look_ahead = True
    if "from" in step.common and not any(port.main for port in cls.ports):
        message = f"{step.verb} has no `from`: its inputs have names"
        ctx.report(Fault("E201", message, expected=listing(port.name for port in cls.ports)), step.key_span("from"))
    agree = check_lengths(ctx, step, cls.ports, wires)
    known = agree and len(inputs) + wires.count(None) == len(wires)
    seen = broadcast(cls.ports, wires)
    joined = sum(map(len, inputs.values())) > len(inputs)
    vectors = _vectors(ctx, inputs, seen, cls) if joined or seen is not wires else ()
    wires = seen
    ctx.run.may_look_ahead |= bool(vectors)
    op = early or read_arguments(ctx, step, cls)
    declared = _declare(ctx, step, op, wires) if op and known else _Declared()
    parameters = dict(declared.parameters)
    if step.common:
        parameters = initialised(ctx, step, op, wires, parameters, declared.type is not None)
    may_tie = "tie" in step.common and (parameters or not declared.type)
    ties = find_ties(ctx, step, parameters) if may_tie else {}
    if op and declared.type and (cls.reads == "all" or cls.looks_ahead is not Op.looks_ahead):
        ctx.run.may_look_ahead |= op.looks_ahead(*wires) > 0
    if declared.type and declared.type.facts is not UNBOUNDED:
        ctx.run.has_constants |= declared.type.facts.is_constant
    for fault in op.warns(*wires) if op and declared.type and cls.warns is not Op.warns else ():
        ctx.report(fault, step)
    if not declared.fits:
        return None
    of_op = {"op": op, "macs": declared.macs} if op else {}
    return make_node(
        ctx, step, graph.OpNode if op else graph.PrimitiveNode, inputs, declared.type, parameters=parameters,
        state=dict(declared.state), ties=ties, wires=tuple(wires), vectors=vectors, **of_op,
    )  # fmt: skip


def _vectors(
    ctx: Context, inputs: dict[str, tuple[int, ...]], wires: list[Wire | None], cls: type[Op]
) -> tuple[int, ...]:
    """Return the vector inputs that are broadcast to the tokens of a sequence or an image."""
    longer = [port.name for port, wire in zip(cls.ports, wires, strict=True) if wire and wire.kind != "vector"]
    read = [(value, ctx.run.types[value]) for name in longer for value in inputs.get(name, ())]
    return tuple(value for value, wire in read if wire and wire.kind == "vector")


class _Declared(Record):
    """The declarations of an op for its inputs; empty if they are UNKNOWN, or do not fit."""

    type: Wire | None = None
    parameters: Mapping[str, Parameter] = MappingProxyType({})
    state: Mapping[str, State] = MappingProxyType({})
    macs: int = 0
    fits: bool = True


def _declare(ctx: Context, step: Step, op: Op, wires: list[Wire | None]) -> _Declared:
    """Return the declarations of an op, or report that its inputs do not fit, or that it is too large (E504)."""
    try:
        made, cls = _shape(op, wires), type(op)
        facts = UNBOUNDED if cls.facts is Op.facts else op.facts(*wires)
        parameters = {} if cls.parameters is Op.parameters else op.parameters(*wires)
        states, macs = op.state(*wires), op.macs(*wires)
        if not op.builtin:
            check_declared(cls, made, parameters, states, macs, facts)
        for name, parameter in parameters.items():
            if (numbers := math.prod(parameter.shape)) > MAX_MAGNITUDE:
                message = f"{name} of {step.verb} is too large: {numbers:.0e} elements"
                raise Fault("E504", message, expected="at most 10^18")
        for name, state in states.items():
            if (numbers := math.prod(state.shape)) > MAX_STATE:
                message = f"the state {name} of {step.verb} is too large: {numbers:.0e} elements per sequence"
                raise Fault("E504", message, expected="at most 10^12")
        if made.facts is not facts:
            made = made.with_facts(facts)
        return _Declared(made, parameters, states, macs)
    except Fault as fault:
        ctx.report(fault, step)
        return _Declared(fits=False)


def _shape(op: Op, wires: list[Wire | None]) -> Wire:
    """Return the output type of an op. A fault gets notes on the origin of each input."""
    try:
        return op.shape(*wires)
    except Fault as fault:
        if not fault.notes:
            names = ["the input" if port.main else f"`{port.name}`" for port in op.ports]
            seen = (wire.origin_note(name) for wire, name in zip(wires, names, strict=True) if wire)
            fault.notes = tuple(note for note in seen if note)[:3]
        raise


# --- missing inputs ---------------------------------------------------------------------------------------------------


def _report_no_input(ctx: Context, step: Step, cls: type[Op], port: Port) -> tuple[int, ...]:
    """Report a missing input, unless the step is incomplete. Return an unknown value for it."""
    if not step.incomplete:
        ctx.report(_no_input(ctx, step, cls, port), step.span)
    return (ctx.run.unknown(),)


def _no_input(ctx: Context, step: Step, cls: type[Op], port: Port) -> Fault:
    needed = [each.name for each in cls.ports if not (each.main or each.optional)]
    if len(needed) == 1 or any(name in step.fields for name in needed):
        name = port.name
        written = f"{name}: {name}" if name in ctx.body.wires else f"add `{name}: WIRE`, the name of the wire to read"
        return Fault("E411", f"{step.verb} needs its input {quote(name)}", hint=written)

    def hint() -> str:
        names = f"name the wires: {step.verb}: {{{', '.join(f'{name}: …' for name in needed)}}}"
        layer = f"{step.verb}_layer"
        file = files_of_blocks().get(layer)  # of a block that computes the inputs
        return f"`{layer}` (`use: [{file}]`) computes them from one wire; or {names}" if file else names

    return Fault("E411", f"{step.verb} needs its inputs {listing(needed)}", hint=hint)
