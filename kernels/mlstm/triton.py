"""The mLSTM in Triton: three launches forward, or five, four backward; one for a single token.

The mathematics and the letters are those of `torch.py`. Forward: gates (a program per head walks few chunks; of many
each has a program, after two launches that find what each makes of m, and the m that enters each), states before
every chunk (a tile of C in registers), outputs (a program per tile of tokens and of values). Backward, with the states
kept: one number a token from dh and h, the gradients of the states from the last chunk to the first, then tile by tile
those of q, of k and of v, and chunk by chunk those of the gates.

A chunk is one, two or four tiles of tokens: longer chunks move fewer states, wider tiles would spill. Programs that
read the same lie side by side in a grid, so that it comes from memory once and from the cache then.

With the stabiliser m held constant, the gradient of log f at t is that of all weights that reach from before t to t or
beyond. A chunk needs what it contains, and <C, dC> + <n, dn> of the state that leaves it: no sum runs over the
sequence. The rest is little: eps, which makes h depend on its scale, and the m that leaves. Every m is a maximum, so
its gradient goes to the one input gate that made it, or to the m that enters the chunk, which is handed on from chunk
to chunk by the launch that walks back through the states.

All gates and states are float32, sums of log f float64. Dots take bfloat16 as it is; float16, whose range a state may
exceed, goes through tf32, which has as many digits; float32 stays float32, and goes through tf32 where it meets another
dtype. States between chunks are kept as dots take them. Nothing is transposed but by loading it that way: several
compilers for sm_90 turn an accumulator into a transposed operand wrongly. There are no atomic additions.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.self_check import launch_size, normal
from seqblocks.kernels.mlstm import nonfinite
from seqblocks.kernels.mlstm.reference import MLSTMState
from seqblocks.kernels.numerics import no_second_derivative
from seqblocks.kernels.triton_common import binary, exp, jit, log_sigmoid, operand, over, tl, up

# ------------------------------------------------------------------------------
# The kernels.   Places: q, k, v, dh, i, f by strides xb, xs, xh over batch, tokens, heads; h, dq, dk, dv [B, S, H, D]
# and di, df [B, S, H] contiguous. N = B H heads, K chunks of L tokens, T = K L places in the order of the scan:
# gates [9, N, T] are e, x (both as binary logarithms), u, floor, 1 where p made the maximum x, den, the weight with
# which a token stands in the state that leaves its chunk, what rounding e to float32 left, and in the last place of a
# chunk the weight of the state that enters it in the one that leaves; factors [5, N, T] are 1 / (max + eps), dden, dm,
# and the first two with u and the scale; segments [N, T]; links [2, N, K] are what a chunk adds to the gradient of the
# m that enters it, and 1 where it passes on that of the m that leaves; rows, columns [tiles of DK, N, T] are parts of
# q . dq and k . dk, the sums of weight times gradient by reading and by written token: of one dden, so that what both
# contain cancels, rounded or not.
# C, dC [N, K, DK, DV] and n, dn [N, K, DK]: states before, gradients of states after each chunk.


@jit
@no_type_check
def _start(x, n, H, c, S, xb, xs, xh, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Where the first token of chunk c of head n lies."""
    t = S - 1 - c * BT if REVERSE else c * BT
    return x + (n // H).to(tl.int64) * xb + (n % H).to(tl.int64) * xh + tl.cast(t, tl.int64) * xs


@jit
@no_type_check
def _tile(x, down, across, is_down, is_across):
    return tl.load(x + down[:, None] + across[None, :], is_down[:, None] & is_across[None, :], 0.0)


@jit
@no_type_check
def _inside(d, D: tl.constexpr, B: tl.constexpr):
    """Which of the channels d, B from a multiple of B, there are: a constant where all are, so that nothing asks."""
    if D % B == 0:
        return tl.full((B,), True, tl.int1)
    else:
        return d < D


@jit
@no_type_check
def _add_within(segment, a, other, b):
    """Combines runs of (segment, sum of what of it has passed)."""
    return other, tl.where(segment == other, a + b, b)


@jit
@no_type_check
def _most_within(segment, a, other, b):
    return other, tl.where(segment == other, tl.maximum(a, b), b)


@jit
@no_type_check
def _most(a, b):
    return tl.maximum(a, b)


@jit
@no_type_check
def _then(sum_a, most_a, sum_b, most_b):
    """One stretch of tokens and then another, as functions of the m before: max(m + sum, most)."""
    return sum_a + sum_b, tl.maximum(most_a + sum_b, most_b)


@jit
@no_type_check
def _power(x):
    """2^x in float32, of a float64 x that is a difference."""
    return tl.exp2(x.to(tl.float32))


@jit
@no_type_check
def _sums(segment, x, SEGMENTS: tl.constexpr):
    """Of x [BT] up to each place, each segment by itself."""
    if SEGMENTS:
        return tl.associative_scan((segment, x), 0, _add_within)[1]
    return tl.cumsum(x, 0)


@jit
@no_type_check
def _chunk_gates(
    i, f, resets, n, H, c, S, ib, js, ih, fb, fs, fh, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr
):
    """Of chunk c by itself, as binary logarithms in float64: b, e, and what b leaves out; e in float32, the largest of
    those so far in the token's segment; and the number of that segment.

    Float64, because differences of sums are what counts. A gate that lets nothing through would make the sums large, or
    infinite. So b has of it as much as leaves all tokens before with 2^-300 of the weight of the gate's own token. The
    rest is for what enters the chunk, which may weigh more.
    """
    j = tl.arange(0, BT)
    live = j < S - c * BT
    sign = -1 if REVERSE else 1
    raw_f = tl.load(_start(f, n, H, c, S, fb, fs, fh, REVERSE, BT) + sign * j * fs, live, 0.0).to(tl.float32)
    log_i = tl.load(_start(i, n, H, c, S, ib, js, ih, REVERSE, BT) + sign * j * js, live, 0.0).to(tl.float32)
    # beyond S nothing is written and nothing forgotten: the last place is like the last token
    log_f = tl.where(live, log_sigmoid(raw_f), 0.0)
    if not EXP:
        log_i = log_sigmoid(log_i)
    log_i = tl.where(live, log_i, float("-inf"))
    least = tl.maximum(log_i - tl.max(log_i, 0) - 208.0, -1e6)
    closed = log_f < least
    rest = tl.where(closed, binary(log_f - least), 0.0)
    log_f = binary(tl.where(closed, least, log_f).to(tl.float64))
    log_i = binary(log_i.to(tl.float64))
    segment = tl.zeros((BT,), tl.int32)
    if resets is not None:
        marks = tl.load(_start(resets, n, H, c, S, S, 1, 0, REVERSE, BT) + sign * j, live, 0).to(tl.int32)
        segment = tl.cumsum(marks, 0)
    b = _sums(segment, log_f, resets is not None)
    if tl.min(rest, 0) < 0.0:
        rest = _sums(segment, rest, resets is not None)
    e = log_i - b
    high = e.to(tl.float32)
    if resets is not None:
        best = tl.associative_scan((segment, high), 0, _most_within)[1]
    else:
        best = tl.associative_scan(high, 0, _most)
    return b, e, rest.to(tl.float64), high, best, segment


@jit
@no_type_check
def _passage(b, e, rest, segment, BT: tl.constexpr):
    """What a chunk makes of the m that enters it, max(m + sum, most): after a reset that m is 0."""
    last = tl.arange(0, BT) == BT - 1
    sum = tl.sum(tl.where(last, b, 0.0), 0)
    most = tl.max(tl.where(segment == tl.max(segment, 0), e, float("-inf")), 0)
    enters = tl.sum(tl.where(last, rest, 0.0), 0)
    if tl.max(segment, 0) > 0:
        return tl.full((), float("-inf"), tl.float64), tl.maximum(most, enters) + sum
    return sum + enters, most + sum


@common.kernel(do_not_specialize=["S"])  # one compiled kernel for all lengths
@no_type_check
def _totals(
    i, f, resets, totals,
    S, H, ib, js, ih, fb, fs, fh, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
):
    """totals [2, N, K]: what every chunk makes of m."""
    at = tl.program_id(0)
    chunks = tl.cdiv(S, BT)
    b, e, rest, _, _, segment = _chunk_gates(
        i, f, resets, at // chunks, H, at % chunks, S, ib, js, ih, fb, fs, fh, EXP, REVERSE, BT
    )
    sum, most = _passage(b, e, rest, segment, BT)
    tl.store(totals + at, sum)
    tl.store(totals + tl.num_programs(0) + at, most)


@common.kernel(do_not_specialize=["K"])
@no_type_check
def _entering(totals, m0, entering, K, BC: tl.constexpr):
    """entering [N, K + 1]: m before every chunk and after the last. A program per head reads every chunk once."""
    n = tl.program_id(0)
    j = tl.arange(0, BC)
    m = tl.full((), 0.0, tl.float64)
    if m0 is not None:
        m = binary(tl.load(m0 + n).to(tl.float64))
    entering += n * (K + 1)
    tl.store(entering, m)
    for first in range(0, K, BC):
        at = totals + n * K + first + j
        sum = tl.load(at, first + j < K, 0.0)
        most = tl.load(at + tl.num_programs(0) * K, first + j < K, float("-inf"))
        sum, most = tl.associative_scan((sum, most), 0, _then)
        after = tl.maximum(most, sum + m)
        tl.store(entering + 1 + first + j, after, first + j < K)
        m = tl.sum(tl.where(j == BC - 1, after, 0.0), 0)


@common.kernel(do_not_specialize=["S", "N"])
@no_type_check
def _gates(
    i, f, resets, m0, entering, gates, segments, m_out,
    S, N, H, ib, js, ih, fb, fs, fh,
    EACH: tl.constexpr, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
):
    """A program per head, which walks the chunks; or, if EACH, one per chunk, to which `entering` says what m enters.

    m is a binary logarithm in float64; the last one, which a state keeps in float32, is rounded before it is used.
    """
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks if EACH else tl.program_id(0)
    first = tl.program_id(0) % chunks if EACH else 0
    end = first + 1 if EACH else chunks
    place = n.to(tl.int64) * chunks * BT
    plane = tl.cast(N, tl.int64) * chunks * BT
    j = tl.arange(0, BT)
    last = j == BT - 1
    m = tl.full((), 0.0, tl.float64)
    if EACH and EXP:
        m = tl.load(entering + n * (chunks + 1) + first)
    elif m0 is not None:
        m = binary(tl.load(m0 + n).to(tl.float64))
    if not EXP:
        m = tl.where(first == 0, m, 0.0)  # a given m counts until the first token
    for c in range(first, end):
        b, e, rest, high, best, segment = _chunk_gates(
            i, f, resets, n, H, c, S, ib, js, ih, fb, fs, fh, EXP, REVERSE, BT
        )
        whole = segment == 0
        p = tl.where(whole, m, 0.0) + rest
        after = tl.full((), 0.0, tl.float64)
        if EXP:
            sum, most = _passage(b, e, rest, segment, BT)
            after = tl.maximum(most, sum + m)
            if c == chunks - 1:
                after = _rounded(after)
        # x, in float32, is whatever makes weights no larger than 1; all else is relative to it as it was rounded
        carried = tl.zeros((BT,), tl.int1)
        x = (-b).to(tl.float32)
        if EXP:
            carried = p.to(tl.float32) > best
            x = tl.maximum(best, p.to(tl.float32))
        to = gates + place + c * BT + j
        tl.store(to, high)
        tl.store(to + plane, x)
        tl.store(to + 2 * plane, _power(tl.where(whole, p - x.to(tl.float64), float("-inf"))))
        tl.store(to + 3 * plane, tl.exp2(tl.minimum((-b - x.to(tl.float64)).to(tl.float32), 125.51447)))
        tl.store(to + 4 * plane, tl.where(carried, 1.0, 0.0))
        reaches = segment == tl.max(segment, 0)  # the end of the chunk
        through = tl.sum(tl.where(last, b, 0.0), 0) - after
        tl.store(to + 6 * plane, _power(tl.where(reaches, e + through, float("-inf"))))
        low = e - tl.where(high > float("-inf"), high, 0.0).to(tl.float64)
        tl.store(to + 7 * plane, tl.where(high > float("-inf"), low, 0.0).to(tl.float32))
        tl.store(to + 8 * plane, _power(tl.where(whole & last, m + rest + through, float("-inf"))))
        if segments is not None:
            tl.store(segments + place + c * BT + j, segment)
        m = after
        if m_out is not None:
            if c == chunks - 1:
                tl.store(m_out + n, _natural(m).to(tl.float32))


@jit
@no_type_check
def _natural(x):
    """A binary logarithm as a natural one."""
    return x * 0.6931471805599453


@jit
@no_type_check
def _rounded(m):
    """The binary logarithm m as it comes back from a state, which keeps the natural one in float32."""
    return binary(_natural(m).to(tl.float32).to(tl.float64))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _states(
    k, v, C0, n0, gates, segments, C, norm, C_out, n_out,
    S, H, DK: tl.constexpr, DV: tl.constexpr, kb, ks, kh, vb, vs, vh,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """C and n before every chunk, and after the last."""
    over: tl.constexpr = (DV + BV - 1) // BV
    blocks: tl.constexpr = (DK + BK - 1) // BK * over
    n = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    wide = n.to(tl.int64)
    chunks = tl.cdiv(S, L)
    place = wide * chunks * L
    plane = (tl.num_programs(0) // blocks).to(tl.int64) * chunks * L
    dk = block // over * BK + tl.arange(0, BK)
    dv = block % over * BV + tl.arange(0, BV)
    is_k, is_v = _inside(dk, DK, BK), _inside(dv, DV, BV)
    own = is_k[:, None] & is_v[None, :]
    first = dk < tl.where(block % over == 0, DK, 0)  # of several tiles of values, one keeps n
    cell = dk[:, None] * DV + dv[None, :]
    j = tl.arange(0, BT)
    sign = -1 if REVERSE else 1
    state = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    if C0 is not None:
        state = tl.load(C0 + wide * DK * DV + cell, own, 0.0)
        total = tl.load(n0 + wide * DK + dk, is_k, 0.0)
    for tile in range(chunks * (L // BT)):
        here = place + tile * BT
        if tile % (L // BT) == 0:
            at = wide * chunks + tile // (L // BT)
            tl.store(C + at * DK * DV + cell, operand(state, C.dtype.element_ty, PRECISION), own)
            tl.store(norm + at * DK + dk, total, first)
            keep = tl.load(gates + 8 * plane + here + L - 1)
            state *= keep
            total *= keep
        live = j < S - tile * BT
        weight = tl.load(gates + 6 * plane + here + j)
        rows = _start(k, n, H, tile, S, kb, ks, kh, REVERSE, BT)
        keys = _tile(rows, dk, sign * j * ks, is_k, live)
        rows = _start(v, n, H, tile, S, vb, vs, vh, REVERSE, BT)
        values = _tile(rows, sign * j * vs, dv, live, is_v)
        # the dot and n weigh keys each for itself, in its own layout: a product of both would go between threads. As a
        # fused multiply-add, which compilers do not take for that product
        written = operand(keys.to(tl.float32) * weight[None, :], DOT, PRECISION)
        state += tl.dot(written, operand(values, DOT, PRECISION), input_precision=PRECISION)
        if block % over == 0:
            total += tl.sum(tl.fma(keys.to(tl.float32), weight[None, :] + tl.zeros((BK, BT), tl.float32), 0.0), 1)
    if C_out is not None:
        tl.store(C_out + wide * DK * DV + cell, state, own)
        tl.store(n_out + wide * DK + dk, total, first)


@jit
@no_type_check
def _products(
    a, b, down, across, is_down, is_across, D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """a . b of every row of the one tile with every row of the other, over D channels."""
    out = tl.zeros((BT, BT), tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        is_d = _inside(d, D, BD)
        rows = operand(_tile(a, down, d, is_down, is_d), DOT, PRECISION)
        columns = operand(_tile(b, d, across, is_d, is_across), DOT, PRECISION)
        out += tl.dot(rows, columns, input_precision=PRECISION)
    return out


@jit
@no_type_check
def _segment(segments, here, j):
    """Of a tile's tokens; without resets anything."""
    segment = j
    if segments is not None:
        segment = tl.load(segments + here + j)
    return segment


@jit
@no_type_check
def _reach(gates, segments, plane, written, x, segment, t, s, j, log_scale, LOW: tl.constexpr):
    """Weights [t, s] of what tokens t of one tile, of known x and segment, read of tokens s of another: the scale times
    2^(e_s - x_t), or 0. LOW: e in two parts, and the scale with the second; if not, it is in x."""
    sees = s[None, :] <= t[:, None]
    if segments is not None:
        sees = sees & (tl.load(segments + written + j)[None, :] == segment[:, None])
    weights = tl.load(gates + written + j)[None, :] - x[:, None]
    if LOW:
        weights += (tl.load(gates + 7 * plane + written + j) + log_scale)[None, :]
    return tl.exp2(tl.where(sees, weights, float("-inf")))


@jit
@no_type_check
def _reached(gates, segments, plane, reading, e, segment, t, s, j, log_scale, LOW: tl.constexpr, here):
    """The same as [s, t], of known e and segment of s: nothing is transposed."""
    seen = s[:, None] <= t[None, :]
    if segments is not None:
        seen = seen & (tl.load(segments + reading + j)[None, :] == segment[:, None])
    weights = e[:, None] - tl.load(gates + plane + reading + j)[None, :]
    if LOW:
        weights += (tl.load(gates + 7 * plane + here + j) + log_scale)[:, None]
    return tl.exp2(tl.where(seen, weights, float("-inf")))


@jit
@no_type_check
def _own_tile(S, OVER: tl.constexpr, L: tl.constexpr, BT: tl.constexpr):
    """A program's head, its tile among those of the head and within its chunk, the chunk among all, its place in planes
    and their size, its tokens and which of them there are. OVER programs, side by side, share a tile."""
    own, all = tl.program_id(0) // OVER, tl.num_programs(0) // OVER
    tiles = tl.cdiv(S, L) * (L // BT)
    tile = own % tiles
    j = tl.arange(0, BT)
    return (
        own // tiles, tile, tile % (L // BT), (own // (L // BT)).to(tl.int64),
        own.to(tl.int64) * BT, all.to(tl.int64) * BT, j, j < S - tile * BT,
    )


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _outputs(
    q, k, v, C, norm, gates, segments, h,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, scale, log_scale, eps,
    NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    over: tl.constexpr = (DV + BV - 1) // BV
    n, tile, part, at, here, plane, j, live = _own_tile(S, over, L, BT)
    dv = tl.program_id(0) % over * BV + tl.arange(0, BV)
    is_v = _inside(dv, DV, BV)
    sign = -1 if REVERSE else 1
    queries = _start(q, n, H, tile, S, qb, qs, qh, REVERSE, BT)
    num = tl.zeros((BT, BV), tl.float32)
    parts = tl.zeros((BT, BK), tl.float32)  # of q . n, by channels
    for first in range(0, DK, BK):
        dk = first + tl.arange(0, BK)
        is_k = _inside(dk, DK, BK)
        a = _tile(queries, sign * j * qs, dk, live, is_k)
        state = _tile(C + at * DK * DV, dk * DV, dv, is_k, is_v)
        num += tl.dot(operand(a, DOT, PRECISION), state.to(DOT), input_precision=PRECISION)
        parts += a.to(tl.float32) * tl.load(norm + at * DK + dk, is_k, 0.0)[None, :]
    u = tl.load(gates + 2 * plane + here + j) * scale
    num *= u[:, None]
    den = tl.sum(parts, 1) * u
    LOW: tl.constexpr = tl.bfloat16 != DOT  # which rounds weights at 2^-9
    x = tl.load(gates + plane + here + j)
    if not LOW:
        x -= log_scale
    segment = _segment(segments, here, j)
    for back in range(part + 1):
        other = tile - back
        seen = j < S - other * BT
        keys = _start(k, n, H, other, S, kb, ks, kh, REVERSE, BT)
        weights = _products(
            queries, keys, sign * j * qs, sign * j * ks, live, seen, DK, DOT, PRECISION, BT, BK
        )
        weights *= _reach(
            gates, segments, plane, here - back * BT, x, segment, tile * BT + j, other * BT + j, j, log_scale, LOW
        )
        values = _tile(_start(v, n, H, other, S, vb, vs, vh, REVERSE, BT), sign * j * vs, dv, seen, is_v)
        den += tl.sum(weights, 1)
        num += tl.dot(operand(weights, DOT, PRECISION), operand(values, DOT, PRECISION), input_precision=PRECISION)
    if NORMALIZE:
        tl.store(gates + 5 * plane + here + j, den, j < tl.where(tl.program_id(0) % over == 0, BT, 0))
        num *= (1.0 / (tl.maximum(tl.abs(den), tl.load(gates + 3 * plane + here + j)) + eps))[:, None]
    else:  # x is rounded: so far below, or above, is the scale of m = 0
        num *= (1.0 / tl.load(gates + 3 * plane + here + j))[:, None]
    to = _start(h, n, H, tile, S, tl.cast(S, tl.int64) * H * DV, H * DV, DV, REVERSE, BT)
    to += (sign * j * H * DV)[:, None] + dv[None, :]
    tl.store(to, num.to(h.dtype.element_ty), live[:, None] & is_v[None, :])


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _factors(
    dh, h, gates, segments, factors, links,
    S, H, DV: tl.constexpr, gb, gs, gh, scale, eps,
    EXP: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):
    """From r = dh . h and the divisor."""
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    here = tl.program_id(0).to(tl.int64) * BT
    plane = tl.num_programs(0).to(tl.int64) * BT
    j = tl.arange(0, BT)
    live = j < S - c * BT
    sign = -1 if REVERSE else 1
    grads = _start(dh, n, H, c, S, gb, gs, gh, REVERSE, BT)
    outs = _start(h, n, H, c, S, tl.cast(S, tl.int64) * H * DV, H * DV, DV, REVERSE, BT)
    r = tl.zeros((BT,), tl.float32)
    for first in range(0, DV, BV):
        dv = first + tl.arange(0, BV)
        is_v = _inside(dv, DV, BV)
        a = _tile(grads, sign * j * gs, dv, live, is_v).to(tl.float32)
        r += tl.sum(a * _tile(outs, sign * j * H * DV, dv, live, is_v).to(tl.float32), 1)
    floor = tl.load(gates + 3 * plane + here + j)
    dden = tl.zeros((BT,), tl.float32)
    dm = tl.zeros((BT,), tl.float32)
    if NORMALIZE:
        den = tl.load(gates + 5 * plane + here + j)
        wins = tl.abs(den) >= floor
        inverse = tl.where(live, 1.0 / (tl.maximum(tl.abs(den), floor) + eps), 0.0)
        dden = tl.where(wins, tl.where(den < 0.0, r, -r) * inverse, 0.0)
        if EXP:
            dm = -eps * r * inverse
    else:
        inverse = tl.where(live, 1.0 / floor, 0.0)
    tl.store(factors + here + j, inverse)
    tl.store(factors + plane + here + j, dden)
    tl.store(factors + 2 * plane + here + j, dm)
    u = tl.load(gates + 2 * plane + here + j) * scale
    tl.store(factors + 3 * plane + here + j, u * inverse)
    tl.store(factors + 4 * plane + here + j, u * dden)
    whole = tl.load(gates + 4 * plane + here + j)
    if segments is not None:
        whole = tl.where(tl.load(segments + here + j) == 0, whole, 0.0)
    tl.store(links + tl.program_id(0), tl.sum(whole * dm, 0))
    tl.store(links + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(j == BT - 1, whole, 0.0), 0))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _state_gradients(
    q, dh, C, norm, C_out, n_out, dC_out, dn_out, gates, factors, links, dC, dnorm, dC0, dn0, flows, ahead,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, gb, gs, gh,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """flows [N, K + 1, tiles]: this tile's part of <C, dC> + <n, dn> before every chunk, and after the last.

    ahead [2, N, K]: what chunks after this one give to the m that leaves it, and 1 if that is the m after the last.
    """
    over: tl.constexpr = (DV + BV - 1) // BV
    blocks: tl.constexpr = (DK + BK - 1) // BK * over
    n = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    wide = n.to(tl.int64)
    chunks = tl.cdiv(S, L)
    place = wide * chunks * L
    plane = (tl.num_programs(0) // blocks).to(tl.int64) * chunks * L
    dk = block // over * BK + tl.arange(0, BK)
    dv = block % over * BV + tl.arange(0, BV)
    is_k, is_v = _inside(dk, DK, BK), _inside(dv, DV, BV)
    own = is_k[:, None] & is_v[None, :]
    first = dk < tl.where(block % over == 0, DK, 0)
    cell = dk[:, None] * DV + dv[None, :]
    j = tl.arange(0, BT)
    sign = -1 if REVERSE else 1
    grad = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    flow = 0.0
    if dC_out is not None:
        grad = tl.load(dC_out + wide * DK * DV + cell, own, 0.0)
        total = tl.load(dn_out + wide * DK + dk, first, 0.0)
        flow = tl.sum(grad * tl.load(C_out + wide * DK * DV + cell, own, 0.0))
        flow += tl.sum(total * tl.load(n_out + wide * DK + dk, first, 0.0))
    given, passes = 0.0, 1.0
    of_all = (tl.num_programs(0) // blocks).to(tl.int64) * chunks
    parts = flows + wide * (chunks + 1) * blocks + block
    tl.store(parts + chunks * blocks, flow)
    for back in range(chunks * (L // BT)):
        tile = chunks * (L // BT) - 1 - back
        here = place + tile * BT
        c = tile // (L // BT)
        at = wide * chunks + c
        if tile % (L // BT) == L // BT - 1:
            tl.store(dC + at * DK * DV + cell, operand(grad, dC.dtype.element_ty, PRECISION), own)
            tl.store(dnorm + at * DK + dk, total, first)
            keep = tl.load(gates + 8 * plane + here + BT - 1)
            grad *= keep
            total *= keep
            if links is not None:
                if block == 0:
                    tl.store(ahead + at, given)
                    tl.store(ahead + of_all + at, passes)
                    goes_on = tl.load(links + of_all + at)
                    given = tl.load(links + at) + goes_on * given
                    passes *= goes_on
        live = j < S - tile * BT
        rows = _start(q, n, H, tile, S, qb, qs, qh, REVERSE, BT)
        queries = _tile(rows, dk, sign * j * qs, is_k, live)
        rows = _start(dh, n, H, tile, S, gb, gs, gh, REVERSE, BT)
        outs = _tile(rows, sign * j * gs, dv, live, is_v)
        read = queries.to(tl.float32) * tl.load(factors + 3 * plane + here + j)[None, :]
        grad += tl.dot(operand(read, DOT, PRECISION), operand(outs, DOT, PRECISION), input_precision=PRECISION)
        if block % over == 0:
            total += tl.sum(queries.to(tl.float32) * tl.load(factors + 4 * plane + here + j)[None, :], 1)
        if tile % (L // BT) == 0:
            flow = tl.sum(grad * tl.load(C + at * DK * DV + cell, own, 0.0).to(tl.float32))
            flow += tl.sum(total * tl.load(norm + at * DK + dk, first, 0.0))
            tl.store(parts + c * blocks, flow)
    if dC0 is not None:
        tl.store(dC0 + wide * DK * DV + cell, grad, own)
        tl.store(dn0 + wide * DK + dk, total, first)


@jit
@no_type_check
def _query_gradients(
    q, k, v, dh, C, norm, gates, segments, factors, dq, rows,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    column, OVER: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """Weights are [t, s]: tokens down, what they read across."""
    n, tile, part, at, here, plane, j, live = _own_tile(S, OVER, L, BT)
    d = column * BK + tl.arange(0, BK)
    is_d = _inside(d, DK, BK)
    sign = -1 if REVERSE else 1
    grads = _start(dh, n, H, tile, S, gb, gs, gh, REVERSE, BT)
    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, DV, BD):
        dv = first + tl.arange(0, BD)
        is_v = _inside(dv, DV, BD)
        a = operand(_tile(grads, sign * j * gs, dv, live, is_v), DOT, PRECISION)
        state = tl.load(C + at * DK * DV + dv[:, None] + (d * DV)[None, :], is_v[:, None] & is_d[None, :], 0.0)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    inverse = tl.load(factors + here + j)
    dden = tl.load(factors + plane + here + j)
    total *= tl.load(factors + 3 * plane + here + j)[:, None]
    total += tl.load(factors + 4 * plane + here + j)[:, None] * tl.load(norm + at * DK + d, is_d, 0.0)[None, :]
    LOW: tl.constexpr = tl.bfloat16 != DOT  # which rounds weights at 2^-9
    x = tl.load(gates + plane + here + j)
    if not LOW:
        x -= log_scale
    segment = _segment(segments, here, j)
    for back in range(part + 1):
        other = tile - back
        seen = j < S - other * BT
        values = _start(v, n, H, other, S, vb, vs, vh, REVERSE, BT)
        weights = _products(
            grads, values, sign * j * gs, sign * j * vs, live, seen, DV, DOT, PRECISION, BT, BD
        )
        weights = weights * inverse[:, None] + dden[:, None]
        weights *= _reach(
            gates, segments, plane, here - back * BT, x, segment, tile * BT + j, other * BT + j, j, log_scale, LOW
        )
        b = _tile(_start(k, n, H, other, S, kb, ks, kh, REVERSE, BT), sign * j * ks, d, seen, is_d)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(b, DOT, PRECISION), input_precision=PRECISION)
    to = _start(dq, n, H, tile, S, tl.cast(S, tl.int64) * H * DK, H * DK, DK, REVERSE, BT)
    to += (sign * j * H * DK)[:, None] + d[None, :]
    tl.store(to, total.to(dq.dtype.element_ty), live[:, None] & is_d[None, :])
    a = _tile(_start(q, n, H, tile, S, qb, qs, qh, REVERSE, BT), sign * j * qs, d, live, is_d).to(tl.float32)
    tl.store(rows + column * plane + here + j, tl.sum(a * total, 1))


@jit
@no_type_check
def _key_gradients(
    q, k, v, dh, dC, dnorm, gates, segments, factors, dk, columns,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    column, OVER: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """Weights are [s, t]: what is read down, by which tokens across."""
    n, tile, part, at, here, plane, j, live = _own_tile(S, OVER, L, BT)
    d = column * BK + tl.arange(0, BK)
    is_d = _inside(d, DK, BK)
    sign = -1 if REVERSE else 1
    values = _start(v, n, H, tile, S, vb, vs, vh, REVERSE, BT)
    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, DV, BD):
        dv = first + tl.arange(0, BD)
        is_v = _inside(dv, DV, BD)
        a = operand(_tile(values, sign * j * vs, dv, live, is_v), DOT, PRECISION)
        state = tl.load(dC + at * DK * DV + dv[:, None] + (d * DV)[None, :], is_v[:, None] & is_d[None, :], 0.0)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    total += tl.load(dnorm + at * DK + d, is_d, 0.0)[None, :]
    total *= tl.load(gates + 6 * plane + here + j)[:, None]
    LOW: tl.constexpr = tl.bfloat16 != DOT
    e = tl.load(gates + here + j)
    if not LOW:
        e += log_scale
    segment = _segment(segments, here, j)
    for ahead in range(L // BT - part):
        other = tile + ahead
        reads = j < S - other * BT
        there = here + ahead * BT
        grads = _start(dh, n, H, other, S, gb, gs, gh, REVERSE, BT)
        weights = _products(
            values, grads, sign * j * vs, sign * j * gs, live, reads, DV, DOT, PRECISION, BT, BD
        )
        inverse = tl.load(factors + there + j)
        dden = tl.load(factors + plane + there + j)
        weights = weights * inverse[None, :] + dden[None, :]
        weights *= _reached(
            gates, segments, plane, there, e, segment, other * BT + j, tile * BT + j, j, log_scale, LOW, here
        )
        a = _tile(_start(q, n, H, other, S, qb, qs, qh, REVERSE, BT), sign * j * qs, d, reads, is_d)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(a, DOT, PRECISION), input_precision=PRECISION)
    to = _start(dk, n, H, tile, S, tl.cast(S, tl.int64) * H * DK, H * DK, DK, REVERSE, BT)
    to += (sign * j * H * DK)[:, None] + d[None, :]
    tl.store(to, total.to(dk.dtype.element_ty), live[:, None] & is_d[None, :])
    b = _tile(_start(k, n, H, tile, S, kb, ks, kh, REVERSE, BT), sign * j * ks, d, live, is_d).to(tl.float32)
    tl.store(columns + column * plane + here + j, tl.sum(b * total, 1))


@jit
@no_type_check
def _value_gradients(
    q, k, dh, dC, gates, segments, factors, dv,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, gb, gs, gh, log_scale,
    column, OVER: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):
    n, tile, part, at, here, plane, j, live = _own_tile(S, OVER, L, BT)
    d = column * BV + tl.arange(0, BV)
    is_d = _inside(d, DV, BV)
    sign = -1 if REVERSE else 1
    keys = _start(k, n, H, tile, S, kb, ks, kh, REVERSE, BT)
    total = tl.zeros((BT, BV), tl.float32)
    for first in range(0, DK, BD):
        dk = first + tl.arange(0, BD)
        is_k = _inside(dk, DK, BD)
        a = operand(_tile(keys, sign * j * ks, dk, live, is_k), DOT, PRECISION)
        state = _tile(dC + at * DK * DV, dk * DV, d, is_k, is_d)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    total *= tl.load(gates + 6 * plane + here + j)[:, None]
    LOW: tl.constexpr = tl.bfloat16 != DOT
    e = tl.load(gates + here + j)
    if not LOW:
        e += log_scale
    segment = _segment(segments, here, j)
    for ahead in range(L // BT - part):
        other = tile + ahead
        reads = j < S - other * BT
        there = here + ahead * BT
        queries = _start(q, n, H, other, S, qb, qs, qh, REVERSE, BT)
        weights = _products(
            keys, queries, sign * j * ks, sign * j * qs, live, reads, DK, DOT, PRECISION, BT, BD
        )
        weights *= _reached(
            gates, segments, plane, there, e, segment, other * BT + j, tile * BT + j, j, log_scale, LOW, here
        )
        weights *= tl.load(factors + there + j)[None, :]
        grads = _tile(_start(dh, n, H, other, S, gb, gs, gh, REVERSE, BT), sign * j * gs, d, reads, is_d)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(grads, DOT, PRECISION), input_precision=PRECISION)
    to = _start(dv, n, H, tile, S, tl.cast(S, tl.int64) * H * DV, H * DV, DV, REVERSE, BT)
    to += (sign * j * H * DV)[:, None] + d[None, :]
    tl.store(to, total.to(dv.dtype.element_ty), live[:, None] & is_d[None, :])


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _gradients(
    q, k, v, dh, C, norm, dC, dnorm, gates, segments, factors, dq, rows, dk, columns, dv,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):
    """Of q, k and v: the programs of a tile side by side, so that what they all read comes from memory once."""
    over: tl.constexpr = (DK + BK - 1) // BK
    OVER: tl.constexpr = 2 * over + (DV + BV - 1) // BV
    which = tl.program_id(0) % OVER
    if which < over:
        _query_gradients(
            q, k, v, dh, C, norm, gates, segments, factors, dq, rows,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
            which, OVER, REVERSE, DOT, PRECISION, L, BT, BK, BD,
        )
    elif which < 2 * over:
        _key_gradients(
            q, k, v, dh, dC, dnorm, gates, segments, factors, dk, columns,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
            which - over, OVER, REVERSE, DOT, PRECISION, L, BT, BK, BD,
        )
    else:
        _value_gradients(
            q, k, dh, dC, gates, segments, factors, dv,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, gb, gs, gh, log_scale,
            which - 2 * over, OVER, REVERSE, DOT, PRECISION, L, BT, BV, BD,
        )


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _gate_gradients(
    i, f, dm_out, gates, segments, factors, links, ahead, rows, columns, flows, di, df, dm0,
    S, H, ib, js, ih, fb, fs, fh, row_tiles, column_tiles, state_tiles,
    EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
):
    """From the last token of the chunk to its first, so that all sums are of what is already seen."""
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    here = tl.program_id(0).to(tl.int64) * BT
    plane = tl.num_programs(0).to(tl.int64) * BT
    j = BT - 1 - tl.arange(0, BT)
    live = j < S - c * BT
    sign = -1 if REVERSE else 1
    tile = tl.arange(0, ROWS)[:, None]
    read = tl.sum(tl.load(rows + tile * plane + here + j[None, :], tile < row_tiles, 0.0), 0)
    tile = tl.arange(0, COLUMNS)[:, None]
    dlog_i = tl.sum(tl.load(columns + tile * plane + here + j[None, :], tile < column_tiles, 0.0), 0)
    # <C, dC> + <n, dn>, in parts
    tile = tl.arange(0, STATES)
    flows += n.to(tl.int64) * (chunks + 1) * state_tiles + tile
    leaves = tl.sum(tl.load(flows + (c + 1) * state_tiles, tile < state_tiles, 0.0), 0)
    reaches = tl.zeros((BT,), tl.float32) + leaves
    segment = tl.zeros((BT,), tl.int32)
    if segments is not None:
        segment = tl.load(segments + here + j)
        reaches = tl.where(segment == tl.load(segments + here + BT - 1), reaches, 0.0)
    if EXP:
        g = tl.load(ahead + tl.program_id(0))  # of the m that leaves this chunk
        if dm_out is not None:
            end = tl.sum(tl.load(flows + chunks * state_tiles, tile < state_tiles, 0.0), 0)
            passes = tl.load(ahead + tl.num_programs(0) + tl.program_id(0))
            g += tl.where(passes > 0.0, tl.load(dm_out + n) - end, 0.0)
        dm = tl.load(factors + 2 * plane + here + j) + tl.where(j == BT - 1, g, 0.0)
        read += dm
        # a token whose e is x made that maximum, and those after it until another token's or another segment's
        made = tl.load(gates + here + j) == tl.load(gates + plane + here + j)
        behind = tl.minimum(j + 1, BT - 1)
        ends = tl.load(gates + here + behind) == tl.load(gates + plane + here + behind)
        if segments is not None:
            ends = ends | (segment != tl.load(segments + here + behind))
        run = tl.cumsum(ends.to(tl.int32), 0)
        dlog_i += tl.where(made, _sums(run, dm, True), 0.0)
    if dm0 is not None:
        if c == 0:
            enters = tl.sum(tl.load(flows, tile < state_tiles, 0.0), 0)
            if EXP:
                enters += tl.load(links + n * chunks) + tl.load(links + tl.num_programs(0) + n * chunks) * g
            tl.store(dm0 + n, enters)
    dlog_f = _sums(segment, read - dlog_i, segments is not None) + reaches
    if not EXP:
        raw = tl.load(_start(i, n, H, c, S, ib, js, ih, REVERSE, BT) + sign * j * js, live, 0.0).to(tl.float32)
        dlog_i *= over(1.0 + exp(tl.minimum(raw, 88.0)))
    raw = tl.load(_start(f, n, H, c, S, fb, fs, fh, REVERSE, BT) + sign * j * fs, live, 0.0).to(tl.float32)
    dlog_f *= over(1.0 + exp(tl.minimum(raw, 88.0)))
    to = _start(0, n, H, c, S, tl.cast(S, tl.int64) * H, H, 1, REVERSE, BT) + sign * j * H
    tl.store(di + to, dlog_i, live)
    tl.store(df + to, dlog_f, live)


@common.kernel()
@no_type_check
def _step(
    q, k, v, i, f, resets, C0, n0, m0, h, C, norm, m,
    H, DK: tl.constexpr, DV: tl.constexpr, qb, qh, kb, kh, vb, vh, ib, ih, fb, fh, scale, eps,
    EXP: tl.constexpr, NORMALIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """One token, and nothing kept of it: a program reads and writes a strip [DK, BV] of C once."""
    n = tl.program_id(0)
    b = (n // H).to(tl.int64)
    head = (n % H).to(tl.int64)
    wide = n.to(tl.int64)
    first_strip = tl.program_id(1) == 0  # it keeps n and m
    dv = tl.program_id(1) * BV + tl.arange(0, BV)
    is_v = dv < DV
    through = log_sigmoid(tl.load(f + b * fb + head * fh).to(tl.float32))
    log_i = tl.load(i + b * ib + head * ih).to(tl.float32)
    if not EXP:
        log_i = log_sigmoid(log_i)
    begins = 0
    if resets is not None:
        begins = tl.load(resets + b).to(tl.int32)
    if m0 is not None:
        through += tl.where(begins == 0, tl.load(m0 + n), 0.0)
    top = tl.maximum(through, log_i) if EXP else 0.0
    keep = tl.where(begins == 0, exp(through - top), 0.0)
    write = exp(log_i - top)
    values = tl.load(v + b * vb + head * vh + dv, is_v, 0.0).to(tl.float32)
    num = tl.zeros((BV,), tl.float32)
    den = 0.0
    for first in range(0, DK, BK):
        dk = first + tl.arange(0, BK)
        is_k = dk < DK
        queries = tl.load(q + b * qb + head * qh + dk, is_k, 0.0).to(tl.float32) * scale
        keys = tl.load(k + b * kb + head * kh + dk, is_k, 0.0).to(tl.float32) * write
        cell = wide * DK * DV + dk[:, None] * DV + dv[None, :]
        both = is_k[:, None] & is_v[None, :]
        state = keys[:, None] * values[None, :]
        total = keys
        if C0 is not None:
            state += tl.where(begins == 0, tl.load(C0 + cell, both, 0.0), 0.0) * keep
            total += tl.where(begins == 0, tl.load(n0 + wide * DK + dk, is_k, 0.0), 0.0) * keep
        num += tl.sum(queries[:, None] * state, 0)
        den += tl.sum(queries * total, 0)
        if C is not None:
            tl.store(C + cell, state, both)
            if first_strip:
                tl.store(norm + wide * DK + dk, total, is_k)
    if NORMALIZE:
        floor = exp(tl.minimum(-top, 87.0)) if EXP else 1.0
        num = num / (tl.maximum(tl.abs(den), floor) + eps)
    tl.store(h + wide * DV + dv, num.to(h.dtype.element_ty), is_v)
    if m is not None:
        if first_strip:
            tl.store(m + n, top)


# ------------------------------------------------------------------------------
# Launching


WALKERS = 512  # programs that walk over chunks, at least: four for each multiprocessor of a large GPU
WALKED = 8  # chunks, at most, that one program goes through to find the gates; more are worth two more launches


def chunk(dk: int, dv: int, narrow: bool) -> dict[str, int]:
    """Tokens of a chunk and of a tile of it.

    Not narrow: dots of float32, which take twice the room. A chunk is two tiles where states are larger than what the
    tokens of one tile bring, and four where they are twice that: then less of states is written and read, which takes
    longer than the products within a chunk where these are of bfloat16; where not, eight times. It does not depend on
    the length, which may be unknown when a program is exported.
    """
    BT = 64 if narrow else 32
    states, tokens = dk * dv, BT * (dk + dv)
    return {"L": BT * (1 if states < tokens else 2 if states < (2 if narrow else 8) * tokens else 4), "BT": BT}


def tiles(kernel: str, dk: int, dv: int, narrow: bool, arch: str, heads: int = 1 << 20) -> dict[str, int]:
    """Columns of keys and of values that a program of this kernel holds, its warps, and the stages of its pipelines;
    of gradients also the channels that a product takes at a time (of outputs: BK).

    A program that makes all weights between two tiles of tokens should not do so for few columns: it has twice as many
    of those it writes, and on NVIDIA's up to all of a wide head, by twice the warps. Programs that walk over chunks are
    few: those are wide where heads (of all sequences together) and tiles leave several for each multiprocessor.
    """
    most = 64 if narrow else 32
    walks, both = kernel in ("states", "state_gradients"), kernel == "gradients"
    amd = arch.startswith("gfx")
    wide = narrow and (not walks or (not amd and heads * dk * dv >= WALKERS * 2 * most**2))
    size = {name: max(16, common.power_of_two(n)) for name, n in (("BK", dk), ("BV", dv))}
    cap = {"BK": 2 * most if wide and both else most, "BV": 2 * most if wide else most}
    tile = {name: min(cap[name], n) for name, n in size.items()}
    columns = max(size.values()) if both else size["BV"]
    step, warps, ahead = min(most, max(size.values())), 4, 3
    if wide and not walks:
        widest = 512 if arch == "sm_90" else 256 if arch.startswith("sm_8") else 128  # columns that 8 warps can hold
        if columns > (64 if both and widest == 256 else 128) and widest > 128:
            tile["BV"], warps = min(widest, size["BV"]), 8
            if both:
                tile |= {"BK": min(256, size["BK"]), "BV": min(tile["BV"], 256 if dk > 256 else 512)}
        # short steps, of which compilers unroll the loop; but not so many that this takes registers
        step, ahead = (32, 3) if columns > most and (both or warps == 4 or dk <= 256) else (step, 2)
    elif walks and amd:
        ahead = 2  # more, or wider tiles, would take registers of the second half
    if both:
        tile["BD"] = step
    elif not walks:
        tile["BK"] = min(step, size["BK"])
    return {**tile, "num_warps": warps, "num_stages": ahead}


def step_tiles(dk: int, dv: int, arch: str) -> dict[str, int]:
    """Rows and columns of C that a program holds at a time: enough of them under way to fill the memory's pipe."""
    BK, BV = (max(16, min(64, common.power_of_two(n))) for n in (dk, dv))
    return {"BK": BK, "BV": BV, "num_warps": common.warps(BK * BV, 16)}


class _Plan:
    """The grids and the arguments that launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, reverse: bool, input_gate: str
    ) -> None:
        B, self.S, self.H, self.DK = q.shape
        self.DV = v.shape[-1]
        self.N = B * self.H
        narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v))
        self.narrow = narrow
        self.chunk = chunk(self.DK, self.DV, narrow)
        L = self.chunk["L"]
        self.chunks = up(self.S, L)
        self.each = up(launch_size("length", self.S), L) > WALKED
        self.places = self.chunks * L
        self.tiles = self.N * self.places // self.chunk["BT"]
        exact = narrow or all(x.dtype == torch.float32 for x in (q, k, v))
        self.dot = {"DOT": tl.bfloat16 if narrow else tl.float32, "PRECISION": "ieee" if exact else "tf32"}
        self.between = torch.bfloat16 if narrow else torch.float32
        # gates are a number a token: one warp scans those of a chunk without asking others
        self.way = {"REVERSE": reverse, "BT": L, "num_warps": 1}
        self.all = {"REVERSE": reverse, **self.dot, **self.chunk}
        self.exp = input_gate == "exp"

    @property
    def scales(self) -> tuple[float, float]:
        """1 / sqrt(DK), and its binary logarithm."""
        return self.DK**-0.5, -0.5 * math.log2(self.DK)

    def gates(
        self, i: Tensor, f: Tensor, resets: Tensor | None, m0: Tensor | None, gates: Tensor,
        segments: Tensor | None, m_out: Tensor | None,
    ) -> None:
        each, entering = self.each, None
        given = {"EXP": self.exp, **self.way}
        if each and self.exp:
            totals = gates.new_empty(2, self.N, self.chunks, dtype=torch.float64)
            entering = gates.new_empty(self.N, self.chunks + 1, dtype=torch.float64)
            _totals[(self.N * self.chunks,)](i, f, resets, totals, self.S, self.H, *_strides(i, f), **given)
            _entering[(self.N,)](totals, m0, entering, self.chunks, BC=256, num_warps=1)
        _gates[(self.N * self.chunks if each else self.N,)](
            i, f, resets, m0, entering, gates, segments, m_out,
            self.S, self.N, self.H, *_strides(i, f), EACH=each, **given,
        )

    def states(
        self, k: Tensor, v: Tensor, C0: Tensor | None, n0: Tensor | None, gates: Tensor, segments: Tensor | None,
        C_out: Tensor | None, n_out: Tensor | None, C: Tensor, norm: Tensor,
    ) -> None:
        tile = self.tile("states", k)
        _states[(self.N * self.k_tiles(tile) * self.v_tiles(tile),)](
            k, v, C0, n0, gates, segments, C, norm, C_out, n_out,
            self.S, self.H, self.DK, self.DV, *_strides(k, v), **self.all, **tile,
        )

    def k_tiles(self, tile: dict[str, int]) -> int:
        return up(self.DK, tile["BK"])

    def v_tiles(self, tile: dict[str, int]) -> int:
        return up(self.DV, tile["BV"])

    def tile(self, kernel: str, x: Tensor) -> dict[str, int]:
        return tiles(kernel, self.DK, self.DV, self.narrow, common.arch(x), launch_size("batch", self.N))


def _strides(*tensors: Tensor) -> list[int]:
    """Over batch, tokens, heads."""
    return [n for x in tensors for n in x.stride()[:3]]


def _laid_out(lines: tuple[Tensor, ...], whole: tuple[Tensor | None, ...]) -> list[Any]:
    return [common.near(x, 256) for x in lines] + [None if x is None else x.contiguous() for x in whole]


@common.custom_op("seqblocks::mlstm_triton")
def _op(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h, the last C, n, m (empty if not asked for), and for the backward pass gates, segments, C and n by chunks."""
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    q, k, v, C0, n0, m0, resets = _laid_out((q, k, v), (C0, n0, m0, resets))
    outputs = _op_fake(q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state)
    h, C_out, n_out, m_out, gates, segments, C, norm = outputs
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    last = (C_out, n_out, m_out) if return_state else (None, None, None)
    marks = segments if resets is not None else None
    with common.on(q):
        plan.gates(i, f, resets, m0, gates, marks, last[2])
        plan.states(k, v, C0, n0, gates, marks, last[0], last[1], C, norm)
        tile = plan.tile("outputs", q)
        _outputs[(plan.tiles * plan.v_tiles(tile),)](
            q, k, v, C, norm, gates, marks, h,
            plan.S, plan.H, plan.DK, plan.DV, *_strides(q, k, v), *plan.scales, eps,
            NORMALIZE=normalize, **plan.all, **tile,
        )
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return outputs


@_op.register_fake
def _op_fake(  # type: ignore[no-untyped-def]
    q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state
):
    B, _, H, DK = q.shape
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    shapes = ((B, H, DK, v.shape[-1]), (B, H, DK), (B, H)) if return_state else ((0,),) * 3
    state = [f.new_empty(shape) for shape in shapes]
    gates = f.new_empty(9, plan.N, plan.places)
    segments = f.new_empty((plan.N, plan.places) if resets is not None else (0,), dtype=torch.int32)
    # not [N, K, ...]: a trace with one chunk would be for one chunk only
    C = f.new_empty(plan.N, plan.chunks * DK * v.shape[-1], dtype=plan.between)
    norm = f.new_empty(plan.N, plan.chunks * DK)
    return v.new_empty(v.shape), *state, gates, segments, C, norm


@common.custom_op("seqblocks::mlstm_triton_backward")
def _op_backward(
    dh: Tensor, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    h: Tensor, C_out: Tensor | None, n_out: Tensor | None, gates: Tensor, segments: Tensor | None,
    C: Tensor, norm: Tensor, reverse: bool, eps: float, input_gate: str, normalize: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, i, f and of the initial C, n, m, which are empty if there was none."""
    spoiled = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0, dh, dC_out, dn_out, dm_out):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        spoiled = found.spoiled(dh, dC_out, dn_out, dm_out)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
        dh, dC_out, dn_out, dm_out = found.clean_outputs(dh, dC_out, dn_out, dm_out)
        h, C_out, n_out = found.clean_outputs(h, C_out, n_out)
    dh, q, k, v, dC_out, dn_out, dm_out, h = _laid_out((dh, q, k, v), (dC_out, dn_out, dm_out, h))
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    like = _op_backward_fake(dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, h, C_out, n_out, gates,
                             segments, C, norm, reverse, eps, input_gate, normalize)
    dq, dk, dv, di, df, dC0, dn0, dm0 = like
    given = C0 is not None
    factors = gates.new_empty(5, plan.N, plan.places)
    links, ahead = (gates.new_empty(2, plan.N, plan.chunks) for _ in range(2))
    per_chunk = plan.N * plan.chunks
    sizes = (plan.S, plan.H, plan.DK, plan.DV)

    with common.on(q):
        dC, dnorm = torch.empty_like(C), torch.empty_like(norm)
        _factors[(per_chunk,)](
            dh, h, gates, segments, factors, links, plan.S, plan.H, plan.DV, *_strides(dh), plan.scales[0], eps,
            EXP=plan.exp, NORMALIZE=normalize, BV=min(64, max(16, common.power_of_two(plan.DV))),
            **plan.way | {"num_warps": min(8, plan.chunk["L"] // 16)},
        )
        tile = plan.tile("state_gradients", q)
        state_tiles = plan.k_tiles(tile) * plan.v_tiles(tile)
        flows = gates.new_empty(plan.N, plan.chunks + 1, state_tiles)
        _state_gradients[(plan.N * state_tiles,)](
            q, dh, C, norm, C_out, n_out, dC_out, dn_out, gates, factors, links if plan.exp else None, dC, dnorm,
            dC0 if given else None, dn0 if given else None, flows, ahead,
            *sizes, *_strides(q, dh), **plan.all, **tile,
        )
        tile = plan.tile("gradients", q)
        rows, columns = (gates.new_empty(plan.k_tiles(tile), plan.N, plan.places) for _ in range(2))
        _gradients[(plan.tiles * (2 * plan.k_tiles(tile) + plan.v_tiles(tile)),)](
            q, k, v, dh, C, norm, dC, dnorm, gates, segments, factors, dq, rows, dk, columns, dv,
            *sizes, *_strides(q, k, v, dh), plan.scales[1], **plan.all, **tile,
        )
        _gate_gradients[(per_chunk,)](
            i, f, dm_out, gates, segments, factors, links, ahead, rows, columns, flows, di, df,
            dm0 if given else None,
            plan.S, plan.H, *_strides(i, f), rows.shape[0], columns.shape[0], flows.shape[2], EXP=plan.exp,
            **{key: common.power_of_two(x.shape[at]) for key, x, at in (
                ("ROWS", rows, 0), ("COLUMNS", columns, 0), ("STATES", flows, 2))},
            **plan.way,
        )
    if spoiled is not None:
        nonfinite.fill(like, *spoiled)
    return like


@_op_backward.register_fake
def _op_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, h, C_out, n_out, gates, segments,
    C, norm, reverse, eps, input_gate, normalize
):
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, resets = inputs[:9]
    h, C_out, n_out, _, gates, segments, C, norm = output
    ctx.options, ctx.return_state = inputs[9:13], inputs[13]
    state = (C_out, n_out) if ctx.return_state else (None, None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, resets, h, *state, gates, segments if resets is not None else None, C, norm)
    ctx.mark_non_differentiable(gates, segments, C, norm)


def _differentiate(ctx, dh, dC, dn, dm, *_):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    h, C_out, n_out = saved[9:12]
    last = (dC, dn, dm)
    if any(x is not None for x in last):
        last = common.filled(dC, C_out), common.filled(dn, n_out), common.filled(dm, n_out[..., 0])
    grads = _op_backward(common.filled(dh, h), *last, *saved, *ctx.options)
    return *(None if x is None else g for x, g in zip(saved[:8], grads, strict=True)), *(None,) * 6


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("mlstm", "Triton"))


@common.custom_op("seqblocks::mlstm_step_triton")
def _step_op(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token without a derivative: h and the next C, n, m (empty if not asked for)."""
    q, k, v, C0, n0, m0, resets = _laid_out((q, k, v), (C0, n0, m0, resets))
    outputs = _step_fake(q, k, v, i, f, C0, n0, m0, resets, eps, input_gate, normalize, return_state)
    h, *last = outputs
    B, _, H, DK = q.shape
    DV = v.shape[-1]
    tile = step_tiles(DK, DV, common.arch(q))
    with common.on(q):
        _step[B * H, up(DV, tile["BV"])](
            q, k, v, i, f, resets, C0, n0, m0, h, *(last if return_state else (None,) * 3),
            H, DK, DV, *(x.stride(axis) for x in (q, k, v, i, f) for axis in (0, 2)), DK**-0.5, eps,
            EXP=input_gate == "exp", NORMALIZE=normalize, **tile,
        )
    return outputs


@_step_op.register_fake
def _step_fake(q, k, v, i, f, C0, n0, m0, resets, eps, input_gate, normalize, return_state):  # type: ignore[no-untyped-def]
    B, _, H, DK = q.shape
    shapes = ((B, H, DK, v.shape[-1]), (B, H, DK), (B, H)) if return_state else ((0,),) * 3
    return v.new_empty(v.shape), *(f.new_empty(shape) for shape in shapes)


def run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None, *,
    reverse: bool, chunk_size: int | None, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, MLSTMState | None]:
    """The scan. Arguments as `mlstm`, already checked; chunk_size is the torch form's and changes nothing here."""
    if v.numel() == 0 or q.numel() == 0:
        torch_run = implementation("mlstm", "torch").run
        return torch_run(
            q, k, v, i, f, state, resets, reverse=reverse, chunk_size=chunk_size, eps=eps, input_gate=input_gate,
            normalize=normalize, return_state=return_state,
        )
    C, n, m = (None, None, None) if state is None else state
    marks = common.marks(resets)
    tensors, options = (q, k, v, i, f, C, n, m), (eps, input_gate, normalize, return_state)
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        h, *last = _step_op(*tensors, marks, *options)
    else:
        h, *last = _op(*tensors, marks, reverse, *options)[:4]
    return h, MLSTMState(*last) if return_state else None


def _can(**facts: Any) -> tuple[bool, str]:
    return common.can(**facts)


def _tiles(
    arch: str, head_dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16, batch: int = 1 << 20,
    length: int | None = None, dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    narrow = {dtype, *((dtypes or {}).get(name, dtype) for name in "qkv")} == {torch.bfloat16}
    size = chunk(*head_dims, narrow)
    launches = {kernel: size | tiles(kernel, *head_dims, narrow, arch, batch)
                for kernel in ("states", "outputs", "state_gradients", "gradients")}
    if length is not None:
        launches["gates"] = {"EACH": int(up(length, size["L"]) > WALKED)}
    return launches | {"step": step_tiles(*head_dims, arch)}


def _checked(
    C: Tensor | None = None, n: Tensor | None = None, m: Tensor | None = None, resets: Tensor | None = None,
    return_state: bool = True, **given: Any,
) -> Any:
    """A scan, from a state if one is given, and a token without a derivative, which has a kernel of its own."""
    from seqblocks.kernels.mlstm import mlstm

    state = None if C is None or n is None or m is None else MLSTMState(C, n, m)
    out = mlstm(**given, state=state, resets=resets, return_state=return_state)
    with torch.no_grad():
        token: dict[str, Any] = {name: x[:, :1] if isinstance(x, Tensor) else x for name, x in given.items()}
        first = None if resets is None else resets[:, :1]
        step = mlstm(**token, state=state, resets=first, return_state=return_state)
    (h, last), (y, after) = (x if return_state else (x, ()) for x in (out, step))
    return h, (*last, y, *after)


def _example(
    head_dims: tuple[int, int], input_gate: str = "exp", normalize: bool = True, resets: bool = False,
    reverse: bool = False, return_state: bool = True, dtype: torch.dtype = torch.float32, **facts: Any,
) -> Any:
    DK, DV = head_dims
    L = chunk(DK, DV, dtype == torch.bfloat16)["L"]
    # more chunks than one program walks; not where the definition would keep too many large states
    S = 20 + L * (WALKED if DK * DV <= 1 << 14 else 1)
    widths = {"q": (DK,), "k": (DK,), "v": (DV,), "i": (), "f": ()}
    tensors = {name: normal(1, S, 1, *width, seed=at) for at, (name, width) in enumerate(widths.items())}
    states = {"C": (DK, DV), "n": (DK,), "m": ()}
    tensors |= {name: normal(1, 1, *width, seed=6 + at) for at, (name, width) in enumerate(states.items())}
    options: dict[str, Any] = {
        "input_gate": input_gate, "normalize": normalize, "reverse": reverse, "return_state": return_state,
    }
    if resets:
        options["resets"] = (normal(1, S) > 2.0).to(facts["device"])
    return _checked, tensors, options


register("mlstm", "triton", run, _can, _tiles, _example)
