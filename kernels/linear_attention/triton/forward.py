"""Forward kernels: sums of decays, weights between tokens, the delta rule's system, states before chunks, outputs."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.linear_attention.triton.tensors import (
    AFTER,
    BEFORE,
    WHOLE,
    across_halves,
    chunk_exponents,
    cut,
    own_decays,
    sibling_decays,
    sign,
    weight_across,
    weight_down,
    where,
    within_block,
)
from seqblocks.kernels.mlstm.triton.tensors import inside, load_columns, load_rows, start, store_rows
from seqblocks.kernels.resets.nonfinite_triton import chosen, finite
from seqblocks.kernels.triton_common import exp, jit, load_tile, operand, tl


@common.kernel(do_not_specialize=["S"])
@no_type_check
def sums(
    g, resets, since, until, blocks, through, clean_g, faults,
    S, H, gb, gs, gh, W: tl.constexpr, BONUS: tl.constexpr, REVERSE: tl.constexpr, L: tl.constexpr, BD: tl.constexpr,
):
    """Compute sums of decays. Tokens are added one by one, so that sums have one sign and few terms.

    A program per chunk and BD channels.
    """
    if g is not None:
        g = chosen(g, clean_g, faults)
    chunks = tl.cdiv(S, L)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    is_d = inside(d, W, BD)
    at = tl.program_id(0).to(tl.int64)
    plane = tl.num_programs(0).to(tl.int64) * (L // 16) * W
    since += at * L * W + d
    until += at * L * W + d
    blocks += at * (L // 16) * W + d
    decays = g
    if g is not None:
        decays = start(g, n, H, c, S, gb, gs, gh, REVERSE, L)
    marks = resets
    if resets is not None:
        marks = start(resets, n, H, c, S, S, 1, 0, REVERSE, L)
    left = S - c * L
    total = tl.zeros((BD,), tl.float32)
    for block in range(L // 16):
        tl.store(blocks + plane * BEFORE + block * W, total, is_d)
        inner = tl.zeros((BD,), tl.float32)
        for x in tl.static_range(16):
            t = block * 16 + x
            decay = tl.zeros((BD,), tl.float32)
            if g is not None:
                decay = tl.load(decays + sign(REVERSE) * t * gs + d, where(d, W, t < left), 0.0).to(tl.float32)
            if resets is not None:
                inner += cut(marks + sign(REVERSE) * t, t < left)
            if BONUS:
                tl.store(since + t * W, inner, is_d)
                inner += decay
            else:
                inner += decay
                tl.store(since + t * W, inner, is_d)
        tl.store(blocks + plane * WHOLE + block * W, inner, is_d)
        total += inner
    tl.store(through + at * W + d, total, is_d)
    total = tl.zeros((BD,), tl.float32)
    for back in range(L // 16):
        block = L // 16 - 1 - back
        tl.store(blocks + plane * AFTER + block * W, total, is_d)
        inner = tl.zeros((BD,), tl.float32)
        for y in tl.static_range(16):
            t = block * 16 + 15 - y
            tl.store(until + t * W, inner, is_d)
            if g is not None:
                inner += tl.load(decays + sign(REVERSE) * t * gs + d, where(d, W, t < left), 0.0).to(tl.float32)
            if resets is not None:
                inner += cut(marks + sign(REVERSE) * t, t < left)
        total += inner


@jit
@no_type_check
def _add_halves(
    read, keys, a, b, passed, ahead, j, level, DELTA: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add what second halves of parts of 2^(level + 1) tokens read of the first: dots that decay where the halves meet.

    One tensor holds the factors of both: of what is read in the first halves, of what reads in the second.
    """
    weight = exp(tl.where((j >> level & 1)[:, None] == 1, passed, ahead))
    within = (j[:, None] ^ j[None, :]) >> level == 1  # above the diagonal, `pairs` drops what this lets through
    b = operand(b * weight, DOT, PRECISION)
    dots = tl.dot(operand(a * weight, DOT, PRECISION), tl.trans(b), input_precision=PRECISION)
    read += tl.where(within, dots, 0.0)
    if DELTA:
        dots = tl.dot(b, tl.trans(b), input_precision=PRECISION)
        keys += tl.where(within, dots, 0.0)
    return read, keys


@common.kernel(do_not_specialize=["S"])
@no_type_check
def pairs(
    q, k, g, beta, bonus, resets, since, until, blocks, weights, between_keys, solved,
    clean_q, clean_k, clean_g, clean_beta, faults,
    S, H, K: tl.constexpr, qb, qs, qh, kb, ks, kh, gb, gs, gh, bb, bs, bh, scale,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr,
):
    """Compute the weights with which the tokens of a chunk read it up to themselves. A program per chunk.

    For a delta rule, whose beta is not None, `solved` gets A Diag(beta); between_keys, if given, gets A.

    A decay per key does not factor out of q . k. The chunk is divided into halves again and again: what reads is in the
    second half of a part, and what is read in the first, so the decay factors in between.
    """
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    if g is not None:
        g = chosen(g, clean_g, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    chunks = tl.cdiv(S, L)
    at = tl.program_id(0).to(tl.int64)
    n = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    nk = n // GROUP
    HK = H // GROUP
    j = tl.arange(0, L)
    left = S - chunk * L
    is_t = j < left
    decays = g
    if g is not None:
        decays = start(g, n, H, chunk, S, gb, gs, gh, REVERSE, L)
    marks = resets
    if resets is not None:
        marks = start(resets, n, H, chunk, S, S, 1, 0, REVERSE, L)
    if since is not None:
        since += at * L * W
        until += at * L * W
        blocks += (tl.num_programs(0).to(tl.int64) * WHOLE + at) * (L // 16) * W
    OWN: tl.constexpr = W > 1 or bonus is not None  # the weight with which a token reads itself is no part of the dots
    read = tl.zeros((L, L), tl.float32)
    keys = tl.zeros((L, L), tl.float32)
    own = tl.zeros((L,), tl.float32)
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        is_d = inside(d, K, BK)
        a = load_rows(q, nk, HK, chunk, S, qb, qs, qh, d, is_t, is_d, REVERSE, L)
        b = load_rows(k, nk, HK, chunk, S, kb, ks, kh, d, is_t, is_d, REVERSE, L)
        if OWN:
            x = a.to(tl.float32) * b.to(tl.float32)
            if bonus is not None:
                x *= tl.load(bonus + (nk % HK) * K + d, is_d, 0.0).to(tl.float32)[None, :]
            own += tl.sum(x, 1)
        if W > 1:
            a, b = a.to(tl.float32), b.to(tl.float32)
            passed = own_decays(decays, marks, j, left, d, is_d, gs, bonus is not None, REVERSE)
            ahead = tl.zeros((L, BK), tl.float32)
            for level in range(4):
                read, keys = _add_halves(
                    read, keys, a, b, passed, ahead, j, level, beta is not None, DOT, PRECISION)
                if level < 3:
                    late = (j >> level & 1)[:, None] == 1
                    sibling = sibling_decays(decays, marks, j, left, d, is_d, gs, level, REVERSE)
                    passed += tl.where(late, sibling, 0.0)
                    ahead += tl.where(late, 0.0, sibling)
            passed = within_block(since, j, d, is_d, W)
            ahead = within_block(until, j, d, is_d, W)
            read, keys = _add_halves(read, keys, a, b, passed, ahead, j, 4, beta is not None, DOT, PRECISION)
            if L == 64:
                late = (j >> 4 & 1)[:, None] == 1
                sibling = within_block(blocks, j // 16 ^ 1, d, is_d, W)
                passed += tl.where(late, sibling, 0.0)
                ahead += tl.where(late, 0.0, sibling)
                read, keys = _add_halves(read, keys, a, b, passed, ahead, j, 5, beta is not None, DOT, PRECISION)
        else:
            c = load_columns(k, nk, HK, chunk, S, kb, ks, kh, d, is_t, is_d, REVERSE, L)
            c = operand(c, DOT, PRECISION)
            read += tl.dot(operand(a, DOT, PRECISION), c, input_precision=PRECISION)
            if beta is not None:
                keys += tl.dot(operand(b, DOT, PRECISION), c, input_precision=PRECISION)
    if since is not None and W == 1:
        weight = exp(chunk_exponents(decays, marks, blocks, left, gs, bonus is not None, REVERSE, L))
        read *= weight
        keys *= weight
    place = at * L * L + j[:, None] * L + j[None, :]
    if OWN:
        read = tl.where(j[:, None] > j[None, :], read, tl.where(j[:, None] == j[None, :], own[:, None], 0.0))
    else:
        read = tl.where(j[:, None] >= j[None, :], read, 0.0)
    tl.store(weights + place, operand(read * scale, weights.dtype.element_ty, PRECISION))
    if beta is not None:
        keys = tl.where(j[:, None] > j[None, :], keys, 0.0)
        if between_keys is not None:
            tl.store(between_keys + place, keys.to(between_keys.dtype.element_ty))
        gain = tl.load(start(beta, n, H, chunk, S, bb, bs, bh, REVERSE, L) + sign(REVERSE) * j * bs, is_t, 0.0)
        tl.store(solved + place, keys * gain.to(tl.float32)[None, :])


@jit
@no_type_check
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@common.kernel()
@no_type_check
def invert(solved, inverse, L: tl.constexpr):
    """Replace A Diag(beta) by the part of (I + A Diag(beta))^-1 up to the diagonal, in float32. A program per chunk.

    With `inverse`, the result is stored there in its dtype, with zeros above the diagonal, and `solved` is scratch. The
    inverses of two halves are joined by the block between them: within blocks of 16 tokens from single tokens on, then
    those blocks.
    """
    j = tl.arange(0, 16)
    DOWN: tl.constexpr = 16 * L
    block = tl.arange(0, L // 16)[:, None, None]
    down, along = j[None, :, None], j[None, None, :]
    solved += tl.program_id(0).to(tl.int64) * L * L
    corner = block * (DOWN + 16) + down * L + along
    A = tl.load(solved + corner)
    found = tl.where(down == along, 1.0, -tl.where(across_halves(down, along, 0), A, 0.0))
    for level in range(1, 4):
        part = tl.where(across_halves(down, along, level), A, 0.0)
        found -= _product(_product(found, part), found)
    tl.store(solved + corner, found)
    tl.debug_barrier()  # Other threads read what was written above.
    cell = j[:, None] * L + j[None, :]
    if inverse is None:
        to = solved + cell
    else:
        to = inverse + tl.program_id(0).to(tl.int64) * L * L
        tl.store(to + corner, found.to(inverse.dtype.element_ty))
        to += cell
        nothing = tl.zeros((16, 16), inverse.dtype.element_ty)
        for row in tl.static_range(L // 16):
            for column in tl.static_range(row + 1, L // 16):
                tl.store(to + row * DOWN + column * 16, nothing)
    solved += cell
    a = tl.load(solved)
    b = tl.load(solved + DOWN + 16)
    below = -_product(b, _product(tl.load(solved + DOWN), a))
    tl.store(to + DOWN, below.to(to.dtype.element_ty))
    if L == 64:
        c = tl.load(solved + 2 * DOWN + 32)
        d = tl.load(solved + 3 * DOWN + 48)
        at_b = tl.load(solved + 2 * DOWN + 16)
        c_b = -_product(c, _product(at_b, b))
        c_a = -_product(c, _product(tl.load(solved + 2 * DOWN), a) + _product(at_b, below))
        at_b = tl.load(solved + 3 * DOWN + 16)
        at_c = tl.load(solved + 3 * DOWN + 32)
        d_c = -_product(d, _product(at_c, c))
        d_b = -_product(d, _product(at_b, b) + _product(at_c, c_b))
        d_a = _product(tl.load(solved + 3 * DOWN), a) + _product(at_b, below)
        d_a = -_product(d, d_a + _product(at_c, c_a))
        tl.store(to + 2 * DOWN + 16, c_b.to(to.dtype.element_ty))
        tl.store(to + 2 * DOWN, c_a.to(to.dtype.element_ty))
        tl.store(to + 3 * DOWN + 32, d_c.to(to.dtype.element_ty))
        tl.store(to + 3 * DOWN + 16, d_b.to(to.dtype.element_ty))
        tl.store(to + 3 * DOWN, d_a.to(to.dtype.element_ty))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def solve(
    k, v, since, blocks, solved, of_state, given, clean_k, clean_v, faults,
    S, H, K: tl.constexpr, V: tl.constexpr, kb, ks, kh, vb, vs, vh, W: tl.constexpr, GROUP: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Multiply the inverse of the system by the decayed keys (of_state) and, if `given` is not None, by the values.

    A program per chunk.
    """
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    chunks = tl.cdiv(S, L)
    at = tl.program_id(0).to(tl.int64)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    j = tl.arange(0, L)
    is_t = j < S - c * L
    t, s = j[:, None], j[None, :]
    found = operand(tl.load(solved + at * L * L + t * L + s, t >= s, 0.0), DOT, PRECISION)
    if since is not None:
        since += at * L * W
        blocks += at * (L // 16) * W
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        is_d = inside(d, K, BK)
        b = load_rows(k, n // GROUP, H // GROUP, c, S, kb, ks, kh, d, is_t, is_d, REVERSE, L)
        if since is not None:
            b = b.to(tl.float32) * weight_down(since, blocks, j, d, is_d, W)
        b = tl.dot(found, operand(b, DOT, PRECISION), input_precision=PRECISION)
        tl.store(of_state + (at * L + j)[:, None] * K + d[None, :],
                 operand(b, of_state.dtype.element_ty, PRECISION), is_d[None, :])
    if given is not None:
        for first in range(0, V, BV):
            d = first + tl.arange(0, BV)
            is_d = inside(d, V, BV)
            b = load_rows(v, n, H, c, S, vb, vs, vh, d, is_t, is_d, REVERSE, L)
            b = tl.dot(found, operand(b, DOT, PRECISION), input_precision=PRECISION)
            tl.store(given + (at * L + j)[:, None] * V + d[None, :], b.to(given.dtype.element_ty), is_d[None, :])


@common.kernel(do_not_specialize=["S"])
@no_type_check
def states(
    k, v, beta, state, until, blocks, through, of_state, errors, C, last, clean_k, clean_v, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr, kb, ks, kh, vb, vs, vh, bb, bs, bh,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute the states before every chunk and after the last.

    For a delta rule, whose programs hold all of K, replace the values from `solve` in errors by v - S'^T k. A program
    per block of the state, which stays in registers.
    """
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    ACROSS: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = (K + BK - 1) // BK * ACROSS
    n = tl.program_id(0) // TILES
    block = tl.program_id(0) % TILES
    dk = block // ACROSS * BK + tl.arange(0, BK)
    dv = block % ACROSS * BV + tl.arange(0, BV)
    is_k = inside(dk, K, BK)
    is_v = inside(dv, V, BV)
    own = is_k[:, None] & is_v[None, :]
    cell = dk[:, None] * V + dv[None, :]
    wide = n.to(tl.int64)
    chunks = tl.cdiv(S, L)
    j = tl.arange(0, L)
    total = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        total = finite(tl.load(state + wide * K * V + cell, own, 0.0), faults)
    if until is not None:
        until += wide * chunks * L * W
        blocks += ((tl.num_programs(0) // TILES).to(tl.int64) * AFTER + wide) * chunks * (L // 16) * W
        through += wide * chunks * W
    for c in range(chunks):
        at = wide * chunks + c
        kept = operand(total, C.dtype.element_ty, PRECISION)
        tl.store(C + at * K * V + cell, kept, own)
        is_t = j < S - c * L
        if beta is not None:
            gain = tl.load(start(beta, n, H, c, S, bb, bs, bh, REVERSE, L) + sign(REVERSE) * j * bs, is_t, 0.0)
            places = (at * L + j)[:, None]
            read = load_tile(of_state + at * L * K, j * K, dk, is_t, is_k)
            x = tl.load(errors + places * V + dv[None, :], is_v[None, :], 0.0).to(tl.float32)
            x -= tl.dot(operand(read, DOT, PRECISION), kept.to(DOT), input_precision=PRECISION)
            tl.store(errors + places * V + dv[None, :], x.to(errors.dtype.element_ty), is_v[None, :])
            x *= gain.to(tl.float32)[:, None]
        else:
            x = load_rows(v, n, H, c, S, vb, vs, vh, dv, is_t, is_v, REVERSE, L)
        keys = load_columns(k, n // GROUP, H // GROUP, c, S, kb, ks, kh, dk, is_t, is_k, REVERSE, L)
        if until is not None:
            weight = weight_across(until + c * L * W, blocks + c * (L // 16) * W, j, dk, is_k, W)
            keys = keys.to(tl.float32) * weight
            if W == 1:
                total *= exp(tl.load(through + c))
            else:
                total *= exp(tl.load(through + c * W + dk, is_k, 0.0))[:, None]
        total += tl.dot(operand(keys, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
    tl.store(last + wide * K * V + cell, total, own)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def outputs(
    q, v, beta, since, blocks, errors, weights, C, y, clean_q, clean_v, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr, qb, qs, qh, vb, vs, vh, bb, bs, bh, scale,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute the outputs. A program per chunk and BV values."""
    q = chosen(q, clean_q, faults)
    v = chosen(v, clean_v, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    ACROSS: tl.constexpr = (V + BV - 1) // BV
    at = (tl.program_id(0) // ACROSS).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = tl.program_id(0) // ACROSS // chunks
    c = tl.program_id(0) // ACROSS % chunks
    dv = tl.program_id(0) % ACROSS * BV + tl.arange(0, BV)
    is_v = inside(dv, V, BV)
    j = tl.arange(0, L)
    is_t = j < S - c * L
    if since is not None:
        since += at * L * W
        blocks += at * (L // 16) * W
    total = tl.zeros((L, BV), tl.float32)
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        is_d = inside(d, K, BK)
        a = load_rows(q, n // GROUP, H // GROUP, c, S, qb, qs, qh, d, is_t, is_d, REVERSE, L)
        if since is not None and W > 1:
            a = a.to(tl.float32) * weight_down(since, blocks, j, d, is_d, W)
        state = load_tile(C + at * K * V, d * V, dv, is_d, is_v)
        total += tl.dot(operand(a, DOT, PRECISION), state.to(DOT), input_precision=PRECISION)
    total *= scale
    if since is not None and W == 1:
        total *= weight_down(since, blocks, j, j, is_t, 1)
    read = tl.load(weights + at * L * L + j[:, None] * L + j[None, :], j[:, None] >= j[None, :], 0.0)
    x = written(v, beta, errors, n, H, c, at, S, vb, vs, vh, bb, bs, bh, dv, is_t, is_v, V, REVERSE, L)
    total += tl.dot(operand(read, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
    store_rows(y, total, n, H, c, S, dv, is_t, is_v, V, REVERSE, L)


@jit
@no_type_check
def written(
    v, beta, errors, n, H, tile, at, S, vb, vs, vh, bb, bs, bh, d, is_t, is_d, V: tl.constexpr, REVERSE: tl.constexpr,
    BT: tl.constexpr,
):
    """Return the values that keys are written with, one token per row: v, or beta (v - S'^T k) for a delta rule.

    at: index of the tile among those of all heads.
    """
    j = tl.arange(0, BT)
    if beta is None:
        return load_rows(v, n, H, tile, S, vb, vs, vh, d, is_t, is_d, REVERSE, BT)
    else:
        gain = tl.load(start(beta, n, H, tile, S, bb, bs, bh, REVERSE, BT) + sign(REVERSE) * j * bs, is_t, 0.0)
        x = load_tile(errors + at * BT * V, j * V, d, is_t, is_d)
        return x.to(tl.float32) * gain.to(tl.float32)[:, None]
