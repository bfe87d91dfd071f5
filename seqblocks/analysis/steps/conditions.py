"""Evaluate conditions: if `when:` is false, a step is left out, and its readers read its input instead."""

from __future__ import annotations

from typing import Any

from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import argument
from seqblocks.analysis.scope.wires import read_port
from seqblocks.analysis.steps.nodes import define_wire
from seqblocks.errors import Fault
from seqblocks.language.document import Scalar
from seqblocks.language.expressions import UNKNOWN
from seqblocks.op import FieldKind, Op, Port

FLAG = FieldKind("flag")


def is_known(ctx: Context, step: Step) -> bool:
    """Return whether it is known if the step is present."""
    return condition(ctx, step) is not UNKNOWN


def is_absent(ctx: Context, step: Step) -> bool:
    """Return whether the condition of a step is false."""
    return condition(ctx, step) is False and not step.unreadable and step.found is not None


def leave_out(ctx: Context, step: Step) -> None:
    """Give the output wires of an absent step the value of its input."""
    try:
        value = _input(ctx, step)
    except Fault as fault:
        ctx.report(fault, step)
        value = ctx.run.unknown()
    for name, span in step.named_wires():
        define_wire(ctx, name, step.value_span("as"))
        if name in ctx.body.states:  # it keeps its value
            if ctx.run.references is not None:
                ctx.run.references.set_state(ctx.body.states[name], (), name, span)
            continue
        passed = ctx.body.wires.setdefault(name, ctx.body.value if value is None else value)
        if ctx.run.references is not None:
            ctx.run.references.define([passed], [(name, span)])
    if value is not None:
        ctx.body.value, ctx.body.last = value, None


def condition(ctx: Context, step: Step) -> Any:
    """Evaluate the condition of a step once, and return it or, after a fault, UNKNOWN."""
    span, node = step.common["when"]
    known = ctx.body.conditions
    if id(step) not in known:
        known[id(step)] = argument(ctx, node, FLAG)
        entry = step.common.get("as")
        if entry and not isinstance(entry[1], Scalar):
            message = "a step with a condition cannot split its output"
            hint = "split its output in a separate step: - identity: {as: [a, b]}"
            if "layer" in ctx.names:
                hint += "; for wires that only some layers have, use a `pattern`"
            ctx.report(Fault("E316", message, hint=hint), span)
            known[id(step)] = UNKNOWN
    return known[id(step)]


def _input(ctx: Context, step: Step) -> int | None:
    """Return the value that replaces the output, or None for the output of the step above. Raises Fault (E316)."""
    meaning = step.found.meaning if step.found else None
    ports = meaning.ports if isinstance(meaning, type) and issubclass(meaning, Op) else (Port("", main=True),)
    main = next((port for port in ports if port.main), None)
    if main is None or not ("from" in step.common or main.name in step.fields):
        return None
    values = read_port(ctx, step, main) or (ctx.run.unknown(),)
    if len(values) > 1:
        message = "a step with a condition must read a single wire"
        raise Fault("E316", message, at="from", hint="join them in a separate step above, and read its output")
    return values[0]
