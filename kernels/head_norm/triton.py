"""Layer norm of each head in Triton, with gain, bias, learnable skip and gate: one launch forward, one backward.

A program processes BT tokens of one head with all its channels, so that mean and variance need no second read. The
backward pass recomputes them. The gradients of gain, bias and skip weight are stored as partial sums, one for each
program, and added afterwards.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import normal
from seqblocks.kernels.numerics import no_second_derivative
from seqblocks.kernels.triton_common import ceil_div, jit, last_contiguous, load_gain, load_row, normalised, sigmoid, tl

HEAD_MAX_CHANNELS = 8192
GATED_HEAD_MAX_CHANNELS = 4096  # with a skip or a gate
ACTIVATIONS = ("none", "silu", "sigmoid")
TILES = 4  # tiles of tokens per program of the backward pass, which limits the number of partial sums


# ------------------------------------------------------------------------------
# The kernels.   x, skip, gate, y [R, H * D], with row strides xs, ss, zs; weight, bias, skip_weight [H * D].


@jit
@no_type_check
def _activated(x, ACTIVATION: tl.constexpr):
    """Return the activation of x, and its derivative."""
    if ACTIVATION == "none":
        return x, x * 0.0 + 1.0
    s = sigmoid(x)
    slope = s * (1.0 - s)
    if ACTIVATION == "sigmoid":
        return s, slope
    return x * s, s + x * slope


@jit
@no_type_check
def _with_gain_and_skip(out, weight, bias, skip, skip_weight, r, c, is_d, mask, ss, ONE_PLUS: tl.constexpr):
    """Apply gain, bias and skip to normalised rows [BT, BD]; the gate multiplies the result."""
    if weight is not None:
        out *= load_gain(weight, c, is_d, ONE_PLUS)
    if bias is not None:
        out += load_row(bias, c, is_d)
    if skip is not None:
        added = tl.load(skip + r[:, None] * ss + c[None, :], mask, 0.0).to(tl.float32)
        out += load_row(skip_weight, c, is_d) * added
    return out


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _norm(
    x, weight, bias, skip, skip_weight, gate, y, R, D, xs, ss, zs, eps,
    ACTIVATION: tl.constexpr, ONE_PLUS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    mask = (r < R)[:, None] & (d < D)[None, :]
    c = tl.program_id(1) * D + d
    value = tl.load(x + r[:, None] * xs + c[None, :], mask, 0.0).to(tl.float32)
    out, _ = normalised(value, mask, D, eps, True)
    out = _with_gain_and_skip(out, weight, bias, skip, skip_weight, r, c, d < D, mask, ss, ONE_PLUS)
    if gate is not None:
        factor, _ = _activated(tl.load(gate + r[:, None] * zs + c[None, :], mask, 0.0).to(tl.float32), ACTIVATION)
        out *= factor
    tl.store(y + r[:, None] * (tl.num_programs(1) * D) + c[None, :], out.to(y.dtype.element_ty), mask)


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _norm_backward(
    dy, x, weight, bias, skip, skip_weight, gate, dx, dweight, dbias, dskip, dskip_weight, dgate,
    R, D, gs, xs, ss, zs, eps,
    ACTIVATION: tl.constexpr, ONE_PLUS: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Compute gradients. Partial sums: dweight, dbias, dskip_weight [programs, H * D]."""
    d = tl.arange(0, BD)
    c = tl.program_id(1) * D + d
    width = tl.num_programs(1) * D
    dw_sum = tl.zeros((BD,), tl.float32)
    db_sum = tl.zeros((BD,), tl.float32)
    ds_sum = tl.zeros((BD,), tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        mask = (r < R)[:, None] & (d < D)[None, :]
        to = r[:, None] * width + c[None, :]
        value = tl.load(x + r[:, None] * xs + c[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(dy + r[:, None] * gs + c[None, :], mask, 0.0).to(tl.float32)
        unit, scale = normalised(value, mask, D, eps, True)
        if gate is not None:
            z = tl.load(gate + r[:, None] * zs + c[None, :], mask, 0.0).to(tl.float32)
            factor, slope = _activated(z, ACTIVATION)
            out = _with_gain_and_skip(unit, weight, bias, skip, skip_weight, r, c, d < D, mask, ss, ONE_PLUS)
            tl.store(dgate + to, (g * out * slope).to(dgate.dtype.element_ty), mask)
            g *= factor
        if skip is not None:
            added = tl.load(skip + r[:, None] * ss + c[None, :], mask, 0.0).to(tl.float32)
            ds_sum += tl.sum(g * added, 0)
            tl.store(dskip + to, (g * load_row(skip_weight, c, d < D)).to(dskip.dtype.element_ty), mask)
        dw_sum += tl.sum(g * unit, 0)
        db_sum += tl.sum(g, 0)
        if weight is not None:
            g *= load_gain(weight, c, d < D, ONE_PLUS)
        grad = (g - (tl.sum(g, 1) / D)[:, None] - unit * (tl.sum(g * unit, 1) / D)[:, None]) * scale[:, None]
        tl.store(dx + to, grad.to(dx.dtype.element_ty), mask)
    part = tl.program_id(0).to(tl.int64) * width + c
    if dweight is not None:
        tl.store(dweight + part, dw_sum, d < D)
    if dbias is not None:
        tl.store(dbias + part, db_sum, d < D)
    if dskip_weight is not None:
        tl.store(dskip_weight + part, ds_sum, d < D)


# ------------------------------------------------------------------------------
# Launching


def _laid_out(*rows: Tensor | None) -> list[Any]:
    """Return rows with the last axis contiguous, and parameters contiguous."""
    return [None if x is None else last_contiguous(x) if x.dim() == 2 else x.contiguous() for x in rows]


def _row_strides(*rows: Tensor | None) -> list[int]:
    return [0 if x is None else x.stride(0) for x in rows]


@custom_op("seqblocks::head_norm_triton")
def _op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, skip: Tensor | None, skip_weight: Tensor | None,
    gate: Tensor | None, heads: int, eps: float, activation: str, one_plus: bool,
) -> Tensor:
    R, D = x.shape[0], x.shape[1] // heads
    y = _op_fake(x, weight, bias, skip, skip_weight, gate, heads, eps, activation, one_plus)
    given = _laid_out(x, weight, bias, skip, skip_weight, gate)
    tile = common.tiles_of_rows(D, HEAD_MAX_CHANNELS, backward=False)
    with common.on(x):
        _norm[ceil_div(R, tile["BT"]), heads](
            *given, y, R, D, *_row_strides(given[0], given[3], given[5]), eps,
            ACTIVATION=activation, ONE_PLUS=one_plus, **tile,
        )
    return y


@_op.register_fake
def _op_fake(x, weight, bias, skip, skip_weight, gate, heads, eps, activation, one_plus):  # type: ignore[no-untyped-def]
    dtype = x.dtype
    for other in (skip, skip_weight, gate):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return x.new_empty(x.shape, dtype=dtype)


@custom_op("seqblocks::head_norm_triton_backward", outputs=6)
def _op_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, skip: Tensor | None,
    skip_weight: Tensor | None, gate: Tensor | None, heads: int, eps: float, activation: str, one_plus: bool,
) -> list[Tensor]:
    """Return the gradients of x, weight, bias, skip, skip_weight and gate; empty tensors for those that are absent."""
    R, D = x.shape[0], x.shape[1] // heads
    like = _op_backward_fake(dy, x, weight, bias, skip, skip_weight, gate, heads, eps, activation, one_plus)
    dx, _, _, dskip, _, dgate = like
    dy, *given = _laid_out(dy, x, weight, bias, skip, skip_weight, gate)
    tile = common.tiles_of_rows(D, HEAD_MAX_CHANNELS, backward=True)
    programs = ceil_div(R, tile["BT"] * TILES)
    parts = [
        None if p is None else x.new_empty(programs, heads * D, dtype=torch.float32)
        for p in (weight, bias, skip_weight)
    ]
    with common.on(x):
        _norm_backward[programs, heads](
            dy, *given, dx, *parts[:2], dskip, parts[2], dgate,
            R, D, *_row_strides(dy, given[0], given[3], given[5]), eps,
            ACTIVATION=activation, ONE_PLUS=one_plus, TILES=TILES, **tile,
        )
    for at, p, part in zip((1, 2, 4), (weight, bias, skip_weight), parts, strict=True):
        if p is not None and part is not None:
            like[at] = part.sum(0).to(p.dtype)
    return like


@_op_backward.register_fake
def _op_backward_fake(dy, x, weight, bias, skip, skip_weight, gate, heads, eps, activation, one_plus):  # type: ignore[no-untyped-def]
    given = (x, weight, bias, skip, skip_weight, gate)
    return [x.new_empty(0) if p is None else p.new_empty(p.shape) for p in given]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
    grads = _op_backward(dy, *saved, *ctx.options)
    return *(None if p is None else g for p, g in zip(saved, grads, strict=True)), None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("head_norm", "Triton"))


def run(
    x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    skip: Tensor | None = None, skip_weight: Tensor | None = None, gate: Tensor | None = None, activation: str = "none",
    one_plus: bool = False,
) -> Tensor:
    """Run `head_norm` on x [..., H * D]."""
    if x.numel() == 0:
        torch_run = implementation("head_norm", "torch").run
        return torch_run(x, heads, weight, bias, eps, skip, skip_weight, gate, activation, one_plus)
    rows, added, factor = (None if t is None else t.reshape(-1, t.shape[-1]) for t in (x, skip, gate))
    assert rows is not None
    return _op(rows, weight, bias, added, skip_weight, factor, heads, eps, activation, one_plus).view(x.shape)


@common.can_unless
def _can(**facts: Any) -> str:
    head = facts.get("width", 1) // facts.get("heads", 1)
    if head > HEAD_MAX_CHANNELS:
        return f"heads of {head} channels; at most {HEAD_MAX_CHANNELS}"
    if head > GATED_HEAD_MAX_CHANNELS and (facts.get("skip") or facts.get("gate")):
        return f"heads of {head} channels with a skip or a gate; at most {GATED_HEAD_MAX_CHANNELS}"
    if facts.get("gate") not in (None, *ACTIVATIONS):
        return f"gate activation {facts['gate']}; supported are {', '.join(ACTIVATIONS)}"
    return ""


def _tiles(arch: str, heads: int, width: int, **facts: Any) -> dict[str, dict[str, int]]:
    return {
        phase: common.tiles_of_rows(width // heads, HEAD_MAX_CHANNELS, phase == "backward")
        for phase in ("forward", "backward")
    }


def _example(
    heads: int, width: int, skip: bool = False, gate: str | None = None, one_plus: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.head_norm import head_norm

    tensors = {"x": normal(70, width), "weight": normal(width, seed=1), "bias": normal(width, seed=2)}
    if skip:
        tensors |= {"skip": normal(70, width, seed=3), "skip_weight": normal(width, seed=4)}
    if gate is not None:
        tensors["gate"] = normal(70, width, seed=5)
    return head_norm, tensors, {"heads": heads, "activation": gate or "none", "one_plus": one_plus}


register("head_norm", "triton", run, _can, _tiles, _example)
