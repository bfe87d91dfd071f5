"""Functions that the kernels of the selective scan share: the part of each program, and loads of tokens.

u, dt, z, y [B, S, E]; A [E, N]; B, C [B, S, G, N] or [E, N]; h0, last [B, E, N]; between [B, chunks, E, N];
resets [B, S]. W = E / G. xb, xs, xg: strides of x over batch, tokens, groups.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import binary, jit, softplus, tl


@jit
@no_type_check
def program_share(S, K, L, W, BE: tl.constexpr):
    """Return this program's sequence, first token and end, group, and channels within the group and among all."""
    blocks = tl.cdiv(W, BE)
    begin = tl.program_id(0) % K * L
    group = tl.program_id(1) // blocks
    within = tl.program_id(1) % blocks * BE + tl.arange(0, BE)
    return (tl.program_id(0) // K).to(tl.int64), begin, min(S, begin + L), group, within, group * W + within


@jit
@no_type_check
def cells_of(n, e, E):
    """Return the offsets [BN, BE] of states in [N, E], where channels are adjacent, as in the threads."""
    return n[:, None] * E + e[None, :]


@jit
@no_type_check
def load_shift(bias, e, is_channel):
    """Load the bias of the steps, [BE]."""
    out = is_channel.to(tl.float32) * 0.0
    if bias is not None:
        out = tl.load(bias + e, is_channel, 0.0).to(tl.float32)
    return out


@jit
@no_type_check
def step_of(dt, shift, SOFTPLUS: tl.constexpr):
    step = dt.to(tl.float32) + shift
    if SOFTPLUS:
        step = softplus(step)
    return step


@jit
@no_type_check
def load_some(x, mask):
    """Load x where the mask is true, or everywhere if it is None."""
    return tl.load(x) if mask is None else tl.load(x, mask, 0.0)


@jit
@no_type_check
def load_tokens(
    x, dt, z, B, C, resets, i, rest, is_channel, is_n, xs, ds, zs, Bs, Cs, SIGN: tl.constexpr, STEPS: tl.constexpr
):
    """Load the inputs of STEPS tokens in their dtypes, starting i tokens after the one that the pointers point to.

    `rest` tokens are left from the pointers on. After them, the inputs of the last one are loaded again, without its
    mark.
    """
    all_x, all_dt, all_z, all_B, all_C, marks = (), (), (), (), (), ()
    for j in tl.static_range(STEPS):
        t = SIGN * min(i + j, rest - 1)
        all_x = all_x + (load_some(x + t * xs, is_channel),)
        all_dt = all_dt + (load_some(dt + t * ds, is_channel),)
        if z is not None:
            all_z = all_z + (load_some(z + t * zs, is_channel),)
        if Bs is not None:
            all_B = all_B + (load_some(B + t * Bs, is_n),)
        if Cs is not None:
            all_C = all_C + (load_some(C + t * Cs, is_n),)
        if resets is not None:
            marks = marks + (tl.load(resets + t, i + j < rest, 0).to(tl.int32),)
    return all_x, all_dt, all_z, all_B, all_C, marks


@jit
@no_type_check
def token_pointers(x, b, t, e, xb, xs):
    """Return pointers to token t of these channels in x [B, S, E]; None if x is absent."""
    pointers = None
    if x is not None:
        pointers = x + b * xb + t * xs + e
    return pointers


@jit
@no_type_check
def matrix_pointers(x, b, t, group, n, xb, xs, xg):
    """Return pointers to token t of this group in x [B, S, G, N]; None if x is constant or absent."""
    pointers = None
    if xs is not None:
        pointers = x + b * xb + group * xg + t * xs + n
    return pointers


@jit
@no_type_check
def mark_pointer(resets, b, t, S):
    """Return a pointer to the mark of token t in resets [B, S]; None if there are no resets."""
    pointer = None
    if resets is not None:
        pointer = resets + b * S + t
    return pointer


@jit
@no_type_check
def load_rates(A, cells, own):
    """Load the binary logarithms of the decay of a unit step, because exp2 is a hardware instruction."""
    return binary(tl.load(A + cells, own, 0.0))
