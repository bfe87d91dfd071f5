"""The forward kernels of the sLSTM: for heads that fit on chip, for heads by tiles of channels, and for teams."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.slstm.triton.cell import (
    F_GATE,
    I_GATE,
    O_GATE,
    Z_GATE,
    advance,
    all_carried,
    carried,
    load_bias,
    load_biases,
    load_gates,
    load_mark,
    load_matrices,
    load_matrix,
    load_state,
    store_kept,
    store_state,
)
from seqblocks.kernels.slstm.triton.teams import arrive, report, wait
from seqblocks.kernels.triton_common import jit, load_tile, operand, tl


@jit
@no_type_check
def _biased(gates, biases):
    i, f, z, o = gates
    bias_i, bias_f, bias_z, bias_o = biases
    return (
        i.to(tl.float32) + bias_i, f.to(tl.float32) + bias_f, z.to(tl.float32) + bias_z, o.to(tl.float32) + bias_o,
    )


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def scan(
    i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, y, states, gates_if, gates_zo, y1, c1, n1, m1,
    S, B, D, ib, js, fb, fs, zb, zs, ob, os,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """Run all tokens with the matrices on chip and the states in registers."""
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    mask = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    into = recurrent + head * D * 4 * D + d[:, None] * (4 * D) + d[None, :]
    to_i, to_f, to_z, to_o = load_matrices(into, D, is_d[:, None] & is_d[None, :], DOT)
    biases = load_biases(bias, H, D, wide, is_d)
    out = tl.load(y0 + cell, mask, 0.0)
    c, n, m = load_state(c0, n0, m0, cell, mask)
    plane = tl.cast(B, tl.int64) * S * H * D
    t = tl.cast(S - 1 if REVERSE else 0, tl.int64)
    mark = load_mark(resets, t, b, is_b, S)
    upcoming = load_gates(i, f, z, o, t, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d)
    for step in range(S):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        xi, xf, xz, xo = _biased(upcoming, biases)
        out, c, n, m = all_carried(out, c, n, m, mark, resets)
        # Loaded one token ahead, because the memory latency is about as long as the rest of a token.
        after = t - 1 if REVERSE else t + 1
        is_after = b < tl.where(step + 1 < S, B, 0)
        mark = load_mark(resets, after, b, is_after, S)
        upcoming = load_gates(i, f, z, o, after, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_after, is_d)
        read = operand(out, DOT, PRECISION)
        xi += tl.dot(read, to_i, input_precision=PRECISION)
        xf += tl.dot(read, to_f, input_precision=PRECISION)
        xz += tl.dot(read, to_z, input_precision=PRECISION)
        xo += tl.dot(read, to_o, input_precision=PRECISION)
        out, c, n, m = advance(xi, xf, xz, xo, c, n, m)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask)
        store_kept(states, gates_if, gates_zo, at, plane, mask, c, n, m, xi, xf, xz, xo)
    tl.store(y1 + cell, out, mask)
    store_state(c1, n1, m1, cell, c, n, m, mask)


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def scan_by_tiles(
    i, f, z, o, recurrent, bias, resets, y, states, gates_if, gates_zo, exchange, y1, c1, n1, m1,
    S, B, D, ib, js, fb, fs, zb, zs, ob, os,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """Run `scan` by tiles of channels.

    y1, c1, n1, m1 hold the current state. exchange [2, B, H, D] alternately holds the outputs of a token and of the
    previous one.
    """
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    is_b = b < B
    row = (b * H + head) * D
    plane = tl.cast(B, tl.int64) * S * H * D
    token = tl.cast(B, tl.int64) * H * D
    for step in range(S):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        before = exchange + (step % 2) * token
        after = exchange + (1 - step % 2) * token
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            mask = is_b[:, None] & is_d[None, :]
            wide = head * D + d
            mark = load_mark(resets, t, b, is_b, S)
            own_i, own_f, own_z, own_o = load_gates(
                i, f, z, o, t, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
            )
            xi = tl.zeros((BB, BD), tl.float32)
            xf = tl.zeros((BB, BD), tl.float32)
            xz = tl.zeros((BB, BD), tl.float32)
            xo = tl.zeros((BB, BD), tl.float32)
            for start in range(0, D, BD):
                k = start + tl.arange(0, BD)
                read = tl.where(mark == 0, load_tile(before, row, k, is_b, k < D), 0.0).to(DOT)
                into = recurrent + head * D * 4 * D + k[:, None] * (4 * D) + d[None, :]
                square = (k < D)[:, None] & is_d[None, :]
                # Loading one matrix at a time saves 24 registers on AMD GPUs.
                xi += tl.dot(read, load_matrix(into, I_GATE, D, square, DOT), input_precision=PRECISION)
                xf += tl.dot(read, load_matrix(into, F_GATE, D, square, DOT), input_precision=PRECISION)
                xz += tl.dot(read, load_matrix(into, Z_GATE, D, square, DOT), input_precision=PRECISION)
                xo += tl.dot(read, load_matrix(into, O_GATE, D, square, DOT), input_precision=PRECISION)
            xi += own_i.to(tl.float32) + load_bias(bias, I_GATE, H, D, wide, is_d)
            xf += own_f.to(tl.float32) + load_bias(bias, F_GATE, H, D, wide, is_d)
            xz += own_z.to(tl.float32) + load_bias(bias, Z_GATE, H, D, wide, is_d)
            xo += own_o.to(tl.float32) + load_bias(bias, O_GATE, H, D, wide, is_d)
            cell = row[:, None] + d[None, :]
            c, n, m = load_state(c1, n1, m1, cell, mask)
            c, n, m = carried(c, mark, resets), carried(n, mark, resets), carried(m, mark, resets)
            out, c, n, m = advance(xi, xf, xz, xo, c, n, m)
            at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
            tl.store(y + at, out.to(y.dtype.element_ty), mask)
            tl.store(after + cell, operand(out, tl.float32, PRECISION), mask)
            tl.store(y1 + cell, out, mask)
            store_state(c1, n1, m1, cell, c, n, m, mask)
            store_kept(states, gates_if, gates_zo, at, plane, mask, c, n, m, xi, xf, xz, xo)
        tl.debug_barrier()  # For the next token, other threads read what was written.


@common.kernel(do_not_specialize=["S", "B", "begin", "end", "first", "polls"])
@no_type_check
def scan_by_team(
    i, f, z, o, recurrent, bias, resets, y, states, gates_if, gates_zo, exchange, arrived, timed_out, y1, c1, n1, m1,
    S, B, H, D, ib, js, fb, fs, zb, zs, ob, os, begin, end, first, polls,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    BU: tl.constexpr,
):
    """Run `scan` by teams (see teams.py). c1, n1, m1 hold the state at `begin`, and afterwards that at `end`."""
    parts = tl.num_programs(0)
    team = first + tl.program_id(1)
    head = (team % H).to(tl.int64)
    b = (team // H).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.program_id(0) * BU + tl.arange(0, BU)
    k = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    mask = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    # [channel of a gate, channel of y], with the four gates one after the other: one product then has 64 rows.
    row = tl.arange(0, 4 * BU)
    channel = tl.program_id(0) * BU + row % BU
    into = recurrent + head * D * 4 * D + (row // BU * D + channel)[:, None] + k[None, :] * (4 * D)
    weights = tl.load(into, (channel < D)[:, None] & (k < D)[None, :], 0.0).to(DOT)
    biases = load_biases(bias, H, D, wide, is_d)
    line = tl.arange(0, BB) * BD
    exchange += tl.cast(team, tl.int64) * (2 * BB * BD)
    arrived += team * 32
    out = tl.zeros((BB, BU), tl.float32)
    c, n, m = load_state(c1, n1, m1, cell, mask)
    plane = tl.cast(B, tl.int64) * S * H * D
    t = tl.cast(S - 1 - begin if REVERSE else begin, tl.int64)
    mark = load_mark(resets, t, b, is_b, S)
    upcoming = load_gates(i, f, z, o, t, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d)
    for step in range(begin, end):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        before = exchange + (step % 2) * (BB * BD)
        after = exchange + (1 - step % 2) * (BB * BD)
        is_later = b < tl.where(step + 1 < S, B, 0)
        # Bypass the L1 cache, which does not see the stores of other programs.
        read = tl.load(before + (line[None, :] + k[:, None]), cache_modifier=".cg")
        if resets is not None:
            c, n, m = carried(c, mark, resets), carried(n, mark, resets), carried(m, mark, resets)
            mark = load_mark(resets, t - 1 if REVERSE else t + 1, b, is_later, S)
        x = tl.dot(weights, read, input_precision=PRECISION)
        x_iz, x_fo = tl.split(tl.permute(tl.reshape(x, (2, 2, BU, BB)), (3, 2, 0, 1)))
        xi, xz = tl.split(x_iz)
        xf, xo = tl.split(x_fo)
        own_i, own_f, own_z, own_o = _biased(upcoming, biases)
        xi += own_i
        xf += own_f
        xz += own_z
        xo += own_o
        out, c, n, m = advance(xi, xf, xz, xo, c, n, m)
        written = operand(carried(out, mark, resets), DOT, PRECISION)
        tl.store(after + (line[:, None] + d[None, :]), written, is_d[None, :])
        if step + 1 < end:
            arrive(arrived)
        # The other programs do not need the following stores.
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask)
        store_kept(states, gates_if, gates_zo, at, plane, mask, c, n, m, xi, xf, xz, xo)
        upcoming = load_gates(
            i, f, z, o, t - 1 if REVERSE else t + 1, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_later, is_d
        )
        if step + 1 < end:
            polls = wait(arrived, parts * (step + 1 - begin), polls)
            c = tl.where(polls > 0, c, float("nan"))
    report(timed_out, polls)
    tl.store(y1 + cell, out, mask)
    store_state(c1, n1, m1, cell, c, n, m, mask)
