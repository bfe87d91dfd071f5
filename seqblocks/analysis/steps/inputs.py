"""Read `input:` and `inputs:` as wire types of a model, and `outputs:` as the values that it returns."""

from __future__ import annotations

import keyword
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.layer_wires import read_reference
from seqblocks.analysis.scope.values import number
from seqblocks.analysis.scope.wires import read_wires
from seqblocks.analysis.steps.nodes import may_be_name
from seqblocks.errors import Fault, Span, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import RESERVED, UNKNOWN
from seqblocks.language.keys import known_keys, required
from seqblocks.suggestions import did_you_mean
from seqblocks.types import Origin, Wire

ALLOWED = {
    "tokens": ("tokens", "length", "sample_rate"), "features": ("features", "length", "grid", "sample_rate"),
    "image": ("image",),
    "vector": ("vector",),
}  # fmt: skip
# Arguments of a model's call, which no input may be named after.
CALL_ARGUMENTS = (
    "self", "state", "return_state", "resets", "cu_seqlens", "grid", "batch_size", "device", "dtype", "batch"
)  # fmt: skip

_KINDS = "{tokens: vocabulary}, {features: width}, {vector: width} or {image: {size: 224, channels: 3}}"  # for messages

Inputs = dict[str, Wire | None]  # None where the input could not be read


def read_inputs(ctx: Context, model: Mapping, span: Span | None) -> Inputs:
    """Return the types of a model's inputs by name; a single `input:` is named "input".

    An input that cannot be read is None. Empty if `inputs:` itself is invalid.
    """
    if "inputs" not in model.entries:
        missing = Fault("E202", "the model must say what its input is", expected=_KINDS)
        node = required(ctx.report, model, "input", missing, span)
        return {"input": _input(ctx, node, "seq")}
    key, node = model.entries["inputs"]
    if "input" in model.entries:
        message = "use either `input` or `inputs`, not both"
        fault = Fault("E210", message, hint="use `inputs:` for several named inputs, `input:` for a single one")
        ctx.report(fault, key)
    if not isinstance(node, Mapping) or not (node.entries or node.incomplete):
        found_there = "an empty one" if isinstance(node, Mapping) else kind_of(node)
        hint = "inputs: {text: {tokens: 256}, image: {image: {size: 224, channels: 3}}}"
        fault = Fault("E317", "inputs must be a mapping of names to inputs", found=found_there, hint=hint)
        ctx.report(fault, node.span)
        return {}
    found: Inputs = {}
    words = _length_words(ctx, node)
    for name, place, each in node:
        _check_name(ctx, name, place, first=not found)
        wire = _input(ctx, each, name, words)
        found[name] = wire._replace(context=True) if wire and found else wire
    return found


def _length_words(ctx: Context, inputs: Mapping) -> frozenset[str]:
    """Return the words that stand for a length which several inputs have: `length: frames` in at least two of them.

    The name of another input of open length stands for the length of that input.
    """
    given = [each.get("length") for _, _, each in inputs if isinstance(each, Mapping)]
    written = [node.value for node in given if isinstance(node, Scalar) and isinstance(node.value, str)]
    open_inputs = {
        name for name, _, each in inputs
        if isinstance(each, Mapping) and each.entries.keys() & {"tokens", "features"}
        and not each.entries.keys() & {"length", "grid"}
    }  # fmt: skip
    words = {word for word in written if written.count(word) > 1 or word in open_inputs}
    return frozenset(word for word in words if word.isidentifier() and word not in ctx.names and word != "batch")


def _check_name(ctx: Context, name: str, span: Span, first: bool) -> None:
    """Report an invalid name of an input (E207, E311, E317)."""
    if name in CALL_ARGUMENTS or (name == "x" and not first):
        message = f"an input cannot be named {quote(name)}: the model's call has an argument of that name"
        ctx.report(Fault("E317", message, hint="choose another name"), span)
    elif keyword.iskeyword(name) and name not in RESERVED:
        message = f"an input cannot be named {quote(name)}: the model is called with its inputs as arguments in Python"
        ctx.report(Fault("E317", message, hint="choose another name"), span)
    else:
        may_be_name(ctx, name, span)


def _input(ctx: Context, node: Node | None, axis: str, lengths: frozenset[str] = frozenset()) -> Wire | None:
    """Return the type of an input such as `{tokens: 50304}`.

    axis: the name of its length if it is not fixed. lengths: the words that several inputs may have as their length.
    """
    if not isinstance(node, Mapping):
        if node:
            ctx.report(Fault("E203", "the model must say what its input is", expected=_KINDS), node.span)
        return None
    kinds = [key for key in ALLOWED if key in node.entries]
    words = ALLOWED[kinds[0]] if len(kinds) == 1 else (*ALLOWED, "length", "grid")
    known_keys(ctx.run.report, node, words, "input")
    if len(kinds) != 1:
        if not node.incomplete:
            ctx.report(Fault("E202", "the input must be of exactly one kind", expected=_KINDS), node.span)
        return None
    if kinds == ["vector"]:
        width = _positive(ctx, node.get("vector"))
        return None if width is UNKNOWN else Wire("vector", width, origin=Origin("input", node.span))
    if kinds == ["image"]:
        return _image(ctx, node.entries["image"][1])
    return _sequence(ctx, node, kinds[0], axis, lengths)


def _sequence(ctx: Context, node: Mapping, kind: str, axis: str, lengths: frozenset[str]) -> Wire | None:
    """Return the type of an input of tokens or of features."""
    features = _positive(ctx, node.get(kind))
    length = _length(ctx, node.entries["length"][1], lengths) if "length" in node.entries else None
    grid = _grid(ctx, node.get("grid")) if "grid" in node.entries else None
    rate = _sample_rate(ctx, node.entries["sample_rate"][1]) if "sample_rate" in node.entries else None
    if UNKNOWN in (features, length, grid, rate):
        return None
    if grid and length and length != grid[0] * grid[1]:  # also if it is a word
        found = f"{length}, {grid[0]} x {grid[1]}"
        ctx.report(Fault("E412", "length must equal rows times columns", found=found), node.span)
    if grid:
        length = grid[0] * grid[1]
    origin = Origin("input", node.span)
    made = Wire("tokens" if kind == "tokens" else "sequence", features, length or axis, grid, origin)
    return made._replace(sample_rate=rate) if rate else made


def _length(ctx: Context, node: Node, lengths: frozenset[str]) -> Any:
    """Read a length: a number, or a word that several inputs have."""
    word = node.value if isinstance(node, Scalar) else None
    if word in lengths:
        return word
    if isinstance(word, str) and word.isidentifier() and word not in ctx.names:
        expected = "a number, a name in `let:`, or a word that another input has as its length too"
        hint = did_you_mean(word, [*lengths, *ctx.names])
        ctx.report(Fault("E303", f"unknown name {quote(word)}", expected=expected, hint=hint), node.span)
        return UNKNOWN
    return _positive(ctx, node)


def _image(ctx: Context, node: Node) -> Wire | None:
    if not isinstance(node, Mapping):
        fault = Fault("E203", "an image must be a mapping such as {size: 224, channels: 3}", found=kind_of(node))
        ctx.report(fault, node.span)
        return None
    known_keys(ctx.run.report, node, ("size", "channels"), "image")
    missing = Fault("E202", "an image needs a size", hint="size: 224, or size: [height, width]")
    given = required(ctx.report, node, "size", missing, node.span)
    size: Any = _grid(ctx, given) if given else UNKNOWN
    channels = _positive(ctx, node.get("channels")) if "channels" in node.entries else 3
    if size is UNKNOWN or channels is UNKNOWN:
        return None
    return Wire("image", channels, None, size, Origin("input", node.span))


def _positive(ctx: Context, node: Node | None) -> Any:
    assert node is not None
    value = number(ctx, node, whole=True)
    if value is not UNKNOWN and not 1 <= value <= 10**9:
        ctx.report(Fault("E209", "expected a positive number", found=str(value)), node)
        return UNKNOWN
    return value


def _sample_rate(ctx: Context, node: Node) -> Any:
    value = number(ctx, node)
    if value is UNKNOWN or 0 < value <= 10**9:
        return value
    fault = Fault("E209", "a sample rate must be positive, in Hz", found=f"{value:g}", hint="sample_rate: 16000")
    ctx.report(fault, node)
    return UNKNOWN


def _grid(ctx: Context, node: Node | None) -> Any:
    """Read a size: `224` or `[rows, columns]`."""
    if isinstance(node, Sequence):
        if len(node.items) != 2:
            count = len(node.items)
            message = "a size must be one number or two, [rows, columns]"
            ctx.report(Fault("E203", message, found=f"{count} number{'s' if count != 1 else ''}"), node.span)
            return UNKNOWN
        pair = [_positive(ctx, item) for item in node.items]
        return UNKNOWN if UNKNOWN in pair else tuple(pair)
    value = _positive(ctx, node)
    return UNKNOWN if value is UNKNOWN else (value, value)


# --- outputs ------------------------------------------------------------------------------------------------------


def read_outputs(ctx: Context, node: Node, body: graph.Graph) -> None:
    """Record the wires in `outputs:` as the results of the model; report invalid ones (E318)."""
    if not isinstance(node, Sequence) or not node.items:
        found = "an empty list" if isinstance(node, Sequence) else kind_of(node)
        fault = Fault("E318", "outputs must be a list of wires", found=found, hint="outputs: [logits, value]")
        ctx.report(fault, node.span)
        return
    inputs = {ctx.body.wires[name]: name for name in ctx.body.wires if ctx.body.wires[name] in body.reads}
    listed: set[str] = set()
    for item in node.items:
        if not isinstance(item, Scalar):
            ctx.report(Fault("E203", "an output must be the name of a wire", found=kind_of(item)), item.span)
            continue
        name = item.text
        if read_reference(name):
            message = "an output must have a name of its own"
            hint = f"name the wire of the layer above: `- aside: [{{identity: {{from: {name}, as: early}}}}]`"
            ctx.report(Fault("E318", message, found=name, hint=hint), item.span)
            continue
        if name in listed:
            ctx.report(Fault("E318", f"the output {quote(name)} is listed twice"), item.span)
            continue
        listed.add(name)
        (value,) = read_wires(ctx, item)
        if value in inputs:
            message = f"{quote(name)} is an input of the model"
            ctx.report(Fault("E318", message, expected="the output of a step, named with `as:`"), item.span)
        else:
            body.outputs[name] = value
    body.result = next(iter(body.outputs.values()), body.result)


def check_read(ctx: Context, node: Node | None, body: graph.Graph) -> None:
    """Report inputs in `inputs:` that no step reads (E319)."""
    read = {value for step in body.nodes for value in step.reads}
    for name, span, _ in node if isinstance(node, Mapping) else ():
        if ctx.body.wires[name] not in read:
            hint = f"read it with `from: {name}` or by a port, or remove it"
            ctx.report(Fault("E319", f"no step reads the input {quote(name)}", hint=hint), span)
