"""Products of tokens in float32 with a matrix of 16 bits, which is read as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from seqblocks.kernels.products import linear
from seqblocks.kernels.stored import StoredMatrix

MIN_ELEMENTS = 1 << 18  # elements: a smaller matrix is read as fast in float32, and its tokens need no conversion
HALF_KINDS = (torch.bfloat16, torch.float16)


class HalfMatrix(StoredMatrix):
    """A weight [O, I] in bfloat16 or float16. Each token is rounded to its dtype, and so is each sum of products."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def numel(self) -> int:
        return self.weight.numel()

    def rows(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight).float()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x.to(self.weight.dtype), self.weight).float()
        return y if bias is None else y.add_(bias)

    def prepare(self, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return partial(self.product, bias=bias)


def is_half(x: Tensor) -> bool:
    """Return whether the elements of a tensor have 16 bits."""
    return x.dtype in HALF_KINDS
