"""The mLSTM in Triton, interpreted on the CPU, against its recurrence in float64: outputs, states, every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seqblocks.kernels import dispatch, mlstm, mlstm_init_state, mlstm_step
from seqblocks.kernels.mlstm import triton as mlstm_triton
from tests.triton.compare import (
    ROUNDING,
    check,
    draw,
    half,
    interpreted,
    outputs_and_gradients,
    resets,
    scattered,
    turned,
    wide,
)

pytestmark = interpreted

GATES = {
    "exp": {"input_gate": "exp"},
    "sigmoid": {"input_gate": "sigmoid"},
    "undivided": {"input_gate": "sigmoid", "normalize": False},
}

# Weights are exponentials of sums of log gates, which grow with the length to some tens and are rounded at 2^-24 of
# that: 1e-5 for the lengths here. Dividing by |q.n| multiplies it by the cancellation in q.n, once in h and twice in
# gradients; the seeds below keep q.n within a tenth of its terms. So 2e-5, which it mostly stays far below, and 1e-4.
OUTPUT, GRADIENT = 2e-5, 1e-4


def inputs(B: int, S: int, H: int, DK: int, DV: int, *, state: bool = False, scale: float = 2.0) -> dict[str, Any]:
    x = {"q": draw(B, S, H, DK, seed=1), "k": draw(B, S, H, DK, seed=2), "v": draw(B, S, H, DV, seed=3)}
    x |= {"i": draw(B, S, H, seed=4) * scale, "f": draw(B, S, H, seed=5) * scale + 1}
    if state:
        x |= {"C": draw(B, H, DK, DV, seed=6), "n": draw(B, H, DK, seed=7), "m": draw(B, H, seed=8)}
    return x


def run(q, k, v, i, f, C=None, n=None, m=None, **options):
    """h and, unless a state is not asked for, the last C, n, m."""
    keep = options.pop("keep", True)
    out = mlstm(q, k, v, i, f, state=None if C is None else (C, n, m), return_state=keep, **options)
    return (out[0], *out[1]) if keep else out


def compare(tensors: dict[str, Any], bar: float = GRADIENT, **options: Any) -> None:
    check(run, tensors, bar, narrow=("q", "k", "v"), **options)


@half(
    ("seq", [1, 2, 15, 64, 65, 130]),
    ("gate", GATES),
)
def test_lengths(seq, gate):
    compare(inputs(1, seq, 2, 16, 16, state=True), **GATES[gate])


@pytest.mark.parametrize(("dk", "dv"), [(4, 4), (24, 16), (16, 24), (40, 4), (4, 70)])
@pytest.mark.parametrize("reverse", [False, True])
def test_widths(dk, dv, reverse):
    compare(inputs(1, 37, 1, dk, dv, state=True), reverse=reverse)


@half(
    ("gate", GATES),
    ("reverse", [False, True]),
    ("state", [False, True]),
)
def test_resets(gate, reverse, state):
    compare(inputs(2, 70, 1, 4, 8, state=state), resets=resets(2, 70, 17), reverse=reverse, **GATES[gate])


@half(
    ("parts", [2, 4]),
    ("gate", GATES),
    ("reverse", [False, True]),
)
def test_several_tiles_in_a_chunk(parts, gate, reverse, monkeypatch):
    """As wide heads have them, and twice as many; the last chunk has tiles without a token."""
    size = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(mlstm_triton, "tiles", lambda kernel, *a: size | ({"BD": 16} if kernel == "gradients" else {}))
    monkeypatch.setattr(mlstm_triton, "chunk", lambda *a: {"L": 16 * parts, "BT": 16})
    x = inputs(2, 70, 1, 20, 8, state=True)
    compare(x, reverse=reverse, resets=resets(2, 70, 23), **GATES[gate])
    compare(x, reverse=reverse, **GATES[gate])


def test_wide_heads_have_several_tiles_in_a_chunk():
    for width, chunk in ((64, 64), (128, 128), (192, 128), (256, 256), (1024, 256)):
        assert mlstm_triton.chunk(width, width, True)["L"] == chunk
    assert mlstm_triton.chunk(256, 512, True)["L"] == 256
    assert mlstm_triton.chunk(256, 512, False)["L"] == 64
    compare(inputs(1, 70, 1, 64, 64, state=True), resets=resets(1, 70, 31))


@half(
    ("gate", GATES),
    ("reverse", [False, True]),
    ("reset", [False, True]),
)
def test_gates_of_many_chunks(gate, reverse, reset, monkeypatch):
    """Each chunk by a program of its own, as in sequences longer than the interpreter has patience for."""
    x = {name: y.float().requires_grad_() for name, y in inputs(2, 130, 2, 4, 4, state=True).items()}
    marks = resets(2, 130, 37) if reset else None
    results = []
    for walked in (100, 1):
        monkeypatch.setattr(mlstm_triton, "WALKED", walked)
        out = run(**x, resets=marks, reverse=reverse, backend="triton", **GATES[gate])
        results.append([*out, *torch.autograd.grad(sum(y.sum() for y in out), [*x.values()], materialize_grads=True)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_forward_alone_is_closer(reverse):
    x = {name: y.float() for name, y in inputs(2, 130, 1, 24, 16, state=True).items()}
    with torch.no_grad():
        found = run(**x, resets=resets(2, 130, 40), reverse=reverse, backend="triton")
        exact = {name: y.double() for name, y in x.items()}
        wanted = run(**exact, resets=resets(2, 130, 40), reverse=reverse, backend="reference")
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).abs().max() <= OUTPUT * b.abs().max()


def test_no_state_asked_for():
    compare(inputs(1, 40, 2, 8, 4), keep=False)
    compare(inputs(1, 40, 2, 8, 4, state=True), keep=False)


def test_the_initial_state_stays_the_maximum():
    """Through several chunks no input gate wins over the m that came in: its gradient comes from the last one."""
    x = inputs(1, 100, 1, 4, 4, state=True, scale=0.1)
    x["i"] = x["i"] - 30
    x["f"] = x["f"] + 4
    compare(x)
    compare(x, eps=0.3)  # large enough to be seen in the gradients of every m


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("reset", [False, True])
def test_eps_reaches_the_gates_through_m(eps, reset):
    compare(inputs(1, 70, 1, 4, 4, state=True), eps=eps, resets=resets(1, 70, 23) if reset else None)


@pytest.mark.parametrize("view", [wide, scattered, turned])
def test_layouts(view):
    compare(inputs(2, 19, 2, 8, 4), views=dict.fromkeys("qkvif", view))


# Between a tensor and a gradient lie about four products whose factors are rounded (q k, states, dh v, weights), and
# the gradient of the divisor is dh . h of an h rounded already. A gate's gradient is the difference of two such sums,
# of like size: twice the roundings of what is several times as large.
NARROW = {torch.float16: 4 * 2**-11, torch.bfloat16: 10 * 2**-9}


@half(
    ("dtype", NARROW),
    ("gate", GATES),
    ("reverse", [False, True]),
)
def test_narrow(gate, reverse, dtype):
    """More tokens and channels than a tile of that dtype has."""
    compare(inputs(1, 70, 1, 70, 24, state=True), NARROW[dtype], dtype=dtype, reverse=reverse, **GATES[gate])


@pytest.mark.parametrize(("i", "f"), [(30.0, 30.0), (-30.0, -30.0), (30.0, -110.0), (-110.0, 30.0), (0.0, -110.0)])
def test_extreme_gates(i, f):
    """Finite, and the output right."""
    x = {name: y.float() for name, y in inputs(1, 40, 1, 8, 8).items()}
    x |= {"i": x["i"] + i, "f": x["f"] + f}
    leaves = [y.requires_grad_() for y in x.values()]
    h = mlstm(*leaves, backend="triton")
    assert all(g.isfinite().all() for g in torch.autograd.grad(h.sum(), leaves))
    wanted = mlstm(*(y.double() for y in leaves), backend="reference")
    allowed = OUTPUT * wanted.abs().max()
    assert (h.double() - wanted).abs().max() <= allowed + 2**-126  # where i is -110, h is less than float32 can tell


# Forget gates of one size, closed ones among open ones, and gates drawn from N(0, s).
HARD_GATES = ("-8", "-50", "-1000", "mixed", "closed", "masked", "s=5", "s=50", "s=1000")


def hard_gates(kind: str, S: int) -> dict[str, Any]:
    x = inputs(1, S, 1, 8, 8, state=True, scale=1.0)
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


@half(
    ("kind", HARD_GATES),
    ("gate", GATES),
    ("reverse", [False, True]),
)
def test_float32_keeps_its_digits_whatever_the_gates(kind, gate, reverse):
    """Gates add nothing to (16 + S) roundings of 2^-24, beyond what the float32 recurrence is off by: this shows how
    the division by |q.n| magnifies them. The gradient of a forget gate is a difference of sums of k . dk (which is also
    that of log i) and of q . dq, and held to those. Weights below e^-60 may be left out."""
    S = 100
    x = hard_gates(kind, S)
    marks = resets(1, S, 60) if reverse else None

    def results(backend, dtype):
        leaves = {name: y.float().to(dtype).requires_grad_() for name, y in x.items()}
        options = {"reverse": reverse, "resets": marks, "backend": backend, **GATES[gate]}
        return {name: y.detach().double() for name, y in outputs_and_gradients(run, leaves, {}, options).items()}

    exact, wanted = (results("reference", dtype) for dtype in (torch.float64, torch.float32))
    found = results("triton", torch.float32)
    sums = [(x[name] * exact[f"gradient of {name}"]).sum(-1).abs().max() for name in "qk"]
    for name, e in exact.items():
        scale = max([e.abs().max(), *(sums if name == "gradient of f" else ())])
        allowed = (16 + S) * 2**-24 * scale + 4 * (wanted[name] - e).abs().max() + S * math.exp(-60)
        assert (found[name] - e).abs().max() <= allowed, f"{name}: {(found[name] - e).abs().max() / scale:.1e}"


@pytest.mark.parametrize("state_wins", [False, True])
def test_chunks_are_read_a_number_of_times_that_does_not_grow(state_wins, monkeypatch):
    """Forward and backward, also where every chunk hands on the gradient of m: 8 more chunks are 8 times one more."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts = {"loads": 0}

    def counted(original):
        def load(*args):
            counts["loads"] += 1
            return original(*args)
        return load

    for name in ("create_load", "create_masked_load"):
        monkeypatch.setattr(InterpreterBuilder, name, counted(getattr(InterpreterBuilder, name)))
    size = {"BK": 16, "BV": 16, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(mlstm_triton, "tiles", lambda kernel, *a: size | ({"BD": 16} if kernel == "gradients" else {}))
    monkeypatch.setattr(mlstm_triton, "chunk", lambda *a: {"L": 16, "BT": 16})
    loads = []
    for chunks in (10, 14, 18):
        x = {name: y.float().requires_grad_() for name, y in inputs(1, 16 * chunks, 1, 4, 4, state=True).items()}
        with torch.no_grad():
            x["i"] -= 30 * state_wins
            x["f"] += 8 * state_wins
        counts["loads"] = 0
        torch.autograd.grad(sum(y.sum() for y in run(**x, backend="triton")), [*x.values()])
        loads.append(counts["loads"])
    assert loads[2] - loads[1] == loads[1] - loads[0] > 0


@pytest.mark.parametrize("shape", [(0, 5, 1, 4, 4), (2, 0, 1, 4, 4)])
def test_empty(shape):
    x = {name: y.float() for name, y in inputs(*shape, state=True).items()}
    h, *state = run(**x, backend="triton")
    assert h.shape == x["v"].shape
    assert all(a.equal(x[name]) for name, a in zip("Cnm", state, strict=True))
    h, *state = run(*list(x.values())[:5], backend="triton")
    assert all(a.shape == x[name].shape and not a.any() for name, a in zip("Cnm", state, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_with_the_state_carried_are_the_whole(reverse):
    x = {name: y.float().requires_grad_() for name, y in inputs(1, 90, 1, 8, 4).items()}
    marks = resets(1, 90, 31)
    whole = run(**x, resets=marks, reverse=reverse, backend="triton")
    cuts = [(0, 41), (41, 42), (42, 90)]
    outs, state = [], {}
    for a, b in reversed(cuts) if reverse else cuts:
        piece = {name: y[:, a:b] for name, y in x.items()}
        h, *state_ = run(**piece, **state, resets=marks[:, a:b], reverse=reverse, backend="triton")
        state = dict(zip("Cnm", state_, strict=True))
        outs.append(h)
    pieces = [torch.cat(outs[::-1] if reverse else outs, 1), *state.values()]
    for a, b in zip(pieces, whole, strict=True):
        assert (a - b).abs().max() <= OUTPUT * b.abs().max()
    results = []
    for out in (whole, pieces):
        loss = sum((y * draw(*y.shape, seed=at).float()).sum() for at, y in enumerate(out))
        results.append(torch.autograd.grad(loss, [*x.values()]))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= GRADIENT * b.abs().max()


@pytest.mark.parametrize("with_resets", [False, True])
def test_registered_as_torch_wants_it(with_resets):
    x = [y.float().requires_grad_() for y in inputs(1, 9, 1, 4, 4, state=True).values()]
    marks = torch.zeros(1, 9, dtype=torch.uint8) if with_resets else None
    torch.library.opcheck(mlstm_triton._op.traced, (*x, marks, False, 1e-6, "exp", True, True))
    token = [y[:, :1].detach() for y in x[:5]] + [y.detach() for y in x[5:]]
    marks = None if marks is None else marks[:, :1]
    torch.library.opcheck(mlstm_triton._step_op.traced, (*token, marks, 1e-6, "exp", True, True))


def test_compile_and_export_at_any_length():
    x = [y.float().requires_grad_() for y in inputs(1, 9, 1, 4, 4).values()]

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
    program = torch.export.export(Caller(), tuple(y.detach() for y in x), dynamic_shapes=(({1: length},) * 5,))
    assert "mlstm_triton" in str(program.graph)
    for seq in (2, 70):
        other = [y.float() for y in inputs(1, seq, 1, 4, 4).values()]
        with torch.no_grad():
            for a, b in zip(program.module()(*other), call(*other), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_changes_nothing():
    x = {name: y.float() for name, y in inputs(1, 9, 1, 4, 4, state=True).items()}
    wanted = run(**x, backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(**x, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@half(
    ("dtype", [torch.float32, *NARROW]),
    ("gate", GATES),
    ("state", [False, True]),
    ("dk, dv", [(4, 4), (70, 20), (20, 70)]),
)
def test_one_token(dk, dv, state, gate, dtype):
    """In one launch, where nobody asks for a gradient: everything in float32, and h rounded once."""
    x = inputs(3, 1, 2, dk, dv, state=state)
    x = {name: y.to(dtype if name in "qkv" else torch.float32) for name, y in x.items()}
    marks = torch.tensor([[False], [True], [False]])
    found = run(**x, resets=marks, backend="triton", **GATES[gate])
    wanted = run(**{k: y.double() for k, y in x.items()}, resets=marks, backend="reference", **GATES[gate])
    for a, b in zip(found, wanted, strict=True):
        bar = max(OUTPUT, ROUNDING.get(a.dtype, 0.0))
        assert (a.double() - b).abs().max() <= bar * b.abs().max()


@pytest.mark.parametrize("view", [wide, scattered, turned])
def test_one_token_in_any_layout(view):
    x = {name: y.float() for name, y in inputs(2, 1, 2, 8, 4, state=True).items()}
    wanted = run(**x, backend="triton")
    found = run(**{name: view(y) for name, y in x.items()}, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_token_takes_the_short_way_only_without_a_gradient(monkeypatch):
    taken = []
    original = mlstm_triton._step_op
    monkeypatch.setattr(mlstm_triton, "_step_op", lambda *a: taken.append(1) or original(*a))
    x = {name: y.float() for name, y in inputs(1, 1, 1, 4, 4).items()}
    run(**x, backend="triton")
    x["q"].requires_grad_()
    run(**x, backend="triton")
    assert len(taken) == 1


def test_steps_are_the_whole():
    x = {name: y.float() for name, y in inputs(1, 12, 2, 8, 4).items()}
    h, *last = run(**x, backend="triton")
    state = mlstm_init_state(1, 2, 8, 4)
    outs = []
    for t in range(12):
        out, state = mlstm_step(*(y[:, t] for y in x.values()), state, backend="triton")
        outs.append(out)
    for a, b in zip((torch.stack(outs, 1), *state), (h, *last), strict=True):
        assert (a - b).abs().max() <= OUTPUT * b.abs().max()


def test_a_second_derivative_is_refused_with_a_hint():
    x = [y.float().requires_grad_() for y in inputs(1, 3, 1, 4, 4).values()]
    (g,) = torch.autograd.grad(mlstm(*x, backend="triton").sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        g.sum().backward()


def test_float64_is_refused():
    facts = {"device": "cuda", "dtype": torch.float64, "head_dims": (4, 4)}
    verdict = next(v for v in dispatch.why("mlstm", **facts) if v.form == "triton")
    assert not verdict.can
    assert "float32" in verdict.reason
