"""Addresses and exponents between tokens, for the kernels of delta rules and decays per key.

q, k, v, g (the log decay), beta, dy have strides xb, xs, xh over batch, tokens and heads; y, dv [B, S, HV, V] and
dq, dk [B, S, HV, K] are contiguous. N = B HV heads, T = chunks x L token slots in scan order, W = K for a decay per
key, 1 for a decay per head:

    since, until [N, T, W]       sums of g within blocks of 16 tokens: from the first to this one; from the next to the
                                 last. With a bonus, `since` excludes the token's own decay, since reads come first
    blocks [3, N, T / 16, W]     sums over whole blocks: earlier ones in the chunk, later ones, the block itself
    through [N, chunks, W]       sums over chunks
    weights [N, T, L]            weights with which tokens (rows) read tokens of their chunk (columns), with the scale
    solved [N, T, L]             (I + A Diag(beta))^-1, where A holds the corresponding weights between keys
    C, dC [N, chunks, K, V]      states before each chunk; gradients of states after it

A reset is a decay of -inf, which gives everything before it a weight of 0. No sum has terms of both signs, so that no
digits are lost after a strong decay and no factor exceeds 1.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import constexpr, exp, jit, tl

BEFORE, AFTER, WHOLE = constexpr(0), constexpr(1), constexpr(2)


@jit
@no_type_check
def sign(REVERSE: tl.constexpr):
    """Return the direction of the scan, 1 or -1."""
    return -1 if REVERSE else 1


@jit
@no_type_check
def weight_down(sums, blocks, t, d, is_d, W: tl.constexpr):
    """Return weights from or to the chunk's boundary for tokens t (rows) and channels d (columns). W = 1: [rows, 1]."""
    if W == 1:
        return exp(tl.load(sums + t) + tl.load(blocks + t // 16))[:, None]
    else:
        is_d = is_d[None, :]
        inner = tl.load(sums + t[:, None] * W + d[None, :], is_d, 0.0)
        return exp(inner + tl.load(blocks + (t // 16)[:, None] * W + d[None, :], is_d, 0.0))


@jit
@no_type_check
def weight_across(sums, blocks, t, d, is_d, W: tl.constexpr):
    """Return the same weights with tokens as columns."""
    if W == 1:
        return exp(tl.load(sums + t) + tl.load(blocks + t // 16))[None, :]
    else:
        is_d = is_d[:, None]
        inner = tl.load(sums + t[None, :] * W + d[:, None], is_d, 0.0)
        return exp(inner + tl.load(blocks + (t // 16)[None, :] * W + d[:, None], is_d, 0.0))


@jit
@no_type_check
def within_block(sums, t, d, is_d, W: tl.constexpr):
    """Return the sums of tokens t (rows) within their block. W = 1: [rows, 1]."""
    if W == 1:
        return tl.load(sums + t)[:, None]
    else:
        return tl.load(sums + t[:, None] * W + d[None, :], is_d[None, :], 0.0)


@jit
@no_type_check
def between(blocks, first, end, d, is_d, W: tl.constexpr):
    """Return the sum over whole blocks, first <= block < end: [1, channels], W = 1: [1, 1]."""
    if W == 1:
        total = tl.zeros((1,), tl.float32)
        for block in range(first, end):
            total += tl.load(blocks + block)
        return total[None, :]
    else:
        total = tl.zeros(d.shape, tl.float32)
        for block in range(first, end):
            total += tl.load(blocks + block * W + d, is_d, 0.0)
        return total[None, :]


@jit
@no_type_check
def where(d, D: tl.constexpr, exists):
    """Return the mask of valid channels d of a token, all false unless it exists."""
    return d < tl.where(exists, D, 0)


@jit
@no_type_check
def cut(resets, exists):
    """Return -inf at a reset, else 0."""
    if resets is None:
        return 0.0
    else:
        return tl.where(tl.load(resets, exists, 0).to(tl.int32) == 0, 0.0, float("-inf"))


@jit
@no_type_check
def decays_of(g, resets, t, left, d, is_d, gs, REVERSE: tl.constexpr):
    """Return the decays of tokens t, of which `left` exist: [tokens, channels]. -inf at a reset."""
    total = tl.load(g + (sign(REVERSE) * t * gs)[:, None] + d[None, :], (t < left)[:, None] & is_d[None, :], 0.0)
    total = total.to(tl.float32)
    if resets is not None:
        total += cut(resets + sign(REVERSE) * t, t < left)[:, None]
    return total


@jit
@no_type_check
def own_decays(g, resets, t, left, d, is_d, gs, BONUS: tl.constexpr, REVERSE: tl.constexpr):
    """Return the part of the decays of tokens t that their own reads see: with a bonus, only the resets."""
    if BONUS:
        total = tl.zeros((t.shape[0], d.shape[0]), tl.float32)
        if resets is not None:
            total += cut(resets + sign(REVERSE) * t, t < left)[:, None]
        return total
    else:
        return decays_of(g, resets, t, left, d, is_d, gs, REVERSE)


@jit
@no_type_check
def sibling_decays(g, resets, t, left, d, is_d, gs, level, REVERSE: tl.constexpr):
    """Return for tokens t the sum of the decays in the other half of their part of 2^(level + 1) tokens."""
    t ^= 1 << level
    total = decays_of(g, resets, t, left, d, is_d, gs, REVERSE)
    for x in range(1, 1 << level):
        total += decays_of(g, resets, t ^ x, left, d, is_d, gs, REVERSE)
    return total


@jit
@no_type_check
def across_halves(t, s, level):
    """Return whether s is in the first half and t in the second half of one part of 2^(level + 1) tokens."""
    return (t > s) & ((t ^ s) >> level == 1)


@jit
@no_type_check
def token_decays(g, resets, t, left, gs, OWN: tl.constexpr, REVERSE: tl.constexpr):
    """Return the decays per head of tokens t, in their shape: -inf at a reset. Without OWN, only the resets."""
    total = tl.zeros(t.shape, tl.float32)
    if OWN and g is not None:
        total = tl.load(g + sign(REVERSE) * t * gs, t < left, 0.0).to(tl.float32)
    if resets is not None:
        total += cut(resets + sign(REVERSE) * t, t < left)
    return total


@jit
@no_type_check
def _sibling(g, resets, t, left, gs, level, REVERSE: tl.constexpr):
    """Return for tokens t the sum of the decays in the other half of their part of 2^(level + 1) tokens."""
    t ^= 1 << level
    total = token_decays(g, resets, t, left, gs, True, REVERSE)
    for x in range(1, 1 << level):
        total += token_decays(g, resets, t ^ x, left, gs, True, REVERSE)
    return total


@jit
@no_type_check
def chunk_exponents(
    g, resets, whole, left, gs, BONUS: tl.constexpr, REVERSE: tl.constexpr, L: tl.constexpr,
):
    """Return exponents of a decay per head between tokens t (rows) and s < t (columns) of a chunk.

    They are sums of what a second half has passed and what is ahead in the first half, see `across_halves`. whole: sums
    over the chunk's blocks of 16 tokens.
    """
    j = tl.arange(0, L)
    apart = j[:, None] ^ j[None, :]
    total = tl.zeros((L, L), tl.float32)
    passed = token_decays(g, resets, j, left, gs, not BONUS, REVERSE)
    ahead = tl.zeros((L,), tl.float32)
    for level in range(4):
        total = tl.where(apart >> level != 0, passed[:, None] + ahead[None, :], total)
        sibling = _sibling(g, resets, j, left, gs, level, REVERSE)
        passed += tl.where((j >> level & 1) == 1, sibling, 0.0)
        ahead += tl.where((j >> level & 1) == 1, 0.0, sibling)
    total = tl.where(apart >> 4 != 0, passed[:, None] + ahead[None, :], total)
    if L == 64:
        sibling = tl.load(whole + (j // 16 ^ 1))
        passed += tl.where((j >> 4 & 1) == 1, sibling, 0.0)
        ahead += tl.where((j >> 4 & 1) == 1, 0.0, sibling)
        total = tl.where(apart >> 5 != 0, passed[:, None] + ahead[None, :], total)
    return total
