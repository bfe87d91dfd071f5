"""Properties specific to the block-diagonal linear map: official numbers, a dense matrix, blocks joined into tiles.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqblocks.kernels import headwise_linear
from seqblocks.kernels.headwise_linear import triton as headwise_linear_triton
from tests.kernels.conformance import IMPLEMENTATIONS, INTERPRETED, SIXTEEN, Subject, check, draw
from tests.kernels.families import HEADWISE_LINEAR
from tests.torch import golden

CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("headwise_*.npz"))
TRITON = Subject(HEADWISE_LINEAR, "no bias", IMPLEMENTATIONS["triton"])


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_official_numbers(case: str, dtype: torch.dtype, backend: str) -> None:
    data, meta = golden.read(f"xlstm/{case}")
    x = {name: torch.tensor(data[name], dtype=dtype, requires_grad=True)
         for name in ("in/x", "w/weight", "w/bias") if name in data}
    y = headwise_linear(*x.values(), backend=backend)
    grads = torch.autograd.grad((y * torch.tensor(data["ct"], dtype=dtype)).sum(), [*x.values()])
    golden.compare(data, meta, {"out": y.detach(), **{f"grad_{name}": g for name, g in zip(x, grads, strict=True)}})


@given(
    lead=st.lists(st.integers(0, 3), max_size=3), G=st.integers(1, 40), O=st.integers(1, 40), I=st.integers(1, 40),
    biased=st.booleans(),
)
def test_is_the_block_diagonal_matrix(lead: list[int], G: int, O: int, I: int, biased: bool) -> None:
    x, weight = draw(*lead, G * I).requires_grad_(), draw(G, O, I, seed=1).requires_grad_()
    leaves = [x, weight, *([draw(G * O, seed=2).requires_grad_()] if biased else [])]
    dense = torch.nn.functional.linear(x, torch.block_diag(*weight), leaves[2] if biased else None)
    expected = [dense, *torch.autograd.grad(dense.square().sum(), leaves)]
    for backend in ("reference", "torch"):
        y = headwise_linear(*leaves, backend=backend)
        # Sums of at most 40 x 27 products in float64, in another order.
        found = [y, *torch.autograd.grad(y.square().sum(), leaves)]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-9)


def test_strided_weights() -> None:
    x, weight = draw(2, 5, 24), draw(6, 4, 4, seed=1)
    for other in (weight.transpose(0, 2).contiguous().transpose(0, 2), weight.repeat(2, 2, 2)[::2, ::2, ::2]):
        assert not other.is_contiguous()
        torch.testing.assert_close(headwise_linear(x, other), headwise_linear(x, other.contiguous()))


@INTERPRETED
@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 3, 2), (40, 4, 4), (17, 4, 8), (5, 16, 16), (7, 13, 5)], ids=str)
def test_as_one_matrix(blocks: tuple[int, int, int]) -> None:
    """For 16-bit numbers, as many blocks as 64 channels hold are joined; some blocks are left over."""
    sizes = dict(zip("GOI", blocks, strict=True))
    for precision in SIXTEEN[:2]:
        check(TRITON, TRITON.inputs(S=5, **sizes), precision=precision)


@INTERPRETED
def test_as_one_matrix_over_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headwise_linear_triton, "PROGRAMS", 1)
    check(TRITON, TRITON.inputs(S=150), precision=SIXTEEN[0])


@INTERPRETED
@pytest.mark.parametrize("S", [8, 15, 16, 19])
def test_several_tiles(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tokens, a program of the backward pass processes four tiles, some of them without tokens."""
    monkeypatch.setattr(headwise_linear_triton, "PROGRAMS", 1)
    monkeypatch.setattr(headwise_linear_triton, "tiles", lambda *a: {"BT": 4, "BC": 8, "num_warps": 1})
    check(TRITON, TRITON.inputs(S=S))
