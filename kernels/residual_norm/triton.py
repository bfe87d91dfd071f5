"""Norm of each token's features in Triton, fused with the residual addition: one launch forward, one backward.

A program loads all features of BT tokens at once. Only the sum that is normalised is saved for the backward pass. Each
program writes its part of the gradients of weight and bias, and the parts are summed afterwards.
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
from seqblocks.kernels.triton_common import ceil_div, last_contiguous, load_gain, normalised, tl

MAX_FEATURES = 8192
TILES = 4  # per program of the backward pass, to limit the number of parts


# ------------------------------------------------------------------------------
# Kernels.   Layouts: x, residual, dy, dtotal [R, D] with row strides; y, total, dx [R, D]; weight, bias [D].


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _norm(
    x, residual, weight, bias, y, total, R, D, xs, rs, eps,
    CENTRED: tl.constexpr, ONE_PLUS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    mask = (r < R)[:, None] & (d < D)[None, :]
    to = r[:, None] * D + d[None, :]
    value = tl.load(x + r[:, None] * xs + d[None, :], mask, 0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + r[:, None] * rs + d[None, :], mask, 0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask)
        value = rounded.to(tl.float32)  # normalise the rounded value, which later steps read
    out, _ = normalised(value, mask, D, eps, CENTRED)
    if weight is not None:
        out *= load_gain(weight, d, d < D, ONE_PLUS)
    if bias is not None:
        out += tl.load(bias + d, d < D, 0.0).to(tl.float32)[None, :]
    tl.store(y + to, out.to(y.dtype.element_ty), mask)


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _norm_backward(
    dy, dtotal, total, weight, dx, dweight, dbias, R, D, gs, hs, ts, eps,
    CENTRED: tl.constexpr, ONE_PLUS: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Write dx [R, D] and parts of the gradients, dweight and dbias [programs, D]."""
    d = tl.arange(0, BD)
    dw_sum = tl.zeros((BD,), tl.float32)
    db_sum = tl.zeros((BD,), tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        mask = (r < R)[:, None] & (d < D)[None, :]
        value = tl.load(total + r[:, None] * ts + d[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(dy + r[:, None] * gs + d[None, :], mask, 0.0).to(tl.float32)
        unit, scale = normalised(value, mask, D, eps, CENTRED)
        dw_sum += tl.sum(g * unit, 0)
        db_sum += tl.sum(g, 0)
        if weight is not None:
            g *= load_gain(weight, d, d < D, ONE_PLUS)
        grad = g - unit * (tl.sum(g * unit, 1) / D)[:, None]
        if CENTRED:
            grad -= (tl.sum(g, 1) / D)[:, None]
        grad *= scale[:, None]
        if dtotal is not None:
            grad += tl.load(dtotal + r[:, None] * hs + d[None, :], mask, 0.0).to(tl.float32)
        tl.store(dx + r[:, None] * D + d[None, :], grad.to(dx.dtype.element_ty), mask)
    part = tl.program_id(0).to(tl.int64) * D + d
    if dweight is not None:
        tl.store(dweight + part, dw_sum, d < D)
    if dbias is not None:
        tl.store(dbias + part, db_sum, d < D)


# ------------------------------------------------------------------------------
# Launching


@custom_op("seqblocks::residual_norm_triton")
def _op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool,
    one_plus: bool,
) -> tuple[Tensor, Tensor]:
    """Return y and the total, which is empty without a residual."""
    R, D = x.shape
    y, total = _op_fake(x, residual, weight, bias, eps, centred, one_plus)
    x, added = last_contiguous(x), None if residual is None else last_contiguous(residual)
    tile = common.tiles_of_rows(D, MAX_FEATURES, backward=False)
    with common.on(x):
        _norm[(ceil_div(R, tile["BT"]),)](
            x, added, _contiguous(weight), _contiguous(bias), y, None if added is None else total, R, D,
            x.stride(0), 0 if added is None else added.stride(0), eps, CENTRED=centred, ONE_PLUS=one_plus, **tile,
        )
    return y, total


@_op.register_fake
def _op_fake(x, residual, weight, bias, eps, centred, one_plus):  # type: ignore[no-untyped-def]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    total = x.new_empty((0,) if residual is None else x.shape, dtype=dtype)
    for p in (weight, bias):
        dtype = dtype if p is None else torch.promote_types(dtype, p.dtype)
    return x.new_empty(x.shape, dtype=dtype), total


@custom_op("seqblocks::residual_norm_triton_backward", outputs=3)
def _op_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    centred: bool, one_plus: bool,
) -> list[Tensor]:
    """Return the gradients of total, weight and bias; empty for absent ones."""
    R, D = total.shape
    grads = _op_backward_fake(dy, dtotal, total, weight, bias, eps, centred, one_plus)
    dy, total = last_contiguous(dy), last_contiguous(total)
    later = None if dtotal is None else last_contiguous(dtotal)
    tile = common.tiles_of_rows(D, MAX_FEATURES, backward=True)
    programs = ceil_div(R, tile["BT"] * TILES)
    parts = [None if p is None else dy.new_empty(programs, D, dtype=torch.float32) for p in (weight, bias)]
    with common.on(dy):
        _norm_backward[(programs,)](
            dy, later, total, _contiguous(weight), grads[0], *parts, R, D, dy.stride(0),
            0 if later is None else later.stride(0), total.stride(0), eps,
            CENTRED=centred, ONE_PLUS=one_plus, TILES=TILES, **tile,
        )  # fmt: skip
    for at, p, part in zip((1, 2), (weight, bias), parts, strict=True):
        if p is not None and part is not None:
            grads[at] = part.sum(0).to(p.dtype)
    return grads


@_op_backward.register_fake
def _op_backward_fake(dy, dtotal, total, weight, bias, eps, centred, one_plus):  # type: ignore[no-untyped-def]
    return [dy.new_empty(0) if p is None else p.new_empty(p.shape) for p in (total, weight, bias)]


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, residual, weight, bias = inputs[:4]
    y, total = output
    ctx.save_for_backward(x if residual is None else total, weight, bias)
    ctx.options, ctx.dtypes = inputs[4:], (x.dtype, None if residual is None else residual.dtype, y.dtype)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dtotal):  # type: ignore[no-untyped-def]
    total, weight, bias = ctx.saved_tensors
    of_x, of_residual, of_y = ctx.dtypes
    dy = torch.zeros_like(total, dtype=of_y) if dy is None else dy
    grad, dweight, dbias = _op_backward(dy, None if of_residual is None else dtotal, total, weight, bias, *ctx.options)
    dresidual = None if of_residual is None else grad.to(of_residual)
    return (
        grad.to(of_x), dresidual, None if weight is None else dweight, None if bias is None else dbias,
        None, None, None,
    )  # fmt: skip


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("residual_norm", "Triton"))


def run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool = False,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise, with the arguments of `residual_norm`."""
    if x.numel() == 0:
        done: tuple[Tensor, Tensor] = implementation("residual_norm", "torch").run(
            x, residual, weight, bias, eps, centred, one_plus
        )
        return done
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(rows.shape)
    y, total = _op(rows, added, weight, bias, eps, centred, one_plus)
    return y.view(x.shape), x if residual is None else total.view(x.shape)


@common.can_unless
def _can(**facts: Any) -> str:
    width = facts.get("width", 1)
    return f"{width} features; at most {MAX_FEATURES}" if width > MAX_FEATURES else ""


def _tiles(arch: str, width: int, **facts: Any) -> dict[str, dict[str, int]]:
    return {phase: common.tiles_of_rows(width, MAX_FEATURES, phase == "backward") for phase in ("forward", "backward")}


def _example(
    width: int, residual: bool = False, centred: bool = False, one_plus: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.residual_norm import residual_norm

    tensors = {"x": normal(70, width), "weight": normal(width, seed=1), "bias": normal(width, seed=2)}
    if residual:
        tensors["residual"] = normal(70, width, seed=3)
    return residual_norm, tensors, {"centred": centred, "one_plus": one_plus}


register("residual_norm", "triton", run, _can, _tiles, _example)
