"""The depthwise causal convolution in Triton: one launch forward, one backward.

A program owns a tile of BT tokens and BD channels; the taps are shifted loads, which the cache serves. Bias and SiLU
are part of it. Windows reach into the carried state and stop at resets by index: nothing is joined, padded or flipped.

The backward pass goes by inputs: token s meets the outputs at lags 0 .. K-1, whose values before the SiLU are made
again. That is K^2 multiplications instead of K, and in return x, dy and dx are all that is moved. The weight's gradient
is stored in parts, one for each tile of tokens, and added afterwards in an order that does not vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels import tuning
from seqblocks.kernels.dispatch import nothing, register
from seqblocks.kernels.self_check import normal
from seqblocks.kernels.triton_common import exp, jit, lined, tl, up

TAPS = 8  # at most: the backward pass is unrolled to TAPS^2
AXES = {"BT": (8, 16, 32, 64, 128), "BD": (32, 64, 128), "num_warps": (1, 2, 4, 8)}  # for tuning


# ------------------------------------------------------------------------------
# The kernels.   Places: x, y [B, S, D], w [D, K], bias [D], state [B, K-1, D], resets [B, S].   Token -1 is the newest
# of the state; in reverse it is token S.   t, s [BT] and d [BD] are indices, xb, xs strides of x over batch and tokens.


@jit
@no_type_check
def _input(x, state, b, s, d, S, D, xb, xs, K: tl.constexpr, REVERSE: tl.constexpr):
    """[BT, BD] in float32, zero where there is nothing."""
    live = (d < D)[None, :]
    value = tl.load(
        x + b * xb + s[:, None] * xs + d[None, :], (s >= 0)[:, None] & (s < S)[:, None] & live, 0.0
    ).to(tl.float32)
    if K > 1:
        place = S + K - 2 - s if REVERSE else s + K - 1  # in the state, oldest first
        before = (place >= 0) & (place < K - 1) & ((s >= S) if REVERSE else (s < 0))
        value += tl.load(
            state + (b * (K - 1) + place[:, None]) * D + d[None, :], before[:, None] & live, 0.0
        ).to(tl.float32)
    return value


@jit
@no_type_check
def _marked(resets, b, t, S):
    return tl.load(resets + b * S + t, (t >= 0) & (t < S), 0) != 0


@jit
@no_type_check
def _convolved(
    x, w, bias, state, resets, b, t, d, S, D, xb, xs, K: tl.constexpr, REVERSE: tl.constexpr
):
    """[BT, BD]: the sum over taps at tokens t."""
    y = _input(x, state, b, t, d, S, D, xb, xs, K, REVERSE)
    y *= tl.load(w + d * K + K - 1, d < D, 0.0).to(tl.float32)[None, :]
    if resets is not None:
        cut = _marked(resets, b, t, S)
    for lag in tl.static_range(1, K):
        s = t + lag if REVERSE else t - lag
        value = _input(x, state, b, s, d, S, D, xb, xs, K, REVERSE)
        if resets is not None:
            value = tl.where(cut[:, None], 0.0, value)
            cut = cut | _marked(resets, b, s, S)
        y += tl.load(w + d * K + K - 1 - lag, d < D, 0.0).to(tl.float32)[None, :] * value
    if bias is not None:
        y += tl.load(bias + d, d < D, 0.0).to(tl.float32)[None, :]
    return y


@jit(do_not_specialize=["S"])
@no_type_check
def _conv(
    x, w, bias, state, resets, y, S, D, xb, xs,
    SILU: tl.constexpr, REVERSE: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    tiles = tl.cdiv(S, BT)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    t = (tl.program_id(0) % tiles).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    out = _convolved(x, w, bias, state, resets, b, t, d, S, D, xb, xs, K, REVERSE)
    if SILU:
        out = out / (1.0 + exp(-out))
    tl.store(
        y + (b * S + t)[:, None] * D + d[None, :], out.to(y.dtype.element_ty), (t < S)[:, None] & (d < D)[None, :]
    )


@jit(do_not_specialize=["S"])
@no_type_check
def _conv_backward(
    dy, x, w, bias, state, resets, dx, dstate, dw, dbias, S, D, gb, gs, xb, xs,
    SILU: tl.constexpr, REVERSE: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):
    """Parts: dw [tiles, K, D], dbias [tiles, D]. Rows of the tiles are the tokens and those of the state."""
    tiles = tl.cdiv(S + K - 1, BT)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    s = (tl.program_id(0) % tiles).to(tl.int64) * BT + tl.arange(0, BT)
    if not REVERSE:
        s -= K - 1
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    live = (d < D)[None, :]
    value = _input(x, state, b, s, d, S, D, xb, xs, K, REVERSE)
    grad = tl.zeros((BT, BD), tl.float32)
    cut = s < -K  # nothing yet
    part = tl.program_id(0).to(tl.int64)
    for lag in tl.static_range(K):
        t = s - lag if REVERSE else s + lag
        g = tl.load(
            dy + b * gb + t[:, None] * gs + d[None, :], (t >= 0)[:, None] & (t < S)[:, None] & live, 0.0
        ).to(tl.float32)
        if SILU:
            before = _convolved(x, w, bias, state, resets, b, t, d, S, D, xb, xs, K, REVERSE)
            gate = 1.0 / (1.0 + exp(-before))
            g *= gate * (1.0 + before * (1.0 - gate))
        if lag == 0:
            if bias is not None:
                tl.store(dbias + part * D + d, tl.sum(g, 0), d < D)
        elif resets is not None:
            cut = cut | _marked(resets, b, t, S)
            g = tl.where(cut[:, None], 0.0, g)
        grad += tl.load(w + d * K + K - 1 - lag, d < D, 0.0).to(tl.float32)[None, :] * g
        tl.store(dw + (part * K + K - 1 - lag) * D + d, tl.sum(g * value, 0), d < D)
    inside = ((s >= 0) & (s < S))[:, None] & live
    tl.store(dx + (b * S + s)[:, None] * D + d[None, :], grad.to(dx.dtype.element_ty), inside)
    if K > 1:
        place = S + K - 2 - s if REVERSE else s + K - 1
        before = (place >= 0) & (place < K - 1) & ((s >= S) if REVERSE else (s < 0))
        tl.store(
            dstate + (b * (K - 1) + place[:, None]) * D + d[None, :],
            grad.to(dstate.dtype.element_ty), before[:, None] & live,
        )


# ------------------------------------------------------------------------------
# Launching


def tiles(length: int, width: int, backward: bool, arch: str) -> dict[str, int]:
    """Tokens and channels of a program, and its warps.

    Backward, half as many elements a thread leave room for K^2 taps. AMD's compiler takes twice the registers for an
    element, so that the same number of warps is right although they are twice as wide.
    """
    BD = min(common.power_of_two(width), 64)
    BT = min(common.power_of_two(length), 2048 // BD)
    return {"BT": BT, "BD": BD, "num_warps": common.warps(BT * BD, 8 if backward else 16)}


def _laid_out(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Any:
    return lined(x), weight.contiguous(), None if bias is None else bias.contiguous(), state.contiguous()


def _launch(way: str, x: Tensor, K: int, tile: tuning.Tile, go: tuning.Go) -> Sequence[Tensor]:
    about = (x.shape[2], K, x.dtype, *map(common.power_of_two, x.shape[:2]))
    return tuning.launch(f"causal_conv.{way}", about, x, tile, AXES, go)


@torch.library.custom_op("seqblocks::causal_conv_triton", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, silu: bool, reverse: bool
) -> Tensor:
    batch, S, D = x.shape
    x, weight, bias, state = _laid_out(x, weight, bias, state)
    y = _op_fake(x, weight, bias, state, resets, silu, reverse)
    K = weight.shape[-1]

    def go(tile: tuning.Tile) -> Sequence[Tensor]:
        _conv[batch * up(S, tile["BT"]), up(D, tile["BD"])](
            x, weight, bias, state, resets, y, S, D, *x.stride()[:2], SILU=silu, REVERSE=reverse, K=K, **tile,
        )
        return (y,)

    with common.on(x):
        _launch("forward", x, K, tiles(S, D, False, common.arch(x)), go)
    return y


@_op.register_fake
def _op_fake(x, weight, bias, state, resets, silu, reverse):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@torch.library.custom_op("seqblocks::causal_conv_triton_backward", mutates_args=())
def _op_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias (empty where there is none) and state."""
    batch, S, D = x.shape
    K = weight.shape[-1]
    dy = lined(dy)
    x, weight, bias, state = _laid_out(x, weight, bias, state)
    dx, dstate = x.new_empty(x.shape), state.new_empty(state.shape)

    def go(tile: tuning.Tile) -> Sequence[Tensor]:
        programs = batch * up(S + K - 1, tile["BT"])
        dw = x.new_empty(programs, K, D, dtype=torch.float32)
        dbias = dw.new_empty(0) if bias is None else dw.new_empty(programs, D)
        _conv_backward[programs, up(D, tile["BD"])](
            dy, x, weight, bias, state, resets, dx, dstate, dw, dbias, S, D, *dy.stride()[:2], *x.stride()[:2],
            SILU=silu, REVERSE=reverse, K=K, **tile,
        )
        return dw, dbias, dx, dstate

    with common.on(x):
        dw, dbias, *_ = _launch("backward", x, K, tiles(S + K - 1, D, True, common.arch(x)), go)
    dweight = dw.sum(0).t().contiguous().to(weight.dtype)
    return dx, dweight, dbias if bias is None else dbias.sum(0).to(bias.dtype), dstate


@_op_backward.register_fake
def _op_backward_fake(dy, x, weight, bias, state, resets, silu, reverse):  # type: ignore[no-untyped-def]
    db = x.new_empty(0, dtype=torch.float32) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), db, state.new_empty(state.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, silu, reverse = inputs
    ctx.save_for_backward(*tensors)
    ctx.flags = silu, reverse


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    x, weight, bias, state, resets = ctx.saved_tensors
    dx, dweight, dbias, dstate = _op_backward(dy, x, weight, bias, state, resets, *ctx.flags)
    return dx, dweight, None if bias is None else dbias, dstate, None, None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise RuntimeError("the Triton form of causal_conv has no second derivative; use backend='reference' for it")


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(_refuse)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, activation: str | None,
    reverse: bool,
) -> Tensor:
    """y of `causal_conv`, for a depthwise weight."""
    if x.numel() == 0:
        return nothing(x.to(torch.promote_types(x.dtype, weight.dtype)), x, weight, bias)
    marks = None if resets is None else resets.to(torch.uint8).contiguous()
    return _op(x, weight[:, 0], bias, state, marks, activation == "silu", reverse)


def _can(**facts: Any) -> tuple[bool, str]:
    can, reason = common.can(**facts)
    if can and facts.get("mixing"):
        return False, "a convolution that mixes channels is matrix products: torch's own serves it"
    if can and facts.get("taps", 1) > TAPS:
        return False, f"{facts['taps']} taps; at most {TAPS}"
    return can, reason


def _tiles(arch: str, width: int, length: int = 1 << 20, **facts: Any) -> dict[str, dict[str, int]]:
    return {way: tiles(length, width, way == "backward", arch) for way in ("forward", "backward")}


def _example(width: int, taps: int, resets: bool = False, reverse: bool = False, **facts: Any) -> Any:
    from seqblocks.kernels.causal_conv import causal_conv

    D = min(width, 64)
    tensors = {"x": normal(2, 70, D), "weight": normal(D, 1, taps, seed=1), "bias": normal(D, seed=2)}
    options: dict[str, Any] = {"reverse": reverse, "activation": "silu", "return_state": True}
    if resets:
        options["resets"] = (normal(2, 70) > 1.5).to(facts["device"])
    return causal_conv, tensors, options


register("causal_conv", "triton", run, _can, _tiles, _example)
