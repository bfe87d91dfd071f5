"""The sLSTM in Triton: all tokens in one launch forward, and backward in one and a product for the recurrent weights.

A program owns a head of 16 sequences and walks along the tokens, for nothing of this recurrence can be had before its
turn. Where the head's four matrices fit beside it (`tiles` knows), they stay on chip and the states in registers.
Wider heads are shared by a team of programs, a slice of the channels each, which exchange their outputs at each token
and wait for one another. What no team fits goes by tiles of channels: matrices come from the second-level cache at
each token, and states and outputs pass through memory that only this program touches, behind a barrier.

Forward keeps y, c, n, m and the four gates of every token for the backward pass, if there will be one. The derivative
is that of the definition; what m is made of gets its gradient (see slstm_torch.py). Gradients of the gates are stored,
and those of the matrices are one product of them with the outputs of the tokens before.

Gates, states and sums are float32. Dots take bfloat16 where all gates are; float16, whose range a gradient may leave,
goes through tf32, which has as many digits; float32 stays float32. Nothing is transposed but by loading it that way.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.self_check import launch_size, normal
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, backward_marks
from seqblocks.kernels.slstm.reference import SLSTMState
from seqblocks.kernels.triton_common import exp, jit, lined, log_sigmoid, over, sigmoid, tl, up

ROWS = 16  # sequences of a program: the least that a dot takes
WIDTH = 1024  # of a head, at most
AT_ONCE = 1 if common.INTERPRETED else 1 << 31  # a team's tokens of a launch: interpreted, nobody runs while one waits
PATIENCE = 1 << 24  # times that a program looks whether the others are there: seconds, where a microsecond is usual

# ------------------------------------------------------------------------------
# The kernels.   Places: i, f, z, o, dy by strides over batch and tokens, a head's channels side by side; recurrent
# [H, D, 4, D], bias [4, H, D]; y and the gates' gradients [B, S, H, D]; kept states [3, B, S, H, D] are c, n, m and
# kept gates i, f [2, B, S, H, D] and z, o [2, B, S, H, D]; states and their gradients [B, H, D].


@jit
@no_type_check
def _tanh(x):
    """Within 1e-7 of it; e^-2|x| does not overflow."""
    v = exp(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, v - 1.0, 1.0 - v) * over(1.0 + v)


@jit
@no_type_check
def _cell(i, f, z, o, c, n, m):
    """y, c, n, m after a token whose gates are whole."""
    through = m + log_sigmoid(f)
    top = tl.where(n == 0.0, i, tl.maximum(i, through))
    write = exp(i - top)
    keep = exp(tl.minimum(through - top, 0.0))
    c = keep * c + write * _tanh(z)
    n = keep * n + write
    return sigmoid(o) * c / n, c, n, top


@jit
@no_type_check
def _cell_gradients(dy, dc, dn, dm, i, f, z, o, c, n, m, c_, n_, m_):
    """Gradients of the gates, then of the c, n, m (c_, n_, m_) before the token; dc, dn, dm come from after it."""
    through = m_ + log_sigmoid(f)
    first = n_ == 0.0
    write = exp(i - m)
    keep = tl.where(first, 0.0, exp(tl.minimum(through - m, 0.0)))
    gate = sigmoid(o)
    tz = _tanh(z)
    share = dy * gate / n
    dc += share
    dn -= share * c / n
    of_write = (dc * tz + dn) * write
    of_keep = (dc * c_ + dn * n_) * keep
    dm -= of_write + of_keep
    wins = first | (i >= through)
    dthrough = of_keep + tl.where(wins, 0.0, dm)
    di = of_write + tl.where(wins, dm, 0.0)
    df = dthrough * sigmoid(-f)
    dz = dc * write * (1.0 - tz * tz)
    do = dy * (c / n) * gate * (1.0 - gate)
    return di, df, dz, do, dc * keep, dn * keep, dthrough


@jit
@no_type_check
def _load(x, rows, columns, is_row, is_column):
    return tl.load(x + rows[:, None] + columns[None, :], is_row[:, None] & is_column[None, :], 0.0)


@jit
@no_type_check
def _gates(i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d):
    """Of token t, as they lie there; and its mark, 0 where the sequence goes on with it."""
    mark = (b < 0)[:, None]
    if resets is not None:
        mark = tl.load(resets + b * S + t, is_b, 0)[:, None]
    return (
        _load(i, b * ib + t * js, wide, is_b, is_d), _load(f, b * fb + t * fs, wide, is_b, is_d),
        _load(z, b * zb + t * zs, wide, is_b, is_d), _load(o, b * ob + t * os, wide, is_b, is_d), mark,
    )


@jit
@no_type_check
def _carried(x, mark, resets):
    """What a token reads of the one before, or hands back to it: nothing across a reset, NaN and inf neither."""
    if resets is not None:
        x = tl.where(mark == 0, x, 0.0)
    return x


@jit
@no_type_check
def _of_what_is_read(x, mark, resets):
    """A gradient; zero, not NaN, at a token of which nothing is read, whatever is kept of it."""
    if resets is not None:
        x = tl.where(mark < 2, x, 0.0)
    return x


@jit
@no_type_check
def _keep(states, gates_if, gates_zo, at, plane, here, c, n, m, i, f, z, o):
    """Of a token, for the backward pass, if there will be one."""
    if states is not None:
        tl.store(states + at, c, here)
        tl.store(states + plane + at, n, here)
        tl.store(states + 2 * plane + at, m, here)
        tl.store(gates_if + at, i, here)
        tl.store(gates_if + plane + at, f, here)
        tl.store(gates_zo + at, z.to(gates_zo.dtype.element_ty), here)
        tl.store(gates_zo + plane + at, o.to(gates_zo.dtype.element_ty), here)


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def _scan(
    i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, y, states, gates_if, gates_zo, y1, c1, n1, m1,
    S, B, D, ib, js, fb, fs, zb, zs, ob, os,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """Matrices on chip, states in registers."""
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    here = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    into = recurrent + head * D * 4 * D + d[:, None] * (4 * D) + d[None, :]
    square = is_d[:, None] & is_d[None, :]
    to_i = tl.load(into, square, 0.0).to(DOT)
    to_f = tl.load(into + D, square, 0.0).to(DOT)
    to_z = tl.load(into + 2 * D, square, 0.0).to(DOT)
    to_o = tl.load(into + 3 * D, square, 0.0).to(DOT)
    bias_i = tl.load(bias + wide, is_d, 0.0)[None, :]
    bias_f = tl.load(bias + H * D + wide, is_d, 0.0)[None, :]
    bias_z = tl.load(bias + 2 * H * D + wide, is_d, 0.0)[None, :]
    bias_o = tl.load(bias + 3 * H * D + wide, is_d, 0.0)[None, :]
    out = tl.load(y0 + cell, here, 0.0)
    c = tl.load(c0 + cell, here, 0.0)
    n = tl.load(n0 + cell, here, 0.0)
    m = tl.load(m0 + cell, here, 0.0)
    plane = tl.cast(B, tl.int64) * S * H * D
    t = tl.cast(S - 1 if REVERSE else 0, tl.int64)
    next_i, next_f, next_z, next_o, mark = _gates(
        i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
    )
    for step in range(S):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        xi = next_i.to(tl.float32) + bias_i
        xf = next_f.to(tl.float32) + bias_f
        xz = next_z.to(tl.float32) + bias_z
        xo = next_o.to(tl.float32) + bias_o
        out, c = _carried(out, mark, resets), _carried(c, mark, resets)
        n, m = _carried(n, mark, resets), _carried(m, mark, resets)
        # asked for a token ahead: the memory's answer takes about as long as all the rest of a token
        next_i, next_f, next_z, next_o, mark = _gates(
            i, f, z, o, resets, t - 1 if REVERSE else t + 1, b, wide, S, ib, js, fb, fs, zb, zs, ob, os,
            b < tl.where(step + 1 < S, B, 0), is_d,
        )
        read = out.to(DOT)
        xi += tl.dot(read, to_i, input_precision=PRECISION)
        xf += tl.dot(read, to_f, input_precision=PRECISION)
        xz += tl.dot(read, to_z, input_precision=PRECISION)
        xo += tl.dot(read, to_o, input_precision=PRECISION)
        out, c, n, m = _cell(xi, xf, xz, xo, c, n, m)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), here)
        _keep(states, gates_if, gates_zo, at, plane, here, c, n, m, xi, xf, xz, xo)
    tl.store(y1 + cell, out, here)
    tl.store(c1 + cell, c, here)
    tl.store(n1 + cell, n, here)
    tl.store(m1 + cell, m, here)


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def _scan_by_tiles(
    i, f, z, o, recurrent, bias, resets, y, states, gates_if, gates_zo, turn, y1, c1, n1, m1,
    S, B, D, ib, js, fb, fs, zb, zs, ob, os,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """The same; y1, c1, n1, m1 hold the state at hand, turn [2, B, H, D] in turn what the token before gave."""
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    is_b = b < B
    row = (b * H + head) * D
    plane = tl.cast(B, tl.int64) * S * H * D
    small = tl.cast(B, tl.int64) * H * D
    for step in range(S):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        before = turn + (step % 2) * small
        after = turn + (1 - step % 2) * small
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            here = is_b[:, None] & is_d[None, :]
            wide = head * D + d
            own_i, own_f, own_z, own_o, mark = _gates(
                i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
            )
            xi = tl.zeros((BB, BD), tl.float32)
            xf = tl.zeros((BB, BD), tl.float32)
            xz = tl.zeros((BB, BD), tl.float32)
            xo = tl.zeros((BB, BD), tl.float32)
            for start in range(0, D, BD):
                k = start + tl.arange(0, BD)
                read = tl.where(mark == 0, _load(before, row, k, is_b, k < D), 0.0).to(DOT)
                into = recurrent + head * D * 4 * D + k[:, None] * (4 * D) + d[None, :]
                square = (k < D)[:, None] & is_d[None, :]
                xi += tl.dot(read, tl.load(into, square, 0.0).to(DOT), input_precision=PRECISION)
                xf += tl.dot(read, tl.load(into + D, square, 0.0).to(DOT), input_precision=PRECISION)
                xz += tl.dot(read, tl.load(into + 2 * D, square, 0.0).to(DOT), input_precision=PRECISION)
                xo += tl.dot(read, tl.load(into + 3 * D, square, 0.0).to(DOT), input_precision=PRECISION)
            xi += own_i.to(tl.float32) + tl.load(bias + wide, is_d, 0.0)[None, :]
            xf += own_f.to(tl.float32) + tl.load(bias + H * D + wide, is_d, 0.0)[None, :]
            xz += own_z.to(tl.float32) + tl.load(bias + 2 * H * D + wide, is_d, 0.0)[None, :]
            xo += own_o.to(tl.float32) + tl.load(bias + 3 * H * D + wide, is_d, 0.0)[None, :]
            cell = row[:, None] + d[None, :]
            c = _carried(tl.load(c1 + cell, here, 0.0), mark, resets)
            n = _carried(tl.load(n1 + cell, here, 0.0), mark, resets)
            m = _carried(tl.load(m1 + cell, here, 0.0), mark, resets)
            out, c, n, m = _cell(xi, xf, xz, xo, c, n, m)
            at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
            tl.store(y + at, out.to(y.dtype.element_ty), here)
            tl.store(after + cell, out, here)
            tl.store(y1 + cell, out, here)
            tl.store(c1 + cell, c, here)
            tl.store(n1 + cell, n, here)
            tl.store(m1 + cell, m, here)
            _keep(states, gates_if, gates_zo, at, plane, here, c, n, m, xi, xf, xz, xo)
        tl.debug_barrier()  # the next token reads what other threads wrote


@jit
@no_type_check
def _token_gradients(
    dy, dc, dn, dm, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B, rest, mark
):
    """`_cell_gradients` of what is kept of a token, `rest` tokens after the first, before which are c0, n0, m0."""
    here = (b < B)[:, None] & is_d[None, :]
    old = (b < tl.where(rest > 0, B, 0))[:, None] & is_d[None, :]
    given = (b < tl.where(rest > 0, 0, B))[:, None] & is_d[None, :]
    c_ = tl.load(states + past, old, 0.0) + tl.load(c0 + cell, given, 0.0)
    n_ = tl.load(states + plane + past, old, 0.0) + tl.load(n0 + cell, given, 0.0)
    m_ = tl.load(states + 2 * plane + past, old, 0.0) + tl.load(m0 + cell, given, 0.0)
    c = tl.load(states + at, here, 0.0)
    n = tl.load(states + plane + at, here, 1.0)
    m = tl.load(states + 2 * plane + at, here, 0.0)
    i = tl.load(gates_if + at, here, 0.0)
    f = tl.load(gates_if + plane + at, here, 0.0)
    z = tl.load(gates_zo + at, here, 0.0).to(tl.float32)
    o = tl.load(gates_zo + plane + at, here, 0.0).to(tl.float32)
    di, df, dz, do, dc, dn, dm = _cell_gradients(
        dy, dc, dn, dm, i, f, z, o, c, n, m,
        _carried(c_, mark, resets), _carried(n_, mark, resets), _carried(m_, mark, resets),
    )
    di, df = _of_what_is_read(di, mark, resets), _of_what_is_read(df, mark, resets)
    dz, do = _of_what_is_read(dz, mark, resets), _of_what_is_read(do, mark, resets)
    return di, df, dz, do, dc, dn, dm


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def _scan_backward(
    dy, dy1, dc1, dn1, dm1, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo,
    di, df, dz, do, dy0, dc0, dn0, dm0,
    S, B, D, gb, gs,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    here = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    # [gate's channel, y's channel]: the transpose, by how it is loaded
    back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + d[:, None]
    square = is_d[:, None] & is_d[None, :]
    from_i = tl.load(back, square, 0.0).to(DOT)
    from_f = tl.load(back + D, square, 0.0).to(DOT)
    from_z = tl.load(back + 2 * D, square, 0.0).to(DOT)
    from_o = tl.load(back + 3 * D, square, 0.0).to(DOT)
    out = tl.load(dy1 + cell, here, 0.0)
    c = tl.load(dc1 + cell, here, 0.0)
    n = tl.load(dn1 + cell, here, 0.0)
    m = tl.load(dm1 + cell, here, 0.0)
    plane = tl.cast(B, tl.int64) * S * H * D
    for step in range(S):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        past = at + (H * D if REVERSE else -H * D)
        mark = (b < 0)[:, None]
        if resets is not None:
            mark = tl.load(resets + b * S + t, is_b, 0)[:, None]
        out += _load(dy, b * gb + t * gs, wide, is_b, is_d).to(tl.float32)
        gi, gf, gz, go, c, n, m = _token_gradients(
            out, c, n, m, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B,
            S - 1 - step, mark,
        )
        tl.store(di + at, gi.to(di.dtype.element_ty), here)
        tl.store(df + at, gf.to(df.dtype.element_ty), here)
        tl.store(dz + at, gz.to(dz.dtype.element_ty), here)
        tl.store(do + at, go.to(do.dtype.element_ty), here)
        out = tl.dot(gi.to(DOT), from_i, input_precision=PRECISION)
        out += tl.dot(gf.to(DOT), from_f, input_precision=PRECISION)
        out += tl.dot(gz.to(DOT), from_z, input_precision=PRECISION)
        out += tl.dot(go.to(DOT), from_o, input_precision=PRECISION)
        out, c = _carried(out, mark, resets), _carried(c, mark, resets)
        n, m = _carried(n, mark, resets), _carried(m, mark, resets)
    tl.store(dy0 + cell, out, here)
    tl.store(dc0 + cell, c, here)
    tl.store(dn0 + cell, n, here)
    tl.store(dm0 + cell, m, here)


@common.kernel(do_not_specialize=["S", "B"])
@no_type_check
def _scan_backward_by_tiles(
    dy, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo, di, df, dz, do, dy0, dc0, dn0, dm0,
    S, B, D, gb, gs,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
):
    """The same; dy0, dc0, dn0, dm0 hold the gradients at hand."""
    H = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) * BB + tl.arange(0, BB)
    is_b = b < B
    row = (b * H + head) * D
    plane = tl.cast(B, tl.int64) * S * H * D
    for step in range(S):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        line = ((b * S + t) * H + head) * D
        mark = (b < 0)[:, None]
        if resets is not None:
            mark = tl.load(resets + b * S + t, is_b, 0)[:, None]
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            here = is_b[:, None] & is_d[None, :]
            cell = row[:, None] + d[None, :]
            at = line[:, None] + d[None, :]
            past = at + (H * D if REVERSE else -H * D)
            out = tl.load(dy0 + cell, here, 0.0)
            out += _load(dy, b * gb + t * gs, head * D + d, is_b, is_d).to(tl.float32)
            c = tl.load(dc0 + cell, here, 0.0)
            n = tl.load(dn0 + cell, here, 0.0)
            m = tl.load(dm0 + cell, here, 0.0)
            gi, gf, gz, go, c, n, m = _token_gradients(
                out, c, n, m, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B,
                S - 1 - step, mark,
            )
            tl.store(di + at, gi.to(di.dtype.element_ty), here)
            tl.store(df + at, gf.to(df.dtype.element_ty), here)
            tl.store(dz + at, gz.to(dz.dtype.element_ty), here)
            tl.store(do + at, go.to(do.dtype.element_ty), here)
            tl.store(dc0 + cell, _carried(c, mark, resets), here)
            tl.store(dn0 + cell, _carried(n, mark, resets), here)
            tl.store(dm0 + cell, _carried(m, mark, resets), here)
        tl.debug_barrier()  # all channels' gradients are there before any goes back through the matrices
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            is_d = d < D
            out = tl.zeros((BB, BD), tl.float32)
            for start in range(0, D, BD):
                k = start + tl.arange(0, BD)
                is_k = k < D
                back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + k[:, None]
                square = is_k[:, None] & is_d[None, :]
                from_i = tl.load(back, square, 0.0).to(DOT)
                from_f = tl.load(back + D, square, 0.0).to(DOT)
                from_z = tl.load(back + 2 * D, square, 0.0).to(DOT)
                from_o = tl.load(back + 3 * D, square, 0.0).to(DOT)
                out += tl.dot(_load(di, line, k, is_b, is_k).to(DOT), from_i, input_precision=PRECISION)
                out += tl.dot(_load(df, line, k, is_b, is_k).to(DOT), from_f, input_precision=PRECISION)
                out += tl.dot(_load(dz, line, k, is_b, is_k).to(DOT), from_z, input_precision=PRECISION)
                out += tl.dot(_load(do, line, k, is_b, is_k).to(DOT), from_o, input_precision=PRECISION)
            tl.store(dy0 + row[:, None] + d[None, :], _carried(out, mark, resets), is_b[:, None] & is_d[None, :])
        tl.debug_barrier()


# ------------------------------------------------------------------------------
# A head by a team.   A team of programs owns a head of BB sequences: each the gates of BU channels, whose matrices stay
# on chip. turn [teams, 2, BB, BD], and [teams, 2, 4, BB, BD] backward, hold in turn what a token gave, zeros beyond D;
# arrived is a counter a team, a cache line each. Tokens begin to end of a walk are run: a token needs what all of its
# team wrote at the one before, so interpreted, one program after the other, a launch has one token.


@jit
@no_type_check
def _arrive(arrived):
    """This program's stores are there for whoever sees the count."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@jit
@no_type_check
def _report(gave_up, patience):
    """Tell the host that this program gave up: what it wrote is NaN."""
    tl.store(gave_up, 1, patience <= 0)


@jit
@no_type_check
def _wait(arrived, wanted, patience):
    """Until `wanted` arrived. The patience that is left: none, if it ran out, lest a device hang."""
    here = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    asked = 0
    while (here < wanted) & (asked < patience):
        here = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        asked += 1
    tl.debug_barrier()
    return tl.where(here < wanted, 0, patience)


@common.kernel(do_not_specialize=["S", "B", "begin", "end", "first", "patience"])
@no_type_check
def _scan_by_team(
    i, f, z, o, recurrent, bias, resets, y, states, gates_if, gates_zo, turn, arrived, gave_up, y1, c1, n1, m1,
    S, B, H, D, ib, js, fb, fs, zb, zs, ob, os, begin, end, first, patience,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    BU: tl.constexpr,
):
    """As `_scan`; c1, n1, m1 hold the state at `begin`, and then that at `end`."""
    parts = tl.num_programs(0)
    team = first + tl.program_id(1)
    head = (team % H).to(tl.int64)
    b = (team // H).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.program_id(0) * BU + tl.arange(0, BU)
    k = tl.arange(0, BD)
    is_b, is_d = b < B, d < D
    here = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    wide = head * D + d
    # [a gate's channel, y's channel], the four gates below one another: 64 rows, which one product takes
    row = tl.arange(0, 4 * BU)
    channel = tl.program_id(0) * BU + row % BU
    into = recurrent + head * D * 4 * D + (row // BU * D + channel)[:, None] + k[None, :] * (4 * D)
    weights = tl.load(into, (channel < D)[:, None] & (k < D)[None, :], 0.0).to(DOT)
    bias_i = tl.load(bias + wide, is_d, 0.0)[None, :]
    bias_f = tl.load(bias + H * D + wide, is_d, 0.0)[None, :]
    bias_z = tl.load(bias + 2 * H * D + wide, is_d, 0.0)[None, :]
    bias_o = tl.load(bias + 3 * H * D + wide, is_d, 0.0)[None, :]
    line = tl.arange(0, BB) * BD
    turn += tl.cast(team, tl.int64) * (2 * BB * BD)
    arrived += team * 32
    out = tl.zeros((BB, BU), tl.float32)
    c = tl.load(c1 + cell, here, 0.0)
    n = tl.load(n1 + cell, here, 0.0)
    m = tl.load(m1 + cell, here, 0.0)
    plane = tl.cast(B, tl.int64) * S * H * D
    t = tl.cast(S - 1 - begin if REVERSE else begin, tl.int64)
    next_i, next_f, next_z, next_o, mark = _gates(
        i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
    )
    for step in range(begin, end):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        before = turn + (step % 2) * (BB * BD)
        after = turn + (1 - step % 2) * (BB * BD)
        # past the first-level cache, which knows nothing of what others wrote
        read = tl.load(before + (line[None, :] + k[:, None]), cache_modifier=".cg")
        if resets is not None:
            c, n, m = _carried(c, mark, resets), _carried(n, mark, resets), _carried(m, mark, resets)
            later = b < tl.where(step + 1 < S, B, 0)
            mark = tl.load(resets + b * S + (t - 1 if REVERSE else t + 1), later, 0)[:, None]
        x = tl.dot(weights, read, input_precision=PRECISION)
        xiz, xfo = tl.split(tl.permute(tl.reshape(x, (2, 2, BU, BB)), (3, 2, 0, 1)))
        xi, xz = tl.split(xiz)
        xf, xo = tl.split(xfo)
        xi += next_i.to(tl.float32) + bias_i
        xf += next_f.to(tl.float32) + bias_f
        xz += next_z.to(tl.float32) + bias_z
        xo += next_o.to(tl.float32) + bias_o
        out, c, n, m = _cell(xi, xf, xz, xo, c, n, m)
        tl.store(after + (line[:, None] + d[None, :]), _carried(out, mark, resets).to(DOT), is_d[None, :])
        if step + 1 < end:
            _arrive(arrived)
        # what the others do not wait for
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), here)
        _keep(states, gates_if, gates_zo, at, plane, here, c, n, m, xi, xf, xz, xo)
        next_i, next_f, next_z, next_o, _ = _gates(
            i, f, z, o, None, t - 1 if REVERSE else t + 1, b, wide, S, ib, js, fb, fs, zb, zs, ob, os,
            b < tl.where(step + 1 < S, B, 0), is_d,
        )
        if step + 1 < end:
            patience = _wait(arrived, parts * (step + 1 - begin), patience)
            c = tl.where(patience > 0, c, float("nan"))
    _report(gave_up, patience)
    tl.store(y1 + cell, out, here)
    tl.store(c1 + cell, c, here)
    tl.store(n1 + cell, n, here)
    tl.store(m1 + cell, m, here)


@jit
@no_type_check
def _kept(
    dy, resets, states, gates_if, gates_zo, c0, n0, m0, t, b, d, head, S, B, H, D, gb, gs, is_d, rest,
    REVERSE: tl.constexpr,
):
    """Of token t, `rest` tokens after the first: dy, what is kept of its gates, c, n, m before it, and its mark."""
    is_b = b < tl.where(rest >= 0, B, 0)
    here = is_b[:, None] & is_d[None, :]
    mark = (b < 0)[:, None]
    if resets is not None:
        mark = tl.load(resets + b * S + t, is_b, 0)[:, None]
    plane = tl.cast(B, tl.int64) * S * H * D
    at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    past = tl.where(rest > 0, at + (H * D if REVERSE else -H * D), cell)
    return (
        _load(dy, b * gb + t * gs, head * D + d, is_b, is_d),
        tl.load(gates_if + at, here, 0.0), tl.load(gates_if + plane + at, here, 0.0),
        tl.load(gates_zo + at, here, 0.0), tl.load(gates_zo + plane + at, here, 0.0),
        tl.load(tl.where(rest > 0, states, c0) + past, here, 0.0),
        tl.load(tl.where(rest > 0, states + plane, n0) + past, here, 1.0),
        tl.load(tl.where(rest > 0, states + 2 * plane, m0) + past, here, 0.0), mark,
    )


@jit
@no_type_check
def _halved(x, N: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr):
    """The first half of [N, BB, BU] and the second, added."""
    a, b = tl.split(tl.permute(tl.reshape(x, (2, N // 2, BB, BU)), (1, 2, 3, 0)))
    return a + b


@jit
@no_type_check
def _sides(BD: tl.constexpr):
    """Of eight products side by side, a warp each: [8] which of two gates, and [8, BD / 4] which of its channels."""
    side = tl.arange(0, 8)
    return side // 4, (side % 4 * (BD // 4))[:, None] + tl.arange(0, BD // 4)[None, :]


@jit
@no_type_check
def _through(
    turn, from_i, from_f, from_z, from_o,
    PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, AHEAD: tl.constexpr,
    EXACT: tl.constexpr,
):
    """[BB, BU]: all channels' gradients of the gates back through the matrices of these channels. AHEAD: all of them
    asked for at once, where they fit on chip. EXACT: products one after the other, which without matrix units take
    the fewest registers; else from_i has those of i and f, and from_z those of z and o."""
    if EXACT:
        at = (tl.arange(0, BB) * BD)[:, None] + tl.arange(0, BD)[None, :]
        i = tl.load(turn + at, cache_modifier=".cg")
        if AHEAD:
            f = tl.load(turn + BB * BD + at, cache_modifier=".cg")
            z = tl.load(turn + 2 * BB * BD + at, cache_modifier=".cg")
            o = tl.load(turn + 3 * BB * BD + at, cache_modifier=".cg")
        x = tl.dot(i, from_i, input_precision=PRECISION)
        if not AHEAD:
            f = tl.load(turn + BB * BD + at, cache_modifier=".cg")
        x += tl.dot(f, from_f, input_precision=PRECISION)
        if not AHEAD:
            z = tl.load(turn + 2 * BB * BD + at, cache_modifier=".cg")
        x += tl.dot(z, from_z, input_precision=PRECISION)
        if not AHEAD:
            o = tl.load(turn + 3 * BB * BD + at, cache_modifier=".cg")
        x += tl.dot(o, from_o, input_precision=PRECISION)
    else:
        gate, k = _sides(BD)
        at = (gate * (BB * BD))[:, None, None] + (tl.arange(0, BB) * BD)[None, :, None] + k[:, None, :]
        i_f = tl.load(turn + at, cache_modifier=".cg")
        if AHEAD:
            z_o = tl.load(turn + 2 * BB * BD + at, cache_modifier=".cg")
        x = tl.dot(i_f, from_i, input_precision=PRECISION)
        if not AHEAD:
            z_o = tl.load(turn + 2 * BB * BD + at, cache_modifier=".cg")
        x += tl.dot(z_o, from_z, input_precision=PRECISION)
        x = _halved(_halved(x, 8, BB, BU), 4, BB, BU)
        x = tl.reshape(_halved(x, 2, BB, BU), (BB, BU))
    return x


@common.kernel(do_not_specialize=["S", "B", "begin", "end", "first", "patience"])
@no_type_check
def _scan_backward_by_team(
    dy, dy1, recurrent, c0, n0, m0, resets, states, gates_if, gates_zo, di, df, dz, do, turn, arrived,
    gave_up, dy0, dc0, dn0, dm0,
    S, B, H, D, gb, gs, begin, end, first, patience,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    BU: tl.constexpr, AHEAD: tl.constexpr, EXACT: tl.constexpr,
):
    """dc0, dn0, dm0 hold the gradients at `begin`, and then those at `end`; step S, which has no token, gives dy0."""
    parts = tl.num_programs(0)
    team = first + tl.program_id(1)
    head = (team % H).to(tl.int64)
    b = (team // H).to(tl.int64) * BB + tl.arange(0, BB)
    d = tl.program_id(0) * BU + tl.arange(0, BU)
    is_b, is_d = b < B, d < D
    here = is_b[:, None] & is_d[None, :]
    cell = (b * H + head)[:, None] * D + d[None, :]
    # [gate's channel, y's channel]: the transpose, by how it is loaded
    if EXACT:
        k = tl.arange(0, BD)
        back = recurrent + head * D * 4 * D + d[None, :] * (4 * D) + k[:, None]
        square = (k < D)[:, None] & is_d[None, :]
        from_i = tl.load(back, square, 0.0).to(DOT)
        from_f = tl.load(back + D, square, 0.0).to(DOT)
        from_z = tl.load(back + 2 * D, square, 0.0).to(DOT)
        from_o = tl.load(back + 3 * D, square, 0.0).to(DOT)
    else:
        gate, k = _sides(BD)
        back = recurrent + head * D * 4 * D + (gate[:, None] * D + k)[:, :, None] + d[None, None, :] * (4 * D)
        square = (k < D)[:, :, None] & is_d[None, None, :]
        from_i = tl.load(back, square, 0.0).to(DOT)
        from_z = tl.load(back + 2 * D, square, 0.0).to(DOT)
        from_f, from_o = from_i, from_z
    line = tl.arange(0, BB) * BD
    turn += tl.cast(team, tl.int64) * (8 * BB * BD)
    arrived += team * 32
    dc = tl.load(dc0 + cell, here, 0.0)
    dn = tl.load(dn0 + cell, here, 0.0)
    dm = tl.load(dm0 + cell, here, 0.0)
    late = tl.load(dy1 + cell, (b < tl.where(begin == 0, B, 0))[:, None] & is_d[None, :], 0.0)
    t = tl.cast(begin if REVERSE else S - 1 - begin, tl.int64)
    at_last = ((b * S + t) * H + head)[:, None] * D + d[None, :]
    plane = tl.cast(B, tl.int64) * S * H * D
    now = (b < tl.where(begin < S, B, 0))[:, None] & is_d[None, :]
    c = tl.load(states + at_last, now, 0.0)
    n = tl.load(states + plane + at_last, now, 1.0)
    m = tl.load(states + 2 * plane + at_last, now, 0.0)
    next_dy, next_i, next_f, next_z, next_o, c_, n_, m_, mark = _kept(
        dy, resets, states, gates_if, gates_zo, c0, n0, m0, t, b, d, head, S, B, H, D, gb, gs, is_d,
        S - 1 - begin, REVERSE,
    )
    out = tl.zeros((BB, BU), tl.float32)
    for step in range(begin, end):
        t = tl.cast(step if REVERSE else S - 1 - step, tl.int64)
        is_live = b < tl.where(step < S, B, 0)
        live = is_live[:, None] & is_d[None, :]
        before = turn + (step % 2) * (4 * BB * BD)
        out = _through(before, from_i, from_f, from_z, from_o, PRECISION, BB, BD, BU, AHEAD, EXACT)
        out += late + next_dy.to(tl.float32)
        late = tl.zeros((BB, BU), tl.float32)
        gi, gf, gz, go, of_c, of_n, of_m = _cell_gradients(
            out, dc, dn, dm, next_i, next_f, next_z.to(tl.float32), next_o.to(tl.float32), c, n, m,
            _carried(c_, mark, resets), _carried(n_, mark, resets), _carried(m_, mark, resets),
        )
        dc = tl.where(live, _carried(of_c, mark, resets), dc)
        dn = tl.where(live, _carried(of_n, mark, resets), dn)
        dm = tl.where(live, _carried(of_m, mark, resets), dm)
        after = turn + (1 - step % 2) * (4 * BB * BD) + (line[:, None] + d[None, :])
        tl.store(after, _carried(gi, mark, resets).to(DOT), is_d[None, :])
        tl.store(after + BB * BD, _carried(gf, mark, resets).to(DOT), is_d[None, :])
        tl.store(after + 2 * BB * BD, _carried(gz, mark, resets).to(DOT), is_d[None, :])
        tl.store(after + 3 * BB * BD, _carried(go, mark, resets).to(DOT), is_d[None, :])
        if step + 1 < end:
            _arrive(arrived)
        at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
        tl.store(di + at, _of_what_is_read(gi, mark, resets).to(di.dtype.element_ty), live)
        tl.store(df + at, _of_what_is_read(gf, mark, resets).to(df.dtype.element_ty), live)
        tl.store(dz + at, _of_what_is_read(gz, mark, resets).to(dz.dtype.element_ty), live)
        tl.store(do + at, _of_what_is_read(go, mark, resets).to(do.dtype.element_ty), live)
        c, n, m = c_, tl.where(step + 1 < S, n_, 1.0), m_  # step S divides by no state
        next_dy, next_i, next_f, next_z, next_o, c_, n_, m_, next_mark = _kept(
            dy, resets, states, gates_if, gates_zo, c0, n0, m0, t + 1 if REVERSE else t - 1, b, d, head, S, B, H, D,
            gb, gs, is_d, S - 2 - step, REVERSE,
        )
        mark = next_mark
        if step + 1 < end:
            patience = _wait(arrived, parts * (step + 1 - begin), patience)
            dc = tl.where(patience > 0, dc, float("nan"))
    _report(gave_up, patience)
    if end > S:
        tl.store(dy0 + cell, tl.where(patience > 0, out, float("nan")), here)
    tl.store(dc0 + cell, dc, here)
    tl.store(dn0 + cell, dn, here)
    tl.store(dm0 + cell, dm, here)


# ------------------------------------------------------------------------------
# Launching

_no_teams: set[torch.device] = set()  # where the driver refused one, or one gave up: heads go by tiles there
_late: dict[torch.device, Tensor] = {}  # by device, whether a team gave up; pinned: reading it waits for nothing


class TeamRefused(Exception):
    """The driver will not run all programs of a launch at once."""


def _intercepted() -> bool:
    """Whether a mode, such as that of fake tensors, intercepts calls: its tensors hold no numbers."""
    return torch._C._len_torch_dispatch_stack() > 0


def _late_flag(x: Tensor) -> Tensor:
    """[1] int32, in memory of the host that the device of x can write."""
    if _intercepted():
        return torch.zeros(1, dtype=torch.int32, device="cpu")
    if x.device not in _late:
        _late[x.device] = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=x.is_cuda)
    return _late[x.device]


def _raise_if_late(x: Tensor) -> None:
    """RuntimeError if a launch before gave up waiting."""
    flag = None if _intercepted() else _late.get(x.device)
    if flag is not None and flag.item():
        flag.zero_()
        _no_teams.add(x.device)
        raise RuntimeError(
            f"an sLSTM kernel that was launched on {x.device} before this call gave up: programs that share a head "
            "waited too long for one another, and its outputs are NaN. From now on this process runs such heads by "
            "tiles on this device, which wait for nothing. Repeat the work since the last result that was finite."
        )


def _refusal(error: Exception) -> bool:
    """Whether a launch failed because a cooperative grid is too large or not supported here (MPS, vGPU)."""
    text = str(error).lower()
    return type(error).__name__ == "OutOfResources" or "cooperative" in text or "not supported" in text


def _whole_bytes(BD: int, dots: str, backward: bool) -> int:
    """Shared bytes, at most, of a program that keeps the four matrices of a head of BD channels on chip.

    Besides these the compiler takes 96 to 160 a channel, and with two stages 832 to 960 backward.
    """
    return (8 if dots == "bf16" else 16) * BD * BD + (1024 if backward and BD <= 64 else 160) * BD


def tiles(
    width: int, dots: str, backward: bool, arch: str, heads: int = 1, batch: int = ROWS, processors: int = 0,
    room: int | None = None,
) -> dict[str, int]:
    """Sequences (BB) and channels (BD) of a program, WHOLE if these are all of a head, warps, and tokens loaded ahead;
    where a team shares a head, which takes a device of that many `processors`, also the channels of each (BU).

    dots: "bf16", "tf32" or "fp32". The four matrices of a head take 8 D^2 bytes on chip in bfloat16 and 16 D^2 in the
    others; what is loaded ahead takes as much again in the backward pass, which reads thirteen numbers a channel.
    room: shared bytes that a program may have; without it, what the architecture is known for.
    """
    BD, narrow = max(16, common.power_of_two(width)), dots == "bf16"
    room = common.SHARED.get(arch, 0) if room is None else room
    # registers: 64 channels of float32 spill on sm_8x, and 32 on AMD's
    fits = BD <= 32 or (BD <= 128 and narrow) or (BD <= 64 and not arch.startswith("sm_8"))
    whole = BD <= 16 or (arch.startswith("sm_") and fits and _whole_bytes(BD, dots, backward) <= room)
    team = {} if whole else _team(width, dots, backward, arch, heads, batch, processors, room)
    if team:
        return team
    BD = BD if whole else min(BD, 64 if narrow else 32)
    # a token waits for the one before it, so it is shared by many threads: four channels each, as far as they fit
    warps = max(1, min(16 if whole and not backward else 8, ROWS * BD // (4 * common.lanes(arch))))
    stages = 1 if whole and backward and BD > 64 else 2
    return {"BB": ROWS, "BD": BD, "WHOLE": int(whole), "num_warps": warps, "num_stages": stages}


def _team(
    width: int, dots: str, backward: bool, arch: str, heads: int, batch: int, processors: int, room: int
) -> dict[str, int]:
    """How teams share heads, as `tiles`; empty where no team fits onto the device, or into its registers.

    A launch takes about as long however much each program does at a token, so launches are to be few, and then what a
    program does little.
    """
    BD, size = common.power_of_two(width), 2 if dots == "bf16" else 4
    cells = {"bf16": 2048, "tf32": 1024, "fp32": 256 if backward else 512}[dots]
    most = {"bf16": 1 << 18, "tf32": 1 << 17, "fp32": 1 << 17}[dots]
    if not backward:
        most = {"bf16": 1 << 20, "tf32": 1 << 18, "fp32": 1 << 17}[dots]
    # what was exchanged is loaded at once or, if need be, by parts
    reads = [(4, 1), (1 if dots == "fp32" else 2, 0)] if backward else [(1, 0)]
    found = []
    for BU, BB in ((16, 16), (16, 32), (16, 64), (32, 16), (32, 32), (32, 64)):
        at_once = processors // up(width, BU)
        fits = [ahead for parts, ahead in reads if (4 * BU + parts * BB) * BD * size <= room]
        if arch.startswith("sm_") and at_once and fits and cells >= BU * BB and most >= BD * BU * BB:
            found.append((up(heads * up(batch, BB), at_once), BU * BB, BB, BU, fits[0]))
    if not found:
        return {}
    _, cells, BB, BU, ahead = min(found)
    tile = {"BB": BB, "BD": BD, "BU": BU, "WHOLE": 0, "num_stages": 1}
    if backward:
        return tile | {"AHEAD": ahead, "EXACT": int(dots == "fp32"), "num_warps": 8}
    # on sm_90 four warps have a product of 64 rows together, and more would each read all of the matrices
    four = arch == "sm_90" and dots == "bf16" and cells == 256 and BD <= 512
    return tile | {"num_warps": 4 if four else 16 if cells > 1024 else 8}


class _Plan:
    def __init__(
        self, x: Tensor, others: tuple[Tensor, ...], H: int, D: int, reverse: bool, backward: bool = False
    ) -> None:
        self.B, self.S = x.shape[:2]
        self.H, self.D = H, D
        dtypes = {y.dtype for y in (x, *others)}
        narrow = dtypes == {torch.bfloat16}
        self.processors = 0 if x.device in _no_teams else common.processors(x)
        dots = "bf16" if narrow else "fp32" if dtypes == {torch.float32} else "tf32"
        about, room = (D, dots, backward, common.arch(x), H), common.shared(x)
        self.tile = tiles(*about, launch_size("batch", self.B), self.processors, room)
        self.team = "BU" in self.tile
        self.device = x.device
        self.whole = bool(self.tile.pop("WHOLE"))
        self.grid = (H, up(self.B, self.tile["BB"]))
        self.dot = torch.bfloat16 if narrow else torch.float32
        self.all = {"REVERSE": reverse, "DOT": tl.bfloat16 if narrow else tl.float32}
        self.all |= {"PRECISION": "tf32" if dots == "tf32" else "ieee", **self.tile}

    def turn(self, planes: int, like: Tensor) -> Tensor:
        """What teams exchange, zeros: [groups of sequences, H, 2, planes, BB, BD]."""
        shape = self.grid[1], self.H, 2, planes, self.tile["BB"], self.tile["BD"]
        return like.new_zeros(shape, dtype=self.dot)

    def counters(self, like: Tensor) -> Tensor:
        """A cache line a team."""
        return like.new_zeros(self.H * self.grid[1], 32, dtype=torch.int32)

    def launch_teams(self, kernel: Any, steps: int, *args: Any) -> None:
        """As many teams at once as the device holds: a launch of more would wait for programs that never start, so a
        cooperative launch refuses it. TeamRefused if it refuses this one."""
        parts, teams = up(self.D, self.tile["BU"]), self.H * self.grid[1]
        at_once = max(1, self.processors // parts)
        for first in range(0, teams, at_once):
            grid = (parts, min(at_once, teams - first))
            for begin in range(0, steps, AT_ONCE):
                tokens = begin, min(steps, begin + AT_ONCE)
                try:
                    kernel[grid](*args, *tokens, first, PATIENCE, **self.all, launch_cooperative_grid=True)
                except Exception as error:
                    if not _refusal(error):
                        raise
                    _no_teams.add(self.device)
                    raise TeamRefused(str(error)) from error


@common.custom_op("seqblocks::slstm_triton")
def _op(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor,
    y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, resets: Tensor | None, reverse: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, S, H D], the last y, c, n, m, and for the backward pass states and gates (empty unless `keep`)."""
    outputs = _op_fake(i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, reverse, keep)
    y, y1, c1, n1, m1, *kept = outputs
    H, D = recurrent.shape[:2]
    i, f, z, o = (lined(x) for x in (i, f, z, o))
    _raise_if_late(i)
    plan = _Plan(i, (f, z, o), H, D, reverse)
    recurrent, bias, y0, c0, n0, m0 = (x.contiguous() for x in (recurrent.to(plan.dot), bias, y0, c0, n0, m0))
    resets = common.marks(resets)
    if not keep:
        kept = [None] * 3
    sizes = (plan.S, plan.B, D, *(n for x in (i, f, z, o) for n in x.stride()[:2]))
    with common.on(i):
        if plan.whole:
            _scan[plan.grid](
                i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, y, *kept, y1, c1, n1, m1, *sizes, **plan.all
            )
            return outputs
        def begin() -> None:
            for to, given in zip((y1, c1, n1, m1), (y0, c0, n0, m0), strict=True):
                to.copy_(given)

        if plan.team:
            begin()
            turn = plan.turn(1, y0)
            first = y0
            if resets is not None:
                first = y0.masked_fill(along(resets[:, -1 if reverse else 0] != 0, y0), 0.0)
            first = F.pad(first, (0, 0, 0, 0, 0, turn.shape[0] * turn.shape[4] - plan.B))
            turn[:, :, 0, 0, :, :D] = first.unflatten(0, (turn.shape[0], -1)).transpose(1, 2)
            try:
                plan.launch_teams(
                    _scan_by_team, plan.S, i, f, z, o, recurrent, bias, resets, y, *kept, turn, plan.counters(y0),
                    _late_flag(i), y1, c1, n1, m1, *sizes[:2], H, *sizes[2:],
                )
                return outputs
            except TeamRefused:
                plan = _Plan(i, (f, z, o), H, D, reverse)
        begin()
        turn = torch.stack([y0, torch.empty_like(y0)])
        _scan_by_tiles[plan.grid](
            i, f, z, o, recurrent, bias, resets, y, *kept, turn, y1, c1, n1, m1, *sizes, **plan.all
        )
    return outputs


@_op.register_fake
def _op_fake(i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, reverse, keep):  # type: ignore[no-untyped-def]
    B, S, E = i.shape
    shape = (B, S, E) if keep else (0, 0, 0)
    narrow = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in (i, f, z, o)) else torch.float32
    last = (y0.new_empty(y0.shape) for _ in range(4))
    kept = y0.new_empty(3, *shape), y0.new_empty(2, *shape), y0.new_empty(2, *shape, dtype=narrow)
    return i.new_empty(i.shape), *last, *kept


@common.custom_op("seqblocks::slstm_triton_backward")
def _op_backward(
    dy: Tensor, dy1: Tensor, dc1: Tensor, dn1: Tensor, dm1: Tensor,
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor,
    y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, resets: Tensor | None,
    y: Tensor, states: Tensor, gates_if: Tensor, gates_zo: Tensor, reverse: bool,
) -> list[Tensor]:
    """Gradients of i, f, z, o, recurrent, bias and the initial y, c, n, m."""
    H, D = recurrent.shape[:2]
    dy = lined(dy)
    _raise_if_late(i)
    plan = _Plan(i, (f, z, o), H, D, reverse, True)
    dy0, dc0, dn0, dm0 = (x.new_empty(x.shape) for x in (y0, c0, n0, m0))
    # not in float16: what comes from them, a token back and in the weights, may be too small for it
    di, df, dz, do = (x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, plan.dot)) for x in (i, f, z, o))
    resets = backward_marks([dy], [dy1, dc1, dn1, dm1], resets, reverse)
    whole = (x.contiguous() for x in (recurrent.to(plan.dot), c0, n0, m0))
    last = [x.contiguous() for x in (dy1, dc1, dn1, dm1)]
    given = (*whole, resets, states, gates_if, gates_zo)
    sizes = (plan.S, plan.B, D, *dy.stride()[:2])
    with common.on(i):
        if plan.whole:
            _scan_backward[plan.grid](dy, *last, *given, di, df, dz, do, dy0, dc0, dn0, dm0, *sizes, **plan.all)
        elif plan.team:
            for to, x in zip((dc0, dn0, dm0), last[1:], strict=True):
                to.copy_(x)
            try:
                plan.launch_teams(
                    _scan_backward_by_team, plan.S + 1, dy, last[0], *given, di, df, dz, do, plan.turn(4, y0),
                    plan.counters(y0), _late_flag(i), dy0, dc0, dn0, dm0, *sizes[:2], H, *sizes[2:],
                )
            except TeamRefused:
                plan = _Plan(i, (f, z, o), H, D, reverse, True)
        if not plan.whole and not plan.team:
            for to, x in zip((dy0, dc0, dn0, dm0), last, strict=True):
                to.copy_(x)
            _scan_backward_by_tiles[plan.grid](
                dy, *given, di, df, dz, do, dy0, dc0, dn0, dm0, *sizes, **plan.all
            )
    drecurrent, dbias = _weight_gradients(plan, (di, df, dz, do), y, y0, resets, H, reverse)
    grads = [g.to(x.dtype) for g, x in zip((di, df, dz, do), (i, f, z, o), strict=True)]
    return [*grads, drecurrent.to(recurrent.dtype), dbias.to(bias.dtype), dy0, dc0, dn0, dm0]


def _weight_gradients(
    plan: _Plan, grads: tuple[Tensor, ...], y: Tensor, y0: Tensor, resets: Tensor | None, H: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Over all tokens at once: what each read of y before it, times its gates' gradients."""
    with without_autocast(y.device.type):
        return _summed(plan, grads, y, y0, resets, H, reverse)


def _summed(
    plan: _Plan, grads: tuple[Tensor, ...], y: Tensor, y0: Tensor, resets: Tensor | None, H: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    first = y0.flatten(1).unsqueeze(1).to(y.dtype)
    before = torch.cat([y[:, 1:], first] if reverse else [first, y[:, :-1]], 1)
    if resets is not None:
        before = before.masked_fill(resets.bool().unsqueeze(-1), 0.0)
    before = before.to(plan.dot).unflatten(-1, (H, plan.D)).flatten(0, 1).transpose(0, 1)  # [H, B S, D]
    parts = []
    for g in grads:
        rows = g.to(plan.dot).unflatten(-1, (H, plan.D)).flatten(0, 1).transpose(0, 1)
        parts.append(before.transpose(1, 2) @ rows)  # [H, D, D]
    dbias = torch.stack([g.sum((0, 1), dtype=torch.float32) for g in grads]).unflatten(-1, (H, plan.D))
    return torch.stack(parts, 2), dbias


@_op_backward.register_fake
def _op_backward_fake(  # type: ignore[no-untyped-def]
    dy, dy1, dc1, dn1, dm1, i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, y, states, gates_if, gates_zo, reverse
):
    return [x.new_empty(x.shape) for x in (i, f, z, o, recurrent, bias, y0, c0, n0, m0)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[0], *(x if x.numel() else None for x in output[5:]))
    ctx.reverse = reverse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[5:])


def _differentiate(ctx, dy, *later):  # type: ignore[no-untyped-def]
    *tensors, y, states, gates_if, gates_zo = ctx.saved_tensors
    if states is None:  # nobody said that a gradient would be asked for
        states, gates_if, gates_zo = _op(*tensors, ctx.reverse, True)[5:]
    last = (common.filled(grad, like) for grad, like in zip(later[:4], tensors[6:10], strict=True))
    grads = _op_backward(common.filled(dy, y), *last, *tensors, y, states, gates_if, gates_zo, ctx.reverse)
    return *grads, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("slstm", "Triton"))


def run(
    gates: tuple[Tensor, Tensor, Tensor, Tensor], recurrent: Tensor, bias: Tensor, state: SLSTMState,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, SLSTMState]:
    """As `slstm_reference.run`; y in the dtype of i."""
    H, D = recurrent.shape[:2]
    if gates[0].numel() == 0:
        return implementation("slstm", "torch").run(gates, recurrent, bias, state, resets, reverse)
    tensors = (*gates, recurrent, bias, *state)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    marks = common.marks(resets)
    y, *last = _op(*tensors, marks, reverse, keep)[:5]
    return y.unflatten(-1, (H, D)), SLSTMState(*last)


def _can(**facts: Any) -> tuple[bool, str]:
    can, reason = common.can(**facts)
    if can and facts.get("head_dim", 1) > WIDTH:
        return False, f"heads of {facts['head_dim']} channels; at most {WIDTH}"
    return can, reason


def _tiles(
    arch: str, head_dim: int, dtype: torch.dtype = torch.bfloat16, heads: int = 1, batch: int = ROWS,
    index: int | None = None, dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    kinds = {(dtypes or {}).get(name, dtype) for name in "ifzo"}
    about = head_dim, "bf16" if kinds == {torch.bfloat16} else "fp32" if kinds == {torch.float32} else "tf32"
    processors, room = common.PROCESSORS.get(arch, 0), common.SHARED.get(arch, 0)
    if index is not None:
        processors, room = common.processors_of(index), common.shared_of(index)
        if torch.device("cuda", index) in _no_teams:
            processors = 0
    size = heads, batch, processors, room
    return {way: tiles(*about, way == "backward", arch, *size) for way in ("forward", "backward")}


def _example(head_dim: int, heads: int = 1, resets: bool = False, reverse: bool = False, **facts: Any) -> Any:
    from seqblocks.kernels.slstm import slstm

    tensors = {name: normal(3, 20, heads * head_dim, seed=at) for at, name in enumerate("ifzo")}
    tensors["recurrent"] = normal(heads, head_dim, 4, head_dim, seed=4) * head_dim**-0.5
    tensors["bias"] = normal(4, heads, head_dim, seed=5)
    options: dict[str, Any] = {"reverse": reverse, "return_state": True}
    if resets:
        options["resets"] = (normal(3, 20) > 1.0).to(facts["device"])
    return slstm, tensors, options


register("slstm", "triton", run, _can, _tiles, _example)
