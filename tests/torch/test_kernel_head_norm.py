"""The norm of each head by itself, against the official code and against the formula."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from seqblocks.kernels import head_norm

GOLDEN = Path(__file__).parents[1] / "golden" / "xlstm" / "mhln_h4_d16_s7.npz"
FORMS = ("reference", "torch")


def draw(*shape, dtype=torch.float64, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden(dtype, form):
    z = np.load(GOLDEN)
    meta = json.loads(str(z["meta"]))
    x = torch.tensor(z["in/x"], dtype=dtype).requires_grad_()  # [B, H, S, D]
    w = torch.tensor(z["w/weight"], dtype=dtype).requires_grad_()  # stored as gain - 1
    y = head_norm(x.transpose(1, 2).flatten(2), 4, 1 + w, backend=form).unflatten(-1, (4, 16)).transpose(1, 2)
    dx, dw = torch.autograd.grad((y * torch.tensor(z["ct"], dtype=dtype)).sum(), [x, w])
    for key, value in {"out": y.detach(), "grad_in/x": dx, "grad_w/weight": dw}.items():
        # the same formula: rounding alone; in float32 ten times the official code's own loss
        loss = 10 * meta["f32_max_abs_err"][key] if dtype == torch.float32 else 0.0
        scale = meta["max_abs"][key] * (1e-6 if dtype == torch.float32 else 1e-12)
        assert (value.double() - torch.tensor(z[key])).abs().max() <= loss + scale, key


@pytest.mark.parametrize("shape", [(12,), (2, 12), (2, 3, 12), (0, 12), (2, 0, 12)])
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_forms_agree(shape, heads):
    leaves = [draw(*shape), draw(12, seed=1), draw(12, seed=2)]
    results = []
    for form in FORMS:
        y = head_norm(leaves[0], heads, *leaves[1:], backend=form)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for a, e in zip(*results, strict=True):
        # float64 rounding; a head of one channel is 0 / sqrt(eps)
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_heads_and_tokens_do_not_see_each_other():
    x = draw(1, 3, 8).detach()
    other = x.clone()
    other[0, 1, 4:] += 1
    same = head_norm(x, 2) == head_norm(other, 2)
    assert same[0, 0].all()
    assert same[0, 2].all()
    assert same[0, 1, :4].all()


def test_derivative():
    leaves = [draw(2, 6), draw(6, seed=1), draw(6, seed=2)]
    assert torch.autograd.gradcheck(lambda x, w, b: head_norm(x, 2, w, b), leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_float32_inside(form, dtype):
    # a mean of 200 with a spread of 1: in bfloat16 arithmetic the mean alone would be off by half the spread
    x = (draw(4, 256) + 200).to(dtype)
    y = head_norm(x, 2, backend=form)
    assert y.dtype == dtype
    expected = head_norm(x.double(), 2)
    # rounded once when it leaves, values below 4 (a rounded x has a spread above 1 at most by rounding)
    assert (y.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps


def test_errors_name_shapes():
    with pytest.raises(ValueError, match=r"x \[..., H \* D\] with H = 5; got \[2, 12\]"):
        head_norm(draw(2, 12), 5)
    with pytest.raises(ValueError, match=r"weight \[12\]; got \[3\]"):
        head_norm(draw(2, 12), 3, draw(3))
    with pytest.raises(ValueError, match=r"bias \[12\]; got \[3\]"):
        head_norm(draw(2, 12), 3, None, draw(3))


def test_compile_in_one_graph():
    x, weight = draw(2, 12), draw(12, seed=1)
    compiled = torch.compile(lambda x, w: head_norm(x, 3, w), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), head_norm(x, 3, weight))
