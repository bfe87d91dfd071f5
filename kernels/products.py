"""Products of tokens with a weight matrix on a CPU, by the library call that is fastest on that CPU.

`linear` is for sequences, with gradients. `multiply` is for products within kernels, without gradients.
`prepare_linear` is for the tokens of a step, where reading the matrix takes most of the time. Without a faster call,
they use torch's functions. With one, results differ from torch's by rounding.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch.custom_op import is_seen

FEW = 4  # tokens: up to this many, a product takes as long as reading the matrix
MOST_COPIED = 1 << 18  # Copying a matrix with more elements into a larger one takes longer than a second call.
CACHE = 1 << 24  # bytes: the weights of larger models are read from memory for each token, not from a cache.
LARGE = 1 << 16  # elements: products with smaller matrices are dominated by the overhead of the call.
FEW_FOR_BLOCKS = 8  # tokens: up to this many, a block-diagonal matrix takes no longer whole than as blocks
NARROW = 16  # features: a matrix with narrower blocks is multiplied whole for any number of tokens.
BLOCKS = 4  # blocks of rows for each thread; with 16 of them, a token of an xLSTM-large of 6 layers takes 3 % longer
MANY_FOR_THREAD = 3 << 20  # multiply-accumulates per thread from which oneDNN is worth its overhead in a kernel
MOST_SHAPES = 128  # oneDNN keeps 0.65 MB for each shape of a product
MOST_SHAPES_IN_KERNELS = 64
LARGE_OUTPUT = 1 << 19  # elements: smaller outputs are split after one product
MOST_TRANSPOSED = 1 << 20  # elements: transposing a larger result may take longer than copying a wide gradient
TOKENS = 1 << 10  # tokens in one product of a weight's gradient
ON_MKL = torch.backends.mkl.is_available()

_shapes: set[tuple[int, int, int]] = set()  # [N, O, I]
_shapes_in_kernels: set[tuple[int, int, int, bool]] = set()  # R, I, C, and whether the left matrix is transposed
_weights: ContextVar[int] = ContextVar("weights", default=0)


def _amd_family() -> int:
    """Return the family of an AMD processor with AVX-512 (25: Zen 4, 26: Zen 5), else 0.

    There, MKL uses only AVX2 for float32, and oneDNN, which is part of torch too, AVX-512.
    """
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return 0
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return 0
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    return int(family[1]) if family and "AuthenticAMD" in text else 0


ON_ONEDNN = _amd_family() > 0
# Zen 4 computes the halves of 512 bits one after the other. oneDNN gains less there, for larger products, and nothing
# in kernels.
ON_ONEDNN_IN_KERNELS = _amd_family() >= 26
MANY = 1 << (22 if ON_ONEDNN_IN_KERNELS else 25)  # multiply-accumulates that are worth the overhead of oneDNN's call
# The same where no cache holds the matrix. On Zen 5, oneDNN reads it at twice the speed of MKL.
MANY_FROM_MEMORY = 1 << (20 if ON_ONEDNN_IN_KERNELS else 23)

# --- sequences ------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, from_memory: bool = False) -> Tensor:
    """Return x W' + b [..., O] for x [..., I], weight [O, I], bias [O], like `torch.nn.functional.linear`.

    from_memory: whether no cache is expected to hold the matrix.

    Large float32 products use oneDNN where it is faster than MKL: 2.1 times on Zen 5, up to 1.5 times on Zen 4.
    Without gradients, few tokens read a matrix that no cache holds in blocks, as in a step (`prepare_linear`).
    """
    if not (ON_ONEDNN or ON_MKL) or torch.compiler.is_compiling() or is_seen((x, weight, bias)):
        return F.linear(x, weight, bias)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    graded = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if not graded and _reads_blocks(x, weight, bias):
        return _Blocks(weight)(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], weight.shape[0])
    if not ON_ONEDNN or not _is_large(x, weight, bias, MANY_FROM_MEMORY if from_memory else MANY):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if graded else _by_onednn(x, weight, bias)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Tensor]:
    """Return `linear(x, weight, bias)` as separate products, one for each part of the output features."""
    biases: Iterable[Tensor | None] = repeat(None) if bias is None else bias.split_with_sizes(sizes)
    return [linear(x, rows, part) for rows, part in zip(weight.split_with_sizes(sizes), biases, strict=False)]


def has_costly_split(x: Tensor, parameters: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a product of x and a matrix made of parameters takes less time as one product for each part.

    In a backward pass, one product needs the gradients of its parts concatenated. Separate products need their
    gradients of x added, which takes less time if each part is at least as wide as x. In 16 bits, the sum would be
    rounded more often.
    """
    if x.dtype not in (torch.float32, torch.float64):
        return False
    if not x.is_cpu or x.numel() * sum(sizes) < LARGE_OUTPUT * x.shape[-1] or min(sizes) < x.shape[-1]:
        return False
    inputs = (x, *parameters)
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
        return False
    return not (torch.compiler.is_compiling() or is_seen(inputs) or torch.is_autocast_enabled("cpu"))


def _is_large(x: Tensor, weight: Tensor, bias: Tensor | None, many: int) -> bool:
    """Return whether oneDNN supports these operands and the product is large enough. torch handles all others."""
    each = (x, weight) if bias is None else (x, weight, bias)
    if not all(t.is_cpu and t.dtype is torch.float32 for t in each) or not weight.dim() == 2 <= x.dim():
        return False
    rows, width = weight.shape
    if x.shape[-1] != width or (bias is not None and bias.shape != (rows,)):
        return False
    if x.numel() * rows < many or x.numel() <= FEW * width:
        return False
    if torch.is_autocast_enabled("cpu") or not torch._C._get_mkldnn_enabled():
        return False
    return _is_known((x.numel() // width, rows, width))


def _reads_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the product takes the time of reading the matrix from memory, and fits what `_Blocks` takes."""
    if weight.numel() * weight.itemsize <= CACHE or weight.dim() != 2 or not x.dim():
        return False
    rows, width = weight.shape
    if x.shape[-1] != width or not 0 < x.numel() <= FEW * width or torch.is_autocast_enabled("cpu"):
        return False
    alike = x.is_cpu and x.dtype == weight.dtype and ON_MKL and _is_read_by_mkl(weight)
    return alike and (bias is None or (bias.shape == (rows,) and bias.dtype == x.dtype and bias.is_cpu))


def _is_known(shape: tuple[int, int, int]) -> bool:
    """Return whether this shape is among the first of the process: oneDNN keeps memory for each."""
    if len(_shapes) < MOST_SHAPES:
        _shapes.add(shape)
    return shape in _shapes


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), bias, "none", [], "")
    return y


def _dense(x: Tensor) -> Tensor:
    """Return x, copied if it is neither contiguous nor a transposed matrix.

    For other layouts, oneDNN falls back to slow loops.
    """
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


class _Linear(torch.autograd.Function):
    """x W' + b, with gradients computed by `linear`, so that they can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        rows = grad.reshape(-1, grad.shape[-1])  # `flatten` does not take a batch of gradients.
        return (
            linear(grad, weight.t()) if for_x else None,
            _weight_gradient(rows, x.flatten(0, -2)) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum over n of grad[n, o] x[n, i], [O, I].

    oneDNN copies its first operand into rows. A narrower x is copied instead of the gradient: with 8,192 tokens, 48
    features in and 1,536 out, this takes a quarter of the time. The result is then copied too, so it must not be large.
    """
    O, I = grad.shape[1], x.shape[1]
    if I * 8 <= O or (I < O and I * O <= MOST_TRANSPOSED):
        return _sum_over_tokens(x, grad).t().contiguous()
    return _sum_over_tokens(grad, x)


def _sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over n of a[n, i] b[n, j], [I, J].

    It is computed for some tokens at a time, so that the copy stays in the cache: with 8,192 tokens and a width of
    3,072, copying all of them takes a sixth of the time.
    """
    if a.shape[1] * b.shape[1] * TOKENS < MANY:
        return linear(a.t(), b.t())
    first, *others = zip(a.split(TOKENS), b.split(TOKENS), strict=True)
    y = linear(first[0].t(), first[1].t())
    for left, right in others:
        y += linear(left.t(), right.t())
    return y


# --- kernels --------------------------------------------------------------------------------------------------------


def multiply(
    a: Iterable[Tensor], b: Iterable[Tensor], out: Iterable[Tensor] | None = None, *, add: bool = False,
    alpha: float = 1.0,
) -> list[Tensor]:
    """Return alpha a b for each pair of matrices [R, I], [I, C] or of batches [N, R, I], [N, I, C].

    All pairs have the same shapes and layouts. The products are written to `out` if given, or added to it with `add`.
    Without gradients.
    """
    a, b = list(a), list(b)
    product = _matrix_by_onednn if _suits_onednn(a[0], b[0]) else _by_torch
    targets: Iterable[Tensor | None] = repeat(None) if out is None else out
    return [product(left, right, target, add, alpha) for left, right, target in zip(a, b, targets, strict=False)]


def _suits_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dim() != 2 or not _is_dense(a) or not _is_dense(b):
        return False
    (R, I), C = a.shape, b.shape[1]
    return prefers_onednn(a, R, I, C, transposed=a.stride(1) != 1)


def _matrix_by_onednn(a: Tensor, b: Tensor, out: Tensor | None, add: bool, alpha: float) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    if out is None:
        return y if alpha == 1.0 else y.mul_(alpha)
    return _put(y, out, add, alpha)


def _by_torch(a: Tensor, b: Tensor, out: Tensor | None, add: bool, alpha: float) -> Tensor:
    batched = a.dim() == 3
    if out is None and alpha == 1.0:
        return torch.bmm(a, b) if batched else torch.mm(a, b)
    out = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out
    if _is_split(out):
        return _put(torch.bmm(a, b), out, add, alpha)
    return (out.baddbmm_ if batched else out.addmm_)(a, b, beta=int(add), alpha=alpha)


def _put(y: Tensor, out: Tensor, add: bool, alpha: float) -> Tensor:
    """Write alpha y to out, or add it."""
    if add:
        return out.add_(y, alpha=alpha)
    return out.copy_(y) if alpha == 1.0 else torch.mul(y, alpha, out=out)


def _is_split(out: Tensor) -> bool:
    """Return whether torch writes a batch of products to `out` one matrix at a time, each by several threads."""
    return out.dim() == 3 and not out.is_contiguous() and torch.get_num_threads() > 1


def prefers_onednn(x: Tensor, R: int, I: int, C: int, transposed: bool = False) -> bool:
    """Return whether `multiply` passes a product of dense matrices [R, I], [I, C] like x to oneDNN.

    oneDNN multiplies one matrix at a time, since torch has no batched product of oneDNN in float32. transposed: whether
    the left matrix is.
    """
    if not ON_ONEDNN_IN_KERNELS or not x.is_cpu or x.dtype is not torch.float32:
        return False
    if MANY_FOR_THREAD * torch.get_num_threads() > R * I * C or not torch._C._get_mkldnn_enabled():
        return False
    if len(_shapes_in_kernels) < MOST_SHAPES_IN_KERNELS:
        _shapes_in_kernels.add((R, I, C, transposed))
    return (R, I, C, transposed) in _shapes_in_kernels


def _is_dense(x: Tensor) -> bool:
    """Return whether a matrix is contiguous or transposed. For other layouts, oneDNN falls back to slow loops."""
    P, Q = x.shape
    return x.stride() in ((Q, 1), (1, P))


# --- the tokens of a step -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def of_model(weights: int) -> Iterator[None]:
    """Prepare the products within this context for a model with this many bytes of weights."""
    before = _weights.get()
    try:  # A signal may interrupt the next line.
        _weights.set(weights)
        yield
    finally:
        _weights.set(before)


def prepare_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) -> x W' + b [N, O] for weight [O, I], bias [O], without gradients. The weight is not copied.

    MKL's matrix-vector product reads a float32 matrix at half the memory bandwidth or less (AMD EPYC, one thread: 20 of
    40 GB/s for one token, 9 GB/s for two). MKL's batched product of blocks of rows, with x as columns, reads at 38 and
    27 GB/s. For a matrix in the cache the matrix-vector product is faster. For more tokens, `linear` is as fast.
    """
    if torch.compiler.is_compiling():  # Comparing the number of tokens would limit it in exported programs.
        return lambda x: F.linear(x, weight, bias)
    if not _comes_from_memory(weight):
        size = weight.numel()
        return lambda x: (linear if x.shape[0] * size >= MANY else F.linear)(x, weight, bias)
    by_blocks = _Blocks(weight)
    return lambda x: by_blocks(x, bias) if 0 < x.shape[0] <= FEW else linear(x, weight, bias, from_memory=True)


class _Views(NamedTuple):
    """Views of a matrix at an address: its blocks of rows, and the rows that remain."""

    address: int
    strides: tuple[int, ...]
    stack: Tensor
    remainder: Tensor


class _Blocks:
    """A matrix [O, I] as a stack of equal blocks of rows, and the rows that remain.

    Their views are made once for the memory and strides of the matrix, which `parameter.data` may replace.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, self.width = weight.shape
        most = BLOCKS * torch.get_num_threads()
        count = math.gcd(rows, most)
        self.rest = rows % most if count == 1 else 0
        self.blocks, self.rows = most if self.rest else count, rows - self.rest
        self._weight = weight
        self._views = self._make_views()

    def _make_views(self) -> _Views:
        weight = self._weight.detach()
        stack = weight.narrow(0, 0, self.rows).view(self.blocks, -1, self.width)
        return _Views(weight.data_ptr(), weight.stride(), stack, weight.narrow(0, self.rows, self.rest))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W' + b [N, O] for x [N, I], with N at most FEW."""
        views = self._views  # another thread may replace them
        if self._weight.data_ptr() != views.address or self._weight.stride() != views.strides:
            views = self._views = self._make_views()
        tokens, blocks = x.shape[0], self.blocks
        y = torch.bmm(views.stack, x.t().expand(blocks, self.width, tokens))
        y = y.view(1, -1) if tokens == 1 else y.view(-1, tokens).t().contiguous()
        if self.rest:
            y = torch.cat([y, F.linear(x, views.remainder)], 1)
        return y if bias is None else y.add_(bias)


class Matrix(NamedTuple):
    """A linear map: weight [O, I], bias [O]. blocks: the number of equal blocks of a block-diagonal weight."""

    weight: Tensor
    bias: Tensor | None = None
    blocks: int = 1


def prepare_joined(matrices: Sequence[Matrix], earlier: list[Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """Return f(x [N, I]) that computes several linear maps of one input and concatenates their outputs.

    earlier: a list that holds the joined weight, which a later call uses again if the matrices have the same values.
    """
    whole = _prepare_whole(matrices, earlier)
    blocks = matrices[0].blocks
    alike = len({matrix.weight.shape for matrix in matrices}) == 1 and all(m.blocks == blocks for m in matrices)
    if not alike or blocks == 1 or matrices[0].weight.shape[1] < NARROW * blocks or torch.compiler.is_compiling():
        return whole
    by_block = _prepare_blocks(matrices, blocks)
    return lambda x: (whole if x.shape[0] <= FEW_FOR_BLOCKS else by_block)(x)


def _prepare_whole(matrices: Sequence[Matrix], earlier: list[Tensor] | None) -> Callable[[Tensor], Tensor]:
    if len(matrices) == 1:
        return prepare_linear(matrices[0].weight, matrices[0].bias)
    return prepare_linear(_joined([matrix.weight for matrix in matrices], earlier), _joined_bias(matrices))


def _joined(weights: Sequence[Tensor], earlier: list[Tensor] | None) -> Tensor:
    """Return the rows of several matrices as one: an earlier result if it is large and still has their values.

    The pages of new memory take longer than comparing the values. An earlier result is never written, since another
    thread may be reading it.
    """
    if earlier is None or torch.compiler.is_compiling() or sum(weight.numel() for weight in weights) < LARGE:
        return torch.cat([*weights])
    for whole in [*earlier]:
        parts = whole.split([weight.shape[0] for weight in weights])
        if all(map(_has_same_bits, parts, weights)):
            return whole
    whole = torch.cat([*weights])
    earlier[:] = [whole]
    return whole


def _has_same_bits(x: Tensor, y: Tensor) -> bool:
    """Compare matrices of one float dtype and shape. As bits, equal NaNs are the same, and -0 and 0 differ."""
    kind = torch.int64 if x.shape[-1] * x.itemsize % 8 == 0 else torch.int32  # torch compares one integer at a time
    return torch.equal(x.view(kind), y.detach().view(kind))


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


def _comes_from_memory(weight: Tensor) -> bool:
    """Return whether each token has to read this matrix from memory, and the product would be computed by MKL."""
    if not ON_MKL or _weights.get() <= CACHE or weight.numel() < LARGE:
        return False
    return _is_read_by_mkl(weight)


def _is_read_by_mkl(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype in (torch.float32, torch.float64) and weight.is_contiguous()
