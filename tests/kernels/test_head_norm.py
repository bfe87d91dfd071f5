"""Properties specific to the norm of heads: official numbers, independence of heads, statistics far from zero.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch

from seqblocks.kernels import head_norm
from tests.kernels.conformance import IMPLEMENTATIONS, INTERPRETED, Subject, check, draw, float32_bar
from tests.kernels.families import HEAD_NORM
from tests.torch import golden

TRITON, TORCH = (Subject(HEAD_NORM, "norm", IMPLEMENTATIONS[name]) for name in ("triton", "torch"))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_official_numbers(dtype: torch.dtype, backend: str) -> None:
    data, meta = golden.read("xlstm/mhln_h4_d16_s7")
    x = torch.tensor(data["in/x"], dtype=dtype, requires_grad=True)  # [B, H, S, D]
    w = torch.tensor(data["w/weight"], dtype=dtype, requires_grad=True)  # stored as gain - 1
    y = head_norm(x.transpose(1, 2).flatten(2), 4, 1 + w, backend=backend).unflatten(-1, (4, 16)).transpose(1, 2)
    dx, dw = torch.autograd.grad((y * torch.tensor(data["ct"], dtype=dtype)).sum(), [x, w])
    golden.compare(data, meta, {"out": y.detach(), "grad_in/x": dx, "grad_w/weight": dw})


@pytest.mark.parametrize("shape", [(12,), (2, 12), (0, 12), (2, 1, 3, 12)])
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_any_number_of_axes(shape: tuple[int, ...], heads: int) -> None:
    x, gain = draw(*shape).requires_grad_(), draw(12, seed=1).requires_grad_()
    results = []
    for backend in ("reference", "torch"):
        y = head_norm(x, heads, gain, backend=backend)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, gain])])
    # float64 rounding; a head of one channel is 0 / sqrt(eps).
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_heads_and_tokens_are_independent() -> None:
    x = draw(1, 3, 8)
    other = x.clone()
    other[0, 1, 4:] += 1
    same = head_norm(x, 2) == head_norm(other, 2)
    assert same[0, 0].all()
    assert same[0, 2].all()
    assert same[0, 1, :4].all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_float32_inside(backend: str, dtype: torch.dtype) -> None:
    """With a mean of 200 and a spread of 1, the mean alone in bfloat16 would be off by half the spread."""
    x = (draw(4, 256) + 200).to(dtype)
    y = head_norm(x, 2, backend=backend)
    # One rounding of the output, values below 4 (rounding can increase the spread of x slightly above 1).
    assert (y.double() - head_norm(x.double(), 2)).abs().max() <= 4 * torch.finfo(dtype).eps


@INTERPRETED
def test_triton_centres_before_it_squares() -> None:
    """A mean that is large compared with the spread costs digits of the input, not of the variance."""
    x = TRITON.inputs(batch=1, S=4)
    # The input itself is rounded to 10 * 2^-24, which the division by 0.01 makes 1000 times larger, in both results.
    check(TRITON, {**x, "x": x["x"] * 0.01 + 10}, bar=1000 * float32_bar(8))


@INTERPRETED
def test_a_gate_far_out_is_open_or_shut() -> None:
    subject = TRITON._replace(variant="no skip")
    x = subject.inputs(batch=1, S=5)
    check(subject, {**x, "gate": x["gate"].sign() * 200})


@INTERPRETED
@pytest.mark.parametrize("rows", [1, 5])
def test_a_norm_without_eps(rows: int) -> None:
    """Missing rows of a tile have no variance, and add nothing to a weight's gradient."""
    x, weight = torch.randn(rows, 8), torch.ones(8, requires_grad=True)
    grads = []
    for backend in ("triton", "reference"):
        y = head_norm(x, 2, weight, eps=0.0, backend=backend)
        grads.append(torch.autograd.grad(y.square().sum(), weight)[0])
    torch.testing.assert_close(*grads)
