"""The forward kernels of the selective scan: the scan, and two kernels with which segments are scanned in parallel."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.selective_scan.triton.tokens import (
    cells_of,
    load_rates,
    load_shift,
    load_tokens,
    mark_pointer,
    matrix_pointers,
    program_share,
    step_of,
    token_pointers,
)
from seqblocks.kernels.triton_common import jit, silu, tl


@common.kernel(do_not_specialize=["S", "K", "L", "zero"])  # one compiled kernel for all lengths
@no_type_check
def scan_ends(
    x, dt, A, w, z, bias, resets, ends, sums, broken,
    S, K, L, E, N, W, zero, xb, xs, db, ds, wb, ws, wg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """Compute the state at the end of each segment from an initial state of zeros, where x is u and w is B.

    With BACK, compute instead the gradient of the state at the start of each segment from a gradient of zeros at its
    end, where x is dy and w is C. Also store the sum of the steps (dt) of each segment, and how many sequences begin in
    it.
    """
    b, first, end, group, within, e = program_share(S, K, L, W, BE)
    is_channel = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & is_channel[None, :]
    at = n[:, None] + e[None, :] * N
    rate = load_rates(A, cells_of(n, e, E) + zero, own)
    shift = load_shift(bias, e, is_channel)
    mask, is_n = (None, None) if EVEN else (is_channel, n < N)
    if ws is None:
        weights = tl.load(w + at, own, 0.0).to(tl.float32)
    h = tl.zeros((BN, BE), tl.float32)
    total = tl.zeros((BE,), tl.float32)
    breaks = 0
    SIGN: tl.constexpr = 1 if REVERSE == BACK else -1
    for start in range(0, end - first, CHUNK):
        t = tl.cast(end - 1 - start if BACK else first + start, tl.int64)
        t = S - 1 - t if REVERSE else t
        x_ = token_pointers(x, b, t, e, xb, xs)
        dt_ = token_pointers(dt, b, t, e, db, ds)
        z_ = token_pointers(z, b, t, e, zb, zs)
        w_ = matrix_pointers(w, b, t, group, n, wb, ws, wg)
        resets_ = mark_pointer(resets, b, t, S)
        rest = end - first - start
        ahead = load_tokens(x_, dt_, z_, w_, None, resets_, 0, rest, mask, is_n, xs, ds, zs, ws, None, SIGN, STEPS)
        for i in range(0, min(CHUNK, rest), STEPS):
            xs_, dts, zs_, ws_, _, fresh = ahead
            ahead = load_tokens(
                x_, dt_, z_, w_, None, resets_, i + STEPS, rest, mask, is_n, xs, ds, zs, ws, None, SIGN, STEPS
            )
            for j in tl.static_range(STEPS):
                step = tl.where(i + j < rest, step_of(dts[j], shift, SOFTPLUS), 0.0)
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
    tl.store(ends + to * E * N + cells_of(n, e, E), h, own)
    tl.store(sums + to * E + e, total, is_channel)
    if resets is not None:
        tl.store(broken + to, breaks)


@common.kernel(do_not_specialize=["K"])
@no_type_check
def carry_segments(
    given, A, ends, sums, broken, starts, K, E, N, BACK: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr
):
    """Compute the initial state of each segment from the results of `scan_ends` for the segments before it.

    given [B, E, N]: that of the first segment (of the last, with BACK); None: zeros.
    """
    b = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & (e < E)[None, :]
    at = n[:, None] + e[None, :] * N
    rate = load_rates(A, at, own)
    h = tl.zeros((BN, BE), tl.float32)
    if given is not None:
        h = tl.load(given + b * E * N + at, own, 0.0)
    for i in range(K):
        k = b * K + (K - 1 - i if BACK else i)
        cell = k * E * N + cells_of(n, e, E)
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
    """Return the state after these tokens, and store their y."""
    xs, dts, gates, Bts, Cts, fresh = tokens
    for j in tl.static_range(STEPS):
        x = xs[j].to(tl.float32)
        step = step_of(dts[j], shift, SOFTPLUS)
        step = tl.where(i + j < rest, step, 0.0)  # A step of 0 does not change the state.
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
def scan(
    u, dt, A, B, C, D, z, bias, h0, resets, y, last, between,
    S, K, L, E, N, W, zero, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):
    """Scan K segments of L tokens in parallel.

    h0 [B K, N, E]: the initial state of each segment; None: zeros. EVEN: neither channels nor states have an incomplete
    block.
    """
    b, begin, end, group, within, e = program_share(S, K, L, W, BE)
    is_channel = within < W
    n = tl.arange(0, BN)
    own = (n < N)[:, None] & is_channel[None, :]
    at = n[:, None] + e[None, :] * N
    # The layouts of A and h0 determine the layout of all states over the threads: one channel per thread. For this, A
    # and h0 have adjacent channels, and adding `zero` prevents the compiler from loading four elements at a time.
    along = cells_of(n, e, E) + zero
    rate = load_rates(A, along, own)
    shift = load_shift(bias, e, is_channel)
    skip, writes, reads = None, None, None
    if D is not None:
        skip = tl.load(D + e, is_channel, 0.0).to(tl.float32)
    if Bs is None:
        writes = tl.load(B + at, own, 0.0).to(tl.float32)
    if Cs is None:
        reads = tl.load(C + at, own, 0.0).to(tl.float32)
    mask, is_n = (None, None) if EVEN else (is_channel, n < N)
    h = tl.zeros((BN, BE), tl.float32)
    if h0 is not None:
        h = tl.load(h0 + tl.program_id(0).to(tl.int64) * E * N + along, own, 0.0)

    SIGN: tl.constexpr = -1 if REVERSE else 1
    for start in range(begin, end, CHUNK):
        # Relative to the first token of a chunk, offsets fit into 32 bits.
        t = tl.cast(S - 1 - start if REVERSE else start, tl.int64)
        u_ = token_pointers(u, b, t, e, ub, us)
        dt_ = token_pointers(dt, b, t, e, db, ds)
        z_ = token_pointers(z, b, t, e, zb, zs)
        B_ = matrix_pointers(B, b, t, group, n, Bb, Bs, Bg)
        C_ = matrix_pointers(C, b, t, group, n, Cb, Cs, Cg)
        resets_ = mark_pointer(resets, b, t, S)
        y_ = y + (b * S + t) * E + e
        if between is not None:
            tl.store(between + (b * tl.cdiv(S, CHUNK) + start // CHUNK) * E * N + along, h, own)
        rest = end - start
        this = load_tokens(u_, dt_, z_, B_, C_, resets_, 0, rest, mask, is_n, us, ds, zs, Bs, Cs, SIGN, STEPS)
        for i in range(0, min(CHUNK, rest), 2 * STEPS):
            # Tokens are loaded before the previous ones are used, alternately into two variables, which saves moves.
            other = load_tokens(
                u_, dt_, z_, B_, C_, resets_, i + STEPS, rest, mask, is_n, us, ds, zs, Bs, Cs, SIGN, STEPS
            )
            h = _advance(h, this, i, rest, rate, shift, skip, writes, reads, y_, within, W, E, SOFTPLUS, SIGN, STEPS)
            this = load_tokens(
                u_, dt_, z_, B_, C_, resets_, i + 2 * STEPS, rest, mask, is_n, us, ds, zs, Bs, Cs, SIGN, STEPS
            )
            h = _advance(
                h, other, i + STEPS, rest, rate, shift, skip, writes, reads, y_, within, W, E, SOFTPLUS, SIGN, STEPS
            )
    if end == S:
        tl.store(last + b * E * N + at, h, own)
