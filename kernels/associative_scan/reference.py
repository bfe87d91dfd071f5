"""The associative scan as defined: one element after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register


def run(combine: Callable[[list[Tensor], list[Tensor]], list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """leaves, each [B, S, ...] -> the states after each element."""
    states = [[leaf[:, :1] for leaf in leaves]]
    for t in range(1, leaves[0].shape[1]):
        states.append(combine(states[-1], [leaf[:, t : t + 1] for leaf in leaves]))
    return [torch.cat(leaf, 1) for leaf in zip(*states, strict=True)]


register("associative_scan", "reference", run, always("the sequential definition runs wherever torch does"))
