"""One token of Centaurus, or a few at once, with everything that does not depend on the tokens computed beforehand.

A few tokens are matrix products per channel, from the state and the tokens to the outputs and the next state.

R batch, T tokens, H features in, G features out, N state channels, M sub-states of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.centaurus.reference import Bank
from seqblocks.kernels.centaurus.torch import chunk_length, chunk_matrices, part_by_part
from seqblocks.kernels.products import prepare_linear
from seqblocks.token_function import TokenFunction

SEVERAL_MAX_TOKENS = 32  # The matrices grow with the square of the number of tokens.
MAX_LENGTHS = 4  # numbers of tokens whose matrices are kept
PART_MIN_CHANNELS = 1 << 16  # of all tokens: with one sub-state each, parts that stay in the cache take less time

Block = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # of batch, state and inputs


def prepare(bank: Bank) -> TokenFunction:
    """Return the function (s [R, N, M, 2], x [R, H]) -> (y [R, G], the next s), in the dtype of the bank and of x.

    It computes the same values as `centaurus`.
    """
    M, is_dense = bank.decay.shape[1], bank.B.dim() == 2
    size = torch.exp(bank.decay)
    re, im = size * torch.cos(bank.turn), size * torch.sin(bank.turn)
    if torch.compiler.is_compiling():  # compilers fuse real operations only
        return _prepare_real(bank, re, im)
    power = torch.complex(re, im)
    read = torch.stack([bank.read, -bank.across], -1).flatten(1)  # [N, 2 M]
    if not is_dense:
        read = read * bank.C.unsqueeze(-1)
    enter = prepare_linear(bank.B) if is_dense else bank.enter
    leave = prepare_linear(bank.C) if is_dense else None
    blocks: dict[tuple[int, bool], Block] = {}  # by number of tokens, and whether they are computed in parts

    def one(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        s = _times(s, power)
        s.select(-1, 0).add_(enter(x).unsqueeze(-1))
        seen = s.flatten(2) * read
        if bank.mode == "full":
            return seen.view(x.shape[0], -1, x.shape[1] * 2 * M).sum(-1), s
        v = seen.sum(-1)
        return v if leave is None else leave(v), s

    def several(batch: int, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.shape[0] // batch
        if tokens == 1:
            return one(s, x)
        in_parts = tokens > SEVERAL_MAX_TOKENS or (M == 1 and x.shape[0] * s.shape[1] >= PART_MIN_CHANNELS)
        block = blocks.get((tokens, in_parts))
        if block is None:
            block = _prepare_block(bank, tokens, in_parts, x.shape[1])
            if len(blocks) == MAX_LENGTHS:
                blocks.clear()
            blocks[tokens, in_parts] = block
        if leave is None or in_parts:
            return block(batch, s, x)
        v, s = block(batch, s, enter(x))
        return leave(v), s

    return TokenFunction(one, several, math.inf)


def _prepare_real(bank: Bank, re: Tensor, im: Tensor) -> TokenFunction:
    def one(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = s.unbind(-1)
        a, b = re * a - im * b + bank.enter(x).unsqueeze(-1), im * a + re * b
        return bank.leave((bank.read * a - bank.across * b).sum(-1), x.shape[1]), torch.stack([a, b], -1)

    return TokenFunction(one)


def _times(s: Tensor, factor: Tensor) -> Tensor:
    """Return s [R, N, M, 2] times complex numbers [N, M], in new memory."""
    return torch.view_as_real(torch.view_as_complex(s.contiguous()) * factor)


def _prepare_block(bank: Bank, tokens: int, in_parts: bool, H: int) -> Block:
    """Return a function of this many tokens: state and inputs to outputs and next state.

    Unless in parts, inputs and outputs are those of the channels if B and C are matrices, otherwise x and y.
    """
    if in_parts:
        return _prepare_chunks(bank, tokens)
    return _prepare_pairs(bank, tokens, H) if bank.mode == "full" else _prepare_channels(bank, tokens)


def _prepare_chunks(bank: Bank, tokens: int) -> Block:
    chunk = chunk_matrices(bank, chunk_length(tokens), False)

    def run(batch: int, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y, after = part_by_part(bank, x.reshape(tokens, batch, -1).transpose(0, 1), s, chunk, None, False)
        return y.transpose(0, 1).flatten(0, 1), after.clone(memory_format=torch.contiguous_format)

    return run


class Matrices(NamedTuple):
    """Matrices of T tokens, per channel, with the parts of complex numbers as in the state, [M, 2]."""

    within: Tensor  # [N, T, T]: token -> token
    into: Tensor  # [N, T, 2 M]: token -> state after the tokens
    out_of: Tensor  # [N, 2 M, T]: state before the tokens -> token
    through: Tensor  # complex [N, M]: factor from the state before to the state after the tokens


def _matrices(bank: Bank, T: int) -> Matrices:
    """Return the matrices of T tokens. Those of the modes dws and full include B and C."""
    within, into, out_of, through = chunk_matrices(bank, T, False)
    into, out_of = (x.unflatten(axis, (2, -1)).transpose(axis, axis + 1) for x, axis in ((into, 2), (out_of, 1)))
    into, out_of = into.flatten(2), out_of.flatten(1, 2)
    if bank.B.dim() == 1:
        B, C = bank.B.view(-1, 1, 1), bank.C.view(-1, 1, 1)
        within, into, out_of = B * within * C, B * into, out_of * C
    return Matrices(within, into, out_of, torch.complex(*through.unbind(1)))


def _prepare_channels(bank: Bank, T: int) -> Block:
    """Return a function of independent channels: state and inputs [T R, N] -> outputs [T R, N], next state."""
    within, into, out_of, through = _matrices(bank, T)
    N, M = through.shape
    seen = torch.cat([out_of, within], 1)  # [N, 2 M + T, T]

    def run(batch: int, s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        u = u.reshape(T, batch, N).permute(2, 1, 0).contiguous()
        v = torch.bmm(torch.cat([s.flatten(2).transpose(0, 1), u], 2), seen)
        after = _times(s, through)
        after.add_(torch.bmm(u, into).view(N, batch, M, 2).transpose(0, 1))
        return v.permute(2, 1, 0).reshape(-1, N), after

    return run


def _prepare_pairs(bank: Bank, T: int, H: int) -> Block:
    """Return a function of a channel for each pair of features: state and x [T R, H] -> y [T R, G], next state.

    Channels with the same input, or the same output, are one product: there are many, with small matrices.
    """
    within, into, out_of, through = _matrices(bank, T)
    M, G = through.shape[1], through.shape[0] // H
    within = within.view(G, H, T, T).permute(2, 1, 3, 0).reshape(T * H, T * G)
    into = into.view(G, H, T, 2 * M).permute(1, 2, 0, 3).reshape(H, T, G * 2 * M)
    out_of = out_of.reshape(G, H * 2 * M, T)

    def run(batch: int, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.reshape(T, batch, H)
        y = (x.transpose(0, 1).reshape(batch, -1) @ within).view(batch, T, G)
        y += torch.bmm(s.reshape(batch, G, -1).transpose(0, 1), out_of).permute(1, 2, 0)
        after = _times(s, through)
        added = torch.bmm(x.permute(2, 1, 0).contiguous(), into).view(H, batch, G, 2 * M)
        after.view(batch, G, H, 2 * M).add_(added.permute(1, 2, 0, 3))
        return y.transpose(0, 1).flatten(0, 1), after

    return run
