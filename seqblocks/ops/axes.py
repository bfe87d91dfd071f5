"""Rearrange and reduce axes by einops patterns: split, merge, reorder and reduce tokens, rows, columns and features."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from seqblocks.errors import Fault, RunError, listing
from seqblocks.op import FLOATS, Op, Port, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import UNBOUNDED, Facts, Tokens, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

Axis = tuple[str, ...]  # parts of an axis, outermost first
Sizes = dict[str, int | None]  # by name; None if the size is not fixed

PREFIX = "axis_"
KINDS = {"vector": "features", "sequence": "seq features", "image": "channels rows columns"}


class Sides(NamedTuple):
    """The axes of a pattern before and after the arrow."""

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]


class Reach(NamedTuple):
    """How far an output position reads: `within` its token, a window of `tokens`, or the whole input."""

    kind: Literal["token", "window", "whole"]
    tokens: int = 1


@lru_cache(maxsize=256)
def parse(pattern: str) -> Sides:
    """Read a pattern. Raises Fault (E413)."""
    parts = pattern.split("->")
    if len(parts) != 2:
        raise _fault("a pattern must have two sides", "seq (heads d) -> seq (d heads)", pattern)
    sides = []
    for part in parts:
        if (plain := _plain(part.strip())) is not None:
            sides.append(plain)
            continue
        from einops import EinopsError
        from einops.parsing import ParsedExpression

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of a name that is a keyword of Python
                parsed: Any = ParsedExpression(part.strip())
        except EinopsError as error:
            raise _fault(f"the pattern cannot be read: {str(error).splitlines()[0]}", None, part.strip()) from None
        if parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
            raise _fault("every axis of a pattern must have a name", "a name, and its size: {…, n: 2}", part.strip())
        sides.append(tuple(tuple(axis) for axis in parsed.composition))
    return Sides(*sides)


def _plain(side: str) -> tuple[Axis, ...] | None:
    """Return the axes of a side that consists of names and groups of names, for which einops need not be imported."""
    axes = tuple(tuple(axis.strip("()").split()) for axis in re.findall(r"\(.*?\)|\S+", side))
    found = [*names(axes)]
    plain = all(name.isidentifier() and name.isascii() and name.strip("_") == name != "axis" for name in found)
    return axes if plain and len({*found}) == len(found) and " ".join(map(shown, axes)) == side else None


def _parsed(pattern: str) -> Sides:
    return parse(pattern)


# torch.compile runs it instead of tracing it, see kernels.dispatch.compiled.constant, which needs torch.
_parsed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fault(message: str, expected: str | None = None, found: str | None = None, hint: str | None = None) -> Fault:
    return Fault("E413", message, at="pattern", expected=expected, found=found, hint=hint)


def names(axes: tuple[Axis, ...]) -> Iterator[str]:
    """Return the names in some axes, in order."""
    return (name for axis in axes for name in axis)


def shown(axis: Axis) -> str:
    """Return an axis in the notation of patterns."""
    return axis[0] if len(axis) == 1 else f"({' '.join(axis)})"


def axis_sizes(x: Wire, count: int) -> tuple[int | None, ...]:
    """Return the sizes of a wire for a pattern of `count` axes, None where the size is open. Raises Fault (E413)."""
    length = x.length if isinstance(x.length, int) else None
    seen: dict[int, tuple[int | None, ...]] = {1: (x.features,)}
    if x.kind == "sequence":
        seen = {2: (length, x.features)} | ({3: (*x.grid, x.features)} if x.grid else {})
    elif x.kind == "image":
        assert x.grid
        seen = {3: (x.features, *x.grid)}
    if count not in seen:
        expected = KINDS[x.kind] + (", or rows columns features" if x.kind == "sequence" and x.grid else "")
        raise _fault(f"the left side of the pattern has {count} axes", expected, str(x))
    return seen[count]


def solve(axes: tuple[Axis, ...], found: tuple[int | None, ...], given: dict[str, int]) -> Sizes:
    """Return the size of each name. Raises Fault (E413)."""
    sizes: Sizes = dict(given)
    for axis, size in zip(axes, found, strict=True):
        known = math.prod(given[name] for name in axis if name in given)
        missing = [name for name in axis if name not in given]
        if len(missing) > 1:
            hint = f"give all but one of them: {', '.join(f'{name}: …' for name in missing[1:])}"
            raise _fault(f"the sizes of {listing(missing)} in {shown(axis)} are unknown", hint=hint)
        if size is None and not missing:
            hint = f"give the input a length of {known}, or remove one of the sizes"
            raise _fault(f"the axis {shown(axis)} has {known} positions, but the length is not fixed", hint=hint)
        if size is not None and (size % known if missing else size != known):
            expected = f"a multiple of {known}" if missing else f"{known}"
            raise _fault(f"{shown(axis)} does not match the axis of the input", expected, f"{size}")
        if missing:
            sizes[missing[0]] = None if size is None else size // known
    return sizes


class _Axes(Op):
    """Base of the verbs with a pattern. Undeclared keys are sizes of the names in the pattern."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    __pydantic_extra__: dict[str, Annotated[int, Field(ge=1, le=2**31)]]

    ports: ClassVar[tuple[Port, ...]] = (Port("x", "the input", main=True, kinds=FLOATS),)
    reads = "all"
    open_keys = True
    may_drop: ClassVar[bool] = False  # whether names may be missing on the right
    pattern: str = argument(..., "the axes before and after `->`, without the batch")
    source = "einops (Rogozhnikov, ICLR 2022)"

    @property
    def given(self) -> dict[str, int]:
        return self.__pydantic_extra__ or {}

    @property
    def lengths(self) -> dict[str, int]:
        """Return the given sizes, by the names passed to einops."""
        return {PREFIX + name: size for name, size in self.given.items()}

    def check_names(self) -> Sides:
        """Return the two sides of the pattern. Raises Fault (E413) if their names do not match."""
        sides = parse(self.pattern)
        left, right = (set(names(side)) for side in sides)
        for key in self.given:
            if key not in left:
                message = f"the pattern has no axis '{key}'"
                raise Fault("E413", message, at=key, expected=f"one of {listing(names(sides.left))}")
        if "batch" in left | right:
            raise _fault("the batch must not be part of a pattern", hint="remove `batch` from both sides")
        if extra := sorted(right - left):
            raise _fault(f"{listing(extra)} occurs only on the right", "names from the left side")
        if (dropped := sorted(left - right)) and not self.may_drop:
            hint = f"`reduce: {{pattern: \"{self.pattern}\", by: mean}}` takes a mean over {listing(dropped)}"
            raise _fault(f"{listing(dropped)} occurs only on the left", "each name on both sides", hint=hint)
        return sides

    def sizes(self, x: Wire) -> tuple[Sides, Sizes]:
        sides = self.check_names()
        return sides, solve(sides.left, axis_sizes(x, len(sides.left)), self.given)

    def reach(self, x: Wire) -> Reach:
        """Return how far an output position reads."""
        (left, right), sizes = self.sizes(x)
        if x.kind == "vector" and len(right) == 1:
            return Reach("token")
        if x.kind != "sequence" or len(left) != len(right) or to_image(right):
            return Reach("whole")
        if left[:-1] == right[:-1]:
            return Reach("token")
        if len(left) != 2 or left[0][:1] != right[0][:1]:
            return Reach("whole")
        tokens, made = (_product(side[0][1:], sizes) for side in (left, right))
        if tokens is None or made is None or (tokens > 1 and made > 1):
            return Reach("whole")
        return Reach("window", tokens)

    def shape(self, x: Wire) -> Wire:
        (_, right), sizes = self.sizes(x)
        reach, widths = self.reach(x), [_product(axis, sizes) for axis in right]
        inside = range(len(right)) if reach.kind == "whole" else range(len(right) - 1, len(right))
        if any(widths[at] is None for at in inside):
            hint = "give the input a length, or keep the open axis at the front of the first axis, as in (seq n)"
            raise _fault("the pattern moves an axis whose size is not fixed", found=str(x), hint=hint)
        features = widths[0 if to_image(right) else -1] or 1
        if reach.kind == "token":
            return x.with_features(features)
        if reach.kind == "window":
            made = _product(right[0][1:], sizes) or 1
            return x.at_rate(x.rate * Fraction(reach.tokens, made)).with_features(features)
        return _whole(x, right, [width or 1 for width in widths])

    def looks_ahead(self, x: Wire) -> Tokens:
        reach = self.reach(x)
        return math.inf if reach.kind == "whole" else x.rate * (reach.tokens - 1)

    def looks_back(self, x: Wire) -> Tokens:
        return 0 if self.reach(x).kind == "token" else math.inf

    def cannot_stream(self, x: Wire) -> str | None:
        return "it reads the whole input" if self.reach(x).kind == "whole" else None

    def ignores_resets(self, x: Wire) -> str | None:
        left, right = parse(self.pattern)
        return None if left[:-1] == right[:-1] else "it reorders tokens"

    def is_upright(self, x: Wire) -> bool:
        return any(len(side) == 3 for side in parse(self.pattern))

    def makes_grid(self) -> bool:
        _, right = parse(self.pattern)
        return len(right) == 3 and not to_image(right)

    def turns_length_into_width(self, x: Wire) -> bool:
        left, right = parse(self.pattern)
        of_features = left[0] if x.kind == "image" else left[-1]
        lengths = {*names(left)} - {*of_features} - {*self.given}
        return not lengths.isdisjoint(right[0 if to_image(right) else -1])

    def transform(self, x: Tensor, pattern: str) -> Tensor:
        """Apply einops to x with the axes of `pattern`, including the batch."""
        from einops import rearrange

        return rearrange(x, pattern, **self.lengths)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from einops import EinopsError

        left, right = _parsed(self.pattern)
        if len(left) == 3 and x.dim() == 3:
            x = x.unflatten(1, call.grid_of(x))
        try:
            y = self.transform(x, " -> ".join(" ".join(["batch", *map(_prefixed, side)]) for side in (left, right)))
        except EinopsError as error:
            why = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            raise RunError(f"{self.verb}: input {list(x.shape)} does not match '{self.pattern}': {why}") from None
        if len(right) < 3 or to_image(right):
            return y
        call.set_grid((y.shape[1], y.shape[2]))
        return y.flatten(1, 2)


def _prefixed(axis: Axis) -> str:
    """Prefix a name for einops, because its functions have arguments, such as `tensor`, that could clash with it."""
    return shown(tuple(PREFIX + name for name in axis))


def to_image(right: tuple[Axis, ...]) -> bool:
    """Return whether a right side is that of an image: three axes, of which the first contains `channels`."""
    return len(right) == 3 and "channels" in right[0]


def _product(axis: Axis, sizes: Sizes) -> int | None:
    """Return the size of an axis, or None if it is open."""
    found = [sizes[name] for name in axis]
    return None if None in found else math.prod(size for size in found if size is not None)


def _whole(x: Wire, right: tuple[Axis, ...], widths: list[int]) -> Wire:
    """Return the output type of a pattern that reorders tokens, from the sizes of its axes."""
    if to_image(right):
        return Wire("image", widths[0], None, (widths[1], widths[2]))
    if len(right) == 1:
        return Wire("vector", widths[0])
    if len(right) > 3 or not right:
        raise _fault(f"the right side of the pattern has {len(right)} axes", listing(KINDS.values()))
    length = math.prod(widths[:-1])
    before = x.length if isinstance(x.length, int) else 0
    rate = x.rate * before // length if before and x.rate * before % length == 0 else 1
    grid = (widths[0], widths[1]) if len(right) == 3 else None
    return Wire("sequence", widths[-1], length, grid, rate=rate)


@primitive("rearrange")
class Rearrange(_Axes):
    """Split, merge and reorder axes by a pattern: "(rows p) (columns q) features -> rows columns (p q features)".

    The pattern lists the axes of the wire without the batch: `seq features` (or `rows columns features` for the tokens
    of an image), `channels rows columns` for an image, `features` for a vector. Names are arbitrary, except that a
    right side of three axes is an image if the first contains `channels`, and otherwise tokens with rows and columns.
    Sizes that do not follow from the input are set by name: `p: 2, q: 2`.
    """

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        left, right = parse(self.pattern)
        if [*names(left)] == [*names(right)]:
            return tape.view(x, tape.out)
        if all(len(axis) == 1 for axis in right):
            return tape.view(x, tape.out, dense=False)
        y = tape.new(tape.out, x.item)
        tape.function([x], [y])
        return y



@primitive("reduce")
class Reduce(_Axes):
    """Reduce the axes that are missing on the right side of a pattern: "(seq n) features -> seq features", n: 4.

    See `rearrange` for patterns.
    """

    may_drop = True
    by: Literal["mean", "sum", "max", "min", "std"] = argument("mean", "how to reduce the values along these axes")
    eps: float = argument(1e-5, "added to the variance before std takes the square root", gt=0, le=1)

    def check_names(self) -> Sides:
        sides = super().check_names()
        if self.by == "std" and set(names(sides.left)) == set(names(sides.right)):
            raise _fault("by: std needs an axis to reduce", "a pattern with an axis that occurs only on the left")
        return sides

    def deviation(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return the standard deviation along some axes: the square root of the mean squared deviation."""
        from torch import var

        if x.numel() == 0:  # for which `var` warns
            return x.mean(axes)
        return (var(x, axes, correction=0) + self.eps).sqrt()

    def facts(self, x: Wire) -> Facts:
        if self.by == "std":
            return Facts(low=math.sqrt(self.eps))
        return UNBOUNDED if self.by == "sum" else x.facts.range

    def transform(self, x: Tensor, pattern: str) -> Tensor:
        from einops import reduce

        left, right = _parsed(self.pattern)
        is_over_tokens = not {*names(left[:1])} <= {*self.given, *names(right)}
        if is_over_tokens and x.dim() == 3 and x.shape[1] == 0:
            raise RunError(f"reduce needs at least one value, but the sequence is empty: {list(x.shape)}")
        return reduce(x, pattern, self.deviation if self.by == "std" else self.by, **self.lengths)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        match self.by:
            case "mean":
                return tape.mean(x, tape.out)
            case "sum":
                return tape.sum(x, tape.out)
            case "std":
                variance = tape.new(tape.out, x.item)
                tape.function([x], [variance], [x], 2 * x.bytes)
                return tape.unary(tape.add(variance, tape.new(())), ["output"])
        return tape.extreme(x, tape.out)
