"""Norms, the block-diagonal map, the convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks import kernels
from tests.ptx.cases import bf16, case, cast, f16, f32, marks, randn
from tests.ptx.compare import Call

NAMES = {f32: "f32", bf16: "bf16", f16: "f16"}


def norm(
    dtype: torch.dtype, rows: int, heads: int, width: int, gate: str = "", *, one_plus: bool = False,
    skip: bool = False, bias: bool = True, view: bool = False,
) -> Call:
    n = heads * width
    x = {"x": randn(rows, n)}
    x |= {"skip": randn(rows, n, seed=3)} if skip else {}
    x |= {"gate": randn(rows, n, seed=5)} if gate else {}
    x = cast(x, dtype, view) | {"weight": randn(n, seed=1)}
    x |= {"bias": randn(n, seed=2)} if bias else {}
    x |= {"skip_weight": randn(n, seed=4)} if skip else {}
    return kernels.head_norm, x, {"heads": heads, "activation": gate or "none", "one_plus": one_plus}


def norm_of_far_rows() -> Call:
    """Rows 2^26 elements apart: offsets need more than 31 bits. The memory between them is never touched."""
    call, x, options = norm(bf16, 67, 1, 20)
    rows = torch.empty_strided((67, 20), (1 << 26, 1), dtype=bf16)
    rows.copy_(x["x"])
    return call, {**x, "x": rows}, options


for dtype in (bf16, f32, f16):
    case(f"head_norm {NAMES[dtype]} 67x3x20", lambda dtype=dtype: norm(dtype, 67, 3, 20), length=80)
case("head_norm bf16 gated silu skip view", lambda: norm(bf16, 67, 2, 33, "silu", skip=True, view=True), length=150)
case("head_norm f16 gated sigmoid one_plus", lambda: norm(f16, 5, 2, 64, "sigmoid", one_plus=True, bias=False),
     length=150)
case("head_norm f32 600 rows 4", lambda: norm(f32, 2500, 1, 4), length=600)
case("head_norm bf16 wide 1x1x3000", lambda: norm(bf16, 3, 1, 3000, "silu"), length=3000)
case("head_norm bf16 far rows", norm_of_far_rows, gradients=False, length=80, slow=True)


def residual(
    dtype: torch.dtype, rows: int, width: int, *, centred: bool = False, one_plus: bool = False, added: bool = True,
    bias: bool = True, view: bool = False,
) -> Call:
    x = {"x": randn(rows, width)} | ({"residual": randn(rows, width, seed=3)} if added else {})
    x = cast(x, dtype, view) | {"weight": randn(width, seed=1)} | ({"bias": randn(width, seed=2)} if bias else {})

    def call(**given: Any) -> Tensor | tuple[Tensor, Tensor]:
        y, total = kernels.residual_norm(**given)
        return (y, total) if "residual" in given else y

    return call, x, {"centred": centred, "one_plus": one_plus}


# dots: the sum is rounded before it is normalised; in the reference it is not.
for dtype in (bf16, f32, f16):
    case(f"residual_norm {NAMES[dtype]} 67x20 added", lambda dtype=dtype: residual(dtype, 67, 20), dots=True, length=80)
case("residual_norm f16 centred one_plus view",
     lambda: residual(f16, 9, 100, centred=True, one_plus=True, added=False, view=True), length=300)
case("residual_norm f32 centred 700 rows", lambda: residual(f32, 700, 7, centred=True, bias=False), length=700)
case("residual_norm bf16 wide 5000", lambda: residual(bf16, 3, 5000, centred=True), dots=True, length=5000)


def headwise(dtype: torch.dtype, weights: torch.dtype, rows: int, groups: int, outputs: int, inputs: int) -> Call:
    weight, bias = randn(groups, outputs, inputs, seed=1).to(weights), randn(groups * outputs, seed=2).to(weights)
    return kernels.headwise_linear, {"x": randn(rows, groups * inputs).to(dtype), "weight": weight, "bias": bias}, {}


for dtype in (bf16, f16, f32):
    case(f"headwise_linear {NAMES[dtype]} 70 64x4x4", lambda dtype=dtype: headwise(dtype, dtype, 70, 64, 4, 4),
         length=200)
    case(f"headwise_linear {NAMES[dtype]} 70 5x3x16", lambda dtype=dtype: headwise(dtype, dtype, 70, 5, 3, 16),
         length=200)
case("headwise_linear bf16 x f32 17 3x5x7", lambda: headwise(bf16, f32, 17, 3, 5, 7), length=200)
case("headwise_linear bf16 tiles 130", lambda: headwise(bf16, bf16, 130, 9, 4, 4), sizes={"rows": 1 << 20}, length=200)
case("headwise_linear f32 tiles 300 2x2x2", lambda: headwise(f32, f32, 300, 2, 2, 2), sizes={"rows": 1 << 20},
     length=400)


def conv(
    dtype: torch.dtype, batch: int, tokens: int, width: int, taps: int, activation: str | None = "silu", *,
    state: bool = True, resets: bool = False, reverse: bool = False, weights: torch.dtype | None = None,
    view: bool = False,
) -> Call:
    x = cast({"x": randn(batch, tokens, width)}, dtype, view)
    x |= cast({"weight": randn(width, 1, taps, seed=1), "bias": randn(width, seed=2)}, weights or dtype)
    x |= {"state": randn(batch, taps - 1, width, seed=3).to(dtype)} if state else {}
    return kernels.causal_conv, x, {
        "activation": activation, "reverse": reverse, "resets": marks(batch, tokens) if resets else None,
        "return_state": state,
    }


case("causal_conv bf16 4 taps S=70 D=300 resets", lambda: conv(bf16, 1, 70, 300, 4, resets=True), length=200)
case("causal_conv f32 4 taps S=67 D=17 reverse", lambda: conv(f32, 2, 67, 17, 4, reverse=True), length=200)
case("causal_conv f16 3 taps S=17 D=33 none",
     lambda: conv(f16, 2, 17, 33, 3, None, resets=True, reverse=True, view=True), length=200)
case("causal_conv f32 2 taps S=1", lambda: conv(f32, 3, 1, 17, 2), length=200)
case("causal_conv bf16 x f32 4 taps S=130", lambda: conv(bf16, 1, 130, 24, 4, weights=f32, resets=True), length=300)
case("causal_conv f32 1 tap", lambda: conv(f32, 1, 9, 5, 1, None, state=False), length=200)
case("causal_conv bf16 8 taps S=40 D=20", lambda: conv(bf16, 1, 40, 20, 8, resets=True), length=200)
