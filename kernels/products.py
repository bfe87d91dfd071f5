"""Products of tokens with a weight matrix: torch's `linear`, or on a CPU a faster product that is also part of torch.

Which one depends only on the operands' dtypes and sizes and on what torch reports about the processor. Their results
differ by rounding. `benchmarks/products.py` compares their speed.

A CPU without instructions for products in a 16-bit dtype takes 2 to 4 times as long for them as in float32 (float16 on
an AMD Zen 4, bfloat16 on one whose instructions for it were switched off). There, matrices and tokens are converted to
float32 for each product of several tokens, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqblocks.kernels import numerics
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.dispatch.custom_op import is_seen
from seqblocks.kernels.stored import StoredMatrix

READING_MAX_TOKENS = 4  # up to this many, a product takes as long as reading the matrix
READING_MIN_ELEMENTS = 1 << 19  # a smaller matrix may be in a cache, where oneDNN reads it more slowly for few tokens
MKL_SLOW_TOKENS = range(4, 16)  # for which MKL takes up to 2.7 times as long as oneDNN wherever it was measured
ONEDNN_MIN_MACS = 1 << 23  # multiply-accumulates that are worth the overhead of oneDNN's call
ROWS_MAX_TOKENS = 2  # up to so many, with at most ROWS_MAX_FEATURES, MKL reads blocks of rows at full speed on AMD
ROWS_MAX_FEATURES = 1 << 11  # features of all tokens together
BLOCK_ROWS = 128
MIN_CONVERTED = 8  # tokens: for fewer, converting the matrix takes longer than the slow product
CACHED_MAX_TOKENS = 16  # up to this many, a matrix is converted in parts that stay in a cache; more take longer so
CACHED_ELEMENTS = 1 << 18  # of such a part
CONVERTED_ELEMENTS = 1 << 23  # of a matrix that are converted at once for more tokens: more memory is slow to allocate

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_ONEDNN = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
ON_SLOW_READING = HAS_ONEDNN and numerics.ON_AMD  # MKL reads a large matrix slowly there, or with one thread only
ON_SLOW_MKL = ON_SLOW_READING and HAS_AVX512  # and multiplies with AVX2, oneDNN with AVX-512
ON_ONEDNN = ON_SLOW_READING or (HAS_ONEDNN and HAS_AVX512)
ONEDNN_KINDS = (torch.float32,)
# For one token in bfloat16, torch's `mv` reads a matrix 1.4 to 1.65 times as fast as its `linear`, which is oneDNN's,
# on an Intel Xeon (Emerald Rapids), and 0.66 to 0.85 times as fast on an AMD Zen 4. In compiled code, `mv` becomes a
# loop of its own, and `linear` a call of MKL, which takes 1.5 times as long on the Zen 4.
ON_FAST_MV = HAS_AVX512 and numerics.ON_INTEL


def linear(x: Tensor, weight: Tensor | StoredMatrix, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b [..., O] for x [..., I], weight [O, I], bias [O], like `torch.nn.functional.linear`.

    oneDNN compiles code for each number of tokens, and keeps 0.65 MB of it. x is padded to one of eight numbers between
    a power of two and the next, so that prompts of every length do not fill the memory.
    """
    if isinstance(weight, StoredMatrix):
        return weight.product(x, bias)
    if _suits_onednn(x, weight, bias) or _is_slow(x, weight, bias):
        return _shaped(_by_function(x.reshape(-1, x.shape[-1]), weight, bias, pads=True), x)
    if _suits_mv(x, weight, bias):
        y = torch.mv(weight, x.reshape(-1))
        return _shaped(y if bias is None else y + bias, x)
    return F.linear(x, weight, bias)


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """Return y [N, O] as [..., O] for x [..., I], but not as a view, like `linear`: it may be changed in place."""
    if torch.compiler.is_compiling():
        return y.view(*x.shape[:-1], y.shape[-1])
    if y.dim() == x.dim() and not y._is_view():
        return y
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))


def _missing(tokens: int) -> int:
    """Return how many are missing to the next number with at most four binary digits before its zeros."""
    return -tokens % (1 << max(0, tokens.bit_length() - 4))


def _suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether oneDNN supports these operands and is faster. torch's function handles all others."""
    if not ON_ONEDNN or torch.compiler.is_compiling() or weight.dim() != 2:
        return False
    if chosen(x.numel(), *weight.shape) == "torch" or not _is_plain(x, weight, bias, ONEDNN_KINDS):
        return False
    enabled: bool = torch._C._get_mkldnn_enabled()
    return enabled


def chosen(elements: int, rows: int, width: int) -> str:
    """Return the fastest product in float32 of this many elements of x with a matrix: torch, oneDNN or rows."""
    if not ON_SLOW_READING or elements > READING_MAX_TOKENS * width:
        is_slow = ON_SLOW_MKL or (width and elements // width in MKL_SLOW_TOKENS)
        return "oneDNN" if is_slow and elements * rows >= ONEDNN_MIN_MACS else "torch"
    if not elements or rows * width < READING_MIN_ELEMENTS:
        return "torch"
    suits_rows = elements <= min(ROWS_MAX_FEATURES, ROWS_MAX_TOKENS * width) and rows >= BLOCK_ROWS
    return "rows" if suits_rows else "oneDNN"


def _suits_mv(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these are one token and a matrix for which `mv` is faster."""
    if torch.compiler.is_compiling():
        return ON_SLOW_READING and _is_compiled_token(x, weight, bias)
    return ON_FAST_MV and _is_plain(x, weight, bias, {torch.bfloat16}) and x.numel() == x.shape[-1]


def _is_compiled_token(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a compiler traces the product of one token with a large matrix in float32."""
    if weight.numel() < READING_MIN_ELEMENTS or type(weight) not in (Tensor, nn.Parameter) or not x.is_cpu:
        return False
    if any(map(unknown, x.shape)) or not x.dtype is weight.dtype is torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    if bias is not None and not (bias.dtype is torch.float32 and bias.shape == weight.shape[:1]):
        return False
    return weight.dim() == 2 and x.numel() == x.shape[-1] == weight.shape[1]


def _is_slow(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these operands have a 16-bit dtype that the processor cannot multiply, and many tokens."""
    return _is_plain(x, weight, bias, numerics.SLOW_KINDS) and x.numel() >= MIN_CONVERTED * x.shape[-1]


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None, kinds: Collection[torch.dtype]) -> bool:
    """Return whether these operands fit, have one of these dtypes, and nothing observes or transforms the product."""
    if x.dtype not in kinds or not x.is_cpu or x.dim() < 2 or torch.compiler.is_compiling():
        return False
    each = (x, weight) if bias is None else (x, weight, bias)
    if is_seen(each) or weight.dim() != 2:
        return False
    if not all(t.is_cpu and t.dtype is x.dtype and t.layout is torch.strided for t in each):
        return False
    is_valid = x.shape[-1] == weight.shape[1] > 0 and (bias is None or bias.shape == weight.shape[:1])
    return is_valid and not torch.is_autocast_enabled("cpu")


def by_tokens(rows: int, width: int, device: str, dtype: torch.dtype) -> list[tuple[int, str]]:
    """Return which product `linear` uses for a matrix [rows, width]: (from this number of tokens on, its name)."""
    able = ON_ONEDNN and device == "cpu" and dtype is torch.float32 and torch._C._get_mkldnn_enabled()
    if device == "cpu" and dtype in numerics.SLOW_KINDS:
        return [(1, "torch"), (MIN_CONVERTED, "float32")]
    if device == "cpu" and dtype is torch.bfloat16 and ON_FAST_MV:
        return [(1, "mv"), (2, "torch")]
    many = -(-ONEDNN_MIN_MACS // (rows * width))
    limits = {1, READING_MAX_TOKENS + 1, max(READING_MAX_TOKENS + 1, many), max(MKL_SLOW_TOKENS.start, many)}
    limits |= {min(ROWS_MAX_FEATURES // width, ROWS_MAX_TOKENS) + 1, MKL_SLOW_TOKENS.stop}
    found = [(tokens, chosen(tokens * width, rows, width) if able else "torch") for tokens in sorted(limits)]
    return [each for at, each in enumerate(found) if not at or each[1] != found[at - 1][1]]


def _by_function(x: Tensor, weight: Tensor, bias: Tensor | None, pads: bool = False) -> Tensor:
    """Return x W' + b for x [N, I] by oneDNN, or in float32 if the operands have 16 bits. pads: whether N varies."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        y: Tensor = _Linear.apply(x, weight, bias, pads)
        return y
    return _multiply(x, weight, bias, pads)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, pads: bool) -> Tensor:
    if x.dtype is not torch.float32:
        return by_converted_rows(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
    if weight.is_contiguous() and chosen(x.numel(), *weight.shape) == "rows":
        return _prepare_rows(weight, bias)(x)
    tokens, extra = x.shape[0], _missing(x.shape[0]) if pads else 0
    if not extra:
        return _by_onednn(x, weight, bias)
    y = _by_onednn(F.pad(x, (0, 0, 0, extra)), weight, bias)[:tokens]
    return torch.ops.aten._unsafe_view.default(y, y.shape)


def by_converted_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b in float32 for x [N, I] in float32 and W in 8 or 16 bits, converting some rows of W at a time."""
    rows, width = weight.shape
    elements = CACHED_ELEMENTS if x.shape[0] <= CACHED_MAX_TOKENS else CONVERTED_ELEMENTS
    count = max(1, elements // width)
    if rows <= count:
        return linear(x, weight.float(), bias)
    converted, y = x.new_empty(count, width), x.new_empty(x.shape[0], rows)
    for at in range(0, rows, count):
        part = weight[at : at + count]
        y[:, at : at + count] = linear(x, converted[: len(part)].copy_(part))
    return y if bias is None else y.add_(bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), bias, "none", [], "")
    return y


def _prepare_rows(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) -> x W' + b [N, O] for few tokens, by a batched product with blocks of rows of W in turn."""
    count = len(weight) // BLOCK_ROWS
    blocks, rest = weight[: count * BLOCK_ROWS].view(count, BLOCK_ROWS, -1), weight[count * BLOCK_ROWS :]
    has_rest = len(rest) > 0

    def product(x: Tensor) -> Tensor:
        y = torch.bmm(blocks, x.t().expand(count, -1, -1)).view(count * BLOCK_ROWS, -1).t()
        if has_rest:
            y = torch.cat((y, F.linear(x, rest)), -1)
        y = y.contiguous()
        return y if bias is None else y.add_(bias)

    return product


def _dense(x: Tensor) -> Tensor:
    """Return x [P, Q], copied if it is neither contiguous nor transposed: oneDNN has only slow loops for the rest."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


class _Linear(torch.autograd.Function):
    """x W' + b for x [N, I], with gradients that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pads: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return _multiply(x, weight, bias, pads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        return (
            linear(grad, weight.t()) if for_x else None,
            _of_weight(grad, x) if for_weight else None,
            grad.sum(0) if for_bias else None,
            None,
        )


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad' x for grad [N, O] and x [N, I], whose rows are those of a weight: their number does not vary."""
    left, right = grad.t(), x.t()
    if _is_slow(left, right, None):
        return _by_function(left, right, None)
    if not _suits_onednn(left, right, None):
        return F.linear(left, right)
    if extra := _missing(len(x)):
        left, right = F.pad(left, (0, extra)), F.pad(x, (0, 0, 0, extra)).t()
    return _by_function(left, right, None)


def prepare_linear(weight: Tensor | StoredMatrix, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) -> x W' + b [N, O] for weight [O, I], bias [O], without gradients, which copies nothing."""
    if isinstance(weight, StoredMatrix):
        return weight.prepare(bias)
    if torch.compiler.is_compiling():
        return lambda x: linear(x, weight, bias)
    size, width = weight.numel(), weight.shape[-1]
    if _suits_onednn(weight[:1], weight, bias) and chosen(width, *weight.shape) == "rows" and weight.is_contiguous():
        by_rows, most = _prepare_rows(weight, bias), min(ROWS_MAX_FEATURES // width, ROWS_MAX_TOKENS)

        def product(x: Tensor) -> Tensor:  # repeats those checks of `linear` that depend on x
            suits = 0 < x.shape[0] <= most and x.dtype is torch.float32 and not is_seen((x,))
            return by_rows(x) if suits and torch._C._get_mkldnn_enabled() else linear(x, weight, bias)

        return product
    if size >= READING_MIN_ELEMENTS:
        return lambda x: linear(x, weight, bias)
    return lambda x: (linear if x.shape[0] * size >= ONEDNN_MIN_MACS else F.linear)(x, weight, bias)
