"""Functions that the kernels of the sLSTM share: the cell, its gradient, loads and stores.

i, f, z, o and dy have strides over batch and tokens; the channels of a head are adjacent. recurrent [H, D, 4, D];
bias [4, H, D]; y and the gradients of the gates [B, S, H, D]; saved states c, n, m [3, B, S, H, D]; saved gates
i, f [2, B, S, H, D] and z, o [2, B, S, H, D]; states and their gradients [B, H, D].
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import constexpr, exp, jit, load_tile, log_sigmoid, reciprocal, sigmoid, tl

I_GATE, F_GATE, Z_GATE, O_GATE = (constexpr(place) for place in range(4))
N_STATE, M_STATE = constexpr(1), constexpr(2)  # c is first


@jit
@no_type_check
def tanh(x):
    """Return tanh(x) with an error of at most 1e-7, from e^-2|x|, which cannot overflow."""
    v = exp(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, v - 1.0, 1.0 - v) * reciprocal(1.0 + v)


@jit
@no_type_check
def advance(i, f, z, o, c, n, m):
    """Return y, c, n, m after a token, from its gate pre-activations and the previous c, n, m."""
    through = m + log_sigmoid(f)
    top = tl.where(n == 0.0, i, tl.maximum(i, through))
    write = exp(i - top)
    decay = exp(tl.minimum(through - top, 0.0))
    c = decay * c + write * tanh(z)
    n = decay * n + write
    return sigmoid(o) * c / n, c, n, top


@jit
@no_type_check
def advance_gradients(dy, dc, dn, dm, i, f, z, o, c, n, m, old_c, old_n, old_m):
    """Return the gradients of the gates and of the old c, n, m before the token.

    dy, dc, dn, dm: gradients of y, c, n, m after the token.
    """
    through = old_m + log_sigmoid(f)
    first = old_n == 0.0
    write = exp(i - m)
    decay = exp(tl.minimum(through - m, 0.0))
    gate = sigmoid(o)
    value = tanh(z)
    share = dy * gate / n
    dc += share
    dn -= share * c / n
    of_write = (dc * value + dn) * write
    of_decay = tl.where(first, 0.0, (dc * old_c + dn * old_n) * decay)
    dm -= of_write + of_decay
    from_input = first | (i >= through)
    dthrough = of_decay + tl.where(from_input, 0.0, dm)
    di = of_write + tl.where(from_input, dm, 0.0)
    df = dthrough * sigmoid(-f)
    dz = dc * write * (1.0 - value * value)
    do = dy * (c / n) * gate * (1.0 - gate)
    return di, df, dz, do, dc * decay, dn * decay, dthrough


@jit
@no_type_check
def carried(x, mark, resets):
    """Return x with zeros where a sequence begins: not even NaN and inf pass from one sequence to another."""
    if resets is not None:
        x = tl.where(mark == 0, x, 0.0)
    return x


@jit
@no_type_check
def all_carried(y, c, n, m, mark, resets):
    return carried(y, mark, resets), carried(c, mark, resets), carried(n, mark, resets), carried(m, mark, resets)


@jit
@no_type_check
def live_gradient(x, mark, resets):
    """Return a gradient x with zeros for tokens without a gradient, whose saved values may not be finite."""
    if resets is not None:
        x = tl.where(mark < 2, x, 0.0)
    return x


# ------------------------------------------------------------------------------
# Loads and stores


@jit
@no_type_check
def load_mark(resets, t, b, is_b, S):
    """Load the marks of token t: nonzero where it begins a sequence, at least 2 where it has no gradient."""
    mark = (b < 0)[:, None]
    if resets is not None:
        mark = tl.load(resets + b * S + t, is_b, 0)[:, None]
    return mark


@jit
@no_type_check
def load_gates(i, f, z, o, t, b, wide, ib, js, fb, fs, zb, zs, ob, os, is_b, is_d):
    """Load the gates of token t in their dtypes."""
    return (
        load_tile(i, b * ib + t * js, wide, is_b, is_d), load_tile(f, b * fb + t * fs, wide, is_b, is_d),
        load_tile(z, b * zb + t * zs, wide, is_b, is_d), load_tile(o, b * ob + t * os, wide, is_b, is_d),
    )


@jit
@no_type_check
def load_bias(bias, GATE: tl.constexpr, H, D, wide, is_d):
    """Load the bias of a gate, [1, BD]. wide: indices of the channels among those of all heads."""
    return tl.load(bias + GATE * H * D + wide, is_d, 0.0)[None, :]


@jit
@no_type_check
def load_biases(bias, H, D, wide, is_d):
    """Load the biases of the four gates."""
    return (
        load_bias(bias, I_GATE, H, D, wide, is_d), load_bias(bias, F_GATE, H, D, wide, is_d),
        load_bias(bias, Z_GATE, H, D, wide, is_d), load_bias(bias, O_GATE, H, D, wide, is_d),
    )


@jit
@no_type_check
def load_matrix(at, GATE: tl.constexpr, D, mask, DOT: tl.constexpr):
    """Load the matrix of a gate as an operand of a dot. at: pointers to the matrix of the input gate."""
    return tl.load(at + GATE * D, mask, 0.0).to(DOT)


@jit
@no_type_check
def load_matrices(at, D, mask, DOT: tl.constexpr):
    """Load the matrices of the four gates."""
    return (
        load_matrix(at, I_GATE, D, mask, DOT), load_matrix(at, F_GATE, D, mask, DOT),
        load_matrix(at, Z_GATE, D, mask, DOT), load_matrix(at, O_GATE, D, mask, DOT),
    )


@jit
@no_type_check
def load_state(c, n, m, cell, mask):
    return tl.load(c + cell, mask, 0.0), tl.load(n + cell, mask, 0.0), tl.load(m + cell, mask, 0.0)


@jit
@no_type_check
def store_state(c, n, m, cell, c_value, n_value, m_value, mask):
    tl.store(c + cell, c_value, mask)
    tl.store(n + cell, n_value, mask)
    tl.store(m + cell, m_value, mask)


@jit
@no_type_check
def store_gate_gradients(di, df, dz, do, at, gi, gf, gz, go, mask):
    tl.store(di + at, gi.to(di.dtype.element_ty), mask)
    tl.store(df + at, gf.to(df.dtype.element_ty), mask)
    tl.store(dz + at, gz.to(dz.dtype.element_ty), mask)
    tl.store(do + at, go.to(do.dtype.element_ty), mask)


@jit
@no_type_check
def store_kept(states, gates_if, gates_zo, at, plane, mask, c, n, m, i, f, z, o):
    """Store the states and gates of a token for the backward pass, if there will be one."""
    if states is not None:
        tl.store(states + at, c, mask)
        tl.store(states + N_STATE * plane + at, n, mask)
        tl.store(states + M_STATE * plane + at, m, mask)
        tl.store(gates_if + at, i, mask)
        tl.store(gates_if + plane + at, f, mask)
        tl.store(gates_zo + at, z.to(gates_zo.dtype.element_ty), mask)
        tl.store(gates_zo + plane + at, o.to(gates_zo.dtype.element_ty), mask)


@jit
@no_type_check
def token_gradients(
    dy, dc, dn, dm, resets, states, gates_if, gates_zo, c0, n0, m0, at, past, cell, plane, b, is_d, B, rest, mark
):
    """Return `advance_gradients` of a token from its saved values.

    rest: the number of tokens before it; at 0, the old state is c0, n0, m0.
    """
    mask = (b < B)[:, None] & is_d[None, :]
    old = (b < tl.where(rest > 0, B, 0))[:, None] & is_d[None, :]
    given = (b < tl.where(rest > 0, 0, B))[:, None] & is_d[None, :]
    old_c = tl.load(states + past, old, 0.0) + tl.load(c0 + cell, given, 0.0)
    old_n = tl.load(states + N_STATE * plane + past, old, 0.0) + tl.load(n0 + cell, given, 0.0)
    old_m = tl.load(states + M_STATE * plane + past, old, 0.0) + tl.load(m0 + cell, given, 0.0)
    c = tl.load(states + at, mask, 0.0)
    n = tl.load(states + N_STATE * plane + at, mask, 1.0)
    m = tl.load(states + M_STATE * plane + at, mask, 0.0)
    i = tl.load(gates_if + at, mask, 0.0)
    f = tl.load(gates_if + plane + at, mask, 0.0)
    z = tl.load(gates_zo + at, mask, 0.0).to(tl.float32)
    o = tl.load(gates_zo + plane + at, mask, 0.0).to(tl.float32)
    di, df, dz, do, dc, dn, dm = advance_gradients(
        dy, dc, dn, dm, i, f, z, o, c, n, m,
        carried(old_c, mark, resets), carried(old_n, mark, resets), carried(old_m, mark, resets),
    )
    di, df = live_gradient(di, mark, resets), live_gradient(df, mark, resets)
    dz, do = live_gradient(dz, mark, resets), live_gradient(do, mark, resets)
    return di, df, dz, do, dc, dn, dm
