"""Backward kernels: gradients of states, values, weights between tokens, keys and queries, and decays.

Let x be the values that keys are written with, e = v - S'^T k, and de the gradient of e, which is also that of v:

    dx = weights^T dy + (keys, decayed) dS        de = solved^T (beta dx)          dweights = dy x^T
    dS' = dS + (queries, decayed)^T dy - of_state^T (beta dx)                      gradient of A: -de x^T

Per channel, the gradient of the log decay at t is the sum over tokens from t on of their reads minus their writes, plus
<S, dS> of the state that leaves the chunk.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.linear_attention.triton.forward import written
from seqblocks.kernels.linear_attention.triton.tensors import (
    AFTER,
    BEFORE,
    WHOLE,
    across_halves,
    between,
    chunk_exponents,
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
from seqblocks.kernels.triton_common import exp, load_tile, operand, tl


@common.kernel(do_not_specialize=["S"])
@no_type_check
def state_gradients(
    q, k, dy, beta, since, until, blocks, through, of_state, weights, C, last, dlast, dC, dx, dstate, flows,
    clean_q, clean_k, clean_dy, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr, qb, qs, qh, kb, ks, kh, gb, gs, gh, bb, bs, bh, scale,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute gradients of states, from the last chunk to the first.

    flows [parts, N, chunks + 1, W]: this program's part of <S, dS> before every chunk and after the last. A decay per
    key has one per channel, with parts over blocks of BV values only.
    """
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    dy = chosen(dy, clean_dy, faults)
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
    N = tl.num_programs(0) // TILES
    chunks = tl.cdiv(S, L)
    j = tl.arange(0, L)
    grad = tl.zeros((BK, BV), tl.float32)
    if dlast is not None:
        grad = finite(tl.load(dlast + wide * K * V + cell, own, 0.0), faults)
    if flows is not None:
        part = block % ACROSS if W > 1 else block
        flows += (part.to(tl.int64) * N + wide) * (chunks + 1) * W
        flow = grad * finite(tl.load(last + wide * K * V + cell, own, 0.0), faults)
        if W > 1:
            tl.store(flows + chunks * W + dk, tl.sum(flow, 1), is_k)
        else:
            tl.store(flows + chunks, tl.sum(flow))
    if since is not None:
        since += wide * chunks * L * W
        until += wide * chunks * L * W
        blocks += wide * chunks * (L // 16) * W
        through += wide * chunks * W
    after = N.to(tl.int64) * AFTER * chunks * (L // 16) * W
    for back in range(chunks):
        c = chunks - 1 - back
        at = wide * chunks + c
        is_t = j < S - c * L
        kept = operand(grad, dC.dtype.element_ty, PRECISION)
        tl.store(dC + at * K * V + cell, kept, own)
        outs = load_rows(dy, n, H, c, S, gb, gs, gh, dv, is_t, is_v, REVERSE, L)
        outs = operand(outs, DOT, PRECISION)
        queries = load_columns(q, n // GROUP, H // GROUP, c, S, qb, qs, qh, dk, is_t, is_k, REVERSE, L)
        queries = queries.to(tl.float32) * scale
        if since is not None:
            queries *= weight_across(since + c * L * W, blocks + c * (L // 16) * W, j, dk, is_k, W)
            if W == 1:
                grad *= exp(tl.load(through + c))
            else:
                grad *= exp(tl.load(through + c * W + dk, is_k, 0.0))[:, None]
        grad += tl.dot(operand(queries, DOT, PRECISION), outs, input_precision=PRECISION)
        if beta is not None:
            keys = load_rows(k, n // GROUP, H // GROUP, c, S, kb, ks, kh, dk, is_t, is_k, REVERSE, L)
            if until is not None:
                keys = keys.to(tl.float32)
                keys *= weight_down(until + c * L * W, blocks + after + c * (L // 16) * W, j, dk, is_k, W)
            x = tl.dot(operand(keys, DOT, PRECISION), kept.to(DOT), input_precision=PRECISION)
            read = tl.load(weights + at * L * L + j[None, :] * L + j[:, None], j[None, :] >= j[:, None], 0.0)
            x += tl.dot(operand(read, DOT, PRECISION), outs, input_precision=PRECISION)
            gain = tl.load(start(beta, n, H, c, S, bb, bs, bh, REVERSE, L) + sign(REVERSE) * j * bs, is_t, 0.0)
            tl.store(dx + (at * L + j)[:, None] * V + dv[None, :], x.to(dx.dtype.element_ty), is_v[None, :])
            x *= gain.to(tl.float32)[:, None]
            read = load_tile(of_state + at * L * K, dk, j * K, is_k, is_t)
            grad -= tl.dot(operand(read, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
        if flows is not None:
            flow = grad * tl.load(C + at * K * V + cell, own, 0.0).to(tl.float32)
            if W > 1:
                tl.store(flows + c * W + dk, tl.sum(flow, 1), is_k)
            else:
                tl.store(flows + c, tl.sum(flow))
    if dstate is not None:
        tl.store(dstate + wide * K * V + cell, grad, own)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def value_gradients(
    k, dy, beta, until, blocks, weights, solved, dx, dC, dv, clean_k, clean_dy, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr, kb, ks, kh, gb, gs, gh, bb, bs, bh,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute gradients of values. A program per chunk and BV values."""
    k = chosen(k, clean_k, faults)
    dy = chosen(dy, clean_dy, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    ACROSS: tl.constexpr = (V + BV - 1) // BV
    at = (tl.program_id(0) // ACROSS).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = tl.program_id(0) // ACROSS // chunks
    c = tl.program_id(0) // ACROSS % chunks
    d = tl.program_id(0) % ACROSS * BV + tl.arange(0, BV)
    is_d = inside(d, V, BV)
    j = tl.arange(0, L)
    is_t = j < S - c * L
    t, s = j[None, :], j[:, None]
    if beta is not None:
        gain = tl.load(start(beta, n, H, c, S, bb, bs, bh, REVERSE, L) + sign(REVERSE) * j * bs, is_t, 0.0)
        x = load_tile(dx + at * L * V, j * V, d, is_t, is_d).to(tl.float32) * gain.to(tl.float32)[:, None]
        read = tl.load(solved + at * L * L + t * L + s, t >= s, 0.0)
        total = tl.dot(operand(read, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
    else:
        if until is not None:
            until += at * L * W
            blocks += ((tl.num_programs(0) // ACROSS).to(tl.int64) * AFTER + at) * (L // 16) * W
        x = load_rows(dy, n, H, c, S, gb, gs, gh, d, is_t, is_d, REVERSE, L)
        read = tl.load(weights + at * L * L + t * L + s, t >= s, 0.0)
        total = tl.dot(operand(read, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
        for first in range(0, K, BK):
            dk = first + tl.arange(0, BK)
            is_k = inside(dk, K, BK)
            b = load_rows(k, n // GROUP, H // GROUP, c, S, kb, ks, kh, dk, is_t, is_k, REVERSE, L)
            if until is not None:
                b = b.to(tl.float32) * weight_down(until, blocks, j, dk, is_k, W)
            state = load_tile(dC + at * K * V, dk * V, d, is_k, is_d)
            total += tl.dot(operand(b, DOT, PRECISION), state.to(DOT), input_precision=PRECISION)
    store_rows(dv, total, n, H, c, S, d, is_t, is_d, V, REVERSE, L)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def weight_gradients(
    v, dy, beta, g, resets, blocks, errors, dx, dv, between_keys, of_queries, of_keys, dbeta,
    clean_v, clean_dy, clean_g, clean_beta, faults,
    S, H, V: tl.constexpr, vb, vs, vh, yb, ys, yh, gb, gs, gh, bb, bs, bh, eb, es, eh, scale,
    BONUS: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, L: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute gradients of the weights between tokens. A program per chunk.

    of_queries [N, T, L]: gradients of the weights, times the scale; of_keys: gradients of a delta rule's A. For a decay
    per head, which is given as g, resets and blocks, they are multiplied by the decay: then they are gradients of q . k
    and of k . k. The same program computes the gradient of beta, e . (dx - A^T de).
    """
    v = chosen(v, clean_v, faults)
    dy = chosen(dy, clean_dy, faults)
    if g is not None:
        g = chosen(g, clean_g, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    at = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    j = tl.arange(0, L)
    is_t = j < S - c * L
    t, s = j[:, None], j[None, :]
    place = at * L * L + t * L + s
    gain = tl.full((L,), 1.0, tl.float32)
    if beta is not None:
        betas = start(beta, n, H, c, S, bb, bs, bh, REVERSE, L) + sign(REVERSE) * j * bs
        gain = tl.load(betas, is_t, 0.0).to(tl.float32)
    read = tl.zeros((L, L), tl.float32)
    keys = tl.zeros((L, L), tl.float32)
    own = tl.zeros((L,), tl.float32)
    if beta is not None:  # a loop of its own: docs/kernels/compiler_faults.md
        for first in range(0, V, BV):
            d = first + tl.arange(0, BV)
            is_d = inside(d, V, BV)
            x = load_tile(errors + at * L * V, d, j * V, is_d, is_t)
            of_x = load_tile(dx + at * L * V, d, j * V, is_d, is_t)
            own += tl.sum(x.to(tl.float32) * of_x.to(tl.float32), 0)
    for first in range(0, V, BV):
        d = first + tl.arange(0, BV)
        is_d = inside(d, V, BV)
        a = load_rows(dy, n, H, c, S, yb, ys, yh, d, is_t, is_d, REVERSE, L)
        if beta is None:
            x = load_columns(v, n, H, c, S, vb, vs, vh, d, is_t, is_d, REVERSE, L)
        else:
            x = load_tile(errors + at * L * V, d, j * V, is_d, is_t)
            b = load_rows(dv, n, H, c, S, eb, es, eh, d, is_t, is_d, REVERSE, L)
            b = operand(b, DOT, PRECISION)
            keys += tl.dot(b, operand(x, DOT, PRECISION), input_precision=PRECISION)
        read += tl.dot(operand(a, DOT, PRECISION), operand(x, DOT, PRECISION), input_precision=PRECISION)
    weight = gain[None, :]
    if blocks is not None:
        decays = g
        if g is not None:
            decays = start(g, n, H, c, S, gb, gs, gh, REVERSE, L)
        marks = resets
        if resets is not None:
            marks = start(resets, n, H, c, S, S, 1, 0, REVERSE, L)
        whole = blocks + (tl.num_programs(0).to(tl.int64) * WHOLE + at) * (L // 16)
        weight *= exp(chunk_exponents(decays, marks, whole, S - c * L, gs, BONUS, REVERSE, L))
    read = tl.where(t >= s, read * weight * scale, 0.0)
    tl.store(of_queries + place, operand(read, of_queries.dtype.element_ty, PRECISION))
    if beta is not None:
        keys = tl.where(t > s, keys, 0.0)
        own -= tl.sum(keys * tl.load(between_keys + place, t > s, 0.0).to(tl.float32), 0)
        to = start(0, n, H, c, S, tl.cast(S, tl.int64) * H, H, 1, REVERSE, L) + sign(REVERSE) * j * H
        tl.store(dbeta + to, own.to(dbeta.dtype.element_ty), is_t)
        tl.store(of_keys + place, operand(-keys * weight, of_keys.dtype.element_ty, PRECISION))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def key_gradients(
    q, k, v, dy, dv, beta, bonus, since, until, blocks, errors, C, dC, of_queries, of_keys,
    dq, dk, dbonus, reads, writes, clean_q, clean_k, clean_v, clean_dy, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, yb, ys, yh, eb, es, eh, bb, bs, bh, scale,
    GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Compute gradients of queries and keys, and each token's contributions to the gradients of exponents.

    For a decay per head, or none. A program per chunk and BK channels. reads, writes [parts, N, T]: contributions of
    the token's decayed reads and of its write, a part for each block of channels. They are separate only with a bonus,
    where a token reads before its own decay; otherwise `reads` holds the difference. dbonus [N, T / 16, K]: only the
    first row of a chunk is written.
    """
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    dy = chosen(dy, clean_dy, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    COLUMNS: tl.constexpr = (K + BK - 1) // BK
    column = tl.program_id(0) % COLUMNS
    at = (tl.program_id(0) // COLUMNS).to(tl.int64)
    every = (tl.num_programs(0) // COLUMNS).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = (at // chunks).to(tl.int32)
    c = (at % chunks).to(tl.int32)
    d = column * BK + tl.arange(0, BK)
    is_d = inside(d, K, BK)
    j = tl.arange(0, L)
    is_t = j < S - c * L
    # Contributions of the state.
    of_q = tl.zeros((L, BK), tl.float32)
    of_read = tl.zeros((L, BK), tl.float32)  # gradient of k through its reads of S' and earlier keys
    of_write = tl.zeros((L, BK), tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        is_e = inside(e, V, BV)
        state = load_tile(C + at * K * V, e, d * V, is_e, is_d).to(DOT)
        outs = load_rows(dy, n, H, c, S, yb, ys, yh, e, is_t, is_e, REVERSE, L)
        of_q += tl.dot(operand(outs, DOT, PRECISION), state, input_precision=PRECISION)
        if beta is not None:
            outs = load_rows(dv, n, H, c, S, eb, es, eh, e, is_t, is_e, REVERSE, L)
            of_read -= tl.dot(operand(outs, DOT, PRECISION), state, input_precision=PRECISION)
        x = written(v, beta, errors, n, H, c, at, S, vb, vs, vh, bb, bs, bh, e, is_t, is_e, V, REVERSE, L)
        state = load_tile(dC + at * K * V, e, d * V, is_e, is_d).to(DOT)
        of_write += tl.dot(operand(x, DOT, PRECISION), state, input_precision=PRECISION)
    of_q *= scale
    if since is not None:
        blocks += at * (L // 16)
        weight = weight_down(since + at * L, blocks + BEFORE * every * (L // 16), j, d, is_d, 1)
        of_q *= weight
        of_read *= weight
        of_write *= weight_down(until + at * L, blocks + AFTER * every * (L // 16), j, d, is_d, 1)
    # Contributions within the chunk, without the token itself, whose reads and writes cancel.
    a = load_rows(q, n // GROUP, H // GROUP, c, S, qb, qs, qh, d, is_t, is_d, REVERSE, L)
    b = load_rows(k, n // GROUP, H // GROUP, c, S, kb, ks, kh, d, is_t, is_d, REVERSE, L)
    keys = operand(b, DOT, PRECISION)
    down, along = j[:, None], j[None, :]
    row = at * L * L + down * L + along
    across = at * L * L + along * L + down
    read = operand(tl.load(of_queries + row, down > along, 0.0), DOT, PRECISION)
    of_q += tl.dot(read, keys, input_precision=PRECISION)
    read = operand(tl.load(of_queries + across, along > down, 0.0), DOT, PRECISION)
    of_write += tl.dot(read, operand(a, DOT, PRECISION), input_precision=PRECISION)
    if beta is not None:
        read = operand(tl.load(of_keys + row, down > along, 0.0), DOT, PRECISION)
        of_read += tl.dot(read, keys, input_precision=PRECISION)
        read = operand(tl.load(of_keys + across, along > down, 0.0), DOT, PRECISION)
        of_write += tl.dot(read, keys, input_precision=PRECISION)
    a, b = a.to(tl.float32), b.to(tl.float32)
    if reads is not None:
        read = a * of_q + b * of_read
        place = (column * every + at) * L + j
        if bonus is None:
            read -= b * of_write
        else:
            tl.store(writes + place, tl.sum(b * of_write, 1))
        tl.store(reads + place, tl.sum(read, 1))
    # Contributions of the token to itself, which do not depend on the decay.
    read = tl.load(of_queries + at * L * L + j * L + j).to(tl.float32)[:, None]
    if bonus is not None:
        tl.store(dbonus + at * (L // 16) * K + d, tl.sum(read * a * b, 0), is_d)
        read *= tl.load(bonus + (n // GROUP % (H // GROUP)) * K + d, is_d, 0.0).to(tl.float32)[None, :]
    of_q += read * b
    of_write += read * a
    store_rows(dq, of_q, n, H, c, S, d, is_t, is_d, K, REVERSE, L)
    store_rows(dk, of_read + of_write, n, H, c, S, d, is_t, is_d, K, REVERSE, L)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def key_gradients_per_key(
    q, k, v, dy, dv, g, resets, beta, bonus, since, until, blocks, errors, C, dC, of_queries, of_keys,
    dq, dk, dbonus, reads, writes, clean_q, clean_k, clean_v, clean_dy, clean_g, clean_beta, faults,
    S, H, K: tl.constexpr, V: tl.constexpr,
    qb, qs, qh, kb, ks, kh, vb, vs, vh, yb, ys, yh, eb, es, eh, gb, gs, gh, bb, bs, bh, scale,
    W: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """Do the same as `key_gradients` for a decay per key. A program per block of 16 tokens and BK channels.

    reads, writes [N, T, W].
    """
    q = chosen(q, clean_q, faults)
    k = chosen(k, clean_k, faults)
    v = chosen(v, clean_v, faults)
    dy = chosen(dy, clean_dy, faults)
    if g is not None:
        g = chosen(g, clean_g, faults)
    if beta is not None:
        beta = chosen(beta, clean_beta, faults)
    BLOCKS: tl.constexpr = L // 16
    COLUMNS: tl.constexpr = (K + BK - 1) // BK
    column = tl.program_id(0) % COLUMNS
    block = tl.program_id(0) // COLUMNS % BLOCKS
    at = (tl.program_id(0) // COLUMNS // BLOCKS).to(tl.int64)
    chunks = tl.cdiv(S, L)
    n = (at // chunks).to(tl.int32)
    tile = (at % chunks).to(tl.int32) * BLOCKS
    nk = n // GROUP
    HK = H // GROUP
    d = column * BK + tl.arange(0, BK)
    is_d = inside(d, K, BK)
    j = tl.arange(0, 16)
    left = S - (tile + block) * 16
    is_t = j < left
    own_tile = at * BLOCKS + block
    every = (tl.num_programs(0) // COLUMNS).to(tl.int64)
    a = load_rows(q, nk, HK, tile + block, S, qb, qs, qh, d, is_t, is_d, REVERSE, 16).to(tl.float32)
    b = load_rows(k, nk, HK, tile + block, S, kb, ks, kh, d, is_t, is_d, REVERSE, 16).to(tl.float32)
    # Contributions of the state.
    of_q = tl.zeros((16, BK), tl.float32)
    of_read = tl.zeros((16, BK), tl.float32)  # gradient of k through its reads of S' and earlier keys
    of_write = tl.zeros((16, BK), tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        is_e = inside(e, V, BV)
        state = load_tile(C + at * K * V, e, d * V, is_e, is_d).to(DOT)
        outs = load_rows(dy, n, H, tile + block, S, yb, ys, yh, e, is_t, is_e, REVERSE, 16)
        of_q += tl.dot(operand(outs, DOT, PRECISION), state, input_precision=PRECISION)
        if beta is not None:
            outs = load_rows(dv, n, H, tile + block, S, eb, es, eh, e, is_t, is_e, REVERSE, 16)
            of_read -= tl.dot(operand(outs, DOT, PRECISION), state, input_precision=PRECISION)
        x = written(v, beta, errors, n, H, tile + block, own_tile, S, vb, vs, vh, bb, bs, bh, e, is_t, is_e, V,
                    REVERSE, 16)
        state = load_tile(dC + at * K * V, e, d * V, is_e, is_d).to(DOT)
        of_write += tl.dot(operand(x, DOT, PRECISION), state, input_precision=PRECISION)
    of_q *= scale
    chunk_blocks = blocks + at * BLOCKS * W
    weight = weight_down(since + at * L * W, chunk_blocks + BEFORE * every * W, block * 16 + j, d, is_d, W)
    of_q *= weight
    of_read *= weight
    of_write *= weight_down(until + at * L * W, chunk_blocks + AFTER * every * W, block * 16 + j, d, is_d, W)
    whole = chunk_blocks + WHOLE * every * W
    # Contributions of other blocks of the chunk.
    row = at * L * L + (block * 16 + j)[:, None] * L + j[None, :]
    across = at * L * L + j[None, :] * L + (block * 16 + j)[:, None]
    earlier_q = tl.zeros((16, BK), tl.float32)
    earlier_k = tl.zeros((16, BK), tl.float32)
    for other in range(block):
        seen = j < S - (tile + other) * 16
        c = load_rows(k, nk, HK, tile + other, S, kb, ks, kh, d, seen, is_d, REVERSE, 16).to(tl.float32)
        inner = within_block(until + (at * BLOCKS + other) * 16 * W, j, d, is_d, W)
        c *= exp(inner + between(whole, other + 1, block, d, is_d, W))
        c = operand(c, DOT, PRECISION)
        read = operand(tl.load(of_queries + row + other * 16), DOT, PRECISION)
        earlier_q += tl.dot(read, c, input_precision=PRECISION)
        if beta is not None:
            read = operand(tl.load(of_keys + row + other * 16), DOT, PRECISION)
            earlier_k += tl.dot(read, c, input_precision=PRECISION)
    later = tl.zeros((16, BK), tl.float32)
    for other in range(block + 1, BLOCKS):
        seen = j < S - (tile + other) * 16
        c = load_rows(q, nk, HK, tile + other, S, qb, qs, qh, d, seen, is_d, REVERSE, 16).to(tl.float32)
        inner = within_block(since + (at * BLOCKS + other) * 16 * W, j, d, is_d, W)
        weight = exp(inner + between(whole, block + 1, other, d, is_d, W))
        read = operand(tl.load(of_queries + across + other * 16 * L), DOT, PRECISION)
        later += tl.dot(read, operand(c * weight, DOT, PRECISION), input_precision=PRECISION)
        if beta is not None:
            c = load_rows(k, nk, HK, tile + other, S, kb, ks, kh, d, seen, is_d, REVERSE, 16).to(tl.float32)
            read = operand(tl.load(of_keys + across + other * 16 * L), DOT, PRECISION)
            later += tl.dot(read, operand(c * weight, DOT, PRECISION), input_precision=PRECISION)
    weight = exp(within_block(since + own_tile * 16 * W, j, d, is_d, W))
    earlier_q *= weight
    earlier_k *= weight
    later *= exp(within_block(until + own_tile * 16 * W, j, d, is_d, W))
    of_q += earlier_q
    of_read += earlier_k
    of_write += later
    # Contributions within the block, without the token itself, whose reads and writes cancel.
    decays = start(g, n, H, tile + block, S, gb, gs, gh, REVERSE, 16)
    marks = resets
    if resets is not None:
        marks = start(resets, n, H, tile + block, S, S, 1, 0, REVERSE, 16)
    passed = own_decays(decays, marks, j, left, d, is_d, gs, bonus is not None, REVERSE)
    ahead = tl.zeros((16, BK), tl.float32)
    for level in range(4):
        late = (j >> level & 1)[:, None] == 1
        weight = exp(tl.where(late, passed, ahead))
        down = across_halves(j[:, None], j[None, :], level)
        along = across_halves(j[None, :], j[:, None], level)
        c = operand(b * weight, DOT, PRECISION)
        read = operand(tl.load(of_queries + row + block * 16, down, 0.0), DOT, PRECISION)
        of_q += weight * tl.dot(read, c, input_precision=PRECISION)
        read = operand(tl.load(of_queries + across + block * 16 * L, along, 0.0), DOT, PRECISION)
        x = tl.dot(read, operand(a * weight, DOT, PRECISION), input_precision=PRECISION)
        if beta is not None:
            read = operand(tl.load(of_keys + row + block * 16, down, 0.0), DOT, PRECISION)
            of_read += weight * tl.dot(read, c, input_precision=PRECISION)
            read = operand(tl.load(of_keys + across + block * 16 * L, along, 0.0), DOT, PRECISION)
            x += tl.dot(read, c, input_precision=PRECISION)
        of_write += weight * x
        if level < 3:
            sibling = sibling_decays(decays, marks, j, left, d, is_d, gs, level, REVERSE)
            passed += tl.where(late, sibling, 0.0)
            ahead += tl.where(late, 0.0, sibling)
    read = a * of_q + b * of_read
    place = (own_tile * 16 + j)[:, None] * W + d[None, :]
    if bonus is None:
        read -= b * of_write
    else:
        tl.store(writes + place, b * of_write, is_d[None, :])
    tl.store(reads + place, read, is_d[None, :])
    # Contributions of the token to itself, which do not depend on the decay.
    read = tl.load(of_queries + at * L * L + (block * 16 + j) * L + block * 16 + j).to(tl.float32)[:, None]
    if bonus is not None:
        tl.store(dbonus + own_tile * K + d, tl.sum(read * a * b, 0), is_d)
        read *= tl.load(bonus + (nk % HK) * K + d, is_d, 0.0).to(tl.float32)[None, :]
    of_q += read * b
    of_write += read * a
    store_rows(dq, of_q, n, H, tile + block, S, d, is_t, is_d, K, REVERSE, 16)
    store_rows(dk, of_read + of_write, n, H, tile + block, S, d, is_t, is_d, K, REVERSE, 16)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def decay_gradients(
    resets, reads, writes, flows, dg, S, H, parts, flow_parts,
    FRESH: tl.constexpr, W: tl.constexpr, REVERSE: tl.constexpr, L: tl.constexpr, BD: tl.constexpr,
):
    """Compute gradients of decays, from the last token to the first. A program per chunk and BD channels.

    The decay of a token that begins a sequence has no effect: a token at a reset, and the first one if no state is
    given (FRESH).
    """
    chunks = tl.cdiv(S, L)
    n = tl.program_id(0) // chunks
    c = tl.program_id(0) % chunks
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    is_d = inside(d, W, BD)
    at = tl.program_id(0).to(tl.int64)
    plane = tl.num_programs(0).to(tl.int64) * L * W
    flow_plane = (tl.num_programs(0) // chunks).to(tl.int64) * (chunks + 1) * W
    marks = resets
    if resets is not None:
        marks = start(resets, n, H, c, S, S, 1, 0, REVERSE, L)
    to = start(dg, n, H, c, S, tl.cast(S, tl.int64) * H * W, H * W, W, REVERSE, L) + d
    total = tl.zeros((BD,), tl.float32)
    for part in range(flow_parts):
        total += tl.load(flows + part * flow_plane + (n.to(tl.int64) * (chunks + 1) + c + 1) * W + d, is_d, 0.0)
    for back in range(L):
        t = L - 1 - back
        exists = t < S - c * L
        place = (at * L + t) * W + d
        read = tl.zeros((BD,), tl.float32)
        wrote = tl.zeros((BD,), tl.float32)
        for part in range(parts):
            read += tl.load(reads + part * plane + place, is_d, 0.0)
            if writes is not None:
                wrote += tl.load(writes + part * plane + place, is_d, 0.0)
        if writes is None:
            total += read
        else:
            total -= wrote
        begins = 0
        if resets is not None:
            begins = tl.load(marks + sign(REVERSE) * t, exists, 0).to(tl.int32)
        found = tl.where(begins == 0, total, 0.0)
        if FRESH:
            found = tl.where(c + t == 0, 0.0, found)
        tl.store(to + sign(REVERSE) * t * H * W, found.to(dg.dtype.element_ty), where(d, W, exists))
        if writes is not None:
            total += read
        if resets is not None:
            total = tl.where(begins == 0, total, 0.0)
