"""Properties specific to the sLSTM: the official cell, extreme gates, heads by tiles and by teams of programs.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks.kernels import SLSTMState, slstm, triton_common
from seqblocks.kernels.slstm.triton import launch as slstm_triton
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    SIXTEEN,
    Precision,
    Subject,
    Tensors,
    assert_equal,
    check,
    check_poison,
    crossed,
    draw,
    float32_bar,
    on_device,
    reset_marks,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import SLSTM
from tests.torch import golden

CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("slstm_cell*"))
GATES, STATE = SLSTM.sequences, SLSTM.states
TRITON, GPU = (Subject(SLSTM, "", IMPLEMENTATIONS[name]) for name in ("triton", "gpu"))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_official_cell(case: str, backend: str) -> None:
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
            *x.chunk(4, -1), recurrent, flat_bias.view(4, H, D), state=state, return_state=True, backend=backend
        )
        out = y.unflatten(-1, (H, D)).transpose(1, 2)
        (out * torch.from_numpy(data["ct"]).to(dtype)).sum().backward()
        results = {"out": out.detach(), "grad_in/x": x.grad}
        results |= {"grad_w/_recurrent_kernel_": kernel.grad, "grad_w/_bias_": flat_bias.grad}
        for key, found in results.items():
            scale = max(meta["max_abs"][key], 1.0)
            bar = 1e-10 * scale if dtype == torch.float64 else 10 * meta["f32_max_abs_err"][key] + 1e-6 * scale
            assert (found - torch.from_numpy(data[key])).abs().max() <= bar, (key, dtype)
        if dtype == torch.float64:
            final = torch.from_numpy(data["state/final_ycnm"]).reshape(4, B, H, D)
            torch.testing.assert_close(list(last), list(final.unbind(0)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_extreme_gates_are_finite(backend: str, size: float) -> None:
    for gate in GATES:
        x = {name: t.float().requires_grad_() for name, t in TRITON.inputs(state=False).items()}
        x[gate] = torch.full_like(x[gate], size, requires_grad=True)
        for name, value in with_gradients(TRITON(x, backend=backend), x).items():
            assert torch.isfinite(value).all(), (gate, name)


@INTERPRETED
@pytest.mark.parametrize("shift", [{"i": 100}, {"i": -100}, {"f": 100}, {"f": -100}, {"i": 100, "f": -100}])
def test_extreme_gates_in_triton(shift: dict[str, int]) -> None:
    inputs = TRITON.inputs(S=6, H=1, D=4, state=False)
    x = {name: (t + shift.get(name, 0)).float().requires_grad_() for name, t in inputs.items()}
    found = with_gradients(TRITON(x), x)
    expected = slstm(**{name: t.double() for name, t in x.items()}, backend="reference")
    # Gates of 100 are rounded at 100 * 2^-24, and so are exponents of weights.
    assert (found["out"] - expected).abs().max() <= 100 * float32_bar(6)
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("triton", marks=INTERPRETED)])
def test_a_learned_state_may_start_at_zero(backend: str) -> None:
    """An empty state decays into the next one like any other: its gradients are not zero.

    The gradients of y' = sigmoid(o) c' / n', where c' = tanh(z) and n' = 1, times exp(min(log sigmoid(f) - i, 0)).
    """
    i, f, z, o = (draw(3, 1, 4, seed=at).float() * 3 for at in range(4))
    empty = [torch.zeros(3, 2, 2, requires_grad=True) for _ in "ycnm"]
    options: Any = {"recurrent": torch.zeros(2, 2, 4, 2), "bias": torch.zeros(4, 2, 2), "backend": backend}
    y = slstm(i, f, z, o, state=SLSTMState(*empty), **options)
    found = torch.autograd.grad(y.sum(), empty[1:3])
    kept = (torch.nn.functional.logsigmoid(f) - i).clamp(max=0).exp() * o.sigmoid()
    for gradient, expected in zip(found, (kept, -kept * z.tanh()), strict=True):
        torch.testing.assert_close(gradient.flatten(1), expected[:, 0], rtol=1e-5, atol=1e-6)


@INTERPRETED
@pytest.mark.parametrize("width", [16, 48])
def test_small_gradients_survive_float16(width: int) -> None:
    """Whole heads and heads by tiles: gradients through the matrices are not stored in float16."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gates = {name: drawn(2, 4, width).half() for name in "ifzo"}
    recurrent, bias = drawn(1, width, 4, width) * width**-0.5, torch.zeros(4, 1, width)
    found = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        own = {name: x.to(dtype) for name, x in gates.items()}
        matrices = recurrent.half().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        state = [torch.full((2, 1, width), 0.1, dtype=matrices.dtype, requires_grad=True) for _ in range(4)]
        y, _ = slstm(  # type: ignore[misc]
            **own, recurrent=matrices, bias=bias.to(matrices.dtype), state=state, return_state=True, backend=backend
        )
        found.append([g.double() for g in torch.autograd.grad(3e-7 * y.double().sum(), [state[0], matrices])])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


# ------------------------------------------------------------------------------------------------ wide heads


@pytest.fixture
def by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run heads by tiles, as heads do that are too wide to stay on chip."""
    size = {"BB": 16, "BD": 16, "WHOLE": 0, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(slstm_triton, "tiles", lambda *a: dict(size))


@pytest.fixture
def by_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run heads on several multiprocessors: slices of 16 channels, and six programs at once."""

    def tiles(width: int, dots: str, backward: bool, *a: Any) -> dict[str, int]:
        BD = triton_common.power_of_two(width)
        tile = {"BB": 16, "BD": BD, "BU": 16, "WHOLE": 0, "num_warps": 8, "num_stages": 1}
        return tile | {"AHEAD": int(width > 20), "EXACT": int(dots == "fp32")} if backward else tile

    monkeypatch.setattr(slstm_triton, "tiles", tiles)
    monkeypatch.setattr(triton_common, "processors", lambda x: 6)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("by_tiles")
@crossed(
    ("reverse", [False, True]),
    ("resets", [False, True]),
    ("batch, heads, width", [(2, 2, 20), (17, 1, 40)]),
    rest="long",
)
def test_by_tiles(batch: int, heads: int, width: int, resets: bool, reverse: bool) -> None:
    x = TRITON.inputs(batch=batch, S=6, H=heads, D=width)
    check(TRITON, x, reverse=reverse, resets=reset_marks(batch, 6, 3) if resets else None)


# Two teams of two, and two of three: of six programs at once, one launch.
@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("by_team")
@crossed(
    ("reverse", [False, True]),
    ("resets", [False, True]),
    ("batch, heads, width, seq", [(2, 2, 20, 6), (17, 1, 40, 6)]),
    rest="long",
)
def test_by_team(batch: int, heads: int, width: int, seq: int, resets: bool, reverse: bool) -> None:
    x = TRITON.inputs(batch=batch, S=seq, H=heads, D=width, state=batch > 2)
    check(TRITON, x, reverse=reverse, resets=reset_marks(batch, seq, 3) if resets else None)


@INTERPRETED
@pytest.mark.slow
@pytest.mark.usefixtures("by_team")
@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.long), True])
def test_six_teams_of_four_take_six_launches(reverse: bool) -> None:
    check(TRITON, TRITON.inputs(batch=33, S=4, D=64), reverse=reverse, resets=reset_marks(33, 4, 3))


@INTERPRETED
@pytest.mark.usefixtures("by_team")
@crossed(("reverse", [False, True]), ("at_once", [3, 100]), later=[100])
def test_a_team_of_one_walks_several_tokens_in_a_launch(
    at_once: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything runs as on a device except waiting, since there is no other program to wait for."""
    monkeypatch.setattr(slstm_triton, "AT_ONCE", at_once)
    check(TRITON, TRITON.inputs(batch=3, S=7, D=16), reverse=reverse, resets=reset_marks(3, 7, 3))


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in the interpreter warns about every NaN
@crossed(("launch", ["by_tiles", "by_team"]), ("reverse", [False, True]), later=["by_tiles"])
def test_a_reset_stops_nan(launch: str, reverse: bool, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(launch)
    check_poison(TRITON, float("nan"), reverse=reverse)


@INTERPRETED
@crossed(("precision", SIXTEEN[:2]), ("launch", ["by_tiles", "by_team"]), later=["by_tiles"])
def test_narrow(precision: Precision, launch: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(launch)
    check(TRITON, TRITON.inputs(S=12, H=1, D=20), precision=precision)


@INTERPRETED
@pytest.mark.parametrize("launch", ["whole", "by_tiles", "by_team"])
def test_dots_through_tf32_are_not_biased(launch: str, request: pytest.FixtureRequest) -> None:
    """Truncated operands make every product smaller, by 2^-11 for each on average; rounded operands do not.

    With the forget gate shut, m after a token is the product of y and the input gate's matrix; its gradient with
    respect to y is a product with that matrix too.
    """
    if launch != "whole":
        request.getfixturevalue(launch)
    batch, H, D = 16, 2, 16 if launch == "whole" else 24
    i, f, z, o = (torch.full((batch, 1, H * D), x, dtype=torch.float16) for x in (0.0, -1000.0, 0.0, 0.0))
    recurrent, bias = draw(H, D, 4, D).abs().float(), torch.zeros(4, H, D)
    y = draw(batch, H, D, seed=1).abs().float().requires_grad_()
    state = (y, *(torch.ones(batch, H, D) for _ in range(3)))
    _, last = slstm(i, f, z, o, recurrent, bias, state=state, return_state=True, backend="triton")
    (grad,) = torch.autograd.grad(last.m, y, draw(batch, H, D, seed=2).abs().float())
    into = recurrent[:, :, 0].double()
    expected = torch.einsum("bhd,hde->bhe", y.detach().double(), into)
    wanted_grad = torch.einsum("bhe,hde->bhd", draw(batch, H, D, seed=2).abs(), into)
    for found, exact in ((last.m.detach(), expected), (grad, wanted_grad)):
        off = (found.double() / exact - 1).mean().item()
        assert abs(off) < 2**-14, off


def launched_at_once(plan: Any, kernel: Any, steps: int, *args: Any) -> None:
    """Replace `_Plan.launch_teams`: all programs of all teams run at the same time, one process each, and all tokens in
    one launch. The interpreter's atomics are those of the processor."""
    from triton.runtime.interpreter import interpreter_builder as builder

    for x in args:
        if isinstance(x, torch.Tensor):
            x.share_memory_()
    parts, teams = triton_common.ceil_div(plan.D, plan.tile["BU"]), plan.H * plan.grid[1]

    def run(part: int, team: int) -> None:
        builder.set_grid_dim(parts, teams, 1)
        builder.set_grid_dim = lambda *a: None
        set_idx = builder.set_grid_idx
        builder.set_grid_idx = lambda *a: set_idx(part, team, 0)
        kernel[(1, 1)](*args, 0, steps, 0, 1 << 14, **plan.options)

    fork = multiprocessing.get_context("fork")
    programs = [fork.Process(target=run, args=(p, t)) for t in range(teams) for p in range(parts)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
        program.kill()
    assert [program.exitcode for program in programs] == [0] * len(programs)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork with memory that processes share")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("by_team")
@pytest.mark.parametrize(
    ("heads", "width", "reverse"), [pytest.param(1, 33, False, marks=pytest.mark.long), (2, 20, True)]
)
def test_programs_wait_for_one_another(
    heads: int, width: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = TRITON.exact(S=9, H=heads, D=width)
    options: Any = {"reverse": reverse, "resets": reset_marks(2, 9, 4)}
    expected = with_gradients(TRITON(x, **options), x)
    monkeypatch.setattr(slstm_triton._Plan, "launch_teams", launched_at_once)
    assert_equal(with_gradients(TRITON(x, **options), x), expected)


@INTERPRETED
@pytest.mark.usefixtures("by_team")
def test_a_program_that_waits_in_vain_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns NaN, the next call reports an error, and heads run by tiles from then on."""
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 100)
    monkeypatch.setattr(slstm_triton, "MAX_POLLS", 3)
    x = TRITON.exact(S=4, H=1, D=32, state=False)
    y = slstm(**x, backend="triton")
    assert y[:, 0, :16].isfinite().all()
    assert y[:, 1:, :16].isnan().all(), "the first program should run alone"
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 1)
    with pytest.raises(RuntimeError, match=r"sLSTM kernel .* on cpu timed out: .* its outputs are NaN"):
        slstm(**x, backend="triton")
    assert slstm_triton._no_teams == {torch.device("cpu")}
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    y = slstm(**x, backend="triton")  # reported once
    assert y.isfinite().all()
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 100)
    grads = dict(zip(x, torch.autograd.grad(y.sum(), [*x.values()], retain_graph=True), strict=True))
    assert grads["i"][:, -1, :16].isfinite().all()
    assert grads["i"][:, :-1, :16].isnan().all()
    with pytest.raises(RuntimeError, match="timed out"):
        torch.autograd.grad(y.sum(), x["i"], retain_graph=True)


@INTERPRETED
@pytest.mark.parametrize("error", ["too many blocks in cooperative launch", "operation not supported"])
def test_a_refused_launch_falls_back_to_tiles(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward fall back to tiles from the start and permanently; another error is passed on."""

    def tiles(
        width: int, dots: str, backward: bool, arch: str, heads: int, batch: int, processors: int, *a: Any
    ) -> dict[str, int]:
        tile = {"BB": 16, "BD": 16, "WHOLE": 0, "num_warps": 8, "num_stages": 1}
        more = {"BU": 16} | ({"AHEAD": 0, "EXACT": 1} if backward else {})
        return tile | (more if processors else {})

    class Refused:
        calls = 0

        def __getitem__(self, grid: Any) -> Any:
            return self

        def __call__(self, *args: Any, **options: Any) -> None:
            Refused.calls += 1
            flag = next(at for at, x in enumerate(args) if isinstance(x, torch.Tensor) and x.shape == (1,))
            for x in args[flag + 1 : flag + 5]:  # as if another group of teams had written its last states
                x.fill_(torch.nan)
            raise RuntimeError(f"Triton Error [CUDA]: {error}")

    monkeypatch.setattr(slstm_triton, "tiles", tiles)
    monkeypatch.setattr(triton_common, "processors", lambda x: 6)
    monkeypatch.setattr(slstm_triton, "scan_by_team", Refused())
    monkeypatch.setattr(slstm_triton, "scan_backward_by_team", Refused())
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    check(TRITON, TRITON.inputs(S=4, H=1, D=8))
    assert Refused.calls == 1, "the backward pass should not try again"
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    x = TRITON.exact(S=4, H=1, D=8, state=False)
    y = slstm(**x, backend="reference")
    expected = torch.autograd.grad(y.square().sum(), [*x.values()])
    slstm_triton._no_teams.add(torch.device("cpu"))
    y = slstm(**x, backend="triton")
    slstm_triton._no_teams.clear()
    found = torch.autograd.grad(y.square().sum(), [*x.values()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=8 * float32_bar(4) * b.abs().max().item())
    assert Refused.calls == 2
    error = "an illegal memory access was encountered"
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        slstm(**x, backend="triton")


def test_heads_stay_on_chip_where_they_fit() -> None:
    """Limited by the shared memory of the architecture, or of the current device."""

    def whole(width: int, dots: str, backward: bool, arch: str, room: int | None = None) -> bool:
        return bool(slstm_triton.tiles(width, dots, backward, arch, room=room)["WHOLE"])

    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"):
        assert whole(64, "bf16", False, arch)
        assert whole(64, "bf16", True, arch)
    for backward in (False, True):
        assert [arch for arch in triton_common.SHARED if whole(128, "bf16", backward, arch)] == [
            "sm_80", "sm_87", "sm_90", "sm_100", "sm_103"
        ]  # fmt: skip
        assert not whole(256, "bf16", backward, "sm_90")
    assert not whole(64, "fp32", False, "sm_80"), "registers"
    assert whole(64, "fp32", True, "sm_100")
    assert not whole(64, "fp32", True, "sm_120")
    assert whole(64, "bf16", True, "sm_200", room=227 << 10), "one that is not in the table"
    assert not whole(64, "bf16", True, "sm_90", room=48 << 10)
    assert not whole(64, "bf16", True, "gfx942")
    # The resources that compilers report for each kernel compiled ahead of time are within the estimate.
    lines = Path("tests/golden/triton/slstm.txt").read_text().splitlines()[1:]
    for line in lines:
        name, kernel, arch, tile, _, _, shared, _ = (cell.strip() for cell in line.split("|"))
        if kernel in ("scan", "scan_backward"):
            BD, dots = int(tile.split("BD=")[1].split()[0]), name.split()[2]
            assert int(shared) <= slstm_triton._whole_bytes(BD, dots, kernel == "scan_backward") <= (
                triton_common.SHARED[arch])


def test_a_team_is_as_large_as_the_device_and_the_batch_want() -> None:
    def found(*a: Any) -> tuple[int, ...]:
        tile = slstm_triton.tiles(*a)
        return tile["BB"], tile.get("BU", 0)

    at_once = {"sm_80": 108, "sm_90": 132}
    for arch, n in at_once.items():
        assert found(128, "bf16", False, arch, 4, 16, n) == (16, 0), "on chip as a whole"
        assert found(512, "bf16", False, arch, 2, 16, n) == (16, 16)
        assert found(512, "bf16", False, arch, 4, 16, 0) == (16, 0), "no such device"
        assert found(512, "fp32", True, arch, 1, 16, n) == (16, 16)
    assert found(512, "bf16", False, "sm_90", 4, 16, 132) == (16, 16)
    assert found(512, "bf16", False, "sm_80", 4, 16, 108) == (16, 32)  # 128 slices of 16 channels would be two launches
    assert found(512, "bf16", False, "sm_90", 4, 64, 132) == (32, 32)
    assert found(512, "bf16", True, "gfx942", 4, 16, 304) == (16, 0)


@INTERPRETED
@pytest.mark.usefixtures("by_team")
def test_pieces_of_a_team_are_the_whole_to_the_bit() -> None:
    x = TRITON.exact(S=9, D=4)
    whole = TRITON(x)
    state: Tensors = {name: x[name] for name in STATE}
    parts = []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        state = TRITON(TRITON.cut(x, a, b) | state)
        parts.append(state.pop("out"))
    assert_equal({"out": torch.cat(parts, 1), **state}, whole)


@INTERPRETED
def test_backward_inputs_are_stored_for_a_gradient_or_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []
    original = slstm_triton._op
    monkeypatch.setattr(slstm_triton, "_op", lambda *a: kept.append(a[-1]) or original(*a))
    x = {name: t.detach() for name, t in TRITON.exact(S=3, H=1, D=4).items()}
    TRITON(x)
    TRITON({**x, "bias": x["bias"].requires_grad_()})
    assert kept == [False, True]
    leaves = [t.requires_grad_() for t in x.values()]
    results = [torch.autograd.grad(original(*leaves, None, False, keep)[0].sum(), leaves) for keep in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------ on a device


def team(x: torch.Tensor, width: int, heads: int, backward: bool) -> bool:
    """Whether several programs share a head of the bfloat16 gates x."""
    size = heads, x.shape[0], triton_common.processors(x)
    return "BU" in slstm_triton.tiles(width, "bf16", backward, triton_common.arch(x), *size)


def differentiable_outputs(**given: Any) -> Any:
    """Return y and the last state, of which c, n and m are detached.

    The last m is the larger of two numbers, and c and n are relative to it. Among tens of thousands of states, rounding
    changes which one is larger for a few, and with it which gate has the gradient. y does not depend on m.
    """
    y, last = slstm(**given)
    return y, last._replace(**{name: getattr(last, name).detach() for name in "cnm"})


# One team, several teams, more than a device runs at once, and slices of unequal size.
@on_device
@pytest.mark.parametrize(
    ("batch", "heads", "width"), [(1, 1, 256), (16, 4, 512), (40, 4, 512), (70, 8, 256), (3, 2, 1024), (5, 3, 200)]
)
def test_teams(batch: int, heads: int, width: int) -> None:
    x = GPU.inputs(batch=batch, S=40, H=heads, D=width)
    on_device = x["i"].bfloat16().cuda()
    if triton_common.arch(on_device) in ("sm_80", "sm_90"):
        assert team(on_device, width, heads, False)
        assert team(on_device, width, heads, True) or (width == 1024 and triton_common.arch(on_device) == "sm_80")
    of_outputs = GPU._replace(kernel=replace(SLSTM, function=differentiable_outputs))
    check(of_outputs, x, precision=SIXTEEN[0], resets=reset_marks(batch, 40, 17))


@on_device
def test_a_long_walk_of_teams_is_that_of_pieces() -> None:
    """Thousands of barriers, and launches that continue others."""
    x = {name: t.detach() for name, t in GPU.leaves(GPU.inputs(batch=16, S=4096, H=4, D=256), SIXTEEN[0]).items()}
    whole = GPU(x)
    parts, state = [], {name: x[name] for name in STATE}
    for a, b in ((0, 1000), (1000, 1001), (1001, 4096)):
        state = GPU(GPU.cut(x, a, b) | state)
        parts.append(state.pop("out"))
    assert_equal({"out": torch.cat(parts, 1), **state}, whole)


@on_device
@pytest.mark.parametrize("precision", [Precision(torch.float32), SIXTEEN[0]], ids=str)
@pytest.mark.parametrize("width", [256, 512])
def test_the_same_bits_every_time_of_wide_heads(width: int, precision: Precision) -> None:
    x = GPU.leaves(GPU.inputs(batch=17, S=200, D=width), precision)
    first = with_gradients(GPU(x), x)
    for _ in range(20):
        assert_equal(with_gradients(GPU(x), x), first)


@on_device
@pytest.mark.parametrize("width", [64, 256, 512])
def test_forward_and_backward_in_a_graph(width: int) -> None:
    """Counters of teams are set to zero within the graph, or a second replay would not wait."""
    x = GPU.leaves(GPU.inputs(batch=20, S=50, D=width, state=False), SIXTEEN[0])

    def everything() -> Tensors:
        y = GPU(x)["out"]
        return {"out": y, **dict(zip(x, torch.autograd.grad(y, [*x.values()], torch.ones_like(y)), strict=True))}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = everything()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for _ in range(3):
        for y in captured.values():
            y.detach().zero_()
        graph.replay()
        assert_equal(captured, expected)
