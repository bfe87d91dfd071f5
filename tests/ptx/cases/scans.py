"""The selective scan, and Centaurus."""

from __future__ import annotations

from typing import Any

import torch

from seqblocks import kernels
from tests.ptx.cases import bf16, case, cast, f16, f32, inside, marks, randn
from tests.ptx.compare import Call

# Sizes of a call whose few channels would leave a GPU idle, so that the sequence is cut into segments
SEGMENTS = {"batch": 1, "length": 1 << 14, "width": 16, "groups": 1, "channels": 16}


def scan(
    dtype: torch.dtype, batch: int, tokens: int, width: int, states: int, groups: int = 0, *, constant: str = "",
    D: bool = True, z: bool = True, bias: bool = True, softplus: bool = True, state: bool = True, resets: bool = False,
    reverse: bool = False, view: bool = False,
) -> Call:
    """constant: which of B and C are the same for all tokens."""
    tokens_of = {"u": randn(batch, tokens, width), "dt": randn(batch, tokens, width, seed=1) * 0.5}
    tokens_of |= {"z": randn(batch, tokens, width, seed=2)} if z else {}
    x: dict[str, Any] = {"A": -randn(width, states, seed=5).abs() * 2 - 0.05}
    for name, seed in (("B", 3), ("C", 4)):
        if name in constant:
            x[name] = randn(width, states, seed=seed)
        else:
            shape = (batch, tokens, groups, states) if groups else (batch, tokens, states)
            tokens_of[name] = randn(*shape, seed=seed)
    x |= {"D": randn(width, seed=6)} if D else {}
    x |= {"dt_bias": randn(width, seed=7) - 1} if bias else {}
    x |= {"state": randn(batch, width, states, seed=8)} if state else {}
    if not softplus:
        tokens_of["dt"] = tokens_of["dt"].abs()
        x |= {"dt_bias": x["dt_bias"].abs()} if bias else {}
    return kernels.selective_scan, cast(tokens_of, dtype, view) | x, {
        "dt_softplus": softplus, "resets": marks(batch, tokens) if resets else None, "reverse": reverse,
        "return_state": True,
    }


case("scan bf16 N=16 E=40 S=70", lambda: scan(bf16, 2, 70, 40, 16, resets=True))
case("scan f32 N=16 E=16 S=67 reverse", lambda: scan(f32, 1, 67, 16, 16, resets=True, reverse=True))
case("scan f16 N=17 E=17 S=33 view", lambda: scan(f16, 1, 33, 17, 17, view=True))
case("scan f32 N=64 E=16 S=40", lambda: scan(f32, 1, 40, 16, 64, resets=True))
case("scan bf16 N=64 E=20 S=34 reverse", lambda: scan(bf16, 1, 34, 20, 64, reverse=True))
case("scan bf16 N=16 groups 2 S=40", lambda: scan(bf16, 1, 40, 48, 16, 2))
case("scan f32 N=8 constant B S=35", lambda: scan(f32, 1, 35, 20, 8, constant="B", z=False, softplus=False))
case("scan bf16 N=16 constant BC S=35", lambda: scan(bf16, 1, 35, 20, 16, constant="BC", D=False, resets=True))
case("scan f32 N=1 S=17 bare", lambda: scan(f32, 2, 17, 5, 1, D=False, z=False, bias=False, state=False))
case("scan bf16 N=16 S=1 gradients", lambda: scan(bf16, 2, 1, 17, 16))
case("scan bf16 N=16 token", lambda: scan(bf16, 3, 1, 40, 16, 1), gradients=False)
case("scan f32 N=128 token groups", lambda: scan(f32, 2, 1, 12, 128, 2), gradients=False)
# From 128 states on the backward pass has several warps, which its barriers order.
case("scan f32 N=128 E=9 S=33", lambda: scan(f32, 1, 33, 9, 128, resets=True))
case("scan f32 N=128 constant BC E=9 S=70", lambda: scan(f32, 1, 70, 9, 128, constant="BC", resets=True))
case("scan bf16 N=256 E=5 S=17", lambda: scan(bf16, 1, 17, 5, 256, resets=True))
case("scan f32 N=32 E=24 S=34", lambda: scan(f32, 1, 34, 24, 32))
case("scan bf16 N=16 segments S=100", lambda: scan(bf16, 1, 100, 16, 16, resets=True), sizes=SEGMENTS)
case("scan f32 N=16 segments S=100 reverse", lambda: scan(f32, 1, 100, 16, 16, resets=True, reverse=True),
     sizes=SEGMENTS)
case("scan f16 N=16 segments S=100", lambda: scan(f16, 1, 100, 16, 16), sizes=SEGMENTS)
case("scan f32 N=64 segments S=70", lambda: scan(f32, 1, 70, 8, 64, resets=True), sizes=SEGMENTS)
case("scan bf16 N=4 segments E=5 S=131 reverse", lambda: scan(bf16, 1, 131, 5, 4, reverse=True), sizes=SEGMENTS)


def bank(
    dtype: torch.dtype, mode: str, tokens: int, width: int, filters: int, substates: int, batch: int = 1, *,
    hold: str = "euler", state: bool = True, keeps: bool = True, resets: bool = False, reverse: bool = False,
    view: bool = False,
) -> Call:
    """Centaurus. keeps: whether the last state is returned."""
    n = filters * (substates if mode == "pointwise" else 1)
    mixes = mode in ("neck", "pointwise")
    x = {
        "x": randn(batch, tokens, width).to(dtype),
        "A_real": -randn(filters, substates, seed=1).abs() - 0.1,
        "A_imag": randn(filters, substates, seed=2),
        "dt": randn(filters, seed=3).abs() * 0.3 + 0.01,
        "B": randn(*((n, width) if mixes else (n,)), seed=4),
        "C": randn(*((width, n) if mixes else (n,)), seed=5),
    }
    x["x"] = inside(x["x"]) if view else x["x"]
    x |= {} if mode == "pointwise" else {"E": randn(filters, substates, seed=6)}
    x |= {"state": randn(batch, n, 1 if mode == "pointwise" else substates, 2, seed=7)} if state else {}
    return kernels.centaurus, x, {
        "mode": mode, "hold": hold, "return_state": keeps, "resets": marks(batch, tokens) if resets else None,
        "reverse": reverse,
    }


case("centaurus bf16 neck M=4 S=45", lambda: bank(bf16, "neck", 45, 8, 12, 4, 2, resets=True), dots=True)
case("centaurus f32 dws M=8 S=67 reverse", lambda: bank(f32, "dws", 67, 17, 17, 8, resets=True, reverse=True))
case("centaurus f32 full M=3 S=33 folded", lambda: bank(f32, "full", 33, 6, 18, 3, state=False, keeps=False))
case("centaurus bf16 full M=8 S=33 folded",
     lambda: bank(bf16, "full", 33, 40, 80, 2, state=False, keeps=False, resets=True), dots=True)
case("centaurus f16 full M=2 S=17 state", lambda: bank(f16, "full", 17, 5, 10, 2, reverse=True), dots=True)
case("centaurus f32 pointwise S=20 zoh", lambda: bank(f32, "pointwise", 20, 6, 5, 3, hold="zoh"))
case("centaurus f32 dws M=1 S=1", lambda: bank(f32, "dws", 1, 5, 5, 1))
case("centaurus f32 dws M=64 S=20", lambda: bank(f32, "dws", 20, 6, 6, 64))
case("centaurus f32 dws segments S=90", lambda: bank(f32, "dws", 90, 6, 6, 4, 2, resets=True), sizes=SEGMENTS)
case("centaurus f32 neck segments S=77 reverse", lambda: bank(f32, "neck", 77, 5, 9, 3, reverse=True), sizes=SEGMENTS)
case("centaurus f32 full segments S=90",
     lambda: bank(f32, "full", 90, 4, 8, 2, state=False, keeps=False, resets=True), sizes=SEGMENTS)
