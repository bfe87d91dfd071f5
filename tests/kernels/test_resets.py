"""A reset is the end of what was before: NaN and inf in it reach no later value and no gradient.

Three sequences of one batch: in the first a reset follows tokens that are not finite, the second begins with a reset on
a state that is not finite, the third has neither. The loss reads what comes after the resets.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks import kernels
from seqblocks.state import map_state
from tests.triton.compare import draw, float32_bar, interpreted

# the interpreter computes with NumPy, which mentions every NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

S, AT = 11, 5  # tokens, and the place of the first sequence's reset in the order of the scan
Run = Callable[..., tuple[Tensor, ...]]  # tensors by name, states, options -> y, states


class Case(NamedTuple):
    run: Run
    tokens: dict[str, tuple[int, ...]]  # axes after [B, S]
    states: tuple[tuple[int, ...], ...]  # axes after [B]
    shared: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    backends: tuple[str, ...] = ("reference", "torch", "triton")
    reversible: bool = True


def mlstm(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    y, last = kernels.mlstm(**x, state=state, return_state=True, **options)
    return y, *last


def slstm(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    y, last = kernels.slstm(**x, state=state, return_state=True, **options)
    return y, *last


def scan(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    x = {**x, "A": -x["A"].exp()}
    return kernels.selective_scan(**x, state=None if state is None else state[0], return_state=True, **options)


def conv(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    state = None if state is None else state[0]
    return kernels.causal_conv(**x, activation="silu", state=state, return_state=True, **options)


def centaurus(mode: str) -> Run:
    def run(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
        x = {**x, "A_real": -x["A_real"].exp(), "dt": x["dt"].exp() * 0.1}
        state = None if state is None else state[0]
        return kernels.centaurus(**x, mode=mode, state=state, return_state=True, **options)

    return run


def attention(x: dict[str, Tensor], state: Any, *, reverse: bool, **options: Any) -> tuple[Tensor, ...]:
    B = x["q"].shape[0]
    if state is None:
        state = [x["q"].new_zeros(B, S, 1, 4), x["q"].new_zeros(B, S, 1, 4)]
    length = torch.full((B,), 3) if len(state) == 2 else state[2]
    y, last = kernels.attention(**x, rotary=100.0, state=(*state[:2], length), return_state=True, **options)
    return y, *last


def window(x: dict[str, Tensor], state: Any, *, reverse: bool, **options: Any) -> tuple[Tensor, ...]:
    B = x["q"].shape[0]
    if state is None:
        state = [x["q"].new_zeros(B, 3, 2, 4), x["q"].new_zeros(B, 3, 2, 4)]
    length = torch.full((B,), 3) if len(state) == 2 else state[2]
    y, last = kernels.attention(**x, window=4, state=(*state[:2], length), return_state=True, **options)
    return y, *last


def linear(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0] * b[0], b[0] * a[1] + b[1]


def associative(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    if state is None:
        state = [x["a"].new_ones(x["a"].shape[0], 4), x["a"].new_zeros(x["a"].shape[0], 4)]
    states, last = kernels.associative_scan(linear, (x["a"], x["b"]), initial=tuple(state), **options)
    return states[1], *last


def memoroid(x: dict[str, Tensor], state: Any, **options: Any) -> tuple[Tensor, ...]:
    y, last = kernels.mlstm_memoroid(**x, state=state, return_state=True, **options)
    return y, *last


CELL = {"q": (2, 4), "k": (2, 4), "v": (2, 4), "i": (2,), "f": (2,)}
CELL_STATE = ((2, 4, 4), (2, 4), (2,))
BANK = {"A_real": (4, 2), "A_imag": (4, 2), "dt": (4,)}
CASES = {
    "mlstm": Case(mlstm, CELL, CELL_STATE),
    "mlstm_memoroid": Case(memoroid, CELL, CELL_STATE, backends=("reference", "torch")),
    "slstm": Case(
        slstm, dict.fromkeys("ifzo", (8,)), ((2, 4),) * 4, {"recurrent": (2, 4, 4, 4), "bias": (4, 2, 4)}
    ),
    "selective_scan": Case(
        scan, {"u": (4,), "dt": (4,), "B": (3,), "C": (3,), "z": (4,)}, ((4, 3),),
        {"A": (4, 3), "D": (4,), "dt_bias": (4,)},
    ),
    "selective_scan of constants": Case(
        scan, {"u": (4,), "dt": (4,)}, ((4, 3),), {"A": (4, 3), "B": (4, 3), "C": (4, 3)}
    ),
    "causal_conv": Case(conv, {"x": (4,)}, ((3, 4),), {"weight": (4, 1, 4), "bias": (4,)}),
    "causal_conv across channels": Case(
        conv, {"x": (4,)}, ((2, 4),), {"weight": (5, 4, 3), "bias": (5,)}, ("reference", "torch")
    ),
    "centaurus neck": Case(
        centaurus("neck"), {"x": (3,)}, ((4, 2, 2),), {**BANK, "B": (4, 3), "C": (3, 4), "E": (4, 2)}
    ),
    "centaurus dws": Case(centaurus("dws"), {"x": (4,)}, ((4, 2, 2),), {**BANK, "B": (4,), "C": (4,), "E": (4, 2)}),
    "centaurus full": Case(centaurus("full"), {"x": (2,)}, ((4, 2, 2),), {**BANK, "B": (4,), "C": (4,), "E": (4, 2)}),
    "attention": Case(
        attention, {"q": (2, 4), "k": (1, 4), "v": (1, 4)}, ((S, 1, 4), (S, 1, 4)), {}, ("reference", "torch"), False
    ),
    "attention in a window": Case(
        window, {"q": (2, 4), "k": (2, 4), "v": (2, 4)}, ((3, 2, 4), (3, 2, 4)), {}, ("reference", "torch"), False
    ),
    "associative_scan": Case(associative, {"a": (4,), "b": (4,)}, ((4,), (4,)), {}, ("reference", "torch")),
}  # fmt: skip
CUTS = {"whole": [(0, S)], "chunks": [(0, 3), (3, 4), (4, 9), (9, S)], "steps": [(t, t + 1) for t in range(S)]}


def parameters() -> list[Any]:
    found = []
    for (name, case), pieces in itertools.product(CASES.items(), CUTS):
        for backend, reverse in itertools.product(case.backends, (False, True) if case.reversible else (False,)):
            marks = []
            if backend == "triton":
                marks = [interpreted]
                marks += [pytest.mark.long] if pieces != "whole" else []
            found.append(pytest.param(name, backend, reverse, pieces, marks=marks))
    return found


def in_pieces(case: Case, x: dict[str, Tensor], state: Any, marks: Tensor, pieces: str, **options: Any) -> Any:
    """y and the last states; tokens and marks lie in the order of the scan."""
    parts = []
    turn = (lambda t: t.flip(1)) if options["reverse"] else (lambda t: t)
    for a, b in CUTS[pieces]:
        some = {name: turn(t[:, a:b]) if name in case.tokens else t for name, t in x.items()}
        y, *state = case.run(some, state, resets=turn(marks[:, a:b]), **options)
        parts.append(turn(y))
    return torch.cat(parts, 1), state


def results(case: Case, leaves: list[Tensor], marks: Tensor, pieces: str, **options: Any) -> list[Tensor]:
    """y after the resets, the last states, and the gradient of every leaf."""
    names = [*case.tokens, *case.shared]
    x, state = dict(zip(names, leaves, strict=False)), leaves[len(names) :]
    y, last = in_pieces(case, x, state, marks, pieces, **options)
    out = [y[0, AT:], y[1], y[2], *last]
    loss = sum((t * draw(*t.shape, seed=at).float()).sum() for at, t in enumerate(out) if t.requires_grad)
    return [t.detach() for t in out] + list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(("op", "backend", "reverse", "pieces"), parameters())
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nothing_before_a_reset_reaches_what_follows(
    op: str, backend: str, reverse: bool, pieces: str, poison: float
) -> None:
    check(op, backend, reverse, pieces, poison)


def check(op: str, backend: str, reverse: bool, pieces: str, poison: float) -> None:
    case = CASES[op]
    shapes = [(3, S, *axes) for axes in case.tokens.values()]
    shapes += [*case.shared.values(), *((3, *axes) for axes in case.states)]
    clean = [draw(*shape, seed=at).float() * 0.5 for at, shape in enumerate(shapes)]
    if op == "slstm":
        clean[-2] = clean[-2].abs() + 0.5  # the normaliser is a sum of weights
    marks = torch.zeros(3, S, dtype=torch.bool)
    marks[0, AT] = marks[1, 0] = True
    wrong = [x.clone() for x in clean]
    for x in wrong[: len(case.tokens)]:
        x[0, 1] = poison
        x[0, 3].view(-1)[0] = -poison
    for x in wrong[len(wrong) - len(case.states) :]:
        x[:2] = poison
    options = {"backend": backend, "reverse": reverse}
    found, wanted = (
        results(case, [x.requires_grad_() for x in leaves], marks, pieces, **options) for leaves in (wrong, clean)
    )
    assert all(x.isfinite().all() for x in found)
    # the same operations on the same numbers but for what vectors and dots make of other rows
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=float32_bar(S) * (1.0 + b.abs().max().item()))
    grads = found[-len(clean) :]
    assert all((g[0, :AT] == 0).all() for g in grads[: len(case.tokens)])
    assert all((g[:2] == 0).all() for g in grads[len(grads) - len(case.states) :])


@interpreted
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("launch", ["tiles", "team", "segments"])
def test_every_launch_of_a_kernel_keeps_to_it(launch: str, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads of the sLSTM, and a scan whose sequences are cut, also where one is over."""
    tile = {"BB": 16, "BD": 16, "WHOLE": 0, "num_warps": 4}
    if launch == "segments":
        triton = importlib.import_module("seqblocks.kernels.selective_scan.triton")
        monkeypatch.setattr(triton, "segments", lambda *facts: 3)
        monkeypatch.setattr(triton, "CHUNK", 4)
        check("selective_scan", "triton", reverse, "whole", torch.nan)
    else:

        def tiles(width: int, dots: str, backward: bool, *facts: Any) -> dict[str, int]:
            if launch == "tiles":
                return {**tile, "num_stages": 2}
            return {**tile, "BU": 16, "num_stages": 1} | ({"AHEAD": 1, "EXACT": 1} if backward else {})

        triton = importlib.import_module("seqblocks.kernels.slstm.triton")
        monkeypatch.setattr(triton, "tiles", tiles)
        monkeypatch.setattr(triton.common, "processors", lambda x: 6)
        check("slstm", "triton", reverse, "whole", torch.nan)


@pytest.mark.parametrize(("op", "backend", "reverse", "pieces"), parameters())
def test_what_follows_a_reset_is_a_fresh_start(op: str, backend: str, reverse: bool, pieces: str) -> None:
    case = CASES[op]
    x = {name: draw(1, S, *axes, seed=at).float() for at, (name, axes) in enumerate(case.tokens.items())}
    x |= {name: draw(*axes, seed=9 + at).float() for at, (name, axes) in enumerate(case.shared.items())}
    marks = torch.zeros(1, S, dtype=torch.bool)
    marks[0, AT] = True
    state = [torch.full((1, *axes), torch.nan) for axes in case.states]
    later = {name: t[:, AT:] if name in case.tokens else t for name, t in x.items()}
    options = {"backend": backend, "reverse": reverse}
    y, last = in_pieces(case, x, state, marks, pieces, **options)
    turn = (lambda t: t.flip(1)) if reverse else (lambda t: t)
    first = torch.zeros(1, S - AT, dtype=torch.bool)
    first[0, 0] = True
    alone, *fresh = case.run({n: turn(t) if n in case.tokens else t for n, t in later.items()}, None,
                             resets=turn(first), **options)
    for a, b in zip([y[:, AT:], *last], [turn(alone), *fresh], strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=float32_bar(S) * (1.0 + b.abs().max().item()))


STREAMING = ("mamba_small", "mlstm_small", "hybrid_small", "memoroid_agent", "transformer_small", "centaurus_mlstm")


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_agent_recovers(name: str, poison: float) -> None:
    """One step with a reset on a state that is lost gives what a new state gives, and leaves nothing of the old one."""
    model = seqblocks.build(name, device="cpu", seed=0)
    first = model.init_state(3)
    shape = (3, *([model.frame_size] if model.frame_size > 1 else []))
    wire = model.graph.input
    x = torch.randint(0, 16, shape) if wire.kind == "tokens" else torch.randn(*shape, wire.features)
    lost = map_state(lambda t: torch.full_like(t, poison) if t.is_floating_point() else t + 3, first)
    with torch.no_grad():
        wanted, after = model.step(x, first)
        found, state = model.step(x, lost, resets=torch.ones(3, dtype=torch.bool))
        later, _ = model.step(x, state)
        wanted_later, _ = model.step(x, after)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(later, wanted_later)
    map_state(lambda t: pytest.fail("not finite") if not t.isfinite().all() else t, state)
