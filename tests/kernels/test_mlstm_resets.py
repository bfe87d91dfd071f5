"""A reset stops NaN and infinities: in every implementation, in both directions, in values and in gradients."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from seqblocks.kernels import mlstm, mlstm_memoroid, mlstm_step
from tests.kernels.conformance import INTERPRETED, crossed

TRITON = pytest.param("triton", marks=[INTERPRETED, pytest.mark.slow])
MLSTM = ["reference", "torch", TRITON]
BACKENDS = [*MLSTM, "memoroid", pytest.param("memoroid compiled", marks=pytest.mark.slow)]
S, RESETS, POISONED = 23, (5, 14, 15), 9  # a token in the middle of the sequence from 5 to 13
NAMES = ("q", "k", "v", "i", "f", "C", "n", "m")


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((1, S, 2, 4), (1, S, 2, 4), (1, S, 2, 3), (1, S, 2), (1, S, 2), (1, 2, 4, 3), (1, 2, 4), (1, 2))
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in zip(NAMES, shapes, strict=True)}


def run(x, backend, resets, reverse=False, gate="exp"):
    options = {"state": (x["C"], x["n"], x["m"]), "return_state": True, "resets": resets, "reverse": reverse}
    if backend == "memoroid compiled":
        call = torch.compile(mlstm_memoroid, backend="aot_eager", fullgraph=True)
    elif backend == "memoroid":
        call = mlstm_memoroid
    else:
        call, options = mlstm, {**options, "backend": backend, "input_gate": gate, "chunk_size": 8}
    h, last = call(*(x[name] for name in "qkvif"), **options)
    return (h, *last)


def marks(reverse):
    resets = torch.zeros(1, S, dtype=torch.bool)
    resets[0, list(RESETS)] = True
    return resets.flip(1) if reverse else resets


def poisoned(x, name, value, reverse):
    """Return x with a value that is not finite in one token, or in the state, and the tokens of that sequence."""
    x = {key: y.clone() for key, y in x.items()}
    if name in "Cnm":
        x[name].view(-1)[0] = value
        span = slice(0, RESETS[0])
    else:
        x[name][:, S - 1 - POISONED if reverse else POISONED].view(-1)[0] = value
        span = slice(RESETS[0], RESETS[1])
    within = torch.zeros(S, dtype=torch.bool)
    within[span] = True
    return x, within.flip(0) if reverse else within


def gradients(x, backend, resets, weights, last_too, **options):
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    h, *last = run(leaves, backend, resets, **options)
    loss = torch.where(weights.view(1, -1, 1, 1) != 0, h * weights.view(1, -1, 1, 1), 0.0).sum()
    loss = loss + sum(y.sum() for y in last) * last_too
    return torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)


POISONS = (("name", NAMES), ("value", [math.nan, math.inf]), ("reverse", [False, True]))


@crossed(*POISONS)
@pytest.mark.parametrize("backend", [
    *(each for each in BACKENDS[:-1] if each is not TRITON), pytest.param("memoroid compiled", marks=pytest.mark.long),
])
def test_what_is_not_finite_stays_within_its_sequence(backend, reverse, value, name):
    check_what_is_not_finite(backend, reverse, value, name)


@pytest.mark.slow
@INTERPRETED
@crossed(*POISONS, rest="long")
def test_what_is_not_finite_stays_within_its_sequence_interpreted(name, value, reverse):
    check_what_is_not_finite("triton", reverse, value, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "reverse"),
    [
        ("v", math.inf, True),
        *(pytest.param(*each, marks=pytest.mark.long)
          for each in (("q", math.nan, False), ("i", math.nan, True), ("C", math.inf, False))),
    ],
)
def test_what_is_not_finite_stays_within_its_sequence_compiled(name, value, reverse):
    check_what_is_not_finite("memoroid compiled", reverse, value, name)


def check_what_is_not_finite(backend, reverse, value, name):
    if name == "f" and value == math.inf:
        pytest.skip("a forget gate of inf is valid: sigmoid(inf) = 1")
    resets = marks(reverse)
    x, within = poisoned(inputs(), name, value, reverse)
    others = (~within).float()  # for a loss of tokens of other sequences only
    expected, of_others, of_all = without_poison(backend, reverse, tuple(others.tolist()))
    found = run(x, backend, resets, reverse)
    torch.testing.assert_close(found[0][:, ~within], expected[0][:, ~within], rtol=1e-6, atol=1e-6)
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert not found[0][:, within].isfinite().all()  # and no NaN is hidden

    found = gradients(x, backend, resets, others, 1.0, reverse=reverse)
    for key, a, b in zip(NAMES, found, of_others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
        if a.shape[1] == S:
            assert not a[:, within].any()

    # A loss that is not finite itself shows in the gradients of its own sequence only.
    found = gradients(x, backend, resets, torch.ones(S), 1.0, reverse=reverse)
    for a, b in zip(found[:5], of_all[:5], strict=True):
        torch.testing.assert_close(a[:, ~within], b[:, ~within], rtol=1e-5, atol=1e-5)
    assert not all(a[:, within].isfinite().all() for a in found[:5])


@functools.cache
def without_poison(backend, reverse, weights):
    """Return results of finite inputs, their gradients of a loss with these weights, and those of a loss of all."""
    x, resets = inputs(), marks(reverse)
    losses = (torch.tensor(weights), torch.ones(S))
    return run(x, backend, resets, reverse), *(gradients(x, backend, resets, w, 1.0, reverse=reverse) for w in losses)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_not_finite_stay_within_their_sequence(backend, reverse):
    clean, resets = inputs(), marks(reverse)
    weights = torch.ones(S)
    weights[S - 1 - POISONED if reverse else POISONED] = math.nan
    _, within = poisoned(clean, "q", 0.0, reverse)
    found = gradients(clean, backend, resets, weights, 1.0, reverse=reverse)
    expected = gradients(clean, backend, resets, torch.ones(S), 1.0, reverse=reverse)
    for a, b in zip(found[:5], expected[:5], strict=True):
        torch.testing.assert_close(a[:, ~within], b[:, ~within], rtol=1e-5, atol=1e-5)
    assert found[2][:, within].isnan().any()
    for a, b in zip(found[5:], expected[5:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
@pytest.mark.parametrize("backend", MLSTM)
@pytest.mark.parametrize("grad", [False, True])
def test_a_step_with_a_reset_forgets_a_poisoned_state(grad, backend, gate):
    x = {name: y[:, :1] if y.shape[1] == S else y for name, y in inputs().items()}
    expected = run({**x, **{name: torch.zeros_like(x[name]) for name in "Cnm"}}, backend, None, gate=gate)
    for value in (math.nan, math.inf):
        bad = {**x, **{name: torch.full_like(x[name], value) for name in "Cnm"}}
        with torch.set_grad_enabled(grad):
            bad = {name: y.requires_grad_(grad) for name, y in bad.items()}
            found = run(bad, backend, torch.ones(1, 1, dtype=torch.bool), gate=gate)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        if grad:
            grads = torch.autograd.grad(sum(y.sum() for y in found), [*bad.values()])
            assert all(g.isfinite().all() for g in grads)
            assert not any(g.any() for g in grads[5:])


def test_chunks_of_a_stream_recover_at_a_reset():
    x, resets = inputs(), torch.zeros(1, S, dtype=torch.bool)
    resets[0, 12] = True
    x["k"][0, 3] = math.nan
    state, outs = (x["C"], x["n"], x["m"]), []
    for a, b in ((0, 4), (4, 10), (10, S)):
        h, state = mlstm(*(x[name][:, a:b] for name in "qkvif"), state=state, return_state=True, resets=resets[:, a:b])
        outs.append(h)
    h = torch.cat(outs, 1)
    assert h[:, 12:].isfinite().all()
    assert not h[:, 3:12].isfinite().any()
    assert mlstm_step(*(x[name][:, 0] for name in "qkvif"), state)[0].isfinite().all()


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in the interpreter warns about every NaN
@pytest.mark.parametrize("gate", ["exp", pytest.param("sigmoid", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_depends_on_a_fault_is_what_the_torch_implementation_finds(reverse, gate):
    """Faults in all inputs and gradients, in sequences of a few tokens over several chunks: the same values are NaN."""
    x = {name: torch.cat([y, y.flip(1), y.roll(1, 1)], 1) if y.shape[1] == S else y for name, y in inputs().items()}
    tokens = 3 * S
    g = torch.Generator().manual_seed(1)
    resets = torch.rand(1, tokens, generator=g) < 0.15
    dh = torch.randn(1, tokens, 2, 3, generator=g)
    dlast = [torch.randn(x[name].shape, generator=g) for name in "Cnm"]
    dh[:, 40:] = 0.0  # no loss reads these tokens
    for at, name in enumerate("qkvi"):
        x[name].view(1, tokens, -1)[0, at * 13 + 5, 0] = math.inf if at % 2 else math.nan
    x["f"][0, 60, 1] = x["n"][0, 0, 1] = dlast[0][0, 1, 1, 1] = math.nan
    dh[0, 25, 1, 2] = -math.inf

    def results(backend):
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        found = run(leaves, backend, resets, reverse, gate)
        return [*found, *torch.autograd.grad(found, [*leaves.values()], (dh, *dlast))]

    expected = results("torch")
    for a, b in zip(results("triton"), expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-5, equal_nan=True)  # float32, sums of 69 terms of about 1
    assert all(b.isnan().any() and b.isfinite().any() for b in (expected[0], *expected[4:9]))
