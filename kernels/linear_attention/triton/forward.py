"""Forward kernels: sums of decays, weights between tokens, the delta rule's system, states before chunks, outputs."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.linear_attention.triton.tensors import (
    AFTER,
    BEFORE,
    WHOLE,
    across_halves,
    between,
    cut,
    exponents,
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
def _inverse(A):
    """Return (I + A)^-1 of a strictly lower triangular A [16, 16], row by row."""
    row = tl.arange(0, 16)
    found = -A
    for t in range(1, 16):
        own = tl.sum(tl.where(row[:, None] == t, found, 0.0), 0)
        own += tl.sum(tl.where(row < t, own, 0.0)[:, None] * tl.where(row[:, None] < t, found, 0.0), 0)
        found = tl.where(row[:, None] == t, own[None, :], found)
    return found + tl.where(row[:, None] == row[None, :], 1.0, 0.0)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def pairs(
    q, k, g, beta, bonus, resets, since, until, blocks, weights, between_keys, solved,
    clean_q, clean_k, clean_g, clean_beta, faults,
    S, H, K: tl.constexpr, qb, qs, qh, kb, ks, kh, gb, gs, gh, bb, bs, bh, scale,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr,
):
    """Compute the weights with which a block of 16 tokens reads its chunk up to itself. A program per block.

    For a delta rule, whose beta is not None, `solved` gets the inverse of the block's diagonal part and, left of it,
    A Diag(beta); between_keys, if given, gets A.

    A decay per key does not factor out of q . k: for earlier blocks it factors at the start of this block. Within the
    block, that is divided into halves four times: what reads is in the second half of a part, and what is read in the
    first, so the decay factors in between, and one tensor holds the factors of both.
    """
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    if g is not None:
        g = chosen(g, clean_g, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    BLOCKS: tl.constexpr = L // 16
    block = tl.program_id(0) % BLOCKS
    at = (tl.program_id(0) // BLOCKS).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = (at // chunks).to(tl.int32)
    tile = (at % chunks).to(tl.int32) * BLOCKS
    nk = n // GROUP
    HK = H // GROUP
    j = tl.arange(0, 16)
    left = S - (tile + block) * 16
    is_t = j < left
    whole = at * BLOCKS
    if since is not None:
        plane = tl.num_programs(0).to(tl.int64) * W * WHOLE
        since += (whole + block) * 16 * W
        until += whole * 16 * W
        blocks += plane + whole * W
    OWN: tl.constexpr = W > 1 or bonus is not None  # the weight with which a token reads itself is no part of the dots
    row = (whole + block) * 16 * L + j[:, None] * L + j[None, :]
    for other in range(block):
        seen = j < S - (tile + other) * 16
        read = tl.zeros((16, 16), tl.float32)
        keys = tl.zeros((16, 16), tl.float32)
        for first in range(0, K, BK):
            d = first + tl.arange(0, BK)
            is_d = inside(d, K, BK)
            a = load_rows(q, nk, HK, tile + block, S, qb, qs, qh, d, is_t, is_d, REVERSE, 16).to(tl.float32)
            b = load_rows(k, nk, HK, tile + block, S, kb, ks, kh, d, is_t, is_d, REVERSE, 16).to(tl.float32)
            c = load_columns(k, nk, HK, tile + other, S, kb, ks, kh, d, seen, is_d, REVERSE, 16).to(tl.float32)
            if W > 1:
                since_start = exp(within_block(since, j, d, is_d, W))
                until_end = tl.load(until + (other * 16 + j)[None, :] * W + d[:, None], is_d[:, None], 0.0)
                apart = tl.zeros((BK,), tl.float32)
                for passed in range(other + 1, block):
                    apart += tl.load(blocks + passed * W + d, is_d, 0.0)
                a *= since_start
                b *= since_start
                c *= exp(until_end + apart[:, None])
            c = operand(c, DOT, PRECISION)
            read += tl.dot(operand(a, DOT, PRECISION), c, input_precision=PRECISION)
            if beta is not None:
                keys += tl.dot(operand(b, DOT, PRECISION), c, input_precision=PRECISION)
        if since is not None and W == 1:
            weight = tl.load(since + j)[:, None] + tl.load(until + other * 16 + j)[None, :]
            weight = exp(weight + between(blocks, other + 1, block, j, is_t, 1))
            read *= weight
            keys *= weight
        tl.store(weights + row + other * 16, operand(read * scale, weights.dtype.element_ty, PRECISION))
        if beta is not None:
            if between_keys is not None:
                tl.store(between_keys + row + other * 16, keys)
            gain = tl.load(start(beta, n, H, tile + other, S, bb, bs, bh, REVERSE, 16) + sign(REVERSE) * j * bs,
                           seen, 0.0).to(tl.float32)
            tl.store(solved + row + other * 16, keys * gain[None, :])
    decays = g
    if g is not None:
        decays = start(g, n, H, tile + block, S, gb, gs, gh, REVERSE, 16)
    marks = resets
    if resets is not None:
        marks = start(resets, n, H, tile + block, S, S, 1, 0, REVERSE, 16)
    read = tl.zeros((16, 16), tl.float32)
    keys = tl.zeros((16, 16), tl.float32)
    own = tl.zeros((16,), tl.float32)
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        is_d = inside(d, K, BK)
        a = load_rows(q, nk, HK, tile + block, S, qb, qs, qh, d, is_t, is_d, REVERSE, 16)
        b = load_rows(k, nk, HK, tile + block, S, kb, ks, kh, d, is_t, is_d, REVERSE, 16)
        if OWN:
            x = a.to(tl.float32) * b.to(tl.float32)
            if bonus is not None:
                x *= tl.load(bonus + (nk % HK) * K + d, is_d, 0.0).to(tl.float32)[None, :]
            own += tl.sum(x, 1)
        if W > 1:
            a, b = a.to(tl.float32), b.to(tl.float32)
            passed = own_decays(decays, marks, left, d, is_d, gs, bonus is not None, REVERSE)
            ahead = tl.zeros((16, BK), tl.float32)
            for level in range(4):
                late = (j >> level & 1)[:, None] == 1
                weight = exp(tl.where(late, passed, ahead))
                within = across_halves(j[:, None], j[None, :], level)
                c = tl.trans(operand(b * weight, DOT, PRECISION))
                dots = tl.dot(operand(a * weight, DOT, PRECISION), c, input_precision=PRECISION)
                read += tl.where(within, dots, 0.0)
                if beta is not None:
                    dots = tl.dot(operand(b * weight, DOT, PRECISION), c, input_precision=PRECISION)
                    keys += tl.where(within, dots, 0.0)
                if level < 3:
                    sibling = sibling_decays(decays, marks, left, d, is_d, gs, level, REVERSE)
                    passed += tl.where(late, sibling, 0.0)
                    ahead += tl.where(late, 0.0, sibling)
        else:
            c = load_columns(k, nk, HK, tile + block, S, kb, ks, kh, d, is_t, is_d, REVERSE, 16)
            c = operand(c, DOT, PRECISION)
            read += tl.dot(operand(a, DOT, PRECISION), c, input_precision=PRECISION)
            if beta is not None:
                keys += tl.dot(operand(b, DOT, PRECISION), c, input_precision=PRECISION)
    if W == 1:
        weight = exp(exponents(decays, marks, left, gs, bonus is not None, REVERSE))
        read *= weight
        keys *= weight
    if OWN:
        read = tl.where(j[:, None] > j[None, :], read, tl.where(j[:, None] == j[None, :], own[:, None], 0.0))
    else:
        read = tl.where(j[:, None] >= j[None, :], read, 0.0)
    tl.store(weights + row + block * 16, operand(read * scale, weights.dtype.element_ty, PRECISION))
    if beta is not None:
        keys = tl.where(j[:, None] > j[None, :], keys, 0.0)
        if between_keys is not None:
            tl.store(between_keys + row + block * 16, keys)
        gain = tl.load(start(beta, n, H, tile + block, S, bb, bs, bh, REVERSE, 16) + sign(REVERSE) * j * bs, is_t, 0.0)
        tl.store(solved + row + block * 16, _inverse(keys * gain.to(tl.float32)[None, :]))


@jit
@no_type_check
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@common.kernel()
@no_type_check
def invert(solved, L: tl.constexpr):
    """Complete (I + A Diag(beta))^-1 from the inverses of its diagonal blocks by forward substitution, in float32.

    A program per chunk.
    """
    j = tl.arange(0, 16)
    solved += tl.program_id(0).to(tl.int64) * L * L + j[:, None] * L + j[None, :]
    DOWN: tl.constexpr = 16 * L
    a = tl.load(solved)
    b = tl.load(solved + DOWN + 16)
    below = -_product(b, _product(tl.load(solved + DOWN), a))
    tl.store(solved + DOWN, below)
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
        tl.store(solved + 2 * DOWN + 16, c_b)
        tl.store(solved + 2 * DOWN, c_a)
        tl.store(solved + 3 * DOWN + 32, d_c)
        tl.store(solved + 3 * DOWN + 16, d_b)
        tl.store(solved + 3 * DOWN, d_a)


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
