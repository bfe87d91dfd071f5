"""Recipes compute a parameter from official tensors; they are the right-hand sides of a `checkpoint:` map.

A plain name reads one tensor unchanged; other recipes join, split or rearrange tensors. Each kind is a class that
checks itself against the shape of a parameter, computes the parameter, and converts it back.
`seqblocks/analysis/checkpoint_maps/` reads recipes from a spec, and `seqblocks/checkpoint` applies them. torch is
imported only when a recipe is applied, because graphs contain recipes and must not need torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from seqblocks.errors import Fault, RunError, listing
from seqblocks.patterns import read_pattern, rearranged
from seqblocks.record import Record

Shape = tuple[int, ...]
Tensor = Any  # a torch.Tensor, without importing torch


class Share(Record):
    """The part of an official tensor that one parameter fills: `start` to `stop` in units of `cut`.

    cut: how the tensor is divided; shares of one tensor must agree on it. whole: the `stop` of the last share, or None
    if it is unknown.
    """

    cut: tuple[Any, ...]
    start: int
    stop: int
    whole: int | None = None


class Extent(Record):
    """The shape of an official tensor as far as one parameter determines it; a slice does not determine the total size.

    share: the part that the parameter fills, or None if it fills the tensor.
    """

    shape: Shape
    share: Share | None = None
    complex: bool = False


class Recipe(ABC):
    """Base class of recipes."""

    kind: ClassVar[str] = ""
    """The recipe's key in a map, whose value is the official name or names; empty for a plain name."""
    words: ClassVar[dict[str, bool]] = {}
    """The other keys of the recipe, which are also its attributes, and whether each is required."""

    def __init__(self, *values: Any, **more: Any) -> None:  # creating ten dataclasses takes 3 % of `check`
        given = {**dict(zip(self.words, values, strict=False)), **more}
        for word in self.words:
            setattr(self, word, given.get(word))

    def _with(self, **changes: Any) -> Recipe:
        """Return the same recipe with some attributes changed."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the official tensors that the recipe reads."""

    @abstractmethod
    def renamed(self, change: Callable[[str], str]) -> Recipe:
        """Return the same recipe with other official names."""

    @abstractmethod
    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        """Compute our parameter `name` [shape] from the official tensors. Raises RunError if they do not fit."""

    @abstractmethod
    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        """Return the extents of the official tensors, derived from the shape of our parameter.

        Raises RunError if the shape does not determine them.
        """

    @abstractmethod
    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        """Write our parameter's part of the official tensor with index `at` into `out`."""

    def as_data(self) -> Any:
        """Return the recipe as written in a map: a name, or a mapping such as {"concat": ["q", "k"], "axis": 0}."""
        values = {each: getattr(self, each) for each in self.words}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {self.kind: self._source(), **{key: value for key, value in values.items() if value is not None}}

    @abstractmethod
    def _source(self) -> str | list[str]:
        """Return the official name or names as they are written in a map."""

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        """Return why the recipe cannot compute our parameter `name` of this shape, or None."""
        return None


class FromOne(Recipe):
    """Base of recipes with one official tensor."""

    def __init__(self, official: str, *values: Any, **more: Any) -> None:
        self.official = official
        super().__init__(*values, **more)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.official,)

    def renamed(self, change: Callable[[str], str]) -> Recipe:
        return self._with(official=change(self.official))

    def _source(self) -> str:
        return self.official

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        self.make(name, tuple(ours.shape), out).copy_(ours)  # the result of `make` shares its memory with `out`

    def _require(self, holds: bool, name: str, whole: Tensor, expected: str) -> None:
        if not holds:
            found = f"is {list(whole.shape)} of {whole.dtype}"
            raise RunError(f"for {name} the official {self.official} must {expected}, and {found}")

    def _require_shape(self, name: str, whole: Tensor, *shapes: Shape) -> None:
        """Raise RunError for other shapes, even of the same size: elements would be read in the wrong order."""
        expected = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        self._require(tuple(whole.shape) in shapes, name, whole, f"be {expected}")


class FromSeveral(Recipe):
    """Base of recipes that join official tensors along `axis` (0 if None)."""

    words: ClassVar[dict[str, bool]] = {"axis": False}
    axis: int | None

    def __init__(self, officials: tuple[str, ...], *values: Any, **more: Any) -> None:
        self.officials = officials
        super().__init__(*values, **more)

    @property
    def names(self) -> tuple[str, ...]:
        return self.officials

    def renamed(self, change: Callable[[str], str]) -> Recipe:
        return self._with(officials=tuple(map(change, self.officials)))

    def _source(self) -> list[str]:
        return list(self.officials)

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        return _no_axis(self.axis, name, shape, -len(shape), len(shape) - 1)


class Name(FromOne):
    """One official tensor, unchanged."""

    def as_data(self) -> str:
        return self.official

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        return whole

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        return (Extent(shape),)


class Concat(FromSeveral):
    """Official tensors concatenated along `axis`, as equal parts or parts of the given `sizes`."""

    kind = "concat"
    words: ClassVar[dict[str, bool]] = {"axis": False, "sizes": False}
    sizes: Shape | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        fault = super().misfit(name, shape)
        if fault or self.sizes is None or not shape:
            return fault
        if len(self.sizes) == len(self.officials) and sum(self.sizes) == shape[self.axis or 0]:
            return None
        count, axis = len(self.officials), self.axis or 0
        message = f"the sizes do not divide axis {axis} of {name} among the {count} tensors"
        found = f"{list(self.sizes)}; {_described(name, shape)}"
        return Fault("E209", message, at="sizes", expected=f"{count} sizes with the sum {shape[axis]}", found=found)

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        joined = torch.cat(tensors, self.axis or 0)
        axis = self.axis or 0
        found = [tensor.shape[axis] for tensor in tensors]
        if tuple(joined.shape) == shape and found != self._sizes(name, shape):
            hint = f"sizes: [{', '.join(map(str, found))}]"
            raise RunError(f"for {name} the parts along axis {axis} are {found}; add `{hint}` to the recipe")
        return joined

    def _sizes(self, name: str, shape: Shape) -> list[int]:
        if self.sizes is not None:
            return list(self.sizes)
        count, whole = len(self.officials), shape[self.axis or 0]
        if whole % count:
            raise RunError(f"{list(shape)} is not {count} equal parts: add `sizes: [...]` to the recipe")
        return [whole // count] * count

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        axis = (self.axis or 0) % len(shape)
        return tuple(Extent((*shape[:axis], size, *shape[axis + 1 :])) for size in self._sizes(name, shape))

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        out.copy_(ours.split(self._sizes(name, tuple(ours.shape)), self.axis or 0)[at])


class Stack(FromSeveral):
    """Official tensors stacked along a new axis."""

    kind = "stack"

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        return torch.stack(tensors, self.axis or 0)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        axis = (self.axis or 0) % len(shape)
        return (Extent((*shape[:axis], *shape[axis + 1 :])),) * len(self.officials)

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        out.copy_(ours.select(self.axis or 0, at))


class Cut(FromSeveral):
    """A slice of the concatenation of official tensors along `axis`, from `start`, as long as our parameter.

    `sizes`: the size of each tensor along `axis`.
    """

    kind = "cut"
    words: ClassVar[dict[str, bool]] = {"sizes": True, "start": False, "axis": False}
    sizes: Shape
    start: int | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        fault = super().misfit(name, shape)
        if fault or not shape:
            return fault
        if len(self.sizes) != len(self.officials):
            found = f"{len(self.sizes)} sizes and {len(self.officials)} tensors"
            return Fault("E209", "each tensor needs a size", at="sizes", expected="as many as tensors", found=found)
        start, length, end = self.start or 0, shape[self.axis or 0], sum(self.sizes)
        stop, latest = start + length, end - length
        if stop <= end:
            return None
        return Fault(
            "E209",
            f"the slice for {name} ends after the last tensor: from {start} to {stop} of {end}",
            at="start" if start else "sizes",
            expected=f"a start of at most {latest}" if latest >= 0 else f"sizes with a sum of at least {stop}",
            found=_described(name, shape),
        )

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        found = [tensor.shape[self.axis or 0] for tensor in tensors]
        if found != list(self.sizes):
            expected = f"must be {list(self.sizes)} along axis {self.axis or 0}"
            raise RunError(f"for {name} the official {listing(self.officials)} {expected}, and they are {found}")
        return torch.cat(tensors, self.axis or 0).narrow(self.axis or 0, self.start or 0, shape[self.axis or 0])

    def _shares(self, shape: Shape) -> list[tuple[int, int]]:
        """Return the start and stop of our parameter's part of each official tensor, equal if that part is empty."""
        first = self.start or 0
        last, begins = first + shape[self.axis or 0], [sum(self.sizes[:at]) for at in range(len(self.sizes))]
        return [
            (min(max(first - begin, 0), size), min(max(last - begin, 0), size))
            for begin, size in zip(begins, self.sizes, strict=True)
        ]

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        axis = (self.axis or 0) % len(shape)
        return tuple(
            Extent((*shape[:axis], size, *shape[axis + 1 :]), Share(("slice", axis, 1), *share, size))
            for size, share in zip(self.sizes, self._shares(shape), strict=True)
        )

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        axis, shares = self.axis or 0, self._shares(tuple(ours.shape))
        start, stop = shares[at]
        before = sum(last - first for first, last in shares[:at])
        out.narrow(axis, start, stop - start).copy_(ours.narrow(axis, before, stop - start))


class Split(FromOne):
    """One of several equal parts of an official tensor: concatenated or stacked along `axis`, or flattened.

    `shape`: the official tensor's. Without it, all three layouts can be read, and concatenated parts are written.
    """

    kind = "split"
    words: ClassVar[dict[str, bool]] = {"parts": True, "part": True, "axis": False, "shape": False}
    parts: int
    part: int
    axis: int | None
    shape: Shape | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        fault = _no_axis(self.axis, name, shape, 0, len(shape))  # stacked parts may add a last axis
        return fault or _other_shape(self.shape, name, shape, self._shapes(shape))

    def _shapes(self, shape: Shape) -> tuple[Shape, ...]:
        axis = self.axis or 0
        stacked = (*shape[:axis], self.parts, *shape[axis:])
        joined = (*shape[:axis], self.parts * shape[axis], *shape[axis + 1 :]) if axis < len(shape) else stacked
        return joined, stacked, (math.prod(stacked),)

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        shapes = self._shapes(shape)
        self._require_shape(name, whole, *((self.shape,) if self.shape else shapes))
        return whole.reshape(shapes[1]).select(self.axis or 0, self.part)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        share = Share(("split", self.axis or 0, self.parts), self.part, self.part + 1, self.parts)
        return (Extent(self.shape or self._shapes(shape)[0], share),)


class Slice(FromOne):
    """A slice of an official tensor along `axis`, from `start`, as long as our parameter.

    `groups`: the axis consists of this many groups, such as heads, and each group is sliced.
    """

    kind = "slice"
    words: ClassVar[dict[str, bool]] = {"start": False, "axis": False, "groups": False}
    start: int | None
    axis: int | None
    groups: int | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        fault = _no_axis(self.axis, name, shape, -len(shape), len(shape) - 1)
        if fault or not shape[self.axis or 0] % (self.groups or 1):
            return fault
        axis = self.axis or 0
        message = f"axis {axis} of {name} is not a multiple of the number of groups"
        found = f"{self.groups or 1}; {_described(name, shape)}"
        return Fault("E209", message, at="groups", expected=f"a divisor of {shape[axis]}", found=found)

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        return self._cut(name, shape, *tensors).reshape(shape)

    def _cut(self, name: str, shape: Shape, whole: Tensor) -> Tensor:
        """Return our part of the official tensor, with the groups as a separate axis."""
        axis, start, groups = (self.axis or 0) % len(shape), self.start or 0, self.groups or 1
        length, rest = shape[axis] // groups, divmod(whole.shape[axis], groups)
        if groups > 1:
            self._require(not rest[1], name, whole, f"have {groups} equal groups along axis {axis}")
        of_groups = f" in each of {groups} groups" if groups > 1 else ""
        self._require(start + length <= rest[0], name, whole, f"have {length} from {start}{of_groups}")
        return whole.unflatten(axis, (groups, rest[0])).narrow(axis + 1, start, length)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        axis, groups, start = (self.axis or 0) % len(shape), self.groups or 1, self.start or 0
        stop = start + shape[axis] // groups
        share = Share(("slice", axis, groups), start, stop)
        return (Extent((*shape[:axis], stop * groups, *shape[axis + 1 :]), share),)

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        part = self._cut(name, tuple(ours.shape), out)
        part.copy_(ours.reshape(part.shape))


class Transpose(FromOne):
    """The last two axes swapped. `shape`: the official tensor's, needed if it merges the last of our axes into one."""

    kind = "transpose"
    words: ClassVar[dict[str, bool]] = {"shape": False}
    shape: Shape | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        if self.shape is None or len(shape) < 2:
            return None
        return _other_shape(self.shape, name, shape, [self._swapped(shape, axes) for axes in range(2, len(shape) + 1)])

    def _swapped(self, shape: Shape, axes: int) -> Shape:
        """Return an official shape of `axes` axes; the remaining axes of ours are merged into its last one."""
        *before, a, b = (*shape[: axes - 1], math.prod(shape[axes - 1 :]))
        return (*before, b, a)

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        swapped = whole.transpose(-1, -2)
        self._require(len(shape) > 1, name, whole, "have one axis, which needs no transpose")
        self._require_shape(name, whole, self.shape or self._swapped(shape, min(swapped.ndim, len(shape))))
        return swapped.reshape(shape)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        return (Extent(self.shape or self._swapped(shape, len(shape))),)

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        swapped = out.transpose(-1, -2)
        swapped.copy_(ours.reshape(swapped.shape))


class Reshape(FromOne):
    """The elements of an official tensor in our shape. `shape`: the official tensor's."""

    kind = "reshape"
    words: ClassVar[dict[str, bool]] = {"shape": False}
    shape: Shape | None

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        if self.shape is None or math.prod(self.shape) == math.prod(shape):
            return None
        message = f"the shape has {math.prod(self.shape)} elements, and {name} has {math.prod(shape)}"
        return Fault("E209", message, at="shape", found=f"{list(self.shape)}; {_described(name, shape)}")

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        (whole,) = tensors
        sizes = " x ".join(map(str, shape))
        self._require(whole.numel() == math.prod(shape), name, whole, f"hold {sizes} elements")
        if self.shape:
            self._require_shape(name, whole, self.shape)
        return whole.reshape(shape)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        if self.shape is None:
            what = f"it is a reshape of {self.official}, whose shape is unknown"
            raise RunError(f"{what}: add `shape: [...]` to the recipe")
        return (Extent(self.shape),)

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        out.copy_(ours.reshape(out.shape))


class _ComplexPart(FromOne):
    """Base of recipes that take one part of a complex tensor: 0 is real, 1 is imaginary."""

    part: ClassVar[int]

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        import torch

        (whole,) = tensors
        self._require(whole.is_complex(), name, whole, "be complex")
        return torch.view_as_real(whole).select(-1, self.part)

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        return (Extent(shape, Share(("complex",), self.part, self.part + 1, 2), complex=True),)


class Real(_ComplexPart):
    """The real part of a complex tensor."""

    kind = "real"
    part = 0


class Imag(_ComplexPart):
    """The imaginary part of a complex tensor."""

    kind = "imag"
    part = 1


class Rearrange(FromOne):
    """Axes split, permuted and merged, in the notation of einops. A size may be UNKNOWN while a spec is read.

    `index`: the first axis of the right side is not one of ours: our parameter is the part with this index.
    """

    kind = "rearrange"
    words: ClassVar[dict[str, bool]] = {"pattern": True, "sizes": False, "index": False}
    pattern: str
    sizes: Mapping[str, Any]
    index: Any

    def misfit(self, name: str, shape: Shape) -> Fault | None:
        try:
            _, _, count = self._sides(shape)
        except ValueError as error:
            message = f"the right side of the pattern does not have the shape of {name}"
            return Fault("E209", message, at="pattern", found=f"{error}; {_described(name, shape)}")
        if not isinstance(self.index, int) or count is None or self.index < count:
            return None
        expected = f"from 0 to {count - 1}"
        return Fault("E209", "there is no part with this index", at="index", expected=expected, found=f"{self.index}")

    def _sides(self, shape: Shape) -> tuple[Shape, dict[str, int], int | None]:
        """Return the official shape, the size of each axis, and the number of parts, None without `index`.

        Raises ValueError if no shape fits.
        """
        if self.index is None:
            return *rearranged(self.pattern, self.sizes, shape), None
        right = read_pattern(self.pattern)[1]
        if len(right) != len(shape) + 1:
            raise ValueError(f"with `index`, the pattern must end in {len(shape) + 1} axes, and ends in {len(right)}")
        first = right[0]
        sizes = [self.sizes.get(axis) for axis in first]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"the sizes of {listing(first)} are not given")
        count = math.prod(size for size in sizes if size is not None)
        return *rearranged(self.pattern, self.sizes, (count, *shape)), count

    def make(self, name: str, shape: Shape, *tensors: Tensor) -> Tensor:
        from einops import rearrange

        (whole,) = tensors
        before, sizes, count = self._sides(shape)
        self._require_shape(name, whole, before)
        if count is None:
            return rearrange(whole, self.pattern, **sizes)
        part, axes, pattern = self._part(whole, sizes)
        return rearrange(part, f"{axes} -> {pattern}", **self._sizes_in(axes, sizes))

    def _part(self, whole: Tensor, sizes: Mapping[str, int]) -> tuple[Tensor, str, str]:
        """Return our part of the official tensor as a view, the names of its axes, and the pattern of our parameter.

        The other parts are not read: the tensor may be that of many experts.
        """
        left, (first, *ours) = read_pattern(self.pattern)
        axes = [axis for group in left for axis in group]
        part, rest = whole.reshape([sizes[axis] for axis in axes]), self.index
        for axis in reversed(first):
            rest, at = divmod(rest, sizes[axis])
            part = part.select(axes.index(axis), at)
            axes.remove(axis)
        return part, " ".join(axes), " ".join(f"({' '.join(group)})" for group in ours)

    @staticmethod
    def _sizes_in(axes: str, sizes: Mapping[str, int]) -> dict[str, int]:
        return {axis: sizes[axis] for axis in axes.split()}

    def extents(self, name: str, shape: Shape) -> tuple[Extent, ...]:
        before, sizes, count = self._sides(shape)
        if count is None:
            return (Extent(before),)
        cut = ("rearrange", self.pattern, *sorted(sizes.items()))
        return (Extent(before, Share(cut, self.index, self.index + 1, count)),)

    def put(self, name: str, ours: Tensor, at: int, out: Tensor) -> None:
        from einops import rearrange

        before, after = self.pattern.split("->")
        _, sizes, count = self._sides(tuple(ours.shape))
        if count is None:
            out.copy_(rearrange(ours, f"{after} -> {before}", **sizes))
            return
        part, axes, pattern = self._part(out, sizes)
        part.copy_(rearrange(ours, f"{pattern} -> {axes}", **self._sizes_in(axes, sizes)))


RECIPES: dict[str, type[FromOne] | type[FromSeveral]] = {
    cls.kind: cls for cls in (Concat, Stack, Cut, Split, Slice, Transpose, Reshape, Real, Imag, Rearrange)
}


LISTS = ("sizes", "shape")  # keys whose value is a list of integers; the others take one integer


def words_of(kind: str) -> dict[str, bool]:
    """Return the other keys of a kind of recipe, and whether each is required."""
    words = RECIPES[kind].words
    return {"pattern": True, "index": False} if RECIPES[kind] is Rearrange else words  # and the names of its axes


def _no_axis(axis: int | None, name: str, shape: Shape, low: int, high: int) -> Fault | None:
    """Return a fault if an axis is outside [low, high]."""
    if axis is None or low <= axis <= high:
        return None
    message = f"there is no axis {axis}"
    return Fault("E209", message, at="axis", expected=f"from {low} to {high}", found=_described(name, shape))


def _other_shape(given: Shape | None, name: str, shape: Shape, known: Iterable[Shape]) -> Fault | None:
    """Return a fault if a recipe cannot read an official tensor of the `shape` that the spec gives."""
    if given is None or given in known:
        return None
    message = f"an official tensor of this shape cannot become {name}"
    expected = " or ".join(dict.fromkeys(str(list(each)) for each in known))
    return Fault("E209", message, at="shape", expected=expected, found=f"{list(given)}; {_described(name, shape)}")


def _described(name: str, shape: Shape) -> str:
    return f"{name} has {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s: {list(shape)}"
