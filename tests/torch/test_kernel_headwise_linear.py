"""The block-diagonal linear map against the official code, against a dense one, and its forms against each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqblocks.kernels import headwise_linear

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "xlstm").glob("headwise_*.npz"))
FORMS = ("reference", "torch")


def draw(*shape, dtype=torch.float64, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden(path, dtype, form):
    z = np.load(path)
    meta = json.loads(str(z["meta"]))
    names = [k for k in ("in/x", "w/weight", "w/bias") if k in z]
    leaves = [torch.tensor(z[k], dtype=dtype).requires_grad_() for k in names]
    y = headwise_linear(*leaves, backend=form)
    grads = torch.autograd.grad((y * torch.tensor(z["ct"], dtype=dtype)).sum(), leaves)
    got = {"out": y.detach(), **{f"grad_{k}": g for k, g in zip(names, grads, strict=True)}}
    for key, value in got.items():
        # the same sums: rounding alone; in float32 ten times the official code's own loss
        loss = 10 * meta["f32_max_abs_err"][key] if dtype == torch.float32 else 0.0
        scale = meta["max_abs"][key] * (1e-6 if dtype == torch.float32 else 1e-12)
        assert (value.double() - torch.tensor(z[key])).abs().max() <= loss + scale, key


@given(
    lead=st.lists(st.integers(0, 3), max_size=3), G=st.integers(1, 40), O=st.integers(1, 40), I=st.integers(1, 40),
    biased=st.booleans(),
)
def test_forms_are_the_block_diagonal_matrix(lead, G, O, I, biased):
    x, weight, bias = draw(*lead, G * I), draw(G, O, I, seed=1), draw(G * O, seed=2) if biased else None
    leaves = [x, weight, bias] if biased else [x, weight]
    dense = torch.nn.functional.linear(x, torch.block_diag(*weight), bias)
    expected = [dense, *torch.autograd.grad(dense.square().sum(), leaves)]
    for form in FORMS:
        y = headwise_linear(*leaves, backend=form)
        got = [y, *torch.autograd.grad(y.square().sum(), leaves)]
        for a, e in zip(got, expected, strict=True):
            # sums of at most 40 x 27 products in float64, in another order
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-9)


def test_derivative():
    leaves = [draw(2, 8), draw(4, 3, 2, seed=1), draw(12, seed=2)]
    assert torch.autograd.gradcheck(headwise_linear, leaves)
    assert torch.autograd.gradgradcheck(headwise_linear, leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(form, dtype):
    x, weight = draw(2, 5, 24, dtype=dtype), draw(6, 4, 4, dtype=dtype, seed=1)
    y = headwise_linear(x, weight, backend=form)
    assert y.dtype == dtype
    # 4 products summed in float32 or with a rounding each, of sums below 16
    assert (y.double() - headwise_linear(x.double(), weight.double())).abs().max() <= 4 * 8 * torch.finfo(dtype).eps


def test_autocast_gives_what_a_linear_gives():
    x, weight, bias = (draw(*shape, dtype=torch.float32) for shape in ((2, 24), (6, 4, 4), (24,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = headwise_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()


def test_strided_input():
    x = draw(24, 5, 2).transpose(0, 2)
    weight = draw(6, 4, 4, seed=1)
    torch.testing.assert_close(headwise_linear(x, weight), headwise_linear(x.contiguous(), weight))
    for turned in (weight.transpose(0, 2).contiguous().transpose(0, 2), weight.repeat(2, 2, 2)[::2, ::2, ::2]):
        assert not turned.is_contiguous()
        torch.testing.assert_close(headwise_linear(x, turned), headwise_linear(x, turned.contiguous()))


def test_errors_name_shapes():
    with pytest.raises(ValueError, match=r"weight \[G, O, I\]; got x \[2, 9\], weight \[2, 3, 4\]"):
        headwise_linear(draw(2, 9), draw(2, 3, 4))
    with pytest.raises(ValueError, match=r"bias \[G \* O\] = \[6\]; got \[5\]"):
        headwise_linear(draw(2, 8), draw(2, 3, 4), draw(5))


def test_compile_in_one_graph():
    leaves = [draw(2, 24), draw(6, 4, 4, seed=1), draw(24, seed=2)]
    compiled = torch.compile(headwise_linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), headwise_linear(*leaves))
