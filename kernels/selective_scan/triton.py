"""The selective scan in Triton: one launch forward, one backward (a large batch takes several), and sums of the
backward's partial results.

A program owns BE channels of one sequence with all their states and walks along the tokens, from either end: no tensor
is flipped. dt's bias and softplus, the skip D u and the gate silu(z) are part of the walk. STEPS tokens are loaded
before the first of them is used, so that their latencies overlap.

The forward pass keeps the state before every CHUNK of tokens. The backward pass takes the chunks from the last to
the first, each in four steps that meet in a scratch, which stays in the cache: all that hangs on a token and channel
alone; a walk that makes the chunk's states again, and what their outputs give; the walk back of the adjoint recurrence
(see `selective_scan_torch.py` for the derivative); gradients of what the first step took. Sums over channels or
sequences are stored in parts and added afterwards, in an order that does not vary: results are the same bits in every
run.

Arithmetic and states are float32 whatever the inputs are.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.self_check import few_of, launch_size, normal
from seqblocks.kernels.numerics import no_second_derivative
from seqblocks.kernels.resets import backward_marks
from seqblocks.kernels.selective_scan.reference import groups_of, per_token
from seqblocks.kernels.triton_common import exp, jit, over, silu, softplus, tl, up

CHUNK = 32  # tokens between kept states; the states of one chunk are a program's scratch
STATES = 256  # at most
SCHEDULERS = 4 * 132  # of an H100 or H200: each issues for one warp at a time
AT_ONCE = 16 * SCHEDULERS  # warps of a backward launch, about: each of its programs has memory of its own


# ------------------------------------------------------------------------------
# The kernels.   Places: u, dt, z, y [B, S, E]; A [E, N]; B, C [B, S, G, N] or [E, N]; h0, last [B, E, N];
# between [B, chunks, E, N]; resets [B, S].   W = E / G.   xb, xs, xg: strides of x over batch, tokens, groups.


@jit
@no_type_check
def _mine(S, K, L, W, BE: tl.constexpr):
    """Of this program: its sequence, first token and end, group, and channels within that and among all."""
    blocks = tl.cdiv(W, BE)
    begin = tl.program_id(0) % K * L
    group = tl.program_id(1) // blocks
    within = tl.program_id(1) % blocks * BE + tl.arange(0, BE)
    return (tl.program_id(0) // K).to(tl.int64), begin, min(S, begin + L), group, within, group * W + within


@jit
@no_type_check
def _cell(n, e, E):
    """Places of a sequence's states [N, E]: channels side by side, as threads hold them."""
    return n[:, None] * E + e[None, :]


@jit
@no_type_check
def _shift(bias, e, live):
    """What is added to every step, [BE]."""
    out = live.to(tl.float32) * 0.0
    if bias is not None:
        out = tl.load(bias + e, live, 0.0).to(tl.float32)
    return out


@jit
@no_type_check
def _step(dt, shift, SOFTPLUS: tl.constexpr):
    step = dt.to(tl.float32) + shift
    if SOFTPLUS:
        step = softplus(step)
    return step


@jit
@no_type_check
def _get(x, there):
    return tl.load(x) if there is None else tl.load(x, there, 0.0)


@jit
@no_type_check
def _tokens(
    x, dt, z, B, C, resets, i, rest, live, known, xs, ds, zs, Bs, Cs, SIGN: tl.constexpr, STEPS: tl.constexpr
):
    """What STEPS tokens bring, as it lies in memory, from the i-th on after the one that is pointed at. There are
    `rest` of them; beyond these it is the last one's again, but not its mark."""
    xs_, dts, zs_, Bts, Cts, fresh = (), (), (), (), (), ()
    for j in tl.static_range(STEPS):
        t = SIGN * min(i + j, rest - 1)
        xs_ = xs_ + (_get(x + t * xs, live),)
        dts = dts + (_get(dt + t * ds, live),)
        if z is not None:
            zs_ = zs_ + (_get(z + t * zs, live),)
        if Bs is not None:
            Bts = Bts + (_get(B + t * Bs, known),)
        if Cs is not None:
            Cts = Cts + (_get(C + t * Cs, known),)
        if resets is not None:
            fresh = fresh + (tl.load(resets + t, i + j < rest, 0).to(tl.int32),)
    return xs_, dts, zs_, Bts, Cts, fresh


@common.kernel(do_not_specialize=["S", "K", "L", "zero"])  # one compiled kernel for all lengths
@no_type_check
def _ends(
    x, dt, A, w, z, bias, resets, ends, sums, broken,
    S, K, L, E, N, W, zero, xb, xs, db, ds, wb, ws, wg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """What each segment leaves to the next if it starts from nothing: of states (x is u, w is B), or, BACK, to the one
    before of gradients (x is dy, w is C); the sum of its steps, and whether a sequence begins in it."""
    b, first, end, group, within, e = _mine(S, K, L, W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & live[None, :]
    at = n[:, None] + e[None, :] * N
    rate = tl.load(A + _cell(n, e, E) + zero, own, 0.0) * 1.4426950408889634
    shift = _shift(bias, e, live)
    there, known = (None, None) if EVEN else (live, n < N)
    if ws is None:
        weights = tl.load(w + at, own, 0.0).to(tl.float32)
    h = tl.zeros((BN, BE), tl.float32)
    total = tl.zeros((BE,), tl.float32)
    breaks = 0
    SIGN: tl.constexpr = 1 if REVERSE == BACK else -1
    for start in range(0, end - first, CHUNK):
        t = tl.cast(end - 1 - start if BACK else first + start, tl.int64)
        t = S - 1 - t if REVERSE else t
        x_, dt_, z_, w_, resets_ = x + b * xb + t * xs + e, dt + b * db + t * ds + e, None, None, None
        if z is not None:
            z_ = z + b * zb + t * zs + e
        if ws is not None:
            w_ = w + b * wb + group * wg + t * ws + n
        if resets is not None:
            resets_ = resets + b * S + t
        rest = end - first - start
        ahead = _tokens(x_, dt_, z_, w_, None, resets_, 0, rest, there, known, xs, ds, zs, ws, None, SIGN, STEPS)
        for i in range(0, min(CHUNK, rest), STEPS):
            xs_, dts, zs_, ws_, _, fresh = ahead
            ahead = _tokens(
                x_, dt_, z_, w_, None, resets_, i + STEPS, rest, there, known, xs, ds, zs, ws, None, SIGN, STEPS
            )
            for j in tl.static_range(STEPS):
                step = tl.where(i + j < rest, _step(dts[j], shift, SOFTPLUS), 0.0)
                value = xs_[j].to(tl.float32)
                if z is not None:
                    value *= silu(zs_[j].to(tl.float32))
                if ws is not None:
                    weights = ws_[j].to(tl.float32)[:, None]
                decay = tl.exp2(step[None, :] * rate)
                if BACK:
                    value = tl.where(i + j < rest, value, 0.0)
                    h = decay * (h + value[None, :] * weights)
                    if resets is not None:
                        h = tl.where(fresh[j] != 0, 0.0, h)
                else:
                    if resets is not None:
                        h = tl.where(fresh[j] != 0, 0.0, h)
                    h = decay * h + (step * value)[None, :] * weights
                if resets is not None:
                    breaks += fresh[j]
                total += step
    to = tl.program_id(0).to(tl.int64)
    tl.store(ends + to * E * N + _cell(n, e, E), h, own)
    tl.store(sums + to * E + e, total, live)
    if resets is not None:
        tl.store(broken + to, breaks)


@common.kernel(do_not_specialize=["K"])
@no_type_check
def _carry(
    given, A, ends, sums, broken, starts, K, E, N, BACK: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr
):
    """What each segment starts from, `given` [B, E, N] or nothing the first of them (BACK: the last), and so on."""
    b = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & (e < E)[None, :]
    at = n[:, None] + e[None, :] * N
    rate = tl.load(A + at, own, 0.0) * 1.4426950408889634
    h = tl.zeros((BN, BE), tl.float32)
    if given is not None:
        h = tl.load(given + b * E * N + at, own, 0.0)
    for i in range(K):
        k = b * K + (K - 1 - i if BACK else i)
        cell = k * E * N + _cell(n, e, E)
        tl.store(starts + cell, h, own)
        kept = tl.exp2(tl.load(sums + k * E + e, e < E, 0.0)[None, :] * rate) * h
        if broken is not None:
            kept = tl.where(tl.load(broken + k) > 0, 0.0, kept)
        h = kept + tl.load(ends + cell, own, 0.0)


@jit
@no_type_check
def _advance(
    h, tokens, i, rest, rate, shift, skip, writes, reads, y, within, W, E,
    SOFTPLUS: tl.constexpr, SIGN: tl.constexpr, STEPS: tl.constexpr,
):
    """The state after these tokens, whose y it stores."""
    xs, dts, gates, Bts, Cts, fresh = tokens
    for j in tl.static_range(STEPS):
        x = xs[j].to(tl.float32)
        step = _step(dts[j], shift, SOFTPLUS)
        step = tl.where(i + j < rest, step, 0.0)  # a step of nothing leaves the state as it is
        if len(fresh) > 0:
            h = tl.where(fresh[j] != 0, 0.0, h)
        write = writes if len(Bts) == 0 else Bts[j].to(tl.float32)[:, None]
        read = reads if len(Cts) == 0 else Cts[j].to(tl.float32)[:, None]
        h = tl.exp2(step[None, :] * rate) * h + (step * x)[None, :] * write
        out = tl.sum(h * read, 0)
        if skip is not None:
            out += skip * x
        if len(gates) > 0:
            out *= silu(gates[j].to(tl.float32))
        tl.store(y + SIGN * (i + j) * E, out.to(y.dtype.element_ty), within < tl.where(i + j < rest, W, 0))
    return h


@common.kernel(do_not_specialize=["S", "K", "L", "zero"])
@no_type_check
def _scan(
    u, dt, A, B, C, D, z, bias, h0, resets, y, last, between,
    S, K, L, E, N, W, zero, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """EVEN: neither channels nor states have an incomplete block. h0 [B K, N, E]: what each of the K segments of L
    tokens starts from, if not from nothing."""
    b, begin, end, group, within, e = _mine(S, K, L, W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & live[None, :]
    at = n[:, None] + e[None, :] * N
    # The first tensors of states settle how threads hold them all: a channel each. So A and h0 have channels side by
    # side, and `zero` keeps from the compiler that it could load them four at a time.
    along = _cell(n, e, E) + zero
    rate = tl.load(A + along, own, 0.0) * 1.4426950408889634  # exp2 is what the device has
    shift = _shift(bias, e, live)
    skip, writes, reads = None, None, None
    if D is not None:
        skip = tl.load(D + e, live, 0.0).to(tl.float32)
    if Bs is None:
        writes = tl.load(B + at, own, 0.0).to(tl.float32)
    if Cs is None:
        reads = tl.load(C + at, own, 0.0).to(tl.float32)
    there, known = (None, None) if EVEN else (live, n < N)
    h = tl.zeros((BN, BE), tl.float32)
    if h0 is not None:
        h = tl.load(h0 + tl.program_id(0).to(tl.int64) * E * N + along, own, 0.0)

    SIGN: tl.constexpr = -1 if REVERSE else 1
    for start in range(begin, end, CHUNK):
        # from a chunk's first token on 32 bits are enough for places
        t = tl.cast(S - 1 - start if REVERSE else start, tl.int64)
        u_, dt_, z_, B_, C_, resets_ = u + b * ub + t * us + e, dt + b * db + t * ds + e, None, None, None, None
        if z is not None:
            z_ = z + b * zb + t * zs + e
        if Bs is not None:
            B_ = B + b * Bb + group * Bg + t * Bs + n
        if Cs is not None:
            C_ = C + b * Cb + group * Cg + t * Cs + n
        if resets is not None:
            resets_ = resets + b * S + t
        y_ = y + (b * S + t) * E + e
        if between is not None:
            tl.store(between + (b * tl.cdiv(S, CHUNK) + start // CHUNK) * E * N + along, h, own)
        rest = end - start
        this = _tokens(u_, dt_, z_, B_, C_, resets_, 0, rest, there, known, us, ds, zs, Bs, Cs, SIGN, STEPS)
        for i in range(0, min(CHUNK, rest), 2 * STEPS):
            # tokens are asked for before those ahead of them are used, in turn, so that nothing need be moved
            other = _tokens(
                u_, dt_, z_, B_, C_, resets_, i + STEPS, rest, there, known, us, ds, zs, Bs, Cs, SIGN, STEPS
            )
            h = _advance(h, this, i, rest, rate, shift, skip, writes, reads, y_, within, W, E, SOFTPLUS, SIGN, STEPS)
            this = _tokens(
                u_, dt_, z_, B_, C_, resets_, i + 2 * STEPS, rest, there, known, us, ds, zs, Bs, Cs, SIGN, STEPS
            )
            h = _advance(
                h, other, i + STEPS, rest, rate, shift, skip, writes, reads, y_, within, W, E, SOFTPLUS, SIGN, STEPS
            )
    if end == S:
        tl.store(last + b * E * N + at, h, own)


@jit
@no_type_check
def _tile(x, t, there):
    """Of pointers [BE] to a chunk's first token, what lies t [ROWS, 1] away: [ROWS, BE]."""
    return tl.load(x[None, :] + t, there, 0.0)


@jit
@no_type_check
def _read_from(resets, t, there):
    """Which of these tokens have a gradient, of those that are there."""
    if resets is not None:
        there = tl.load(resets + t, there, 2) < 2
    return there


@jit
@no_type_check
def _prepare(
    u, dt, dy, z, B, C, resets, shift, planes, rows, count, live, n, N, us, ds, gs, zs, Bs, Cs,
    SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
):
    """Of the `count` tokens of a chunk, in float32: step, what it writes, and dy behind the gate, into the first three
    planes [CHUNK, BE]; B and C into rows [CHUNK, BN]. Zeros beyond `count`, which change no state and no gradient, and
    for tokens of which nothing is read."""
    to = planes + tl.arange(0, ROWS)[:, None] * BE + tl.arange(0, BE)[None, :]
    for first in tl.range(0, CHUNK, 2 * ROWS, num_stages=1):
        xs, dts, gs_, gates = (), (), (), ()
        for j in tl.static_range(2):  # all is asked for before any is used
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            there = _read_from(resets, SIGN * i, i < count)
            if not EVEN:
                there = there & live[None, :]
            xs = xs + (_tile(u, SIGN * i * us, there),)
            dts = dts + (_tile(dt, SIGN * i * ds, there),)
            gs_ = gs_ + (_tile(dy, SIGN * i * gs, there),)
            if z is not None:
                gates = gates + (_tile(z, SIGN * i * zs, there),)
        for j in tl.static_range(2):
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            there = i < count if EVEN else (i < count) & live[None, :]
            step = dts[j].to(tl.float32)
            if shift is not None:
                step += shift[None, :]
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(there, step, 0.0)
            g = gs_[j].to(tl.float32)
            if z is not None:
                g *= silu(gates[j].to(tl.float32))
            at = to + (first + j * ROWS) * BE
            tl.store(at, step)
            tl.store(at + CHUNK * BE, step * xs[j].to(tl.float32))
            tl.store(at + 2 * CHUNK * BE, g)
    to = rows + tl.arange(0, LINES)[:, None] * BN + n[None, :]
    for first in tl.range(0, CHUNK, LINES, num_stages=1):
        i = first + tl.arange(0, LINES)[:, None]
        there = _read_from(resets, SIGN * i, i < count) & (n < N)[None, :]
        if Bs is not None:
            tl.store(to + first * BN, _tile(B, SIGN * i * Bs, there).to(tl.float32))
        if Cs is not None:
            tl.store(to + (CHUNK + first) * BN, _tile(C, SIGN * i * Cs, there).to(tl.float32))


@jit
@no_type_check
def _finish(
    u, dt, dy, z, resets, shift, skip, planes, du, ddt, dz, dD, dbias, count, live, E, us, ds, gs, zs,
    SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of u, dt and z from a chunk's planes, and what it adds to those of D and the bias, [ROWS, BE]."""
    of = planes + tl.arange(0, ROWS)[:, None] * BE + tl.arange(0, BE)[None, :]
    for first in tl.range(0, count, ROWS, num_stages=1):
        i = first + tl.arange(0, ROWS)[:, None]
        t = SIGN * i
        own = i < count if EVEN else (i < count) & live[None, :]
        there = _read_from(resets, t, own)
        x = _tile(u, t * us, there).to(tl.float32)
        through = tl.load(of + (4 * CHUNK + first) * BE, there, 0.0)
        rates = tl.load(of + (5 * CHUNK + first) * BE, there, 0.0)
        step = tl.load(of + first * BE)
        if skip is not None:
            g = tl.load(of + (2 * CHUNK + first) * BE)
        if SOFTPLUS:
            raw = _tile(dt, t * ds, there).to(tl.float32)
        if z is not None:
            gate = _tile(z, t * zs, there).to(tl.float32)
            out = tl.load(of + (3 * CHUNK + first) * BE, there, 0.0)
            dout = _tile(dy, t * gs, there).to(tl.float32)
        dx = through * step
        if skip is not None:
            dx += skip[None, :] * g
            dD += g * x
        tl.store(du[None, :] + t * E, dx.to(du.dtype.element_ty), own)
        dstep = through * x + rates * 0.6931471805599453
        if SOFTPLUS:
            if shift is not None:
                raw += shift[None, :]
            dstep *= over(1.0 + exp(-raw))
        if shift is not None:
            dbias += tl.where(there, dstep, 0.0)
        tl.store(ddt[None, :] + t * E, dstep.to(ddt.dtype.element_ty), own)
        if z is not None:
            open_ = over(1.0 + exp(-gate))
            if skip is not None:
                out += skip[None, :] * x
            dgate = dout * out * open_ * (1.0 + gate * (1.0 - open_))
            tl.store(dz[None, :] + t * E, dgate.to(dz.dtype.element_ty), own)
    return dD, dbias


@jit
@no_type_check
def _store_sums(to, x, ones, n, N, tokens, DOT: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of x [BN, BE] over channels, to N places, if `tokens` is not 0. DOT: by the matrix units, which make
    COLUMNS equal columns; among threads that hold a channel each, adding takes five exchanges a number. "twice": by
    units that cut off 13 bits of 24, of the first eleven bits and of the rest."""
    column = tl.arange(0, COLUMNS)
    if DOT is None:
        sums = tl.sum(x, 1)[:, None]
    elif DOT == "twice":
        first = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        sums = tl.dot(x - first, ones, tl.dot(first, ones, input_precision="tf32"), input_precision="tf32")
    else:
        sums = tl.dot(x, ones, input_precision=DOT)
    there = (n < N)[:, None] & (column < tl.minimum(tokens, 1))[None, :]
    tl.store(to + n[:, None] + column[None, :], sums, there)


@common.kernel(do_not_specialize=["S", "K", "L", "zero"])
@no_type_check
def _scan_backward(
    dy, dlast, u, dt, A, B, C, D, z, bias, between, resets, scratch,
    du, ddt, dA, dB, dC, dD, dz, dbias, dh0,
    S, K, L, E, N, W, zero, gb, gs, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, COLUMNS: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, SCRATCH: tl.constexpr,
):
    """Parts: dA [B K, E, N], dD, dbias [B K, E]; dB, dC [blocks, B, S, G, N], or [B K, E, N] if constant.

    B: sequences of this launch. gb, gs: strides of dy. dlast [B K, N, E]: what comes to each segment from the one
    behind it. EVEN: the channels have no incomplete block. ROWS, LINES: tokens of a tile with all channels or states.
    """
    b, begin, end, group, within, e = _mine(S, K, L, W, BE)
    groups = tl.num_programs(1) // tl.cdiv(W, BE)
    block = tl.program_id(1) % tl.cdiv(W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & live[None, :]
    along = _cell(n, e, E) + zero  # as in `_scan`: a thread holds a channel
    rate = tl.load(A + along, own, 0.0) * 1.4426950408889634
    shift, skip, writes, reads = None, None, None, None
    if bias is not None:
        shift = tl.load(bias + e, live, 0.0).to(tl.float32)
    if D is not None:
        skip = tl.load(D + e, live, 0.0).to(tl.float32)
    if Bs is None:
        writes = tl.load(B + n[:, None] + e[None, :] * N, own, 0.0).to(tl.float32)
        dB_sum = tl.zeros((BN, BE), tl.float32)
    if Cs is None:
        reads = tl.load(C + n[:, None] + e[None, :] * N, own, 0.0).to(tl.float32)
        dC_sum = tl.zeros((BN, BE), tl.float32)
    dA_sum = tl.zeros((BN, BE), tl.float32)
    dD_sum = tl.zeros((ROWS, BE), tl.float32)
    dbias_sum = tl.zeros((ROWS, BE), tl.float32)
    mine = tl.program_id(0).to(tl.int64)
    # the gradient of the state, as it comes from later tokens
    carry = tl.zeros((BN, BE), tl.float32)
    if dlast is not None:
        carry = tl.load(dlast + mine * E * N + along, own, 0.0)

    scratch += (mine * tl.num_programs(1) + tl.program_id(1)) * SCRATCH
    PLANE: tl.constexpr = CHUNK * BE
    lane = tl.arange(0, BE)
    rows = scratch + 6 * PLANE
    cells = rows + 2 * CHUNK * BN + n[:, None] * BE + lane[None, :] + zero
    part = ((block * (tl.num_programs(0) // K) + b) * S * groups + group) * N  # of dB and dC
    ones = tl.full((BE, COLUMNS), 1.0, tl.float32)
    origin = S - 1 if REVERSE else 0
    SIGN: tl.constexpr = -1 if REVERSE else 1
    for k in range(tl.cdiv(end - begin, CHUNK) - 1, -1, -1):
        first = begin + k * CHUNK
        count = min(end - first, CHUNK)
        # from here on 32 bits are enough for places
        t = tl.cast(origin + SIGN * first, tl.int64)
        x_, dt_, dy_, z_ = u + b * ub + t * us + e, dt + b * db + t * ds + e, dy + b * gb + t * gs + e, None
        line = (b * S + t) * E + e
        dz_, B_, C_, dB_, dC_, resets_ = None, None, None, None, None, None
        if z is not None:
            z_, dz_ = z + b * zb + t * zs + e, dz + line
        if Bs is not None:
            B_, dB_ = B + b * Bb + group * Bg + t * Bs + n, dB + part + t * (groups * N)
        if Cs is not None:
            C_, dC_ = C + b * Cb + group * Cg + t * Cs + n, dC + part + t * (groups * N)
        if resets is not None:
            resets_ = resets + b * S + t
        _prepare(
            x_, dt_, dy_, z_, B_, C_, resets_, shift, scratch, rows, count, live, n, N, us, ds, gs, zs, Bs, Cs,
            SIGN, SOFTPLUS, EVEN, CHUNK, BE, BN, ROWS, LINES,
        )
        tl.debug_barrier()  # what follows is read by other threads than wrote it, here and below

        h = tl.load(between + (b * tl.cdiv(S, CHUNK) + first // CHUNK) * E * N + along, own, 0.0)
        for i in tl.range(0, count, STEPS, num_stages=1):
            tl.store(cells + i // STEPS * (BE * BN), h)  # as the token before left it
            for j in tl.static_range(STEPS):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                decay = tl.exp2(tl.load(plane)[None, :] * rate)
                if resets is not None:
                    h = tl.where(tl.load(resets_ + SIGN * (i + j), i + j < count, 0) != 0, 0.0, h)
                write = tl.load(row)[:, None] if writes is None else writes
                read = tl.load(row + CHUNK * BN)[:, None] if reads is None else reads
                h = decay * h + tl.load(plane + PLANE)[None, :] * write
                if z is not None:
                    tl.store(plane + 3 * PLANE, tl.sum(h * read, 0))
                of_read = h * tl.load(plane + 2 * PLANE)[None, :]
                if Cs is None:
                    dC_sum += of_read
                else:
                    _store_sums(
                        dC_ + SIGN * (i + j) * (groups * N), of_read, ones, n, N, max(count - i - j, 0), DOT, COLUMNS
                    )
        tl.debug_barrier()

        for back in tl.range(0, count, STEPS, num_stages=1):
            i = (count - 1) // STEPS * STEPS - back
            h = tl.load(cells + i // STEPS * (BE * BN))
            hs, decays, begins = (), (), ()  # states before these tokens
            for j in tl.static_range(STEPS):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                decay = tl.exp2(tl.load(plane)[None, :] * rate)
                if resets is not None:  # not by a decay of 0: what comes over from a sequence may be infinite
                    fresh = tl.load(resets_ + SIGN * (i + j), i + j < count, 0) != 0
                    h, begins = tl.where(fresh, 0.0, h), begins + (fresh,)
                hs, decays = hs + (h,), decays + (decay,)
                if j + 1 < STEPS:
                    write = tl.load(row)[:, None] if writes is None else writes
                    h = decay * h + tl.load(plane + PLANE)[None, :] * write
            for j in tl.static_range(STEPS - 1, -1, -1):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                write = tl.load(row)[:, None] if writes is None else writes
                read = tl.load(row + CHUNK * BN)[:, None] if reads is None else reads
                grad = tl.load(plane + 2 * PLANE)[None, :] * read + carry  # of the state after this token
                tl.store(plane + 4 * PLANE, tl.sum(grad * write, 0))
                carry = decays[j] * grad
                if resets is not None:
                    carry = tl.where(begins[j], 0.0, carry)
                p = carry * hs[j]
                tl.store(plane + 5 * PLANE, tl.sum(p * rate, 0))
                dA_sum += p * tl.load(plane)[None, :]
                of_write = grad * tl.load(plane + PLANE)[None, :]
                if Bs is None:
                    dB_sum += of_write
                else:
                    _store_sums(
                        dB_ + SIGN * (i + j) * (groups * N), of_write, ones, n, N, max(count - i - j, 0), DOT, COLUMNS
                    )
        tl.debug_barrier()

        dD_sum, dbias_sum = _finish(
            x_, dt_, dy_, z_, resets_, shift, skip, scratch, du + line, ddt + line, dz_, dD_sum, dbias_sum,
            count, live, E, us, ds, gs, zs, SIGN, SOFTPLUS, EVEN, CHUNK, BE, ROWS,
        )
        tl.debug_barrier()

    at = n[:, None] + e[None, :] * N
    if begin == 0:
        tl.store(dh0 + b * E * N + at, carry, own)
    tl.store(dA + mine * E * N + at, dA_sum, own)
    if Bs is None:
        tl.store(dB + mine * E * N + at, dB_sum, own)
    if Cs is None:
        tl.store(dC + mine * E * N + at, dC_sum, own)
    if D is not None:
        tl.store(dD + mine * E + e, tl.sum(dD_sum, 0), live)
    if bias is not None:
        tl.store(dbias + mine * E + e, tl.sum(dbias_sum, 0), live)


# ------------------------------------------------------------------------------
# Launching


def tiles(
    states: int, width: int, backward: bool, arch: str, constant: bool = False, resets: bool = False
) -> dict[str, int]:
    """Channels and states of a program, its warps, and tokens at a time.

    One warp and 16 states a thread (8 on AMD's, backward), which up to 16 states are a channel of its own: nothing but
    sums over more states crosses threads, and backward those over channels. Two tokens at a time halve the states that
    the backward pass writes down; on sm_90 registers allow it where B and C are not `constant`, but on Triton 3.6 not
    with 32 states.
    """
    BN = common.power_of_two(states)
    lanes = common.lanes(arch)
    each = 8 if backward and arch.startswith("gfx") else 16
    most = each * lanes // BN
    BE = min(common.power_of_two(width), max(8, min(lanes, most)) if backward else max(1, min(2 * lanes, most)))
    if backward and BN == 32 and width % BE:
        BE = min(BE, 8)  # masks of an incomplete block take registers too
    if backward and resets and arch.startswith("gfx"):
        BE = min(BE, 16)  # and so do marks
    num_warps = common.warps(BE * BN, each, lanes) if backward else 1
    few = BN > 128 or BN == 32 or constant or arch.startswith(("sm_8", "gfx")) if backward else BN > 16
    steps = 1 if few else 2
    return {"BE": BE, "BN": BN, "STEPS": steps, "num_warps": num_warps}


def _each(arch: str, resets: bool, even: bool, BN: int) -> int:
    """Numbers that a thread holds of a tile of tokens and channels. Marks of resets, masks of an incomplete block and
    many states leave registers for fewer than four; sm_90's compiler needs fewer."""
    tight = (BN == 32) + (not even) + resets
    if arch.startswith("sm_8"):
        return 4 if tight == 0 or (BN == 32 and tight == 1) else 2 if tight == 1 else 1
    return 2 if BN == 32 and not even and not arch.startswith("gfx") else 4


def scratch_of(BE: int, BN: int, STEPS: int, num_warps: int) -> int:
    """Numbers that a program of the backward pass keeps of the chunk at hand: six a token and channel, B and C, and the
    state before every STEPS tokens."""
    return 6 * CHUNK * BE + 2 * CHUNK * BN + CHUNK // STEPS * BE * BN


def _summing(arch: str, B: Tensor, C: Tensor, tile: dict[str, int]) -> tuple[str | None, int]:
    """How `_store_sums` adds, and in how many equal columns."""
    if tile["BE"] < 16 or tile["BN"] < 16:
        return None, 1
    if arch.startswith("gfx"):
        return "ieee", 16
    # "tf32" cuts off up to 2^-10, always towards zero: little where dB and dC are rounded to bfloat16, up to 2^-8,
    # but more than rounding to float16 loses, 2^-11
    return ("tf32" if B.dtype == C.dtype == torch.bfloat16 else "twice"), 8


def segments(warps: int, S: int, backward: bool) -> int:
    """Into how many parts a sequence is cut: one where each scheduler of a large GPU has more than a warp.

    Alone on its scheduler a warp waits for its own results, some 1.8 times as long as it takes to issue its
    instructions forward and 2.3 times backward, and other warps could be issued meanwhile. Segments are those warps: as
    many as registers let a scheduler hold at once, three forward and two backward. They cost a walk more, 0.7 of the
    forward instructions and 0.26 of the backward ones. None is shorter than 128 tokens.
    """
    most = (2 if backward else 3) * SCHEDULERS // max(1, warps)
    return 1 if warps > SCHEDULERS else max(1, min(most, S // 128))


def _sizes(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[int, int, int, int, int]:
    """S, E, N, groups, and channels of a group."""
    groups = groups_of(B, C)
    return u.shape[1], *A.shape, groups, u.shape[2] // groups


def _laid_out(*tensors: Any) -> list[Any]:
    """Parameters and constants contiguous, the rest in lines."""
    far = 2 * CHUNK  # a chunk, and what is asked for ahead
    return [None if x is None else common.near(x, far) if x.dim() > 2 else x.contiguous() for x in tensors]


def _strides(*tensors: Tensor | None) -> list[int | None]:
    """Of [B, S, E] over batch and tokens, of [B, S, G, N] over groups too; None for what is constant or absent."""
    out: list[int | None] = []
    for x in tensors:
        if x is None:
            out += [0, 0]
        else:
            out += [*x.stride()[:-1]] if x.dim() > 2 else [None] * 3
    return out


def _segments_for(
    tile: dict[str, int], batch: int, length: int, groups: int, width: int, backward: bool
) -> int:
    sizes = (launch_size(*of) for of in (("batch", batch), ("length", length), ("groups", groups), ("width", width)))
    batch, length, groups, width = sizes
    return segments(batch * groups * up(width, tile["BE"]) * tile["num_warps"], length, backward)


class _Cut:
    """The segments of a launch."""

    def __init__(
        self, u: Tensor, A: Tensor, groups: int, W: int, tile: dict[str, int], backward: bool, K: int = 0
    ) -> None:
        self.batch, self.S, self.E = u.shape
        self.N, self.W, self.tile = A.shape[1], W, tile
        self.even = W % tile["BE"] == 0 and tile["BN"] == self.N
        programs = groups * up(W, tile["BE"])
        K = K or _segments_for(tile, self.batch, self.S, groups, W, backward)
        self.L = CHUNK * up(up(self.S, K), CHUNK)  # kept states lie where chunks begin
        self.K = up(self.S, self.L)
        self.grid = (self.batch * self.K, programs)

    def starts(
        self, given: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, w: Tensor, z: Tensor | None, bias: Tensor | None,
        resets: Tensor | None, softplus: bool, reverse: bool, back: bool,
    ) -> Tensor:
        """[B K, N, E]: two launches, see `_ends` and `_carry`."""
        ends, starts = (A.new_empty(self.batch * self.K, self.N, self.E) for _ in range(2))
        sums = A.new_empty(self.batch * self.K, self.E)
        broken = None if resets is None else A.new_empty(self.batch * self.K, dtype=torch.int32)
        _ends[self.grid](
            x, dt, A.t().contiguous(), w, z, bias, resets, ends, sums, broken,
            self.S, self.K, self.L, self.E, self.N, self.W, 0, *_strides(x, dt, w, z),
            SOFTPLUS=softplus, REVERSE=reverse, BACK=back, EVEN=self.even, CHUNK=CHUNK, **self.tile,
        )
        tile = {"BE": min(32, common.power_of_two(self.E)), "BN": self.tile["BN"]}
        _carry[self.batch, up(self.E, tile["BE"])](
            given, A, ends, sums, broken, starts, self.K, self.E, self.N, BACK=back,
            num_warps=common.warps(tile["BE"] * tile["BN"], 16), **tile,
        )
        return starts


@common.custom_op("seqblocks::selective_scan_triton")
def _op(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    h0: Tensor | None, resets: Tensor | None, softplus: bool, reverse: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states between chunks, [B, chunks, E, N] in a line (nothing unless `keep`)."""
    if u.shape[1] > 1:  # every program would do it, three instructions for two numbers
        B, C = B.float(), C.float()
    u, dt, A, B, C, D, z, bias = _laid_out(u, dt, A, B, C, D, z, bias)
    S, E, N, groups, W = _sizes(u, A, B, C)
    y, last, between = _op_fake(u, dt, A, B, C, D, z, bias, h0, resets, softplus, reverse, keep)
    h0, resets = None if h0 is None else h0.contiguous(), common.marks(resets)
    tile = tiles(N, W, False, common.arch(u))
    with common.on(u):
        cut = _Cut(u, A, groups, W, tile, False)
        if cut.K > 1:
            starts: Tensor | None = cut.starts(h0, u, dt, A, B, None, bias, resets, softplus, reverse, False)
        else:
            starts = None if h0 is None else h0.transpose(1, 2).contiguous()
        _scan[cut.grid](
            u, dt, A.t().contiguous(), B, C, D, z, bias, starts, resets, y, last, between if keep else None,
            S, cut.K, cut.L, E, N, W, 0, *_strides(u, dt, B, C, z),
            SOFTPLUS=softplus, REVERSE=reverse, EVEN=cut.even, CHUNK=CHUNK, **tile,
        )
    return y, last, between


@_op.register_fake
def _op_fake(u, dt, A, B, C, D, z, bias, h0, resets, softplus, reverse, keep):  # type: ignore[no-untyped-def]
    chunks = up(u.shape[1], CHUNK) if keep else 0
    return u.new_empty(u.shape), A.new_empty(u.shape[0], *A.shape), A.new_empty(u.shape[0] * chunks * A.numel())


@common.custom_op("seqblocks::selective_scan_triton_backward")
def _op_backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, between: Tensor, resets: Tensor | None, softplus: bool, reverse: bool,
) -> list[Tensor]:
    """Gradients of u, dt, A, B, C, D, z, bias and the initial state; empty for those that are absent."""
    dy, u, dt, A, B, C, D, z, bias = _laid_out(dy, u, dt, A, B, C, D, z, bias)
    resets = backward_marks([dy], [dlast], resets, reverse)
    dlast = None if dlast is None else dlast.contiguous()
    S, E, N, groups, W = _sizes(u, A, B, C)
    batch = u.shape[0]

    def parts(*shape: int, of: Tensor | None = A) -> Tensor:
        return A.new_empty(shape if of is not None else 0)

    dh0 = parts(batch, E, N)
    du, ddt = (x.new_empty(x.shape) for x in (u, dt))
    dz = A.new_empty(0) if z is None else z.new_empty(z.shape)
    kept = up(S, CHUNK) * E * N  # numbers of a sequence
    tile = tiles(N, W, True, common.arch(u), 2 in (B.dim(), C.dim()), resets is not None)
    with common.on(u):
        cut = _Cut(u, A, groups, W, tile, True)
        if cut.K > 1:
            # which is a walk like the forward one, and is launched like it
            ahead = _Cut(u, A, groups, W, tiles(N, W, False, common.arch(u)), True, cut.K)
            ends: Tensor | None = ahead.starts(dlast, dy, dt, A, C, z, bias, resets, softplus, reverse, True)
        else:
            ends = None if dlast is None else dlast.transpose(1, 2).contiguous()
        turned = A.t().contiguous()
        K, programs = cut.K, cut.grid[1]
        rows, own = batch * K, scratch_of(**tile)
        dA, (dD, dbias) = parts(rows, E, N), (parts(rows, E, of=x) for x in (D, bias))
        constants = [parts(rows, E, N, of=x if x.dim() == 2 else None) for x in (B, C)]
        arch, even = common.arch(u), W % tile["BE"] == 0
        numbers = _each(arch, resets is not None, even, tile["BN"]) * common.lanes(arch) * tile["num_warps"]
        dot, columns = _summing(common.arch(u), B, C, tile)
        most = up(AT_ONCE, K * programs * tile["num_warps"])  # sequences of a launch

        def walk(first: int) -> list[Tensor]:
            """The launch for sequences from the first on; what it adds to dB and dC."""
            count = min(most, batch - first)

            def some(x: Any, each: int = 1) -> Any:
                return x if x is None or count == batch else x[first * each : (first + count) * each]

            B_, C_ = (x if x.dim() == 2 else some(x) for x in (B, C))
            added = [
                some(of, K) if x.dim() == 2 else parts(programs // groups, count, S, groups, N)
                for x, of in zip((B, C), constants, strict=True)
            ]
            _scan_backward[count * K, programs](
                some(dy), some(ends, K), some(u), some(dt), turned, B_, C_, D, some(z), bias, some(between, kept),
                some(resets), parts(count * K * programs, own),
                some(du), some(ddt), some(dA, K), *added, some(dD, K), some(dz), some(dbias, K), some(dh0),
                S, K, cut.L, E, N, W, 0, *_strides(dy, u, dt, B, C, z),
                SOFTPLUS=softplus, REVERSE=reverse, EVEN=W % tile["BE"] == 0, DOT=dot, COLUMNS=columns, CHUNK=CHUNK,
                ROWS=min(CHUNK // 2, max(1, numbers // tile["BE"])), LINES=min(CHUNK, max(1, numbers // tile["BN"])),
                SCRATCH=own, **tile,
            )
            return [part if x.dim() == 2 else part.sum(0) for x, part in zip((B, C), added, strict=True)]

        walks = [walk(first) for first in range(0, batch, most)]
        dB, dC = walks[0] if len(walks) == 1 else map(torch.cat, zip(*walks, strict=True))
        dB, dC = (part.sum(0) if x.dim() == 2 else part for x, part in ((B, dB), (C, dC)))
        dD, dbias = (part if x is None else part.sum(0) for x, part in ((D, dD), (bias, dbias)))
    grads = du, ddt, dA.sum(0), dB, dC, dD, dz, dbias, dh0
    like = (u, dt, A, B, C, D, z, bias, None)
    return [x if of is None else x.to(of.dtype) for x, of in zip(grads, like, strict=True)]


@_op_backward.register_fake
def _op_backward_fake(dy, dlast, u, dt, A, B, C, D, z, bias, between, resets, softplus, reverse):  # type: ignore[no-untyped-def]
    of = (u, dt, A, B, C, D, z, bias)
    grads = [A.new_empty(0) if x is None else x.new_empty(x.shape) for x in of]
    return [*grads, A.new_empty(u.shape[0], *A.shape)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, h0, resets, softplus, reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[2] if output[2].numel() else None, resets, h0)
    ctx.flags = softplus, reverse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, dy, dlast, _):  # type: ignore[no-untyped-def]
    *tensors, between, resets, h0 = ctx.saved_tensors
    if between is None:  # nobody said that a gradient would be asked for
        between = _op(*tensors, h0, resets, *ctx.flags, True)[2]
    grads = _op_backward(common.filled(dy, tensors[0]), dlast, *tensors, between, resets, *ctx.flags)
    present = [None if x is None else g for x, g in zip((*tensors, h0), grads, strict=True)]
    return *present, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("selective_scan", "Triton"))


def _for_each_group(x: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """[B, S, G, N]. What several groups share is repeated in float32, so that its gradient, a sum over these groups, is
    rounded once."""
    shared = groups > (x.shape[2] if x.dim() == 4 else 1)
    return per_token(x.float() if shared else x, shape, groups)


def run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, state: Tensor | None, resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The whole of `selective_scan`: y in u's dtype, and the last state."""
    h0 = None if state is None else state.float()
    if u.numel() == 0:
        torch_run = implementation("selective_scan", "torch").run
        return torch_run(u, dt, A, B, C, D, z, dt_bias, softplus, state, resets, reverse)
    B, C = (x if x.dim() == 2 else _for_each_group(x, u.shape, groups_of(B, C)) for x in (B, C))
    keep = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (u, dt, A, B, C, D, z, dt_bias, state)
    )
    y, last, _ = _op(u, dt, A.float(), B, C, D, z, dt_bias, h0, common.marks(resets), softplus, reverse, keep)
    return y, last


def _can(**facts: Any) -> tuple[bool, str]:
    can, reason = common.can(**facts)
    if can and facts.get("complex"):
        return False, "complex A: only the recurrent definition has it"
    if can and facts.get("states", 1) > STATES:
        return False, f"{facts['states']} states of a channel; at most {STATES}"
    return can, reason


def _tiles(
    arch: str, states: int, width: int, batch: int = 0, length: int = 1, groups: int = 1,
    constant: tuple[bool, bool] = (False, False), resets: bool = False, **facts: Any,
) -> dict[str, dict[str, int]]:
    kinds = any(constant), resets
    found = {way: tiles(states, width, way == "backward", arch, *kinds) for way in ("forward", "backward")}
    if not batch:
        return found
    sizes = batch, length, groups, width
    cut = {way: _segments_for(tile, *sizes, way == "backward") > 1 for way, tile in found.items()}
    return {way: {**tile, "SEGMENTS": int(cut[way])} for way, tile in found.items()}


def _example(
    states: int, width: int, groups: int = 1, constant: tuple[bool, bool] = (False, False), softplus: bool = False,
    resets: bool = False, reverse: bool = False, **facts: Any,
) -> Any:
    from seqblocks.kernels.selective_scan import selective_scan

    G = min(groups, 2)
    E = G * few_of(width, 64)
    per_token = (2, 70, G, states) if groups > 1 else (2, 70, states)
    B, C = ((E, states) if of else per_token for of in constant)
    shapes = {"u": (2, 70, E), "dt": (2, 70, E), "z": (2, 70, E), "B": B, "C": C, "D": (E,), "dt_bias": (E,)}
    shapes["state"] = (2, E, states)
    tensors = {name: normal(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    tensors |= {"A": -normal(E, states, seed=7).exp(), "dt": tensors["dt"].abs(), "dt_bias": tensors["dt_bias"].abs()}
    options: dict[str, Any] = {"reverse": reverse, "return_state": True, "dt_softplus": softplus}
    if resets:
        options["resets"] = (normal(2, 70) > 1.5).to(facts["device"])
    return selective_scan, tensors, options


register("selective_scan", "triton", run, _can, _tiles, _example)
