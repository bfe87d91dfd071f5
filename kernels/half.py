"""Products of tokens in float32 with a matrix of 16 bits, which is read as it is or from a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from seqblocks.kernels import fbgemm
from seqblocks.kernels.dispatch.custom_op import is_seen
from seqblocks.kernels.products import HAS_AVX512, linear
from seqblocks.kernels.stored import StoredMatrix

COPIES_MAX_BYTES = 1 << 32  # bytes of a model's parameters: a larger one might not fit into the memory twice
MIN_ELEMENTS = 1 << 18  # elements: a smaller matrix is read as fast in float32, and its tokens need no conversion
HALF_KINDS = (torch.bfloat16, torch.float16)
# Up to so many tokens, torch's product is slower on AMD. It has instructions for 16 bits only with AVX-512.
FBGEMM_MAX_TOKENS = (
    {torch.bfloat16: 8, torch.float16: 16} if HAS_AVX512 else {torch.bfloat16: 64, torch.float16: 64}
)


class HalfMatrix(StoredMatrix):
    """A weight [O, I] in bfloat16 or float16. Each token is rounded to its dtype, and so is each sum of products.

    may_copy: whether a stream may keep a copy of it, whose products with a few tokens are faster. They round neither
    tokens nor sums.
    """

    def __init__(self, weight: Tensor, may_copy: bool = True) -> None:
        self.weight, self._may_copy = weight, may_copy

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
        multiply = fbgemm.half_product(self.weight, bias) if self._may_copy else None
        if multiply is None:
            return partial(self.product, bias=bias)
        limit = FBGEMM_MAX_TOKENS[self.weight.dtype]

        def product(x: Tensor) -> Tensor:
            suits = 0 < x.shape[0] <= limit and x.dtype is torch.float32 and not is_seen((x,))
            return multiply(x) if suits else self.product(x, bias)

        return product


def is_half(x: Tensor) -> bool:
    """Return whether the elements of a tensor have 16 bits."""
    return x.dtype in HALF_KINDS


def may_copy(size: int) -> bool:
    """Return whether streams keep a copy of the large matrices of a model whose parameters have so many bytes."""
    return size <= COPIES_MAX_BYTES


def fbgemm_max_tokens(elements: int, dtype: torch.dtype, size: int) -> int:
    """Return up to how many tokens of a stream FBGEMM multiplies by a matrix with so many elements, 0 for none.

    size: the bytes of the model's parameters.
    """
    able = fbgemm.HAS_HALF and elements >= MIN_ELEMENTS and may_copy(size)
    return FBGEMM_MAX_TOKENS.get(dtype, 0) if able else 0
