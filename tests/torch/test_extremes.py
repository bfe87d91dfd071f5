"""Every mixer at the limits of its numbers: 100,000 tokens, gates of ±100, steps from 1e-6 to 1e3, zeros, constants.

In float32 and bfloat16. Outputs and gradients are finite, and as close to the float64 result as docs/measurements.md
states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels import attention, causal_conv, centaurus, mlstm, mlstm_memoroid, selective_scan, slstm

LONG = 100_000


class Mixer(NamedTuple):
    """run(inputs by name) -> y; sequences [1, S, ...] that are inputs, gates among them, and weights with their scale.

    drift: a bound on the error in float32 after 100,000 tokens, relative to the largest output: four times the measured
    error (docs/measurements.md). low: the allowed bfloat16 error in units of 2^-8: one where only the output is
    rounded.
    """

    run: Callable[[dict[str, Tensor]], Any]
    sequences: dict[str, tuple[int, ...]]
    gates: tuple[str, ...] = ()
    weights: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    steps: str = ""
    drift: float = 0.0
    low: int = 1


def scan(x: dict[str, Tensor]) -> Any:
    return selective_scan(x["u"], x["dt"], x["A"], x["B"], x["C"], D=x["D"], dt_softplus=False)


def bank(mode: str) -> Callable[[dict[str, Tensor]], Any]:
    def run(x: dict[str, Tensor]) -> Any:
        E = None if mode == "pointwise" else x["E"]
        return centaurus(x["x"], x["A"], x["W"], x["rate"], x["B"], x["C"], E, mode=mode)

    return run


BANK = (("A", (2, 2), 1.0), ("W", (2, 2), 2.0), ("rate", (2,), 1.0), ("E", (2, 2), 1.0))
QKVIF = {"q": (2, 4), "k": (2, 4), "v": (2, 3), "i": (2,), "f": (2,)}
MIXERS = {
    "mlstm": Mixer(lambda x: mlstm(*x.values()), QKVIF, ("i", "f"), drift=6e-5),
    "mlstm_sigmoid": Mixer(lambda x: mlstm(*x.values(), input_gate="sigmoid"), QKVIF, ("i", "f"), drift=2e-5),
    "mlstm_memoroid": Mixer(lambda x: mlstm_memoroid(*x.values()), QKVIF, ("i", "f"), drift=2e-6),
    "slstm": Mixer(
        lambda x: slstm(*x.values()), dict.fromkeys("ifzo", (4,)), ("i", "f", "z", "o"),
        (("recurrent", (2, 2, 4, 2), 0.5), ("bias", (4, 2, 2), 1.0)), drift=1e-6,
    ),
    "selective_scan": Mixer(
        scan, {"u": (3,), "dt": (3,), "B": (2,), "C": (2,)}, (), (("A", (3, 2), 1.0), ("D", (3,), 1.0)), "dt", 4e-7
    ),
    "centaurus_neck": Mixer(
        bank("neck"), {"x": (3,)}, (), (*BANK, ("B", (2, 3), 1.0), ("C", (3, 2), 1.0)), "", 1e-6
    ),
    "centaurus_pointwise": Mixer(
        bank("pointwise"), {"x": (3,)}, (), (*BANK[:3], ("B", (4, 3), 1.0), ("C", (3, 4), 1.0)), "", 1e-6
    ),
    "centaurus_dws": Mixer(bank("dws"), {"x": (2,)}, (), (*BANK, ("B", (2,), 1.0), ("C", (2,), 1.0)), "", 1e-6),
    "centaurus_full": Mixer(bank("full"), {"x": (1,)}, (), (*BANK, ("B", (2,), 1.0), ("C", (2,), 1.0)), "", 1e-6),
    "attention_window": Mixer(
        lambda x: attention(*x.values(), window=64, rotary=10_000.0), {"q": (2, 4), "k": (1, 4), "v": (1, 3)},
        drift=2e-6, low=2
    ),
    "causal_conv": Mixer(
        lambda x: causal_conv(*x.values(), activation="silu"), {"x": (3,)}, (), (("weight", (3, 1, 4), 1.0),),
        drift=4e-7
    ),
}  # fmt: skip


def inputs(mixer: Mixer, S: int, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs. kind: random, zeros, constant, or a number used for all gates. Weights are always random."""
    g = torch.Generator().manual_seed(0)
    out = {}
    for name, shape in mixer.sequences.items():
        x = torch.randn(1, S, *shape, generator=g, dtype=torch.float64)
        if kind == "zeros":
            x = torch.zeros_like(x)
        elif kind == "constant":
            x = x[:, :1].expand_as(x).clone()
        elif name in mixer.gates and kind not in ("random",):
            x = torch.full_like(x, float(kind))
        if name == mixer.steps:  # steps are positive
            x = torch.nn.functional.softplus(x)
            x = x if kind in ("random", "zeros", "constant") else torch.full_like(x, float(kind))
        out[name] = x
    for name, shape, scale in mixer.weights:
        x = scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        out[name] = {"A": -x.exp(), "rate": x.exp()}.get(name, x)
    return {name: x.to(dtype).requires_grad_() for name, x in out.items()}


def run(mixer: Mixer, x: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return y and the gradients of its sum. All must be finite."""
    y = mixer.run(x)
    grads = list(torch.autograd.grad(y.float().sum() if y.dtype != torch.float64 else y.sum(), list(x.values())))
    return y.detach(), grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MIXERS)
def test_gates_steps_zeros_and_constants(name: str, dtype: torch.dtype) -> None:
    mixer = MIXERS[name]
    kinds = ["zeros", "constant"]
    kinds += ["100", "-100"] if mixer.gates else []
    kinds += ["1e-6", "1e-3", "1", "1e3"] if mixer.steps else []
    for kind in kinds:
        y, grads = run(mixer, inputs(mixer, 300, kind, dtype))
        assert y.dtype == dtype
        assert all(torch.isfinite(t).all() for t in (y, *grads)), kind


KINDS = ("random", "constant")  # without `long`, each mixer has one of them in turn


def is_long(name: str, kind: str) -> bool:
    return name == "slstm" or kind != KINDS[[*MIXERS].index(name) % 2]


def drift(name: str, dtype: torch.dtype, kind: str, S: int = LONG) -> float:
    """Return the largest difference from float64 on the same (rounded) inputs, relative to the largest output."""
    mixer = MIXERS[name]
    x = inputs(mixer, S, kind, dtype)
    y, grads = run(mixer, x)
    assert all(torch.isfinite(t).all() for t in (y, *grads))
    with torch.no_grad():
        exact = mixer.run({key: t.double() for key, t in x.items()})
    return ((y.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.long if is_long(name, kind) else [])
        for name in MIXERS for kind in KINDS
    ],
)
def test_a_hundred_thousand_tokens(name: str, kind: str) -> None:
    """float32 has the measured drift. In bfloat16, recurrent mixers compute in float32 and round only the output, by
    half a unit in the last place, 2^-8; attention also rounds the rotated q and k and its weights."""
    mixer = MIXERS[name]
    S = LONG // 10 if (name, kind) == ("slstm", "constant") else LONG  # a loop over time: minutes on two cores
    assert drift(name, torch.float32, kind, S) <= mixer.drift
    assert drift(name, torch.bfloat16, kind, S) <= mixer.drift + mixer.low * 2**-8


@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_gradients_of_rwkv7_in_float16_are_infinite_only_where_they_exceed_it(loss: str) -> None:
    """Its first norm scales embeddings of 1e-4, and their gradients, by 316: sums over tokens may exceed 65,504."""
    sizes = {"dim": 32, "depth": 2, "vocabulary": 11, "head": 16}
    ids = torch.randint(11, (2, 64), generator=torch.Generator().manual_seed(0))
    half = seqblocks.build("rwkv7_0_4b", set=sizes, dtype=torch.float16)
    double = seqblocks.build("rwkv7_0_4b", set=sizes, dtype=torch.float64)
    double.load_state_dict({name: weight.double() for name, weight in half.state_dict().items()})
    gradients = []
    for model in (half, double):
        y = model(ids).double()
        (y.sum() if loss == "sum" else y.mean()).backward()
        gradients.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    for name, found in gradients[0].items():
        exact = gradients[1][name]
        finite = found.isfinite()
        assert finite[exact.abs() < 0.99 * 65504].all(), name
        assert not finite[exact.abs() > 1.01 * 65504].any(), name
        assert (found - exact)[finite].abs().max() <= 0.02 * exact[finite].abs().max() + 1e-4, name
    assert gradients[0]["embed.weight"].isfinite().all() == (loss == "mean")
