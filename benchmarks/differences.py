"""Say where two tensors differ: how many numbers, the first of them, and what their positions have in common.

A wrong kernel is often wrong at positions that name the fault: rows 32 to 47 of every 64, or all tokens of the second
chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TILES = (16, 64)  # rows of an operand of a tensor core, and of most tiles
FIRST = 3  # numbers that are shown


def differences(found: Tensor, expected: Tensor, allowed: float, chunks: Iterable[int] = ()) -> str:
    """Return "" if no number differs by more than `allowed`, otherwise where they differ.

    chunks: tokens per chunk or tile of the kernels, as far as they are known. NaN and infinity always differ.
    """
    exact = expected.detach().to("cpu", torch.float64)
    off = (found.detach().to("cpu", torch.float64) - exact).abs()
    bad = ~(off <= allowed)
    if not bad.any():
        return ""
    places = bad.nonzero()
    finite = off[off.isfinite()]
    lost = f", {off.numel() - finite.numel():,} not finite" if finite.numel() < off.numel() else ""
    largest = finite.max().item() if finite.numel() else float("nan")
    shown = "; ".join(
        f"{place.tolist()} is {found[tuple(place)].item():.6g} instead of {exact[tuple(place)].item():.6g}"
        for place in places[:FIRST]
    )
    count = f"{len(places):,} of {bad.numel():,} numbers differ by more than {allowed:.3g}, at most by {largest:.3g}"
    moduli = sorted({*TILES, *chunks})
    axes = [
        f"axis {axis} of {length:,}: {pattern(places[:, axis].unique().tolist(), length, moduli)}"
        for axis, length in enumerate(bad.shape) if length > 1
    ]
    return "\n    ".join([f"{count}{lost}; first {shown}", *axes])


def pattern(indices: list[int], length: int, moduli: Iterable[int]) -> str:
    """Return bad indices of an axis as ranges, and those modulo each number below its length."""
    told = [modulus for modulus in moduli if modulus < length and len(indices) < length]
    of_each = [f"modulo {modulus}: {_ranges(sorted({at % modulus for at in indices}), modulus)}" for modulus in told]
    return "; ".join([_ranges(indices, length), *of_each])


def _ranges(indices: list[int], length: int) -> str:
    """Return sorted indices as text: [0, 1, 2, 5] is "0-2, 5"."""
    if len(indices) == length:
        return "all"
    ends: list[list[int]] = []
    for at in indices:
        if ends and at == ends[-1][1] + 1:
            ends[-1][1] = at
        else:
            ends.append([at, at])
    words = [f"{a}-{b}" if a < b else str(a) for a, b in ends]
    return ", ".join(words if len(words) <= 8 else [*words[:8], f"… ({len(indices):,} in all)"])
