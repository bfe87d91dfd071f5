"""Centaurus in Triton, interpreted on the CPU, against its recurrence in float64: outputs, states, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks.errors import BackendError
from seqblocks.kernels import centaurus, why
from seqblocks.kernels.centaurus import triton as centaurus_triton
from seqblocks.kernels.dispatch import self_check
from tests.triton.compare import check, draw, float32_bar, half, interpreted, resets, scattered, turned, wide

pytestmark = interpreted

MODES = ("neck", "pointwise", "dws", "full")
# u, what goes out and dv are rounded on their way through the projections, some four times 2^-9 or 2^-11; a gradient
# goes there and back
NARROW = {torch.float16: 8 * 2**-11, torch.bfloat16: 8 * 2**-9}


def inputs(
    mode: str, batch: int = 2, S: int = 9, H: int = 3, G: int = 2, N: int = 5, M: int = 3, state: bool = False
) -> dict[str, Tensor]:
    rows = {"dws": H, "full": G * H}.get(mode, N)
    channels = rows * M if mode == "pointwise" else rows
    x = {"x": draw(batch, S, H), "A_real": -draw(rows, M, seed=1).exp(), "A_imag": 3 * draw(rows, M, seed=2)}
    x["dt"] = (draw(rows, seed=3) - 2).exp()
    dense = mode in ("neck", "pointwise")
    x["B"] = draw(channels, H, seed=4) if dense else draw(rows, seed=4)
    x["C"] = draw(G, channels, seed=5) if dense else draw(rows, seed=5)
    if mode != "pointwise":
        x["E"] = draw(rows, M, seed=6)
    if state:
        x["state"] = draw(batch, *((rows * M, 1) if mode == "pointwise" else (rows, M)), 2, seed=7)
    return x


def compare(tensors: dict[str, Tensor], bar: float | None = None, **options: Any) -> None:
    S, N = tensors["x"].shape[1], tensors["A_real"].numel()
    # sums over tokens, and over channels in the projections
    check(centaurus, tensors, bar or 4 * float32_bar(S + N), narrow=("x",), **options)


@half(
    ("mode", MODES),
    ("reverse", [False, True]),
    ("state", [False, True]),
)
def test_modes(mode, reverse, state):
    compare(inputs(mode, state=state), mode=mode, reverse=reverse, return_state=state)


@half(
    ("mode", MODES),
    ("state", [False, True]),
)
def test_resets(mode, state):
    compare(inputs(mode, S=13, state=state), mode=mode, resets=resets(2, 13), return_state=True)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few long sequences are cut, in shorter pieces."""
    monkeypatch.setattr(centaurus_triton, "SEGMENT", 8)


@pytest.mark.usefixtures("segments")
@half(
    ("seq", [17, 24, 29]),
    ("reverse", [False, True]),
    ("reset", [False, True]),
    ("state", [False, True]),
)
def test_segments(seq, reverse, reset, state):
    assert centaurus_triton.segments(2, seq, centaurus_triton.tiles(3, 3, "cpu"), 3) == -(-seq // 8)
    marks = resets(2, seq) if reset else None
    compare(inputs("dws", S=seq, state=state), mode="dws", reverse=reverse, resets=marks, return_state=True)


def test_enough_sequences_are_not_cut_and_few_no_more_than_helps():
    tile = centaurus_triton.tiles(512, 4, "sm_90")
    assert centaurus_triton.segments(64, 8192, tile, 512) == 1
    assert centaurus_triton.segments(1, 8192, tile, 512) == 64
    assert centaurus_triton.segments(1, 200, tile, 512) == 1
    assert centaurus_triton.segments(1, 1 << 17, centaurus_triton.tiles(512, 64, "sm_90"), 512) == 33


@half(
    ("reverse", [False, True]),
    ("reset", [False, True]),
    ("warps, segments", [(8, 26), (2, 13)]),  # of 8 tokens; of 16, because there are enough
)
def test_a_long_sequence_in_segments(warps, segments, reverse, reset, monkeypatch):
    monkeypatch.setattr(centaurus_triton, "SEGMENT", 8)
    monkeypatch.setattr(centaurus_triton, "WARPS", warps)
    seq = 203
    plan = centaurus_triton._Plan(torch.zeros(1, seq, 3), torch.zeros(3, 3), reverse)
    assert segments == plan.K
    marks = resets(1, seq, 70) if reset else None
    compare(inputs("dws", batch=1, S=seq), mode="dws", reverse=reverse, resets=marks, return_state=True)


@pytest.mark.parametrize("seq", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("M", [1, 8])
def test_sizes(seq, M):
    compare(inputs("full", S=seq, M=M, G=3, H=11, state=True), mode="full", return_state=True)


@half(
    ("reverse", [False, True]),
    ("seq", [13, 43]),  # 43: in segments
    ("G, H", [(1, 3), (3, 1), (2, 40), (40, 2), (3, 33), (5, 5)]),
)
def test_sums_of_mode_full(G, H, seq, reverse, monkeypatch):
    monkeypatch.setattr(centaurus_triton, "SEGMENT", 16)
    compare(inputs("full", S=seq, G=G, H=H, M=2), mode="full", reverse=reverse, resets=resets(2, seq, 20))


def test_zero_order_hold():
    compare(inputs("neck"), mode="neck", hold="zoh")


@half(
    ("dtype", NARROW),
    ("mode", MODES),
)
def test_narrow(mode, dtype):
    compare(inputs(mode, S=13), NARROW[dtype], mode=mode, dtype=dtype)


@pytest.mark.parametrize("view", [wide, scattered, turned])
@pytest.mark.parametrize("mode", ["dws", "full"])
def test_layouts(view, mode):
    compare(inputs(mode, state=True), mode=mode, views=dict.fromkeys(("x", "A_real", "state"), view))


@pytest.mark.parametrize("shape", [{"batch": 0}, {"S": 0}])
def test_empty(shape):
    x = {name: t.float() for name, t in inputs("dws", state=True, **shape).items()}
    y, last = centaurus(**x, mode="dws", return_state=True, backend="triton")
    assert y.shape == x["x"].shape
    assert torch.equal(last, x["state"])


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [{"batch": 0}, {"S": 0}])
def test_gradients_of_nothing_are_zeros(shape, mode, backend):
    x = {name: t.float().requires_grad_() for name, t in inputs(mode, **shape).items()}
    centaurus(**x, mode=mode, backend=backend).sum().backward()
    for name, t in x.items():
        assert t.grad is not None, name
        assert not t.grad.any(), name


FACTS = {"device": "cpu", "dtype": torch.float32, "channels": 6, "features": 3, "substates": 3}


MANY = (("batch", 1 << 16),)  # sequences enough to fill a device


@pytest.mark.parametrize("mode", MODES)
def test_the_check_tries_the_mode_whole_and_in_segments(mode, monkeypatch):
    seen = []
    plan = centaurus_triton._Plan

    class Seen(plan):
        def __init__(self, u, *args):
            super().__init__(u, *args)
            seen.append((self.K, self.F == self.N))

    monkeypatch.setattr(centaurus_triton, "_Plan", Seen)
    facts = {**FACTS, "mode": mode, "substates": 1 if mode == "pointwise" else 3}
    for sizes, segments in (((), 3), (MANY, 1)):
        for keeps in (True, False):
            seen.clear()
            call = self_check.Call((), sizes)
            assert self_check.fault(centaurus_triton._example, {**facts, "keeps": keeps}, call) == ""
            assert {*seen} == {(segments, mode != "full" or keeps)}


def test_the_check_tells_wrong_whole_launches(monkeypatch):
    class Wrong(centaurus_triton._Plan):
        def walk(self, *args):
            v = super().walk(*args)
            return 1.1 * v if self.K == 1 else v

    monkeypatch.setattr(centaurus_triton, "_Plan", Wrong)
    call = self_check.Call((), MANY)
    assert "is off by" in self_check.fault(centaurus_triton._example, {**FACTS, "mode": "dws"}, call)


@pytest.mark.parametrize("decay", [-1e-6, -1e4])
def test_what_never_forgets_and_what_forgets_at_once(decay):
    x = inputs("dws", S=20)
    x["A_real"] = torch.full_like(x["A_real"], decay)
    compare(x, mode="dws")


def arguments(S: int = 5) -> list[Tensor]:
    shapes = ((2, S, 3), (3, 2), (3, 2), (3, 2), (3, 2), (2, 3, 2, 2))
    return [(0.5 * draw(*shape, seed=at)).float().requires_grad_() for at, shape in enumerate(shapes)]


@pytest.mark.parametrize("marks", [None, torch.zeros(2, 5, dtype=torch.uint8)])
def test_the_registration_is_sound(marks):
    torch.library.opcheck(centaurus_triton._op.traced, (*arguments(), marks, False, 1))


def test_compile_and_export_at_any_length():
    given = {name: t.float().requires_grad_() for name, t in inputs("neck", S=6).items()}
    names = [*given]

    def call(*x):
        return centaurus(**dict(zip(names, x, strict=True)), return_state=True, backend="triton")

    def everything(f):
        out = f(*given.values())
        return [*out, *torch.autograd.grad(sum(y.square().sum() for y in out), [*given.values()])]

    torch._dynamo.reset()
    wanted = everything(call)
    for a, b in zip(everything(torch.compile(call, fullgraph=True, backend="aot_eager")), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    class Caller(torch.nn.Module):
        def forward(self, *x):
            return call(*x)

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = (({1: length}, *(None,) * (len(names) - 1)),)
    program = torch.export.export(Caller(), tuple(t.detach() for t in given.values()), dynamic_shapes=shapes)
    graphs = [str(part.graph) for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert any("centaurus_triton" in graph for graph in graphs)  # within what is kept from autocast
    other = [t.float() for t in inputs("neck", S=9).values()]
    for a, b in zip(program.module()(*other), call(*other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_there_is_no_second_derivative():
    x = {name: t.float().requires_grad_() for name, t in inputs("dws").items()}
    (g,) = torch.autograd.grad(centaurus(**x, mode="dws", backend="triton").square().sum(), x["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


def test_what_it_cannot_do_it_says():
    facts = {"device": "cuda", "dtype": torch.float32, "mode": "dws", "channels": 4}
    assert why("centaurus", **facts, substates=64)[0].can
    assert "at most 64" in why("centaurus", **facts, substates=65)[0].reason
    with pytest.raises(BackendError, match="float64"):
        centaurus(**inputs("dws"), mode="dws", backend="triton")
