"""Products with matrices of 8-bit integers: one scale per row of the matrix, and one per token of the input.

Integers are multiplied and added exactly, so that a token's result does not depend on the other tokens of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqblocks.errors import RunError

MAX_INT8 = 127
CUDA_MIN_ROWS = 17  # rows that torch's product takes there


class Int8Matrix(nn.Module):
    """A weight [O, I] as values [O, I] (int8) times scale [O], which has the dtype of the weight.

    It takes the place of a parameter, and is passed to functions of this package that take one.
    """

    values: Tensor
    scale: Tensor
    requires_grad = False

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Matrix:
        """Round a weight to the nearest multiple of the largest value of its row / 127."""
        scale = (weight.float().abs().amax(1) / MAX_INT8).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
        values = (weight.float() / scale[:, None].float()).round().clamp(-MAX_INT8, MAX_INT8)
        return cls(values.to(torch.int8), scale)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Int8Matrix:
        """Return one on the meta device, to be loaded."""
        values = torch.empty(shape, dtype=torch.int8, device="meta")
        return cls(values, torch.empty(shape[0], dtype=dtype, device="meta"))

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight that it stands for."""
        return self.scale.dtype

    def numel(self) -> int:
        return self.values.numel()

    def dequantized(self) -> Tensor:
        """Return the weight [O, I]."""
        return self.values * self.scale[:, None]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of these numbers, like an embedding: [..., I] for ids [...]."""
        return nn.functional.embedding(ids, self.values) * nn.functional.embedding(ids, self.scale[:, None])

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W' + b [..., O] for x [..., I], each token of which is rounded to 8 bits, in the dtype of x.

        Raises RunError if x requires gradients: rounding has none.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise RunError("a quantized model computes no gradients: use torch.no_grad(), or train the original")
        tokens = x.reshape(-1, x.shape[-1]).float()
        scale = tokens.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(MAX_INT8)
        y = _integers((tokens / scale).round_().to(torch.int8), self.values).mul_(scale).mul_(self.scale.float())
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)


def is_int8(weight: object) -> bool:
    """Return whether a weight is stored in 8 bits."""
    return isinstance(weight, Int8Matrix)


def _integers(x: Tensor, values: Tensor) -> Tensor:
    """Return x W' in float32 [N, O] for x [N, I] and values [O, I] of int8."""
    count = x.shape[0]
    if not count:
        return torch.zeros(0, values.shape[0], device=x.device)
    if x.is_cuda:
        if x.shape[1] % 8 or values.shape[0] % 8:
            return x.float() @ values.t().float()
        x = nn.functional.pad(x, (0, 0, 0, max(0, CUDA_MIN_ROWS - count)))
    y: Tensor = torch._int_mm(x, values.t())
    return y[:count].float()
