"""The sLSTM in Triton, interpreted on the CPU, against its recurrence in float64: outputs, states, every gradient."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks.errors import BackendError
from seqblocks.kernels import slstm, triton_common, why
from seqblocks.kernels.slstm import triton as slstm_triton
from tests.triton.compare import check, draw, float32_bar, half, interpreted, resets, scattered, turned, wide

pytestmark = interpreted

GATES = ("i", "f", "z", "o")
STATE = ("y", "c", "n", "m")
# Dots of bfloat16 round y, the matrices and the gates' gradients at each token, 2^-9 each; y is fed back. float16 goes
# through float32 here (tf32 on a device) and is rounded at the ends alone. A dozen tokens: two roundings each.
NARROW = {torch.float16: 2**-9, torch.bfloat16: 2 * 12 * 2**-9}


def inputs(B: int, S: int, H: int, D: int, *, state: bool = False) -> dict[str, Any]:
    x = {name: draw(B, S, H * D, seed=at) for at, name in enumerate(GATES)}
    x |= {"recurrent": draw(H, D, 4, D, seed=4) * D**-0.5, "bias": draw(4, H, D, seed=5)}
    if state:
        x |= {name: draw(B, H, D, seed=6 + at) for at, name in enumerate(STATE)}
        x["n"] = x["n"].abs() + 0.5  # a sum of weights
    return x


def run(i, f, z, o, recurrent, bias, y=None, c=None, n=None, m=None, **options):
    keep = options.pop("keep", True)
    state = None if y is None else (y, c, n, m)
    out = slstm(i, f, z, o, recurrent, bias, state=state, return_state=keep, **options)
    return (out[0], *out[1]) if keep else out


def compare(tensors: dict[str, Any], bar: float | None = None, **options: Any) -> None:
    S = tensors["i"].shape[1]
    # each token rounds some forty times, the state divides by n, and the next token sees it
    check(run, tensors, bar or 8 * float32_bar(S), narrow=GATES, **options)


@pytest.fixture
def by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As heads go that are too wide to stay on chip."""
    size = {"BB": 16, "BD": 16, "WHOLE": 0, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(slstm_triton, "tiles", lambda *a: dict(size))


@pytest.fixture
def by_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """As heads go that several multiprocessors share: slices of 16 channels, and six programs at once."""

    def tiles(width: int, dots: str, backward: bool, *a: Any) -> dict[str, int]:
        BD = triton_common.power_of_two(width)
        tile = {"BB": 16, "BD": BD, "BU": 16, "WHOLE": 0, "num_warps": 8, "num_stages": 1}
        return tile | {"AHEAD": int(width > 20), "EXACT": int(dots == "fp32")} if backward else tile

    monkeypatch.setattr(slstm_triton, "tiles", tiles)
    monkeypatch.setattr(triton_common, "processors", lambda x: 6)


@half(
    ("seq", [1, 2, 13]),
    ("reverse", [False, True]),
    ("state", [False, True]),
)
def test_lengths(seq, reverse, state):
    compare(inputs(3, seq, 2, 4, state=state), reverse=reverse)


@pytest.mark.parametrize(("batch", "heads", "width"), [(1, 1, 1), (17, 1, 16), (2, 2, 20)])
def test_sizes(batch, heads, width):
    compare(inputs(batch, 5, heads, width, state=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_resets(reverse, state):
    compare(inputs(3, 13, 1, 4, state=state), reverse=reverse, resets=resets(3, 13, 5))


@pytest.mark.usefixtures("by_tiles")
@half(
    ("reverse", [False, True]),
    ("reset", [False, True]),
    ("batch, heads, width", [(2, 2, 20), (17, 1, 40)]),
)
def test_by_tiles(batch, heads, width, reset, reverse):
    compare(inputs(batch, 6, heads, width, state=True), reverse=reverse, resets=resets(batch, 6, 3) if reset else None)


# two teams of two, two of three, six of four: of six programs at once, one launch, one, and six
@pytest.mark.usefixtures("by_team")
@half(
    ("reverse", [False, True]),
    ("reset", [False, True]),
    ("batch, heads, width, seq", [(2, 2, 20, 6), (17, 1, 40, 6), (33, 2, 64, 4)]),
)
def test_by_team(batch, heads, width, seq, reset, reverse):
    x = inputs(batch, seq, heads, width, state=batch > 2)
    compare(x, reverse=reverse, resets=resets(batch, seq, 3) if reset else None)


@pytest.mark.usefixtures("by_team")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("at_once", [3, 100])
def test_a_team_of_one_walks_several_tokens_in_a_launch(at_once, reverse, monkeypatch):
    """All of what a device runs but for the waiting: there is nobody to wait for."""
    monkeypatch.setattr(slstm_triton, "AT_ONCE", at_once)
    compare(inputs(3, 7, 2, 16, state=True), reverse=reverse, resets=resets(3, 7, 3))


def launched_at_once(plan: Any, kernel: Any, steps: int, *args: Any) -> None:
    """In place of `_Plan.launch_teams`: all programs of all teams run at the same time, a process each, and all tokens
    in one launch. The interpreter's atomics are those of the processor."""
    from triton.runtime.interpreter import interpreter_builder as builder

    for x in args:
        if isinstance(x, torch.Tensor):
            x.share_memory_()
    parts, teams = triton_common.up(plan.D, plan.tile["BU"]), plan.H * plan.grid[1]

    def run(part: int, team: int) -> None:
        builder.set_grid_dim(parts, teams, 1)
        builder.set_grid_dim = lambda *a: None
        set_idx = builder.set_grid_idx
        builder.set_grid_idx = lambda *a: set_idx(part, team, 0)
        kernel[(1, 1)](*args, 0, steps, 0, 1 << 14, **plan.all)

    fork = multiprocessing.get_context("fork")
    programs = [fork.Process(target=run, args=(p, t), daemon=True) for t in range(teams) for p in range(parts)]
    try:
        for program in programs:
            program.start()
        for program in programs:
            program.join(60)
    finally:
        for program in programs:
            if program.pid is not None:
                program.kill()
                program.join()
    assert [program.exitcode for program in programs] == [0] * len(programs)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("by_team")
@pytest.mark.parametrize(("heads", "width", "reverse"), [(1, 33, False), (2, 20, True)])
def test_programs_wait_for_one_another(heads, width, reverse, monkeypatch):
    x = {name: v.float().requires_grad_() for name, v in inputs(2, 9, heads, width, state=True).items()}
    options = {"reverse": reverse, "resets": resets(2, 9, 4), "backend": "triton"}

    def everything() -> list[torch.Tensor]:
        out = run(**x, **options)
        return [*out, *torch.autograd.grad(sum(y.square().sum() for y in out), [*x.values()])]

    wanted = everything()
    monkeypatch.setattr(slstm_triton._Plan, "launch_teams", launched_at_once)
    assert all(torch.equal(a, b) for a, b in zip(everything(), wanted, strict=True))


@pytest.mark.usefixtures("by_team")
def test_who_waits_in_vain_says_so(monkeypatch):
    """NaN at once, an error in words at the next call, and heads by tiles from then on."""
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 100)
    monkeypatch.setattr(slstm_triton, "PATIENCE", 3)
    x = {name: v.float().requires_grad_() for name, v in inputs(2, 4, 1, 32).items()}
    y = slstm(**x, backend="triton")
    assert y[:, 0, :16].isfinite().all()
    assert y[:, 1:, :16].isnan().all(), "the first program runs alone"
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 1)
    with pytest.raises(RuntimeError, match=r"sLSTM kernel .* on cpu .* gave up: .* its outputs are NaN"):
        slstm(**x, backend="triton")
    assert slstm_triton._no_teams == {torch.device("cpu")}
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    y = slstm(**x, backend="triton")  # reported once
    assert y.isfinite().all()
    monkeypatch.setattr(slstm_triton, "AT_ONCE", 100)
    grads = dict(zip(x, torch.autograd.grad(y.sum(), [*x.values()], retain_graph=True), strict=True))
    assert grads["i"][:, -1, :16].isfinite().all()
    assert grads["i"][:, :-1, :16].isnan().all()
    with pytest.raises(RuntimeError, match="gave up"):
        torch.autograd.grad(y.sum(), x["i"], retain_graph=True)


@pytest.mark.parametrize("error", ["too many blocks in cooperative launch", "operation not supported"])
def test_a_refused_launch_goes_by_tiles(error, monkeypatch):
    """Forward and backward, from the start, and for good; another error is passed on."""

    def tiles(width: int, dots: str, backward: bool, arch: str, heads: int, batch: int, processors: int, *a: Any):
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
    monkeypatch.setattr(slstm_triton, "_scan_by_team", Refused())
    monkeypatch.setattr(slstm_triton, "_scan_backward_by_team", Refused())
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    compare(inputs(2, 4, 1, 8, state=True))
    assert Refused.calls == 1, "the backward pass does not try again"
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    x = {name: v.float().requires_grad_() for name, v in inputs(2, 4, 1, 8).items()}
    y = slstm(**x, backend="reference")
    wanted = torch.autograd.grad(y.square().sum(), [*x.values()])
    slstm_triton._no_teams.add(torch.device("cpu"))
    y = slstm(**x, backend="triton")
    slstm_triton._no_teams.clear()
    found = torch.autograd.grad(y.square().sum(), [*x.values()])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=8 * float32_bar(4) * b.abs().max().item())
    assert Refused.calls == 2
    error = "an illegal memory access was encountered"
    monkeypatch.setattr(slstm_triton, "_no_teams", set())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        slstm(**x, backend="triton")


def test_heads_stay_on_chip_where_they_fit():
    """By the shared memory of the architecture, or of the device at hand."""

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
    assert whole(64, "bf16", True, "sm_200", room=227 << 10), "one that is not in the table, told by its device"
    assert not whole(64, "bf16", True, "sm_90", room=48 << 10)
    assert not whole(64, "bf16", True, "gfx942")
    # what the compilers say of each kernel that is compiled ahead of time is no more than is reckoned with
    lines = Path("tests/golden/triton/slstm.txt").read_text().splitlines()[1:]
    for line in lines:
        name, kernel, arch, tile, _, _, shared, _ = (cell.strip() for cell in line.split("|"))
        if kernel in ("_scan", "_scan_backward"):
            BD, dots = int(tile.split("BD=")[1].split()[0]), name.split()[2]
            assert int(shared) <= slstm_triton._whole_bytes(BD, dots, kernel == "_scan_backward") <= (
                triton_common.SHARED[arch])


def test_a_team_is_as_large_as_the_device_and_the_batch_want():
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


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("way", ["whole", "by_tiles", "by_team"])
def test_narrow(dtype, way, request):
    if way != "whole":
        request.getfixturevalue(way)
    compare(inputs(2, 12, 1, 20, state=True), NARROW[dtype], dtype=dtype)


@pytest.mark.parametrize("view", [wide, scattered, turned])
def test_layouts(view):
    compare(inputs(2, 7, 2, 4, state=True), views=dict.fromkeys((*GATES, *STATE, "recurrent", "bias"), view))


def test_no_state_asked_for():
    compare(inputs(2, 5, 2, 4), keep=False)


@pytest.mark.parametrize("shape", [(0, 5, 1, 4), (2, 0, 1, 4)])
def test_empty(shape):
    x = {name: y.float() for name, y in inputs(*shape, state=True).items()}
    y, *state = run(**x, backend="triton")
    assert y.shape == x["i"].shape
    assert all(torch.equal(a, x[name]) for name, a in zip(STATE, state, strict=True))


@pytest.mark.parametrize("shift", [{"i": 100}, {"i": -100}, {"f": 100}, {"f": -100}, {"i": 100, "f": -100}])
def test_extreme_gates_stay_finite(shift):
    x = {name: (y + shift.get(name, 0)).float().requires_grad_() for name, y in inputs(2, 6, 1, 4).items()}
    y = slstm(**x, backend="triton")
    wanted = slstm(**{name: v.double() for name, v in x.items()}, backend="reference")
    # gates of 100 are rounded at 100 * 2^-24, and so are exponents of weights
    assert (y - wanted).abs().max() <= 100 * float32_bar(6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [*x.values()]))


@pytest.mark.parametrize("way", ["whole", "by_team"])
def test_pieces_with_the_state_carried_are_the_whole(way, request):
    if way != "whole":
        request.getfixturevalue(way)
    x = {name: v.float() for name, v in inputs(2, 9, 2, 4).items()}
    y, *last = run(**x, backend="triton")
    outs, state = [], {}
    for a, b in ((0, 4), (4, 5), (5, 9)):
        piece = {name: v[:, a:b] if name in GATES else v for name, v in x.items()}
        part, *now = run(**piece, **state, backend="triton")
        outs.append(part)
        state = dict(zip(STATE, now, strict=True))
    assert torch.equal(torch.cat(outs, 1), y)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), last, strict=True))


def arguments(**change: Any) -> list[Any]:
    given = {k: v.float().requires_grad_() for k, v in inputs(2, 3, 1, 4, state=True).items()} | change
    return [*given.values()]


@pytest.mark.parametrize("marks", [None, torch.zeros(2, 3, dtype=torch.uint8)])
def test_the_registration_is_sound(marks):
    torch.library.opcheck(slstm_triton._op.traced, (*arguments(), marks, False, True))


def test_kept_only_for_a_gradient_and_made_when_nobody_announced_one(monkeypatch):
    kept = []
    original = slstm_triton._op
    monkeypatch.setattr(slstm_triton, "_op", lambda *a: kept.append(a[-1]) or original(*a))
    x = {k: v.float() for k, v in inputs(2, 3, 1, 4, state=True).items()}
    run(**x, backend="triton")
    run(**{**x, "bias": x["bias"].requires_grad_()}, backend="triton")
    assert kept == [False, True]
    leaves = arguments()
    results = [torch.autograd.grad(original(*leaves, None, False, keep)[0].sum(), leaves) for keep in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compile_and_export_at_any_length():
    x = [y.float().requires_grad_() for y in inputs(2, 5, 1, 4).values()]

    def call(*x):
        return run(*x, backend="triton")

    def everything(f):
        out = f(*x)
        return [*out, *torch.autograd.grad(sum(y.square().sum() for y in out), x)]

    torch._dynamo.reset()
    wanted = everything(call)
    for a, b in zip(everything(torch.compile(call, fullgraph=True, backend="aot_eager")), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    class Caller(torch.nn.Module):
        def forward(self, *x):
            return call(*x)

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ((*({1: length},) * 4, None, None),)
    program = torch.export.export(Caller(), tuple(y.detach() for y in x), dynamic_shapes=shapes)
    assert "slstm_triton" in str(program.graph)
    other = [y.float() for y in inputs(2, 7, 1, 4).values()]
    for a, b in zip(program.module()(*other), call(*other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_changes_nothing():
    x = {name: y.float() for name, y in inputs(2, 3, 1, 4, state=True).items()}
    wanted = run(**x, backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(run(**x, backend="triton"), wanted, strict=True))


def test_there_is_no_second_derivative():
    x = {name: y.float().requires_grad_() for name, y in inputs(1, 2, 1, 4).items()}
    (g,) = torch.autograd.grad(slstm(**x, backend="triton").square().sum(), x["i"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        g.sum().backward()


def test_what_it_cannot_do_it_says():
    facts = {"device": "cuda", "dtype": torch.float32, "heads": 1}
    assert why("slstm", **facts, head_dim=1024)[0].can
    assert "at most 1024" in why("slstm", **facts, head_dim=1025)[0].reason
    with pytest.raises(BackendError, match="float64"):
        slstm(**inputs(1, 2, 1, 4), backend="triton")
