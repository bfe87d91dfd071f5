"""Centaurus for whole sequences, by the plan with the fewest operations.

chunks   project features to channels, apply a matrix [T, T] per channel within chunks of T tokens, carry the state
         between chunks, and project back to features. As exact as the recurrence, linear in the length, and the only
         plan that supports states and resets.
project  the same projections around one convolution per channel, by FFT over the whole length.
fold     projections folded into one kernel per pair of features, G[o, i] = sum_n C[o, n] K[n] B[n, i], applied by
         FFT: cheaper with few features and many channels, as in mode full.

An FFT mixes all tokens, so its rounding error (2^-24 of the largest value in float32) also affects earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.centaurus import reference as centaurus_reference
from seqblocks.kernels.centaurus.reference import Bank, within_sequences
from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, dead_tokens, finite, where_true

CHUNK_TOKENS = 64
CHUNK_TOKENS_WITH_RESETS = 16  # one product per pair of tokens and sequence replaces a matrix product
PART_ELEMENTS = 1 << 19  # elements of the channels of a part of the tokens: their temporaries stay in the cache
PART_ELEMENTS_WITH_GRADIENTS = 1 << 20  # The gradients of matrices are computed for each part and added.
WORKING_SET = 1 << 22  # elements of one such product

# Cost of a multiply-accumulate in an FFT, relative to one in a matrix product (measured on two CPU cores).
FFT_WEIGHT = 4.0


@within_sequences
def run(
    bank: Bank,
    x: Tensor,
    state: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    return_state: bool,
    plan: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Return y [B, S, G] and, from the plan chunks, the last state, given x [B, S, H] and state [B, N, M, 2].

    Raises ValueError for a plan that does not fit the call.
    """
    x = x.to(bank.decay.dtype)
    if x.numel() == 0:
        return bank.empty_output(x), bank.fresh(x) if state is None else state
    whole = state is None and resets is None and not return_state
    plan = plan or (cheapest(bank, x) if whole else "chunks")
    if plan == "chunks":
        return _chunks(bank, x, state, resets, reverse)
    if plan not in ("project", "fold") or (plan == "fold" and bank.mode == "dws"):
        raise ValueError(f"centaurus, mode {bank.mode}, has no plan {plan!r}")
    if not whole:
        raise ValueError(f"plan {plan!r} supports neither states nor resets; use 'chunks'")
    return (_project if plan == "project" else _fold)(bank, x, reverse), None


def counts(bank: Bank, x: Tensor) -> dict[str, float]:
    """Count the multiply-accumulates of each plan that fits; those of FFTs and pointwise products are weighted."""
    (batch, S, H), (N, M) = x.shape, bank.decay.shape
    G = bank.C.shape[0] if bank.C.dim() == 2 else N // H if bank.mode == "full" else H
    around = batch * S * N * (H + G if bank.C.dim() == 2 else 2)
    T = min(CHUNK_TOKENS, S)
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
    """Return the plan with the lowest weighted count. Compiled code uses chunks, which are real and of one size."""
    if torch.compiler.is_compiling():
        return "chunks"
    found = counts(bank, x)
    return min(found, key=found.__getitem__)


def fast_length(n: int) -> int:
    """Return the least even number that is at least n and has no prime factors but 2, 3 and 5."""
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
    """Return the real and imaginary parts of exp((decay + i turn) l) [N, M, lags]."""
    size = torch.exp(bank.decay.unsqueeze(-1) * lags)
    angle = bank.turn.unsqueeze(-1) * lags
    return size * torch.cos(angle), size * torch.sin(angle)


def _kernel(bank: Bank, S: int) -> Tensor:
    """Return K [N, S]. Sub-states are added one after the other, so that [N, M, S] is never stored."""
    lags = torch.arange(S, device=bank.decay.device, dtype=bank.decay.dtype)
    total: Tensor | float = 0.0
    for m in range(bank.decay.shape[1]):
        one = bank._replace(decay=bank.decay[:, m], turn=bank.turn[:, m])
        re, im = _powers(one, lags)
        total = total + bank.read[:, m, None] * re - bank.across[:, m, None] * im
    assert isinstance(total, Tensor)
    return total


def _enter(bank: Bank, x: Tensor) -> Tensor:
    """Map features [B, S, H] to channels [N, B, S], the layout that a matrix product writes directly."""
    rows = x.reshape(-1, x.shape[2])
    if bank.B.dim() == 2:
        u = bank.B @ rows.t()
    else:
        u = rows.t().contiguous() * bank.B.view(-1, rows.shape[1], 1)  # in mode full each feature enters many channels
    return u.view(-1, *x.shape[:2])


def _leave(bank: Bank, v: Tensor, H: int) -> Tensor:
    """Map channels [N, B, S] to features [B, S, G]."""
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


class Chunk(NamedTuple):
    """Matrices of a chunk of T tokens, per channel. Tokens are in memory order; complex numbers are two reals."""

    within: Tensor  # [N, T, T]: token -> token
    into: Tensor  # [N, T, 2 M]: token -> state after the chunk
    out_of: Tensor  # [N, 2 M, T]: state before the chunk -> token
    through: Tensor  # [N, 2, M]: factor from the state before the chunk to the state after it


def _chunks(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    S, H = x.shape[1:]
    if S == 1:  # one token needs no scan
        return centaurus_reference.run(bank, x, state, resets, reverse)
    state = bank.fresh(x) if state is None else state
    T = CHUNK_TOKENS if resets is None else CHUNK_TOKENS_WITH_RESETS
    if resets is not None:
        state = state.masked_fill(along(resets[:, -1 if reverse else 0], state), 0.0)
    if torch.compiler.is_compiling():  # the length may be symbolic
        v, state = _scan(_enter(bank, x), state, *chunk_matrices(bank, T, reverse), resets, reverse)
    else:
        return part_by_part(bank, x, state, chunk_matrices(bank, chunk_length(S, T), reverse), resets, reverse)
    return _leave(bank, v, H), state


def chunk_length(S: int, most: int = CHUNK_TOKENS) -> int:
    """Return the length of chunks that are about equal: 65 tokens are 33 + 32, not 64 + 1."""
    return -(-S // -(-S // most))


def part_by_part(
    bank: Bank, x: Tensor, state: Tensor, chunk: Chunk, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return y and the last state, computed for some chunks at a time.

    The channels of a part stay in the cache; those of a long sequence would be in fresh memory pages.
    """
    size, H = _part(x, chunk), x.shape[2]
    marks = repeat(None) if resets is None else resets.split(size, 1)
    parts = list(enumerate(zip(x.split(size, 1), marks, strict=False)))
    ys: list[Tensor] = []
    whole: Tensor | None = None
    for at, (part, begins) in reversed(parts) if reverse else parts:
        v, state = _chunk_by_chunk(_enter(bank, part), state, chunk, begins, reverse)
        y = _leave(bank, v, H)
        if len(parts) == 1 or torch.is_grad_enabled():
            ys.append(y)
            continue
        whole = y.new_empty(x.shape[0], x.shape[1], y.shape[2]) if whole is None else whole
        whole[:, at * size : at * size + y.shape[1]] = y
    if whole is None:
        whole = torch.cat(ys[::-1] if reverse else ys, 1) if len(ys) > 1 else ys[0]
    return whole, state


def _part(x: Tensor, chunk: Chunk) -> int:
    """Return the number of tokens of a part, a multiple of those of a chunk; on other devices than CPUs, all tokens."""
    (N, T, _), most = chunk.within.shape, PART_ELEMENTS_WITH_GRADIENTS if torch.is_grad_enabled() else PART_ELEMENTS
    return max(1, most // (N * x.shape[0] * T)) * T if x.is_cpu else x.shape[1]


def chunk_matrices(bank: Bank, T: int, reverse: bool) -> Chunk:
    """Return the matrices of a chunk of T tokens."""
    re, im = _powers(bank, torch.arange(T + 1, device=bank.decay.device, dtype=bank.decay.dtype))
    powers = torch.cat([re, im], 1)
    read, across = bank.read.unsqueeze(-1), bank.across.unsqueeze(-1)
    seen_re, seen_im = read * re - across * im, read * im + across * re  # (read + i across) p^l

    out_of = torch.cat([seen_re[..., 1:], -seen_im[..., 1:]], 1)
    return Chunk(
        _toeplitz(seen_re[..., :T].sum(1), reverse),
        (powers[..., :T] if reverse else powers[..., :T].flip(-1)).transpose(1, 2),
        out_of.flip(-1) if reverse else out_of,
        powers[..., T].view(re.shape[0], 2, -1),
    )


def _shortened(chunk: Chunk, T: int, reverse: bool) -> Chunk:
    """Return the matrices of a chunk of T tokens, as views of a longer one's."""
    longest = chunk.within.shape[1]
    if longest == T:
        return chunk
    first, last = slice(T), slice(longest - T, longest)
    into, out_of = (first, last) if reverse else (last, first)
    power = chunk.into[:, T if reverse else longest - 1 - T]
    return Chunk(
        chunk.within[:, :T, :T], chunk.into[:, into], chunk.out_of[..., out_of], power.view(power.shape[0], 2, -1)
    )


def _toeplitz(kernel: Tensor, reverse: bool) -> Tensor:
    """Return [N, s, t] = K[t - s], or 0 where s comes after t in scan order."""
    T = kernel.shape[-1]
    windows = torch.nn.functional.pad(kernel, (T - 1, 0)).unfold(-1, T, 1).flip(-1)  # [N, t, s]
    return windows if reverse else windows.transpose(1, 2)


def _runs(S: int, T: int, reverse: bool) -> list[tuple[int, int, int]]:
    """Return (first, end, chunk) of the full chunks and of the remainder, in scan order."""
    full = S // T * T
    runs = [(a, b, min(T, b - a)) for a, b in ((0, full), (full, S)) if a < b]
    return runs[::-1] if reverse else runs


def _chunk_by_chunk(
    u: Tensor, state: Tensor, chunk: Chunk, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return v [N, B, S] and the last state, given u [N, B, S] and state [B, N, M, 2]."""
    now = state.permute(1, 0, 3, 2)  # [N, B, 2, M]
    parts: list[Tensor] = []
    bad = None  # nonfinite tokens: a matrix product would spread them over all tokens of a chunk
    if resets is not None and not finite(u):
        bad = ~u.isfinite()
        u = u.masked_fill(bad, 0.0)
        if not (u.is_cuda and torch.cuda.is_current_stream_capturing()) and not u.is_meta and not bad.any():
            bad = None
    for a, b, T in _runs(u.shape[2], chunk.within.shape[1], reverse):
        one = _shortened(chunk, T, reverse)
        marks = None if resets is None else resets[:, a:b]
        chunks = Chunks.of(u[:, :, a:b], marks, T, reverse)
        given = chunks.given(one)
        nonfinite = None if bad is None else Chunks.of(bad[:, :, a:b].to(u.dtype), marks, T, reverse)
        if nonfinite is not None:
            reaches_state = nonfinite.where_kept(nonfinite.tokens).any(-1).view(*given.shape[:3], 1, 1)
            given = given.masked_fill(reaches_state, torch.nan)
        before, now = _between(given, now, one.through, chunks.is_carried, reverse)
        if chunks.segment is None:  # added in place: for a long sequence, allocating memory costs as much as the sum
            v = torch.baddbmm(chunks.tokens @ one.within, chunks.flat(before), one.out_of)
            parts.append(v.view(*u.shape[:2], b - a))
            continue
        v = _Within.apply(chunks.tokens, one.within, chunks.segment)
        if nonfinite is not None:
            assert nonfinite.segment is not None
            order = torch.ones_like(one.within)
            order = order.tril() if reverse else order.triu()
            v = v.masked_fill(_within(nonfinite.tokens, order, nonfinite.segment) > 0, torch.nan)
        v = v + chunks.where_seen(chunks.flat(before) @ one.out_of, resets is not None and finite(before))
        parts.append(v.view(*u.shape[:2], b - a))
    v = torch.cat(parts[::-1] if reverse else parts, -1) if len(parts) > 1 else parts[0]
    return v, now.permute(1, 0, 3, 2)


class Chunks(NamedTuple):
    """Consecutive chunks of equal length; R = B chunks."""

    tokens: Tensor  # [N, R, T]
    shape: tuple[int, int, int]  # N, B, chunks
    segment: Tensor | None  # [R, T]: number of resets in the chunk up to each token
    last: Tensor | None  # [R, 1]: number of resets in the whole chunk

    @classmethod
    def of(cls, u: Tensor, resets: Tensor | None, T: int, reverse: bool) -> Chunks:
        N, B, length = u.shape
        tokens, shape = u.reshape(N, -1, T), (N, B, length // T)
        if resets is None:
            return cls(tokens, shape, None, None)
        segment = resets.reshape(-1, T)
        segment = (segment.flip(-1).cumsum(-1).flip(-1) if reverse else segment.cumsum(-1)).to(torch.int32)
        return cls(tokens, shape, segment, segment[:, :1] if reverse else segment[:, -1:])

    @property
    def is_carried(self) -> Tensor | None:
        """Return whether a chunk has no reset, so that the state before it reaches the state after it: [B, chunks]."""
        return None if self.last is None else (self.last == 0).view(self.shape[1:])

    def given(self, chunk: Chunk) -> Tensor:
        """Return the contribution of each chunk to the state after it: [N, B, chunks, 2, M]."""
        return (self.where_kept(self.tokens) @ chunk.into).view(*self.shape, 2, -1)

    def flat(self, states: Tensor) -> Tensor:
        """Flatten states [N, B, chunks, 2, M] to [N, R, 2 M]."""
        return states.reshape(*self.tokens.shape[:2], -1)

    def where_kept(self, x: Tensor) -> Tensor:
        """Return x [N, R, T], which is finite, with 0 for tokens that a reset in the chunk follows."""
        return x if self.segment is None else x * (self.segment == self.last)

    def where_seen(self, x: Tensor, known: bool = False) -> Tensor:
        """Return x [N, R, T] with 0 for tokens after a reset in the chunk. known: x is known to be finite."""
        return x if self.segment is None else where_true(self.segment == 0, x, known)


def _between(
    given: Tensor, now: Tensor, through: Tensor, is_carried: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and the last, from given [N, B, chunks, 2, M] and now [N, B, 2, M]."""
    re, im = through.unsqueeze(1).split(1, 2)
    turned = torch.cat([-im, im], 2)  # i (a + i b) = -b + i a
    befores: list[Tensor] = []
    chunks = given.shape[2]
    parts = given.unbind(2)  # indexing one by one would allocate a full-sized gradient for each
    for c in reversed(range(chunks)) if reverse else range(chunks):
        befores.append(now)
        if is_carried is not None:
            now = now.masked_fill(~is_carried[:, c, None, None], 0.0)
        now = torch.addcmul(torch.addcmul(parts[c], re, now), turned, now.flip(2))
    before = torch.stack(befores[::-1] if reverse else befores, 2) if chunks > 1 else befores[0].unsqueeze(2)
    return before, now


def _groups(W: Tensor, segment: Tensor, *sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield groups of chunks of sequences [N, K, T], and a mask [chunks, T, T] of pairs of tokens of one sequence."""
    rows = max(1, WORKING_SET // max(1, W.numel()))
    for some, *parts in zip(segment.split(rows), *(x.split(rows, 1) for x in sequences), strict=True):
        yield *parts, (some.unsqueeze(2) == some.unsqueeze(1)).to(W.dtype)


def _within(u: Tensor, W: Tensor, segment: Tensor) -> Tensor:
    """Return v[n, k, t] = sum_s u[n, k, s] W[n, s, t] over the s with segment[k, s] == segment[k, t]."""
    parts = [(x.unsqueeze(2) @ (W.unsqueeze(1) * same)).squeeze(2) for x, same in _groups(W, segment, u)]
    return torch.cat(parts, 1)


def _within_gradient(u: Tensor, dv: Tensor, W: Tensor, segment: Tensor) -> Tensor:
    """Return the gradient of W."""
    total = torch.zeros_like(W)
    for x, dx, same in _groups(W, segment, u, dv):
        total = total + (x.unsqueeze(-1) * dx.unsqueeze(-2) * same).sum(1)
    return total


class _Within(torch.autograd.Function):
    """`_within`, without storing the triple product for the backward pass."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, W: Tensor, segment: Tensor) -> Tensor:
        ctx.save_for_backward(u, W, segment)
        return _within(u, W, segment)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        u, W, segment = ctx.saved_tensors
        (dv,) = grads
        return _Within.apply(dv, W.transpose(1, 2), segment), _within_gradient(u, dv, W, segment), None


# The same as one op, so that compiled code does not depend on the number of chunks. It has first derivatives only.


@custom_op("seqblocks::centaurus")
def _scan(
    u: Tensor, state: Tensor, within: Tensor, into: Tensor, out_of: Tensor, through: Tensor,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run `_chunk_by_chunk` as one op."""
    with without_autocast(u.device.type):
        v, last = _chunk_by_chunk(u, state, Chunk(within, into, out_of, through), resets, reverse)
    return v, last.contiguous()


@_scan.register_fake
def _scan_fake(u, state, within, into, out_of, through, resets, reverse):  # type: ignore[no-untyped-def]
    return u.new_empty(u.shape), state.new_empty(state.shape)


@custom_op("seqblocks::centaurus_backward")
def _scan_backward(
    dv: Tensor, dlast: Tensor, u: Tensor, state: Tensor, within: Tensor, into: Tensor, out_of: Tensor, through: Tensor,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of u, of the initial state and of the matrices of a chunk."""
    chunk = Chunk(within, into, out_of, through)
    du, total = u.new_empty(u.shape), Chunk(*(x.new_zeros(x.shape) for x in chunk))
    if resets is not None:
        dead = dead_tokens([dv.permute(1, 2, 0)], [dlast], resets, reverse)
        u = u.masked_fill(dead, 0.0)
        state = state.masked_fill(along(dead[:, -1 if reverse else 0], state), 0.0)
    with without_autocast(u.device.type):
        done = []
        now = state.permute(1, 0, 3, 2)
        for a, b, T in _runs(u.shape[2], within.shape[1], reverse):
            one = _shortened(chunk, T, reverse)
            chunks = Chunks.of(u[:, :, a:b], None if resets is None else resets[:, a:b], T, reverse)
            before, now = _between(chunks.given(one), now, one.through, chunks.is_carried, reverse)
            done.append((a, b, T, one, chunks, before))
        dnow = dlast.permute(1, 0, 3, 2)
        for a, b, T, one, chunks, before in reversed(done):
            grads = _shortened(total, T, reverse)
            upstream = dv[:, :, a:b].reshape(chunks.tokens.shape)
            seen = chunks.where_seen(upstream)
            grads.out_of.add_(chunks.flat(before).transpose(1, 2) @ seen)
            dbefore = (seen @ one.out_of.transpose(1, 2)).view(before.shape)
            back = one.through * one.through.new_tensor([1.0, -1.0]).unsqueeze(-1)
            dgiven, dnow = _between(dbefore, dnow, back, chunks.is_carried, not reverse)
            if chunks.is_carried is not None:
                before = before.masked_fill(~chunks.is_carried[:, :, None, None], 0.0)
            (re, im), (g_re, g_im) = before.unbind(3), dgiven.unbind(3)
            grads.through.add_(torch.stack([re * g_re + im * g_im, re * g_im - im * g_re], 1).sum((2, 3)))
            dgiven = chunks.flat(dgiven)
            grads.into.add_(chunks.where_kept(chunks.tokens).transpose(1, 2) @ dgiven)
            dtokens = chunks.where_kept(dgiven @ one.into.transpose(1, 2))
            if chunks.segment is None:
                grads.within.add_(chunks.tokens.transpose(1, 2) @ upstream)
                dtokens += upstream @ one.within.transpose(1, 2)
            else:
                grads.within.add_(_within_gradient(chunks.tokens, upstream, one.within, chunks.segment))
                dtokens += _within(upstream, one.within.transpose(1, 2), chunks.segment)
            du[:, :, a:b] = dtokens.view(*u.shape[:2], b - a)
    return du, dnow.permute(1, 0, 3, 2).contiguous(), *total


@_scan_backward.register_fake
def _scan_backward_fake(  # type: ignore[no-untyped-def]
    dv, dlast, u, state, within, into, out_of, through, resets, reverse
):
    return *(x.new_empty(x.shape) for x in (u, state, within, into, out_of, through)),


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:7])
    ctx.reverse = inputs[7]


def _differentiate(ctx, dv, dlast):  # type: ignore[no-untyped-def]
    return *_scan_backward(dv, dlast, *ctx.saved_tensors, ctx.reverse), None, None


_scan.register_autograd(_differentiate, setup_context=_save)
_scan_backward.register_autograd(no_second_derivative("centaurus", "compiled torch"))


register("centaurus", "torch", run, always("chunk by chunk or by FFT, on any device"), by_hand=True)
