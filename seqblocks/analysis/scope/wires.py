"""Resolve the wires that a step reads, and check their types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from seqblocks.analysis.scope.context import Body, Context
from seqblocks.analysis.scope.layer_wires import (
    LayerWire,
    is_left_out,
    read_range,
    read_reference,
    wire_of_layer,
    wires_of_layers,
)
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.steps_above import bodies_around, refer_wire
from seqblocks.errors import Fault, Note, listing, quote
from seqblocks.graph import BlockNode
from seqblocks.language.document import Node, Scalar, Sequence, kind_of
from seqblocks.op import Op, Port, builtin_verbs, fields_of, find_primitive
from seqblocks.roles import joins_tokens
from seqblocks.suggestions import did_you_mean
from seqblocks.types import Facts, Origin, Wire, show_axes, summed
from seqblocks.widths import ids_have_no_features

Values = tuple[int, ...]  # value numbers: several if a port joins wires


def read_port(ctx: Context, step: Step, port: Port) -> Values | None:
    """Return the values that a port reads, an unknown value after a fault, or None if no wire is given."""
    entry = step.fields.get(port.name)
    given = step.common.get("from") if port.main else None
    if entry and given:
        ctx.report(Fault("E210", f"the input is given twice: as `from` and as `{port.name}`", at=port.name), step)
        return (ctx.run.unknown(),)
    entry = entry or given
    if entry and port.several and not _names_several(entry[1]):
        ctx.report(_too_few(step), entry[1].span)
        return (ctx.run.unknown(),)
    if entry:
        return read_wires(ctx, entry[1], port.joins)
    if port.several and not step.incomplete:
        ctx.report(_too_few(step), step.span)
    if port.several:
        return (ctx.run.unknown(),)
    if not port.main:
        return None
    if "from" in step.misspelt:
        return (ctx.run.unknown(),)
    last = ctx.body.last
    if last and len(last.outputs) > 1:
        wires = {value: name for name, value in ctx.body.wires.items()}  # outputs of a faulty step have no labels
        names = [wires.get(value, ctx.run.labels[value]) for value in last.outputs]
        message = f"the step above has {len(names)} outputs: select one with `from`"
        ctx.report(Fault("E313", message, expected=f"from: one of {listing(names)}"), step)
        return (ctx.run.unknown(),)
    return (ctx.body.value,)


def _too_few(step: Step) -> Fault:
    hint = f"list the wires in order: {step.verb}: {{from: [a, b]}}"
    return Fault("E411", f"{step.verb} joins a list of at least two wires", hint=hint)


def read_wires(ctx: Context, node: Node, joins: bool = False) -> Values:
    """Return the values of the wires that a node names, or an unknown value after a fault."""
    if joins and (ranges := [item for item in _items(node) if read_range(item)]):
        return _with_ranges(ctx, node, ranges)
    if not isinstance(node, Sequence):
        return (_wire(ctx, node),)
    if joins and node.items:
        return tuple(_wire(ctx, item) for item in node.items)
    names = listing(item.text for item in node.items if isinstance(item, Scalar))
    hint = f"join them in a step above, `concat: {{from: [{names}]}}`, and read its output"
    several = Fault("E410", "this input takes a single wire, not a list", hint=hint)
    ctx.report(Fault("E411", "the list of wires is empty") if joins else several, node.span)
    return (ctx.run.unknown(),)


def _items(node: Node) -> Iterable[Node]:
    return node.items if isinstance(node, Sequence) else (node,)


def _names_several(node: Node) -> bool:
    return (isinstance(node, Sequence) and len(node.items) > 1) or any(map(read_range, _items(node)))


def _with_ranges(ctx: Context, node: Node, ranges: list[Node]) -> Values:
    """Return the values of wires of which some are those of several layers; an unknown one if there are none."""
    found: list[int] = []
    for item in _items(node):
        given = read_range(item) if item in ranges else None
        if given is None:
            found.append(_wire(ctx, item))
            continue
        assert isinstance(item, Scalar)
        try:
            found += wires_of_layers(ctx, item, given)
        except Fault as fault:
            ctx.report(fault, item.span)
            found.append(ctx.run.unknown())
    if not found:
        message = "there is no wire to read: no layer above this one has it"
        hint = f"list what the first layer reads too: `from: [input, {ranges[0].text!r}]`"  # type: ignore[attr-defined]
        ctx.report(Fault("E411", message, hint=hint), node.span)
        return (ctx.run.unknown(),)
    return tuple(found)


def _wire(ctx: Context, node: Node) -> int:
    """Return the value of a wire, or an unknown value after a fault."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        ctx.report(Fault("E203", "expected the name of a wire", found=kind_of(node)), node.span)
    elif node.value in ctx.body.wires:
        value = ctx.body.wires[node.value]
        if ctx.run.references is not None:
            refer_wire(ctx, node, 0, node.value, value, bodies_around(ctx))
        return value
    elif ":" in node.value and read_range(node):
        hint = "join them in a step above: `concat: {from: \"" + node.text + "\"}`"
        ctx.report(Fault("E410", "this input takes a single wire, not those of several layers", hint=hint), node.span)
    elif "." in node.value and (given := read_reference(node.value)):
        return _of_layer(ctx, node, given)
    elif not ctx.body.incomplete:
        ctx.report(_no_wire(ctx, node.value), node.span)
    return ctx.run.unknown()


def _of_layer(ctx: Context, node: Scalar, given: LayerWire) -> int:
    """Return the value of a wire of a layer, or of its default, or an unknown value after a fault."""
    default = None
    if given.default:
        start, text = given.default
        default = _wire(ctx, Scalar(node.part(start, len(text)), 1, 1, text, text))
    try:
        value = wire_of_layer(ctx, node, given)
    except Fault as fault:
        ctx.report(fault, node.span)
        return ctx.run.unknown()
    if value is None:
        assert default is not None
        return default
    return value


def _no_wire(ctx: Context, name: str) -> Fault:
    if place := _place(ctx.body, name):
        return _wire_outside_argument(name, ctx.run.makers.get(place.wires[name]))
    if found := _hidden(ctx.body, name):
        verb, value = found
        return _wire_of_other_tokens(verb, name, ctx.run.types[value], ctx.run.makers.get(value))
    known = [other for other in islice(ctx.body.wires, 14) if other != "input"]
    message = f"there is no wire {quote(name)} at this point"
    expected = f"input, or one of {listing(known)}" if known else "input (no step above defines a wire)"
    return Fault("E302", message, expected=expected, hint=lambda: wire_hint(ctx, name))


def _wire_outside_argument(name: str, maker: Origin | None) -> Fault:
    """Return the fault of a wire read by the steps of an argument, but visible only where these are written."""
    notes = [Note(f"`{name}` is defined here, outside these steps", maker.span)] if maker and maker.span else []
    hint = "the block passes in `input`; pass other wires to a block as arguments of type `wire`"
    expected = "a wire defined by these steps, or `input`, which the block passes in"
    return Fault("E302", f"there is no wire {quote(name)} at this point", expected=expected, notes=notes, hint=hint)


def _wire_of_other_tokens(verb: str, name: str, wire: Wire | None, maker: Origin | None) -> Fault:
    """Return the fault of a wire with other tokens than the input of an `each` or a `choose` around the step."""
    notes = [Note(f"`{name}` is defined here, outside `{verb}`", maker.span)] if maker and maker.span else []
    message = f"the steps of `{verb}` cannot read {quote(name)}, whose tokens are not those of its input"
    expected = "a wire with the same tokens as the input, or a context"
    hint = f"combine it with the input in a step above `{verb}`"
    return Fault("E302", message, expected=expected, found=f"{wire}" if wire else None, notes=notes, hint=hint)


def _hidden(body: Body | None, name: str) -> tuple[str, int] | None:
    """Return the wire of this name outside an `each` or a `choose` that contains the body, and its verb; None if none
    is there."""
    while body:
        if body.hidden and name in body.hidden and body.current:
            return body.current.verb, body.hidden[name]
        body = body.outer
    return None


def _place(body: Body | None, name: str) -> Body | None:
    """Return the body in which the steps of an argument are written, if a wire with this name is visible there."""
    while body:
        if body.place:
            return body.place if name in body.place.wires else _place(body.place, name)
        body = body.outer
    return None


def wire_hint(ctx: Context, name: str) -> str:
    if "." in name and (found := _hint_of_block(ctx, name)):
        return found
    if any(name in step.defined_wires() for step in _open_steps(ctx.body)):
        return "it is an output of this step; a step can only read outputs of steps above it"
    if any(name in step.defined_wires() for step in ctx.body.steps):
        return "it is defined below; a step can only read outputs of steps above it"
    if name in builtin_verbs() or name in ctx.file.visible or name in ctx.passed:
        return _verb_as_wire(name, ctx.body.current)
    if body := _body_with(ctx.body, name):
        node = body.nodes[name]
        wires = [wire for wire, value in body.wires.items() if value in node.outputs]
        how = f"its step defines {' and '.join(map(quote, wires))}" if wires else f"add `as: {name}` to its step"
        return f"`name:` does not define a wire: {how} ({node.span})"
    return did_you_mean(name, ctx.body.wires) or "name an earlier step's output with `as:`"


def _hint_of_block(ctx: Context, name: str) -> str | None:
    """Return a hint if something is read from a block that is not among its outputs."""
    step, _, wire = name.partition(".")
    body = _body_with(ctx.body, step)
    node = body.nodes[step] if body else None
    if isinstance(node, BlockNode):
        outputs = [f"{step}.{each}" for each in node.bodies[""].exported]
        return did_you_mean(name, outputs) or f"add `outputs: [{wire}]` to block {node.verb}, if it has such a wire"
    return f"{step} is left out: its condition is false" if is_left_out(ctx, step) else None


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
        written = f"`{step.verb}: {{{next(keys, 'from')}: …, activation: {name}}}`"
        return f"set the activation with its own key: {written}"
    return f"'{name}' is a verb: name its output, `- {name}: {{as: a}}`, and read `a`"


# --- types of wires ---------------------------------------------------------------------------------------------------


def wire_at(ctx: Context, step: Step, port: Port, values: Values | None, op: Op | None = None) -> Wire | None:
    """Return the type of the wire at a port, or None if it is UNKNOWN or absent.

    op: the step's op, if that determines how the wires of a list are joined.
    """
    if values is None:
        return None
    for value in values:
        wire = ctx.run.types[value]
        if wire and wire.kind not in port.kinds:
            _report_kind(ctx, step, port, value, wire)
            return None
    if port.several and op is None:
        return None
    if op and port.joins and joins_tokens(op):
        return _joined_tokens(ctx, step, values)
    return wire if len(values) == 1 else _joined(ctx, step, values)


def _report_kind(ctx: Context, step: Step, port: Port, value: int, wire: Wire) -> None:
    maker = ctx.run.makers.get(value)
    span = maker.span if maker else wire.origin.span if wire.origin else None
    made = f"made by {maker.verb}" if maker else "the model's input"
    message, expected = f"{step.verb} cannot read {_a(wire.kind)}", " or ".join(map(_a, port.kinds))
    at, hint = port.name if port.name in step.fields else "from", _KIND_HINTS.get((wire.kind, port.kinds[0]))
    notes = [Note(f"`{ctx.run.labels[value]}` is {wire}: {made}", span)]
    ctx.report(Fault("E403", message, at=at, expected=expected, found=f"{wire}", notes=notes, hint=hint), step)


_KIND_HINTS = {
    ("image", "sequence"): "turn the image into tokens first, with patch_embed",
    ("tokens", "sequence"): "embed the tokens first, with embed",
    ("sequence", "vector"): "pool the sequence first, with pool",
    ("vector", "sequence"): "the sequence was pooled above; move this step above the pooling",
    **dict.fromkeys(
        (("sequence", "tokens"), ("vector", "tokens"), ("image", "tokens")),
        "only `input: {tokens: vocabulary}` provides token ids; remove this step if the input has features",
    ),
    **dict.fromkeys(
        (("sequence", "image"), ("vector", "image"), ("tokens", "image")),
        "only `input: {image: {size: 224, channels: 3}}` and to_image provide an image",
    ),
    ("tokens", "vector"): "embed the tokens with embed and pool them with pool first",
}


def _joined(ctx: Context, step: Step, values: Values) -> Wire | None:
    """Return the type of wires joined along their features, or None if one of them is UNKNOWN."""
    known = [wire for value in values if (wire := ctx.run.types[value])]
    if len(known) < len(values):
        return None
    fault = None
    with_tokens = [wire for wire in known if wire.places] or known  # a vector is broadcast to the tokens of the others
    if known[0].kind == "tokens":
        fault = ids_have_no_features(known[0], "joined", ctx.run.labels[values[0]])
    elif len({(wire.kind, wire.places) for wire in with_tokens}) > 1:
        labels = [ctx.run.labels[value] for value in values]
        found = listing(f"{label} {wire}" for label, wire in zip(labels, known, strict=True))
        fault = Fault("E406", "joined wires must have the same shape except for their features", found=found)
    if fault:
        ctx.report(fault, step)
        return None
    return with_tokens[0].with_features(sum(wire.features for wire in known))


def _joined_tokens(ctx: Context, step: Step, values: Values) -> Wire | None:
    """Return the type of sequences joined along their tokens, or None if one of them is UNKNOWN."""
    known = [wire for value in values if (wire := ctx.run.types[value])]
    if len(known) < len(values):
        return None
    last = known[-1]
    labels = [ctx.run.labels[value] for value in values]
    found = listing(f"{label} {wire}" for label, wire in zip(labels, known, strict=True))
    fault = None
    if any(wire.kind != "sequence" for wire in known):
        only = "sequences, such as the outputs of embed, patch_embed or learned_tokens"
        fault = Fault("E403", "only sequences can be joined along their tokens", expected=only, found=found)
    elif len({wire.features for wire in known}) > 1:
        fault = Fault("E402", "wires joined along their tokens must be equally wide", found=found)
    elif len({wire.rate for wire in known if not wire.context}) > 1:
        hint = "merge or split the tokens of one of them, with downsample or upsample"
        fault = Fault("E406", "the tokens of joined wires must have the same rate", found=found, hint=hint)
    if fault:
        ctx.report(fault, step)
        return None
    lengths = [wire.length or "seq" for wire in known]
    before = [length for length in lengths[:-1] if isinstance(length, int)]
    is_prefix = not last.context and len(before) + 1 == len(known) and all(wire.context for wire in known[:-1])
    prefix = sum(before) + last.prefix if is_prefix else 0  # read once, before the first token of a stream
    context = all(wire.context for wire in known)
    facts = Facts(min(wire.facts.low for wire in known), max(wire.facts.high for wire in known))
    joined = last.with_features(last.features).with_facts(facts)
    return joined._replace(length=summed(lengths), grid=None, context=context, prefix=prefix)


def check_lengths(ctx: Context, step: Step, ports: tuple[Port, ...], wires: list[Wire | None]) -> bool:
    """Check that inputs of a step with a common length have the same kind and size; report them if not."""
    by_length: dict[str, tuple[Port, Wire]] = {}  # the last input with each length
    by_rate: dict[str, tuple[Port, Wire]] = {}  # the first one of each rate
    for port, wire in zip(ports, wires, strict=True):
        if wire is None or (port.broadcast and wire.kind == "vector"):
            continue
        known = by_rate.get(port.other_rate) or by_length.get(port.length)
        if known:
            last, like = known
            same = wire.kind == like.kind and wire.length == like.length and wire.grid == like.grid
            other_rate = port.other_rate not in by_rate and wire.rate != like.rate and wire.spans(like)
            other_rate = other_rate and bool(port.other_rate)
            if not (same or other_rate) and (wire.kind, wire.places) != (like.kind, like.places):
                ctx.report(_other_length(step, port.name, wire, last.name, like), step)
                return False
        if port.other_rate:
            by_rate.setdefault(port.other_rate, (port, wire))
        else:
            by_length[port.length] = port, wire
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
    """Return the fault of input `name` of a step, which is not as long as input `first`, `like`."""
    hint = None
    if step.verb == "attention" and wire.spans(like):
        hint = "make keys and values from one wire, or merge the tokens of both by the same number"
    elif step.verb == "attention" and wire.kind == like.kind == "sequence":
        hint = "use cross_attention for keys and values of another length: each token reads all of them"
    elif wire.context != like.context:
        other = "combine inputs of different lengths with cross_attention, or pool one of them into a vector"
        hint = f"{other}; inputs that are equally long have the same word: `length: frames`"
    size = "the size of" if like.kind == "image" else "as many tokens as"
    return Fault(
        "E406",
        f"{name} must be {_a(like.kind)}{f' of {size} {first}' if like.places else ''}",
        at=name if name in step.fields else None,
        expected=show_axes(like.with_features(wire.features).axes),
        found=f"{wire}",
        hint=hint,
    )


def _a(kind: str) -> str:
    return {"image": "an image", "tokens": "token ids", "sequence": "a sequence", "vector": "a vector"}[kind]
