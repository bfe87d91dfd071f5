"""The sLSTM in Triton: all tokens in one launch forward, and backward in one and a product for the recurrent weights.

A program owns a head of 16 sequences and walks along the tokens, for nothing of this recurrence can be had before its
turn. Where the head's four matrices fit beside it (`tiles` knows), they stay on chip and the states in registers.
Wider heads go by tiles of channels: matrices come from the second-level cache at each token, and states and outputs
pass through memory that only this program touches, behind a barrier.

Forward keeps y, c, n, m and the four gates of every token for the backward pass, if there will be one. The derivative
is that of the definition; what m is made of gets its gradient (see slstm_torch.py). Gradients of the gates are stored,
and those of the matrices are one product of them with the outputs of the tokens before.

Gates, states and sums are float32. Dots take bfloat16 where all gates are; float16, whose range a gradient may leave,
goes through tf32, which has as many digits; float32 stays float32. Nothing is transposed but by loading it that way.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import form, no_second_derivative, register, without_autocast
from seqblocks.kernels.self_check import normal
from seqblocks.kernels.slstm_reference import SLSTMState
from seqblocks.kernels.triton_common import exp, jit, lined, log_sigmoid, sigmoid, tl, up

ROWS = 16  # sequences of a program: the least that a dot takes
WIDTH = 1024  # of a head, at most

# ------------------------------------------------------------------------------
# The kernels.   Places: i, f, z, o, dy by strides over batch and tokens, a head's channels side by side; recurrent
# [H, D, 4, D], bias [4, H, D]; y and the gates' gradients [B, S, H, D]; kept states [3, B, S, H, D] are c, n, m and
# kept gates i, f [2, B, S, H, D] and z, o [2, B, S, H, D]; states and their gradients [B, H, D].


@jit
@no_type_check
def _tanh(x):
    """Within 1e-7 of it; e^-2|x| does not overflow."""
    v = exp(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, v - 1.0, 1.0 - v) / (1.0 + v)


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
    """Of token t, as they lie there; and whether the sequence goes on with it."""
    goes_on = (b >= 0).to(tl.float32)[:, None]
    if resets is not None:
        goes_on = (tl.load(resets + b * S + t, is_b, 0) == 0).to(tl.float32)[:, None]
    return (
        _load(i, b * ib + t * js, wide, is_b, is_d), _load(f, b * fb + t * fs, wide, is_b, is_d),
        _load(z, b * zb + t * zs, wide, is_b, is_d), _load(o, b * ob + t * os, wide, is_b, is_d), goes_on,
    )


@jit(do_not_specialize=["S", "B"])
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
    next_i, next_f, next_z, next_o, goes_on = _gates(
        i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
    )
    for step in range(S):
        t = tl.cast(S - 1 - step if REVERSE else step, tl.int64)
        xi = next_i.to(tl.float32) + bias_i
        xf = next_f.to(tl.float32) + bias_f
        xz = next_z.to(tl.float32) + bias_z
        xo = next_o.to(tl.float32) + bias_o
        if resets is not None:
            out *= goes_on
            c *= goes_on
            n *= goes_on
            m *= goes_on
        # asked for a token ahead: the memory's answer takes about as long as all the rest of a token
        next_i, next_f, next_z, next_o, goes_on = _gates(
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
        if states is not None:
            tl.store(states + at, c, here)
            tl.store(states + plane + at, n, here)
            tl.store(states + 2 * plane + at, m, here)
            tl.store(gates_if + at, xi, here)
            tl.store(gates_if + plane + at, xf, here)
            tl.store(gates_zo + at, xz.to(gates_zo.dtype.element_ty), here)
            tl.store(gates_zo + plane + at, xo.to(gates_zo.dtype.element_ty), here)
    tl.store(y1 + cell, out, here)
    tl.store(c1 + cell, c, here)
    tl.store(n1 + cell, n, here)
    tl.store(m1 + cell, m, here)


@jit(do_not_specialize=["S", "B"])
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
            own_i, own_f, own_z, own_o, goes_on = _gates(
                i, f, z, o, resets, t, b, wide, S, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d
            )
            xi = tl.zeros((BB, BD), tl.float32)
            xf = tl.zeros((BB, BD), tl.float32)
            xz = tl.zeros((BB, BD), tl.float32)
            xo = tl.zeros((BB, BD), tl.float32)
            for start in range(0, D, BD):
                k = start + tl.arange(0, BD)
                read = (_load(before, row, k, is_b, k < D) * goes_on).to(DOT)
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
            c = tl.load(c1 + cell, here, 0.0) * goes_on
            n = tl.load(n1 + cell, here, 0.0) * goes_on
            m = tl.load(m1 + cell, here, 0.0) * goes_on
            out, c, n, m = _cell(xi, xf, xz, xo, c, n, m)
            at = ((b * S + t) * H + head)[:, None] * D + d[None, :]
            tl.store(y + at, out.to(y.dtype.element_ty), here)
            tl.store(after + cell, out, here)
            tl.store(y1 + cell, out, here)
            tl.store(c1 + cell, c, here)
            tl.store(n1 + cell, n, here)
            tl.store(m1 + cell, m, here)
            if states is not None:
                tl.store(states + at, c, here)
                tl.store(states + plane + at, n, here)
                tl.store(states + 2 * plane + at, m, here)
                tl.store(gates_if + at, xi, here)
                tl.store(gates_if + plane + at, xf, here)
                tl.store(gates_zo + at, xz.to(gates_zo.dtype.element_ty), here)
                tl.store(gates_zo + plane + at, xo.to(gates_zo.dtype.element_ty), here)
        tl.debug_barrier()  # the next token reads what other threads wrote


@jit
@no_type_check
def _token_gradients(
    dy, dc, dn, dm, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B, rest, goes_on
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
    return _cell_gradients(dy, dc, dn, dm, i, f, z, o, c, n, m, c_ * goes_on, n_ * goes_on, m_ * goes_on)


@jit(do_not_specialize=["S", "B"])
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
        goes_on = tl.zeros((BB, 1), tl.float32) + 1.0
        if resets is not None:
            goes_on = (tl.load(resets + b * S + t, is_b, 0) == 0).to(tl.float32)[:, None]
        out += _load(dy, b * gb + t * gs, wide, is_b, is_d).to(tl.float32)
        gi, gf, gz, go, c, n, m = _token_gradients(
            out, c, n, m, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B, S - 1 - step,
            goes_on,
        )
        tl.store(di + at, gi.to(di.dtype.element_ty), here)
        tl.store(df + at, gf.to(df.dtype.element_ty), here)
        tl.store(dz + at, gz.to(dz.dtype.element_ty), here)
        tl.store(do + at, go.to(do.dtype.element_ty), here)
        out = tl.dot(gi.to(DOT), from_i, input_precision=PRECISION)
        out += tl.dot(gf.to(DOT), from_f, input_precision=PRECISION)
        out += tl.dot(gz.to(DOT), from_z, input_precision=PRECISION)
        out += tl.dot(go.to(DOT), from_o, input_precision=PRECISION)
        out *= goes_on
        c *= goes_on
        n *= goes_on
        m *= goes_on
    tl.store(dy0 + cell, out, here)
    tl.store(dc0 + cell, c, here)
    tl.store(dn0 + cell, n, here)
    tl.store(dm0 + cell, m, here)


@jit(do_not_specialize=["S", "B"])
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
        goes_on = tl.zeros((BB, 1), tl.float32) + 1.0
        if resets is not None:
            goes_on = (tl.load(resets + b * S + t, is_b, 0) == 0).to(tl.float32)[:, None]
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
                out, c, n, m, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B, S - 1 - step,
                goes_on,
            )
            tl.store(di + at, gi.to(di.dtype.element_ty), here)
            tl.store(df + at, gf.to(df.dtype.element_ty), here)
            tl.store(dz + at, gz.to(dz.dtype.element_ty), here)
            tl.store(do + at, go.to(do.dtype.element_ty), here)
            tl.store(dc0 + cell, c * goes_on, here)
            tl.store(dn0 + cell, n * goes_on, here)
            tl.store(dm0 + cell, m * goes_on, here)
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
            tl.store(dy0 + row[:, None] + d[None, :], out * goes_on, is_b[:, None] & is_d[None, :])
        tl.debug_barrier()


# ------------------------------------------------------------------------------
# Launching


def tiles(width: int, narrow: bool, backward: bool, arch: str) -> dict[str, int]:
    """Sequences and channels of a program, whether the head is one tile, warps, and tokens loaded ahead.

    The four matrices of a head take 8 D^2 bytes on chip in bfloat16 and 16 D^2 in float32; what is loaded ahead takes
    as much again in the backward pass, which reads thirteen numbers a channel.
    """
    BD = max(16, common.power_of_two(width))
    most = {"sm_80": (128, 32), "sm_90": (128, 64)}.get(arch, (16, 16))[0 if narrow else 1]
    whole = most >= BD
    BD = BD if whole else min(BD, 64 if narrow else 32)
    # a token waits for the one before it, so it is shared by many threads: four channels each, as far as they fit
    warps = max(1, min(16 if whole and not backward else 8, ROWS * BD // (4 * common.lanes(arch))))
    stages = 1 if whole and backward and BD > 64 else 2
    return {"BB": ROWS, "BD": BD, "WHOLE": int(whole), "num_warps": warps, "num_stages": stages}


class _Plan:
    def __init__(
        self, x: Tensor, others: tuple[Tensor, ...], H: int, D: int, reverse: bool, backward: bool = False
    ) -> None:
        self.B, self.S = x.shape[:2]
        self.D = D
        dtypes = {y.dtype for y in (x, *others)}
        narrow = dtypes == {torch.bfloat16}
        self.tile = tiles(D, narrow, backward, common.arch(x))
        self.whole = bool(self.tile.pop("WHOLE"))
        self.grid = (H, up(self.B, self.tile["BB"]))
        self.dot = torch.bfloat16 if narrow else torch.float32
        self.all = {"REVERSE": reverse, "DOT": tl.bfloat16 if narrow else tl.float32}
        self.all |= {"PRECISION": "ieee" if narrow or dtypes == {torch.float32} else "tf32", **self.tile}


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
        else:
            for to, given in zip((y1, c1, n1, m1), (y0, c0, n0, m0), strict=True):
                to.copy_(given)
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
    plan = _Plan(i, (f, z, o), H, D, reverse, True)
    dy0, dc0, dn0, dm0 = (x.new_empty(x.shape) for x in (y0, c0, n0, m0))
    # not in float16: what comes from them, a token back and in the weights, may be too small for it
    di, df, dz, do = (x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, plan.dot)) for x in (i, f, z, o))
    resets = common.marks(resets)
    whole = (x.contiguous() for x in (recurrent.to(plan.dot), c0, n0, m0))
    last = [x.contiguous() for x in (dy1, dc1, dn1, dm1)]
    given = (*whole, resets, states, gates_if, gates_zo)
    sizes = (plan.S, plan.B, D, *dy.stride()[:2])
    with common.on(i):
        if plan.whole:
            _scan_backward[plan.grid](dy, *last, *given, di, df, dz, do, dy0, dc0, dn0, dm0, *sizes, **plan.all)
        else:
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
        return form("slstm", "torch")(gates, recurrent, bias, state, resets, reverse)
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
    arch: str, head_dim: int, dtype: torch.dtype = torch.bfloat16, **facts: Any
) -> dict[str, dict[str, int]]:
    narrow = dtype == torch.bfloat16
    return {way: tiles(head_dim, narrow, way == "backward", arch) for way in ("forward", "backward")}


def _example(head_dim: int, resets: bool = False, reverse: bool = False, **facts: Any) -> Any:
    from seqblocks.kernels.slstm import slstm

    tensors = {name: normal(3, 20, head_dim, seed=at) for at, name in enumerate("ifzo")}
    tensors["recurrent"] = normal(1, head_dim, 4, head_dim, seed=4) * head_dim**-0.5
    tensors["bias"] = normal(4, 1, head_dim, seed=5)
    options: dict[str, Any] = {"reverse": reverse, "return_state": True}
    if resets:
        options["resets"] = (normal(3, 20) > 1.0).to(facts["device"])
    return slstm, tensors, options


register("slstm", "triton", run, _can, _tiles, _example)
