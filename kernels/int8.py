"""Products with matrices of 8-bit integers: one scale per row of the matrix, and one per token of the input.

Integers are multiplied and added exactly, so that a token's result does not depend on the other tokens of the call,
nor on which of torch's products computes it. There are two on a CPU: `torch._int_mm`, and for the few tokens of a
stream FBGEMM's on a rearranged copy of the matrix (measured in docs/kernels/products.md). A processor without VNNI
multiplies the integers in float32, in parts whose sums are exact: some converted rows at a time, or FBGEMM's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from seqblocks.errors import RunError
from seqblocks.kernels import numerics
from seqblocks.kernels.dispatch.compiled import forward_mode
from seqblocks.kernels.dispatch.custom_op import is_seen
from seqblocks.kernels.fbgemm import int8_product
from seqblocks.kernels.products import by_converted_rows
from seqblocks.kernels.stored import StoredMatrix

MAX_INT8 = 127
CUDA_MIN_ROWS = 17  # rows that torch's product takes there
FBGEMM_MAX_ROWS = 64 if numerics.SLOW_INT8 else 16 if numerics.ON_AMD else 8  # tokens: for more, others are faster


class Int8Matrix(nn.Module, StoredMatrix):
    """A weight [O, I] as values [O, I] (int8) times scale [O], which has the dtype of the weight.

    It takes the place of a parameter.
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

    def widened(self) -> Int8Matrix:
        """Return the matrix with a scale of at least 32 bits."""
        return self if self.scale.dtype.itemsize >= 4 else Int8Matrix(self.values, self.scale.float())

    def rows(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.values) * nn.functional.embedding(ids, self.scale[:, None])

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W' + b [..., O] for x [..., I], each token of which is rounded to 8 bits, in the dtype of x.

        Raises RunError if x requires gradients, or has a tangent: rounding has none.
        """
        tracked = torch.is_grad_enabled() and x.requires_grad
        if tracked or (forward_mode() and forward_ad.unpack_dual(x).tangent is not None):
            raise RunError("a quantized model computes no gradients: use torch.no_grad(), or train the original")
        tokens = x.reshape(-1, x.shape[-1]).float()
        scale = _scale(tokens)
        y = _integers(_rounded(tokens, scale), self.values).mul_(self.scale.float()).mul_(scale)
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def prepare(self, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """Return f(x [N, I]) -> `product(x, bias)` for a stream, without gradients: equal in every bit."""
        multiply = int8_product(self.values, self.scale) if self.scale.dtype is torch.float32 else None
        if multiply is None:
            return partial(self.product, bias=bias)

        def product(x: Tensor) -> Tensor:
            if not 0 < x.shape[0] <= FBGEMM_MAX_ROWS or x.dtype is not torch.float32 or is_seen((x,)):
                return self.product(x, bias)
            scale = _scale(x)
            y = multiply(_rounded(x, scale)).mul_(scale)
            return y if bias is None else y.add_(bias)

        return product


def scales(model: nn.Module) -> Iterator[Tensor]:
    """Yield the scales of a model's matrices in 8 bits, which have the dtypes of the weights and their device."""
    return (each.scale for each in model.modules() if isinstance(each, Int8Matrix))


def _scale(x: Tensor) -> Tensor:
    """Return the number by which each token [N, I] of float32 is divided before it is rounded, [N, 1]."""
    return x.abs().amax(1, True).div_(MAX_INT8)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return integers [N, I] in float32: zeros for a token of zeros, and where a token has NaN or infinite values."""
    return (x / scale).round_().nan_to_num_(0.0, 0.0, 0.0)


def _integers(x: Tensor, values: Tensor) -> Tensor:
    """Return x W' [N, O] for integers x [N, I] in float32 and values [O, I] of int8."""
    count = x.shape[0]
    if not count:
        return torch.zeros(0, values.shape[0], device=x.device)
    if x.shape[1] == 1:  # torch 2.13 returns values there that it has not computed
        return x * values.t().float()
    if numerics.SLOW_INT8 and x.is_cpu and not torch.compiler.is_compiling():
        parts = zip(*(each.split(numerics.EXACT_TERMS, 1) for each in (x, values)), strict=True)
        return numerics.added_exactly([by_converted_rows(*part) for part in parts])
    x = x.to(torch.int8)
    if x.is_cuda:
        if x.shape[1] % 8 or values.shape[0] % 8:
            return x.float() @ values.t().float()
        x = nn.functional.pad(x, (0, 0, 0, max(0, CUDA_MIN_ROWS - count)))
    y: Tensor = torch._int_mm(x, values.t())
    return y[:count].float()
