"""Faults of recipes that cannot make a parameter of its shape, and of the patterns of `rearrange`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from seqblocks.errors import Fault, listing, quote

Shape = tuple[int, ...]


def no_axis(axis: int, name: str, shape: Shape, low: int, high: int) -> Fault:
    found = _described(name, shape)
    return Fault("E209", f"there is no axis {axis}", at="axis", expected=f"from {low} to {high}", found=found)


def other_shape(given: Shape, name: str, shape: Shape, known: Iterable[Shape]) -> Fault:
    """Describe the `shape:` of an official tensor that the recipe cannot read. known: the shapes that it can."""
    expected = " or ".join(dict.fromkeys(str(list(each)) for each in known))
    found = f"{list(given)}; {_described(name, shape)}"
    return Fault(
        "E209", f"an official tensor of this shape cannot become {name}", at="shape", expected=expected, found=found
    )


def other_number_of_elements(given: Shape, name: str, shape: Shape) -> Fault:
    found = f"{list(given)}; {_described(name, shape)}"
    message = f"the shape has {math.prod(given)} elements, and {name} has {math.prod(shape)}"
    return Fault("E209", message, at="shape", found=found)


def sizes_of_parts(sizes: Shape, count: int, axis: int, name: str, shape: Shape) -> Fault:
    """Describe `sizes:` that do not add up to an axis. count: the number of official tensors."""
    message = f"the sizes do not divide axis {axis} of {name} among the {count} tensors"
    expected = f"{count} sizes with the sum {shape[axis]}"
    return Fault("E209", message, at="sizes", expected=expected, found=f"{list(sizes)}; {_described(name, shape)}")


def number_of_sizes(sizes: int, tensors: int) -> Fault:
    found = f"{sizes} sizes and {tensors} tensors"
    return Fault("E209", "each tensor needs a size", at="sizes", expected="as many as tensors", found=found)


def slice_too_long(start: int, length: int, end: int, name: str, shape: Shape) -> Fault:
    """Describe a slice of joined tensors, from `start`, that is longer than they are: `end`."""
    stop, latest = start + length, end - length
    return Fault(
        "E209",
        f"the slice for {name} ends after the last tensor: from {start} to {stop} of {end}",
        at="start" if start else "sizes",
        expected=f"a start of at most {latest}" if latest >= 0 else f"sizes with a sum of at least {stop}",
        found=_described(name, shape),
    )


def groups_do_not_divide(groups: int, axis: int, name: str, shape: Shape) -> Fault:
    message = f"axis {axis} of {name} is not a multiple of the number of groups"
    found = f"{groups}; {_described(name, shape)}"
    return Fault("E209", message, at="groups", expected=f"a divisor of {shape[axis]}", found=found)


def pattern_gives_other_shape(why: str, name: str, shape: Shape) -> Fault:
    message = f"the right side of the pattern does not have the shape of {name}"
    return Fault("E209", message, at="pattern", found=f"{why}; {_described(name, shape)}")


def _described(name: str, shape: Shape) -> str:
    return f"{name} has {len(shape)} ax{'i' if len(shape) == 1 else 'e'}s: {list(shape)}"


# ------------------------------------------------------------------------------
# Patterns


def pattern_too_long(most: int) -> Fault:
    return Fault("E209", "the pattern is too long", expected=f"at most {most} characters")


def not_two_sides(pattern: str) -> Fault:
    expected = '"row column -> column row"'
    return Fault("E209", "a pattern needs two sides and one '->'", expected=expected, found=quote(pattern))


def axes_not_on_both_sides(axes: Iterable[str]) -> Fault:
    return Fault("E209", "each axis must occur once on each side of the pattern", found=listing(axes))


def unexpected_in_pattern(token: str) -> Fault:
    return Fault("E209", f"unexpected {quote(token)} in the pattern", expected="names and parentheses")


def open_parenthesis() -> Fault:
    return Fault("E209", "the pattern has a parenthesis without its ')'")
