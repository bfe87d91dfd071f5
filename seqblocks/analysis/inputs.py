"""`input:` -> the type of the wire that enters a model."""

from __future__ import annotations

from typing import Any

from seqblocks.analysis.context import Context
from seqblocks.analysis.values import number
from seqblocks.errors import Fault, Span
from seqblocks.language.document import Mapping, Node, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import known_keys, required
from seqblocks.types import Origin, Wire

EXPECTED = "{tokens: vocabulary}, {features: width} or {image: {size: 224, channels: 3}}"


def read_input(ctx: Context, model: Mapping, span: Span | None) -> Wire | None:
    """Return the type of `input: {tokens: 50304}`, `{features: 384}` or `{image: {size: 224, channels: 3}}`."""
    message = "the model must say what its input is"
    node = required(ctx.report, model, "input", Fault("E202", message, expected=EXPECTED), span)
    if not isinstance(node, Mapping):
        if node:
            ctx.report(Fault("E203", message, expected=EXPECTED), node.span)
        return None
    kinds = [key for key in ("tokens", "features", "image") if key in node.entries]
    allowed = {"tokens": ("tokens", "length"), "features": ("features", "length", "grid"), "image": ("image",)}
    words = allowed[kinds[0]] if len(kinds) == 1 else (*allowed, "length", "grid")
    known_keys(ctx.run.report, node, words, "input")
    if len(kinds) != 1:
        if not node.incomplete:
            ctx.report(Fault("E202", "the input is of one kind", expected=EXPECTED), node.span)
        return None
    return _image(ctx, node.entries["image"][1]) if kinds == ["image"] else _sequence(ctx, node, kinds[0])


def _sequence(ctx: Context, node: Mapping, kind: str) -> Wire | None:
    """Return the type of an input of tokens or of features."""
    features = _positive(ctx, node.get(kind))
    length = _positive(ctx, node.get("length")) if "length" in node.entries else None
    grid = _grid(ctx, node.get("grid")) if "grid" in node.entries else None
    if features is UNKNOWN or length is UNKNOWN or grid is UNKNOWN:
        return None
    if grid and length and length != grid[0] * grid[1]:
        found = f"{length}, {grid[0]} x {grid[1]}"
        ctx.report(Fault("E412", "length must be rows times columns", found=found), node.span)
    if grid:
        length = grid[0] * grid[1]
    origin = Origin("input", node.span)
    return Wire("tokens" if kind == "tokens" else "sequence", features, length or "seq", grid, origin)


def _image(ctx: Context, node: Node) -> Wire | None:
    if not isinstance(node, Mapping):
        ctx.report(Fault("E203", "an image is {size: 224, channels: 3}", found=kind_of(node)), node.span)
        return None
    known_keys(ctx.run.report, node, ("size", "channels"), "image")
    missing = Fault("E202", "an image needs its size", hint="size: 224, or size: [height, width]")
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
        ctx.report(Fault("E209", "a positive number is needed here", found=str(value)), node)
        return UNKNOWN
    return value


def _grid(ctx: Context, node: Node | None) -> Any:
    """`224` or `[rows, columns]`."""
    if isinstance(node, Sequence):
        if len(node.items) != 2:
            ctx.report(Fault("E203", "two numbers: [rows, columns]", found=f"{len(node.items)} of them"), node.span)
            return UNKNOWN
        pair = [_positive(ctx, item) for item in node.items]
        return UNKNOWN if UNKNOWN in pair else tuple(pair)
    value = _positive(ctx, node)
    return UNKNOWN if value is UNKNOWN else (value, value)
