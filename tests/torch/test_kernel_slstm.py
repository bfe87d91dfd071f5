"""The sLSTM kernel: against the official cell, its forms against each other, the state law, the extremes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqblocks.kernels import SLSTMState, slstm
from tests.torch import golden

FORMS = ("reference", "torch")
CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("slstm_cell*"))
# float64, S <= 64 steps of a contracting recurrence on values of order one: rounding of about S * 2^-52, with room
ROUNDING = 1e-10


def inputs(B: int = 2, S: int = 9, H: int = 2, D: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return [draw(B, S, H * D) for _ in range(4)], draw(H, D, 4, D), draw(4, H, D)


def initial(B: int = 2, H: int = 2, D: int = 3, seed: int = 1) -> SLSTMState:
    g = torch.Generator().manual_seed(seed)
    y, c, n, m = (torch.randn(B, H, D, generator=g, dtype=torch.float64) for _ in range(4))
    return SLSTMState(*(s.requires_grad_() for s in (y, c, n.abs() + 0.1, m)))


def everything(out: Any, wanted: list[Tensor]) -> list[Tensor]:
    """Output, state, and the gradients of a weighted sum of both."""
    y, last = out
    parts = [y, *last]
    total = sum((p * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)).sum() for p in parts)
    return [*parts, *torch.autograd.grad(total, wanted)]


def near(a: list[Tensor], b: list[Tensor], bar: float = ROUNDING) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_official_cell(case: str, form: str) -> None:
    data, meta = golden.read(f"xlstm/{case}")
    H, B = meta["config"]["num_heads"], meta["config"]["B"]
    for dtype in (torch.float64, torch.float32):
        x = torch.from_numpy(data["in/x"]).to(dtype).requires_grad_()
        kernel = torch.from_numpy(data["w/_recurrent_kernel_"]).to(dtype).requires_grad_()
        flat_bias = torch.from_numpy(data["w/_bias_"]).to(dtype).requires_grad_()
        D = kernel.shape[-1]
        recurrent = kernel.transpose(1, 2).reshape(H, D, 4, D)
        state = None
        if "in/state0" in data:
            state = SLSTMState(*torch.from_numpy(data["in/state0"]).to(dtype).reshape(4, B, H, D).unbind(0))
        y, last = slstm(
            *x.chunk(4, -1), recurrent, flat_bias.view(4, H, D), state=state, return_state=True, backend=form
        )
        out = y.unflatten(-1, (H, D)).transpose(1, 2)
        (out * torch.from_numpy(data["ct"]).to(dtype)).sum().backward()
        results = {"out": out.detach(), "grad_in/x": x.grad}
        results |= {"grad_w/_recurrent_kernel_": kernel.grad, "grad_w/_bias_": flat_bias.grad}
        for key, found in results.items():
            scale = max(meta["max_abs"][key], 1.0)
            bar = ROUNDING * scale if dtype == torch.float64 else 10 * meta["f32_max_abs_err"][key] + 1e-6 * scale
            assert (found - torch.from_numpy(data[key])).abs().max() <= bar, (key, dtype)
        if dtype == torch.float64:
            final = torch.from_numpy(data["state/final_ycnm"]).reshape(4, B, H, D)
            near([s.detach() for s in last], list(final.unbind(0)))


@settings(max_examples=25)
@given(
    seq=st.integers(1, 20),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 19)), max_size=4),
    reverse=st.booleans(),
    carried=st.booleans(),
)
def test_the_forms_agree(seq: int, marks: list[tuple[int, int]], reverse: bool, carried: bool) -> None:
    gates, recurrent, bias = inputs(S=seq)
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    state = initial() if carried else None
    wanted = [*gates, recurrent, bias, *(state or ())]
    options: dict[str, Any] = {"state": state, "return_state": True, "resets": resets, "reverse": reverse}
    first, second = (everything(slstm(*gates, recurrent, bias, backend=form, **options), wanted) for form in FORMS)
    near(first, second)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_whole_is_chunks(form: str, reverse: bool) -> None:
    gates, recurrent, bias = inputs(S=11)
    wanted = [*gates, recurrent, bias]
    whole = everything(slstm(*gates, recurrent, bias, return_state=True, reverse=reverse, backend=form), wanted)
    parts: list[Tensor] = []
    state = None
    spans = list(pairwise((0, 1, 4, 11)))
    for a, b in reversed(spans) if reverse else spans:
        piece = [x[:, a:b] for x in gates]
        y, state = slstm(*piece, recurrent, bias, state=state, return_state=True, reverse=reverse, backend=form)
        parts.append(y)
    joined = torch.cat(parts[::-1] if reverse else parts, 1)
    near(everything((joined, state), wanted), whole)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: str) -> None:
    gates, recurrent, bias = inputs(B=1, S=4, H=1, D=2)
    state = initial(1, 1, 2)

    def run(*tensors: Tensor) -> Any:
        y, last = slstm(*tensors[:6], state=tensors[6:], return_state=True, backend=form)
        return (y, *last)

    assert torch.autograd.gradcheck(run, (*gates, recurrent, bias, *state))
    if form == "reference":
        assert torch.autograd.gradgradcheck(run, (*gates, recurrent, bias, *state))
    else:
        (grad,) = torch.autograd.grad(run(*gates, recurrent, bias, *state)[0].sum(), gates[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("gate", range(4))
def test_extreme_gates_are_finite(form: str, size: float, gate: int) -> None:
    gates, recurrent, bias = inputs(dtype=torch.float32)
    gates[gate] = (gates[gate].detach() * 0 + size).requires_grad_()
    for value in everything(slstm(*gates, recurrent, bias, return_state=True, backend=form), [*gates, recurrent, bias]):
        assert torch.isfinite(value).all()


def test_low_precision_runs_in_float32_inside() -> None:
    gates, recurrent, bias = inputs(dtype=torch.bfloat16)
    y, last = slstm(*gates, recurrent, bias, return_state=True)
    assert y.dtype == torch.bfloat16
    assert last.c.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = [x.float() for x in gates]
        for form in FORMS:
            cast = slstm(*plain, recurrent.float(), bias.float(), backend=form)
            torch.testing.assert_close(cast.to(torch.bfloat16), y)


def test_compile_and_export() -> None:
    gates, recurrent, bias = inputs(dtype=torch.float32)
    plain = [x.detach() for x in (*gates, recurrent, bias)]
    torch._dynamo.reset()
    compiled = torch.compile(slstm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*plain), slstm(*plain))

    class Caller(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return slstm(*tensors)

    exported = torch.export.export(Caller(), tuple(plain), strict=False)
    torch.testing.assert_close(exported.module()(*plain), slstm(*plain))


def test_empty_and_wrong_shapes() -> None:
    gates, recurrent, bias = inputs()
    none = [x[:, :0] for x in gates]
    y, last = slstm(*none, recurrent, bias, state=initial(), return_state=True)
    assert y.shape == (2, 0, 6)
    near([s.detach() for s in last], [s.detach() for s in initial()])
    assert slstm(*[x[:0] for x in gates], recurrent, bias).shape == (0, 9, 6)
    with pytest.raises(ValueError, match=r"slstm wants gates \[B, S, 6\]"):
        slstm(gates[0][..., :5], *gates[1:], recurrent, bias)
    with pytest.raises(ValueError, match="slstm wants recurrent"):
        slstm(*gates, recurrent[:, :, :3], bias)
    with pytest.raises(ValueError, match="slstm wants bias"):
        slstm(*gates, recurrent, bias[:3])
    with pytest.raises(ValueError, match="slstm wants a state"):
        slstm(*gates, recurrent, bias, state=initial(3))
