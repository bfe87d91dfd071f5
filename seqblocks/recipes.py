"""How a parameter is made of the tensors of an official release: the right-hand sides of a `checkpoint:` map.

A name is a tensor as it is; the other recipes join, cut or rearrange tensors. Each kind is a class that checks itself
against the shape of a parameter and makes the parameter. `seqblocks/analysis/maps.py` reads them from a spec, and
`seqblocks/checkpoint/official.py` follows them. torch is imported when a recipe is followed: graphs hold recipes, so
this file belongs to the declarations, and the checkpoint room, which needs the runtime, comes after the graphs.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar

from seqblocks.errors import Fault, RunError, listing, quote
from seqblocks.language.expressions import MAX_LENGTH

Shape = tuple[int, ...]
Tensor = Any  # torch's


class Recipe(ABC):
    """Base of all recipes."""

    kind: ClassVar[str] = ""
    """Its key in a map, which holds the official name or names; empty for a name alone."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The official tensors that it needs."""

    @abstractmethod
    def renamed(self, change: Callable[[str], str]) -> Recipe:
        """Return the same recipe for other official tensors."""

    @abstractmethod
    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        """Return our parameter `name` [shape] from the official tensors. Raise RunError where they do not fit."""

    def as_data(self) -> Any:
        """Return it as a map has it: a name, or a mapping such as {"concat": ["q", "k"], "axis": 0}."""
        values = {each: getattr(self, each) for each in own_fields(type(self))}
        return {self.kind: self._source(), **{key: value for key, value in values.items() if value is not None}}

    @abstractmethod
    def _source(self) -> str | list[str]:
        """The official name or names, as a map has them."""

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        """Return why it cannot make our parameter `name` of this shape, or None."""
        return None


@dataclass(repr=False, eq=False)
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

    def _require(self, holds: bool, name: str, whole: Tensor, expected: str) -> None:
        if not holds:
            found = f"is {list(whole.shape)} of {whole.dtype}"
            raise RunError(f"for {name} the official {self.official} must {expected}, and {found}")

    def _require_shape(self, name: str, whole: Tensor, *shapes: Shape) -> None:
        """Raise RunError for another shape, even one of as many numbers: those would be read in a wrong order."""
        expected = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        self._require(tuple(whole.shape) in shapes, name, whole, f"be {expected}")


@dataclass(repr=False, eq=False)
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

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        return _no_axis(self.axis, name, shape, -len(shape), len(shape) - 1)


class Name(FromOne):
    """An official tensor as it is."""

    def as_data(self) -> str:
        return self.official

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        return whole


class Concat(FromSeveral):
    """Official tensors joined along an axis of ours."""

    kind = "concat"

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        return torch.cat(tensors, self.axis or 0)


class Stack(FromSeveral):
    """Official tensors joined along a new axis."""

    kind = "stack"

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        return torch.stack(tensors, self.axis or 0)


@dataclass(repr=False, eq=False)
class Split(FromOne):
    """One of several equal parts that an official tensor joins or stacks along `axis`, or holds flat."""

    kind = "split"
    parts: int
    part: int
    axis: int | None = None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        return _no_axis(self.axis, name, shape, 0, len(shape))  # parts may lie along an axis after ours

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        axis = self.axis or 0
        stacked = (*shape[:axis], self.parts, *shape[axis:])
        joined = (*shape[:axis], self.parts * shape[axis], *shape[axis + 1 :]) if axis < len(shape) else stacked
        self._require_shape(name, whole, joined, stacked, (math.prod(stacked),))
        return whole.reshape(stacked).select(axis, self.part)


@dataclass(repr=False, eq=False)
class Slice(FromOne):
    """As much of an official tensor as ours holds, from `start` on along `axis`."""

    kind = "slice"
    start: int | None = None
    axis: int | None = None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        return _no_axis(self.axis, name, shape, -len(shape), len(shape) - 1)

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        axis, start = self.axis or 0, self.start or 0
        length = shape[axis]
        self._require(start + length <= whole.shape[axis], name, whole, f"have {length} from {start}")
        return whole.narrow(axis, start, length)


class Transpose(FromOne):
    """The last two axes swapped."""

    kind = "transpose"

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        swapped = whole.transpose(-1, -2)
        self._require(len(shape) > 1, name, whole, "have one axis, which needs no transpose")
        last = min(swapped.ndim, len(shape)) - 1  # from there on our axes may be one in the release
        *before, a, b = (*shape[:last], math.prod(shape[last:]))
        self._require_shape(name, whole, (*before, b, a))
        return swapped.reshape(shape)


class Reshape(FromOne):
    """The same numbers in our shape."""

    kind = "reshape"

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        sizes = " x ".join(map(str, shape))
        self._require(whole.numel() == math.prod(shape), name, whole, f"hold {sizes} numbers")
        return whole.reshape(shape)


class _ComplexPart(FromOne):
    """Base of recipes that take a part of a complex tensor: 0 the real one, 1 the imaginary one."""

    part: ClassVar[int]

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        (whole,) = tensors
        self._require(whole.is_complex(), name, whole, "be complex")
        return torch.view_as_real(whole).select(-1, self.part)


class Real(_ComplexPart):
    """The real part of a complex tensor."""

    kind = "real"
    part = 0


class Imag(_ComplexPart):
    """The imaginary part of a complex tensor."""

    kind = "imag"
    part = 1


@dataclass(repr=False, eq=False)
class Rearrange(FromOne):
    """Axes split, permuted and joined, in einops' notation. A size may be UNKNOWN while a spec is read."""

    kind = "rearrange"
    pattern: str
    sizes: Mapping[str, Any]

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        try:
            rearranged(self.pattern, self.sizes, shape)
        except ValueError as error:
            found = f"{error}; {_described(name, shape)}"
            return Fault("E209", "the pattern does not end in our shape", at="pattern", found=found)
        return None

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        from einops import rearrange

        (whole,) = tensors
        before, sizes = rearranged(self.pattern, self.sizes, shape)
        self._require_shape(name, whole, before)
        return rearrange(whole, self.pattern, **sizes)


RECIPES: dict[str, type[FromOne] | type[FromSeveral]] = {
    cls.kind: cls for cls in (Concat, Stack, Split, Slice, Transpose, Reshape, Real, Imag, Rearrange)
}


def words_of(kind: str) -> dict[str, bool]:
    """Return the keys that go with a recipe's kind, and whether each is required."""
    required = {"parts", "part", "pattern"}
    return {each: each in required for each in own_fields(RECIPES[kind]) if each != "sizes"}


def own_fields(cls: Any) -> tuple[str, ...]:
    """Return the fields of a recipe besides its official names."""
    return tuple(each.name for each in fields(cls)[1:])


def _no_axis(axis: int | None, name: str, shape: Shape, low: int, high: int) -> Fault | None:
    """Return the fault of an axis outside [low, high]."""
    if axis is None or low <= axis <= high:
        return None
    found = f"{axis}; {_described(name, shape)}"
    return Fault("E209", "there is no such axis", at="axis", expected=f"from {low} to {high}", found=found)


def _described(name: str, shape: Shape) -> str:
    return f"{name} has {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s: {list(shape)}"


# --- patterns of `rearrange` ----------------------------------------------------------------------------------------

Groups = tuple[tuple[str, ...], ...]  # axes, in the groups that are one axis of a tensor


@lru_cache(maxsize=256)
def read_pattern(text: str) -> tuple[Groups, Groups]:
    """Return both sides of an einops pattern. Raise Fault E209 for `...`, `_`, and axes that are on one side only."""
    if len(text) > MAX_LENGTH:
        raise Fault("E209", "the pattern is too long", expected=f"at most {MAX_LENGTH} characters")
    sides = [_groups(side) for side in text.split("->")]
    if len(sides) != 2:
        raise Fault("E209", "a pattern has two sides", expected='"row column -> column row"', found=quote(text))
    left, right = (sorted(chain(*side)) for side in sides)
    if left != right or len(set(left)) < len(left):
        odd = [axis for axis in dict.fromkeys((*left, *right)) if not left.count(axis) == right.count(axis) == 1]
        raise Fault("E209", "each axis is on both sides of the pattern, once", found=listing(odd))
    return sides[0], sides[1]


def _groups(side: str) -> Groups:
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
    return tuple(groups)


def rearranged(pattern: str, sizes: Mapping[str, Any], shape: Shape) -> tuple[Shape, dict[str, int]]:
    """Return the official shape that a pattern turns into ours, and the size of each axis. ValueError if none fits."""
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
