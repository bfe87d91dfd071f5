"""Centaurus: its forms and plans against each other, the state law, the extremes.

Official numbers: test_golden_centaurus.py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seqblocks
from seqblocks.cost import macs
from seqblocks.kernels import centaurus
from seqblocks.kernels.centaurus.interface import _bank
from seqblocks.kernels.centaurus.torch import Chunk, _chunk, _scan, _walked, cheapest, counts, fast_length
from seqblocks.testing import check_law

MODES = ("neck", "pointwise", "dws", "full")
# float64, decays below 1: rounding of a few 2^-52 a step, with room for 300 steps and for the sums over N and M
ROUNDING = 1e-10


def inputs(
    mode: str, batch: int = 2, S: int = 9, H: int = 3, G: int = 2, N: int = 4, M: int = 3, dtype: Any = torch.float64
) -> list[Tensor]:
    """x, A_real, A_imag, dt, B, C and, but for pointwise, E."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    rows = {"dws": H, "full": G * H}.get(mode, N)
    channels = rows * M if mode == "pointwise" else rows
    B, C = (draw(channels, H), draw(G, channels)) if mode in ("neck", "pointwise") else (draw(rows), draw(rows))
    tensors = [draw(batch, S, H), -draw(rows, M).exp(), 3 * draw(rows, M), (draw(rows) - 2).exp(), B, C]
    if mode != "pointwise":
        tensors.append(draw(rows, M))
    return [x.requires_grad_() for x in tensors]


def first_state(mode: str, tensors: list[Tensor]) -> Tensor:
    rows, M = tensors[1].shape
    shape = (rows * M, 1) if mode == "pointwise" else (rows, M)
    return torch.randn(tensors[0].shape[0], *shape, 2, dtype=tensors[0].dtype, requires_grad=True)


def everything(out: Any, wanted: list[Tensor]) -> list[Tensor]:
    parts = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    total = sum((p * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)).sum() for p in parts)
    return [*parts, *torch.autograd.grad(total, wanted)]


def near(a: list[Tensor], b: list[Tensor], bar: float = ROUNDING) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(
    seq=st.integers(1, 300),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 299)), max_size=4),
    reverse=st.booleans(),
    carried=st.booleans(),
    hold=st.sampled_from(["euler", "zoh"]),
)
def test_the_forms_agree(
    mode: str, seq: int, marks: list[tuple[int, int]], reverse: bool, carried: bool, hold: str
) -> None:
    tensors = inputs(mode, S=seq)
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    state = first_state(mode, tensors) if carried else None
    wanted = [*tensors, *([state] if state is not None else [])]
    options: dict[str, Any] = {"mode": mode, "hold": hold, "state": state, "return_state": True, "reverse": reverse}
    options["resets"] = resets if marks else None
    near(*(everything(centaurus(*tensors, backend=form, **options), wanted) for form in ("reference", "torch")))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("seq", [1, 2, 17, 130])
@pytest.mark.parametrize("mode", MODES)
def test_the_plans_agree(mode: str, seq: int, reverse: bool) -> None:
    for batch in (1, 9):  # a batch larger than all widths is where the published code breaks
        tensors = inputs(mode, batch=batch, S=seq)
        exact = everything(centaurus(*tensors, mode=mode, reverse=reverse, backend="reference"), tensors)
        for plan in ("chunks", "project", "fold"):
            if (mode, plan) != ("dws", "fold"):
                near(everything(centaurus(*tensors, mode=mode, reverse=reverse, plan=plan), tensors), exact)


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_whole_is_pieces(mode: str, reverse: bool, form: str) -> None:
    tensors = inputs(mode, S=140)
    options: dict[str, Any] = {"mode": mode, "return_state": True, "reverse": reverse, "backend": form}
    whole = everything(centaurus(*tensors, **options), tensors)
    spans = list(pairwise((0, 1, 70, 140)))
    parts, state = [], None
    for a, b in reversed(spans) if reverse else spans:
        y, state = centaurus(tensors[0][:, a:b], *tensors[1:], state=state, **options)
        parts.append(y)
    near(everything((torch.cat(parts[::-1] if reverse else parts, 1), state), tensors), whole)


def test_zero_order_hold_is_the_integral() -> None:
    """An input held for dt, integrated in 20,000 small Euler steps; the midpoint rule leaves (dt A / n)^2 / 24."""
    steps = 20_000
    A, dt = complex(-0.7, 2.5), 0.4
    x = torch.randn(1, 5, 1, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    y = centaurus(
        x, one * A.real, one * A.imag, one[0] * dt, one, one, one, mode="neck", hold="zoh", backend="reference"
    )
    s, h = 0j, dt / steps
    for t in range(5):
        growth = complex(math.e) ** (A * h)
        middle = complex(math.e) ** (A * h / 2) * h * x[0, t, 0].item()
        for _ in range(steps):
            s = growth * s + middle
        assert abs(y[0, t, 0].item() - s.real) <= 1e-8


def test_zero_order_hold_of_an_integrator() -> None:
    """Where A is 0 the weight is dt, and its gradient finite."""
    tensors = inputs("neck")
    tensors[1], tensors[2] = (torch.zeros_like(t).requires_grad_() for t in tensors[1:3])
    exact = centaurus(*tensors, hold="euler")
    found = everything(centaurus(*tensors, hold="zoh"), tensors)
    torch.testing.assert_close(found[0], exact)
    assert all(torch.isfinite(t).all() for t in found)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(mode: str) -> None:
    tensors = inputs(mode, batch=1, S=4, H=2, G=2, N=2, M=2)
    state = first_state(mode, tensors)
    resets = torch.tensor([[False, False, True, False]])

    def run(*x: Tensor, **options: Any) -> Any:
        return centaurus(*x[:-1], mode=mode, state=x[-1], return_state=True, **options)

    for form in ("reference", "torch"):
        assert torch.autograd.gradcheck(lambda *x, f=form: run(*x, backend=f, hold="zoh"), (*tensors, state))
        assert torch.autograd.gradcheck(lambda *x, f=form: run(*x, backend=f, resets=resets), (*tensors, state))
        assert torch.autograd.gradgradcheck(lambda *x, f=form: run(*x, backend=f), (*tensors, state))
    for plan in ("project", "fold"):
        if (mode, plan) != ("dws", "fold"):
            assert torch.autograd.gradcheck(lambda *x, p=plan: centaurus(*x, mode=mode, plan=p), tensors)


def test_the_plan_is_counted() -> None:
    """Few features, many channels and a large batch fold; long sequences of many features go by chunks."""
    def bank_of(mode: str, **sizes: int) -> tuple[Any, Tensor]:
        x, *rest = (t.detach().float() for t in inputs(mode, **sizes))
        return _bank(*rest[:5], rest[5] if len(rest) > 5 else None, mode, "euler"), x

    assert cheapest(*bank_of("full", batch=64, S=512, H=8, G=8)) == "fold"
    assert cheapest(*bank_of("neck", batch=1, S=2048, H=64, G=64, N=64)) == "chunks"
    assert "fold" not in counts(*bank_of("dws"))
    per_token = [counts(*bank_of("neck", batch=1, S=S, H=8, G=8, N=8))["chunks"] / S for S in (8192, 65536)]
    assert per_token[1] <= per_token[0]  # linear in the length, but for the matrices made once
    assert [fast_length(n) for n in (1, 2, 7, 17, 194, 16385)] == [2, 2, 8, 18, 200, 17280]


def test_states_resets_and_plans_that_exclude_each_other() -> None:
    tensors = inputs("neck")
    with pytest.raises(ValueError, match="carries no state"):
        centaurus(*tensors, plan="project", return_state=True)
    with pytest.raises(ValueError, match="no plan 'fft'"):
        centaurus(*tensors, plan="fft")


def test_a_long_sequence_is_finite_and_close_to_float64() -> None:
    """100,000 tokens. Every state forgets at least exp(-0.05) a token: what counts is some hundred tokens, and their
    phases, whose error is a unit in the last place of an angle below 64 * pi a chunk: 2^-23 * 200."""
    g = torch.Generator().manual_seed(1)
    tensors = [x.detach() for x in inputs("neck", batch=1, S=100_000, H=2, N=2, dtype=torch.float32)]
    tensors[1] = -0.5 - torch.rand(2, 3, generator=g)
    tensors[3] = torch.tensor([0.1, 0.2])
    exact = centaurus(*(x.double() for x in tensors))
    for plan in ("chunks", "project"):
        found = centaurus(*tensors, plan=plan)
        assert (found.double() - exact).abs().max() <= 200 * 2**-23 * exact.abs().max(), plan


def test_the_past_does_not_hear_the_future() -> None:
    """A million times larger tokens later on change nothing before them, to the bit: chunks are causal in rounding
    too, where an FFT is not (docs: the plan's header)."""
    x, *rest = (t.detach() for t in inputs("neck", S=200, dtype=torch.float32))
    louder = x.clone()
    louder[:, 128:] *= 1e6
    a, b = (centaurus(t, *rest, plan="chunks")[:, :128] for t in (x, louder))
    assert torch.equal(a, b)


@pytest.mark.parametrize("step", [1e-6, 1e3])
@pytest.mark.parametrize("mode", MODES)
def test_extreme_steps_are_finite(mode: str, step: float) -> None:
    tensors = inputs(mode, S=100, dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], step).requires_grad_()
    for hold in ("euler", "zoh"):
        for value in everything(centaurus(*tensors, mode=mode, hold=hold, return_state=True), tensors):
            assert torch.isfinite(value).all()


def test_compile_low_precision_autocast_and_empty() -> None:
    for mode in MODES:
        tensors = [t.detach() for t in inputs(mode, S=100, dtype=torch.float32)]
        wide = centaurus(*tensors, mode=mode)
        y, last = centaurus(*(t.bfloat16() for t in tensors[:1]), *tensors[1:], mode=mode, return_state=True)
        assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
        assert (y.float() - wide).abs().max() <= 2**-6 * wide.abs().max()  # x and y rounded to 8 bits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(centaurus(*tensors, mode=mode), wide)
        assert centaurus(tensors[0][:, :0], *tensors[1:], mode=mode).shape == (2, 0, wide.shape[2])
        assert centaurus(tensors[0][:0], *tensors[1:], mode=mode).shape == (0, 100, wide.shape[2])
    tensors = [t.detach() for t in inputs("neck", S=100, dtype=torch.float32)]
    torch._dynamo.reset()
    compiled = torch.compile(centaurus, fullgraph=True, backend="aot_eager")
    # the compiled function takes the chunks plan
    torch.testing.assert_close(compiled(*tensors), centaurus(*tensors, plan="chunks"))


def what_is_walked(seq: int) -> list[Tensor]:
    """u, state, and a layer."""
    g = torch.Generator().manual_seed(1)
    shapes = ((3, 2, seq), (2, 3, 2, 2))
    drawn = [torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    return [*drawn, *inputs("neck", N=3, M=2)[1:]]


def a_chunk(layer: list[Tensor], reverse: bool) -> Chunk:
    """Of eight tokens."""
    return _chunk(_bank(*layer, "neck", "zoh"), 8, reverse)


@settings(max_examples=40)
@given(
    seq=st.integers(1, 40),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 39)), max_size=4),
    reverse=st.booleans(),
)
def test_compiled_code_runs_the_same_with_a_derivative_by_hand(
    seq: int, marks: list[tuple[int, int]], reverse: bool
) -> None:
    u, state, *layer = what_is_walked(seq)
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    given = resets if marks else None
    wanted = [u, state, *layer[:3], layer[5]]  # B and C come before and after
    near(
        everything(_scan(u, state, *a_chunk(layer, reverse), given, reverse), wanted),
        everything(_walked(u, state, a_chunk(layer, reverse), given, reverse), wanted),
    )


def test_its_op_keeps_its_promises_to_torch() -> None:
    u, state, *layer = what_is_walked(11)
    for reverse, resets in ((False, None), (True, torch.zeros(2, 11).bool())):
        chunk = [t.detach().requires_grad_() for t in a_chunk(layer, reverse)]
        torch.library.opcheck(_scan, (u, state, *chunk, resets, reverse))


@pytest.mark.parametrize("mode", MODES)
def test_one_export_serves_every_length(mode: str) -> None:
    """With resets and state; chunks of 16 tokens then."""
    class Caller(torch.nn.Module):
        def forward(self, resets: Tensor, state: Tensor, *x: Tensor) -> Any:
            return centaurus(*x, mode=mode, resets=resets, state=state, return_state=True)

    def call(S: int) -> list[Tensor]:
        x = [t.detach() for t in inputs(mode, S=S)]
        resets = torch.zeros(2, S, dtype=torch.bool)
        resets[0, S // 2] = True
        return [resets, first_state(mode, x).detach(), *x]

    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    given = call(20)
    sizes = (length, None, (length, *[None] * (len(given) - 3)))
    program = torch.export.export(Caller(), tuple(given), dynamic_shapes=sizes, strict=False).module()
    for S in (2, 16, 17, 100):
        given = call(S)
        near(list(program(*given)), list(Caller()(*given)))


def test_errors_name_what_is_wrong() -> None:
    x, *rest = inputs("neck")
    with pytest.raises(ValueError, match="mode is one of neck"):
        centaurus(x, *rest, mode="depthwise")
    with pytest.raises(ValueError, match="hold is euler or zoh"):
        centaurus(x, *rest, hold="bilinear")
    with pytest.raises(ValueError, match=r"mode dws, wants B and C \[3\]"):
        centaurus(x, *rest, mode="dws")
    with pytest.raises(ValueError, match="wants no E"):
        centaurus(x, *rest, mode="pointwise")
    with pytest.raises(ValueError, match="wants a state"):
        centaurus(x, *rest, state=torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="wants resets"):
        centaurus(x, *rest, resets=torch.zeros(2, 8, dtype=torch.bool))


def build(steps: str, features: int = 4) -> Any:
    text = f"seqblocks: 1\nmodel:\n  input: {{features: {features}}}\n  steps:\n{steps}"
    return seqblocks.build_text(text, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "wanted"), [("neck", 9_792), ("pointwise", 66_624), ("dws", 1_728), ("full", 110_592)]
)
def test_counts_of_the_reference(mode: str, wanted: int) -> None:
    """64 features, 64 channels (full: 4,096), 8 sub-states: a complex number counts as the two reals it is."""
    model = build(f"    - centaurus: {{mode: {mode}, sub_states: 8}}\n", 64)
    assert sum(p.numel() for p in model.parameters()) == wanted


def test_the_published_start() -> None:
    own = dict(build("    - centaurus: {mode: neck, state: 5, sub_states: 4}\n").centaurus.named_parameters())
    torch.testing.assert_close(-torch.nn.functional.softplus(own["A_real"]), torch.full_like(own["A_real"], -0.5))
    torch.testing.assert_close(own["A_imag"][2].float(), math.pi * torch.arange(4))
    torch.testing.assert_close(own["log_dt"].exp().float(), torch.logspace(-3, -1, 5))
    assert own["B"].abs().max() <= 4**-0.5
    assert own["C"].abs().max() <= 5**-0.5


def test_a_rate_divides_and_restores() -> None:
    model = build("    - downsample: {factor: 4}\n    - upsample: {factor: 2}\n")
    x = torch.arange(32, dtype=torch.float64).reshape(1, 8, 4)
    torch.testing.assert_close(model(x)[0, :, 0], torch.tensor([6.0, 6.0, 22.0, 22.0], dtype=torch.float64))
    last = build("    - downsample: {factor: 4, method: last}\n")
    torch.testing.assert_close(last(x)[0, :, 0], torch.tensor([12.0, 28.0], dtype=torch.float64))
    with pytest.raises(seqblocks.RunError, match="a multiple of that many tokens, not 7"):
        model(x[:, :7])
    with pytest.raises(seqblocks.RunError, match="may hold two sequences"):
        model(x, resets=torch.zeros(1, 8, dtype=torch.bool))


def test_a_stream_of_a_changed_rate_goes_by_frames() -> None:
    """Down by 2 and by 3, up by 3: frames of 6, of which the output has 3 tokens."""
    model = build(
        "    - causal_conv: {kernel: 3}\n    - downsample: {name: a, factor: 2}\n"
        "    - causal_conv: {name: coarse, kernel: 2}\n    - downsample: {name: b, factor: 3}\n"
        "    - centaurus: {mode: neck, state: 5}\n    - upsample: {factor: 3}\n"
    )
    assert model.frame_size == 6
    check_law(model, seq=5, cuts=(1, 3))
    x = torch.randn(2, 12, 4, dtype=torch.float64)
    y, state = model.step(x[:, :6])
    assert y.shape == (2, 3, 4)
    torch.testing.assert_close(torch.cat([y, model.step(x[:, 6:], state)[0]], 1), model(x))
    for call, why in (
        (lambda: model(x[:, :8], return_state=True), "streams 6 tokens at a time: give it a multiple, not 8"),
        (lambda: model.step(x[:, 0]), r"a step reads \[batch, 6, 4\], not \[2, 4\]"),
        (lambda: model.step(x[:, :5]), "streams 6 tokens at a time: give it a multiple, not 5"),
        (lambda: check_law(model, resets=[(0, 1)]), "may hold two sequences"),
    ):
        with pytest.raises(seqblocks.RunError, match=why):
            call()
    vector = build("    - downsample: {factor: 4}\n    - pool: {mode: last}\n")
    check_law(vector, seq=3, cuts=(2,))


def test_a_token_behind_a_rate_costs_its_share() -> None:
    every, fourth = (
        macs(build(f"{first}    - linear: {{features: 8, bias: false}}\n").graph.graph, None)
        for first in ("", "    - downsample: {factor: 4}\n")
    )
    assert every == 4 * fourth == 32
