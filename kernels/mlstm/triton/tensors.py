"""Layouts of the tensors that kernels exchange, and functions that kernels share.

q, k, v, dh, i, f have strides xb, xs, xh over batch, tokens and heads; h, dq, dk, dv [B, S, H, D] and di, df [B, S, H]
are contiguous. N = B H heads, K chunks of L tokens, T = K L places in the order of the scan:

    gates [9, N, T], factors [5, N, T]   one value per token, in planes: see below
    segments [N, T]                      the number of resets so far in the chunk
    links [2, N, K]                      the part of a chunk in the gradient of the m before it; 1 if the gradient of
                                         the m after it is passed on
    rows, columns [tiles of DK, N, T]    parts of q . dq and k . dk, computed with the same gradient of the divisor, so
                                         that common terms cancel, including their rounding errors
    C, dC [N, K, DK, DV], n, dn [N, K, DK]   states before each chunk; gradients of states after it
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import constexpr, jit, load_tile, operand, tl

# Planes of `gates`. E, X are binary logarithms.
GATES = 9
E = constexpr(0)  # e, rounded to float32
X = constexpr(1)  # x
U = constexpr(2)  # weight of the state before the chunk, for this token
FLOOR = constexpr(3)  # exp(-m)
CARRIED = constexpr(4)  # 1 where the m before the chunk attains the maximum x
DEN = constexpr(5)  # q . n
WRITE = constexpr(6)  # weight of this token in the state after the chunk
E_REST = constexpr(7)  # rounding error of e
KEEP = constexpr(8)  # at the last place of a chunk: weight of the state before the chunk in the one after it

# Planes of `factors`.
FACTORS = 5
INVERSE = constexpr(0)  # 1 / (max + eps)
D_DEN = constexpr(1)  # gradient of q . n
D_M = constexpr(2)  # gradient of m
READ_C = constexpr(3)  # INVERSE times U and the scale of q
READ_N = constexpr(4)  # D_DEN times U and the scale of q


@jit
@no_type_check
def load_plane(planes, PLANE: tl.constexpr, size, base, j):
    """Load places base + j of one of several planes of this size."""
    return tl.load(planes + size * PLANE + base + j)


@jit
@no_type_check
def store_plane(planes, PLANE: tl.constexpr, size, base, j, x):
    tl.store(planes + size * PLANE + base + j, x)


@jit
@no_type_check
def start(x, n, H, c, S, xb, xs, xh, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Return a pointer to the first token of chunk or tile c of head n."""
    t = S - 1 - c * BT if REVERSE else c * BT
    return x + (n // H).to(tl.int64) * xb + (n % H).to(tl.int64) * xh + tl.cast(t, tl.int64) * xs


@jit
@no_type_check
def load_rows(x, n, H, tile, S, xb, xs, xh, d, is_t, is_d, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Load channels d of a tile of tokens: [tokens, channels]."""
    j = tl.arange(0, BT)
    sign = -1 if REVERSE else 1
    return load_tile(start(x, n, H, tile, S, xb, xs, xh, REVERSE, BT), sign * j * xs, d, is_t, is_d)


@jit
@no_type_check
def load_columns(x, n, H, tile, S, xb, xs, xh, d, is_t, is_d, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Load channels d of a tile of tokens transposed: [channels, tokens]."""
    j = tl.arange(0, BT)
    sign = -1 if REVERSE else 1
    return load_tile(start(x, n, H, tile, S, xb, xs, xh, REVERSE, BT), d, sign * j * xs, is_d, is_t)


@jit
@no_type_check
def store_rows(out, x, n, H, tile, S, d, is_t, is_d, D: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Store x [tokens, channels d] into a contiguous tensor [B, S, H, D]."""
    j = tl.arange(0, BT)
    sign = -1 if REVERSE else 1
    to = start(out, n, H, tile, S, tl.cast(S, tl.int64) * H * D, H * D, D, REVERSE, BT)
    to += (sign * j * H * D)[:, None] + d[None, :]
    tl.store(to, x.to(out.dtype.element_ty), is_t[:, None] & is_d[None, :])


@jit
@no_type_check
def inside(d, D: tl.constexpr, B: tl.constexpr):
    """Return the mask of the B channels d that exist: a constant if all do, which saves the comparison."""
    if D % B == 0:
        return tl.full((B,), True, tl.int1)
    else:
        return d < D


@jit
@no_type_check
def own_tile(S, SHARING: tl.constexpr, L: tl.constexpr, BT: tl.constexpr):
    """Return a program's head, its tile, and its tokens. SHARING adjacent programs have the same tile.

    In order: head; tile within the head and within its chunk; index of the chunk; offset in planes; size of planes;
    tokens; mask of those that exist.
    """
    own, count = tl.program_id(0) // SHARING, tl.num_programs(0) // SHARING
    tiles = tl.cdiv(S, L) * (L // BT)
    tile = own % tiles
    j = tl.arange(0, BT)
    return (
        own // tiles, tile, tile % (L // BT), (own // (L // BT)).to(tl.int64),
        own.to(tl.int64) * BT, count.to(tl.int64) * BT, j, j < S - tile * BT,
    )


@jit
@no_type_check
def own_block(S, DK: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return a program's head and its block of C.

    In order: head; block; number of chunks; offset of the head in planes; size of planes; rows and columns of the
    block; masks of those that exist; mask of the rows of n to store, which only one of the blocks with the same rows
    does.
    """
    ACROSS: tl.constexpr = (DV + BV - 1) // BV
    BLOCKS: tl.constexpr = (DK + BK - 1) // BK * ACROSS
    n = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    chunks = tl.cdiv(S, L)
    dk = block // ACROSS * BK + tl.arange(0, BK)
    dv = block % ACROSS * BV + tl.arange(0, BV)
    return (
        n, block, chunks, n.to(tl.int64) * chunks * L, (tl.num_programs(0) // BLOCKS).to(tl.int64) * chunks * L,
        dk, dv, inside(dk, DK, BK), inside(dv, DV, BV), dk < tl.where(block % ACROSS == 0, DK, 0),
    )


# ------------------------------------------------------------------------------
# Products and weights between two tiles of tokens


@jit
@no_type_check
def products(
    a, b, down, across, is_down, is_across, D: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Return the dot products, over D channels, of all rows of one tile with all rows of the other."""
    out = tl.zeros((BT, BT), tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        is_d = inside(d, D, BD)
        rows = operand(load_tile(a, down, d, is_down, is_d), DOT, PRECISION)
        columns = operand(load_tile(b, d, across, is_d, is_across), DOT, PRECISION)
        out += tl.dot(rows, columns, input_precision=PRECISION)
    return out


@jit
@no_type_check
def load_segment(segments, base, j):
    """Load the segments of the tokens of a tile; without resets the result is arbitrary."""
    segment = j
    if segments is not None:
        segment = tl.load(segments + base + j)
    return segment


@jit
@no_type_check
def weights_read(gates, segments, plane, written, x, segment, t, s, j, log_scale, DOT: tl.constexpr):
    """Return the weights [t, s] with which tokens t of one tile read tokens s of another: scale * 2^(e_s - x_t), or 0.

    x, segment: those of tokens t. written: the place of tokens s. e has two parts, and the log of the scale is added to
    the second. For bfloat16 dots, which round weights at 2^-9, only the first part is used, and the scale is in x.
    """
    sees = s[None, :] <= t[:, None]
    if segments is not None:
        sees = sees & (tl.load(segments + written + j)[None, :] == segment[:, None])
    weights = load_plane(gates, E, plane, written, j)[None, :] - x[:, None]
    if tl.bfloat16 != DOT:  # e in two parts
        weights += (load_plane(gates, E_REST, plane, written, j) + log_scale)[None, :]
    return tl.exp2(tl.where(sees, weights, float("-inf")))


@jit
@no_type_check
def weights_written(gates, segments, plane, reading, e, segment, t, s, j, log_scale, base, DOT: tl.constexpr):
    """Return the same weights as [s, t], which saves a transpose.

    e, segment: those of tokens s. reading: the place of tokens t.
    """
    seen = s[:, None] <= t[None, :]
    if segments is not None:
        seen = seen & (tl.load(segments + reading + j)[None, :] == segment[:, None])
    weights = e[:, None] - load_plane(gates, X, plane, reading, j)[None, :]
    if tl.bfloat16 != DOT:  # e in two parts
        weights += (load_plane(gates, E_REST, plane, base, j) + log_scale)[:, None]
    return tl.exp2(tl.where(seen, weights, float("-inf")))


@jit
@no_type_check
def load_x(gates, plane, base, j, log_scale, DOT: tl.constexpr):
    """Load x as an argument of `weights_read`."""
    x = load_plane(gates, X, plane, base, j)
    if tl.bfloat16 == DOT:
        x -= log_scale
    return x


@jit
@no_type_check
def load_e(gates, plane, base, j, log_scale, DOT: tl.constexpr):
    """Load e as an argument of `weights_written`."""
    e = load_plane(gates, E, plane, base, j)
    if tl.bfloat16 == DOT:
        e += log_scale
    return e
