"""Weights between the tokens of a chunk: products of their decays.

B batch, H heads of keys, groups heads of values for each, N chunks of L tokens, K width of a key.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MIN_WEIGHT = 1e-17  # the least weight whose inverse squared, as in its derivative, is in the range of float32


class Decays:
    """Decay weights of a chunk: products of the factors e^g of its tokens, [..., L, K or 1], all at most 1.

    split: inverses of all weights of the chunk are in range, so that E_ts = from_start_t / from_start_s.
    """

    def __init__(self, decay: Tensor | None, groups: int, tracked: bool) -> None:
        """Compute the weights of decay [N, B, H, groups, L (, K)]. tracked: autograd records the computation."""
        self.decay, self.tracked, self.split = decay, tracked, False
        self._of_heads: dict[bool, Tensor] = {}
        if decay is None:
            return
        self.per_key = decay.dim() == 6
        factors = self._factors()
        self.length = factors.shape[-2]
        size = 1
        while size < self.length:
            factors = _joined(factors, size, tracked)
            size *= 2
        self.from_start = factors
        # with a decay per head and shared heads of keys, fewer products are needed without weights
        self.split = (self.per_key or groups == 1) and _safe(self.end)

    def _factors(self) -> Tensor:
        assert self.decay is not None
        return (self.decay if self.per_key else self.decay.unsqueeze(-1)).exp()

    @property
    def end(self) -> Tensor:
        """Return the decay of the state over the whole chunk: [N, B, H, groups, 1, K or 1]."""
        return self.from_start[..., -1:, :]

    @cached_property
    def levels(self) -> list[_Level]:
        """Return the levels from the longest blocks whose inverses are in range to the whole chunk."""
        early, size = self._factors(), 1
        while not _off_cpu(early) and size < self.length and _safe(_ends(early, size).unflatten(-2, (-1, 2)).prod(-2)):
            early = _joined(early, size, self.tracked)
            size *= 2
        inside = early.unflatten(-2, (-1, size))
        late = torch.ones_like(early) if size == 1 else (inside[..., -1:, :] / inside).flatten(-3, -2)
        levels = [_Level(size, early, late)]
        while size < self.length:
            late = _joined_backwards(late, _ends(early, size), size)
            early = _joined(early, size, True)
            size *= 2
            levels.append(_Level(size, early, late))
        return levels

    def reading(self, x: Tensor, before: bool = False) -> Operand:
        """Weight x [..., L, K] to read the state that enters the chunk; before: without the token's own decay."""
        if self.decay is None:
            return Operand(x, x, before)
        return Operand(x, x * (_one_later(self.from_start) if before else self.from_start), before)

    def writing(self, x: Tensor) -> Operand:
        """Weight x to be written to the state that leaves the chunk; with `split`, the caller multiplies by `end`."""
        if self.decay is None:
            return Operand(x, x, False)
        return Operand(x, x * (self._back if self.split else self.levels[-1].late), False)

    @cached_property
    def _back(self) -> Tensor:
        return self.from_start.reciprocal()

    def pairs(self, x: Operand, y: Operand) -> Tensor:
        """Return the sum over K of x_t E_ts y_s [..., L, L], where x reads and y is written.

        Valid for pairs s <= t, or s < t if x is read before its own decay. Other pairs are meaningless, but have finite
        gradients.
        """
        if self.decay is None or self.split:
            return x.weighted @ y.weighted.transpose(-1, -2)
        if self.per_key:
            return self._levelled(x.bare, y.bare, x.before)
        if x.before not in self._of_heads:
            one = torch.ones_like(self.from_start)
            self._of_heads[x.before] = self._levelled(one, one, x.before)
        return (x.bare @ y.bare.transpose(-1, -2)) * self._of_heads[x.before]

    def _levelled(self, x: Tensor, y: Tensor, before: bool) -> Tensor:
        """Compute `pairs` level by level, from pairs within the smallest blocks to pairs between chunk halves."""
        size, early, late = self.levels[0]
        x_blocks, y_blocks = (z.unflatten(-2, (-1, size)) for z in (x, y))
        if size == 1:
            found = (x_blocks * y_blocks).sum(-1, keepdim=True)
            found = found.expand(*early.shape[:-1], 1, 1).contiguous()  # heads of keys may be shared
        else:
            weights = early.unflatten(-2, (-1, size))
            reads = x_blocks * (_one_later(weights) if before else weights)
            found = reads @ (y_blocks / weights).transpose(-1, -2)
        for size, early, late in self.levels[:-1]:
            halves = (-1, 2, size)
            second, later = x.unflatten(-2, halves)[..., 1, :, :], early.unflatten(-2, halves)[..., 1, :, :]
            first, earlier = (z.unflatten(-2, halves)[..., 0, :, :] for z in (y, late))
            across = (second * (_one_later(later) if before else later)) @ (first * earlier).transpose(-1, -2)
            found = found.unflatten(-3, (-1, 2))
            found = of_quarters(found[..., 0, :, :], found[..., 1, :, :], across)
        return found.squeeze(-3)


class Operand(NamedTuple):
    """Rows that read the state, or keys that are written, without and with their decay weights."""

    bare: Tensor
    weighted: Tensor
    before: bool


class _Level(NamedTuple):
    """Weights [..., L, K or 1] within blocks of `size` tokens.

    early: from the start of the block up to and including a token; late: from the next token to the end of the block.
    """

    size: int
    early: Tensor
    late: Tensor


def _safe(ends: Tensor) -> bool:
    """Return whether the inverses of block weights are in float32's range. Values are read on the CPU only."""
    return not _off_cpu(ends) and bool(ends.amin() > MIN_WEIGHT)  # false for NaN


def _off_cpu(x: Tensor) -> bool:
    """Return whether reading values would synchronise with a device."""
    return x.device.type != "cpu"


def _ends(early: Tensor, size: int) -> Tensor:
    """Return the weights of whole blocks, [..., blocks, K]."""
    return early.unflatten(-2, (-1, size))[..., -1, :]


def _joined(early: Tensor, size: int, tracked: bool) -> Tensor:
    """Extend weights from the start of blocks to blocks twice as long, in place unless `tracked`."""
    first, second = early.unflatten(-2, (-1, 2, size)).unbind(-3)
    if tracked:
        return torch.stack([first, second * first[..., -1:, :]], -3).flatten(-4, -2)
    second.mul_(first[..., -1:, :])
    return early


def _joined_backwards(late: Tensor, ends: Tensor, size: int) -> Tensor:
    """Extend weights to the end of blocks to blocks twice as long. ends: weights of whole blocks."""
    first, second = late.unflatten(-2, (-1, 2, size)).unbind(-3)
    return torch.stack([first * ends[..., 1::2, :].unsqueeze(-2), second], -3).flatten(-4, -2)


def _one_later(x: Tensor) -> Tensor:
    """Shift x by one token, with 1 for the first token."""
    return torch.cat([torch.ones_like(x[..., :1, :]), x[..., :-1, :]], -2)


def of_quarters(first: Tensor, second: Tensor, below: Tensor) -> Tensor:
    """Return a block lower triangular matrix, assembled from its blocks."""
    above = torch.cat([first, torch.zeros_like(below)], -1)
    return torch.cat([above, torch.cat([below, second], -1)], -2)
