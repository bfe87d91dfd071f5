"""`input:` -> the type of the wire that enters a model."""

from __future__ import annotations

from typing import Any

from seqblocks.analysis.scope import Scope
from seqblocks.errors import Fault, Span
from seqblocks.language.document import Mapping, Node, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import known_keys
from seqblocks.language.vocabulary import hidden
from seqblocks.types import Origin, Wire


def read_input(scope: Scope, node: Node | None, span: Span | None) -> Wire | None:
    """`input: {tokens: 50304}`, `{features: 384}`, `{image: {size: 224, channels: 3}}`."""
    expected = "{tokens: vocabulary}, {features: width} or {image: {size: 224, channels: 3}}"
    if not isinstance(node, Mapping):
        scope.fault(
            Fault("E202" if node is None else "E203", "the model must say what its input is", expected=expected),
            node.span if node else span,
        )
        return None
    kinds = [key for key in ("tokens", "features", "image") if key in node.entries]
    allowed = {"tokens": ("tokens", "length"), "features": ("features", "length", "grid"), "image": ("image",)}
    words = allowed[kinds[0]] if len(kinds) == 1 else (*allowed, "length", "grid")
    known_keys(scope.report, node, words, "input")
    if len(kinds) != 1:
        if not any(key not in words for key in node.entries):
            scope.fault(Fault("E202", "the input is of one kind", expected=expected), node.span)
        return None
    kind = kinds[0]
    if kind == "image":
        return _image(scope, node.entries["image"][1])
    features = _positive(scope, node.get(kind))
    length = _positive(scope, node.get("length")) if "length" in node.entries else None
    grid = _grid(scope, node.get("grid")) if "grid" in node.entries else None
    if features is UNKNOWN or length is UNKNOWN or grid is UNKNOWN:
        return None
    if grid and length and length != grid[0] * grid[1]:
        scope.fault(
            Fault("E412", "length must be rows times columns", found=f"{length}, {grid[0]} x {grid[1]}"), node.span
        )
    if grid:
        length = grid[0] * grid[1]
    origin = Origin("input", node.span)
    return Wire("tokens" if kind == "tokens" else "sequence", features, length or "seq", grid, origin)


def _image(scope: Scope, node: Node) -> Wire | None:
    if not isinstance(node, Mapping):
        scope.fault(Fault("E203", "an image is {size: 224, channels: 3}", found=kind_of(node)), node.span)
        return None
    known_keys(scope.report, node, ("size", "channels"), "image")
    if "size" not in node.entries:
        if not hidden(node.entries, "size", ("size", "channels")):
            scope.fault(Fault("E202", "an image needs its size", hint="size: 224, or size: [height, width]"), node.span)
        return None
    size = _grid(scope, node.get("size"))
    channels = _positive(scope, node.get("channels")) if "channels" in node.entries else 3
    if size is UNKNOWN or channels is UNKNOWN:
        return None
    return Wire("image", channels, None, size, Origin("input", node.span))


def _positive(scope: Scope, node: Node | None) -> Any:
    assert node is not None
    value = scope.number(node, whole=True)
    if value is not UNKNOWN and not 1 <= value <= 10**9:
        scope.fault(Fault("E209", "a positive number is needed here", found=str(value)), node)
        return UNKNOWN
    return value


def _grid(scope: Scope, node: Node | None) -> Any:
    """`224` or `[rows, columns]`."""
    if isinstance(node, Sequence):
        if len(node.items) != 2:
            scope.fault(Fault("E203", "two numbers: [rows, columns]", found=f"{len(node.items)} of them"), node.span)
            return UNKNOWN
        pair = [_positive(scope, item) for item in node.items]
        return UNKNOWN if UNKNOWN in pair else tuple(pair)
    value = _positive(scope, node)
    return UNKNOWN if value is UNKNOWN else (value, value)
