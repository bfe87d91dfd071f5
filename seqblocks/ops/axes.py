"""Patterns of axes, as einops has them: tokens, rows, columns and features split, merged, reordered and reduced."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from seqblocks.errors import Fault, RunError, listing
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.types import UNBOUNDED, Facts, Wire

Axis = tuple[str, ...]  # what an axis is split into, outermost first
Sizes = dict[str, int | None]  # by name; None where only a call knows it

PREFIX = "axis_"
KINDS = {"vector": "features", "sequence": "seq features", "image": "channels rows columns"}


class Sides(NamedTuple):
    """A pattern's axes before and after the arrow."""

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]


class Reach(NamedTuple):
    """How far an output position reads: `within` its own token, a window of `tokens`, or the whole input."""

    kind: Literal["token", "window", "whole"]
    tokens: int = 1


@lru_cache(maxsize=256)
def parse(pattern: str) -> Sides:
    """Read a pattern. Raises Fault (E413)."""
    from einops import EinopsError
    from einops.parsing import ParsedExpression

    parts = pattern.split("->")
    if len(parts) != 2:
        raise _fault("a pattern has two sides", "seq (heads d) -> seq (d heads)", pattern)
    sides = []
    for part in parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of a name that is a keyword of Python
                parsed: Any = ParsedExpression(part.strip())
        except EinopsError as error:
            raise _fault(f"the pattern cannot be read: {str(error).splitlines()[0]}", None, part.strip()) from None
        if parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
            raise _fault("every axis of a pattern has a name", "a name, and its size: {…, n: 2}", part.strip())
        sides.append(tuple(tuple(axis) for axis in parsed.composition))
    return Sides(*sides)


def _parsed(pattern: str) -> Sides:
    return parse(pattern)


# torch.compile runs it instead of tracing it, see kernels.dispatch.compiled.constant, which needs torch.
_parsed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fault(message: str, expected: str | None = None, found: str | None = None, hint: str | None = None) -> Fault:
    return Fault("E413", message, at="pattern", expected=expected, found=found, hint=hint)


def names(axes: tuple[Axis, ...]) -> Iterator[str]:
    """The names in some axes, in order."""
    return (name for axis in axes for name in axis)


def shown(axis: Axis) -> str:
    """An axis as patterns write it."""
    return axis[0] if len(axis) == 1 else f"({' '.join(axis)})"


def axis_sizes(x: Wire, count: int) -> tuple[int | None, ...]:
    """The sizes of a wire that a pattern of so many axes sees, None where it is open. Raises Fault (E413)."""
    length = x.length if isinstance(x.length, int) else None
    seen: dict[int, tuple[int | None, ...]] = {1: (x.features,)}
    if x.kind == "sequence":
        seen = {2: (length, x.features)} | ({3: (*x.grid, x.features)} if x.grid else {})
    elif x.kind == "image":
        assert x.grid
        seen = {3: (x.features, *x.grid)}
    if count not in seen:
        wanted = KINDS[x.kind] + (", or rows columns features" if x.kind == "sequence" and x.grid else "")
        raise _fault(f"the left side of the pattern has {count} axes", wanted, str(x))
    return seen[count]


def solve(axes: tuple[Axis, ...], found: tuple[int | None, ...], given: dict[str, int]) -> Sizes:
    """The size of each name. Raises Fault (E413)."""
    sizes: Sizes = dict(given)
    for axis, size in zip(axes, found, strict=True):
        known = math.prod(given[name] for name in axis if name in given)
        missing = [name for name in axis if name not in given]
        if len(missing) > 1:
            hint = f"give all but one of them: {', '.join(f'{name}: …' for name in missing[1:])}"
            raise _fault(f"the sizes of {listing(missing)} in {shown(axis)} are not known", hint=hint)
        if size is None and not missing:
            hint = f"give the input a length of {known}, or leave out one of the sizes"
            raise _fault(f"the axis {shown(axis)} has {known} places, and the input's length is open", hint=hint)
        if size is not None and (size % known if missing else size != known):
            wanted = f"a multiple of {known}" if missing else f"{known}"
            raise _fault(f"{shown(axis)} does not fit the axis of the input", wanted, f"{size}")
        if missing:
            sizes[missing[0]] = None if size is None else size // known
    return sizes


class _Axes(Op):
    """Base of the verbs with a pattern. Keys that are not declared are sizes, by the names in the pattern."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    __pydantic_extra__: dict[str, Annotated[int, Field(ge=1, le=2**31)]]

    ports: ClassVar[tuple[Port, ...]] = (Port("x", "the input", main=True, kinds=("sequence", "vector", "image")),)
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
        """The sizes that are given, by the names that einops gets."""
        return {PREFIX + name: size for name, size in self.given.items()}

    def check_names(self) -> Sides:
        """The pattern's sides, if they go together. Raises Fault (E413)."""
        sides = parse(self.pattern)
        left, right = (set(names(side)) for side in sides)
        for key in self.given:
            if key not in left:
                message = f"the pattern has no axis called '{key}'"
                raise Fault("E413", message, at=key, expected=f"one of {listing(names(sides.left))}")
        if "batch" in left | right:
            raise _fault("the batch is not part of a pattern", hint="leave `batch` out on both sides")
        if extra := sorted(right - left):
            raise _fault(f"{listing(extra)} only occurs on the right", "names from the left side")
        if (lost := sorted(left - right)) and not self.may_drop:
            hint = f"`reduce: {{pattern: \"{self.pattern}\", by: mean}}` takes a mean over {listing(lost)}"
            raise _fault(f"{listing(lost)} only occurs on the left", "each name on both sides", hint=hint)
        return sides

    def sizes(self, x: Wire) -> tuple[Sides, Sizes]:
        sides = self.check_names()
        return sides, solve(sides.left, axis_sizes(x, len(sides.left)), self.given)

    def reach(self, x: Wire) -> Reach:
        """How far an output position reads."""
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
        fits = x.rate * tokens % made == 0
        return Reach("window", tokens) if fits or not isinstance(x.length, int) else Reach("whole")

    def shape(self, x: Wire) -> Wire:
        (_, right), sizes = self.sizes(x)
        reach, widths = self.reach(x), [_product(axis, sizes) for axis in right]
        inside = range(len(right)) if reach.kind == "whole" else range(len(right) - 1, len(right))
        if any(widths[at] is None for at in inside):
            hint = "give the input a length, or keep the open axis first in the first axis, as in (seq n)"
            raise _fault("the pattern moves an axis whose size is open", found=str(x), hint=hint)
        features = widths[0 if to_image(right) else -1] or 1
        if reach.kind == "token":
            return x.with_features(features)
        if reach.kind == "window":
            made = _product(right[0][1:], sizes) or 1
            if x.rate * reach.tokens % made:
                hint = f"the tokens here were made one from {x.rate}" if x.rate > 1 else "merge tokens first"
                message = f"the pattern makes {made} tokens of one: more than there were"
                raise Fault("E401", message, at="pattern", hint=hint)
            return x.at_rate(x.rate * reach.tokens // made).with_features(features)
        return _whole(x, right, [width or 1 for width in widths])

    def looks_ahead(self, x: Wire) -> int | float:
        reach = self.reach(x)
        return math.inf if reach.kind == "whole" else x.rate * (reach.tokens - 1)

    def cannot_stream(self, x: Wire) -> str | None:
        return "it reads the whole input" if self.reach(x).kind == "whole" else None

    def ignores_resets(self, x: Wire) -> str | None:
        left, right = parse(self.pattern)
        return None if left[:-1] == right[:-1] else "it moves tokens from place to place"

    def is_upright(self, x: Wire) -> bool:
        return any(len(side) == 3 for side in parse(self.pattern))

    def makes_grid(self) -> bool:
        _, right = parse(self.pattern)
        return len(right) == 3 and not to_image(right)

    def transform(self, x: Any, pattern: str) -> Any:
        """Run einops on x with the axes of `pattern`, the batch included."""
        from einops import rearrange

        return rearrange(x, pattern, **self.lengths)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from einops import EinopsError

        left, right = _parsed(self.pattern)
        if len(left) == 3 and x.dim() == 3:
            x = x.unflatten(1, call.grid_of(x))
        try:
            y = self.transform(x, " -> ".join(" ".join(["batch", *map(_prefixed, side)]) for side in (left, right)))
        except EinopsError as error:
            why = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            raise RunError(f"{self.verb}: an input of {list(x.shape)} does not fit '{self.pattern}': {why}") from None
        if len(right) < 3 or to_image(right):
            return y
        call.set_grid((y.shape[1], y.shape[2]))
        return y.flatten(1, 2)


def _prefixed(axis: Axis) -> str:
    """An axis as einops gets it: its functions have arguments, `tensor` among them, that a name could be taken for."""
    return shown(tuple(PREFIX + name for name in axis))


def to_image(right: tuple[Axis, ...]) -> bool:
    """Whether a right side is an image's: three axes, the first of which holds `channels`."""
    return len(right) == 3 and "channels" in right[0]


def _product(axis: Axis, sizes: Sizes) -> int | None:
    """The size of an axis, None if it is open."""
    found = [sizes[name] for name in axis]
    return None if None in found else math.prod(size for size in found if size is not None)


def _whole(x: Wire, right: tuple[Axis, ...], widths: list[int]) -> Wire:
    """The output where tokens are moved about, by the sizes of its axes."""
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

    The pattern has the axes of the wire without the batch: `seq features` (or `rows columns features` where the tokens
    are those of an image), `channels rows columns` for an image, `features` for a vector. Names are free, but a right
    side of three axes is an image where `channels` is in the first, and tokens with rows and columns elsewhere. Sizes
    that do not follow from the input are given by name: `p: 2, q: 2`.
    """

    def facts(self, x: Wire) -> Facts:
        return x.facts.range


@primitive("reduce")
class Reduce(_Axes):
    """Reduce axes by a pattern: those that are missing on its right side. "(seq n) features -> seq features", n: 4.

    See `rearrange` for patterns.
    """

    may_drop = True
    by: Literal["mean", "sum", "max", "min", "std"] = argument("mean", "how the numbers along these axes are combined")
    eps: float = argument(1e-5, "added to the variance before std takes the root", gt=0, le=1)

    def check_names(self) -> Sides:
        sides = super().check_names()
        if self.by == "std" and set(names(sides.left)) == set(names(sides.right)):
            raise _fault("by: std needs an axis to reduce", "a pattern with an axis that is missing on the right")
        return sides

    def deviation(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Return the standard deviation of the numbers along some axes: the root of their mean squared distance."""
        from torch import var

        return (var(x, axes, correction=0) + self.eps).sqrt()

    def facts(self, x: Wire) -> Facts:
        if self.by == "std":
            return Facts(low=math.sqrt(self.eps))
        return UNBOUNDED if self.by == "sum" else x.facts.range

    def transform(self, x: Any, pattern: str) -> Any:
        from einops import reduce

        if x.shape[1] == 0 and x.dim() == 3:
            raise RunError(f"reduce makes one number of one or more, and the sequence is empty: {list(x.shape)}")
        return reduce(x, pattern, self.deviation if self.by == "std" else self.by, **self.lengths)
