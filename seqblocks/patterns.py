"""The patterns of recipes, in the notation of einops: read without importing it, and solved for a shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from seqblocks.errors import Fault, listing, quote
from seqblocks.language.expressions import MAX_LENGTH

Shape = tuple[int, ...]
Groups = tuple[tuple[str, ...], ...]  # each group of named axes is one axis of the tensor


@lru_cache(maxsize=256)
def read_pattern(text: str) -> tuple[Groups, Groups]:
    """Return both sides of an einops pattern. Raises Fault E209 for `...`, `_`, and axes on one side only."""
    if len(text) > MAX_LENGTH:
        raise Fault("E209", "the pattern is too long", expected=f"at most {MAX_LENGTH} characters")
    sides = [_groups(side) for side in text.split("->")]
    if len(sides) != 2:
        message = "a pattern needs two sides and one '->'"
        raise Fault("E209", message, expected='"row column -> column row"', found=quote(text))
    left, right = (sorted(chain(*side)) for side in sides)
    if left != right or len(set(left)) < len(left):
        odd = [axis for axis in dict.fromkeys((*left, *right)) if not left.count(axis) == right.count(axis) == 1]
        raise Fault("E209", "each axis must occur once on each side of the pattern", found=listing(odd))
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
            message = f"unexpected {quote(token)} in the pattern"
            raise Fault("E209", message, expected="names and parentheses")
    if inside is not None:
        raise Fault("E209", "the pattern has a parenthesis without its ')'")
    return tuple(groups)


def rearranged(pattern: str, sizes: Mapping[str, Any], shape: Shape) -> tuple[Shape, dict[str, int]]:
    """Return the official shape that a pattern turns into ours, and the size of each axis.

    Raises ValueError if no shape fits.
    """
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
