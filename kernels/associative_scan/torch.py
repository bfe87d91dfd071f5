"""The associative scan in 2 log2(S) calls of the operator (Brent & Kung 1982): S combinations in halving batches.

Neighbours are combined, and the resulting sequence of half the length is scanned, which yields every second state. One
more call yields the states in between.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register


def run(combine: Callable[[list[Tensor], list[Tensor]], list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """Return the states after each element, given leaves [B, S, ...]."""
    S = leaves[0].shape[1]
    if S == 1:
        return leaves
    odd = run(combine, combine([x[:, : S - 1 : 2] for x in leaves], [x[:, 1::2] for x in leaves]))
    if S == 2:
        return [torch.cat([x[:, :1], y], 1) for x, y in zip(leaves, odd, strict=True)]
    even = combine([x[:, : (S - 1) // 2] for x in odd], [x[:, 2::2] for x in leaves])
    return [_interleaved(x, y, z) for x, y, z in zip(leaves, even, odd, strict=True)]


def _interleaved(elements: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """Interleave odd and even states after the first element."""
    both = torch.stack([odd[:, : even.shape[1]], even], 2).flatten(1, 2)
    rest = odd[:, even.shape[1] :]  # with an even number of elements, the last state is an odd one
    return torch.cat([elements[:, :1], both, rest], 1)


register("associative_scan", "torch", run, always("in logarithmically many calls, on any device"))
