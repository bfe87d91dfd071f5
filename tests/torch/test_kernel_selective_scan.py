"""The selective scan: its forms against each other, the state law, the extremes.

Official numbers: test_golden_mamba.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqblocks import BackendError
from seqblocks.kernels import selective_scan, why
from seqblocks.kernels.selective_scan.torch import _spans

FORMS = ("reference", "torch")
# float64 and a contracting recurrence (decays below 1): rounding of a few 2^-52 a step, with room for 300 steps
ROUNDING = 1e-10


def inputs(
    batch: int = 2,
    S: int = 9,
    E: int = 4,
    N: int = 3,
    groups: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    """u, dt, A, B, C."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    shared = (batch, S, groups, N) if groups else (batch, S, N)
    tensors = [draw(batch, S, E), draw(batch, S, E), -draw(E, N).exp(), draw(*shared), draw(*shared)]
    return [x.requires_grad_() for x in tensors]


def everything(out: Any, wanted: list[Tensor]) -> list[Tensor]:
    y, last = out
    total = sum((p * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)).sum() for p in (y, last))
    return [y, last, *torch.autograd.grad(total, wanted)]


def near(a: list[Tensor], b: list[Tensor], bar: float = ROUNDING) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * max(1.0, y.abs().max().item()))


@settings(max_examples=25)
@given(
    seq=st.integers(1, 60),
    groups=st.sampled_from([0, 1, 2, 4]),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 59)), max_size=4),
    reverse=st.booleans(),
    carried=st.booleans(),
)
def test_the_forms_agree(seq: int, groups: int, marks: list[tuple[int, int]], reverse: bool, carried: bool) -> None:
    tensors = inputs(S=seq, groups=groups)
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    state = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) if carried else None
    wanted = [*tensors, *([state] if carried else [])]
    options: dict[str, Any] = {"state": state, "return_state": True, "resets": resets, "reverse": reverse}
    first, second = (everything(selective_scan(*tensors, backend=form, **options), wanted) for form in FORMS)
    near(first, second)


@pytest.mark.parametrize("reverse", [False, True])
def test_many_chunks_are_one_scan(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqblocks.kernels.selective_scan.torch.WORKING_SET", 1)
    tensors = inputs(S=45)
    assert len(_spans(torch.empty(2, 45, 1, 4), 3, reverse)) == 6
    first, second = (
        everything(selective_scan(*tensors, return_state=True, reverse=reverse, backend=form), tensors)
        for form in FORMS
    )
    near(first, second)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_whole_is_pieces(form: str, reverse: bool) -> None:
    tensors = inputs(S=11)
    u, dt, A, B, C = tensors
    whole = everything(selective_scan(*tensors, return_state=True, reverse=reverse, backend=form), tensors)
    parts: list[Tensor] = []
    state = None
    spans = list(pairwise((0, 1, 4, 11)))
    for a, b in reversed(spans) if reverse else spans:
        piece = (u[:, a:b], dt[:, a:b], A, B[:, a:b], C[:, a:b])
        y, state = selective_scan(*piece, state=state, return_state=True, reverse=reverse, backend=form)
        parts.append(y)
    near(everything((torch.cat(parts[::-1] if reverse else parts, 1), state), tensors), whole)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str) -> None:
    tensors = inputs(batch=1, S=4, E=2, N=2)
    extra = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gate = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    state = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(*x: Tensor) -> Any:
        return selective_scan(*x[:5], D=x[5], dt_bias=x[6], z=x[7], state=x[8], return_state=True, backend=form)

    assert torch.autograd.gradcheck(run, (*tensors, *extra, gate, state))
    if form == "reference":
        assert torch.autograd.gradgradcheck(run, (*tensors, *extra, gate, state))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-6, 1e3])
def test_extreme_steps_are_finite(form: str, size: float) -> None:
    u, dt, A, B, C = inputs(dtype=torch.float32)
    steps = (dt.detach().abs() * 0 + size).requires_grad_()
    tensors = [u, steps, A, B, C]
    for value in everything(selective_scan(*tensors, dt_softplus=False, return_state=True, backend=form), tensors):
        assert torch.isfinite(value).all()


def test_a_long_sequence_is_finite_and_close_to_float64() -> None:
    """100,000 tokens in float32: each step forgets, so errors do not add up; the bar is 100 units in the last place."""
    tensors = [x.detach() for x in inputs(batch=1, S=100_000, E=2, N=2, dtype=torch.float32)]
    short, exact = selective_scan(*tensors), selective_scan(*(x.double() for x in tensors))
    assert torch.isfinite(short).all()
    assert (short.double() - exact).abs().max() <= 100 * 2**-23 * exact.abs().max()


def test_complex_is_the_references_affair() -> None:
    u, dt, _, B, C = (x.detach() for x in inputs())
    A = torch.complex(-torch.rand(4, 3), torch.randn(4, 3)).to(torch.complex128)
    y = selective_scan(u, dt, A, B.to(A.dtype), C.to(A.dtype))
    assert y.dtype == torch.float64
    assert "complex" in next(v.reason for v in why("selective_scan", complex=True) if v.form == "torch")
    with pytest.raises(BackendError, match="complex"):
        selective_scan(u, dt, A, B, C, backend="torch")


def test_compile_export_low_precision_and_empty() -> None:
    tensors = [x.detach() for x in inputs(dtype=torch.float32)]
    torch._dynamo.reset()
    compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), selective_scan(*tensors))

    class Caller(torch.nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return selective_scan(*x)

    exported = torch.export.export(Caller(), tuple(tensors), strict=False)
    torch.testing.assert_close(exported.module()(*tensors), selective_scan(*tensors))
    y, last = selective_scan(*(x.bfloat16() for x in tensors), return_state=True)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    u, dt, A, B, C = tensors
    assert selective_scan(u[:, :0], dt[:, :0], A, B[:, :0], C[:, :0]).shape == (2, 0, 4)
    with pytest.raises(ValueError, match="selective_scan wants u, dt"):
        selective_scan(u, dt[:, :3], A, B, C)
    with pytest.raises(ValueError, match="groups of B and C of which one divides the other; got 4 and 3"):
        selective_scan(u.repeat(1, 1, 3), dt.repeat(1, 1, 3), A.repeat(3, 1), *(x.unsqueeze(2).expand(-1, -1, n, -1)
                                                                             for x, n in ((B, 4), (C, 3))))
    with pytest.raises(ValueError, match="selective_scan wants B"):
        selective_scan(u, dt, A, B[..., :2], C)
