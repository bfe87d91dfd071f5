"""The selective scan's Triton form, run by triton's interpreter, against the recurrence in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks import BackendError
from seqblocks.kernels import selective_scan, triton_common, why
from seqblocks.kernels.selective_scan import triton as selective_scan_triton
from tests.triton import compare
from tests.triton.compare import draw, float32_bar, half

pytestmark = compare.interpreted

NARROW = ("u", "dt", "z", "B", "C")


def tensors(
    batch: int = 2, S: int = 9, E: int = 4, N: int = 3, *, groups: int = 0, constant: str = "", bare: bool = False
) -> dict[str, Tensor]:
    shared = (batch, S, groups, N) if groups else (batch, S, N)
    out = {"u": draw(batch, S, E), "dt": draw(batch, S, E, seed=1), "A": -draw(E, N, seed=2).exp()}
    out |= {name: draw(*((E, N) if name in constant else shared), seed=3 + at) for at, name in enumerate("BC")}
    if bare:
        return out
    more = {"D": draw(E, seed=5), "z": draw(batch, S, E, seed=6), "dt_bias": draw(E, seed=7)}
    return {**out, **more, "state": draw(batch, E, N, seed=8)}


def check(given: dict[str, Tensor], **more: Any) -> None:
    options = {"return_state": True, "narrow": NARROW, **more}
    compare.check(selective_scan, given, float32_bar(given["u"].shape[1]), **options)


@half(
    ("reverse", [False, True]),
    ("S", [1, 2, 31, 32, 33, 65]),
)
def test_any_length(S: int, reverse: bool) -> None:
    check(tensors(batch=1, S=S), reverse=reverse)
    check(tensors(batch=2 if S < 33 else 1, S=S), reverse=reverse, resets=compare.resets(2 if S < 33 else 1, S))


@half(
    ("reverse", [False, True]),
    ("reset", [(), (5, 40, 64), (33,)]),
)
def test_segments(reverse: bool, reset: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in three parts at once, the last one shorter; a new sequence may begin in some of them."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 3)
    marks = torch.zeros(1, 70, dtype=torch.bool)
    marks[:, list(reset)] = True
    check(tensors(batch=1, S=70), reverse=reverse, resets=marks if reset else None)


@pytest.mark.parametrize("shape", [{"constant": "BC"}, {"groups": 2}, {"bare": True}])
def test_segments_of_other_kinds(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 2)
    check(tensors(batch=2, S=40, **shape))


def test_sequences_are_cut_where_programs_are_few() -> None:
    """Until a scheduler has the three warps that registers let it hold forward, and the two backward."""
    segments, schedulers = selective_scan_triton.segments, selective_scan_triton.SCHEDULERS
    assert schedulers == 4 * 132
    for backward, most in ((False, 3), (True, 2)):
        # 8 sequences of 2,048 tokens with 2,048 channels of 16 states
        tile = selective_scan_triton.tiles(16, 2048, backward, "sm_90")
        warps = 8 * 2048 // tile["BE"] * tile["num_warps"]
        assert warps == 512
        assert segments(warps, 2048, backward) == most
        for warps in range(1, 3 * schedulers, 7):
            cut = segments(warps, 1 << 20, backward)
            assert warps * cut <= most * schedulers or cut == 1
            assert warps > schedulers or warps * (cut + 1) > most * schedulers, "as many as are held at once"
            assert warps <= schedulers or cut == 1, "a walk more would cost more than it hides"
        assert segments(1, 1000, backward) == 7
        assert segments(1, 100, backward) == 1


@pytest.mark.parametrize("shape", [{}, {"constant": "B", "bare": True}, {"groups": 2}], ids=str)
def test_a_large_batch_takes_several_launches(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, where each program has memory of its own: two sequences, and the third. The same bits as in one."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 2)
    monkeypatch.setattr(selective_scan_triton, "CHUNK", 4)
    given = {k: v.float().requires_grad_() for k, v in tensors(batch=3, S=6, **shape).items()}
    options = {"resets": compare.resets(3, 6), "return_state": True, "backend": "triton"}
    whole = compare.outputs_and_gradients(selective_scan, given, {}, options)
    of_two = 2 * 2 * shape.get("groups", 1)  # two sequences of two segments, one warp for each group
    monkeypatch.setattr(selective_scan_triton, "AT_ONCE", of_two)
    rows, launch = [], selective_scan_triton._scan_backward

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            rows.append(grid[0])
            return launch[grid]

    monkeypatch.setattr(selective_scan_triton, "_scan_backward", Counted())
    parts = compare.outputs_and_gradients(selective_scan, given, {}, options)
    assert rows == [4, 2]
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("S", [63, 64, 130])
def test_longer(S: int) -> None:
    check(tensors(batch=1, S=S), reverse=S == 64, resets=compare.resets(1, S))


@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 2},
        {"E": 12, "groups": 3, "N": 1},
        {"constant": "B"},
        {"constant": "C", "groups": 2},
        {"constant": "BC", "E": 5},
        {"bare": True},
        {"bare": True, "constant": "BC"},
        {"E": 37, "N": 17, "S": 4},
        {"E": 70, "S": 3, "groups": 1},
    ],
    ids=str,
)
def test_groups_constants_and_several_programs(shape: dict[str, Any]) -> None:
    given = {"S": 6, **shape}
    check(tensors(**given), reverse=True)


@half(
    ("sums", [("tf32", 8), ("twice", 8), ("ieee", 16), (None, 1)]),
    ("shape", [{"E": 20, "N": 16}, {"E": 40, "N": 32, "groups": 2}, {"E": 16, "N": 20}]),
)
def test_sums_over_channels(shape: dict[str, Any], sums: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However a device adds; the interpreter's products cut nothing off."""
    monkeypatch.setattr(selective_scan_triton, "_summing", lambda *a: sums)
    check(tensors(batch=1, S=5, **shape), resets=compare.resets(1, 5, every=3))


def test_sums_are_cut_off_only_where_results_are() -> None:
    tile = selective_scan_triton.tiles(16, 64, True, "sm_90")
    wide, half, narrow = (torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    pairs = (narrow, narrow), (narrow, wide), (half, half), (narrow, half)
    kinds = [selective_scan_triton._summing("sm_90", *x, tile)[0] for x in pairs]
    assert kinds == ["tf32", "twice", "twice", "twice"]


def test_twice_is_exact_where_units_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products that read eleven bits of a float32, as NVIDIA's do: what is left of the rest is 2^-21 of it."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    exact = InterpreterBuilder.create_dot

    def cut(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a = TensorHandle((a.data.view("int32") & -8192).view("float32"), a.dtype)
        return exact(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut)
    given = tensors(batch=1, S=5, E=20, N=16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(given, dtype=dtype)
    monkeypatch.setattr(selective_scan_triton, "_summing", lambda *a: ("tf32", 8))
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(AssertionError):
            check(given, dtype=dtype)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("S", [1, 6, 35])
def test_tokens_at_a_time(S: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    static = selective_scan_triton.tiles
    monkeypatch.setattr(selective_scan_triton, "tiles", lambda *a: {**static(*a), "STEPS": steps})
    check(tensors(batch=1, S=S), reverse=S == 6, resets=compare.resets(1, S))


def test_no_incomplete_block_no_masks() -> None:
    check(tensors(batch=1, S=7, E=16, N=4), resets=compare.resets(1, 7))


@pytest.mark.parametrize(("B", "C"), [(4, 2), (1, 4)])
def test_one_matrix_may_have_fewer_groups(B: int, C: int) -> None:
    given = tensors(E=8)
    given |= {"B": tensors(E=8, groups=B)["B"], "C": tensors(E=8, groups=C)["C"]}
    check(given)


def test_the_bare_scan_takes_steps_as_they_are() -> None:
    given = tensors(bare=True)
    given["dt"] = given["dt"].abs()
    check(given, dt_softplus=False)


def test_the_softplus_is_exact_for_small_and_large_steps() -> None:
    """Relative to each step, not to the largest: with A = 0 and B = C = 1 a single token's y is dt u."""
    raw = torch.linspace(-80, 80, 641, dtype=torch.float64).float()
    one, E = torch.ones(1, 1, 1), raw.numel()
    y = selective_scan(torch.ones(1, 1, E), raw.view(1, 1, E), torch.zeros(E, 1), one, one, backend="triton")
    exact = torch.where(raw > 30, raw.double(), torch.log1p(raw.double().exp()))
    # the exponential's argument is rounded (80 * 2^-24 of it), then a handful of roundings
    assert ((y.flatten().double() - exact) / exact).abs().max() <= (80 + 16) * 2**-24


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_any_layout(view: compare.View) -> None:
    check(tensors(groups=2), views=dict.fromkeys(("u", "dt", "z", "B", "C", "A", "state"), view))


def test_windows_into_one_another() -> None:
    """Of states that lie one number further for each token: what is made float32 has to lie in lines again."""
    given = {k: v.bfloat16() for k, v in tensors(batch=1, S=5, N=8, bare=True).items()}
    given["B"] = draw(1, 12).bfloat16().unfold(1, 8, 1)
    found = selective_scan(**given, backend="triton")
    given["B"] = given["B"].contiguous()
    assert torch.equal(found, selective_scan(**given, backend="triton"))


def test_any_layout_of_the_upstream_gradient() -> None:
    """Slices, transposes and sums hand back gradients with strides of their own."""

    def sliced(**given: Any) -> Any:
        y, last = selective_scan(**given)
        return y[..., ::2], y.transpose(0, 1), y.sum((0, 1, 2)), last[:, :2]

    compare.check(sliced, tensors(), float32_bar(9), return_state=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_float32_inside(dtype: torch.dtype) -> None:
    check(tensors(), dtype=dtype)
    check(tensors(E=20, N=16, S=5), dtype=dtype)


@pytest.mark.parametrize("reverse", [False, True])
def test_whole_is_chunks_is_steps(reverse: bool) -> None:
    S = 37
    given = {k: v.float().requires_grad_() for k, v in tensors(batch=1, S=S).items()}
    marks = compare.resets(1, S, every=9)

    def run(edges: list[int]) -> list[Tensor]:
        parts, state = [], given["state"]
        spans = [*pairwise(edges)]
        for a, b in reversed(spans) if reverse else spans:
            cut = {k: given[k][:, a:b] for k in NARROW} | {k: given[k] for k in ("A", "D", "dt_bias")}
            y, state = selective_scan(
                **cut, state=state, return_state=True, resets=marks[:, a:b], reverse=reverse, backend="triton"
            )
            parts.append(y)
        y = torch.cat(parts[::-1] if reverse else parts, 1)
        loss = (y * draw(*y.shape)).sum() + (state * draw(*state.shape)).sum()
        return [y, state, *torch.autograd.grad(loss, [*given.values()])]

    whole = run([0, S])
    for edges in ([0, 1, 32, S], [*range(S + 1)]):
        for a, b in zip(run(edges), whole, strict=True):
            assert (a - b).abs().max() <= float32_bar(S) * max(1.0, b.abs().max().item())


def test_resets_are_each_piece_on_its_own() -> None:
    given = {k: v.float() for k, v in tensors(batch=1, S=8, bare=True).items()}
    marks = torch.zeros(1, 8, dtype=torch.bool)
    marks[0, [3, 4]] = True
    packed = selective_scan(**given, resets=marks, backend="triton")
    for a, b in ((0, 3), (3, 4), (4, 8)):
        cut = {k: v if k == "A" else v[:, a:b] for k, v in given.items()}
        torch.testing.assert_close(packed[:, a:b], selective_scan(**cut, backend="triton"), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of an infinite state, times zero
def test_nothing_comes_over_from_a_sequence_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward, where states are made again; in segments too."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 2)
    given = {k: v.float() for k, v in tensors(batch=1, S=40, bare=True).items()}
    alone = {k: v if k == "A" else v[:, 10:] for k, v in given.items()}
    given["u"][:, :10] = torch.inf
    marks = torch.zeros(1, 40, dtype=torch.bool)
    marks[0, 10] = True

    def run(tensors: dict[str, Tensor], resets: Tensor | None) -> list[Tensor]:
        leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
        y = selective_scan(**leaves, resets=resets, backend="triton")[:, -30:]
        per_token = [x for k, x in leaves.items() if k != "A"]  # A's is a sum over all
        return [y, *(g[:, -30:] for g in torch.autograd.grad(y.square().sum(), per_token))]

    for found, expected in zip(run(given, marks), run(alone, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=float32_bar(30))


@pytest.mark.parametrize(("batch", "S"), [(0, 5), (2, 0)])
def test_empty(batch: int, S: int) -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(batch, S).items()}
    y, last = selective_scan(**given, return_state=True, backend="triton")
    assert (y.shape, last.shape) == ((batch, S, 4), (batch, 4, 3))
    torch.testing.assert_close(last, given["state"])
    (y.sum() + last.sum()).backward()


@pytest.mark.parametrize(("S", "apart"), [(4, 2**30), (70, 2**25 - 16)])
def test_offsets_beyond_31_bits(S: int, apart: int) -> None:
    """Tokens so far apart that they are copied, or that chunks are; in memory that is promised and hardly touched."""
    u = promised().as_strided((1, S, 4), (0, apart, 1))
    given = {k: v.float() for k, v in tensors(batch=1, S=S, bare=True).items()}
    u.copy_(given["u"])
    found, expected = (selective_scan(**{**given, "u": x}, backend="triton") for x in (u, u.contiguous()))
    assert torch.equal(found, expected)


def test_groups_beyond_31_bits() -> None:
    B = promised().as_strided((1, 3, 3, 3), (0, 3, 2**30, 1))
    given = {k: v.half() for k, v in tensors(batch=1, S=3, E=3, groups=3, bare=True).items()}
    B.copy_(given["B"])
    given["u"].requires_grad_()
    found, expected = (
        torch.autograd.grad(selective_scan(**{**given, "B": x}, backend="triton").sum(), given["u"])[0]
        for x in (B, B.contiguous())
    )
    assert torch.equal(found, expected)


def promised() -> Tensor:
    try:
        return torch.empty(3 * 2**30 + 9, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("6 GB of address space are not to be had")


def test_states_are_kept_only_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    original = selective_scan_triton._op
    monkeypatch.setattr(selective_scan_triton, "_op", lambda *a: kept.append(a[-1]) or original(*a))
    given = {k: v.float() for k, v in tensors(S=2).items()}
    selective_scan(**given, backend="triton")
    given["A"].requires_grad_()
    with torch.no_grad():
        selective_scan(**given, backend="triton")
    selective_scan(**given, backend="triton")
    assert kept == [False, False, True]


def test_a_gradient_that_nobody_announced() -> None:
    """The op without kept states makes them when it is differentiated all the same."""
    given = {k: v.float().requires_grad_() for k, v in tensors(S=3).items()}
    order = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
    args = [given[k].unsqueeze(2) if k in "BC" else given[k] for k in order]
    results = []
    for keep in (False, True):
        y, _, _ = selective_scan_triton._op(*args, None, True, False, keep)
        results.append(torch.autograd.grad(y.sum(), [*given.values()]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_compile_and_export() -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(S=5).items()}
    names = [*given]

    def run(*x: Tensor) -> Any:
        return selective_scan(**dict(zip(names, x, strict=True)), return_state=True, backend="triton")

    def everything(f: Any) -> list[Tensor]:
        y, last = f(*given.values())
        return [y, last, *torch.autograd.grad(y.sum() + last.square().sum(), [*given.values()])]

    torch._dynamo.reset()
    expected = everything(run)
    for a, b in zip(everything(torch.compile(run, fullgraph=True, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    class Caller(torch.nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return run(*x)

    program = torch.export.export(Caller(), tuple(x.detach() for x in given.values()), strict=False)
    assert "selective_scan_triton" in str(program.graph)
    torch.testing.assert_close(program.module()(*given.values())[0], expected[0], rtol=0, atol=0)


def test_the_registration_is_sound() -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(S=3).items()}
    order = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "state")
    args = [given[k].detach().unsqueeze(2).requires_grad_() if k in "BC" else given[k] for k in order]
    torch.library.opcheck(selective_scan_triton._op.traced, (*args, None, True, False, True))


def test_autocast_changes_nothing() -> None:
    given = {k: v.float() for k, v in tensors(S=3).items()}
    plain = selective_scan(**given, backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selective_scan(**given, backend="triton"), plain)


def test_there_is_no_second_derivative() -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(S=2, bare=True).items()}
    y = selective_scan(**given, backend="triton")
    (g,) = torch.autograd.grad(y.square().sum(), given["u"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(g.sum(), given["u"])


def test_what_it_cannot_do_it_says() -> None:
    def verdict(**facts: Any) -> Any:
        return why("selective_scan", **{"device": "cuda", "dtype": torch.float32, "states": 16, **facts})[0]

    assert verdict().can
    assert "at most 256" in verdict(states=257).reason
    assert "complex" in verdict(complex=True).reason
    assert "float64" in verdict(dtype=torch.float64).reason
    assert "not cpu" not in verdict(device="cpu").reason  # the interpreter is on
    assert "needs a CUDA or ROCm device, not mps" in verdict(device="mps").reason
    given = tensors(S=2, bare=True)
    with pytest.raises(BackendError, match="float64"):
        selective_scan(**given, backend="triton")
    assert triton_common.INTERPRETED
    assert not verdict(device="cpu").can
