"""Resolve the wires that a step reads, and check their types."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from seqblocks import messages
from seqblocks.analysis.context import Body, Context
from seqblocks.analysis.step import Step
from seqblocks.errors import Fault
from seqblocks.language.document import Node, Scalar, Sequence, kind_of
from seqblocks.op import Port, builtin_verbs, fields_of, find_primitive
from seqblocks.types import Wire

Values = tuple[int, ...]  # value numbers: several if a port joins wires


def read_port(ctx: Context, step: Step, port: Port) -> Values | None:
    """Return the values that a port reads, an unknown value after a fault, or None if no wire is given."""
    entry = step.fields.get(port.name)
    given = step.common.get("from") if port.main else None
    if entry and given:
        ctx.report(messages.wires.given_twice(port.name), step)
        return (ctx.run.unknown(),)
    entry = entry or given
    if entry:
        return read_wires(ctx, entry[1], port.joins)
    if not port.main:
        return None
    if "from" in step.misspelt:
        return (ctx.run.unknown(),)
    last = ctx.body.last
    if last and len(last.outputs) > 1:
        ctx.report(messages.wires.several_outputs([ctx.run.labels[value] for value in last.outputs]), step)
        return (ctx.run.unknown(),)
    return (ctx.body.value,)


def read_wires(ctx: Context, node: Node, joins: bool = False) -> Values:
    """Return the values of the wires that a node names, or an unknown value after a fault."""
    if not isinstance(node, Sequence):
        return (_wire(ctx, node),)
    if joins and node.items:
        return tuple(_wire(ctx, item) for item in node.items)
    names = (item.text for item in node.items if isinstance(item, Scalar))
    ctx.report(messages.wires.empty_list() if joins else messages.wires.one_wire_only(names), node.span)
    return (ctx.run.unknown(),)


def _wire(ctx: Context, node: Node) -> int:
    """Return the value of a wire, or an unknown value after a fault."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        ctx.report(messages.wires.not_a_name(kind_of(node)), node.span)
    elif node.value in ctx.body.wires:
        return ctx.body.wires[node.value]
    elif not ctx.body.incomplete:
        ctx.report(_no_wire(ctx, node.value), node.span)
    return ctx.run.unknown()


def _no_wire(ctx: Context, name: str) -> Fault:
    if place := _place(ctx.body, name):
        maker = ctx.run.makers.get(place.wires[name])
        return messages.wires.wire_outside_argument(name, maker.span if maker else None)
    known = [other for other in islice(ctx.body.wires, 14) if other != "input"]
    return messages.wires.no_wire(name, known, lambda: _wire_hint(ctx, name))


def _place(body: Body | None, name: str) -> Body | None:
    """Return the body in which the steps of an argument are written, if a wire with this name is visible there."""
    while body:
        if body.place:
            return body.place if name in body.place.wires else _place(body.place, name)
        body = body.outer
    return None


def _wire_hint(ctx: Context, name: str) -> str:
    if any(name in step.defined_wires() for step in _open_steps(ctx.body)):
        return messages.wires.OWN_OUTPUT
    if any(name in step.defined_wires() for step in ctx.body.steps):
        return messages.wires.DEFINED_BELOW
    if name in builtin_verbs() or name in ctx.file.visible or name in ctx.passed:
        return _verb_as_wire(name, ctx.body.current)
    if body := _body_with(ctx.body, name):
        node = body.nodes[name]
        wires = [wire for wire, value in body.wires.items() if value in node.outputs]
        return messages.wires.name_of_step(name, wires, node.span)
    return messages.wires.similar(name, ctx.body.wires)


def _body_with(body: Body | None, name: str) -> Body | None:
    """Return the body, this one or one that encloses it, that has a step with this name so far."""
    while body and name not in body.nodes:
        body = body.outer
    return body


def _open_steps(body: Body | None) -> Iterator[Step]:
    """Yield the step that is being lowered, then the steps that contain it."""
    while body:
        if body.current:
            yield body.current
        body = body.outer


def _verb_as_wire(name: str, step: Step | None) -> str:
    """Return a hint if a verb is written in place of a wire."""
    op = find_primitive(step.verb) if step else None
    activation = fields_of(op).get("activation") if op else None
    if step and activation and name in activation.choices:
        keys = (key for key, (_, node) in step.fields.items() if isinstance(node, Scalar) and node.text == name)
        return messages.wires.activation_as_wire(name, step.verb, next(keys, "from"))
    return messages.wires.verb_as_wire(name)


# --- types of wires ---------------------------------------------------------------------------------------------------


def wire_at(ctx: Context, step: Step, port: Port, values: Values | None) -> Wire | None:
    """Return the type of the wire at a port, or None if it is UNKNOWN or absent."""
    if values is None:
        return None
    for value in values:
        wire = ctx.run.types[value]
        if wire and wire.kind not in port.kinds:
            _report_kind(ctx, step, port, value, wire)
            return None
    return wire if len(values) == 1 else _joined(ctx, step, values)


def _report_kind(ctx: Context, step: Step, port: Port, value: int, wire: Wire) -> None:
    maker = ctx.run.makers.get(value)
    span = maker.span if maker else wire.origin.span if wire.origin else None
    made = messages.wires.made_by(ctx.run.labels[value], wire, maker.verb if maker else "", span)
    at = port.name if port.name in step.fields else "from"
    ctx.report(messages.wires.wrong_kind(step.verb, at, port.kinds, wire, made), step)


def _joined(ctx: Context, step: Step, values: Values) -> Wire | None:
    """Return the type of wires joined along their features, or None if one of them is UNKNOWN."""
    known = [wire for value in values if (wire := ctx.run.types[value])]
    if len(known) < len(values):
        return None
    fault = None
    with_tokens = [wire for wire in known if wire.places] or known  # a vector is broadcast to the tokens of the others
    if known[0].kind == "tokens":
        fault = messages.wires.ids_have_no_features(known[0], "joined", ctx.run.labels[values[0]])
    elif len({(wire.kind, wire.places) for wire in with_tokens}) > 1:
        labels = [ctx.run.labels[value] for value in values]
        fault = messages.wires.joined_of_different_shapes(zip(labels, known, strict=True))
    if fault:
        ctx.report(fault, step)
        return None
    return with_tokens[0].with_features(sum(wire.features for wire in known))


def check_lengths(ctx: Context, step: Step, ports: tuple[Port, ...], wires: list[Wire | None]) -> bool:
    """Check that inputs of a step with a common length have the same kind and size; report them if not."""
    by_length: dict[str, tuple[str, Wire]] = {}  # the last input with each length
    for port, wire in zip(ports, wires, strict=True):
        if wire is None or (port.broadcast and wire.kind == "vector"):
            continue
        if port.length in by_length:
            last, like = by_length[port.length]
            same = wire.kind == like.kind and wire.length == like.length and wire.grid == like.grid
            if not same and (wire.kind, wire.places) != (like.kind, like.places):
                ctx.report(_other_length(step, port.name, wire, last, like), step)
                return False
        by_length[port.length] = port.name, wire
    return True


def broadcast(ports: tuple[Port, ...], wires: list[Wire | None]) -> list[Wire | None]:
    """Return the types seen by an op: vectors are broadcast to the length of the other inputs."""
    like, vectors = None, []
    for at, (port, wire) in enumerate(zip(ports, wires, strict=True)):
        if wire and wire.kind != "vector":
            like = like or (None if port.length else wire)
        elif wire and port.broadcast:
            vectors.append(at)
    if like is None or not vectors:
        return wires
    return [_as_long_as(like, wire) if wire and at in vectors else wire for at, wire in enumerate(wires)]


def _as_long_as(like: Wire, vector: Wire) -> Wire:
    return like._replace(features=vector.features, origin=vector.origin, facts=vector.facts)


def _other_length(step: Step, name: str, wire: Wire, first: str, like: Wire) -> Fault:
    at = name if name in step.fields else None
    return messages.wires.different_length(step.verb, name, at, wire, first, like)
