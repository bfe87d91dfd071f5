"""Properties specific to the selective scan: segments, tiles, sums over channels, the step's softplus, addresses.

Common properties are in test_conformance.py, official numbers in tests/torch/test_golden_mamba.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks import BackendError
from seqblocks.kernels import numerics, selective_scan, why
from seqblocks.kernels.selective_scan import token as token_of_scan
from seqblocks.kernels.selective_scan import torch as selective_scan_torch
from seqblocks.kernels.selective_scan.triton import launch as selective_scan_triton
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    SINGLE,
    SIXTEEN,
    Precision,
    Subject,
    Tensors,
    assert_equal,
    check,
    check_poison,
    crossed,
    draw,
    of_models,
    on_device,
    reset_marks,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import BARE, SELECTIVE_SCAN
from tests.sampled import slow

TRITON, GPU = (Subject(SELECTIVE_SCAN, "all", IMPLEMENTATIONS[name]) for name in ("triton", "gpu"))
TORCH = Subject(SELECTIVE_SCAN, "all", IMPLEMENTATIONS["torch"])
BARE_TRITON = TRITON._replace(variant="bare")


def bare(**sizes: Any) -> Tensors:
    """Return inputs in float32, without a state."""
    return {name: x.float() for name, x in BARE_TRITON.inputs(state=False, **sizes).items()}


@pytest.mark.parametrize("reverse", [False, True])
def test_many_chunks_are_one_scan(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan_torch, "WORKING_SET", 1)
    assert len(selective_scan_torch._chunks(torch.empty(2, 45, 4), 3, reverse, True)) == 6
    check(TORCH, TORCH.inputs(S=45), precision=Precision(torch.float64), reverse=reverse)


def test_chunks_of_a_large_batch_are_short_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer states are saved for the backward pass than chunks are computed without one."""
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 9, 6), (4, 9, 6), (6, 3), (4, 9, 3), (4, 9, 3)
    x, dt, A, B, C = (torch.randn(*size, generator=generator) for size in sizes)
    expected = selective_scan(x, dt, -A.abs(), B, C, dt_softplus=True, backend="torch")
    monkeypatch.setattr(selective_scan_torch, "MAX_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(selective_scan_torch, "WORKING_SET", 2 * 4 * 6 * 3)
    assert selective_scan_torch._chunks(x, 3, False, False) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9)]
    assert selective_scan_torch._chunks(x, 3, False, True) == [(0, 8), (8, 9)]
    found = selective_scan(x, dt, -A.abs(), B, C, dt_softplus=True, backend="torch")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("size", [1e-6, 1e3])
def test_extreme_steps_are_finite(backend: str, size: float) -> None:
    x = bare()
    x["dt"] = torch.full_like(x["dt"], size)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    out = TORCH(leaves, backend=backend, dt_softplus=False)
    assert all(t.isfinite().all() for t in with_gradients(out, leaves).values())


@pytest.mark.slow
def test_a_long_sequence_is_finite_and_close_to_float64() -> None:
    """100,000 tokens in float32. Each step decays, so errors do not add up; the tolerance is 100 units in the last
    place."""
    x = bare(batch=1, S=100_000, E=2, N=2)
    short, exact = selective_scan(**x), selective_scan(**{name: t.double() for name, t in x.items()})
    assert torch.isfinite(short).all()
    assert (short.double() - exact).abs().max() <= 100 * 2**-23 * exact.abs().max()


def test_complex_is_computed_by_the_reference() -> None:
    x: dict[str, Any] = TORCH.inputs(state=False)
    u, dt, _, B, C = (x[name] for name in ("u", "dt", "A", "B", "C"))
    A = torch.complex(-torch.rand(4, 3), torch.randn(4, 3)).to(torch.complex128)
    y = selective_scan(u, dt, A, B.to(A.dtype), C.to(A.dtype))
    assert y.dtype == torch.float64
    assert "complex" in next(v.reason for v in why("selective_scan", complex=True) if v.implementation == "torch")
    with pytest.raises(BackendError, match="complex"):
        selective_scan(u, dt, A, B, C, backend="torch")


# ------------------------------------------------------------------------------------------------ segments, launches


@INTERPRETED
@crossed(
    ("reverse", [False, True]),
    ("places", [(), (5, 40, 64), (33,)]),
    rest="long",
    later=[(33,)],
)
def test_segments(reverse: bool, places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a sequence into three concurrent segments, the last one shorter. A new sequence may begin in some of them."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 3)
    marks = torch.zeros(1, 70, dtype=torch.bool)
    marks[:, list(places)] = True
    check(TRITON, TRITON.inputs(batch=1, S=70), reverse=reverse, resets=marks if places else None)


@INTERPRETED
@pytest.mark.parametrize("variant", ["constant B C", *map(slow, ("bare", "grouped"))])
def test_segments_of_other_variants(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 2)
    subject = TRITON._replace(variant=variant)
    check(subject, subject.inputs(S=40))


def test_sequences_are_cut_where_programs_are_few() -> None:
    """Cut until each scheduler has as many warps as the registers allow: three forward, two backward."""
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
            assert warps > schedulers or warps * (cut + 1) > most * schedulers, "as many as run at once"
            assert warps <= schedulers or cut == 1, "another pass would cost more than it saves"
        assert segments(1, 1000, backward) == 7
        assert segments(1, 100, backward) == 1


@INTERPRETED
@pytest.mark.parametrize("variant", ["all", *map(slow, ("constant B", "grouped"))])
def test_a_large_batch_takes_several_launches(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass each program has its own memory: two sequences, then the third. The bits equal those of one
    launch."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 2)
    monkeypatch.setattr(selective_scan_triton, "CHUNK", 4)
    subject = TRITON._replace(variant=variant)
    x = subject.exact(batch=3, S=6)
    marks = reset_marks(3, 6)
    whole = with_gradients(subject(x, resets=marks), x)
    of_two = 2 * 2 * (2 if variant == "grouped" else 1)  # two sequences of two segments, one warp for each group
    monkeypatch.setattr(selective_scan_triton, "AT_ONCE", of_two)
    rows, launch = [], selective_scan_triton.scan_backward

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            rows.append(grid[0])
            return launch[grid]

    monkeypatch.setattr(selective_scan_triton, "scan_backward", Counted())
    assert_equal(with_gradients(subject(x, resets=marks), x), whole)
    assert rows == [4, 2]


@INTERPRETED
@crossed(
    ("sums", [("tf32", 8), ("twice", 8), ("ieee", 16), (None, 1)]),
    ("sizes", [{"E": 20, "N": 16}, {"E": 40, "N": 32, "groups": 2}, {"E": 16, "N": 20}]),
)
def test_sums_over_channels(sizes: dict[str, int], sums: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on how a device adds. tf32 drops digits that bfloat16 lacks, so it is used for
    bfloat16."""
    monkeypatch.setattr(selective_scan_triton, "_summing", lambda *a: sums)
    precision = SIXTEEN[0] if sums[0] == "tf32" else SINGLE[0]
    check(TRITON, TRITON.inputs(batch=1, S=5, **sizes), precision=precision, resets=reset_marks(1, 5, 3))


def test_sums_use_tf32_only_for_narrow_results() -> None:
    tile = selective_scan_triton.tiles(16, 64, True, "sm_90")
    wide, half, narrow = (torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    pairs = (narrow, narrow), (narrow, wide), (half, half), (narrow, half)
    kinds = [selective_scan_triton._summing("sm_90", *x, tile)[0] for x in pairs]
    assert kinds == ["tf32", "twice", "twice", "twice"]


@INTERPRETED
def test_two_products_are_exact_on_units_that_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate products that read eleven bits of a float32, as NVIDIA's do: the remaining error is 2^-21."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    exact = InterpreterBuilder.create_dot

    def cut(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a = TensorHandle((a.data.view("int32") & -8192).view("float32"), a.dtype)
        return exact(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut)
    x = TRITON.inputs(batch=1, S=5, E=20, N=16)
    for precision in (SINGLE[0], *SIXTEEN[:2]):
        check(TRITON, x, precision=precision)
    monkeypatch.setattr(selective_scan_triton, "_summing", lambda *a: ("tf32", 8))
    for precision in (SINGLE[0], SIXTEEN[1]):
        with pytest.raises(AssertionError, match="numbers differ by more than"):
            check(TRITON, x, precision=precision)


@INTERPRETED
@crossed(("steps", [1, 4]), ("S", [1, 6, 35]))
def test_tokens_at_a_time(S: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    static = selective_scan_triton.tiles
    monkeypatch.setattr(selective_scan_triton, "tiles", lambda *a: {**static(*a), "STEPS": steps})
    check(TRITON, TRITON.inputs(batch=1, S=S), reverse=S == 6, resets=reset_marks(1, S))


@INTERPRETED
@pytest.mark.parametrize(("B", "C"), [(4, 2), slow((1, 4))])
def test_one_matrix_may_have_fewer_groups(B: int, C: int) -> None:
    check(TRITON, TRITON.inputs(E=8, groups=B, groups_of_C=C))


@INTERPRETED
def test_the_bare_scan_uses_steps_unchanged() -> None:
    x = BARE_TRITON.inputs()
    check(BARE_TRITON, {**x, "dt": x["dt"].abs()}, dt_softplus=False)


@INTERPRETED
def test_the_softplus_is_exact_for_small_and_large_steps() -> None:
    """Relative to each step, not to the largest: with A = 0 and B = C = 1 a single token's y is dt u."""
    raw = torch.linspace(-80, 80, 641, dtype=torch.float64).float()
    one, E = torch.ones(1, 1, 1), raw.numel()
    y = selective_scan(torch.ones(1, 1, E), raw.view(1, 1, E), torch.zeros(E, 1), one, one, backend="triton")
    exact = torch.where(raw > 30, raw.double(), torch.log1p(raw.double().exp()))
    # The exponential's argument is rounded (80 * 2^-24 of it), then a handful of roundings follow.
    assert ((y.flatten().double() - exact) / exact).abs().max() <= (80 + 16) * 2**-24


# ------------------------------------------------------------------------------------------------ addresses


@INTERPRETED
def test_windows_into_one_another() -> None:
    """The states are shifted by one number per token, so the float32 copy has to be contiguous again."""
    x = {name: t.bfloat16() for name, t in bare(batch=1, S=5, N=8).items()}
    x["B"] = draw(1, 12).bfloat16().unfold(1, 8, 1)
    found = selective_scan(**x, backend="triton")
    assert torch.equal(found, selective_scan(**{**x, "B": x["B"].contiguous()}, backend="triton"))


@INTERPRETED
def test_resets_are_each_piece_on_its_own_to_the_bit() -> None:
    x = bare(batch=1, S=8)
    marks = torch.zeros(1, 8, dtype=torch.bool)
    marks[0, [3, 4]] = True
    packed = selective_scan(**x, resets=marks, backend="triton")
    for a, b in ((0, 3), (3, 4), (4, 8)):
        assert torch.equal(packed[:, a:b], selective_scan(**BARE_TRITON.cut(x, a, b), backend="triton"))


@pytest.mark.slow
@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in the interpreter warns about every NaN
@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_stops_nan_in_segments(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass is included, where states are recomputed."""
    monkeypatch.setattr(selective_scan_triton, "segments", lambda *facts: 3)
    monkeypatch.setattr(selective_scan_triton, "CHUNK", 4)
    check_poison(TRITON, float("nan"), reverse=reverse)


@INTERPRETED
@pytest.mark.parametrize(("S", "apart"), [(4, 2**30), (70, 2**25 - 16)])
def test_offsets_beyond_31_bits(S: int, apart: int) -> None:
    """Tokens are so far apart that they, or their chunks, are copied; the memory is reserved and hardly touched."""
    u = promised().as_strided((1, S, 4), (0, apart, 1))
    x = bare(batch=1, S=S)
    u.copy_(x["u"])
    found, expected = (selective_scan(**{**x, "u": t}, backend="triton") for t in (u, u.contiguous()))
    assert torch.equal(found, expected)


@INTERPRETED
def test_groups_beyond_31_bits() -> None:
    B = promised().as_strided((1, 3, 3, 3), (0, 3, 2**30, 1))
    x = {name: t.half() for name, t in bare(batch=1, S=3, E=3, groups=3).items()}
    B.copy_(x["B"])
    x["u"].requires_grad_()
    found, expected = (
        torch.autograd.grad(selective_scan(**{**x, "B": t}, backend="triton").sum(), x["u"])[0]
        for t in (B, B.contiguous())
    )
    assert torch.equal(found, expected)


def promised() -> Tensor:
    try:
        return torch.empty(3 * 2**30 + 9, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not provide 6 GB of address space")


# ------------------------------------------------------------------------------------------------ what is kept


@INTERPRETED
def test_states_are_kept_only_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    original = selective_scan_triton._op
    monkeypatch.setattr(selective_scan_triton, "_op", lambda *a: kept.append(a[-1]) or original(*a))
    x = bare(S=2)
    selective_scan(**x, backend="triton")
    x["A"].requires_grad_()
    with torch.no_grad():
        selective_scan(**x, backend="triton")
    selective_scan(**x, backend="triton")
    assert kept == [False, False, True]


@INTERPRETED
def test_a_gradient_that_the_forward_pass_did_not_expect() -> None:
    """Without stored states, the op recomputes them for the backward pass."""
    x = TRITON.exact(S=3)
    order = ("u", "dt", "A", "B", "C", *BARE, "state")
    args = [x[name].unsqueeze(2) if name in ("B", "C") else x[name] for name in order]
    results = []
    for keep in (False, True):
        y = selective_scan_triton._op(*args, None, True, False, keep)[0]
        results.append(torch.autograd.grad(y.sum(), [*x.values()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_device
@pytest.mark.parametrize("precision", SINGLE, ids=str)
def test_backward_in_several_launches(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence per launch; all but the first start at an address that is not aligned for wide loads."""
    monkeypatch.setattr(selective_scan_triton, "AT_ONCE", 1)
    check(GPU, GPU.inputs(batch=3, S=37, E=71, N=16), precision=precision, resets=reset_marks(3, 37))


@INTERPRETED
@pytest.mark.parametrize(("groups", "states", "rest"), [(1, 5, True), (3, 4, True), (1, 4, False)])
def test_a_token_of_a_stream_in_triton(groups: int, states: int, rest: bool) -> None:
    """Without gradients a token has its own kernel. The tolerance is a dozen float32 roundings of the largest value."""
    width = 3 * groups * 5
    given = {"u": draw(2, 1, width), "dt": draw(2, 1, width, seed=1), "A": -draw(width, states, seed=2).exp()}
    shape = (2, 1, groups, states) if groups > 1 else (2, 1, states)
    given |= {"B": draw(*shape, seed=3), "C": draw(*shape, seed=4)}
    if rest:
        given |= {"D": draw(width, seed=5), "z": draw(2, 1, width, seed=6), "dt_bias": draw(width, seed=7)}
        given |= {"state": draw(2, width, states, seed=8)}
    expected = selective_scan(**given, return_state=True, dt_softplus=rest, backend="reference")
    with torch.no_grad():
        found = selective_scan(
            **{name: x.float() for name, x in given.items()}, return_state=True, dt_softplus=rest, backend="triton"
        )
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 12 * 2**-23 * b.abs().max()


@pytest.mark.parametrize("name", ["D", "z"])
def test_vmap_over_what_follows_the_scan(name: str) -> None:
    """Includes calls without gradients, where the skip and the gate are otherwise applied in place."""
    x = {"u": draw(2, 5, 6), "dt": draw(2, 5, 6, seed=1), "A": -draw(6, 4, seed=2).exp(), "B": draw(2, 5, 4, seed=3)}
    x |= {"C": draw(2, 5, 4, seed=4), "D": draw(6, seed=5), "z": draw(2, 5, 6, seed=6)}
    several = torch.stack([x[name], 2 * x[name]])
    with torch.no_grad():
        found = torch.vmap(lambda each: selective_scan(**(x | {name: each})))(several)
        expected = [selective_scan(**(x | {name: each})) for each in several]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(("limit", "count"), [(0, 3), (numerics.SAVED_MAX_BYTES, 5)])
def test_nothing_of_full_length_is_saved_but_the_inputs(
    limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is computed again; the steps after the softplus and the outputs before the gate too, if not small."""
    monkeypatch.setattr(numerics, "SAVED_MAX_BYTES", limit)
    x = _full_length()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y = selective_scan(**x, dt_softplus=True, backend="torch")
    inputs = {x[name].untyped_storage().data_ptr() for name in ("u", "dt", "z")}
    full = {each.untyped_storage().data_ptr() for each in saved if each.numel() >= y.numel()}
    assert inputs <= full
    assert len(full) == count


@pytest.mark.parametrize("reverse", [False, True])
def test_saved_values_equal_those_computed_again(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _full_length()

    def gradients() -> tuple[Tensor, ...]:
        y = selective_scan(**x, dt_softplus=True, reverse=reverse, backend="torch")
        return torch.autograd.grad(y.square().sum(), tuple(x.values()))

    saved = gradients()
    monkeypatch.setattr(numerics, "SAVED_MAX_BYTES", 0)
    for found, expected in zip(saved, gradients(), strict=True):
        assert torch.equal(found, expected)


def _full_length() -> Tensors:
    """Return all inputs of a scan over 300 tokens, which require gradients."""
    u, dt, z = (draw(1, 300, 64, seed=seed).float() for seed in range(3))
    A, B, C = -torch.rand(64, 4), torch.rand(1, 300, 4), torch.rand(1, 300, 4)
    x = {"u": u, "dt": dt, "z": z, "A": A, "B": B, "C": C, "D": torch.rand(64), "dt_bias": torch.rand(64)}
    return {name: each.requires_grad_() for name, each in x.items()}


@crossed(("dtype", [torch.float32, torch.float64]), ("B", [1, 3]), ("N", [1, 5]), ("softplus", [False, True]))
def test_single_tokens_are_the_recurrence(dtype: torch.dtype, B: int, N: int, softplus: bool) -> None:
    """One token after another and several at once, against the recurrence in float64."""
    over_tokens = of_models("streaming.token_rows").over_tokens
    sizes = {"A": (6, N), "D": (6,), "h": (B, 6, N), "x": (B, 4, 6), "dt": (B, 4, 6), "B": (B, 4, N), "C": (B, 4, N)}
    A, D, h, x, dt, *of_states = (torch.randn(size, dtype=torch.float64) for size in sizes.values())
    A, dt = A.abs(), dt if softplus else dt.abs()
    expected = selective_scan(
        x, dt, -A, *of_states, D=D, z=x, state=h, dt_softplus=softplus, return_state=True, backend="reference"
    )  # fmt: skip
    step = token_of_scan.prepare(A.log().to(dtype), D.to(dtype), softplus)
    rows = [each.to(dtype).transpose(0, 1).flatten(0, 1) for each in (x, dt, *of_states, x)]
    found = step.several(B, h.to(dtype), *rows)
    one_by_one = over_tokens(step.one, B, [h.to(dtype)], rows)
    exact = expected[0].transpose(0, 1).flatten(0, 1), expected[1]
    margin = 1e-5 if dtype is torch.float32 else 1e-12
    for each in (found, one_by_one):
        torch.testing.assert_close([x.double() for x in each], [*exact], rtol=margin, atol=margin)
