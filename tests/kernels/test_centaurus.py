"""Properties specific to Centaurus: plans, the zero-order hold, causal rounding, segments.

Common properties are in test_conformance.py, official numbers in tests/torch/test_golden_centaurus.py, layers of models
in tests/torch/test_centaurus_layers.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqblocks.kernels import centaurus
from seqblocks.kernels.centaurus import torch as centaurus_torch
from seqblocks.kernels.centaurus.interface import discretised
from seqblocks.kernels.centaurus.torch import (
    Chunk,
    _chunk_by_chunk,
    _scan,
    cheapest,
    chunk_matrices,
    counts,
    fast_length,
)
from seqblocks.kernels.centaurus.triton import launch as centaurus_triton
from seqblocks.kernels.dispatch import self_check
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    Precision,
    Subject,
    Tensors,
    check,
    crossed,
    reset_marks,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import CENTAURUS, centaurus_inputs

MODES = ("neck", "pointwise", "dws", "full")
TORCH, TRITON = (Subject(CENTAURUS, "neck", IMPLEMENTATIONS[name]) for name in ("torch", "triton"))
BY_CHANNEL = TRITON._replace(variant="dws")
DOUBLE = Precision(torch.float64)


def inputs(mode: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> list[Tensor]:
    """Return x, A_real, A_imag, dt, B, C and, except for pointwise, E."""
    made = centaurus_inputs(mode=mode, **sizes)
    return [x.to(dtype).requires_grad_() for name, x in made.items() if name != "state"]


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("seq", [1, 2, 17, 130])
@pytest.mark.parametrize("mode", MODES)
def test_the_plans_agree(mode: str, seq: int) -> None:
    subject = TORCH._replace(variant=mode)
    for batch, reverse in ((1, True), (9, False)):  # the published code fails for a batch larger than all widths
        x = {name: t.requires_grad_() for name, t in subject.inputs(batch=batch, S=seq, state=False).items()}
        results = []
        for options in ({"backend": "reference"}, *({"plan": plan} for plan in ("chunks", "project", "fold"))):
            if (mode, options.get("plan")) != ("dws", "fold"):
                out = subject(x, return_state=False, reverse=reverse, **options)
                results.append(with_gradients(out, x))
        for found in results[1:]:
            # float64, decays below 1: a few roundings of 2^-52 a step and for the sums over N and M.
            torch.testing.assert_close(found, results[0], rtol=1e-10, atol=1e-10 * 100)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_in_parts_of_the_tokens(
    mode: str, reverse: bool, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    S = 200
    marks = reset_marks(2, S) if resets else None
    options = {"resets": marks, "reverse": reverse, "plan": "chunks", "return_state": True}
    subject, calls, run = TORCH._replace(variant=mode), [], centaurus_torch._chunk_by_chunk
    x = {name: t.requires_grad_() for name, t in subject.inputs(batch=2, S=S).items()}
    results = []
    for part in (1 << 40, 1):
        for name in ("PART_ELEMENTS", "PART_ELEMENTS_WITH_GRADIENTS"):
            monkeypatch.setattr(centaurus_torch, name, part)
        monkeypatch.setattr(centaurus_torch, "_chunk_by_chunk", lambda *given: calls.append(given) or run(*given))
        out = subject(x, **options)
        with torch.no_grad():
            torch.testing.assert_close(subject(x, **options), out)
        results.append(with_gradients(out, x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-8)
    assert len(calls) == 2 + 2 * (13 if resets else 4)  # chunks of 50 tokens, with resets of 16


@pytest.mark.parametrize("plan", ["project", "fold"])
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_of_the_plans(mode: str, plan: str) -> None:
    if (mode, plan) != ("dws", "fold"):
        x = inputs(mode, batch=1, S=4, H=2, G=2, N=2, M=2)
        assert torch.autograd.gradcheck(lambda *x: centaurus(*x, mode=mode, plan=plan), x, fast_mode=True)


def test_the_plan_is_counted() -> None:
    """Few features, many channels and a large batch are folded; long sequences of many features are computed by chunks.
    """
    def bank_of(mode: str, **sizes: int) -> tuple[Any, Tensor]:
        x, *rest = (t.detach() for t in inputs(mode, torch.float32, **sizes))
        return discretised(*rest[:5], rest[5] if len(rest) > 5 else None, mode, "euler"), x

    assert cheapest(*bank_of("full", batch=64, S=512, H=8, G=8)) == "fold"
    assert cheapest(*bank_of("neck", batch=1, S=2048, H=64, G=64, N=64)) == "chunks"
    assert "fold" not in counts(*bank_of("dws"))
    per_token = [counts(*bank_of("neck", batch=1, S=S, H=8, G=8, N=8))["chunks"] / S for S in (8192, 65536)]
    assert per_token[1] <= per_token[0]  # linear in the length, except for the matrices made once
    assert [fast_length(n) for n in (1, 2, 7, 17, 194, 16385)] == [2, 2, 8, 18, 200, 17280]


# ------------------------------------------------------------------------------------------------ the definition


def everything(out: Any, expected: list[Tensor]) -> list[Tensor]:
    """Return outputs, and the gradients of a weighted sum of them."""
    parts = [*out] if isinstance(out, tuple) else [out]
    total = sum((p * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)).sum() for p in parts)
    return [*parts, *torch.autograd.grad(total, expected)]


def agree(a: list[Tensor], b: list[Tensor]) -> None:
    """Compare float64 results of at most 40 steps with decays below 1."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10 * max(1.0, y.abs().max().item()))


def test_zero_order_hold_is_the_integral() -> None:
    """An input is held for dt and integrated in 20,000 small Euler steps; the midpoint rule has an error of (dt A /
    n)^2 / 24."""
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
    """Where A is 0 the weight is dt, and its gradient is finite."""
    tensors = inputs("neck")
    tensors[1], tensors[2] = (torch.zeros_like(t).requires_grad_() for t in tensors[1:3])
    exact = centaurus(*tensors, hold="euler")
    found = everything(centaurus(*tensors, hold="zoh"), tensors)
    torch.testing.assert_close(found[0], exact)
    assert all(torch.isfinite(t).all() for t in found)


def test_a_long_sequence_is_finite_and_close_to_float64() -> None:
    """100,000 tokens. Every state decays by at least exp(-0.05) a token, so some hundred tokens contribute. The error
    of their phases is a unit in the last place of an angle below 64 * pi a chunk: 2^-23 * 200."""
    g = torch.Generator().manual_seed(1)
    tensors = [x.detach() for x in inputs("neck", torch.float32, batch=1, S=100_000, H=2, N=2, M=3)]
    tensors[1] = -0.5 - torch.rand(2, 3, generator=g)
    tensors[3] = torch.tensor([0.1, 0.2])
    exact = centaurus(*(x.double() for x in tensors))
    for plan in ("chunks", "project"):
        found = centaurus(*tensors, plan=plan)
        assert (found.double() - exact).abs().max() <= 200 * 2**-23 * exact.abs().max(), plan


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    """Tokens that are a million times larger leave all bits of earlier outputs unchanged: rounding in chunks is causal,
    in an FFT it is not (docs: the plan's header)."""
    x, *rest = (t.detach() for t in inputs("neck", torch.float32, S=200))
    louder = x.clone()
    louder[:, 128:] *= 1e6
    a, b = (centaurus(t, *rest, plan="chunks")[:, :128] for t in (x, louder))
    assert torch.equal(a, b)


@pytest.mark.parametrize("step", [1e-6, 1e3])
@pytest.mark.parametrize("mode", MODES)
def test_extreme_steps_are_finite(mode: str, step: float) -> None:
    tensors = inputs(mode, torch.float32, S=100)
    tensors[3] = torch.full_like(tensors[3], step).requires_grad_()
    for hold in ("euler", "zoh"):
        for value in everything(centaurus(*tensors, mode=mode, hold=hold, return_state=True), tensors):
            assert torch.isfinite(value).all()


def scan_arguments(seq: int) -> list[Tensor]:
    """Return u, state, and a layer."""
    g = torch.Generator().manual_seed(1)
    shapes = ((3, 2, seq), (2, 3, 2, 2))
    drawn = [torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]
    return [*drawn, *inputs("neck", N=3, M=2)[1:]]


def a_chunk(layer: list[Tensor], reverse: bool) -> Chunk:
    """Return a chunk of eight tokens."""
    return chunk_matrices(discretised(*layer, "neck", "zoh"), 8, reverse)


@settings(max_examples=20)
@given(
    seq=st.integers(1, 40),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 39)), max_size=4),
    reverse=st.booleans(),
)
def test_compiled_code_runs_the_same_with_a_derivative_by_hand(
    seq: int, marks: list[tuple[int, int]], reverse: bool
) -> None:
    u, state, *layer = scan_arguments(seq)
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    given = resets if marks else None
    expected = [u, state, *layer[:3], layer[5]]  # B and C come before and after
    agree(
        everything(_scan(u, state, *a_chunk(layer, reverse), given, reverse), expected),
        everything(_chunk_by_chunk(u, state, a_chunk(layer, reverse), given, reverse), expected),
    )


@pytest.mark.slow
def test_the_op_of_compiled_code_satisfies_opcheck() -> None:
    u, state, *layer = scan_arguments(11)
    for reverse, resets in ((False, None), (True, torch.zeros(2, 11).bool())):
        chunk = [t.detach().requires_grad_() for t in a_chunk(layer, reverse)]
        torch.library.opcheck(_scan.traced, (u, state, *chunk, resets, reverse))


# ------------------------------------------------------------------------------------------------ Triton


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut few long sequences into segments, with shorter pieces than usual."""
    monkeypatch.setattr(centaurus_triton, "SEGMENT_MIN_TOKENS", 8)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("segments")
@crossed(
    ("seq", [17, 24, 29]),
    ("reverse", [False, True]),
    ("resets", [False, True]),
    ("state", [False, True]),
)
def test_segments(seq: int, reverse: bool, resets: bool, state: bool) -> None:
    assert centaurus_triton.segments(2, seq, centaurus_triton.tiles(3, 3, "cpu"), 3) == -(-seq // 8)
    x = BY_CHANNEL.inputs(S=seq, state=state)
    check(BY_CHANNEL, x, reverse=reverse, resets=reset_marks(2, seq) if resets else None)


def test_only_few_sequences_are_cut_into_segments() -> None:
    tile = centaurus_triton.tiles(512, 4, "sm_90")
    assert centaurus_triton.segments(64, 8192, tile, 512) == 1
    assert centaurus_triton.segments(1, 8192, tile, 512) == 64
    assert centaurus_triton.segments(1, 200, tile, 512) == 1
    assert centaurus_triton.segments(1, 1 << 17, centaurus_triton.tiles(512, 64, "sm_90"), 512) == 33


@pytest.mark.slow
@INTERPRETED
@crossed(
    ("reverse", [False, True]),
    ("resets", [False, True]),
    ("warps, segments", [(8, 26), (2, 13)]),  # of 8 tokens; of 16, because there are enough
    rest="long",
)
def test_a_long_sequence_in_segments(
    warps: int, segments: int, reverse: bool, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(centaurus_triton, "SEGMENT_MIN_TOKENS", 8)
    monkeypatch.setattr(centaurus_triton, "WARPS", warps)
    seq = 203
    plan = centaurus_triton._Plan(torch.zeros(1, seq, 3), torch.zeros(3, 3), reverse)
    assert segments == plan.K
    x = BY_CHANNEL.inputs(batch=1, S=seq, state=False)
    check(BY_CHANNEL, x, reverse=reverse, resets=reset_marks(1, seq, 70) if resets else None)


@pytest.mark.slow
@INTERPRETED
@crossed(
    ("reverse", [False, True]),
    ("seq", [13, 43]),  # 43: in segments
    ("G, H", [(1, 3), (3, 1), (2, 40), (40, 2), (3, 33), (5, 5)]),
    rest="long",
    later=[(3, 33)],
)
def test_sums_of_mode_full(G: int, H: int, seq: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(centaurus_triton, "SEGMENT_MIN_TOKENS", 16)
    subject = TRITON._replace(variant="full")
    x = subject.inputs(batch=1, S=seq, G=G, H=H, M=2)
    check(subject, x, reverse=reverse, resets=reset_marks(1, seq, 20))


FACTS = {"device": "cpu", "dtype": torch.float32, "channels": 6, "features": 3, "substates": 3}
MANY = {"batch": 1 << 16}  # enough sequences to fill a device


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "count"),  # of the calls below; only the op of `full` reads `keeps`
    [
        ("neck", 2), ("full", 2),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("pointwise", 2), ("dws", 2), ("full", 4))),
    ],
)  # fmt: skip
def test_the_check_tries_the_mode_whole_and_in_segments(
    mode: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    plan = centaurus_triton._Plan

    class Seen(plan):
        def __init__(self, u: Tensor, *args: Any) -> None:
            super().__init__(u, *args)
            seen.append((self.K, self.F == self.N))

    monkeypatch.setattr(centaurus_triton, "_Plan", Seen)
    facts = {**FACTS, "mode": mode, "substates": 1 if mode == "pointwise" else 3}
    calls = [({}, 3, True), (MANY, 1, False), ({}, 3, False), (MANY, 1, True)]
    for sizes, segments, keeps in calls[:count]:
        seen.clear()
        call = self_check.KernelCall("centaurus", {**facts, "keeps": keeps}, sizes=sizes)
        assert self_check.check(call) == ("", True)
        assert {*seen} == {(segments, mode != "full" or keeps)}


@INTERPRETED
@pytest.mark.slow
def test_the_check_finds_wrong_whole_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(centaurus_triton._Plan):
        def walk(self, *args: Any) -> Tensor:
            v = super().walk(*args)
            return 1.1 * v if self.K == 1 else v

    monkeypatch.setattr(centaurus_triton, "_Plan", Wrong)
    assert "is off by" in self_check.check(self_check.KernelCall("centaurus", {**FACTS, "mode": "dws"}, sizes=MANY))[0]


@INTERPRETED
@pytest.mark.parametrize("decay", [-1e-6, -1e4])
def test_states_that_never_decay_and_that_decay_at_once(decay: float) -> None:
    x: Tensors = BY_CHANNEL.inputs(S=20, state=False)
    check(BY_CHANNEL, {**x, "A_real": torch.full_like(x["A_real"], decay)})


class Written(TorchDispatchMode):
    """Count the elements of the results of ops."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.numbers += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def test_the_derivative_by_chunks_takes_time_in_proportion_to_the_length() -> None:
    """A gradient as large as all chunks for each chunk would take four times as long for twice the length."""
    found = []
    for length in (64 * 40, 64 * 80):
        x = torch.randn(1, length, 4, requires_grad=True)
        A, E = -torch.rand(4, 2) - 0.1, torch.randn(4, 2)
        y = centaurus(x, A, A, torch.full((4,), 0.1), torch.ones(4), torch.ones(4), E, mode="dws", plan="chunks")
        assert isinstance(y, Tensor)
        with Written() as written:
            y.sum().backward()
        found.append(written.numbers)
    assert found[1] < 2.2 * found[0], found
