"""The block-diagonal map of one token, with its blocks in the layout that is fastest for few tokens.

G blocks with I input and O output features each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels.joined import Matrix, prepare_joined
from seqblocks.token_function import TokenFunction

DENSE_MAX_ELEMENTS = 1 << 14  # of the padded matrix: up to this size, one product is faster than a batch of blocks


def matrix(weight: Tensor, bias: Tensor | None) -> Matrix | None:
    """Return the blocks [G, O, I] as one matrix [G * O, G * I] padded with zeros, or None if it is large."""
    G, O, I = weight.shape
    return Matrix(torch.block_diag(*weight), bias, G) if G * O * G * I <= DENSE_MAX_ELEMENTS else None


def prepare(weight: Tensor, bias: Tensor | None) -> TokenFunction:
    """Return the function x [B, G * I] -> [B, G * O]. weight [G, O, I], bias [G * O]."""
    G, O, I = weight.shape
    if torch.compiler.is_compiling():  # Compiled code would copy the blocks for each token.
        return TokenFunction(lambda x: _plus(torch.einsum("bgi,goi->bgo", x.view(-1, G, I), weight).flatten(1), bias))
    whole = matrix(weight, bias)
    if whole is not None:
        return TokenFunction(prepare_joined([whole]), blocks=(weight, bias))
    blocks = weight.transpose(1, 2).contiguous()

    def one(x: Tensor) -> Tensor:
        return _plus(torch.bmm(x.view(-1, G, I).transpose(0, 1), blocks).transpose(0, 1).reshape(-1, G * O), bias)

    return TokenFunction(one, blocks=(weight, bias))


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
