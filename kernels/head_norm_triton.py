"""Layer norm of each head in Triton, with gain and bias: one launch forward, one backward.

A program owns BT tokens of one head, whose channels it holds all at once: mean, variance and what hangs on them need no
second look at memory, and the backward pass makes them again instead of keeping them. The gradients of gain and bias
are stored in parts, one for each program, and added afterwards.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import register
from seqblocks.kernels.self_check import normal
from seqblocks.kernels.triton_common import jit, lined, tl, up

WIDTH = 8192  # of a head, at most
TILES = 4  # that a program of the backward pass goes through, so that parts are few


# ------------------------------------------------------------------------------
# The kernels.   Places: x, y [R, H * D] with rows xs apart, weight, bias [H * D].


@jit
@no_type_check
def _normalised(value, live, D, eps):
    """(x - mean) / sqrt(var + eps) of rows [BT, BD], and 1 / sqrt(var + eps)."""
    centred = tl.where(live, value - (tl.sum(value, 1) / D)[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / D + eps)
    return centred * scale[:, None], scale


@jit(do_not_specialize=["R"])
@no_type_check
def _norm(x, weight, bias, y, R, D, xs, eps, BT: tl.constexpr, BD: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    live = (r < R)[:, None] & (d < D)[None, :]
    c = tl.program_id(1) * D + d
    value = tl.load(x + r[:, None] * xs + c[None, :], live, 0.0).to(tl.float32)
    out, _ = _normalised(value, live, D, eps)
    if weight is not None:
        out *= tl.load(weight + c, d < D, 0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + c, d < D, 0.0).to(tl.float32)[None, :]
    tl.store(y + r[:, None] * (tl.num_programs(1) * D) + c[None, :], out.to(y.dtype.element_ty), live)


@jit(do_not_specialize=["R"])
@no_type_check
def _norm_backward(
    dy, x, weight, dx, dweight, dbias, R, D, gs, xs, eps, TILES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Parts: dweight, dbias [programs, H * D]."""
    d = tl.arange(0, BD)
    c = tl.program_id(1) * D + d
    width = tl.num_programs(1) * D
    dw_sum = tl.zeros((BD,), tl.float32)
    db_sum = tl.zeros((BD,), tl.float32)
    if weight is not None:
        gain = tl.load(weight + c, d < D, 0.0).to(tl.float32)[None, :]
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        live = (r < R)[:, None] & (d < D)[None, :]
        value = tl.load(x + r[:, None] * xs + c[None, :], live, 0.0).to(tl.float32)
        g = tl.load(dy + r[:, None] * gs + c[None, :], live, 0.0).to(tl.float32)
        unit, scale = _normalised(value, live, D, eps)
        dw_sum += tl.sum(g * unit, 0)
        db_sum += tl.sum(g, 0)
        if weight is not None:
            g *= gain
        grad = (g - (tl.sum(g, 1) / D)[:, None] - unit * (tl.sum(g * unit, 1) / D)[:, None]) * scale[:, None]
        tl.store(dx + r[:, None] * width + c[None, :], grad.to(dx.dtype.element_ty), live)
    part = tl.program_id(0).to(tl.int64) * width + c
    if dweight is not None:
        tl.store(dweight + part, dw_sum, d < D)
    if dbias is not None:
        tl.store(dbias + part, db_sum, d < D)


# ------------------------------------------------------------------------------
# Launching


def tiles(width: int, backward: bool, arch: str) -> dict[str, int]:
    """Tokens and (padded) channels of a head that a program owns at a time, and its warps."""
    BD = common.power_of_two(width)
    BT = max(1, 2048 // BD)
    return {"BT": BT, "BD": BD, "num_warps": common.warps(BT * BD, 8 if backward else 16)}


def _laid_out(x: Tensor, *affine: Tensor | None) -> Any:
    return lined(x), *(None if p is None else p.contiguous() for p in affine)


@torch.library.custom_op("seqblocks::head_norm_triton", mutates_args=())
def _op(x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    R, D = x.shape[0], x.shape[1] // heads
    x, weight, bias = _laid_out(x, weight, bias)
    y = x.new_empty(x.shape)
    tile = tiles(D, False, common.arch(x))
    with common.on(x):
        _norm[up(R, tile["BT"]), heads](x, weight, bias, y, R, D, x.stride(0), eps, **tile)
    return y


@_op.register_fake
def _op_fake(x, heads, weight, bias, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("seqblocks::head_norm_triton_backward", mutates_args=())
def _op_backward(
    dy: Tensor, x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty for those that are absent."""
    R, D = x.shape[0], x.shape[1] // heads
    dy = lined(dy)
    x, weight, bias = _laid_out(x, weight, bias)
    tile = tiles(D, True, common.arch(x))
    programs = up(R, tile["BT"] * TILES)
    dx = x.new_empty(x.shape)
    parts = [None if p is None else x.new_empty(programs, heads * D, dtype=torch.float32) for p in (weight, bias)]
    with common.on(x):
        _norm_backward[programs, heads](
            dy, x, weight, dx, *parts, R, D, dy.stride(0), x.stride(0), eps, TILES=TILES, **tile
        )
    dweight, dbias = (
        x.new_empty(0) if p is None or part is None else part.sum(0).to(p.dtype)
        for p, part in zip((weight, bias), parts, strict=True)
    )
    return dx, dweight, dbias


@_op_backward.register_fake
def _op_backward_fake(dy, x, heads, weight, bias, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), *(x.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, ctx.heads, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = _op_backward(dy, x, ctx.heads, weight, bias, ctx.eps)
    return dx, None, None if weight is None else dweight, None if bias is None else dbias, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise RuntimeError("the Triton form of head_norm has no second derivative; use backend='reference' for it")


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(_refuse)


def run(x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `head_norm`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return _op(x.reshape(-1, x.shape[-1]), heads, weight, bias, eps).view(x.shape)


def _can(**facts: Any) -> tuple[bool, str]:
    can, reason = common.can(**facts)
    head = facts.get("width", 1) // facts.get("heads", 1)
    if can and head > WIDTH:
        return False, f"heads of {head} channels; at most {WIDTH}"
    return can, reason


def _tiles(arch: str, heads: int, width: int, **facts: Any) -> dict[str, dict[str, int]]:
    return {way: tiles(width // heads, way == "backward", arch) for way in ("forward", "backward")}


def _example(heads: int, width: int, **facts: Any) -> Any:
    from seqblocks.kernels.head_norm import head_norm

    tensors = {"x": normal(70, width), "weight": normal(width, seed=1), "bias": normal(width, seed=2)}
    return head_norm, tensors, {"heads": heads}


register("head_norm", "triton", run, _can, _tiles, _example)
