"""The backward kernels: factors of each token, gradients of the states, of q, k and v, and of the gates.

With the stabiliser m held constant, the gradient of log f at t is that of all weights with which tokens from t on read
tokens before t. For a chunk it can be computed from the values in the chunk and from <C, dC> + <n, dn> of the state
after it, so no sum runs over the sequence. The remaining terms are small: those of eps, which makes h depend on the
scale, and of the last m. Every m is a maximum, so its gradient goes to the one input gate that attains it, or to the m
before the chunk; `state_gradients` passes the latter from chunk to chunk.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.mlstm.triton.gates import sums
from seqblocks.kernels.mlstm.triton.tensors import (
    CARRIED,
    D_DEN,
    D_M,
    DEN,
    FLOOR,
    INVERSE,
    KEEP,
    READ_C,
    READ_N,
    WRITE,
    E,
    U,
    X,
    inside,
    load_columns,
    load_e,
    load_plane,
    load_rows,
    load_segment,
    load_x,
    own_block,
    own_tile,
    products,
    start,
    store_plane,
    store_rows,
    weights_read,
    weights_written,
)  # fmt: skip
from seqblocks.kernels.resets.nonfinite_triton import chosen, finite
from seqblocks.kernels.triton_common import constexpr, exp, jit, load_tile, operand, reciprocal, tl

MAX_EXPONENT = constexpr(88.0)  # e^88 is finite in float32


@common.kernel(do_not_specialize=["S"])
@no_type_check
def factors(
    dh, h, gates, segments, planes, links, clean_dh, faults,
    S, H, DV: tl.constexpr, gb, gs, gh, scale, eps,
    EXP: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):
    """Compute the factors of each token from r = dh . h and the divisor. One program per chunk."""
    dh = chosen(dh, clean_dh, faults)
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    base = tl.program_id(0).to(tl.int64) * BT
    plane = tl.num_programs(0).to(tl.int64) * BT
    j = tl.arange(0, BT)
    is_t = j < S - c * BT
    sign = -1 if REVERSE else 1
    grads = start(dh, n, H, c, S, gb, gs, gh, REVERSE, BT)
    outs = start(h, n, H, c, S, tl.cast(S, tl.int64) * H * DV, H * DV, DV, REVERSE, BT)
    r = tl.zeros((BT,), tl.float32)
    for first in range(0, DV, BV):
        dv = first + tl.arange(0, BV)
        is_v = inside(dv, DV, BV)
        a = load_tile(grads, sign * j * gs, dv, is_t, is_v).to(tl.float32)
        r += tl.sum(a * finite(load_tile(outs, sign * j * H * DV, dv, is_t, is_v).to(tl.float32), faults), 1)
    floor = load_plane(gates, FLOOR, plane, base, j)
    dden = tl.zeros((BT,), tl.float32)
    dm = tl.zeros((BT,), tl.float32)
    if NORMALIZE:
        den = load_plane(gates, DEN, plane, base, j)
        wins = tl.abs(den) >= floor
        inverse = tl.where(is_t, 1.0 / (tl.maximum(tl.abs(den), floor) + eps), 0.0)
        dden = tl.where(wins, tl.where(den < 0.0, r, -r) * inverse, 0.0)
        if EXP:
            dm = -eps * r * inverse
    else:
        inverse = tl.where(is_t, 1.0 / floor, 0.0)
    store_plane(planes, INVERSE, plane, base, j, inverse)
    store_plane(planes, D_DEN, plane, base, j, dden)
    store_plane(planes, D_M, plane, base, j, dm)
    u = load_plane(gates, U, plane, base, j) * scale
    store_plane(planes, READ_C, plane, base, j, u * inverse)
    store_plane(planes, READ_N, plane, base, j, u * dden)
    carried = load_plane(gates, CARRIED, plane, base, j)
    if segments is not None:
        carried = tl.where(tl.load(segments + base + j) == 0, carried, 0.0)
    tl.store(links + tl.program_id(0), tl.sum(carried * dm, 0))
    tl.store(links + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(j == BT - 1, carried, 0.0), 0))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def state_gradients(
    q, dh, C, norm, C_out, n_out, dC_out, dn_out, gates, factors, links, dC, dnorm, dC0, dn0, flows, ahead,
    clean_q, clean_dh, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, gb, gs, gh,
    GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute the gradients of the states, from the last chunk to the first.

    flows [N, K + 1, blocks]: this block's part of <C, dC> + <n, dn> before every chunk, and after the last.
    ahead [2, N, K]: the gradient, from later chunks, of the m after each chunk; and 1 if the gradient of the last m is
    passed on to it.
    """
    q = chosen(q, clean_q, faults)
    dh = chosen(dh, clean_dh, faults)
    ACROSS: tl.constexpr = (DV + BV - 1) // BV
    BLOCKS: tl.constexpr = (DK + BK - 1) // BK * ACROSS
    n, block, chunks, place, plane, dk, dv, is_k, is_v, first = own_block(S, DK, DV, L, BK, BV)
    wide = n.to(tl.int64)
    own = is_k[:, None] & is_v[None, :]
    cell = dk[:, None] * DV + dv[None, :]
    j = tl.arange(0, BT)
    grad = tl.zeros((BK, BV), tl.float32)
    total = tl.zeros((BK,), tl.float32)
    flow = 0.0
    if dC_out is not None:
        grad = finite(tl.load(dC_out + wide * DK * DV + cell, own, 0.0), faults)
        if norm is not None:
            total = finite(tl.load(dn_out + wide * DK + dk, first, 0.0), faults)
        flow = tl.sum(grad * finite(tl.load(C_out + wide * DK * DV + cell, own, 0.0), faults))
        if norm is not None:
            flow += tl.sum(total * finite(tl.load(n_out + wide * DK + dk, first, 0.0), faults))
    given, passes = 0.0, 1.0
    all_chunks = (tl.num_programs(0) // BLOCKS).to(tl.int64) * chunks
    parts = flows + wide * (chunks + 1) * BLOCKS + block
    tl.store(parts + chunks * BLOCKS, flow)
    for back in range(chunks * (L // BT)):
        tile = chunks * (L // BT) - 1 - back
        base = place + tile * BT
        c = tile // (L // BT)
        at = wide * chunks + c
        if tile % (L // BT) == L // BT - 1:
            tl.store(dC + at * DK * DV + cell, operand(grad, dC.dtype.element_ty, PRECISION), own)
            if norm is not None:
                tl.store(dnorm + at * DK + dk, total, first)
            kept = load_plane(gates, KEEP, plane, base, BT - 1)
            grad *= kept
            total *= kept
            if links is not None:
                if block == 0:
                    tl.store(ahead + at, given)
                    tl.store(ahead + all_chunks + at, passes)
                    goes_on = tl.load(links + all_chunks + at)
                    given = tl.load(links + at) + goes_on * given
                    passes *= goes_on
        is_t = j < S - tile * BT
        queries = load_columns(q, n // GROUP, H // GROUP, tile, S, qb, qs, qh, dk, is_t, is_k, REVERSE, BT)
        outs = load_rows(dh, n, H, tile, S, gb, gs, gh, dv, is_t, is_v, REVERSE, BT)
        read = queries.to(tl.float32) * load_plane(factors, READ_C, plane, base, j)[None, :]
        grad += tl.dot(operand(read, DOT, PRECISION), operand(outs, DOT, PRECISION), input_precision=PRECISION)
        if norm is not None:
            if block % ACROSS == 0:
                total += tl.sum(queries.to(tl.float32) * load_plane(factors, READ_N, plane, base, j)[None, :], 1)
        if tile % (L // BT) == 0:
            flow = tl.sum(grad * tl.load(C + at * DK * DV + cell, own, 0.0).to(tl.float32))
            if norm is not None:
                flow += tl.sum(total * tl.load(norm + at * DK + dk, first, 0.0))
            tl.store(parts + c * BLOCKS, flow)
    if dC0 is not None:
        tl.store(dC0 + wide * DK * DV + cell, grad, own)
        if norm is not None:
            tl.store(dn0 + wide * DK + dk, total, first)


# Each function has its own loop over the state's part: as a shared function, it took more registers and spilled on
# sm_90.


@jit
@no_type_check
def _query_gradients(
    q, k, v, dh, C, norm, gates, segments, factors, dq, rows,
    clean_q, clean_v, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    column, SHARING: tl.constexpr, GROUP: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """Compute dq of a tile. Weights are [t, s]: reading tokens are rows, the tokens they read are columns."""
    n, tile, part, at, base, plane, j, is_t = own_tile(S, SHARING, L, BT)
    d = column * BK + tl.arange(0, BK)
    is_d = inside(d, DK, BK)
    sign = -1 if REVERSE else 1
    grads = start(dh, n, H, tile, S, gb, gs, gh, REVERSE, BT)
    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, DV, BD):
        dv = first + tl.arange(0, BD)
        is_v = inside(dv, DV, BD)
        a = operand(load_tile(grads, sign * j * gs, dv, is_t, is_v), DOT, PRECISION)
        state = load_tile(C + at * DK * DV, dv, d * DV, is_v, is_d)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    inverse = load_plane(factors, INVERSE, plane, base, j)
    dden = load_plane(factors, D_DEN, plane, base, j)
    total *= load_plane(factors, READ_C, plane, base, j)[:, None]
    if norm is not None:
        total += load_plane(factors, READ_N, plane, base, j)[:, None] * tl.load(norm + at * DK + d, is_d, 0.0)[None, :]
    x = load_x(gates, plane, base, j, log_scale, DOT)
    segment = load_segment(segments, base, j)
    for back in range(part + 1):
        other = tile - back
        seen = j < S - other * BT
        values = start(chosen(v, clean_v, faults), n, H, other, S, vb, vs, vh, REVERSE, BT)
        weights = products(
            grads, values, sign * j * gs, sign * j * vs, is_t, seen, DV, DOT, PRECISION, BT, BD
        )
        weights = weights * inverse[:, None] + dden[:, None]
        weights *= weights_read(
            gates, segments, plane, base - back * BT, x, segment, tile * BT + j, other * BT + j, j, log_scale, DOT
        )
        b = load_rows(k, n // GROUP, H // GROUP, other, S, kb, ks, kh, d, seen, is_d, REVERSE, BT)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(b, DOT, PRECISION), input_precision=PRECISION)
    store_rows(dq, total, n, H, tile, S, d, is_t, is_d, DK, REVERSE, BT)
    queries = chosen(q, clean_q, faults)
    a = load_rows(queries, n // GROUP, H // GROUP, tile, S, qb, qs, qh, d, is_t, is_d, REVERSE, BT).to(tl.float32)
    tl.store(rows + column * plane + base + j, tl.sum(a * total, 1))


@jit
@no_type_check
def _key_gradients(
    q, k, v, dh, dC, dnorm, gates, segments, factors, dk, columns,
    clean_q, clean_v, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    column, SHARING: tl.constexpr, GROUP: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):
    """Compute dk of a tile. Weights are [s, t]: the tokens that are read are rows, reading tokens are columns."""
    n, tile, part, at, base, plane, j, is_t = own_tile(S, SHARING, L, BT)
    d = column * BK + tl.arange(0, BK)
    is_d = inside(d, DK, BK)
    sign = -1 if REVERSE else 1
    values = start(chosen(v, clean_v, faults), n, H, tile, S, vb, vs, vh, REVERSE, BT)
    total = tl.zeros((BT, BK), tl.float32)
    for first in range(0, DV, BD):
        dv = first + tl.arange(0, BD)
        is_v = inside(dv, DV, BD)
        a = operand(load_tile(values, sign * j * vs, dv, is_t, is_v), DOT, PRECISION)
        state = load_tile(dC + at * DK * DV, dv, d * DV, is_v, is_d)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    if dnorm is not None:
        total += tl.load(dnorm + at * DK + d, is_d, 0.0)[None, :]
    total *= load_plane(gates, WRITE, plane, base, j)[:, None]
    e = load_e(gates, plane, base, j, log_scale, DOT)
    segment = load_segment(segments, base, j)
    for ahead in range(L // BT - part):
        other = tile + ahead
        reads = j < S - other * BT
        there = base + ahead * BT
        grads = start(dh, n, H, other, S, gb, gs, gh, REVERSE, BT)
        weights = products(
            values, grads, sign * j * vs, sign * j * gs, is_t, reads, DV, DOT, PRECISION, BT, BD
        )
        inverse = load_plane(factors, INVERSE, plane, there, j)
        dden = load_plane(factors, D_DEN, plane, there, j)
        weights = weights * inverse[None, :] + dden[None, :]
        weights *= weights_written(
            gates, segments, plane, there, e, segment, other * BT + j, tile * BT + j, j, log_scale, base, DOT
        )
        queries = chosen(q, clean_q, faults)
        a = load_rows(queries, n // GROUP, H // GROUP, other, S, qb, qs, qh, d, reads, is_d, REVERSE, BT)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(a, DOT, PRECISION), input_precision=PRECISION)
    store_rows(dk, total, n, H, tile, S, d, is_t, is_d, DK, REVERSE, BT)
    b = load_rows(k, n // GROUP, H // GROUP, tile, S, kb, ks, kh, d, is_t, is_d, REVERSE, BT).to(tl.float32)
    tl.store(columns + column * plane + base + j, tl.sum(b * total, 1))


@jit
@no_type_check
def _value_gradients(
    q, k, dh, dC, gates, segments, factors, dv,
    clean_q, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, gb, gs, gh, log_scale,
    column, SHARING: tl.constexpr, GROUP: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):
    """Compute dv of a tile. Weights are [s, t], as for dk."""
    n, tile, part, at, base, plane, j, is_t = own_tile(S, SHARING, L, BT)
    d = column * BV + tl.arange(0, BV)
    is_d = inside(d, DV, BV)
    sign = -1 if REVERSE else 1
    keys = start(k, n // GROUP, H // GROUP, tile, S, kb, ks, kh, REVERSE, BT)
    total = tl.zeros((BT, BV), tl.float32)
    for first in range(0, DK, BD):
        dk = first + tl.arange(0, BD)
        is_k = inside(dk, DK, BD)
        a = operand(load_tile(keys, sign * j * ks, dk, is_t, is_k), DOT, PRECISION)
        state = load_tile(dC + at * DK * DV, dk * DV, d, is_k, is_d)
        total += tl.dot(a, state.to(DOT), input_precision=PRECISION)
    total *= load_plane(gates, WRITE, plane, base, j)[:, None]
    e = load_e(gates, plane, base, j, log_scale, DOT)
    segment = load_segment(segments, base, j)
    for ahead in range(L // BT - part):
        other = tile + ahead
        reads = j < S - other * BT
        there = base + ahead * BT
        queries = start(chosen(q, clean_q, faults), n // GROUP, H // GROUP, other, S, qb, qs, qh, REVERSE, BT)
        weights = products(
            keys, queries, sign * j * ks, sign * j * qs, is_t, reads, DK, DOT, PRECISION, BT, BD
        )
        weights *= weights_written(
            gates, segments, plane, there, e, segment, other * BT + j, tile * BT + j, j, log_scale, base, DOT
        )
        weights *= load_plane(factors, INVERSE, plane, there, j)[None, :]
        grads = load_rows(dh, n, H, other, S, gb, gs, gh, d, reads, is_d, REVERSE, BT)
        total += tl.dot(operand(weights, DOT, PRECISION), operand(grads, DOT, PRECISION), input_precision=PRECISION)
    store_rows(dv, total, n, H, tile, S, d, is_t, is_d, DV, REVERSE, BT)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def gradients(
    q, k, v, dh, C, norm, dC, dnorm, gates, segments, factors, dq, rows, dk, columns, dv,
    clean_q, clean_k, clean_v, clean_dh, faults,
    S, H, DK: tl.constexpr, DV: tl.constexpr, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
    GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):
    """Compute dq, dk and dv. The programs of a tile are adjacent, so that common data is read from memory once.

    A chosen address takes registers, so those of q and v are chosen where they are used.
    """
    k = chosen(k, clean_k, faults)
    dh = chosen(dh, clean_dh, faults)
    OF_KEYS: tl.constexpr = (DK + BK - 1) // BK
    SHARING: tl.constexpr = 2 * OF_KEYS + (DV + BV - 1) // BV
    which = tl.program_id(0) % SHARING
    if which < OF_KEYS:
        _query_gradients(
            q, k, v, dh, C, norm, gates, segments, factors, dq, rows,
            clean_q, clean_v, faults,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
            which, SHARING, GROUP, REVERSE, DOT, PRECISION, L, BT, BK, BD,
        )
    elif which < 2 * OF_KEYS:
        _key_gradients(
            q, k, v, dh, dC, dnorm, gates, segments, factors, dk, columns,
            clean_q, clean_v, faults,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, log_scale,
            which - OF_KEYS, SHARING, GROUP, REVERSE, DOT, PRECISION, L, BT, BK, BD,
        )
    else:
        _value_gradients(
            q, k, dh, dC, gates, segments, factors, dv,
            clean_q, faults,
            S, H, DK, DV, qb, qs, qh, kb, ks, kh, gb, gs, gh, log_scale,
            which - 2 * OF_KEYS, SHARING, GROUP, REVERSE, DOT, PRECISION, L, BT, BV, BD,
        )


@jit
@no_type_check
def _sum_of_parts(parts, step, count, MAX_PARTS: tl.constexpr, base, j):
    """Return the sum over `count` parts [count, BT], which are `step` elements apart."""
    part = tl.arange(0, MAX_PARTS)[:, None]
    return tl.sum(tl.load(parts + part * step + base + j[None, :], part < count, 0.0), 0)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def gate_gradients(
    i, f, dm_out, gates, segments, factors, links, ahead, rows, columns, flows, di, df, dm0,
    clean_f, clean_i, faults,
    S, H, ib, js, ih, fb, fs, fh, row_tiles, column_tiles, state_tiles,
    EXP: tl.constexpr, FRESH: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
):
    """Compute the gradients of i, f and the initial m, from the last token of a chunk to the first.

    In this order, all sums are cumulative. FRESH: there is no initial state.
    """
    if i is not None:
        i = chosen(i, clean_i, faults)
    if f is not None:
        f = chosen(f, clean_f, faults)
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    base = tl.program_id(0).to(tl.int64) * BT
    plane = tl.num_programs(0).to(tl.int64) * BT
    j = BT - 1 - tl.arange(0, BT)
    is_t = j < S - c * BT
    sign = -1 if REVERSE else 1
    read = _sum_of_parts(rows, plane, row_tiles, ROWS, base, j)
    dlog_i = _sum_of_parts(columns, plane, column_tiles, COLUMNS, base, j)
    # Sum the parts of <C, dC> + <n, dn>.
    state_tile = tl.arange(0, STATES)
    flows += n.to(tl.int64) * (chunks + 1) * state_tiles + state_tile
    leaves = tl.sum(tl.load(flows + (c + 1) * state_tiles, state_tile < state_tiles, 0.0), 0)
    reaches = tl.zeros((BT,), tl.float32) + leaves
    segment = tl.zeros((BT,), tl.int32)
    if segments is not None:
        segment = tl.load(segments + base + j)
        reaches = tl.where(segment == tl.load(segments + base + BT - 1), reaches, 0.0)
    if EXP:
        g = tl.load(ahead + tl.program_id(0))  # gradient of the m after this chunk
        if dm_out is not None:
            end = tl.sum(tl.load(flows + chunks * state_tiles, state_tile < state_tiles, 0.0), 0)
            passes = tl.load(ahead + tl.num_programs(0) + tl.program_id(0))
            g += tl.where(passes > 0.0, finite(tl.load(dm_out + n), faults) - end, 0.0)
        dm = load_plane(factors, D_M, plane, base, j) + tl.where(j == BT - 1, g, 0.0)
        read += dm
        # A token whose e equals x attains the maximum x, also for the tokens after it until the maximum or the segment
        # changes.
        made = load_plane(gates, E, plane, base, j) == load_plane(gates, X, plane, base, j)
        after = tl.minimum(j + 1, BT - 1)
        ends = load_plane(gates, E, plane, base, after) == load_plane(gates, X, plane, base, after)
        if segments is not None:
            ends = ends | (segment != tl.load(segments + base + after))
        run = tl.cumsum(ends.to(tl.int32), 0)
        dlog_i += tl.where(made, sums(run, dm, True), 0.0)
    if dm0 is not None:
        if c == 0:
            enters = tl.sum(tl.load(flows, state_tile < state_tiles, 0.0), 0)
            if EXP:
                enters += tl.load(links + n * chunks) + tl.load(links + tl.num_programs(0) + n * chunks) * g
            tl.store(dm0 + n, enters)
    dlog_f = sums(segment, read - dlog_i, segments is not None) + reaches
    if i is not None and not EXP:
        raw = tl.load(start(i, n, H, c, S, ib, js, ih, REVERSE, BT) + sign * j * js, is_t, 0.0).to(tl.float32)
        dlog_i *= reciprocal(1.0 + exp(tl.minimum(raw, MAX_EXPONENT)))
    if i is not None:
        raw = tl.load(start(f, n, H, c, S, fb, fs, fh, REVERSE, BT) + sign * j * fs, is_t, 0.0).to(tl.float32)
        dlog_f *= reciprocal(1.0 + exp(tl.minimum(raw, MAX_EXPONENT)))
    to = start(0, n, H, c, S, tl.cast(S, tl.int64) * H, H, 1, REVERSE, BT) + sign * j * H
    if i is None:  # The decay of a first token has no effect, so its gradient is zero up to rounding errors.
        if segments is not None:
            before = tl.load(segments + base + tl.maximum(j - 1, 0))
            dlog_f = tl.where(segment == tl.where(j == 0, 0, before), dlog_f, 0.0)
        if FRESH:
            dlog_f = tl.where((j == 0) & (j == c), 0.0, dlog_f)
    if di is not None:
        tl.store(di + to, dlog_i, is_t)
    tl.store(df + to, dlog_f, is_t)
