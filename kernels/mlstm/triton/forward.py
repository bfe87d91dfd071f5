"""The forward kernels: states before each chunk, outputs, and both at once for a single token."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.mlstm.triton.tensors import (
    DEN,
    FLOOR,
    KEEP,
    WRITE,
    U,
    inside,
    load_columns,
    load_plane,
    load_rows,
    load_segment,
    load_x,
    own_block,
    own_tile,
    products,
    start,
    store_rows,
    weights_read,
)  # fmt: skip
from seqblocks.kernels.resets.nonfinite_triton import chosen, finite
from seqblocks.kernels.triton_common import exp, load_tile, log_sigmoid, operand, tl


@common.kernel(do_not_specialize=["S"])
@no_type_check
def states(
    k, v, C0, n0, gates, segments, C, norm, C_out, n_out, clean_k, clean_v, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, kb, ks, kh, vb, vs, vh,
    GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute C and n before every chunk and after the last; n only if `norm` is not None."""
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    ACROSS: tl.constexpr = (DV + BV - 1) // BV
    n, block, chunks, place, plane, dk, dv, is_k, is_v, first = own_block(S, DK, DV, L, BK, BV)
    wide = n.to(tl.int64)
    own = is_k[:, None] & is_v[None, :]
    cell = dk[:, None] * DV + dv[None, :]
    j = tl.arange(0, BT)
    state = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    if C0 is not None:
        state = finite(tl.load(C0 + wide * DK * DV + cell, own, 0.0), faults)
        if norm is not None:
            total = finite(tl.load(n0 + wide * DK + dk, is_k, 0.0), faults)
    for tile in range(chunks * (L // BT)):
        base = place + tile * BT
        if tile % (L // BT) == 0:
            at = wide * chunks + tile // (L // BT)
            tl.store(C + at * DK * DV + cell, operand(state, C.dtype.element_ty, PRECISION), own)
            if norm is not None:
                tl.store(norm + at * DK + dk, total, first)
            kept = load_plane(gates, KEEP, plane, base, L - 1)
            state *= kept
            total *= kept
        is_t = j < S - tile * BT
        weight = load_plane(gates, WRITE, plane, base, j)
        keys = load_columns(k, n // GROUP, H // GROUP, tile, S, kb, ks, kh, dk, is_t, is_k, REVERSE, BT)
        values = load_rows(v, n, H, tile, S, vb, vs, vh, dv, is_t, is_v, REVERSE, BT)
        # The dot and n each multiply keys by weights in their own layout, because a common product would have to be
        # exchanged between threads. n uses a fused multiply-add, so that compilers do not merge the two products.
        written = operand(keys.to(tl.float32) * weight[None, :], DOT, PRECISION)
        state += tl.dot(written, operand(values, DOT, PRECISION), input_precision=PRECISION)
        if norm is not None:
            if block % ACROSS == 0:
                total += tl.sum(tl.fma(keys.to(tl.float32), weight[None, :] + tl.zeros((BK, BT), tl.float32), 0.0), 1)
    if C_out is not None:
        tl.store(C_out + wide * DK * DV + cell, state, own)
        if norm is not None:
            tl.store(n_out + wide * DK + dk, total, first)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def outputs(
    q, k, v, C, norm, gates, segments, h, clean_q, clean_k, clean_v, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, scale, log_scale, eps,
    GROUP: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute h, and q . n. One program per tile of tokens and of values."""
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    ACROSS: tl.constexpr = (DV + BV - 1) // BV
    n, tile, part, at, base, plane, j, is_t = own_tile(S, ACROSS, L, BT)
    dv = tl.program_id(0) % ACROSS * BV + tl.arange(0, BV)
    is_v = inside(dv, DV, BV)
    sign = -1 if REVERSE else 1
    queries = start(q, n // GROUP, H // GROUP, tile, S, qb, qs, qh, REVERSE, BT)
    u = load_plane(gates, U, plane, base, j) * scale
    # A loop of its own: if a tile feeds an asynchronous product and something else, Triton 3.6 to 3.9 may overwrite it
    # too early, see docs/kernels/compiler_faults.md.
    parts = tl.zeros((BT, BK), tl.float32)  # terms of q . n, by channels
    if norm is not None:
        for first in range(0, DK, BK):
            dk = first + tl.arange(0, BK)
            is_k = inside(dk, DK, BK)
            a = load_tile(queries, sign * j * qs, dk, is_t, is_k).to(tl.float32)
            parts += a * tl.load(norm + at * DK + dk, is_k, 0.0)[None, :]
    den = tl.sum(parts, 1) * u
    num = tl.zeros((BT, BV), tl.float32)
    for first in range(0, DK, BK):
        dk = first + tl.arange(0, BK)
        is_k = inside(dk, DK, BK)
        a = operand(load_tile(queries, sign * j * qs, dk, is_t, is_k), DOT, PRECISION)
        state = load_tile(C + at * DK * DV, dk * DV, dv, is_k, is_v)
        num += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    num *= u[:, None]
    x = load_x(gates, plane, base, j, log_scale, DOT)
    segment = load_segment(segments, base, j)
    for back in range(part + 1):
        other = tile - back
        seen = j < S - other * BT
        keys = start(k, n // GROUP, H // GROUP, other, S, kb, ks, kh, REVERSE, BT)
        weights = products(
            queries, keys, sign * j * qs, sign * j * ks, is_t, seen, DK, DOT, PRECISION, BT, BK
        )
        weights *= weights_read(
            gates, segments, plane, base - back * BT, x, segment, tile * BT + j, other * BT + j, j, log_scale, DOT
        )
        values = load_rows(v, n, H, other, S, vb, vs, vh, dv, seen, is_v, REVERSE, BT)
        den += tl.sum(weights, 1)
        num += tl.dot(operand(weights, DOT, PRECISION), operand(values, DOT, PRECISION), input_precision=PRECISION)
    if NORMALIZE:
        tl.store(gates + plane * DEN + base + j, den, j < tl.where(tl.program_id(0) % ACROSS == 0, BT, 0))
        num *= (1.0 / (tl.maximum(tl.abs(den), load_plane(gates, FLOOR, plane, base, j)) + eps))[:, None]
    else:  # m should be 0, but x is rounded: the floor corrects the scale.
        num *= (1.0 / load_plane(gates, FLOOR, plane, base, j))[:, None]
    store_rows(h, num, n, H, tile, S, dv, is_t, is_v, DV, REVERSE, BT)


@common.kernel()
@no_type_check
def step(
    q, k, v, i, f, resets, C0, n0, m0, h, C, norm, m,
    H, DK: tl.constexpr, DV: tl.constexpr, qb, qh, kb, kh, vb, vh, ib, ih, fb, fh, scale, eps,
    EXP: tl.constexpr, NORMALIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Run one token without gradients. A program reads and writes a strip [DK, BV] of C once."""
    n = tl.program_id(0)
    b = (n // H).to(tl.int64)
    head = (n % H).to(tl.int64)
    wide = n.to(tl.int64)
    first_strip = tl.program_id(1) == 0  # This program stores n and m.
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
    kept = tl.where(begins == 0, exp(through - top), 0.0)
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
            state += tl.where(begins == 0, tl.load(C0 + cell, both, 0.0), 0.0) * kept
            total += tl.where(begins == 0, tl.load(n0 + wide * DK + dk, is_k, 0.0), 0.0) * kept
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
