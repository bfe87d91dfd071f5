"""Centaurus for whole sequences, by the plan that is counted cheapest.

chunks   features -> channels, then per channel a matrix [T, T] within chunks of T tokens and the states between them,
         then -> features. Exact like the recurrence, linear in the length, and the only plan that carries a state or
         knows resets.
project  the same projections around one convolution per channel, by FFT over the whole length.
fold     projections folded into one kernel per pair of features, G[o, i] = sum_n C[o, n] K[n] B[n, i], applied by
         FFT: cheaper where there are few features and many channels, as in mode full.

An FFT mixes all tokens, so its rounding (2^-24 of the largest value in float32) reaches the past too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.centaurus_reference import Bank
from seqblocks.kernels.dispatch import always, register

CHUNK = 64
CHUNK_WITH_RESETS = 16  # a product per pair of tokens and sequence replaces a matrix product
WORKING_SET = 1 << 22  # elements of one such product

# A multiply-accumulate in an FFT costs this many of those in a matrix product (measured on two CPU cores).
FFT_WEIGHT = 4.0


def run(
    bank: Bank,
    x: Tensor,
    state: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    return_state: bool,
    plan: str | None,
) -> tuple[Tensor, Tensor | None]:
    """x [B, S, H], state [B, N, M, 2] -> y [B, S, G] and, from the chunks plan, the last state.

    ValueError for a plan that cannot do what is asked.
    """
    x = x.to(bank.decay.dtype)
    if x.numel() == 0:
        return bank.nothing(x), bank.fresh(x) if state is None else state
    whole = state is None and resets is None and not return_state
    plan = plan or (cheapest(bank, x) if whole else "chunks")
    if plan == "chunks":
        return _chunks(bank, x, state, resets, reverse)
    if plan not in ("project", "fold") or (plan == "fold" and bank.mode == "dws"):
        raise ValueError(f"centaurus, mode {bank.mode}, has no plan {plan!r}")
    if not whole:
        raise ValueError(f"plan {plan!r} carries no state and knows no resets; use 'chunks'")
    return (_project if plan == "project" else _fold)(bank, x, reverse), None


def counts(bank: Bank, x: Tensor) -> dict[str, float]:
    """Multiply-accumulates of each plan that fits, those of FFTs and pointwise products weighted."""
    (batch, S, H), (N, M) = x.shape, bank.decay.shape
    G = bank.C.shape[0] if bank.C.dim() == 2 else N // H if bank.mode == "full" else H
    around = batch * S * N * (H + G if bank.C.dim() == 2 else 2)
    T = min(CHUNK, S)
    powers = 4 * N * M  # exp, cos and sin of one lag, as products
    out = {"chunks": around + batch * S * N * (T + 4 * M) + FFT_WEIGHT * T * (powers + N * T)}
    size = fast_length(2 * S)
    fft = 1.25 * size * max(1, size.bit_length())
    kernel = S * (powers + 2 * N * M) + fft * N
    out["project"] = around + FFT_WEIGHT * (kernel + 2 * fft * batch * N + 2 * size * batch * N)
    if bank.mode != "dws":
        fold = 0 if bank.mode == "full" else size * N * H * G
        out["fold"] = fold + FFT_WEIGHT * (kernel + fft * batch * (H + G) + 2 * size * batch * H * G)
    return out


def cheapest(bank: Bank, x: Tensor) -> str:
    """The plan with the least weighted count; compiled code takes chunks, which are real and of one size."""
    if torch.compiler.is_compiling():
        return "chunks"
    found = counts(bank, x)
    return min(found, key=found.__getitem__)


def fast_length(n: int) -> int:
    """The least even number from n on whose only prime factors are 2, 3 and 5."""
    size = max(2, n + n % 2)
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 2


def _powers(bank: Bank, lags: Tensor) -> tuple[Tensor, Tensor]:
    """exp((decay + i turn) l): real and imaginary part [N, M, lags]."""
    size = torch.exp(bank.decay.unsqueeze(-1) * lags)
    angle = bank.turn.unsqueeze(-1) * lags
    return size * torch.cos(angle), size * torch.sin(angle)


def _kernel(bank: Bank, S: int) -> Tensor:
    """K [N, S], one sub-state after the other: [N, M, S] is never held."""
    lags = torch.arange(S, device=bank.decay.device, dtype=bank.decay.dtype)
    total: Tensor | float = 0.0
    for m in range(bank.decay.shape[1]):
        one = bank._replace(decay=bank.decay[:, m], turn=bank.turn[:, m])
        re, im = _powers(one, lags)
        total = total + bank.read[:, m, None] * re - bank.across[:, m, None] * im
    assert isinstance(total, Tensor)
    return total


def _enter(bank: Bank, x: Tensor) -> Tensor:
    """[B, S, H] -> [N, B, S], which a matrix product writes at once and a transposition of two axes nearly so."""
    rows = x.reshape(-1, x.shape[2])
    if bank.B.dim() == 2:
        u = bank.B @ rows.t()
    else:
        rows = rows.t().contiguous()
        u = rows.repeat(bank.B.shape[0] // rows.shape[0], 1) * bank.B.unsqueeze(-1)
    return u.view(-1, *x.shape[:2])


def _leave(bank: Bank, v: Tensor, H: int) -> Tensor:
    """[N, B, S] -> [B, S, G]."""
    rows = v.flatten(1)
    if bank.C.dim() == 2:
        y = rows.t() @ bank.C.t()
    else:
        rows = rows * bank.C.unsqueeze(-1)
        y = (rows.unflatten(0, (-1, H)).sum(1) if bank.mode == "full" else rows).t().contiguous()
    return y.view(*v.shape[1:], -1)


def _project(bank: Bank, x: Tensor, reverse: bool) -> Tensor:
    S = x.shape[1]
    size = fast_length(2 * S)
    kernel = torch.fft.rfft(_kernel(bank, S), size).unsqueeze(1)
    u = torch.fft.rfft(_enter(bank, x), size)
    v = torch.fft.irfft(u * (kernel.conj() if reverse else kernel), size)[..., :S]
    return _leave(bank, v, x.shape[2])


def _fold(bank: Bank, x: Tensor, reverse: bool) -> Tensor:
    S, H = x.shape[1:]
    size = fast_length(2 * S)
    kernel = _kernel(bank, S)
    if bank.mode == "full":
        kernel = (kernel * (bank.B * bank.C).unsqueeze(-1)).unflatten(0, (-1, H))
    else:
        kernel = (bank.C @ (bank.B.unsqueeze(-1) * kernel.unsqueeze(1)).flatten(1)).unflatten(-1, (H, S))
    pairs = torch.fft.rfft(kernel, size)
    if reverse:
        pairs = pairs.conj()
    given = torch.fft.rfft(x.transpose(1, 2), size)
    return torch.fft.irfft(torch.einsum("oif,bif->bof", pairs, given), size)[..., :S].transpose(1, 2)


def _chunks(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    S, H = x.shape[1:]
    state = bank.fresh(x) if state is None else state
    u = _enter(bank, x)
    parts: list[Tensor] = []
    for a, b, T in _spans(S, CHUNK if resets is None else CHUNK_WITH_RESETS, reverse):
        here = None if resets is None else resets[:, a:b]
        v, state = _span(bank, u[:, :, a:b], state, here, reverse, T)
        parts.append(v)
    v = torch.cat(parts[::-1] if reverse else parts, -1) if len(parts) > 1 else parts[0]
    return _leave(bank, v, H), state


def _spans(S: int, T: int, reverse: bool) -> Iterator[tuple[int, int, int]]:
    """(first, end, chunk): the whole chunks, and what is left, in the order of the scan."""
    full = S // T * T
    spans = [(a, b, min(T, b - a)) for a, b in ((0, full), (full, S)) if a < b]
    yield from reversed(spans) if reverse else spans


def _span(
    bank: Bank, u: Tensor, state: Tensor, resets: Tensor | None, reverse: bool, T: int
) -> tuple[Tensor, Tensor]:
    """u [N, B, n T], state [B, N, M, 2] -> v [N, B, n T] and the last state."""
    N, batch, length = u.shape
    chunks = length // T
    lags = torch.arange(T + 1, device=u.device, dtype=u.dtype)
    re, im = _powers(bank, lags)
    read, across = bank.read.unsqueeze(-1), bank.across.unsqueeze(-1)
    seen_re, seen_im = read * re - across * im, read * im + across * re  # (read + i across) p^l
    within = _toeplitz(seen_re[..., :T].sum(1), reverse)

    def in_order(t: Tensor) -> Tensor:  # what token s (scan order 0 .. T - 1) has, at its place in the sequence
        return t.flip(-1) if reverse else t

    out_of = in_order(torch.cat([seen_re[..., 1:], -seen_im[..., 1:]], 1))  # [N, 2 M, T]: state before -> token
    into = in_order(torch.cat([re[..., :T], im[..., :T]], 1).flip(-1)).transpose(1, 2)  # [N, T, 2 M]: token -> after

    tokens = u.reshape(N, batch * chunks, T)
    stays = seen = None
    source = tokens
    if resets is None:
        v = tokens @ within
    else:
        piece = resets.reshape(-1, T)
        piece = (piece.flip(-1).cumsum(-1).flip(-1) if reverse else piece.cumsum(-1)).to(torch.int32)
        v = _Within.apply(tokens, within, piece)
        last = piece[:, :1] if reverse else piece[:, -1:]
        seen, stays = piece == 0, (last == 0).view(batch, chunks)
        source = tokens * (piece == last)
    given = (source @ into).view(N, batch, chunks, 2, -1)

    turn_re, turn_im = (t[..., T].unsqueeze(1) for t in (re, im))
    now = state.permute(1, 0, 3, 2)  # [N, B, 2, M]
    befores: list[Tensor] = []
    for c in reversed(range(chunks)) if reverse else range(chunks):
        befores.append(now)
        re_c, im_c = now.unbind(2)
        now = torch.stack([turn_re * re_c - turn_im * im_c, turn_im * re_c + turn_re * im_c], 2)
        if stays is not None:
            now = now * stays[:, c, None, None]
        now = now + given[:, :, c]
    before = torch.stack(befores[::-1] if reverse else befores, 2)  # [N, B, n, 2, M]
    carried = before.reshape(N, batch * chunks, -1) @ out_of
    v = v + (carried if seen is None else carried * seen)
    return v.view(N, batch, length), now.permute(1, 0, 3, 2)


def _toeplitz(kernel: Tensor, reverse: bool) -> Tensor:
    """[N, s, t] = K[t - s] where s comes no later than t in the scan, else 0."""
    T = kernel.shape[-1]
    windows = torch.nn.functional.pad(kernel, (T - 1, 0)).unfold(-1, T, 1).flip(-1)  # [N, t, s]
    return windows if reverse else windows.transpose(1, 2)


class _Within(torch.autograd.Function):
    """v[n, k, t] = sum_s u[n, k, s] W[n, s, t] where piece[k, s] == piece[k, t]; the triple product is never kept."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, W: Tensor, piece: Tensor) -> Tensor:
        ctx.save_for_backward(u, W, piece)
        same = (piece.unsqueeze(2) == piece.unsqueeze(1)).to(u.dtype)
        rows = max(1, WORKING_SET // max(1, W.numel()))
        return torch.cat(
            [(u[:, a : a + rows].unsqueeze(2) @ (W.unsqueeze(1) * same[a : a + rows])).squeeze(2)
             for a in range(0, u.shape[1], rows)], 1,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        u, W, piece = ctx.saved_tensors
        (dv,) = grads
        same = (piece.unsqueeze(2) == piece.unsqueeze(1)).to(u.dtype)
        rows = max(1, WORKING_SET // max(1, W.numel()))
        dW = sum(
            (u[:, a : a + rows].unsqueeze(-1) * dv[:, a : a + rows].unsqueeze(-2) * same[a : a + rows]).sum(1)
            for a in range(0, u.shape[1], rows)
        )
        return _Within.apply(dv, W.transpose(1, 2), piece), dW, None


register("centaurus", "torch", run, always("chunk by chunk or by FFT, on any device"), by_hand=True)
