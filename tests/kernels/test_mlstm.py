"""Properties specific to the mLSTM: official numbers, extreme gates, the stabiliser, steps, tiles and chunks.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks.kernels import MLSTMState, mlstm, mlstm_init_state, mlstm_step
from seqblocks.kernels.mlstm.chunks import multiply
from seqblocks.kernels.mlstm.triton import backward, launch, sizes
from seqblocks.kernels.summaries import of_mlstm
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    LAYOUTS,
    ROUNDING,
    SINGLE,
    SIXTEEN,
    Implementation,
    Precision,
    Subject,
    Tensors,
    assert_close,
    assert_equal,
    check,
    crossed,
    draw,
    on_device,
    reset_marks,
    with_gradients,
)  # fmt: skip
from tests.kernels.mlstm import MLSTM
from tests.torch import golden

CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("mlstm_fn_*.npz"))
PARALLEL = [case for case in CASES if "init" not in case and "siging" not in case]
BACKENDS = ("reference", "torch")
GATES = {gate: MLSTM.variants[gate].options for gate in ("exp", "sigmoid", "undivided")}
TRITON, GPU = (Subject(MLSTM, "exp", IMPLEMENTATIONS[name]) for name in ("triton", "gpu"))
DOUBLE = Precision(torch.float64)
OUTPUT = 2e-5  # relative error of float32 outputs on the suite's inputs: a tenth of the factors in MLSTM.bar


# ------------------------------------------------------------------------------------------------ official numbers


def load(path: str, dtype: torch.dtype) -> Any:
    """Return inputs in our layout [B, S, H, D], the state if the case has one, and the file."""
    z, meta = golden.read(f"xlstm/{path}")
    x = [torch.tensor(z[f"in/{n}"], dtype=dtype).transpose(1, 2).requires_grad_() for n in "qkvif"]
    state = None
    if "in/c0" in z:
        c, n, m = (torch.tensor(z[f"in/{s}0"], dtype=dtype) for s in "cnm")
        state = MLSTMState(c.requires_grad_(), n.requires_grad_(), m.squeeze(-1).requires_grad_())
    return z, meta, x, state


def run_golden(z: Any, meta: Any, x: list[Tensor], state: Any, backend: str) -> tuple[Tensors, Any]:
    gate = "sigmoid" if "siging" in meta["config"]["kernel"] else "exp"
    h, last = mlstm(*x, state=state, return_state=True, input_gate=gate, chunk_size=16, backend=backend)
    ct = torch.tensor(z["ct"], dtype=h.dtype).transpose(1, 2)
    grads = torch.autograd.grad((h * ct).sum(), x)
    got = {f"grad_in/{n}": g.transpose(1, 2) for n, g in zip("qkvif", grads, strict=True)}
    return {"out": h.transpose(1, 2), **got}, last


def size(meta: Any, key: str) -> float:
    """Return the largest magnitude. A gradient of f is a difference of sums as large as those of i, and may be all
    zero."""
    return max(meta["max_abs"][key], meta["max_abs"]["grad_in/i"] if key == "grad_in/f" else 0.0)


def compare(z: Any, meta: Any, got: Tensors, tolerance: Any) -> None:
    for key, value in got.items():
        expected = torch.tensor(z[key])
        error = (value.detach().double() - expected).abs().max().item()
        assert error <= tolerance(key), f"{key}: {error:.2e} > {tolerance(key):.2e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_golden_float64(case: str, backend: str) -> None:
    z, meta, x, state = load(case, torch.float64)
    # eps is scaled by exp(-m), and m of the official parallel implementation differs from that of the recurrence,
    # which starts at m = 0, by about 1e-6. In the files with an initial state or the sigmoid gate, m is the same.
    same = state is not None or "siging" in case
    got, last = run_golden(z, meta, x, state, backend)
    # 1e-10 for the same m. Otherwise eps changes outputs by 1e-6, and gradients by a few times as much.
    across = {"out": 1e-6}
    compare(z, meta, got, lambda key: (1e-10 if same else across.get(key, 3e-6)) * size(meta, key))
    if "state/c" in z:
        for s, key in zip(last, "cnm", strict=True):
            expected = torch.tensor(z[f"state/{key}"]).reshape(s.shape)
            assert (s - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", PARALLEL)
def test_golden_with_the_m_of_the_parallel_form(case: str, backend: str) -> None:
    # With m0 = -1e30 the initial state never wins the maximum: the stabiliser is the parallel form's row maximum.
    z, meta, x, _ = load(case, torch.float64)
    B, _, H, DK = x[0].shape
    empty = mlstm_init_state(B, H, DK, x[2].shape[-1], dtype=torch.float64)
    got, _ = run_golden(z, meta, x, empty._replace(m=empty.m - 1e30), backend)
    compare(z, meta, got, lambda key: 1e-10 * size(meta, key))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_golden_float32(case: str, backend: str) -> None:
    z, meta, x, state = load(case, torch.float32)
    got, _ = run_golden(z, meta, x, state, backend)
    # Ten times the error of the official float32 run, plus the eps difference as above.
    compare(z, meta, got, lambda key: 10 * meta["f32_max_abs_err"][key] + 3e-6 * size(meta, key))


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_gradient_of_the_initial_state(backend: str) -> None:
    (case,) = [p for p in CASES if "init" in p]
    z, _, x, state = load(case, torch.float64)
    h = mlstm(*x, state=state, backend=backend)
    grads = torch.autograd.grad((h * torch.tensor(z["ct"]).transpose(1, 2)).sum(), state)
    for g, key in zip(grads, "cnm", strict=True):
        expected = torch.tensor(z[f"grad_in/{key}0"]).reshape(g.shape)
        assert (g - expected).abs().max() <= 1e-9 * expected.abs().max()


# ------------------------------------------------------------------------------------------------ extreme gates


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize(("i", "f"), [*itertools.product([-100.0, 100.0], repeat=2), ("mixed", "mixed")])
def test_finite_for_gates_of_100(backend: str, gate: str, i: Any, f: Any) -> None:
    signs = 100 * draw(2, 40, 2, seed=3).sign()
    for dtype in (torch.float32, torch.float64):
        x = {name: t.to(dtype) for name, t in TRITON.inputs(S=40, state=False).items()}
        x["i"] = signs.to(dtype) if i == "mixed" else torch.full_like(x["i"], i)
        x["f"] = signs.flip(1).to(dtype) if f == "mixed" else torch.full_like(x["f"], f)
        leaves = {name: t.requires_grad_() for name, t in x.items()}
        options = {"chunk_size": 16} if backend == "torch" else {}
        out = TRITON._replace(variant=gate)(leaves, backend=backend, **options)
        assert all(t.isfinite().all() for t in with_gradients(out, leaves).values())


def test_gates_of_ten_thousand() -> None:
    """A chunk's sums of log f reach -5e4, for which the precision of float64 is 1e-11."""
    subject = Subject(MLSTM, "chunks of 5", IMPLEMENTATIONS["torch"])
    x = subject.inputs(S=23)
    x |= {"i": x["i"] * 1e4, "f": torch.full_like(x["f"], -1e4)}
    found, expected = (subject(x, backend=backend) for backend in ("torch", "reference"))
    assert_close(found, expected, 1e-9, smallest=1.0)


# Forget gates of one size, closed gates among open ones, and gates drawn from N(0, s).
HARD_GATES = ("-8", "-50", "-1000", "mixed", "closed", "masked", "s=1", "s=5", "s=50", "s=200", "s=1000")


def hard_gates(kind: str, S: int) -> Tensors:
    x = TRITON.inputs(batch=1, S=S, H=1, DK=8, DV=8, scale=1.0)
    i, f = x["i"], x["f"] - 1
    if kind == "mixed":  # every tenth closed
        f = f + 4
        f[:, ::10] -= 1000
    elif kind in ("closed", "masked"):
        f = f + 5
        f[:, S // 3], f[:, S // 2 + 7] = (-1000, -50) if kind == "closed" else (-torch.inf, -1e30)
    elif kind.startswith("s="):
        i, f = i * float(kind[2:]), f * float(kind[2:])
    else:
        f = f / 5 + float(kind)
    return {**x, "i": i, "f": f}


@pytest.mark.slow
@INTERPRETED
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # 1 / (1 + e^1000) is 0 through an infinity
@crossed(
    ("backend", ["torch", "triton"]),
    ("kind", HARD_GATES),
    ("gate", GATES),
    ("reverse", [False, True]),
)
def test_float32_keeps_its_digits_whatever_the_gates(backend: str, kind: str, gate: str, reverse: bool) -> None:
    """Gates add nothing to (16 + S) roundings of 2^-24 except the error of the float32 recurrence, which shows how the
    division by |q.n| magnifies them. The gradient of a forget gate is a difference of sums of k . dk (which is also
    that of log i) and of q . dq, and held to those. Weights below e^-60 may be left out."""
    S = 100
    x = hard_gates(kind, S)
    marks = reset_marks(1, S, 60) if reverse else None
    subject = TRITON._replace(variant=gate)

    def results(name: str, dtype: torch.dtype) -> Tensors:
        leaves = {key: t.float().to(dtype).requires_grad_() for key, t in x.items()}
        out = with_gradients(subject(leaves, backend=name, reverse=reverse, resets=marks), leaves)
        return {key: t.detach().double() for key, t in out.items()}

    exact, expected = (results("reference", dtype) for dtype in (torch.float64, torch.float32))
    found = results(backend, torch.float32)
    sums = [(x[n] * exact[f"gradient of {n}"]).sum(-1).abs().max() for n in ("q", "k")]
    for name, e in exact.items():
        scale = max([e.abs().max(), *(sums if name == "gradient of f" else ())])
        allowed = (16 + S) * 2**-24 * scale + 4 * (expected[name] - e).abs().max() + S * math.exp(-60)
        error = (found[name] - e).abs().max()
        assert error <= allowed, f"{name}: {error / scale:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_token_has_no_effect(backend: str) -> None:
    """i = -1e30 is the value for padding; f = 100 preserves the state."""
    x = TRITON.inputs(batch=1, S=8)
    x["i"][:, 5:], x["f"][:, 5:] = -1e30, 100.0
    padded, short = TRITON(x, backend=backend), TRITON(TRITON.cut(x, 0, 5), backend=backend)
    assert_close({**padded, "out": padded["out"][:, :5]}, short, 1e-10)


@INTERPRETED
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_a_closed_forget_gate_clears_the_state(backend: str, gate: str) -> None:
    """f of -inf or very small clears the earlier state, and nothing else."""
    x = TRITON.inputs(batch=1, S=40, H=1, DV=4, scale=1.0, state=False)
    x["f"][0, 7], x["f"][0, 20], x["f"][0, 33] = -torch.inf, -1e6, -300.0
    subject = TRITON._replace(variant=gate)
    found = subject({name: t.float() for name, t in x.items()}, backend=backend)
    expected = subject({name: t.float().double() for name, t in x.items()}, backend="reference")
    assert_close({"out": found["out"]}, {"out": expected["out"]}, 5e-4)


@pytest.mark.parametrize(("name", "closed"), [("f", [3]), ("i", [0, 1, 6]), ("i", [*range(7)])])
def test_closed_gates_in_a_summary(name: str, closed: list[int]) -> None:
    """The effect of tokens on a state, which sequence parallelism passes on, is that of the cell."""
    x = TRITON.inputs(batch=1, S=7, H=1)
    x[name] = x[name].index_fill(1, torch.tensor(closed), -torch.inf)
    _, *expected = TRITON(x, backend="reference").values()
    found = of_mlstm(*(x[each] for each in "kvif"))(*(x[each] for each in "Cnm"))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@INTERPRETED
@pytest.mark.parametrize(("i", "f"), [(30.0, 30.0), (-30.0, -30.0), (30.0, -110.0), (-110.0, 30.0), (0.0, -110.0)])
def test_extreme_gates_in_triton(i: float, f: float) -> None:
    """Results are finite, and the output is correct."""
    x = {name: t.float() for name, t in TRITON.inputs(batch=1, S=40, H=1, DK=8, DV=8, state=False).items()}
    leaves = {name: t.requires_grad_() for name, t in (x | {"i": x["i"] + i, "f": x["f"] + f}).items()}
    found = with_gradients(TRITON(leaves, return_state=False), leaves)
    assert all(t.isfinite().all() for t in found.values())
    expected = mlstm(**{name: t.double() for name, t in leaves.items()}, backend="reference")
    allowed = OUTPUT * expected.abs().max()
    # Where i is -110, h is below the smallest normal float32.
    assert (found["out"].double() - expected).abs().max() <= allowed + 2**-126


# ------------------------------------------------------------------------------------------------ the stabiliser


@INTERPRETED
def test_the_initial_state_stays_the_maximum() -> None:
    """No input gate in several chunks exceeds the initial m, so its gradient comes from the last chunk."""
    x = TRITON.inputs(batch=1, S=100, H=1, DV=4, scale=0.1)
    x |= {"i": x["i"] - 30, "f": x["f"] + 4}
    check(TRITON, x)
    check(TRITON, x, eps=0.3)  # large enough to be visible in the gradients of every m


@INTERPRETED
@crossed(("eps", [0.0, 0.3]), ("resets", [False, True]))
def test_eps_reaches_the_gates_through_m(eps: float, resets: bool) -> None:
    x = TRITON.inputs(batch=1, S=70, H=1, DV=4)
    check(TRITON, x, eps=eps, resets=reset_marks(1, 70, 23) if resets else None)


# ------------------------------------------------------------------------------------------------ tiles and chunks


@pytest.mark.slow
@INTERPRETED
@crossed(
    ("parts", [2, 4]),
    ("gate", GATES),
    ("reverse", [False, True]),
    rest="long",
)
def test_several_tiles_in_a_chunk(parts: int, gate: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads have several tiles; this test has twice as many, and tiles without tokens in the last chunk."""
    size = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(sizes, "tiles", lambda kernel, *a: size | ({"BD": 16} if kernel == "gradients" else {}))
    monkeypatch.setattr(sizes, "chunk", lambda *a: {"L": 16 * parts, "BT": 16})
    subject = TRITON._replace(variant=gate)
    x = subject.inputs(S=70, H=1, DK=20, DV=8)
    check(subject, x, reverse=reverse, resets=reset_marks(2, 70, 23) if parts == 2 else None)


@pytest.mark.slow
@INTERPRETED
def test_wide_heads_have_several_tiles_in_a_chunk() -> None:
    for width, chunk in ((64, 64), (128, 128), (192, 128), (256, 256), (1024, 256)):
        assert sizes.chunk(width, width, True)["L"] == chunk
    assert sizes.chunk(256, 512, True)["L"] == 256
    assert sizes.chunk(256, 512, False)["L"] == 64
    check(TRITON, TRITON.inputs(batch=1, S=70, H=1, DK=64, DV=64), resets=reset_marks(1, 70, 31))


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize(
    ("gate", "reverse", "resets"), [("exp", True, True), pytest.param("sigmoid", False, False, marks=pytest.mark.long)]
)
def test_gates_of_many_chunks(gate: str, reverse: bool, resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk runs in its own program, as in sequences that are too long for the interpreter."""
    subject = TRITON._replace(variant=gate)
    x = subject.exact(S=130, DV=4)
    marks = reset_marks(2, 130, 37) if resets else None
    results = []
    for walked in (100, 1):
        monkeypatch.setattr(sizes, "WALK_MAX_CHUNKS", walked)
        results.append(with_gradients(subject(x, resets=marks, reverse=reverse), x))
    assert_equal(*results)


@INTERPRETED
@pytest.mark.parametrize("reverse", [False, True])
def test_forward_alone_is_closer(reverse: bool) -> None:
    x = {name: t.float() for name, t in TRITON.inputs(S=130, H=1, DK=24, DV=16).items()}
    marks = reset_marks(2, 130, 40)
    found = TRITON(x, resets=marks, reverse=reverse)
    exact = {name: t.double() for name, t in x.items()}
    assert_close(found, TRITON(exact, backend="reference", resets=marks, reverse=reverse), OUTPUT)


@INTERPRETED
@crossed(
    ("precision", SIXTEEN[:2]),
    ("gate", GATES),
    ("reverse", [False, True]),
)
def test_narrow(gate: str, reverse: bool, precision: Precision) -> None:
    """There are more tokens and channels than a tile of that dtype has."""
    subject = TRITON._replace(variant=gate)
    check(subject, subject.inputs(batch=1, S=70, H=1, DK=70, DV=24), precision=precision, reverse=reverse)


class Without:
    """Launch a kernel with the last number of one argument set to zero."""

    def __init__(self, kernel: Any, argument: str) -> None:
        self.kernel, self.at = kernel, kernel.function.arg_names.index(argument)

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            changed = args[self.at].clone()
            changed[..., -1] = 0
            self.kernel[grid](*args[: self.at], changed, *args[self.at + 1 :], **options)

        return launch


@INTERPRETED
@crossed(("precision", SIXTEEN[:2]), ("gate", ["exp", "sigmoid"]), ("term", ["flows", "columns"]))
def test_the_bars_of_16_bits_are_narrow_enough(
    gate: str, precision: Precision, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A term missing from the gradients of gates is detected: <C, dC> + <n, dn>, or a token's k . dk."""
    subject = TRITON._replace(variant=gate)
    x = subject.inputs(S=64, DK=2, DV=2)  # the length of a chunk, which is full
    monkeypatch.setattr(backward, "gate_gradients", Without(backward.gate_gradients, term))
    with pytest.raises(AssertionError, match=r"gradient of [ifm]: "):
        check(subject, x, precision=precision)


@INTERPRETED
@pytest.mark.parametrize("state", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_chunks_without_returning_the_state(state: bool) -> None:
    check(TRITON, TRITON.inputs(batch=1, S=130, DK=8, DV=4, state=state), return_state=False)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("state_wins", [pytest.param(False, marks=pytest.mark.long), True])
def test_chunks_are_read_a_number_of_times_that_does_not_grow(
    state_wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, also where every chunk passes on the gradient of m: the cost of 8 more chunks is 8 times
    that of one."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts = {"loads": 0}

    def counted(original: Any) -> Any:
        def load(*args: Any) -> Any:
            counts["loads"] += 1
            return original(*args)

        return load

    for name in ("create_load", "create_masked_load"):
        monkeypatch.setattr(InterpreterBuilder, name, counted(getattr(InterpreterBuilder, name)))
    size = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(sizes, "tiles", lambda kernel, *a: size | ({"BD": 16} if kernel == "gradients" else {}))
    monkeypatch.setattr(sizes, "chunk", lambda *a: {"L": 16, "BT": 16})
    loads = []
    for chunks in (10, 14, 18):
        x = TRITON.inputs(batch=1, S=16 * chunks, H=1, DV=4)
        x |= {"i": x["i"] - 30 * state_wins, "f": x["f"] + 8 * state_wins}
        leaves = {name: t.float().requires_grad_() for name, t in x.items()}
        counts["loads"] = 0
        torch.autograd.grad(sum(y.sum() for y in TRITON(leaves).values()), [*leaves.values()])
        loads.append(counts["loads"])
    assert loads[2] - loads[1] == loads[1] - loads[0] > 0


# ------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(("gate", "backend"), [
    ("exp", "torch"), ("sigmoid", "torch"), pytest.param("exp", "triton", marks=INTERPRETED),
    pytest.param("sigmoid", "triton", marks=[INTERPRETED, pytest.mark.slow]),
])
def test_steps(gate: str, backend: str) -> None:
    subject = Subject(MLSTM, gate, IMPLEMENTATIONS[backend])
    x = subject.exact(S=4)
    whole = with_gradients(subject(x), x)
    hs, state = [], MLSTMState(*(x[name] for name in MLSTM.states))
    for t in range(4):
        h, state = mlstm_step(*(x[name][:, t] for name in MLSTM.sequences), state, input_gate=gate, backend=backend)
        hs.append(h)
    steps = {"out": torch.stack(hs, 1), **state._asdict()}
    assert_close(with_gradients(steps, x), whole, MLSTM.exactness(subject.on, subject.on.exact, 9), smallest=1.0)


@INTERPRETED
def test_steps_without_a_gradient_are_the_whole() -> None:
    x = {name: t.detach() for name, t in TRITON.exact(batch=1, S=12, DK=8, DV=4, state=False).items()}
    whole = TRITON(x)
    hs, state = [], mlstm_init_state(1, 2, 8, 4)
    for t in range(12):
        h, state = mlstm_step(*(y[:, t] for y in x.values()), state, backend="triton")
        hs.append(h)
    assert_close({"out": torch.stack(hs, 1), **state._asdict()}, whole, OUTPUT)


def one_token(on: Implementation, gate: str, width: tuple[int, int], precision: Precision, state: bool) -> None:
    """Without gradients one launch computes everything in float32, and rounds h once."""
    subject = Subject(MLSTM, gate, on)
    inputs = subject.rounded(subject.inputs(batch=3, S=1, DK=width[0], DV=width[1], state=state), precision)
    marks = torch.tensor([[False], [True], [False]])
    found = subject({name: t.to(on.device) for name, t in inputs.items()}, resets=marks)
    on_cpu = subject._replace(on=IMPLEMENTATIONS["reference"])
    expected = on_cpu({name: t.double() for name, t in inputs.items()}, resets=marks)
    for name, t in found.items():
        assert_close({name: t}, {name: expected[name]}, max(OUTPUT, ROUNDING.get(t.dtype, 0.0)))


@INTERPRETED
@crossed(
    ("precision", SINGLE),
    ("gate", GATES),
    ("state", [False, True]),
    ("width", [(4, 4), (70, 20), (20, 70)]),
)
def test_one_token(width: tuple[int, int], state: bool, gate: str, precision: Precision) -> None:
    one_token(TRITON.on, gate, width, precision, state)


@on_device
@pytest.mark.parametrize("precision", SINGLE, ids=str)
@pytest.mark.parametrize("width", [(4, 4), (70, 20), (256, 512)])
def test_one_token_on_a_device(width: tuple[int, int], precision: Precision) -> None:
    one_token(GPU.on, "exp", width, precision, True)


@INTERPRETED
@pytest.mark.parametrize("layout", ["sliced", "strided", "transposed"])
def test_one_token_in_any_layout(layout: str) -> None:
    x = {name: t.detach() for name, t in TRITON.exact(S=1, DK=8, DV=4).items()}
    assert_equal(TRITON({name: LAYOUTS[layout](t) for name, t in x.items()}), TRITON(x))


@INTERPRETED
def test_a_token_uses_the_step_kernel_only_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = launch.step
    monkeypatch.setattr(launch, "step", lambda *a: taken.append(1) or original(*a))
    x = {name: t.detach() for name, t in TRITON.exact(batch=1, S=1).items()}
    TRITON(x)
    TRITON({**x, "q": x["q"].requires_grad_()})
    assert len(taken) == 1


@INTERPRETED
@pytest.mark.parametrize("resets", [False, True])
def test_the_op_of_one_token_satisfies_opcheck(resets: bool) -> None:
    x = [t.detach() for t in TRITON.exact(batch=1, S=1).values()]
    marks = torch.zeros(1, 1, dtype=torch.uint8) if resets else None
    torch.library.opcheck(launch.step.traced, (*x, marks, 1e-6, "exp", True, True))


def test_the_gradient_of_a_part_of_the_last_state_is_in_its_own_scale() -> None:
    """The state stores m in float32, and C and n are scaled by the rounded value: m = 1e6 has an error of 0.03."""
    q, k, v = (draw(1, 70, 1, 4, seed=at).float() for at in range(3))
    i, f = torch.zeros(1, 70, 1), torch.full((1, 70, 1), 7.0)
    i[:, 0] = 1e6
    k.requires_grad_()
    _, last = mlstm(q, k, v, i, f, return_state=True, backend="torch")
    of_C, of_n = last.C.sum(), last.n.sum()
    alone, both = (torch.autograd.grad(x, k, retain_graph=True)[0] for x in (of_C, of_C + 0 * of_n))
    torch.testing.assert_close(alone, both, rtol=1e-6, atol=0)


@crossed(("resets", [False, True]), ("reverse", [False, True]))
def test_chunks_do_not_show_in_long_sequences(reverse: bool, resets: bool) -> None:
    """Sums of gates span several chunks."""
    S = 630
    q, k, v = (draw(2, S, 2, 8, seed=at).requires_grad_() for at in range(3))
    i, f = (draw(2, S, 2, seed=at).requires_grad_() for at in range(2))
    options = {"reverse": reverse, "resets": torch.arange(S).expand(2, -1) % 211 == 5 if resets else None}
    y, whole = (mlstm(q, k, v, i, 3 + f, backend=name, **options) for name in ("torch", "reference"))
    torch.testing.assert_close(y, whole, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(each.square().sum(), [q, k, v, i, f]) for each in (y, whole)]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("add", [False, True])
def test_products_within_a_larger_tensor(
    threads: int, alpha: float, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies one matrix at a time if their results are not contiguous, so they are copied to their place."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    a, b, whole = draw(3, 4, 5), draw(3, 5, 6), draw(3, 9, 6)
    expected = whole.clone()
    expected[:, 2:6] = alpha * (a @ b) + (expected[:, 2:6] if add else 0)
    multiply(a, b, whole[:, 2:6], add=add, alpha=alpha)
    torch.testing.assert_close(whole, expected)
