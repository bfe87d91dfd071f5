"""The kernels of Centaurus.

Layouts: u [B, S, F] with strides over batch and tokens, where channel n reads feature n mod F;
v [B, S, N], or sums of `fan` channels in parts of one program each, [B, S, N / fan, parts];
bank [4, M, N] of p_re, p_im, r_re, r_im; states [B, 2, M, N], or [B, K, 2, M, N] for segments; passes [B, K].
Segments have T tokens in scan order; the last may be shorter. ADJOINT: iterate from the end.
A thread should own whole channels. In tiles [M, N] the compiler assigns neighbours along N, which it knows to be
contiguous, to neighbouring threads, one each: adding the argument `none`, which is 0, hides the alignment from it.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.triton_common import jit, tl


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
    """Run COUNT tokens of `walk`."""
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
def walk(
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
def carry(
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
    """Run COUNT tokens of `sums`."""
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
def sums(
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
