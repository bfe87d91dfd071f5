"""The selective scan in Triton: one launch forward, one backward, and sums of the backward's partial results.

A program owns BE channels of one sequence with all their states and walks along the tokens, from either end: no tensor
is flipped. dt's bias and softplus, the skip D u and the gate silu(z) are part of the walk. STEPS tokens are loaded
before the first of them is used, so that their latencies overlap.

The forward pass keeps the state before every CHUNK of tokens. The backward pass walks the chunks from the last to the
first: from the kept state it makes the states of the chunk again, into a scratch that stays in the cache, then runs
the adjoint recurrence over them (see `selective_scan_torch.py` for the derivative). Sums over channels or sequences
are stored in parts and added afterwards, in an order that does not vary: results are the same bits in every run.

Arithmetic and states are float32 whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels import tuning
from seqblocks.kernels.dispatch import form, no_second_derivative, register
from seqblocks.kernels.selective_scan_reference import groups_of, per_token
from seqblocks.kernels.self_check import large, normal
from seqblocks.kernels.triton_common import exp, jit, lined, silu, softplus, tl, up

CHUNK = 32  # tokens between kept states; the states of one chunk are a program's scratch
STATES = 256  # at most
SCHEDULERS = 4 * 132  # of an H100 or H200: each issues for one warp at a time
AXES = {"BE": (4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8), "STEPS": (1, 2, 4, 8)}  # for tuning


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
def _cell(n, e, N, E, BACK: tl.constexpr):
    """Places of a sequence's states, [n, e]: channels side by side forward, as threads hold them; BACK, states."""
    return n[:, None] + e[None, :] * N if BACK else n[:, None] * E + e[None, :]


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
def _tokens(
    x, dt, z, B, C, dy, resets, i, end, origin, e, n, within, N, W, xs, ds, zs, Bs, Cs, gs,
    SIGN: tl.constexpr, STEPS: tl.constexpr,
):
    """What tokens i to i + STEPS of a walk from `origin` bring, as it lies there: nothing, beyond `end`."""
    xs_, dts, zs_, Bts, Cts, dys, fresh = (), (), (), (), (), (), ()
    for j in tl.static_range(STEPS):
        t = tl.cast(origin + SIGN * (i + j), tl.int64)
        there = within < tl.where(i + j < end, W, 0)
        known = n < tl.where(i + j < end, N, 0)
        xs_ = xs_ + (tl.load(x + t * xs + e, there, 0.0),)
        dts = dts + (tl.load(dt + t * ds + e, there, 0.0),)
        if z is not None:
            zs_ = zs_ + (tl.load(z + t * zs + e, there, 0.0),)
        if Bs is not None:
            Bts = Bts + (tl.load(B + t * Bs + n, known, 0.0),)
        if Cs is not None:
            Cts = Cts + (tl.load(C + t * Cs + n, known, 0.0),)
        if dy is not None:
            dys = dys + (tl.load(dy + t * gs + e, there, 0.0),)
        if resets is not None:
            fresh = fresh + (tl.load(resets + t, i + j < end, 0).to(tl.int32),)
    return xs_, dts, zs_, Bts, Cts, dys, fresh


@jit(do_not_specialize=["S", "K", "L", "zero"])  # one compiled kernel for all lengths
@no_type_check
def _ends(
    x, dt, A, w, z, bias, resets, ends, sums, broken,
    S, K, L, E, N, W, zero, xb, xs, db, ds, wb, ws, wg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BACK: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    STEPS: tl.constexpr,
):
    """What each segment leaves to the next if it starts from nothing: of states (x is u, w is B), or, BACK, to the one
    before of gradients (x is dy, w is C); the sum of its steps, and whether a sequence begins in it."""
    b, first, end, group, within, e = _mine(S, K, L, W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & live[None, :]
    at = n[:, None] + e[None, :] * N
    rate = tl.load(A + _cell(n, e, N, E, False) + zero, own, 0.0) * 1.4426950408889634
    shift = _shift(bias, e, live)
    x += b * xb
    dt += b * db
    if z is not None:
        z += b * zb
    if resets is not None:
        resets += b * S
    if ws is not None:
        w += b * wb + group * wg
    if ws is None:
        weights = tl.load(w + at, own, 0.0).to(tl.float32)
    h = tl.zeros((BN, BE), tl.float32)
    total = tl.zeros((BE,), tl.float32)
    breaks = 0
    SIGN: tl.constexpr = 1 if REVERSE == BACK else -1
    origin = first + end - 1 if BACK else 0
    origin = S - 1 - origin if REVERSE else origin
    ahead = _tokens(
        x, dt, z, w, None, None, resets, first, end, origin, e, n, within, N, W, xs, ds, zs, ws, None, None,
        SIGN, STEPS,
    )
    for i in range(first, end, STEPS):
        xs_, dts, zs_, ws_, _, _, fresh = ahead
        ahead = _tokens(
            x, dt, z, w, None, None, resets, i + STEPS, end, origin, e, n, within, N, W, xs, ds, zs, ws, None, None,
            SIGN, STEPS,
        )
        for j in tl.static_range(STEPS):
            step = _step(dts[j], shift, SOFTPLUS)
            step = tl.where(i + j < end, step, 0.0)
            value = xs_[j].to(tl.float32)
            if z is not None:
                value *= silu(zs_[j].to(tl.float32))
            if ws is not None:
                weights = ws_[j].to(tl.float32)[:, None]
            decay = tl.exp2(step[None, :] * rate)
            if BACK:
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
    tl.store(ends + to * E * N + _cell(n, e, N, E, BACK), h, own)
    tl.store(sums + to * E + e, total, live)
    if resets is not None:
        tl.store(broken + to, breaks)


@jit(do_not_specialize=["K"])
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
        cell = k * E * N + _cell(n, e, N, E, BACK)
        tl.store(starts + cell, h, own)
        kept = tl.exp2(tl.load(sums + k * E + e, e < E, 0.0)[None, :] * rate) * h
        if broken is not None:
            kept = tl.where(tl.load(broken + k) > 0, 0.0, kept)
        h = kept + tl.load(ends + cell, own, 0.0)


@jit
@no_type_check
def _advance(
    h, tokens, i, end, origin, rate, shift, skip, writes, reads, y, e, within, W, E,
    SOFTPLUS: tl.constexpr, SIGN: tl.constexpr, STEPS: tl.constexpr,
):
    """The state after tokens i to i + STEPS, whose y it stores."""
    xs, dts, gates, Bts, Cts, _, fresh = tokens
    for j in tl.static_range(STEPS):
        t = tl.cast(origin + SIGN * (i + j), tl.int64)
        x = xs[j].to(tl.float32)
        step = _step(dts[j], shift, SOFTPLUS)
        step = tl.where(i + j < end, step, 0.0)  # a step of nothing leaves the state as it is
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
        tl.store(y + t * E + e, out.to(y.dtype.element_ty), within < tl.where(i + j < end, W, 0))
    return h


@jit(do_not_specialize=["S", "K", "L", "zero"])
@no_type_check
def _scan(
    u, dt, A, B, C, D, z, bias, h0, resets, y, last, between,
    S, K, L, E, N, W, zero, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """h0 [B K, N, E]: what each of the K segments of L tokens starts from, if not from nothing."""
    b, begin, end, group, within, e = _mine(S, K, L, W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & live[None, :]
    at = n[:, None] + e[None, :] * N
    # The first tensors of states settle how threads hold them all: a channel each. So A and h0 have channels side by
    # side, and `zero` keeps from the compiler that it could load them four at a time.
    along = _cell(n, e, N, E, False) + zero
    rate = tl.load(A + along, own, 0.0) * 1.4426950408889634  # exp2 is what the device has
    shift = _shift(bias, e, live)
    skip, writes, reads = None, None, None
    if D is not None:
        skip = tl.load(D + e, live, 0.0).to(tl.float32)
    if Bs is None:
        writes = tl.load(B + at, own, 0.0).to(tl.float32)
    if Cs is None:
        reads = tl.load(C + at, own, 0.0).to(tl.float32)
    u += b * ub
    dt += b * db
    if z is not None:
        z += b * zb
    if resets is not None:
        resets += b * S
    if Bs is not None:
        B += b * Bb + group * Bg
    if Cs is not None:
        C += b * Cb + group * Cg
    y += b * S * E
    h = tl.zeros((BN, BE), tl.float32)
    if h0 is not None:
        h = tl.load(h0 + tl.program_id(0).to(tl.int64) * E * N + along, own, 0.0)

    origin = S - 1 if REVERSE else 0
    SIGN: tl.constexpr = -1 if REVERSE else 1
    this = _tokens(
        u, dt, z, B, C, None, resets, begin, end, origin, e, n, within, N, W, us, ds, zs, Bs, Cs, None, SIGN, STEPS
    )
    for i in range(begin, end, 2 * STEPS):
        if between is not None:
            if i % CHUNK == 0:
                tl.store(between + (b * tl.cdiv(S, CHUNK) + i // CHUNK) * E * N + along, h, own)
        # tokens are asked for before those ahead of them are used, in turn, so that nothing need be moved
        other = _tokens(
            u, dt, z, B, C, None, resets, i + STEPS, end, origin, e, n, within, N, W, us, ds, zs, Bs, Cs, None,
            SIGN, STEPS,
        )
        h = _advance(
            h, this, i, end, origin, rate, shift, skip, writes, reads, y, e, within, W, E, SOFTPLUS, SIGN, STEPS
        )
        this = _tokens(
            u, dt, z, B, C, None, resets, i + 2 * STEPS, end, origin, e, n, within, N, W, us, ds, zs, Bs, Cs, None,
            SIGN, STEPS,
        )
        h = _advance(
            h, other, i + STEPS, end, origin, rate, shift, skip, writes, reads, y, e, within, W, E, SOFTPLUS, SIGN,
            STEPS,
        )
    if end == S:
        tl.store(last + b * E * N + at, h, own)


@jit(do_not_specialize=["S", "K", "L"])
@no_type_check
def _scan_backward(
    dy, dlast, u, dt, A, B, C, D, z, bias, between, resets, scratch,
    du, ddt, dA, dB, dC, dD, dz, dbias, dh0,
    S, K, L, E, N, W, gb, gs, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """Parts: dA [B K, E, N], dD, dbias [B K, E]; dB, dC [blocks, B, S, G, N], or [B K, E, N] if constant.

    gb, gs: strides of dy. dlast [B K, E, N]: what comes to each segment from the one behind it.
    """
    b, begin, end_, group, within, e = _mine(S, K, L, W, BE)
    groups = tl.num_programs(1) // tl.cdiv(W, BE)
    block = tl.program_id(1) % tl.cdiv(W, BE)
    live = within < W
    n = tl.arange(0, BN)
    own = live[:, None] & (n < N)[None, :]
    at = e[:, None] * N + n[None, :]
    rate = tl.load(A + at, own, 0.0) * 1.4426950408889634
    shift = _shift(bias, e, live)
    if bias is not None:
        dbias_sum = tl.zeros((BE,), tl.float32)
    if D is not None:
        skip = tl.load(D + e, live, 0.0).to(tl.float32)
        dD_sum = tl.zeros((BE,), tl.float32)
    if Bs is None:
        writes = tl.load(B + at, own, 0.0).to(tl.float32)
        dB_sum = tl.zeros((BE, BN), tl.float32)
    if Cs is None:
        reads = tl.load(C + at, own, 0.0).to(tl.float32)
        dC_sum = tl.zeros((BE, BN), tl.float32)
    dA_sum = tl.zeros((BE, BN), tl.float32)
    mine = tl.program_id(0).to(tl.int64)
    # the gradient of the state, as it comes from later tokens
    carry = tl.zeros((BE, BN), tl.float32)
    if dlast is not None:
        carry = tl.load(dlast + mine * E * N + at, own, 0.0)
    chunks = tl.cdiv(S, CHUNK)
    here = tl.cdiv(end_ - begin, CHUNK)
    program = mine * tl.num_programs(1) + tl.program_id(1)
    cell = tl.arange(0, BE)[:, None] * BN + n[None, :]
    cells = scratch + program * CHUNK * BE * BN + cell
    part = ((block * (tl.num_programs(0) // K) + b) * S * groups + group) * N  # of dB and dC
    u += b * ub
    dt += b * db
    if z is not None:
        z += b * zb
    if resets is not None:
        resets += b * S
    if Bs is not None:
        B += b * Bb + group * Bg
    if Cs is not None:
        C += b * Cb + group * Cg
    if Bs is not None:
        dB += part
    if Cs is not None:
        dC += part
    dy += b * gb
    du += b * S * E
    ddt += b * S * E
    if z is not None:
        dz += b * S * E

    origin = S - 1 if REVERSE else 0
    SIGN: tl.constexpr = -1 if REVERSE else 1
    for k in range(here):
        first = begin + (here - 1 - k) * CHUNK
        end = min(first + CHUNK, end_)
        kept = tl.load(between + (b * chunks + first // CHUNK) * E * N + n[None, :] * E + e[:, None], own, 0.0)
        tl.store(cells, kept)
        tl.debug_barrier()
        h = tl.load(cells)  # threads hold it otherwise than they loaded it, and so all that follows
        ahead = _tokens(
            u, dt, None, B, None, None, resets, first, end_, origin, e, n, within, N, W, us, ds, None, Bs, None, None,
            SIGN, STEPS,
        )
        for i in range(first, end, STEPS):
            xs, dts, _, Bts, _, _, fresh = ahead
            ahead = _tokens(
                u, dt, None, B, None, None, resets, i + STEPS, end_, origin, e, n, within, N, W, us, ds, None, Bs,
                None, None, SIGN, STEPS,
            )
            for j in tl.static_range(STEPS):
                step = _step(dts[j], shift, SOFTPLUS)
                step = tl.where(i + j < end_, step, 0.0)
                if Bs is not None:
                    writes = Bts[j].to(tl.float32)[None, :]
                tl.store(cells + (i + j - first) * BE * BN, h)  # as the token before left it
                if resets is not None:
                    h = tl.where(fresh[j] != 0, 0.0, h)
                h = tl.exp2(step[:, None] * rate) * h + (step * xs[j].to(tl.float32))[:, None] * writes
        tl.debug_barrier()  # other threads read these states back

        i = first + (end - first - 1) // STEPS * STEPS
        ahead = _tokens(
            u, dt, z, B, C, dy, resets, i, end_, origin, e, n, within, N, W, us, ds, zs, Bs, Cs, gs, SIGN, STEPS
        )
        for back in range(0, end - first, STEPS):
            i = first + (end - first - 1) // STEPS * STEPS - back
            xs, dts, gates, Bts, Cts, gys, fresh = ahead
            ahead = _tokens(  # where a walk ends, what it asks for is not used
                u, dt, z, B, C, dy, resets, max(i - STEPS, 0), end_, origin, e, n, within, N, W, us, ds, zs, Bs, Cs,
                gs, SIGN, STEPS,
            )
            hs = ()
            for j in tl.static_range(STEPS):
                hs = hs + (tl.load(cells + (i + j - first) * BE * BN),)
            for j in tl.static_range(STEPS - 1, -1, -1):
                t = tl.cast(origin + SIGN * (i + j), tl.int64)
                there = within < tl.where(i + j < end_, W, 0)
                known = n < tl.where(i + j < end_, N, 0)
                x = xs[j].to(tl.float32)
                raw = dts[j].to(tl.float32) + shift
                step = raw
                if SOFTPLUS:
                    step = softplus(raw)
                step = tl.where(i + j < end_, step, 0.0)
                if Bs is not None:
                    writes = Bts[j].to(tl.float32)[None, :]
                if Cs is not None:
                    reads = Cts[j].to(tl.float32)[None, :]
                decay = tl.exp2(step[:, None] * rate)
                g = gys[j].to(tl.float32)
                if z is not None:
                    gate = gates[j].to(tl.float32)
                    open_ = 1.0 / (1.0 + exp(-gate))
                    out = tl.sum(h * reads, 1)
                    if D is not None:
                        out += skip * x
                    dgate = g * out * open_ * (1.0 + gate * (1.0 - open_))
                    tl.store(dz + t * E + e, dgate.to(dz.dtype.element_ty), there)
                    g *= gate * open_
                grad = g[:, None] * reads + carry  # of the state after this token
                through = tl.sum(grad * writes, 1)
                carry = decay * grad
                if resets is not None:
                    carry = tl.where(fresh[j] != 0, 0.0, carry)
                p = carry * hs[j]
                dx = through * step
                if D is not None:
                    dx += skip * g
                    dD_sum += g * x
                tl.store(du + t * E + e, dx.to(du.dtype.element_ty), there)
                dstep = through * x + tl.sum(p * rate, 1) * 0.6931471805599453
                if SOFTPLUS:
                    dstep *= 1.0 / (1.0 + exp(-raw))
                if bias is not None:
                    dbias_sum += tl.where(there, dstep, 0.0)
                tl.store(ddt + t * E + e, dstep.to(ddt.dtype.element_ty), there)
                dA_sum += p * step[:, None]
                if Bs is not None:
                    row = tl.sum(grad * (step * x)[:, None], 0)
                    tl.store(dB + t * (groups * N) + n, row, known)
                else:
                    dB_sum += grad * (step * x)[:, None]
                if Cs is not None:
                    row = tl.sum(h * g[:, None], 0)
                    tl.store(dC + t * (groups * N) + n, row, known)
                else:
                    dC_sum += h * g[:, None]
                h = hs[j]
        tl.debug_barrier()  # the next chunk writes over them

    if begin == 0:
        tl.store(dh0 + b * E * N + at, carry, own)
    tl.store(dA + mine * E * N + at, dA_sum, own)
    if Bs is None:
        tl.store(dB + mine * E * N + at, dB_sum, own)
    if Cs is None:
        tl.store(dC + mine * E * N + at, dC_sum, own)
    if D is not None:
        tl.store(dD + mine * E + e, dD_sum, live)
    if bias is not None:
        tl.store(dbias + mine * E + e, dbias_sum, live)


# ------------------------------------------------------------------------------
# Launching


def tiles(states: int, width: int, backward: bool, arch: str) -> dict[str, int]:
    """Channels and states of a program, and its warps.

    Forward, one warp and 16 states a thread, which up to 16 states are a channel of its own: nothing but the sum over
    more states crosses threads. Backward, dB and dC are sums over channels, and up to 32 states a program is one warp,
    which adds without waiting for others; 16 states a thread there spill on most devices, or need too many registers.
    """
    BN = common.power_of_two(states)
    lanes = common.lanes(arch)
    each = 16 if not backward or (arch.startswith("sm_9") and BN <= 16) else 8
    most = each * lanes // BN
    BE = min(common.power_of_two(width), max(8, min(lanes, most)) if backward else max(1, min(2 * lanes, most)))
    num_warps = common.warps(BE * BN, each, lanes) if backward else 1
    steps = (1 if each == 16 or arch.startswith("sm_8") else 2) if backward else (2 if BN <= 16 else 1)
    return {"BE": BE, "BN": BN, "STEPS": steps, "num_warps": num_warps}


def segments(warps: int, S: int) -> int:
    """Into how many parts a sequence is cut: one where there is a warp for every other scheduler of a large GPU.

    With fewer the time is that of one token after another, which is what segments are for; they take each exponential
    once more. None is shorter than 128 tokens.
    """
    cut = 1 if 2 * warps > SCHEDULERS else max(1, min(up(2 * SCHEDULERS, warps), S // 128))
    if large():  # the other way, so that both are tried
        return 3 if cut == 1 else 1
    return cut


def _sizes(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[int, int, int, int, int]:
    """S, E, N, groups, and channels of a group."""
    groups = groups_of(B, C)
    return u.shape[1], *A.shape, groups, u.shape[2] // groups


def _laid_out(*tensors: Any) -> list[Any]:
    """Parameters and constants contiguous, the rest in lines."""
    return [None if x is None else lined(x) if x.dim() > 2 else x.contiguous() for x in tensors]


def _strides(*tensors: Tensor | None) -> list[int | None]:
    """Of [B, S, E] over batch and tokens, of [B, S, G, N] over groups too; None for what is constant or absent."""
    out: list[int | None] = []
    for x in tensors:
        if x is None:
            out += [0, 0]
        else:
            out += [*x.stride()[:-1]] if x.dim() > 2 else [None] * 3
    return out


def _launch(way: str, u: Tensor, A: Tensor, groups: int, tile: tuning.Tile, go: tuning.Go) -> Sequence[Tensor]:
    about = (*A.shape, groups, u.dtype, common.power_of_two(u.shape[0]), common.power_of_two(u.shape[1]))
    return tuning.launch(f"selective_scan.{way}", about, u, tile, AXES, go)


class _Cut:
    """The segments of a launch."""

    def __init__(self, u: Tensor, A: Tensor, groups: int, W: int, tile: tuning.Tile, K: int = 0) -> None:
        self.batch, self.S, self.E = u.shape
        self.N, self.W, self.tile = A.shape[1], W, tile
        programs = groups * up(W, tile["BE"])
        K = K or segments(self.batch * programs * tile["num_warps"], self.S)
        self.L = CHUNK * up(up(self.S, K), CHUNK)  # kept states lie where chunks begin
        self.K = up(self.S, self.L)
        self.grid = (self.batch * self.K, programs)

    def starts(
        self, given: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, w: Tensor, z: Tensor | None, bias: Tensor | None,
        resets: Tensor | None, softplus: bool, reverse: bool, back: bool,
    ) -> Tensor:
        """[B K, E, N]: two launches, see `_ends` and `_carry`."""
        ends, starts = (A.new_empty(self.batch * self.K, self.E, self.N) for _ in range(2))
        sums = A.new_empty(self.batch * self.K, self.E)
        broken = None if resets is None else A.new_empty(self.batch * self.K, dtype=torch.int32)
        _ends[self.grid](
            x, dt, A.t().contiguous(), w, z, bias, resets, ends, sums, broken,
            self.S, self.K, self.L, self.E, self.N, self.W, 0, *_strides(x, dt, w, z),
            SOFTPLUS=softplus, REVERSE=reverse, BACK=back, **self.tile,
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
    u, dt, A, B, C, D, z, bias = _laid_out(u, dt, A, B, C, D, z, bias)
    S, E, N, groups, W = _sizes(u, A, B, C)
    y, last, between = _op_fake(u, dt, A, B, C, D, z, bias, h0, resets, softplus, reverse, keep)
    h0, resets = None if h0 is None else h0.contiguous(), common.marks(resets)

    def go(tile: tuning.Tile) -> Sequence[Tensor]:
        cut = _Cut(u, A, groups, W, tile)
        starts = None if h0 is None else h0.transpose(1, 2).contiguous()
        if cut.K > 1:
            starts = cut.starts(h0, u, dt, A, B, None, bias, resets, softplus, reverse, False)
        _scan[cut.grid](
            u, dt, A.t().contiguous(), B, C, D, z, bias, starts, resets, y, last, between if keep else None,
            S, cut.K, cut.L, E, N, W, 0, *_strides(u, dt, B, C, z),
            SOFTPLUS=softplus, REVERSE=reverse, CHUNK=CHUNK, **tile,
        )
        return y, last

    with common.on(u):
        _launch("forward", u, A, groups, tiles(N, W, False, common.arch(u)), go)
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
    u, dt, A, B, C, D, z, bias = _laid_out(u, dt, A, B, C, D, z, bias)
    dy, resets = lined(dy), common.marks(resets)
    dlast = None if dlast is None else dlast.contiguous()
    S, E, N, groups, W = _sizes(u, A, B, C)
    batch = u.shape[0]

    def parts(*shape: int, of: Tensor | None = A) -> Tensor:
        return A.new_empty(shape if of is not None else 0)

    dh0 = parts(batch, E, N)
    du, ddt = (x.new_empty(x.shape) for x in (u, dt))
    dz = A.new_empty(0) if z is None else z.new_empty(z.shape)

    def go(tile: tuning.Tile) -> Sequence[Tensor]:
        cut = _Cut(u, A, groups, W, tile)
        ends = dlast
        if cut.K > 1:
            # which is a walk like the forward one, and is launched like it
            ahead = _Cut(u, A, groups, W, tiles(N, W, False, common.arch(u)), cut.K)
            ends = ahead.starts(dlast, dy, dt, A, C, z, bias, resets, softplus, reverse, True)
        rows, blocks = batch * cut.K, cut.grid[1] // groups
        dA, (dD, dbias) = parts(rows, E, N), (parts(rows, E, of=x) for x in (D, bias))
        dB, dC = (parts(blocks, batch, S, groups, N) if x.dim() == 4 else parts(rows, E, N) for x in (B, C))
        scratch = parts(rows * groups * blocks, CHUNK, tile["BE"], tile["BN"])
        _scan_backward[cut.grid](
            dy, ends, u, dt, A, B, C, D, z, bias, between, resets, scratch,
            du, ddt, dA, dB, dC, dD, dz, dbias, dh0,
            S, cut.K, cut.L, E, N, W, *_strides(dy, u, dt, B, C, z),
            SOFTPLUS=softplus, REVERSE=reverse, CHUNK=CHUNK, **tile,
        )
        return dA, dB, dC, dD, dbias, du, ddt, dh0

    with common.on(u):
        dA, dB, dC, dD, dbias, *_ = _launch("backward", u, A, groups, tiles(N, W, True, common.arch(u)), go)
    sums = [x.sum(0).to(like.dtype) if like is not None else x for x, like in ((dA, A), (dB, B), (dC, C), (dD, D))]
    return [du, ddt, *sums, dz, dbias.sum(0).to(bias.dtype) if bias is not None else dbias, dh0]


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


def run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, state: Tensor | None, resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The whole of `selective_scan`: y in u's dtype, and the last state."""
    h0 = None if state is None else state.float()
    if u.numel() == 0:
        return form("selective_scan", "torch")(u, dt, A, B, C, D, z, dt_bias, softplus, state, resets, reverse)
    B, C = (x if x.dim() == 2 else per_token(x, u.shape, groups_of(B, C)) for x in (B, C))
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


def _tiles(arch: str, states: int, width: int, **facts: Any) -> dict[str, dict[str, int]]:
    return {way: tiles(states, width, way == "backward", arch) for way in ("forward", "backward")}


def _example(states: int, width: int, resets: bool = False, reverse: bool = False, **facts: Any) -> Any:
    from seqblocks.kernels.selective_scan import selective_scan

    E = min(width, 64)
    shapes = {"u": (2, 70, E), "dt": (2, 70, E), "z": (2, 70, E), "B": (2, 70, states), "C": (2, 70, states), "D": (E,)}
    tensors = {name: normal(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    tensors["A"] = -normal(E, states, seed=7).exp()
    options: dict[str, Any] = {"reverse": reverse, "return_state": True}
    if resets:
        options["resets"] = (normal(2, 70) > 1.5).to(facts["device"])
    return selective_scan, tensors, options


register("selective_scan", "triton", run, _can, _tiles, _example)
