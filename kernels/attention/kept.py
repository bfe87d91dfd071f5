"""First tokens of a sequence that stay visible outside the window.

B batch, S new tokens, K cached tokens of the window, F first tokens, T = F + K + S keys (S without a state).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.resets import along


class Kept(NamedTuple):
    """first: F. places [B, T]: position of each key in its sequence, -1 for unused slots. single: whether each row of
    the batch is one sequence."""

    first: int
    places: Tensor
    single: bool


def indices(before: Tensor | None, past: int, first: int, index: Tensor) -> Tensor:
    """Return the positions [B, T] of slots, cached and new keys. A first token that is also cached has no slot.

    before [B]: tokens of the sequence so far. index [B, S]: positions of the new tokens.
    """
    if before is None:
        return index
    start = before.unsqueeze(-1)
    slots = torch.arange(first, device=index.device)
    cached = start - torch.arange(past, 0, -1, device=index.device)
    return torch.cat([torch.where(slots < start - past, slots, -1), cached.clamp(min=-1), index], 1)


def updated(slots: Tensor, x: Tensor, length: Tensor) -> Tensor:
    """Return the slots [B, F, ...] after the tokens x [B, S, ...]; length [B]: tokens of the sequence after them.

    Slots of tokens that do not exist yet are zeros.
    """
    S = x.shape[1]
    if S == 0:
        return slots.clone()
    place = S - length.unsqueeze(-1) + torch.arange(slots.shape[1], device=x.device)  # in x
    taken = x.gather(1, along(place.clamp(0, S - 1), x).expand(-1, -1, *x.shape[2:]))
    new = torch.where(along(place < S, taken), taken, 0.0).to(slots.dtype)
    return torch.where(along(place < 0, slots), slots, new)
