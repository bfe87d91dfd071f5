"""The backward kernels of the sLSTM, which run from the last token to the first with transposed matrices."""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.slstm.triton.cell import (
    F_GATE,
    I_GATE,
    M_STATE,
    N_STATE,
    O_GATE,
    Z_GATE,
    advance_gradients,
    all_carried,
    carried,
    live_gradient,
    load_mark,
    load_matrices,
    load_state,
    store_gate_gradients,
    store_state,
    token_gradients,
)
from seqblocks.kernels.slstm.triton.teams import arrive, report, wait
from seqblocks.kernels.triton_common import jit, load_tile, operand, tl


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def scan_backward(
    dy, dy1, dc1, dn1, dm1, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo,
    di, df, dz, do, dy0, dc0, dn0, dm0,
    S, B, D, gb, gs,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """Run all tokens with the matrices on chip and the gradients of the state in registers."""
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    mask = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    # [channel of a gate, channel of y]: loaded transposed
    back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + d[:, None]
    from_i, from_f, from_z, from_o = load_matrices(back, D, is_d[:, None] & is_d[None, :], DOT)
    out = tl.load(dy1 + cell, mask, 0.0)
    c, n, m = load_state(dc1, dn1, dm1, cell, mask)
    plane = tl.cast(B, tl.int64) * S * H * D
    for step in range(S):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        past = at + (H * D if REVERSE else -H * D)
        mark = load_mark(resets, t, b, is_b, S)
        out += load_tile(dy, b * gb + t * gs, wide, is_b, is_d).to(tl.float32)
        gi, gf, gz, go, c, n, m = token_gradients(
            out, c, n, m, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B,
            S - 1 - step, mark,
        )
        store_gate_gradients(di, df, dz, do, at, gi, gf, gz, go, mask)
        out = tl.dot(operand(gi, DOT, PRECISION), from_i, input_precision=PRECISION)
        out += tl.dot(operand(gf, DOT, PRECISION), from_f, input_precision=PRECISION)
        out += tl.dot(operand(gz, DOT, PRECISION), from_z, input_precision=PRECISION)
        out += tl.dot(operand(go, DOT, PRECISION), from_o, input_precision=PRECISION)
        out, c, n, m = all_carried(out, c, n, m, mark, resets)
    tl.store(dy0 + cell, out, mask)
    store_state(dc0, dn0, dm0, cell, c, n, m, mask)


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def scan_backward_by_tiles(
    dy, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo, di, df, dz, do, exchange, dy0, dc0, dn0, dm0,
    S, B, D, gb, gs,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """Run `scan_backward` by tiles of channels.

    dy0, dc0, dn0, dm0 hold the current gradients. exchange [4, B, H, D]: the gradients of a token's gates as
    operands of dots, if these differ from the stored ones.
    """
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    is_b = b < B
    row = (b * H + head) * D
    plane = tl.cast(B, tl.int64) * S * H * D
    for step in range(S):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        line = ((b * S + t) * H + head) * D
        if exchange is not None:
            token = tl.cast(B, tl.int64) * H * D
            read_i, read_f, rows = exchange, exchange + F_GATE * token, row
            read_z, read_o = exchange + Z_GATE * token, exchange + O_GATE * token
        else:
            read_i, read_f, read_z, read_o, rows = di, df, dz, do, line
        mark = load_mark(resets, t, b, is_b, S)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            mask = is_b[:, None] & is_d[None, :]
            cell = row[:, None] + d[None, :]
            at = line[:, None] + d[None, :]
            past = at + (H * D if REVERSE else -H * D)
            out = tl.load(dy0 + cell, mask, 0.0)
            out += load_tile(dy, b * gb + t * gs, head * D + d, is_b, is_d).to(tl.float32)
            c, n, m = load_state(dc0, dn0, dm0, cell, mask)
            gi, gf, gz, go, c, n, m = token_gradients(
                out, c, n, m, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B,
                S - 1 - step, mark,
            )
            store_gate_gradients(di, df, dz, do, at, gi, gf, gz, go, mask)
            if exchange is not None:
                store_gate_gradients(
                    read_i, read_f, read_z, read_o, cell, operand(gi, DOT, PRECISION), operand(gf, DOT, PRECISION),
                    operand(gz, DOT, PRECISION), operand(go, DOT, PRECISION), mask,
                )
            c, n, m = carried(c, mark, resets), carried(n, mark, resets), carried(m, mark, resets)
            store_state(dc0, dn0, dm0, cell, c, n, m, mask)
        tl.debug_barrier()  # The products below need the gradients of all channels.
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            out = tl.zeros((BB, BD), tl.float32)
            for start in range(0, D, BD):
                k = start + tl.arange(0, BD)
                is_k = k < D
                back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + k[:, None]
                from_i, from_f, from_z, from_o = load_matrices(back, D, is_k[:, None] & is_d[None, :], DOT)
                out += tl.dot(load_tile(read_i, rows, k, is_b, is_k).to(DOT), from_i, input_precision=PRECISION)
                out += tl.dot(load_tile(read_f, rows, k, is_b, is_k).to(DOT), from_f, input_precision=PRECISION)
                out += tl.dot(load_tile(read_z, rows, k, is_b, is_k).to(DOT), from_z, input_precision=PRECISION)
                out += tl.dot(load_tile(read_o, rows, k, is_b, is_k).to(DOT), from_o, input_precision=PRECISION)
            tl.store(dy0 + row[:, None] + d[None, :], carried(out, mark, resets), is_b[:, None] & is_d[None, :])
        tl.debug_barrier()


# ------------------------------------------------------------------------------
# By teams (see teams.py)


@jit
@no_type_check
def _load_kept(
    dy, resets, states, gates_if, gates_zo, c0, n0, m0, t, b, d, head, S, B, H, D, gb, gs, is_d, rest,
    REVERSE: tl.constexpr,
):
    """Load dy of token t, its saved gates, the c, n, m before it, and its mark. rest: number of tokens before it."""
    is_b = b < tl.where(rest >= 0, B, 0)
    mask = is_b[:, None] & is_d[None, :]
    mark = load_mark(resets, t, b, is_b, S)
    plane = tl.cast(B, tl.int64) * S * H * D
    at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    past = tl.where(rest > 0, at + (H * D if REVERSE else -H * D), cell)
    return (
        load_tile(dy, b * gb + t * gs, head * D + d, is_b, is_d),
        tl.load(gates_if + at, mask, 0.0), tl.load(gates_if + plane + at, mask, 0.0),
        tl.load(gates_zo + at, mask, 0.0), tl.load(gates_zo + plane + at, mask, 0.0),
        tl.load(tl.where(rest > 0, states, c0) + past, mask, 0.0),
        tl.load(tl.where(rest > 0, states + N_STATE * plane, n0) + past, mask, 1.0),
        tl.load(tl.where(rest > 0, states + M_STATE * plane, m0) + past, mask, 0.0), mark,
    )


@jit
@no_type_check
def _halved(x, N: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr):
    """Return the sum of the first and second half of x [N, BB, BU]."""
    a, b = tl.split(tl.permute(tl.reshape(x, (2, N // 2, BB, BU)), (1, 2, 3, 0)))
    return a + b


@jit
@no_type_check
def _sides(BD: tl.constexpr):
    """Return the operands of eight products, one per warp: which of two gates [8], and its channels [8, BD / 4]."""
    side = tl.arange(0, 8)
    return side // 4, (side % 4 * (BD // 4))[:, None] + tl.arange(0, BD // 4)[None, :]


@jit
@no_type_check
def _load_exchanged(exchange, GATE: tl.constexpr, at, BB: tl.constexpr, BD: tl.constexpr):
    """Load the gradients of a gate from all programs, bypassing the L1 cache."""
    return tl.load(exchange + GATE * BB * BD + at, cache_modifier=".cg")


@jit
@no_type_check
def _through(
    exchange, from_i, from_f, from_z, from_o,
    PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, AHEAD: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Return the gradients [BB, BU] of y for these channels, from the gradients of the gates of all channels.

    AHEAD: all gradients are loaded at once, which requires that they fit on chip. EXACT: the products are computed one
    after the other, which takes the fewest registers without matrix units; otherwise from_i contains the matrices of i
    and f, and from_z those of z and o.
    """
    if EXACT:
        at = (tl.arange(0, BB) * BD)[:, None] + tl.arange(0, BD)[None, :]
        i = _load_exchanged(exchange, I_GATE, at, BB, BD)
        if AHEAD:
            f = _load_exchanged(exchange, F_GATE, at, BB, BD)
            z = _load_exchanged(exchange, Z_GATE, at, BB, BD)
            o = _load_exchanged(exchange, O_GATE, at, BB, BD)
        x = tl.dot(i, from_i, input_precision=PRECISION)
        if not AHEAD:
            f = _load_exchanged(exchange, F_GATE, at, BB, BD)
        x += tl.dot(f, from_f, input_precision=PRECISION)
        if not AHEAD:
            z = _load_exchanged(exchange, Z_GATE, at, BB, BD)
        x += tl.dot(z, from_z, input_precision=PRECISION)
        if not AHEAD:
            o = _load_exchanged(exchange, O_GATE, at, BB, BD)
        x += tl.dot(o, from_o, input_precision=PRECISION)
    else:
        gate, k = _sides(BD)
        at = (gate * (BB * BD))[:, None, None] + (tl.arange(0, BB) * BD)[None, :, None] + k[:, None, :]
        i_f = _load_exchanged(exchange, I_GATE, at, BB, BD)
        if AHEAD:
            z_o = _load_exchanged(exchange, Z_GATE, at, BB, BD)
        x = tl.dot(i_f, from_i, input_precision=PRECISION)
        if not AHEAD:
            z_o = _load_exchanged(exchange, Z_GATE, at, BB, BD)
        x += tl.dot(z_o, from_z, input_precision=PRECISION)
        x = _halved(_halved(x, 8, BB, BU), 4, BB, BU)
        x = tl.reshape(_halved(x, 2, BB, BU), (BB, BU))
    return x


@common.kernel(do_not_specialize=["S", "B", "begin", "end", "first", "polls"])
@no_type_check
def scan_backward_by_team(
    dy, dy1, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo, di, df, dz, do, exchange, arrived,
    timed_out, dy0, dc0, dn0, dm0,
    S, B, H, D, gb, gs, begin, end, first, polls,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    BU: tl.constexpr, AHEAD: tl.constexpr, EXACT: tl.constexpr,
):
    """Run `scan_backward` by teams. Step S has no token and computes dy0.

    dc0, dn0, dm0 hold the gradients at `begin`, and afterwards those at `end`.
    """
    parts = tl.num_programs(0)
    team = first + tl.program_id(1)
    head = (team % H).to(tl.int64)
    b = (team // H).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.program_id(0) * BU + tl.arange(0, BU)
    is_b, is_d = b < B, d < D
    mask = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    # [channel of a gate, channel of y]: loaded transposed
    if EXACT:
        k = tl.arange(0, BD)
        back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + k[:, None]
        from_i, from_f, from_z, from_o = load_matrices(back, D, (k < D)[:, None] & is_d[None, :], DOT)
    else:
        gate, k = _sides(BD)
        back = recurrent + head * D * 4 * D + (gate[:, None] * D + k)[:, :, None] + d[None, None, :] * (4 * D)
        square = (k < D)[:, :, None] & is_d[None, None, :]
        from_i = tl.load(back, square, 0.0).to(DOT)
        from_z = tl.load(back + Z_GATE * D, square, 0.0).to(DOT)
        from_f, from_o = from_i, from_z
    line = tl.arange(0, BB) * BD
    exchange += tl.cast(team, tl.int64) * (8 * BB * BD)
    arrived += team * 32
    dc, dn, dm = load_state(dc0, dn0, dm0, cell, mask)
    late = tl.load(dy1 + cell, (b < tl.where(begin == 0, B, 0))[:, None] & is_d[None, :], 0.0)
    t = tl.cast(begin if REVERSE else S - 1 - begin, tl.int64)
    at_last = ((b * S + t) * H + head)[:, None] * D + d[None, :]
    plane = tl.cast(B, tl.int64) * S * H * D
    now = (b < tl.where(begin < S, B, 0))[:, None] & is_d[None, :]
    c = tl.load(states + at_last, now, 0.0)
    n = tl.load(states + N_STATE * plane + at_last, now, 1.0)
    m = tl.load(states + M_STATE * plane + at_last, now, 0.0)
    next_dy, next_i, next_f, next_z, next_o, old_c, old_n, old_m, mark = _load_kept(
        dy, resets, states, gates_if, gates_zo, c0, n0, m0, t, b, d, head, S, B, H, D, gb, gs, is_d,
        S - 1 - begin, REVERSE,
    )
    out = tl.zeros((BB, BU), tl.float32)
    for step in range(begin, end):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        is_step = b < tl.where(step < S, B, 0)
        step_mask = is_step[:, None] & is_d[None, :]
        before = exchange + (step % 2) * (4 * BB * BD)
        out = _through(before, from_i, from_f, from_z, from_o, PRECISION, BB, BD, BU, AHEAD, EXACT)
        out += late + next_dy.to(tl.float32)
        late = tl.zeros((BB, BU), tl.float32)
        gi, gf, gz, go, of_c, of_n, of_m = advance_gradients(
            out, dc, dn, dm, next_i, next_f, next_z.to(tl.float32), next_o.to(tl.float32), c, n, m,
            carried(old_c, mark, resets), carried(old_n, mark, resets), carried(old_m, mark, resets),
        )
        dc = tl.where(step_mask, carried(of_c, mark, resets), dc)
        dn = tl.where(step_mask, carried(of_n, mark, resets), dn)
        dm = tl.where(step_mask, carried(of_m, mark, resets), dm)
        after = exchange + (1 - step % 2) * (4 * BB * BD) + (line[:, None] + d[None, :])
        tl.store(after, operand(carried(gi, mark, resets), DOT, PRECISION), is_d[None, :])
        tl.store(after + F_GATE * BB * BD, operand(carried(gf, mark, resets), DOT, PRECISION), is_d[None, :])
        tl.store(after + Z_GATE * BB * BD, operand(carried(gz, mark, resets), DOT, PRECISION), is_d[None, :])
        tl.store(after + O_GATE * BB * BD, operand(carried(go, mark, resets), DOT, PRECISION), is_d[None, :])
        if step + 1 < end:
            arrive(arrived)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        store_gate_gradients(
            di, df, dz, do, at, live_gradient(gi, mark, resets), live_gradient(gf, mark, resets),
            live_gradient(gz, mark, resets), live_gradient(go, mark, resets), step_mask,
        )
        c, n, m = old_c, tl.where(step + 1 < S, old_n, 1.0), old_m  # In step S there is no state to divide by.
        next_dy, next_i, next_f, next_z, next_o, old_c, old_n, old_m, next_mark = _load_kept(
            dy, resets, states, gates_if, gates_zo, c0, n0, m0, t + 1 if REVERSE else t - 1, b, d, head, S, B, H, D,
            gb, gs, is_d, S - 2 - step, REVERSE,
        )
        mark = next_mark
        if step + 1 < end:
            polls = wait(arrived, parts * (step + 1 - begin), polls)
            dc = tl.where(polls > 0, dc, float("nan"))
    report(timed_out, polls)
    if end > S:
        tl.store(dy0 + cell, tl.where(polls > 0, out, float("nan")), mask)
    store_state(dc0, dn0, dm0, cell, dc, dn, dm, mask)
