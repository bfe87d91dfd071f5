"""Several linear maps of one input as one product, for the tokens of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.products import prepare_linear

COPY_MAX_ELEMENTS = 1 << 18  # Copying a matrix with more elements into a larger one takes longer than a second call.
WHOLE_BLOCKS_MAX_TOKENS = 8  # tokens: up to this many, a block-diagonal matrix takes no longer whole than as blocks
BLOCK_MIN_FEATURES = 16  # a matrix with narrower blocks is multiplied whole for any number of tokens.


class Matrix(NamedTuple):
    """A linear map: weight [O, I], bias [O]. blocks: the number of equal blocks of a block-diagonal weight."""

    weight: Tensor  # or a StoredMatrix
    bias: Tensor | None = None
    blocks: int = 1


def prepare_joined(matrices: Sequence[Matrix]) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) that computes several linear maps of one input and concatenates their outputs."""
    whole, blocks = _prepare_whole(matrices), matrices[0].blocks
    alike = len({matrix.weight.shape for matrix in matrices}) == 1 and all(m.blocks == blocks for m in matrices)
    is_narrow = matrices[0].weight.shape[1] < BLOCK_MIN_FEATURES * blocks
    if not alike or blocks == 1 or is_narrow or torch.compiler.is_compiling():
        return whole
    by_block = _prepare_blocks(matrices, blocks)
    return lambda x: (whole if x.shape[0] <= WHOLE_BLOCKS_MAX_TOKENS else by_block)(x)


def _prepare_whole(matrices: Sequence[Matrix]) -> Callable[[Tensor], Tensor]:
    if len(matrices) == 1:
        return prepare_linear(matrices[0].weight, matrices[0].bias)
    weights = [matrix.weight for matrix in matrices if isinstance(matrix.weight, Tensor)]
    if len(weights) < len(matrices):
        each = [prepare_linear(matrix.weight, matrix.bias) for matrix in matrices]
        return lambda x: torch.cat([run(x) for run in each], -1)
    return prepare_linear(torch.cat(weights), _joined_bias(matrices))


def _prepare_blocks(matrices: Sequence[Matrix], blocks: int) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) for M matrices of equal shapes with G blocks each, as one batched product of the blocks."""
    M, (O, I) = len(matrices), (size // blocks for size in matrices[0].weight.shape)
    each = torch.stack([matrix.weight.view(blocks, O, blocks, I) for matrix in matrices])
    weight = each.diagonal(0, 1, 3).permute(3, 2, 0, 1).reshape(blocks, I, M * O)  # from [M, O, I, G]
    bias = _joined_bias(matrices)

    def product(x: Tensor) -> Tensor:
        y = torch.bmm(x.view(-1, blocks, I).transpose(0, 1), weight)  # [G, N, M O]
        y = y.view(blocks, -1, M, O).permute(1, 2, 0, 3).reshape(-1, M * blocks * O)
        return y if bias is None else y.add_(bias)

    return product


def _joined_bias(matrices: Sequence[Matrix]) -> Tensor | None:
    if all(matrix.bias is None for matrix in matrices):
        return None
    return torch.cat([m.weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in matrices])
