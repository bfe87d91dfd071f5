"""Starts of packed sequences, positions of tokens within their sequences, and rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from seqblocks.errors import RunError, listing


def packed_resets(cu_seqlens: Tensor, seq: int, device: torch.device | None = None) -> Tensor:
    """Return the `resets` [1, S], bool, of n sequences packed into one row.

    cu_seqlens [n + 1], integers: the bounds of the sequences, from 0 to S. device: of the result; by default that of
    cu_seqlens. Raises RunError for a wrong dtype or shape, and for wrong values if they are on the CPU: values on
    another device are not read, to avoid a synchronisation.
    """
    _check_bounds(cu_seqlens, seq)
    cu_seqlens = cu_seqlens if device is None else cu_seqlens.to(device)
    # An empty last sequence would begin at S, and that column is cut off.
    first = torch.zeros(1, seq + 1, dtype=torch.bool, device=cu_seqlens.device)
    return first.index_fill(1, cu_seqlens[:-1].long().clamp(max=seq), True)[:, :-1]


def _check_bounds(cu_seqlens: Tensor, seq: int) -> None:
    dtype, shape = cu_seqlens.dtype, list(cu_seqlens.shape)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or len(shape) != 1:
        raise RunError(f"cu_seqlens must be integers of shape [n + 1], not {dtype} {shape}")
    if shape[0] < 2:
        raise RunError(f"cu_seqlens needs at least two numbers, the start of each sequence and the end; got {shape[0]}")
    # Reading the values would synchronise the device, or break the graph of a compiler.
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bounds = cu_seqlens.tolist()
    falls = next((at for at in range(1, len(bounds)) if bounds[at] < bounds[at - 1]), None)
    if bounds[0] == 0 and bounds[-1] == seq and falls is None:
        return
    what = (
        f"decreases from {bounds[falls - 1]} to {bounds[falls]}" if falls
        else f"begins with {bounds[0]}, not 0" if bounds[0]
        else f"ends with {bounds[-1]}, not {seq}, the number of tokens"
    )
    hint = ""
    if min(bounds) >= 0 and sum(bounds) == seq:
        hint = f"; these look like lengths, whose bounds are {listing([0, *accumulate(bounds)])}"
    raise RunError(f"cu_seqlens {what}: the bounds of sequences start at 0 and never decrease{hint}")


def running_positions(
    batch: int, seq: int, before: Tensor | None, resets: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the index [B, S] of each token in its sequence, and the index [B] of the next token; int64.

    before [B]: the second result of the previous call, None at the start. resets [B, S] bool: true where a token is the
    first of a sequence.
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
        raise ValueError(f"{kernel} expects resets [B, S] = {list(shape)}; got {list(resets.shape)}")


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate features j and j + D/2 of x [B, S, H, D] by the angle position / base^(2 j / D) (arXiv:2104.09864).

    positions [B or 1, S]: integers. D is even. Returns [B, S, H, D] in the dtype of x. Angles are computed in float64,
    so that precision does not decrease along a stream.
    """
    return turned(x, positions, rotary_rates(x.shape[-1], base, x.device))


def rotary_rates(width: int, base: float, device: torch.device) -> Tensor:
    """Return the angles [D/2] at position 1 of the pairs of features of a head of width D, float64."""
    half = width // 2
    return base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)


def turned(x: Tensor, positions: Tensor, rates: Tensor, interleaved: bool = False, amplitude: float = 1.0) -> Tensor:
    """Return `rotary` of x with the given rates [D/2], times the amplitude.

    positions [B or 1, S], or [B or 1, S, D/2] of each pair. interleaved: the pairs are features 2 j and 2 j + 1.
    """
    half = x.shape[-1] // 2
    positions = positions.unsqueeze(-1) if positions.dim() == 2 else positions
    angle = (positions.double() * rates).unsqueeze(2)
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (t if amplitude == 1 else amplitude * t for t in (angle.cos(), angle.sin()))
    cos, sin = cos.to(exact), sin.to(exact)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pairs = a * cos - b * sin, b * cos + a * sin
    return (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)


def prepare_turning(
    rates: Tensor, interleaved: bool = False, amplitude: float = 1.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return f(x [B, H, D], positions [B]) -> [B, H, D]: `turned` for one token of each sequence, with rates [D/2]."""
    both = torch.stack([-rates, rates], -1).flatten() if interleaved else torch.cat([-rates, rates])

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.unsqueeze(1) * both  # Negative rates negate the sine of the first of a pair, not its cosine.
        cos, sin = (amplitude * t if amplitude != 1 else t for t in (angle.cos(), angle.sin()))
        cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
        other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(len(rates), -1)
        return (x * cos).addcmul_(other, sin)

    return turn
