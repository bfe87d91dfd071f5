"""FBGEMM's products of a few tokens in float32 with matrices of 8-bit integers or of 16 bits, which torch contains.

They read a copy of the matrix in an order of their own, which takes as much memory as the matrix, and about as long to
make as 50 tokens to compute. It is therefore kept for the next stream, as long as the matrix exists.

In each call torch looks for an attribute `__torch_function__` of the copy, and C++ exceptions report that it has none:
16 us, in which 0.3 MB of a matrix are read. It does not look while functions of Tensor subclasses are disabled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from seqblocks.kernels import numerics
from seqblocks.kernels.dispatch.custom_op import is_seen

ZERO = 128  # the unsigned integer that stands for 0 of a token
HALF_EXPONENT = 8  # the largest element of a matrix in 16 bits is scaled to between 2^7 and 2^8
MAX_EXPONENT = 120  # so that the power of two is a number of float32
BY_INT8: Any = getattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32", None)
BY_HALF: Any = torch.ops.quantized.linear_dynamic_fp16
WORD_BYTES, ROW_WORDS = 8, 256
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
# Without the instructions of VNNI, FBGEMM adds pairs of products of 8 bits in 16 bits, in which they may not fit.
HAS_INT8 = HAS_FBGEMM and BY_INT8 is not None and bool(numerics.PROCESSOR.get("avx512_vnni"))
# torch's own products in 16 bits were slower on AMD EPYC processors (Zen 3, 4 and 5). No others were measured.
HAS_HALF = HAS_FBGEMM and numerics.ON_AMD

Product = Callable[[Tensor], Tensor]


class Copies:
    """A copy of each matrix, made again when its elements change, also by a write through `.data`."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: Any = WeakIdKeyDictionary()  # by the first tensor of a matrix: (fingerprints, copy)

    def of(self, *tensors: Tensor) -> Any:
        """Return make(*tensors), None where FBGEMM cannot be used. tensors: of at least one element each."""
        if torch.compiler.is_compiling() or torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return None
        if is_seen(tensors) or not all(x.is_cpu and x.numel() for x in tensors):
            return None
        found, now = self._made.get(tensors[0]), [_fingerprint(x) for x in tensors]
        if found is None or found[0] != now:
            with warnings.catch_warnings():  # torch means to remove quantized tensors; then these products have to go
                warnings.simplefilter("ignore")
                found = self._made[tensors[0]] = now, self._make(*tensors)
        return found[1]


def _fingerprint(x: Tensor) -> tuple[int, ...]:
    """Return sums of the elements of x weighted by their places, as integers, in twice the time of reading x."""
    x = x.detach().contiguous()
    x = x.clone() if x.storage_offset() * x.element_size() % WORD_BYTES else x
    numbers = x.view(-1).view(torch.uint8)
    many = len(numbers) // (WORD_BYTES * ROW_WORDS) * WORD_BYTES * ROW_WORDS
    rows = numbers[:many].view(torch.int64).view(-1, ROW_WORDS)
    by_row = torch.mv(rows, _places(ROW_WORDS) ** 3)  # a power, so that no two places have the same weight by symmetry
    return _by_place(by_row), _by_place(numbers[many:].long())


def _by_place(x: Tensor) -> int:
    return int(torch.dot(x, _places(len(x))))


def _places(count: int) -> Tensor:
    return 2 * torch.arange(count) + 1


def _int8_copy(values: Tensor, scale: Tensor) -> Any:
    zeros = torch.zeros(len(values), dtype=torch.int64)
    weight = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(weight, None)


def _exact_copies(values: Tensor) -> list[Any]:
    """Return copies of 8-bit integers in float16, which holds them exactly, for products that float32 adds exactly."""
    parts = values.detach().split(numerics.EXACT_TERMS, 1)
    return [torch.ops.quantized.linear_prepack_fp16(part.float().contiguous(), None) for part in parts]


def _half_copy(weight: Tensor) -> tuple[Any, float] | None:
    """Return a copy in float16, and by what its products are multiplied. None if the weight has NaN or infinity.

    A matrix in bfloat16 is multiplied by a power of two, so that rounding errs by at most 2^-32 of its largest element.
    """
    least, most = (float(x) for x in torch.aminmax(weight))
    largest = max(-least, most)
    if not math.isfinite(largest):
        return None
    is_scaled = weight.dtype is torch.bfloat16
    exponent = min(HALF_EXPONENT - math.frexp(largest)[1], MAX_EXPONENT) if is_scaled else 0
    scaled = weight.detach().to(torch.float32, copy=True).mul_(2.0**exponent)
    return torch.ops.quantized.linear_prepack_fp16(scaled, None), 2.0**-exponent


_int8, _exact, _half = Copies(_int8_copy), Copies(_exact_copies), Copies(_half_copy)


def int8_product(values: Tensor, scale: Tensor) -> Product | None:
    """Return f(integers [N, I] in float32) -> their products [N, O] with values [O, I] (int8) times scale [O].

    Return None where FBGEMM cannot be used. f adds integers, so that a token's result depends on nothing else.
    """
    copied = _int8.of(values, scale) if HAS_INT8 else None
    if copied is None:
        return _exact_product(values, scale) if HAS_FBGEMM and numerics.SLOW_INT8 else None
    # FBGEMM rounds by a given scale. With 1, integers stay as they are.
    return lambda x: _call(BY_INT8, x, 1.0, ZERO, copied)


def _exact_product(values: Tensor, scale: Tensor) -> Product | None:
    copies = _exact.of(values)
    if copies is None:
        return None

    def product(x: Tensor) -> Tensor:
        parts = zip(x.split(numerics.EXACT_TERMS, 1), copies, strict=True)
        return numerics.added_exactly([_call(BY_HALF, part, copied) for part, copied in parts]).mul_(scale)

    return product


def half_product(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return f(x [N, I] in float32) -> x W' + b [N, O], added in float32, for weight [O, I] in 16 bits, bias [O].

    Return None where FBGEMM cannot be used.
    """
    copied = _half.of(weight) if HAS_HALF else None
    if copied is None:
        return None
    matrix, scale = copied
    if bias is not None:
        return lambda x: torch.add(bias, _call(BY_HALF, x, matrix), alpha=scale)
    return (lambda x: _call(BY_HALF, x, matrix).mul_(scale)) if scale != 1.0 else lambda x: _call(BY_HALF, x, matrix)


def _call(op: Any, *operands: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        y: Tensor = op.default(*operands)
    return y
