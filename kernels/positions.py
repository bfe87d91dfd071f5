"""Where sequences begin in a batch, the positions of tokens in their sequences, and rotary embedding of positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from seqblocks.errors import RunError, listing


def packed_resets(cu_seqlens: Tensor, seq: int, device: torch.device | None = None) -> Tensor:
    """Return the `resets` [1, S] of sequences packed into one row.

    cu_seqlens [n + 1] holds their bounds, from 0 to S. Raises RunError for other values if they are on the CPU; those
    on a device are not read, so that nothing waits for it.
    """
    _check_bounds(cu_seqlens, seq)
    cu_seqlens = cu_seqlens if device is None else cu_seqlens.to(device)
    # an empty sequence at the end would begin at S, which is cut off
    first = torch.zeros(1, seq + 1, dtype=torch.bool, device=cu_seqlens.device)
    return first.index_fill(1, cu_seqlens[:-1].long().clamp(max=seq), True)[:, :-1]


def _check_bounds(cu_seqlens: Tensor, seq: int) -> None:
    dtype, shape = cu_seqlens.dtype, list(cu_seqlens.shape)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or len(shape) != 1:
        raise RunError(f"cu_seqlens must be whole numbers of shape [n + 1], not {dtype} {shape}")
    if shape[0] < 2:
        raise RunError(f"cu_seqlens holds where sequences begin, and the end: two numbers or more, not {shape[0]}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():  # reading values would wait, or break a graph
        return
    bounds = cu_seqlens.tolist()
    falls = next((at for at in range(1, len(bounds)) if bounds[at] < bounds[at - 1]), None)
    if bounds[0] == 0 and bounds[-1] == seq and falls is None:
        return
    what = (
        f"falls from {bounds[falls - 1]} to {bounds[falls]}" if falls
        else f"begins with {bounds[0]}, not 0" if bounds[0]
        else f"ends with {bounds[-1]}, not {seq}, the tokens there are"
    )
    hint = ""
    if min(bounds) >= 0 and sum(bounds) == seq:
        hint = f"; these look like lengths, and their bounds are {listing([0, *accumulate(bounds)])}"
    raise RunError(f"cu_seqlens {what}: it holds the bounds of the sequences, from 0 on and never falling{hint}")


def running_positions(
    batch: int, seq: int, before: Tensor | None, resets: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the index of each token in its sequence [B, S], and that of the next token [B]; int64.

    before [B]: the second result of the last call; resets [B, S] bool: true where a token is the first of a sequence.
    """
    start = torch.zeros(batch, dtype=torch.long, device=device) if before is None else before
    count = torch.arange(seq, device=device).expand(batch, seq)
    index = count + start[:, None]
    if resets is not None:
        latest = torch.where(resets, count, -1).cummax(1).values
        index = torch.where(latest >= 0, count - latest, index)
    return index, index[:, -1] + 1 if seq else start


def check_resets(kernel: str, resets: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a kernel's `resets` have the shape [B, S] or are absent."""
    if resets is not None and resets.shape != shape:
        raise ValueError(f"{kernel} wants resets [B, S] = {list(shape)}; got {list(resets.shape)}")


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate features j and j + D/2 of x [B, S, H, D] by the angle position / base^(2 j / D) (arXiv:2104.09864).

    positions [B or 1, S], integers. D even. Angles are float64, so that a long stream is as exact as a short one.
    """
    return turned(x, positions, rotary_rates(x.shape[-1], base, x.device))


def rotary_rates(width: int, base: float, device: torch.device) -> Tensor:
    """The angles of a head's pairs of features [D/2] at position 1."""
    half = width // 2
    return base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)


def turned(x: Tensor, positions: Tensor, rates: Tensor) -> Tensor:
    """`rotary` with given rates."""
    half = x.shape[-1] // 2
    angle = (positions.unsqueeze(-1).double() * rates).unsqueeze(2)
    cos, sin = (t.to(torch.float64 if x.dtype == torch.float64 else torch.float32) for t in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def prepare_turning(width: int, base: float, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return f(x [B, H, D], positions [B]): `rotary` of one token of each sequence, with heads of this width."""
    rates = rotary_rates(width, base, device)
    both = torch.cat([-rates, rates])

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.unsqueeze(1) * both  # the sine of the first half is negative, and the cosine the same
        cos, sin = angle.cos().to(x.dtype).unsqueeze(1), angle.sin().to(x.dtype).unsqueeze(1)
        return (x * cos).addcmul_(x.roll(width // 2, -1), sin)

    return turn
