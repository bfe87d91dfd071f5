"""Centaurus in Triton: a bank of complex diagonal states, with the segments of a sequence in parallel.

A program holds BN channels of one sequence with their M sub-states in registers and iterates over the tokens. Complex
numbers are pairs of reals, and the loop computes no exponentials. A small batch would leave a device idle, so its
sequences are cut into segments: the first launch computes the state after each segment from a zero initial state, the
second carries states from segment to segment (over T tokens a state is multiplied by p^T), and the third runs all
segments in parallel. A batch large enough to fill the device needs a single launch.

Backward: gradients of states follow the same recurrence in the opposite direction, so the same kernels run, with input
and read-out weights exchanged. The gradient of p does not need the states twice: w = ds/dp follows w' = p w + s, so one
forward pass accumulates dv r w and dv s over a segment, plus the gradient that enters at the segment's end times w.

The projections of the modes neck and pointwise are matrix products in the input's dtype. B and C of dws and full are
folded into the read-out weights, except in calls with a state, since the state includes B. In mode full, a program sums
the channels of one output before it writes; in the backward pass, the channels of one feature.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.centaurus import torch as centaurus_torch
from seqblocks.kernels.centaurus.reference import Bank, within_sequences
from seqblocks.kernels.dispatch import register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import few_of, launch_size, normal
from seqblocks.kernels.numerics import filled, no_second_derivative
from seqblocks.kernels.triton_common import ceil_div, jit, last_contiguous, tl

SUBSTATES = 64  # maximum per channel
SEGMENT = 128  # minimum number of tokens, approximately
CELLS = 128  # per program of `_carry`: one per thread
WARPS = 4 * 132  # one per warp scheduler of an H100 or H200; a launch with this many needs no segments

# ------------------------------------------------------------------------------
# Kernels.   Layouts: u [B, S, F] with strides over batch and tokens, where channel n reads feature n mod F;
# v [B, S, N], or sums of `fan` channels in parts of one program each, [B, S, N / fan, parts];
# bank [4, M, N] of p_re, p_im, r_re, r_im; states [B, 2, M, N], or [B, K, 2, M, N] for segments; passes [B, K].
# Segments have T tokens in scan order; the last may be shorter. ADJOINT: iterate from the end.
# A thread should own whole channels. In tiles [M, N] the compiler assigns neighbours along N, which it knows to be
# contiguous, to neighbouring threads, one each: adding the argument `none`, which is 0, hides the alignment from it.


@jit
@no_type_check
def _span(S, K, T, BACK: tl.constexpr, REVERSE: tl.constexpr):
    """Return this program's sequence, segment, segment length, and index of its first token."""
    k = tl.program_id(0) % K
    first = k * T
    length = min(T, S - first)
    at = first + length - 1 if BACK else first
    return (tl.program_id(0) // K).to(tl.int64), k, length, (S - 1 - at if REVERSE else at) + tl.cast(0, tl.int64)


@jit
@no_type_check
def _cells(N, M, fan, none, BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr):
    """Return this program's channels (BF of each output's `fan`), their exclusive bound (0 for invalid ones), the mask
    of its cells, and the offsets of the cells in [M, N]."""
    parts = tl.cdiv(fan, BF)
    at = tl.arange(0, BN)
    within = tl.program_id(1) % parts * BF + at % BF
    n = (tl.program_id(1) // parts * (BN // BF) + at // BF) * fan + within
    bound = tl.where(within < fan, N, 0)
    m = tl.arange(0, BM)[:, None]
    own = (m < M) & (n < bound)[None, :]
    return n, bound, own, none + m * N + n[None, :]


@jit
@no_type_check
def _pair(re, im, at, own):
    return tl.load(re + at, own, 0.0), tl.load(im + at, own, 0.0)


@jit
@no_type_check
def _put(re_to, im_to, at, own, re, im):
    tl.store(re_to + at, re, own)
    tl.store(im_to + at, im, own)


@jit
@no_type_check
def _added(re, im, a_re, a_im, b_re, b_im):
    """Return re + i im plus the complex product a b, in four instructions in this order."""
    return (re + a_re * b_re) - a_im * b_im, (im + a_re * b_im) + a_im * b_re


@jit
@no_type_check
def _power(p_re, p_im, n, bits):
    """Return p^n, n < 2^bits, by repeated squaring, which is as exact as n successive products."""
    re = p_re * 0.0 + 1.0
    im = p_re * 0.0
    for bit in range(bits):
        more_re, more_im = _added(0.0, 0.0, re, im, p_re, p_im)
        is_set = (n >> bit) % 2 == 1
        re = tl.where(is_set, more_re, re)
        im = tl.where(is_set, more_im, im)
        p_re, p_im = _added(0.0, 0.0, p_re, p_im, p_re, p_im)
    return re, im


@jit
@no_type_check
def _tokens(x, step, i, is_channel, COUNT: tl.constexpr):
    """Load COUNT tokens from the ith on. All loads come before the first use, so that their latencies overlap."""
    out = ()
    for j in tl.static_range(COUNT):
        out = out + (tl.load(x + (i + j) * step, is_channel, 0),)
    return out


@jit
@no_type_check
def _marks(resets, sign: tl.constexpr, i, is_channel, COUNT: tl.constexpr):
    out = ()
    if resets is not None:
        for j in tl.static_range(COUNT):
            out = out + (tl.load(resets + (i + j) * sign, is_channel, 0),)
    return out


@jit
@no_type_check
def _go(
    re, im, whole, turn_re, turn_im, to_re, to_im, xs, fresh, v, vs, mask, i,
    COUNT: tl.constexpr, ENDS: tl.constexpr, ADJOINT: tl.constexpr, MARKS: tl.constexpr, BF: tl.constexpr,
):
    """Run COUNT tokens of `_walk`."""
    for j in tl.static_range(COUNT):
        x = xs[j].to(tl.float32)[None, :]
        if ADJOINT:
            re += x * to_re
            im += x * to_im
            out = tl.sum(re, 0)
            re, im = _added(0.0, 0.0, turn_re, turn_im, re, im)
        if MARKS:
            re = tl.where(fresh[j] != 0, 0.0, re)
            im = tl.where(fresh[j] != 0, 0.0, im)
            whole = tl.where(fresh[j] != 0, 0.0, whole)
        if not ADJOINT:
            re, im = _added(x, 0.0, turn_re, turn_im, re, im)
            out = tl.sum(to_re * re - to_im * im, 0)
        if not ENDS:
            if BF > 1:
                out = tl.sum(tl.reshape(out, (out.shape[0] // BF, BF)), 1)
            tl.store(v + (i + j) * vs, out.to(v.dtype.element_ty), mask)
    return re, im, whole


@common.kernel(do_not_specialize=["S", "K", "T", "none"])  # one compiled kernel for all lengths
@no_type_check
def _walk(
    u, bank, starts, resets, v, last, passes,
    S, K, T, F, N, M, none, ub, us, fan,
    ENDS: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, STEPS: tl.constexpr,
):
    """Write v and the last state; with ENDS, write to `last` the state after each segment from a zero initial state.

    ADJOINT: states are gradients, which are multiplied by the conjugate of p.
    """
    WAY: tl.constexpr = -1 if ADJOINT != REVERSE else 1
    b, k, length, t = _span(S, K, T, ADJOINT, REVERSE)
    n, bound, own, cell = _cells(N, M, fan, none, BN, BM, BF)
    is_channel = n < bound
    turn_re, turn_im = _pair(bank, bank + N * M, cell, own)
    to_re, to_im = _pair(bank + 2 * N * M, bank + 3 * N * M, cell, own)
    if ADJOINT:
        turn_im = -turn_im
        to_im = -to_im
    mine = tl.program_id(0).to(tl.int64) * N * M * 2
    re = tl.zeros((BM, BN), tl.float32)
    im = tl.zeros((BM, BN), tl.float32)
    if not ENDS:
        re, im = _pair(starts + mine, starts + mine + N * M, cell, own)
    whole = 1.0
    u += b * ub + t * us + n % F
    if resets is not None:
        resets += b * S + t
    mask = is_channel
    width = N
    if not ENDS:
        if BF > 1:
            parts = tl.cdiv(fan, BF)
            o = tl.program_id(1) // parts * (BN // BF) + tl.arange(0, BN // BF)
            mask = o * fan < N
            width = N // fan * parts
            v += (b * S + t) * width + o * parts + tl.program_id(1) % parts
        else:
            v += (b * S + t) * N + n
    step = tl.cast(us, tl.int64) * WAY
    wide = tl.cast(width, tl.int64) * WAY
    full = length // STEPS * STEPS
    xs = _tokens(u, step, 0, n < tl.where(full > 0, bound, 0), STEPS)  # loaded one group ahead of its use
    fresh = _marks(resets, WAY, 0, full > 0, STEPS)
    for i in range(0, full, STEPS):
        next_xs = _tokens(u, step, i + STEPS, n < tl.where(i + STEPS < full, bound, 0), STEPS)
        next_fresh = _marks(resets, WAY, i + STEPS, i + STEPS < full, STEPS)
        re, im, whole = _go(
            re, im, whole, turn_re, turn_im, to_re, to_im, xs, fresh, v, wide, mask, i,
            STEPS, ENDS, ADJOINT, resets is not None, BF,
        )
        xs = next_xs
        fresh = next_fresh
    for i in range(full, length):
        x = _tokens(u, step, i, is_channel, 1)
        mark = _marks(resets, WAY, i, True, 1)
        re, im, whole = _go(
            re, im, whole, turn_re, turn_im, to_re, to_im, x, mark, v, wide, mask, i,
            1, ENDS, ADJOINT, resets is not None, BF,
        )
    if ENDS:
        _put(last + mine, last + mine + N * M, cell, own, re, im)
        if passes is not None:
            if tl.program_id(1) == 0:
                tl.store(passes + tl.program_id(0), whole)
    else:
        if k == (0 if ADJOINT else K - 1):
            last += b * N * M * 2
            _put(last, last + N * M, cell, own, re, im)


@common.kernel(do_not_specialize=["S", "K", "T", "bits"])
@no_type_check
def _carry(
    bank, given, ends, passes, starts, S, K, T, bits, N, M,
    ADJOINT: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr,
):
    """Write the state that enters each segment, given the one that enters the first (ADJOINT: the last)."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)  # in [M, N]
    own = c < N * M
    turn_re, turn_im = _pair(bank, bank + N * M, c, own)
    if ADJOINT:
        turn_im = -turn_im
    all_re, all_im = _power(turn_re, turn_im, T, bits)
    given += b * N * M * 2
    re, im = _pair(given, given + N * M, c, own)
    if ADJOINT:  # the last segment may be shorter, and in this direction it comes first
        rest_re, rest_im = _power(turn_re, turn_im, S - (K - 1) * T, bits)
    for i in range(0, K, STEPS):
        ends_re, ends_im, stays = (), (), ()
        for j in tl.static_range(STEPS):
            k = b * K + (K - 1 - i - j if ADJOINT else i + j)
            mask = c < tl.where(i + j < K, N * M, 0)
            ends_re = ends_re + (tl.load(ends + k * N * M * 2 + c, mask, 0.0),)
            ends_im = ends_im + (tl.load(ends + k * N * M * 2 + N * M + c, mask, 0.0),)
            if passes is not None:
                stays = stays + (tl.load(passes + k, i + j < K, 0.0),)
        for j in tl.static_range(STEPS):
            k = b * K + (K - 1 - i - j if ADJOINT else i + j)
            to = starts + k * N * M * 2
            _put(to, to + N * M, c, c < tl.where(i + j < K, N * M, 0), re, im)
            if passes is not None:
                re = tl.where(stays[j] > 0.0, re, 0.0)
                im = tl.where(stays[j] > 0.0, im, 0.0)
            if ADJOINT:
                a_re = tl.where(i + j == 0, rest_re, all_re)
                a_im = tl.where(i + j == 0, rest_im, all_im)
                re, im = _added(ends_re[j], ends_im[j], a_re, a_im, re, im)
            else:
                re, im = _added(ends_re[j], ends_im[j], all_re, all_im, re, im)


@jit
@no_type_check
def _add(
    re, im, w_re, w_im, sum_re, sum_im, read_re, read_im, turn_re, turn_im, xs, grads, fresh,
    COUNT: tl.constexpr, MARKS: tl.constexpr,
):
    """Run COUNT tokens of `_sums`."""
    for j in tl.static_range(COUNT):
        x = xs[j].to(tl.float32)[None, :]
        g = grads[j].to(tl.float32)[None, :]
        if MARKS:
            re = tl.where(fresh[j] != 0, 0.0, re)
            im = tl.where(fresh[j] != 0, 0.0, im)
            w_re = tl.where(fresh[j] != 0, 0.0, w_re)
            w_im = tl.where(fresh[j] != 0, 0.0, w_im)
        w_re, w_im = _added(re, im, turn_re, turn_im, w_re, w_im)
        re, im = _added(x, 0.0, turn_re, turn_im, re, im)
        sum_re += g * w_re
        sum_im += g * w_im
        read_re += g * re
        read_im += g * im
    return re, im, w_re, w_im, sum_re, sum_im, read_re, read_im


@common.kernel(do_not_specialize=["S", "K", "T", "none"])
@no_type_check
def _sums(
    u, dv, bank, starts, afters, resets, parts,
    S, K, T, F, N, M, none, ub, us, fan, gb, gs,
    REVERSE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
):
    """Write the gradients of the bank to parts [B K, 4, M, N], for dv [B, S, N / fan].

    afters: the gradient that enters each segment at its end.
    """
    WAY: tl.constexpr = -1 if REVERSE else 1
    b, _, length, t = _span(S, K, T, False, REVERSE)
    n, bound, own, cell = _cells(N, M, 1, none, BN, BM, 1)
    is_channel = n < bound
    turn_re, turn_im = _pair(bank, bank + N * M, cell, own)
    mine = tl.program_id(0).to(tl.int64) * N * M * 2
    re, im = _pair(starts + mine, starts + mine + N * M, cell, own)
    w_re = tl.zeros((BM, BN), tl.float32)
    w_im = tl.zeros((BM, BN), tl.float32)
    sum_re = tl.zeros((BM, BN), tl.float32)  # sums of dv w; read_re and read_im: of dv s
    sum_im = tl.zeros((BM, BN), tl.float32)
    read_re = tl.zeros((BM, BN), tl.float32)
    read_im = tl.zeros((BM, BN), tl.float32)
    u += b * ub + t * us + n % F
    dv += b * gb + t * gs + n // fan
    if resets is not None:
        resets += b * S + t
    step = tl.cast(us, tl.int64) * WAY
    wide = tl.cast(gs, tl.int64) * WAY
    full = length // STEPS * STEPS
    mask = n < tl.where(full > 0, bound, 0)
    xs = _tokens(u, step, 0, mask, STEPS)
    grads = _tokens(dv, wide, 0, mask, STEPS)
    fresh = _marks(resets, WAY, 0, full > 0, STEPS)
    for i in range(0, full, STEPS):
        mask = n < tl.where(i + STEPS < full, bound, 0)
        next_xs = _tokens(u, step, i + STEPS, mask, STEPS)
        next_grads = _tokens(dv, wide, i + STEPS, mask, STEPS)
        next_fresh = _marks(resets, WAY, i + STEPS, i + STEPS < full, STEPS)
        re, im, w_re, w_im, sum_re, sum_im, read_re, read_im = _add(
            re, im, w_re, w_im, sum_re, sum_im, read_re, read_im, turn_re, turn_im, xs, grads, fresh,
            STEPS, resets is not None,
        )
        xs = next_xs
        grads = next_grads
        fresh = next_fresh
    for i in range(full, length):
        x = _tokens(u, step, i, is_channel, 1)
        grad = _tokens(dv, wide, i, is_channel, 1)
        mark = _marks(resets, WAY, i, True, 1)
        re, im, w_re, w_im, sum_re, sum_im, read_re, read_im = _add(
            re, im, w_re, w_im, sum_re, sum_im, read_re, read_im, turn_re, turn_im, x, grad, mark,
            1, resets is not None,
        )
    to_re, to_im = _pair(bank + 2 * N * M, bank + 3 * N * M, cell, own)
    after_re, after_im = _pair(afters + mine, afters + mine + N * M, cell, own)
    dp_re, dp_im = after_re * w_re + after_im * w_im, after_re * w_im - after_im * w_re
    dp_re, dp_im = _added(dp_re, dp_im, to_re, to_im, sum_re, sum_im)
    part = parts + mine * 2
    _put(part, part + N * M, cell, own, dp_re, -dp_im)
    _put(part + 2 * N * M, part + 3 * N * M, cell, own, read_re, -read_im)


# ------------------------------------------------------------------------------
# Launching


def tiles(channels: int, substates: int, arch: str) -> dict[str, int]:
    """Return channels and sub-states per program, tokens loaded ahead, and warps.

    A program has one warp with at most eight states per thread, so that sums over sub-states need no synchronisation
    between warps.
    """
    BM = common.power_of_two(substates)
    BN = min(common.power_of_two(channels), max(4, min(32, 256 // BM)))
    return {"BN": BN, "BM": BM, "STEPS": 8, "num_warps": common.warps(BN * BM, 8, common.lanes(arch))}


def segments(rows: int, S: int, tile: dict[str, int], channels: int) -> int:
    """Return the number of segments for each of `rows` sequences of S tokens.

    It is one where that fills a device. Otherwise segments have about SEGMENT tokens, limited to eight warps per
    scheduler, since the state before each segment is stored.
    """
    rows, S = launch_size("batch", rows), launch_size("length", S)
    warps = rows * ceil_div(launch_size("channels", channels), tile["BN"]) * tile["num_warps"]
    if warps >= WARPS or S <= 2 * SEGMENT:
        return 1
    return min(ceil_div(S, SEGMENT), ceil_div(8 * WARPS, warps))


class _Plan:
    def __init__(self, u: Tensor, p: Tensor, reverse: bool) -> None:
        (self.B, self.S, self.F), (self.N, self.M) = u.shape, p.shape
        self.tile = tiles(self.N, self.M, common.arch(u))
        steps = self.tile["STEPS"]
        self.T = steps * ceil_div(ceil_div(self.S, segments(self.B, self.S, self.tile, self.N)), steps)
        self.K = ceil_div(self.S, self.T)
        self.reverse = reverse

    def sizes(self, u: Tensor) -> tuple[int, ...]:
        return self.S, self.K, self.T, u.shape[2], self.N, self.M, 0, *u.stride()[:2]

    def starts(
        self, u: Tensor, bank: Tensor, state: Tensor, resets: Tensor | None, adjoint: bool
    ) -> Tensor:
        """Return the state that enters each segment, [B, K, 2, M, N]; with one segment, the given state itself."""
        if self.K == 1:
            return state
        starts, ends = (state.new_empty(self.B, self.K, 2, self.M, self.N) for _ in range(2))
        passes = None if resets is None else state.new_empty(self.B, self.K)
        _walk[self.B * self.K, ceil_div(self.N, self.tile["BN"])](
            u, bank, None, resets, None, ends, passes, *self.sizes(u), 1,
            ENDS=True, ADJOINT=adjoint, REVERSE=self.reverse, BF=1, **self.tile,
        )
        _carry[self.B, ceil_div(self.N * self.M, CELLS)](
            bank, state, ends, passes, starts,
            self.S, self.K, self.T, self.T.bit_length(), self.N, self.M,
            ADJOINT=adjoint, BC=CELLS, STEPS=8, num_warps=CELLS // common.lanes(common.arch(u)),
        )
        return starts

    def walk(
        self, u: Tensor, bank: Tensor, starts: Tensor, resets: Tensor | None, last: Tensor, fan: int, adjoint: bool
    ) -> Tensor:
        """Return v, summed over groups of `fan` neighbouring channels, and write the last state to `last`."""
        BF = min(self.tile["BN"], common.power_of_two(fan))
        outputs, parts = self.N // fan, ceil_div(fan, BF)
        v = u.new_empty(self.B, self.S, outputs, parts, dtype=u.dtype if parts == 1 else torch.float32)
        _walk[self.B * self.K, ceil_div(outputs, self.tile["BN"] // BF) * parts](
            u, bank, starts, resets, v, last, None, *self.sizes(u), fan,
            ENDS=False, ADJOINT=adjoint, REVERSE=self.reverse, BF=BF, **self.tile,
        )
        return v.squeeze(-1) if v.shape[-1] == 1 else v.sum(-1).to(u.dtype)

    def sums(
        self, u: Tensor, dv: Tensor, bank: Tensor, starts: Tensor, afters: Tensor, resets: Tensor | None, fan: int
    ) -> Tensor:
        """Return the gradients of the bank [4, M, N], see `_sums`."""
        parts = starts.new_empty(self.B * self.K, 4, self.M, self.N)
        tile = {**self.tile, "STEPS": self.tile["STEPS"] // 2}  # half as many, since tokens of two tensors are loaded
        _sums[self.B * self.K, ceil_div(self.N, tile["BN"])](
            u, dv, bank, starts, afters, resets, parts, *self.sizes(u), fan, *dv.stride()[:2],
            REVERSE=self.reverse, **tile,
        )
        return parts.sum(0)


def _together(*parts: Tensor) -> Tensor:
    """Stack bank parts into the layout of the kernels."""
    return torch.stack([x.t() for x in parts])


def _turned(state: Tensor) -> Tensor:
    """Convert states between [B, N, M, 2] and the kernels' layout [B, 2, M, N]."""
    return state.permute(0, 3, 2, 1)


def _across(x: Tensor, fan: int) -> Tensor:
    """Transpose the last axis, seen as groups of `fan`: each new group has one element of every old group."""
    return x if fan in (1, x.shape[-1]) else x.unflatten(-1, (-1, fan)).transpose(-1, -2).flatten(-2)


@custom_op("seqblocks::centaurus_triton")
def _op(
    u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor, resets: Tensor | None,
    reverse: bool, fan: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return v [B, S, N / fan] in u's dtype, and the last state."""
    u, marks = last_contiguous(u), common.marks(resets)
    last = torch.empty_like(_turned(state), memory_format=torch.contiguous_format)
    plan = _Plan(u, p_re, reverse)
    with common.on(u):
        bank = _together(p_re, p_im, r_re, r_im)
        starts = plan.starts(u, bank, _turned(state).contiguous(), marks, False)
        v = plan.walk(u, bank, starts, marks, last, fan, False)
    return v, _turned(last)


@_op.register_fake
def _op_fake(u, p_re, p_im, r_re, r_im, state, resets, reverse, fan=1):  # type: ignore[no-untyped-def]
    return u.new_empty(*u.shape[:2], p_re.shape[0] // fan), _turned(state.new_empty(_turned(state).shape))


@custom_op("seqblocks::centaurus_triton_backward", outputs=6)
def _op_backward(
    dv: Tensor, dlast: Tensor, u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor,
    resets: Tensor | None, reverse: bool, fan: int = 1,
) -> list[Tensor]:
    """Return the gradients of u, p_re, p_im, r_re, r_im and the initial state.

    Where all outputs read all features (fan = F), outputs and features are transposed, so that the channels of one
    feature are neighbours.
    """
    dv, u, marks = last_contiguous(dv), last_contiguous(u), common.marks(resets)
    plan = _Plan(u, p_re, reverse)
    back = plan.N // plan.F
    with common.on(u):
        bank = _together(p_re, p_im, r_re, r_im)
        swapped, after = (_across(x, plan.F).contiguous() for x in (bank, _turned(dlast)))
        before = torch.empty_like(after)
        afters = plan.starts(dv, swapped, after, marks, True)
        du = plan.walk(dv, swapped, afters, marks, before, back, True)
        afters, before = (_across(x, back).contiguous() for x in (afters, before))
        starts = plan.starts(u, bank, _turned(state).contiguous(), marks, False)  # recomputed rather than stored
        sums = plan.sums(u, dv, bank, starts, afters, marks, fan)
    return [du, *(x.t().clone(memory_format=torch.contiguous_format) for x in sums), _turned(before)]


@_op_backward.register_fake
def _op_backward_fake(dv, dlast, u, p_re, p_im, r_re, r_im, state, resets, reverse, fan=1):  # type: ignore[no-untyped-def]
    *grads, before = (x.new_empty(x.shape) for x in (u, p_re, p_im, r_re, r_im, _turned(state)))
    return [*grads, _turned(before)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:7])
    ctx.flags = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dv, dlast):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
    u, p, *_, state, _ = saved
    if dv is None:
        dv = u.new_zeros(*u.shape[:2], p.shape[0] // ctx.flags[1])
    grads = _op_backward(dv, filled(dlast, state), *saved, *ctx.flags)
    return *grads, None, *(None for _ in ctx.flags)


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("centaurus", "Triton"))


@within_sequences
def run(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool, return_state: bool,
    plan: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Run the layer, with the arguments of `centaurus_torch.run`. x has any dtype; a given `plan` selects torch."""
    if plan is not None or x.numel() == 0:
        return centaurus_torch.run(bank, x, state, resets, reverse, return_state, plan)
    H = x.shape[2]
    size = torch.exp(bank.decay)
    p_re, p_im = size * torch.cos(bank.turn), size * torch.sin(bank.turn)
    r_re, r_im, u, fan = bank.read, bank.across, x, 1
    if bank.B.dim() == 2:
        u = x @ bank.B.t().to(x.dtype)
    else:
        folded = bank.C
        if state is None and not return_state:
            folded = bank.B * bank.C
            fan = H if bank.mode == "full" else 1
        else:
            u = x.repeat(1, 1, bank.B.shape[0] // H) * bank.B.to(x.dtype)
        r_re, r_im = r_re * folded.unsqueeze(-1), r_im * folded.unsqueeze(-1)
    start = _turned(p_re.new_zeros(x.shape[0], 2, *p_re.t().shape)) if state is None else state
    v, last = _op(u, p_re, p_im, r_re, r_im, start, common.marks(resets), reverse, fan)
    if bank.C.dim() == 2:
        v = v @ bank.C.t().to(x.dtype)
    elif bank.mode == "full" and fan != H:
        v = v.unflatten(-1, (-1, H)).sum(-1)
    return v, last


@common.can_unless
def _can(**facts: Any) -> str:
    if facts.get("substates", 1) > SUBSTATES:
        return f"{facts['substates']} sub-states per channel; at most {SUBSTATES}"
    return ""


def _tiles(
    arch: str, channels: int, substates: int, batch: int = 0, length: int = 1, **facts: Any
) -> dict[str, dict[str, int]]:
    tile = tiles(channels, substates, arch)
    if batch:
        tile["SEGMENTS"] = int(segments(batch, length, tile, channels) > 1)
    return dict.fromkeys(("forward", "backward"), tile)


def _example(
    channels: int, substates: int, mode: str = "dws", features: int = 16, keeps: bool = True, resets: bool = False,
    reverse: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.centaurus import centaurus

    N = G = H = few_of(channels, 32)
    M, S = substates, 2 * SEGMENT + 10
    if mode == "full":  # equally many channels per feature, and at most two
        H = few_of(features, 32)
        N = H * max(1, min(2, channels // features))
    tensors = {"x": normal(2, S, H), "A_real": -normal(N, M, seed=1).abs() - 0.1, "A_imag": normal(N, M, seed=2)}
    into, out_of = ((N, H), (G, N)) if mode in ("neck", "pointwise") else ((N,), (N,))
    tensors |= {"dt": normal(N, seed=3).abs() * 0.3 + 0.01, "B": normal(*into, seed=4), "C": normal(*out_of, seed=5)}
    if mode != "pointwise":  # mode pointwise counts each sub-state as a channel and has no E
        tensors["E"] = normal(N, M, seed=6)
    # in mode full, calls with a state read one input per channel; others share features between channels
    options: dict[str, Any] = {"reverse": reverse, "mode": mode, "return_state": keeps}
    if resets:
        options["resets"] = (normal(2, S) > 1.5).to(facts["device"])
    return centaurus, tensors, options


register("centaurus", "triton", run, _can, _tiles, _example)
