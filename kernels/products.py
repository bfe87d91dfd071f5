"""Matrix products of few tokens, whose time is that of reading the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

FEW = 4  # tokens
MOST_COPIED = 1 << 18  # numbers of a matrix that may be copied into a larger one: others take longer than two calls
LARGE = 1 << 19  # numbers of a matrix: smaller ones may be in the cache, where a matrix-vector product is faster
BLOCKS = 16  # that several threads can share
ON_MKL = torch.backends.mkl.is_available()


def linear_of_few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b of tokens x [N, I], weight [O, I], bias [O], as `torch.nn.functional.linear`.

    For up to 4 tokens MKL's matrix-vector product reads a large float32 matrix at half of the speed of memory, or less
    (AMD EPYC, one thread: 20 of 40 GB/s for one token, 9 for two). Its batched product of blocks of rows, with x as
    columns, reads at 38 and 27. The two round differently.
    """
    rows, width = weight.shape
    if rows * width < LARGE or not (ON_MKL and 0 < x.shape[0] <= FEW and x.dim() == 2 and _is_plain(x, weight)):
        return linear(x, weight, bias)
    blocks = math.gcd(rows, BLOCKS)
    columns = x.t().expand(blocks, width, -1)
    y = torch.bmm(weight.view(blocks, rows // blocks, width), columns).view(rows, -1).t().contiguous()
    return y if bias is None else y + bias


def prepare_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return f(x) = `linear_of_few(x, weight, bias)`. It does not look at the size of a small matrix again."""
    if weight.numel() < LARGE:
        return lambda x: linear(x, weight, bias)
    return lambda x: linear_of_few(x, weight, bias)


def prepare_joined(matrices: Sequence[tuple[Tensor, Tensor | None]]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes several linear maps of one input, their outputs side by side.

    matrices: weight [O, I] and bias [O] of each.
    """
    weight, bias = torch.cat([weight for weight, _ in matrices]), None
    if any(bias is not None for _, bias in matrices):
        bias = torch.cat([weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in matrices])
    return prepare_linear(weight, bias)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether all are contiguous on a CPU, in a dtype that MKL multiplies."""
    return all(x.is_cpu and x.dtype in (torch.float32, torch.float64) and x.is_contiguous() for x in tensors)
