"""FBGEMM's products: their results, when they are used, and when the copies of matrices are made again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels import fbgemm, half, int8, numerics
from seqblocks.kernels.half import HalfMatrix
from seqblocks.kernels.int8 import Int8Matrix

needs_fbgemm = pytest.mark.skipif(not fbgemm.HAS_FBGEMM, reason="this torch has no FBGEMM")
needs_vnni = pytest.mark.skipif(not fbgemm.HAS_INT8, reason="needs FBGEMM and a processor with VNNI")
DTYPES = (torch.bfloat16, torch.float16)
# Matrices of 2^18 elements, so that they are read in 16 bits.
TEXT = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 512}
    - linear: {features: 512}
    - causal_conv: {kernel: 3}
    - linear: {features: 512, name: second}
    - unembed: {bias: false}
"""


@pytest.fixture
def by_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fbgemm, "HAS_HALF", True)


def magnitudes(dtype: torch.dtype) -> list[float]:
    """Return factors of a matrix: the middle, and near both ends of the dtype's range."""
    return [1.0, 2.0**-14, 2.0**13] if dtype is torch.float16 else [1.0, 1e-30, 1e30, 0.0]


@needs_fbgemm
@pytest.mark.usefixtures("by_fbgemm")
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_products_in_16_bits_round_neither_tokens_nor_sums(dtype: torch.dtype, tokens: int) -> None:
    """The error is that of sums in float32, in any order, and of rounding to 2^-32 of the matrix's largest element."""
    generator = torch.Generator().manual_seed(tokens)
    for factor in magnitudes(dtype):
        weight = torch.randn(70, 33, generator=generator) * factor * torch.logspace(-6, 0, 33)
        weight = weight.to(dtype)
        x, bias = torch.randn(tokens, 33, generator=generator), torch.randn(70, generator=generator) * factor
        rounded = 2.0**-32 * weight.double().abs().max() * x.double().abs().sum(1, keepdim=True)
        for b in (None, bias):
            found = HalfMatrix(weight).prepare(b)(x)
            exact = x.double() @ weight.double().t() + (0 if b is None else b.double())
            size = x.double().abs() @ weight.double().abs().t() + (0 if b is None else b.double().abs())
            assert ((found - exact).abs() <= 35 * 2.0**-24 * size + rounded).all()


@needs_fbgemm
@pytest.mark.usefixtures("by_fbgemm")
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_where_torchs_product_is_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrix = HalfMatrix(weight)
    most = half.FBGEMM_MAX_TOKENS[dtype]

    def is_torchs(matrix: HalfMatrix, tokens: int) -> bool:
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
        return torch.equal(matrix.prepare()(x), matrix.product(x))

    assert not is_torchs(matrix, most)
    assert is_torchs(matrix, most + 1)
    assert is_torchs(HalfMatrix(weight, may_copy=False), 1)
    for value in (float("inf"), float("nan")):
        other = weight.clone()
        other[3, 4] = value
        found, expected = (f(torch.ones(1, 32)) for f in (HalfMatrix(other).prepare(), HalfMatrix(other).product))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(fbgemm, "HAS_HALF", False)
    assert is_torchs(matrix, 1)


def swapped_rows(x: Tensor) -> None:
    x[[1, 4]] = x[[4, 1]]


def swapped_columns(x: Tensor) -> None:
    x[:, [0, 5]] = x[:, [5, 0]]


def one_element(x: Tensor) -> None:
    x[-1, -1] += 1


@needs_fbgemm
@pytest.mark.parametrize("change", [swapped_rows, swapped_columns, one_element])
@pytest.mark.parametrize("width", [16, 7])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_copy_is_made_again_if_elements_change_or_move(
    change: Callable[[Tensor], None], width: int, offset: int
) -> None:
    """Also if neither the version nor the address of the tensor changes."""
    numbers = torch.randn(9 * width + offset, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix = torch.nn.Parameter(numbers[offset:].view(9, width))
    copies = fbgemm.Copies(lambda x: x.detach().clone())
    first = copies.of(matrix)
    assert copies.of(matrix) is first
    version, address = matrix._version, matrix.data_ptr()
    change(matrix.data)
    assert (version, address) == (matrix._version, matrix.data_ptr())
    assert torch.equal(copies.of(matrix), matrix)
    assert not torch.equal(first, matrix)
    del matrix
    assert not copies._made


@needs_fbgemm
@pytest.mark.usefixtures("by_fbgemm")
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_streams_use_copies_and_new_parameters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seqblocks.build_text(TEXT, seed=0, dtype=dtype).eval()
    used = []
    multiply = fbgemm.half_product
    monkeypatch.setattr(fbgemm, "half_product", lambda *operands: used.append(operands) or multiply(*operands))

    def steps(model: seqblocks.SequenceModel) -> Tensor:
        state, made = model.init_state(2), []
        for token in (3, 1, 4):
            y, state = model.step(torch.full((2,), token), state)
            made.append(y)
        return torch.stack(made, 1)

    before = steps(model)
    assert len(used) == 2
    model.linear.weight.data.copy_(model.linear.weight.flip(0))  # leaves no trace
    after = steps(model)
    other = copy.deepcopy(model)
    assert torch.equal(after, steps(other))
    assert not torch.equal(before, after)
    whole = model.double()(torch.tensor([[3, 1, 4]] * 2))
    assert (after - whole).abs().max() <= 2 * torch.finfo(dtype).eps * whole.abs().max()

    monkeypatch.setattr("seqblocks.kernels.half.COPIES_MAX_BYTES", 1)
    used.clear()
    steps(seqblocks.build_text(TEXT, seed=0, dtype=dtype).eval())
    assert not used


@needs_vnni
@torch.no_grad()
def test_streams_in_8_bits_use_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made again if the values change, also those of the scale."""
    matrix, x = Int8Matrix.of(torch.randn(33, 10, generator=torch.Generator().manual_seed(0))), torch.randn(2, 10)
    for changed in (matrix.values, matrix.values.data, matrix.scale):
        copied = fbgemm._int8.of(matrix.values, matrix.scale)
        assert fbgemm._int8.of(matrix.values, matrix.scale) is copied
        changed[5:] = changed[5:].flip(0)
        assert torch.equal(matrix.prepare()(x), matrix.product(x))
        assert fbgemm._int8.of(matrix.values, matrix.scale) is not copied
    monkeypatch.setattr(int8, "_integers", None)
    matrix.prepare()(x)  # by FBGEMM
    monkeypatch.setattr(numerics, "SLOW_INT8", False)
    monkeypatch.setattr(fbgemm, "HAS_INT8", False)
    with pytest.raises(TypeError):
        matrix.prepare()(x)


@needs_fbgemm
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("width", [1, 1040, 1041, 2500])
@torch.no_grad()
def test_8_bits_without_vnni_are_exact(tokens: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of more than 2^24 too: in a stream, in a pass, and by torch's product of integers they are the same."""
    monkeypatch.setattr(numerics, "SLOW_INT8", True)
    monkeypatch.setattr(fbgemm, "HAS_INT8", False)
    monkeypatch.setattr(int8, "FBGEMM_MAX_ROWS", 64)
    generator = torch.Generator().manual_seed(width)
    weight, x = torch.randn(70, width, generator=generator), torch.randn(tokens, width, generator=generator)
    weight[0], x[0] = 1.0, 1.0
    matrix = Int8Matrix.of(weight)
    numbers = int8._rounded(x, int8._scale(x))
    exact = (numbers.long() @ matrix.values.long().t()).float()
    assert exact[0, 0] == float(127 * 127 * width)
    assert torch.equal(int8._integers(numbers, matrix.values), exact)
    assert torch.equal(matrix.prepare()(x), matrix.product(x))
    monkeypatch.setattr(numerics, "SLOW_INT8", False)
    assert torch.equal(int8._integers(numbers, matrix.values), exact)
