"""Where sequences begin in a batch, where a token stands in its own, and rotary embedding of that position."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_resets(cu_seqlens: Tensor, seq: int) -> Tensor:
    """The `resets` [1, S] of sequences packed into one row; cu_seqlens [n + 1] holds their bounds, 0 first.

    Nothing waits for the device: an empty sequence at the end would begin at S, which is a place beyond the result.
    """
    first = torch.zeros(1, seq + 1, dtype=torch.bool, device=cu_seqlens.device)
    return first.index_fill(1, cu_seqlens[:-1].long().clamp(max=seq), True)[:, :-1]


def running_positions(
    batch: int, seq: int, before: Tensor | None, resets: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Index of each token since its sequence began [B, S], and that of the token to come [B]; int64.

    before [B]: what the last call returned; resets [B, S] bool: true where a token is the first of a sequence.
    """
    start = torch.zeros(batch, dtype=torch.long, device=device) if before is None else before
    count = torch.arange(seq, device=device).expand(batch, seq)
    index = count + start[:, None]
    if resets is not None:
        latest = torch.where(resets, count, -1).cummax(1).values
        index = torch.where(latest >= 0, count - latest, index)
    return index, index[:, -1] + 1 if seq else start


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn features j and j + D/2 of x [B, S, H, D] by the angle position / base^(2 j / D) (arXiv:2104.09864).

    positions [B or 1, S], integers. D even. Angles are float64, so that a long stream turns as exactly as a short one.
    """
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (positions.unsqueeze(-1).double() * rates).unsqueeze(2)
    cos, sin = (t.to(torch.float64 if x.dtype == torch.float64 else torch.float32) for t in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
