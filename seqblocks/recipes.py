"""How a parameter is made of the tensors of an official release: the right-hand sides of a `checkpoint:` map.

A name stands for a tensor as it is; the other recipes join, cut or rearrange tensors.
`seqblocks/analysis/maps.py` reads them from a spec and checks them against the shapes of the parameters;
`seqblocks/checkpoint.py` applies them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar

from seqblocks.errors import Fault, listing, quote
from seqblocks.language.expressions import MAX_LENGTH


class Recipe:
    """Base of all recipes."""

    kind: ClassVar[str] = ""
    """Its key in a map, which holds the official name or names; empty for a name alone."""

    @property
    def names(self) -> tuple[str, ...]:
        """The official tensors it needs."""
        raise NotImplementedError

    def renamed(self, change: Callable[[str], str]) -> Recipe:
        """Return the same recipe for other official tensors."""
        raise NotImplementedError

    def as_data(self) -> Any:
        """Return it as a map has it: a name, or a mapping such as {"concat": ["q", "k"], "axis": 0}."""
        held = {each: getattr(self, each) for each in own_fields(type(self))}
        return {self.kind: self._source(), **{key: value for key, value in held.items() if value is not None}}

    def _source(self) -> str | list[str]:
        raise NotImplementedError

    def misfit(self, name: str, shape: tuple[int, ...]) -> Fault | None:
        """Return why it cannot make our parameter `name` of this shape, or None."""
        return None


@dataclass(frozen=True, repr=False, eq=False)
class FromOne(Recipe):
    """Base of recipes with one official tensor."""

    official: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.official,)

    def renamed(self, change: Callable[[str], str]) -> Recipe:
        return replace(self, official=change(self.official))

    def _source(self) -> str:
        return self.official


@dataclass(frozen=True, repr=False, eq=False)
class FromSeveral(Recipe):
    """Base of recipes that join official tensors along `axis` (0 if None)."""

    officials: tuple[str, ...]
    axis: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.officials

    def renamed(self, change: Callable[[str], str]) -> Recipe:
        return replace(self, officials=tuple(map(change, self.officials)))

    def _source(self) -> list[str]:
        return list(self.officials)

    def misfit(self, name: str, shape: tuple[int, ...]) -> Fault | None:
        return _no_axis(self.axis, name, shape)


class Name(FromOne):
    """An official tensor as it is."""

    def as_data(self) -> str:
        return self.official


class Concat(FromSeveral):
    """Official tensors joined along an axis of ours."""

    kind = "concat"


class Stack(FromSeveral):
    """Official tensors joined along a new axis."""

    kind = "stack"


@dataclass(frozen=True, repr=False, eq=False)
class Split(FromOne):
    """One of several equal parts that an official tensor joins or stacks along `axis`, or holds flat."""

    kind = "split"
    parts: int
    part: int
    axis: int | None = None

    def misfit(self, name: str, shape: tuple[int, ...]) -> Fault | None:
        return _no_axis(self.axis, name, shape, low=0, high=len(shape))  # parts may lie along an axis after ours


@dataclass(frozen=True, repr=False, eq=False)
class Slice(FromOne):
    """As much of an official tensor as ours holds, from `start` on along `axis`."""

    kind = "slice"
    start: int | None = None
    axis: int | None = None

    def misfit(self, name: str, shape: tuple[int, ...]) -> Fault | None:
        return _no_axis(self.axis, name, shape)


class Transpose(FromOne):
    """The last two axes swapped."""

    kind = "transpose"


class Reshape(FromOne):
    """The same numbers in our shape."""

    kind = "reshape"


class Real(FromOne):
    """The real part of a complex tensor."""

    kind = "real"


class Imag(FromOne):
    """The imaginary part of a complex tensor."""

    kind = "imag"


@dataclass(frozen=True, repr=False, eq=False)
class Rearrange(FromOne):
    """Axes split, permuted and joined, in einops' notation. `sizes` may hold what is UNKNOWN yet."""

    kind = "rearrange"
    pattern: str
    sizes: Mapping[str, Any]

    def misfit(self, name: str, shape: tuple[int, ...]) -> Fault | None:
        try:
            rearranged(self.pattern, self.sizes, shape)
        except ValueError as error:
            found = f"{error}; {_described(name, shape)}"
            return Fault("E209", "the pattern does not end in our shape", at="pattern", found=found)
        return None


RECIPES: dict[str, type[FromOne] | type[FromSeveral]] = {
    cls.kind: cls for cls in (Concat, Stack, Split, Slice, Transpose, Reshape, Real, Imag, Rearrange)
}


def words_of(kind: str) -> dict[str, bool]:
    """The keys that go with a recipe's kind, and whether each is required."""
    required = {"parts", "part", "pattern"}
    return {each: each in required for each in own_fields(RECIPES[kind]) if each != "sizes"}


def own_fields(cls: Any) -> tuple[str, ...]:
    """The fields of a recipe besides its official names."""
    return tuple(each.name for each in fields(cls)[1:])


def _no_axis(
    axis: int | None, name: str, shape: tuple[int, ...], low: int | None = None, high: int | None = None
) -> Fault | None:
    """Return the fault of an axis that is not in [low, high], by default the axes of `shape`, also from its end."""
    low, high = -len(shape) if low is None else low, len(shape) - 1 if high is None else high
    if axis is None or low <= axis <= high:
        return None
    found = f"{axis}; {_described(name, shape)}"
    return Fault("E209", "there is no such axis", at="axis", expected=f"from {low} to {high}", found=found)


def _described(name: str, shape: tuple[int, ...]) -> str:
    return f"{name} has {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s: {list(shape)}"


# --- patterns of `rearrange` ----------------------------------------------------------------------------------------

Groups = tuple[tuple[str, ...], ...]  # axes, in the groups that are one axis of a tensor


@lru_cache(maxsize=256)
def read_pattern(text: str) -> tuple[Groups, Groups]:
    """Both sides of an einops pattern without `...`, `_` and new or lost axes. Raises Fault E209."""
    if len(text) > MAX_LENGTH:
        raise Fault("E209", "the pattern is too long", expected=f"at most {MAX_LENGTH} characters")
    sides = []
    for side in text.split("->"):
        groups: list[tuple[str, ...]] = []
        inside: list[str] | None = None
        for token in re.findall(r"[^\W\d]\w*|\S", side):
            if token == "(" and inside is None:
                inside = []
            elif token == ")" and inside is not None:
                groups.append(tuple(inside))
                inside = None
            elif token == "1" and inside is None:
                groups.append(())
            elif token.isidentifier() and token != "_":
                groups.append((token,)) if inside is None else inside.append(token)
            else:
                raise Fault("E209", f"{quote(token)} has no place in a pattern", expected="names and parentheses")
        if inside is not None:
            raise Fault("E209", "a parenthesis of the pattern is open")
        sides.append(tuple(groups))
    if len(sides) != 2:
        raise Fault("E209", "a pattern has two sides", expected='"row column -> column row"', found=quote(text))
    left, right = (sorted(chain(*side)) for side in sides)
    if left != right or len(set(left)) < len(left):
        odd = [axis for axis in dict.fromkeys((*left, *right)) if not left.count(axis) == right.count(axis) == 1]
        raise Fault("E209", "each axis is on both sides of the pattern, once", found=listing(odd))
    return sides[0], sides[1]


def rearranged(
    pattern: str, sizes: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], dict[str, int]]:
    """The official shape that a pattern turns into ours, and the size of every axis. ValueError if there is none."""
    left, right = read_pattern(pattern)
    if len(right) != len(shape):
        raise ValueError(f"the pattern ends in {len(right)} axes")
    known: dict[str, int] = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    for group, size in zip(right, shape, strict=True):
        open_axes = [axis for axis in group if axis not in known]
        rest, over = divmod(size, math.prod(known[axis] for axis in group if axis in known))
        if len(open_axes) > 1:
            raise ValueError(f"the sizes of {listing(open_axes)} are not given")
        if over or (rest != 1 and not open_axes):
            raise ValueError(f"({' '.join(group) or 1}) is not {size}")
        known |= dict.fromkeys(open_axes, rest)
    return tuple(math.prod(known[axis] for axis in group) for group in left), known
