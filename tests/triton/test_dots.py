"""The operands of dots on tensor cores, which read float32 as tf32, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from seqblocks.kernels import mlstm
from seqblocks.kernels.triton_common import jit, operand, tl
from tests.kernels.conformance import INTERPRETED, draw

pytestmark = INTERPRETED


@jit
def copied(x, y, PRECISION: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, operand(tl.load(x + at), tl.float32, PRECISION))


def test_tf32_is_rounded_to_nearest_and_odd_values_stay():
    """Ten fraction bits remain after the leading one; ties round away from zero. NaN of any bits stays NaN."""
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-11, 2 - 2**-23, largest, 1 + 2**-10, 0.0, 2**-149])
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, odd, torch.zeros(3)])
    expected = torch.tensor([1 + 2**-10, 1.0, -1 - 2**-10, 2.0, torch.inf, 1 + 2**-10, 0.0, 0.0])
    for precision in ("tf32", "ieee"):
        y = torch.empty_like(x)
        copied[(1,)](x, y, precision, 16)
        if precision == "tf32":
            assert torch.equal(y[:8], expected)
            assert y[8:11].isnan().all()
            assert torch.equal(y[11:], x[11:])
        else:
            assert torch.equal(y.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("dtypes", [(torch.float16,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32)])
def test_dots_through_tf32_are_not_biased(dtypes):
    """Truncated operands make every product smaller, by 2^-11 for each on average, and therefore sums too."""
    S, D = 64, 64
    q, k, v = (draw(1, S, 1, D, seed=at).abs().to(dtype) for at, dtype in enumerate(dtypes))
    i, f = torch.zeros(1, S, 1), torch.full((1, S, 1), 3.0)
    options = {"input_gate": "sigmoid", "normalize": False, "return_state": True}
    _, found = mlstm(q, k, v, i, f, backend="triton", **options)
    _, expected = mlstm(q.double(), k.double(), v.double(), i.double(), f.double(), backend="reference", **options)
    bias = (found.C.double() / expected.C - 1).mean().item()  # of one product each, with one or two rounded operands
    assert abs(bias) < 2**-14, bias
