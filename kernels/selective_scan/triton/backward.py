"""The backward kernel of the selective scan."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.selective_scan.triton.tokens import (
    cells_of,
    load_rates,
    mark_pointer,
    matrix_pointers,
    program_share,
    token_pointers,
)
from seqblocks.kernels.triton_common import constexpr, exp, jit, reciprocal, silu, softplus, tl

# Planes [CHUNK, BE] of the scratch of a program. The first has the steps. The others: the input dt u of the state, dy
# multiplied by the gate, the output before the gate, the gradient of dt u, the gradient of the steps through the decay.
WRITTEN, GATED, OUTPUT, THROUGH, RATES = (constexpr(plane) for plane in range(1, 6))
PLANES = constexpr(6)
LN_2 = constexpr(0.6931471805599453)


@jit
@no_type_check
def _load_tile(x, t, mask):
    """Load [ROWS, BE] at offsets t [ROWS, 1] from pointers [BE] to the first token of a chunk."""
    return tl.load(x[None, :] + t, mask, 0.0)


@jit
@no_type_check
def _has_gradient(resets, t, mask):
    """Return the mask without the tokens that have no gradient."""
    if resets is not None:
        mask = tl.load(resets + t, mask, 2) < 2
    return mask


@jit
@no_type_check
def _prepare(
    u, dt, dy, z, B, C, resets, shift, planes, rows, count, is_channel, n, N, us, ds, gs, zs, Bs, Cs,
    SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
):
    """Store in float32 everything that depends only on a token and channel, for the `count` tokens of a chunk.

    These are the steps, dt u, and dy multiplied by the gate, in the first three planes [CHUNK, BE], and B and C in rows
    [CHUNK, BN]. For tokens after `count` and those without a gradient, zeros are stored, which change no state and no
    gradient.
    """
    target = planes + tl.arange(0, ROWS)[:, None] * BE + tl.arange(0, BE)[None, :]
    for first in tl.range(0, CHUNK, 2 * ROWS, num_stages=1):
        xs, dts, gs_, gates = (), (), (), ()
        for j in tl.static_range(2):  # Load everything before the first use, so that latencies overlap.
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            mask = _has_gradient(resets, SIGN * i, i < count)
            if not EVEN:
                mask = mask & is_channel[None, :]
            xs = xs + (_load_tile(u, SIGN * i * us, mask),)
            dts = dts + (_load_tile(dt, SIGN * i * ds, mask),)
            gs_ = gs_ + (_load_tile(dy, SIGN * i * gs, mask),)
            if z is not None:
                gates = gates + (_load_tile(z, SIGN * i * zs, mask),)
        for j in tl.static_range(2):
            i = first + j * ROWS + tl.arange(0, ROWS)[:, None]
            mask = i < count if EVEN else (i < count) & is_channel[None, :]
            step = dts[j].to(tl.float32)
            if shift is not None:
                step += shift[None, :]
            if SOFTPLUS:
                step = softplus(step)
            step = tl.where(mask, step, 0.0)
            g = gs_[j].to(tl.float32)
            if z is not None:
                g *= silu(gates[j].to(tl.float32))
            at = target + (first + j * ROWS) * BE
            tl.store(at, step)
            tl.store(at + WRITTEN * CHUNK * BE, step * xs[j].to(tl.float32))
            tl.store(at + GATED * CHUNK * BE, g)
    target = rows + tl.arange(0, LINES)[:, None] * BN + n[None, :]
    for first in tl.range(0, CHUNK, LINES, num_stages=1):
        i = first + tl.arange(0, LINES)[:, None]
        mask = _has_gradient(resets, SIGN * i, i < count) & (n < N)[None, :]
        if Bs is not None:
            tl.store(target + first * BN, _load_tile(B, SIGN * i * Bs, mask).to(tl.float32))
        if Cs is not None:
            tl.store(target + (CHUNK + first) * BN, _load_tile(C, SIGN * i * Cs, mask).to(tl.float32))


@jit
@no_type_check
def _finish(
    u, dt, dy, z, resets, shift, skip, planes, du, ddt, dz, dD, dbias, count, is_channel, E, us, ds, gs, zs,
    SIGN: tl.constexpr, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the gradients of u, dt and z from the planes of a chunk; add to those of D and the bias, [ROWS, BE]."""
    tile = planes + tl.arange(0, ROWS)[:, None] * BE + tl.arange(0, BE)[None, :]
    for first in tl.range(0, count, ROWS, num_stages=1):
        i = first + tl.arange(0, ROWS)[:, None]
        t = SIGN * i
        inside = i < count if EVEN else (i < count) & is_channel[None, :]
        mask = _has_gradient(resets, t, inside)
        x = _load_tile(u, t * us, mask).to(tl.float32)
        through = tl.load(tile + (THROUGH * CHUNK + first) * BE, mask, 0.0)
        rates = tl.load(tile + (RATES * CHUNK + first) * BE, mask, 0.0)
        step = tl.load(tile + first * BE)
        if skip is not None:
            g = tl.load(tile + (GATED * CHUNK + first) * BE)
        if SOFTPLUS:
            raw = _load_tile(dt, t * ds, mask).to(tl.float32)
        if z is not None:
            gate = _load_tile(z, t * zs, mask).to(tl.float32)
            out = tl.load(tile + (OUTPUT * CHUNK + first) * BE, mask, 0.0)
            dout = _load_tile(dy, t * gs, mask).to(tl.float32)
        dx = through * step
        if skip is not None:
            dx += skip[None, :] * g
            dD += g * x
        tl.store(du[None, :] + t * E, dx.to(du.dtype.element_ty), inside)
        dstep = through * x + rates * LN_2
        if SOFTPLUS:
            if shift is not None:
                raw += shift[None, :]
            dstep *= reciprocal(1.0 + exp(-raw))
        if shift is not None:
            dbias += tl.where(mask, dstep, 0.0)
        tl.store(ddt[None, :] + t * E, dstep.to(ddt.dtype.element_ty), inside)
        if z is not None:
            opening = reciprocal(1.0 + exp(-gate))
            if skip is not None:
                out += skip[None, :] * x
            dgate = dout * out * opening * (1.0 + gate * (1.0 - opening))
            tl.store(dz[None, :] + t * E, dgate.to(dz.dtype.element_ty), inside)
    return dD, dbias


@jit
@no_type_check
def _store_sums(target, x, ones, n, N, tokens, DOT: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the N sums of x [BN, BE] over channels, if `tokens` is not 0.

    DOT: the precision of a product with ones on the matrix units, which gives COLUMNS equal columns. It is faster than
    adding across threads that hold one channel each, which takes five exchanges per sum. None: add across threads.
    "twice": for units that truncate 13 of 24 bits, sum the first eleven bits and the rest separately.
    """
    column = tl.arange(0, COLUMNS)
    if DOT is None:
        sums = tl.sum(x, 1)[:, None]
    elif DOT == "twice":
        first = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        sums = tl.dot(x - first, ones, tl.dot(first, ones, input_precision="tf32"), input_precision="tf32")
    else:
        sums = tl.dot(x, ones, input_precision=DOT)
    mask = (n < N)[:, None] & (column < tl.minimum(tokens, 1))[None, :]
    tl.store(target + n[:, None] + column[None, :], sums, mask)


@common.kernel(do_not_specialize=["S", "K", "L", "zero"])
@no_type_check
def scan_backward(
    dy, dlast, u, dt, A, B, C, D, z, bias, between, resets, scratch,
    du, ddt, dA, dB, dC, dD, dz, dbias, dh0,
    S, K, L, E, N, W, zero, gb, gs, ub, us, db, ds, Bb, Bs, Bg, Cb, Cs, Cg, zb, zs,
    SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, COLUMNS: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, SCRATCH: tl.constexpr,
):
    """Compute gradients.

    Partial sums: dA [B K, E, N], dD, dbias [B K, E]; dB, dC [blocks, B, S, G, N], or [B K, E, N] if constant.
    B: sequences of this launch. gb, gs: strides of dy. dlast [B K, N, E]: the gradient of the state after each segment.
    EVEN: the channels have no incomplete block. ROWS, LINES: tokens of a tile with all channels, or all states.
    """
    b, begin, end, group, within, e = program_share(S, K, L, W, BE)
    groups = tl.num_programs(1) // tl.cdiv(W, BE)
    block = tl.program_id(1) % tl.cdiv(W, BE)
    is_channel = within < W
    n = tl.arange(0, BN)
    inside = (n < N)[:, None] & is_channel[None, :]
    along = cells_of(n, e, E) + zero  # As in `scan`, each thread holds one channel.
    rate = load_rates(A, along, inside)
    shift, skip, writes, reads = None, None, None, None
    if bias is not None:
        shift = tl.load(bias + e, is_channel, 0.0).to(tl.float32)
    if D is not None:
        skip = tl.load(D + e, is_channel, 0.0).to(tl.float32)
    if Bs is None:
        writes = tl.load(B + n[:, None] + e[None, :] * N, inside, 0.0).to(tl.float32)
        dB_sum = tl.zeros((BN, BE), tl.float32)
    if Cs is None:
        reads = tl.load(C + n[:, None] + e[None, :] * N, inside, 0.0).to(tl.float32)
        dC_sum = tl.zeros((BN, BE), tl.float32)
    dA_sum = tl.zeros((BN, BE), tl.float32)
    dD_sum = tl.zeros((ROWS, BE), tl.float32)
    dbias_sum = tl.zeros((ROWS, BE), tl.float32)
    mine = tl.program_id(0).to(tl.int64)
    # The gradient of the state from later tokens.
    carry = tl.zeros((BN, BE), tl.float32)
    if dlast is not None:
        carry = tl.load(dlast + mine * E * N + along, inside, 0.0)

    scratch += (mine * tl.num_programs(1) + tl.program_id(1)) * SCRATCH
    PLANE: tl.constexpr = CHUNK * BE
    lane = tl.arange(0, BE)
    rows = scratch + PLANES * PLANE
    cells = rows + 2 * CHUNK * BN + n[:, None] * BE + lane[None, :] + zero
    part = ((block * (tl.num_programs(0) // K) + b) * S * groups + group) * N  # offset in dB and dC
    ones = tl.full((BE, COLUMNS), 1.0, tl.float32)
    origin = S - 1 if REVERSE else 0
    SIGN: tl.constexpr = -1 if REVERSE else 1
    for k in range(tl.cdiv(end - begin, CHUNK) - 1, -1, -1):
        first = begin + k * CHUNK
        count = min(end - first, CHUNK)
        # Relative to this token, offsets fit into 32 bits.
        t = tl.cast(origin + SIGN * first, tl.int64)
        x_ = token_pointers(u, b, t, e, ub, us)
        dt_ = token_pointers(dt, b, t, e, db, ds)
        dy_ = token_pointers(dy, b, t, e, gb, gs)
        z_ = token_pointers(z, b, t, e, zb, zs)
        B_ = matrix_pointers(B, b, t, group, n, Bb, Bs, Bg)
        C_ = matrix_pointers(C, b, t, group, n, Cb, Cs, Cg)
        resets_ = mark_pointer(resets, b, t, S)
        line = (b * S + t) * E + e
        dz_, dB_, dC_ = None, None, None
        if z is not None:
            dz_ = dz + line
        if Bs is not None:
            dB_ = dB + part + t * (groups * N)
        if Cs is not None:
            dC_ = dC + part + t * (groups * N)
        _prepare(
            x_, dt_, dy_, z_, B_, C_, resets_, shift, scratch, rows, count, is_channel, n, N, us, ds, gs, zs, Bs, Cs,
            SIGN, SOFTPLUS, EVEN, CHUNK, BE, BN, ROWS, LINES,
        )
        tl.debug_barrier()  # Other threads read what was written above; likewise below.

        h = tl.load(between + (b * tl.cdiv(S, CHUNK) + first // CHUNK) * E * N + along, inside, 0.0)
        for i in tl.range(0, count, STEPS, num_stages=1):
            tl.store(cells + i // STEPS * (BE * BN), h)  # the state before these tokens
            for j in tl.static_range(STEPS):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                decay = tl.exp2(tl.load(plane)[None, :] * rate)
                if resets is not None:
                    h = tl.where(tl.load(resets_ + SIGN * (i + j), i + j < count, 0) != 0, 0.0, h)
                write = tl.load(row)[:, None] if writes is None else writes
                read = tl.load(row + CHUNK * BN)[:, None] if reads is None else reads
                h = decay * h + tl.load(plane + WRITTEN * PLANE)[None, :] * write
                if z is not None:
                    tl.store(plane + OUTPUT * PLANE, tl.sum(h * read, 0))
                of_read = h * tl.load(plane + GATED * PLANE)[None, :]
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
            hs, decays, begins = (), (), ()  # the states before each of these tokens
            for j in tl.static_range(STEPS):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                decay = tl.exp2(tl.load(plane)[None, :] * rate)
                if resets is not None:  # A decay of 0 does not suffice: the previous sequence's state may be infinite.
                    fresh = tl.load(resets_ + SIGN * (i + j), i + j < count, 0) != 0
                    h, begins = tl.where(fresh, 0.0, h), begins + (fresh,)
                hs, decays = hs + (h,), decays + (decay,)
                if j + 1 < STEPS:
                    write = tl.load(row)[:, None] if writes is None else writes
                    h = decay * h + tl.load(plane + WRITTEN * PLANE)[None, :] * write
            for j in tl.static_range(STEPS - 1, -1, -1):
                plane, row = scratch + (i + j) * BE + lane, rows + (i + j) * BN + n
                write = tl.load(row)[:, None] if writes is None else writes
                read = tl.load(row + CHUNK * BN)[:, None] if reads is None else reads
                grad = tl.load(plane + GATED * PLANE)[None, :] * read + carry  # gradient of the state after this token
                tl.store(plane + THROUGH * PLANE, tl.sum(grad * write, 0))
                carry = decays[j] * grad
                if resets is not None:
                    carry = tl.where(begins[j], 0.0, carry)
                p = carry * hs[j]
                tl.store(plane + RATES * PLANE, tl.sum(p * rate, 0))
                dA_sum += p * tl.load(plane)[None, :]
                of_write = grad * tl.load(plane + WRITTEN * PLANE)[None, :]
                if Bs is None:
                    dB_sum += of_write
                else:
                    _store_sums(
                        dB_ + SIGN * (i + j) * (groups * N), of_write, ones, n, N, max(count - i - j, 0), DOT, COLUMNS
                    )
        tl.debug_barrier()

        dD_sum, dbias_sum = _finish(
            x_, dt_, dy_, z_, resets_, shift, skip, scratch, du + line, ddt + line, dz_, dD_sum, dbias_sum,
            count, is_channel, E, us, ds, gs, zs, SIGN, SOFTPLUS, EVEN, CHUNK, BE, ROWS,
        )
        tl.debug_barrier()

    at = n[:, None] + e[None, :] * N
    if begin == 0:
        tl.store(dh0 + b * E * N + at, carry, inside)
    tl.store(dA + mine * E * N + at, dA_sum, inside)
    if Bs is None:
        tl.store(dB + mine * E * N + at, dB_sum, inside)
    if Cs is None:
        tl.store(dC + mine * E * N + at, dC_sum, inside)
    if D is not None:
        tl.store(dD + mine * E + e, tl.sum(dD_sum, 0), is_channel)
    if bias is not None:
        tl.store(dbias + mine * E + e, tl.sum(dbias_sum, 0), is_channel)
