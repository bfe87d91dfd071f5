"""Resolve wires inside other steps: of layers, `layers[-2].v or input`, and the outputs of blocks, `attention.v`.

A layer reads the layers above it, and a step after the repeat reads all of them. The value becomes an export of the
bodies around it, which return it besides their result. See docs/decisions/0064-wires-of-layers.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from seqblocks import graph
from seqblocks.analysis.scope.context import Body, Context, Layers
from seqblocks.analysis.scope.steps_above import refer_wire
from seqblocks.analysis.scope.values import number
from seqblocks.errors import Fault, Note, listing, quote
from seqblocks.language.document import Node, Scalar
from seqblocks.language.expressions import UNKNOWN
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

_WORD = r"(?P<word>[^\W\d]\w*)\s*"
_INDEX = r"(?:\.\s*(?P<plain>-?\d+)|\[(?P<index>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\])\s*\."  # brackets nest once
_LAYER = _WORD + _INDEX
_WIRE = r"\s*(?P<wire>\w+(?:\.\w+)*)(?:\s*$|\s+or\s+(?P<default>\S.*)$)"

_RANGE = _WORD + r"\[(?P<first>[^:\[\]]*):(?P<last>[^:\[\]]*)\]\s*\.\s*(?P<wire>\w+(?:\.\w+)*)\s*"


class LayerWire(Record):
    """A reference to a wire of a layer: parts of a text, each with its place in it.

    default: the wire to read if there is none.
    """

    word: str
    number: tuple[int, str]
    wire: tuple[int, str]
    default: tuple[int, str] | None


class LayerRange(Record):
    """A reference to the wires of several layers: parts of a text, each with its place in it.

    ends: the first layer and the one after the last, as in Python; None: from the first one, up to the last one.
    """

    word: str
    ends: tuple[tuple[int, str] | None, tuple[int, str] | None]
    wire: tuple[int, str]


def read_reference(text: str) -> LayerWire | None:
    """Return a reference such as `layers[-1].v or input`, or None if the text is something else."""
    first = re.match(_LAYER, text)  # compiled on first use, which few specs need
    rest = re.compile(_WIRE).match(text, first.end()) if first else None
    if first is None or rest is None:
        return None
    which = "plain" if first["plain"] else "index"
    default = (rest.start("default"), rest["default"].strip()) if rest["default"] else None
    return LayerWire(first["word"], (first.start(which), first[which]), (rest.start("wire"), rest["wire"]), default)


def read_range(node: Node) -> LayerRange | None:
    """Return a reference to the wires of several layers, such as `layers[:].v`, or None if it is something else."""
    text = node.value if isinstance(node, Scalar) else None
    found = re.fullmatch(_RANGE, text) if isinstance(text, str) and ":" in text else None
    if found is None:
        return None
    ends = [(found.start(name), found[name]) if found[name].strip() else None for name in ("first", "last")]
    return LayerRange(found["word"], (ends[0], ends[1]), (found.start("wire"), found["wire"]))


def wires_of_layers(ctx: Context, node: Scalar, given: LayerRange) -> list[int]:
    """Return the values of a wire in a range of the layers above, as Python slices a list, of those that have it.

    Raises Fault (E302, E324); returns an unknown value if the layers are unknown.
    """
    layers = _find(ctx, LayerWire(given.word, (0, ""), given.wire, None))
    if layers is None:
        return [ctx.run.unknown()]
    _refer_layers(ctx, node, given.word, layers)
    ends: list[int | None] = []
    for end in given.ends:
        at = number(ctx, Scalar(node.part(end[0], len(end[1])), 1, 1, end[1], end[1]), whole=True) if end else None
        if at is UNKNOWN:
            return [ctx.run.unknown()]
        ends.append(at)
    any_layer = LayerWire(given.word, (0, ""), given.wire, (0, "input"))  # a layer may lack the wire
    chosen = range(len(layers.scopes))[slice(*ends)]
    values = (_in_layer(ctx, node, any_layer, layers, index) for index in chosen)
    return [value for value in values if value is not None]


def wire_of_layer(ctx: Context, node: Scalar, given: LayerWire) -> int | None:
    """Return the value of a wire of a layer, or None if there is none and a default is given.

    Raises Fault (E302, E324) if there is neither; returns an unknown value if the layers are unknown.
    """
    layers = _find(ctx, given)
    if layers is None:
        return None if given.default and is_left_out(ctx, given.word) else ctx.run.unknown()
    _refer_layers(ctx, node, given.word, layers)
    start, text = given.number
    if ":" in text:
        expected = f"a range `{given.word}[first:last].{given.wire[1]}`, without a stride and without `or`"
        raise Fault("E501", "this is no range of layers", expected=expected, found=node.text)
    at = number(ctx, Scalar(node.part(start, len(text)), 1, 1, text, text), whole=True)
    if at is UNKNOWN:
        return ctx.run.unknown()
    done = len(layers.scopes)
    index = done + at if at < 0 else at
    if not 0 <= index < done:
        if not given.default:
            raise _no_layer(layers, given, at, node.text)
        _miss(ctx, node, given, layers)
        return None
    return _in_layer(ctx, node, given, layers, index)


def _refer_layers(ctx: Context, node: Scalar, word: str, layers: Layers) -> None:
    if ctx.run.references is not None:
        ctx.run.references.add("step", word, node.part(0, len(word)), layers.place)


def _miss(ctx: Context, node: Scalar, given: LayerWire, layers: Layers) -> None:
    """Note that a default was read in place of a wire, whose name may be misspelt."""
    if ctx.run.is_trial:
        return
    layers.missed.setdefault(given.wire[1], (ctx, node, given))
    if layers.node:
        check_missed(layers)


def check_missed(layers: Layers) -> None:
    """Report the names that were read with a default, but that no layer of the finished repeat gives to a wire."""
    for name, (ctx, node, given) in layers.missed.items():
        if not any(scope.incomplete or any(_named(scope, name)) for scope in layers.scopes):
            ctx.report(_no_wire(layers.scopes, name, "the layer"), node.part(given.wire[0], len(name)))


def _find(ctx: Context, given: LayerWire) -> Layers | None:
    """Return the layers of a repeat, or None if they are unknown or left out. Raises Fault (E324)."""
    word = given.word
    if found := ctx.body.layers.get(word):
        return found
    node = ctx.body.nodes.get(word)
    is_unknown = ctx.names.get(word, None) is UNKNOWN or isinstance(node, graph.UnknownNode)
    if is_unknown or ctx.body.incomplete or (given.default and is_left_out(ctx, word)):
        return None
    known = [*ctx.body.layers]
    if is_left_out(ctx, word):
        then = f"write what to read then: `{word}.0.{given.wire[1]} or input`"
        raise Fault("E324", f"the repeat {quote(word)} is left out: its condition is false", hint=then)
    hint: str | None
    if verb := _hides_layers(ctx.body):
        hint = f"name the wire above `{verb}`, `{_named_above(given)}`, and read `other`"
    elif ctx.callers and not known:
        hint = "a block reads a wire of a layer by an argument of type `wire`, which its step is given"
    elif _is_below(ctx, word):
        hint = "it is below; a step can only read layers of repeats above it"
    else:
        finished = [name for name, each in ctx.body.layers.items() if each.node]
        example = f"{finished[-1] if finished else 'repeat'}.0.{given.wire[1]}"
        hint = did_you_mean(word, known) or f"`layers` are those of the repeat around a step; after it: {example}"
    message = f"there is no repeat {quote(word)} whose layers can be read here"
    raise Fault("E324", message, expected=f"one of {listing(known)}" if known else None, hint=hint)


def _hides_layers(body: Body | None) -> str | None:
    """Return the verb of the innermost `each` or `choose` around a step, or None."""
    while body:
        if body.hidden is not None and body.current:
            return body.current.verb
        body = body.outer
    return None


def _named_above(given: LayerWire) -> str:
    """Return a step that gives the wire of a layer, or those of a range of layers, a name."""
    number, default = given.number[1], f" or {given.default[1]}" if given.default else ""
    if not number:  # a range
        return f'- aside: [{{concat: {{from: [input, "{given.word}[:].{given.wire[1]}"], as: other}}}}]'
    text = f"{given.word}[{number}].{given.wire[1]}{default}"
    return f'- aside: [{{identity: {{from: "{text}", as: other}}}}]'


def _is_below(ctx: Context, word: str) -> bool:
    return any(step.name == word and step.verb == "repeat" for step in ctx.body.steps)


def is_left_out(ctx: Context, word: str) -> bool:
    """Return whether a step of this name is above, but left out."""
    body: Body | None = ctx.body
    while body:
        if any(step.name == word and body.conditions.get(id(step)) is False for step in body.steps):
            return True
        body = body.outer
    return False


def _in_layer(ctx: Context, node: Scalar, given: LayerWire, layers: Layers, index: int) -> int | None:
    """Return the value of a wire in a finished layer, which becomes an export; None if the layer has none."""
    scope, body = layers.scopes[index], layers.bodies[index]
    start, name = given.wire
    found = list(dict.fromkeys(_named(scope, name)))
    if not found:
        if scope.incomplete:
            return ctx.run.unknown()
        if given.default:
            _miss(ctx, node, given, layers)
            return None
        raise _no_wire([scope], name, f"layer {index}")
    for value in found:
        _check_reachable(body, value, f"`{name}` of layer {index}")
    if len(found) > 1:
        raise _several(ctx, f"layer {index}", name, found)
    (value,) = found
    refer_wire(ctx, node, start, name, value, _inside(scope))
    if not ctx.run.is_trial:
        _export(layers, body, value)
    return value


def _several(ctx: Context, where: str, name: str, found: list[int]) -> Fault:
    places = [place for value in found if (place := ctx.run.makers.get(value))]
    notes = [Note("one is defined here", place.span) for place in places if place.span]
    return Fault("E324", f"{where} has several wires {quote(name)}", notes=notes, hint="rename all but one")


def _inside(scope: Body) -> Iterator[Body]:
    """Yield a list of steps and those inside it."""
    yield scope
    for inner in scope.inner:
        yield from _inside(inner)


def _named(scope: Body, name: str) -> Iterator[int]:
    """Yield the values that the steps of a layer give this name: those of its list, else those in lists inside it."""
    outside = scope.outer.wires if scope.outer else {}
    value = scope.wires.get(name)
    if value is not None and (name == "input" or outside.get(name) != value):
        yield value
        return
    for inner in scope.inner:
        if name != "input":
            yield from _named(inner, name)


def _check_reachable(body: graph.Graph, value: int, what: str) -> None:
    """Raise Fault (E324) if a value of a layer is inside a step that cannot return it."""
    for node, _ in _around(body, value) or ():
        if reason := _obstacle(node):
            place = Note(f"{node.name} is here", node.span)
            hint = f"read a wire outside {node.name}; one in a residual or a branch can be read too"
            raise Fault("E324", f"{what} cannot be read: {reason}", notes=[place], hint=hint)


def _export(layers: Layers, body: graph.Graph, value: int) -> None:
    """Have all bodies around a value, from that of its layer on, return it."""
    if value == layers.input or not _pass_out(body, value):  # it is made outside of the repeat
        return
    if layers.node:
        layers.node.exports[value] = value


def _pass_out(body: graph.Graph, value: int) -> bool:
    """Have a body, and those in it around a value, return the value. Return whether it is made there."""
    chain = _around(body, value)
    if chain is None:
        return False
    for node, inner in chain:
        inner.exports = tuple(dict.fromkeys((*inner.exports, value)))
        node.exports[value] = value
    body.exports = tuple(dict.fromkeys((*body.exports, value)))
    return True


def _around(body: graph.Graph, value: int) -> list[tuple[graph.Node, graph.Graph]] | None:
    """Return the nodes, with their bodies, around the step of a body that makes a value; None if none does."""
    if value == body.input or any(value in node.made for node in body.nodes):
        return []
    for node in body.nodes:
        for inner in node.bodies.values() if not isinstance(node, graph.BlockNode) else ():
            found = None if value in inner.captures else _around(inner, value)
            if found is not None:
                return [(node, inner), *found]
    return None


_OBSTACLES: dict[type[graph.Node], str] = {
    graph.ExpertsNode: "an expert computes only the tokens that are routed to it",
    graph.ChooseNode: "the steps of `choose` compute only the chosen tokens",
    graph.CellNode: "the steps of a cell compute one token at a time",
    graph.EachNode: "the steps of `each` compute parts of the sequence",
    graph.RepeatNode: "it belongs to a layer of a repeat inside the layer",
}


def _obstacle(node: graph.Node) -> str | None:
    """Return why a value inside a node cannot be read outside of it, or None."""
    if isinstance(node, graph.ScanNode) and not node.is_forward:
        return f"a scan reads the tokens in the order {node.orders}"
    return _OBSTACLES.get(type(node))


def _no_layer(layers: Layers, given: LayerWire, at: int, written: str) -> Fault:
    done, (_, text) = len(layers.scopes), given.number
    what = f"`{text}` is {at}" if text.strip() != str(at) else None
    if layers.node:
        message = f"there is no layer {at} in {given.word}, which has {layers.count} layers"
    elif 0 <= at < layers.count:
        message = f"layer {done} cannot read layer {at}, which is not above it"
    elif at >= layers.count:
        message = f"there is no layer {at}: the repeat has {layers.count} layers"
    else:
        message = f"there is no layer {-at} above layer {done}"
    expected = "no layer, since none is above" if not done else f"0 to {done - 1}, or {-done} to -1"
    hint = f"write what to read where there is none: `{written} or input`"
    return Fault("E324", message, expected=expected, found=what, hint=hint)


def _no_wire(scopes: list[Body], name: str, where: str) -> Fault:
    known = dict.fromkeys(wire for scope in scopes for wire in _names(scope))
    message = f"{where} has no wire {quote(name)}" if len(scopes) == 1 else f"no layer has a wire {quote(name)}"
    expected = f"one of {listing(known)}" if known else "input (no step of the layer defines a wire)"
    return Fault("E302", message, expected=expected, hint=lambda: did_you_mean(name, known) or "name it with `as:`")


def _names(scope: Body) -> Iterator[str]:
    """Yield the names of the wires that the steps of a layer define."""
    outside = scope.outer.wires if scope.outer else {}
    for name, value in scope.wires.items():
        if name != "input" and outside.get(name) != value:
            yield name
    for inner in scope.inner:
        yield from _names(inner)


# --- outputs of blocks ------------------------------------------------------------------------------------------------


def read_block_outputs(ctx: Context, names: Sequence[Scalar], body: graph.Graph) -> None:
    """Have a block's body return the wires in `outputs:`; report those that are none, or cannot be returned."""
    for item in names:
        try:
            value = _output_of_block(ctx, item.text, body)
        except Fault as fault:
            ctx.report(fault, item.span)
            value = None
        value = ctx.run.unknown() if value is None else value
        body.exported[item.text] = value
        refer_wire(ctx, item, 0, item.text, value, _inside(ctx.body))


def _output_of_block(ctx: Context, name: str, body: graph.Graph) -> int | None:
    """Return the value of a wire in a block, or None if it is UNKNOWN. Raises Fault (E302, E318, E324)."""
    block = f"block {ctx.callers[-1].name}"
    if name == "input" or name in body.ports:
        raise Fault("E318", f"{quote(name)} is an input of {block}", expected="a wire that a step of the block defines")
    found = list(dict.fromkeys(_named(ctx.body, name)))
    if not found and not ctx.body.incomplete:
        raise _no_wire([ctx.body], name, block)
    for value in found:
        _check_reachable(body, value, f"`{name}` of {block}")
    if len(found) > 1:
        raise _several(ctx, block, name, found)
    return found[0] if found and _pass_out(body, found[0]) else None


def define_outputs(ctx: Context, node: graph.Node, exported: Mapping[str, int]) -> None:
    """Define the wires `NAME.WIRE` for the outputs of a block that a step uses."""
    run = ctx.run
    for name, inside in exported.items():
        label = f"{node.name}.{name}"
        value = run.value(run.types[inside], label)
        if inside in run.makers:
            run.makers[value] = run.makers[inside]
        node.exports[value] = inside
        if run.references is not None:
            wire = name.rpartition(".")[2]
            if place := run.references.places.get((inside, wire)):
                run.references.define([value], [(wire, place)])
        ctx.body.wires[label] = value
