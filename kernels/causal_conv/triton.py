"""The depthwise causal convolution in Triton: one launch forward, one backward.

A program processes BD channels of a run of T tokens in the order of the scan, with the last K - 1 inputs in registers,
so that each number is read and converted once. It also applies bias and SiLU. Before its run, a program reads K - 1
earlier tokens, from x or the carried state, without writing; a reset clears this window. Tensors are neither
concatenated nor flipped.

The backward pass proceeds in the same order, recomputes the values before the SiLU, and holds the gradients of the last
K - 1 inputs until no later output adds to them: x and dy are read and dx is written once. Gradients of weight and bias
are stored as partial sums, one for each run, and added afterwards in a fixed order.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import few_of, launch_size, normal
from seqblocks.kernels.numerics import empty_with_gradients, no_second_derivative
from seqblocks.kernels.resets import along, backward_marks
from seqblocks.kernels.triton_common import ceil_div, exp, jit, last_contiguous, reciprocal, silu, tl

MAX_TAPS = 8  # because windows are held in registers
MIN_WARPS = 2048  # of a launch, if runs of 8 tokens allow it: a large GPU runs as many at a time


# ------------------------------------------------------------------------------
# The kernels.   x, y [B, S, D], w [D, K], bias [D], state [B, K-1, D], resets [B, S]; xb, xs: strides of x over batch
# and tokens.   p counts tokens in the order of the scan; those of the state are -(K-1) .. -1, the newest last.


@jit
@no_type_check
def _read(x, state, d, b, p, S, D, xb, xs, K: tl.constexpr, EDGE: tl.constexpr, REVERSE: tl.constexpr):
    """Load token p, or zeros where there is none. EDGE: p may be a token of the state; the result is then float32."""
    t = S - 1 - p if REVERSE else p
    value = tl.load(x + b * xb + t * xs + d, d < tl.where((p >= 0) & (p < S), D, 0), 0.0)
    if EDGE:
        past = d < tl.where((p < 0) & (p > -K), D, 0)
        old = tl.load(state + (b * (K - 1) + p + K - 1) * D + d, past, 0.0)
        value = tl.where(p < 0, old.to(tl.float32), value.to(tl.float32))
    return value


@jit
@no_type_check
def _mark(resets, b, p, S, REVERSE: tl.constexpr):
    """Load the mark of token p, as defined by `backward_marks` in the backward pass."""
    t = S - 1 - p if REVERSE else p
    return tl.load(resets + b * S + t, (p >= 0) & (p < S), 0).to(tl.int32)


@jit
@no_type_check
def _copies(value, COUNT: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (value,)
    return out


@jit
@no_type_check
def _blank(x, COUNT: tl.constexpr):
    """Return a tuple of COUNT zeros like x."""
    return _copies(x * 0.0, COUNT)


@jit
@no_type_check
def _emptied(window, mark, COUNT: tl.constexpr):
    """Return the window with zeros where the mark says that a sequence begins."""
    out = ()
    for at in tl.static_range(COUNT):
        out = out + (tl.where(mark, 0.0, window[at]),)
    return out


@jit
@no_type_check
def _pushed(window, value, COUNT: tl.constexpr, FROM: tl.constexpr):
    """Return COUNT elements: the new value, followed by those of the window from index FROM on."""
    out = ()
    if COUNT > 0:
        out = (value,)
    for at in tl.static_range(COUNT - 1):
        out = out + (window[FROM + at],)
    return out


@jit
@no_type_check
def _taps(w, d, is_channel, K: tl.constexpr):
    """Load the taps by lag, in float32."""
    out = ()
    for lag in tl.static_range(K):
        out = out + (tl.load(w + d * K + K - 1 - lag, is_channel, 0.0).to(tl.float32),)
    return out


@jit
@no_type_check
def _offset(bias, d, is_channel, like):
    out = like * 0.0
    if bias is not None:
        out = tl.load(bias + d, is_channel, 0.0).to(tl.float32)
    return out


@jit
@no_type_check
def _window_before(
    x, state, resets, taps, d, b, p, S, D, xb, xs, K: tl.constexpr, REVERSE: tl.constexpr, BACKWARD: tl.constexpr
):
    """Load the window before token p: the K - 1 tokens that precede it."""
    window = _blank(taps[0], K - 1)
    for j in tl.static_range(K - 1):
        at = p - (K - 1) + j
        if resets is not None:
            mark = _mark(resets, b, at, S, REVERSE)
            window = _emptied(window, mark != 0, K - 1)
        value = _read(x, state, d, b, at, S, D, xb, xs, K, True, REVERSE)
        if resets is not None:
            if BACKWARD:
                value = tl.where(mark >= 2, 0.0, value)
        window = _pushed(window, value, K - 1, 0)
    return window


@jit
@no_type_check
def _convolved(taps, offset, value, window, K: tl.constexpr):
    out = offset + taps[0] * value
    for lag in tl.static_range(1, K):
        out += taps[lag] * window[lag - 1]
    return out


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _conv(
    x, w, bias, state, resets, y, S, D, xb, xs,
    SILU: tl.constexpr, REVERSE: tl.constexpr, K: tl.constexpr, T: tl.constexpr, BD: tl.constexpr,
    STEPS: tl.constexpr,
):
    runs = tl.cdiv(S, T)
    b = (tl.program_id(0) // runs).to(tl.int64)
    first = (tl.program_id(0) % runs).to(tl.int64) * T
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    is_channel = d < D
    taps = _taps(w, d, is_channel, K)
    offset = _offset(bias, d, is_channel, taps[0])
    window = _window_before(x, state, resets, taps, d, b, first, S, D, xb, xs, K, REVERSE, False)
    for i in range(0, T, STEPS):
        values, marks = (), ()
        for j in tl.static_range(STEPS):  # These loads are independent, so their latencies overlap.
            values = values + (_read(x, state, d, b, first + i + j, S, D, xb, xs, K, False, REVERSE),)
            if resets is not None:
                marks = marks + (_mark(resets, b, first + i + j, S, REVERSE) != 0,)
        for j in tl.static_range(STEPS):
            p = first + i + j
            value = values[j].to(tl.float32)
            if resets is not None:
                window = _emptied(window, marks[j], K - 1)
            out = _convolved(taps, offset, value, window, K)
            window = _pushed(window, value, K - 1, 0)
            if SILU:
                out = silu(out)
            t = S - 1 - p if REVERSE else p
            tl.store(y + (b * S + t) * D + d, out.to(y.dtype.element_ty), d < tl.where(p < S, D, 0))


@jit
@no_type_check
def _pre_gradient(grad, taps, offset, value, window, SILU: tl.constexpr, K: tl.constexpr):
    """Return the gradient of the input of the SiLU."""
    out = grad.to(tl.float32)
    if SILU:
        before = _convolved(taps, offset, value, window, K)
        gate = reciprocal(1.0 + exp(-before))
        out *= gate * (1.0 + before * (1.0 - gate))
    return out


@jit
@no_type_check
def _spread(waiting, reaches, taps, g, K: tl.constexpr, RESETS: tl.constexpr):
    """Return the gradients of the current token and the K - 1 before it, with the terms of the current output."""
    out = (taps[0] * g,)
    for lag in tl.static_range(1, K):
        part = taps[lag] * g
        if RESETS:
            part = tl.where(reaches[lag - 1], part, 0.0)
        out = out + (waiting[lag - 1] + part,)
    return out


@jit
@no_type_check
def _reaching(reaches, mark, COUNT: tl.constexpr):
    """Return for each lag whether it still belongs to the sequence of the current token."""
    out = ()
    if COUNT > 0:
        out = (mark == 0,)
    for at in tl.static_range(COUNT - 1):
        out = out + (reaches[at] & (mark == 0),)
    return out


@jit
@no_type_check
def _write(dx, dstate, value, b, p, first, S, D, d, K: tl.constexpr, REVERSE: tl.constexpr):
    """Store the gradient of token p, which may be a token of the state."""
    t = S - 1 - p if REVERSE else p
    own = d < tl.where((p >= first) & (p >= 0) & (p < S), D, 0)
    tl.store(dx + (b * S + t) * D + d, value.to(dx.dtype.element_ty), own)
    if p < 0:
        to = dstate + (b * (K - 1) + p + K - 1) * D + d
        tl.store(to, value.to(dstate.dtype.element_ty), d < tl.where(p >= first, D, 0))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def _conv_backward(
    dy, x, w, bias, state, resets, dx, dstate, dw, dbias, S, D, gb, gs, xb, xs,
    SILU: tl.constexpr, REVERSE: tl.constexpr, K: tl.constexpr, T: tl.constexpr, BD: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute gradients. Partial sums: dw [programs, K, D], dbias [programs, D]. Runs cover the state and x."""
    runs = tl.cdiv(S + K - 1, T)
    b = (tl.program_id(0) // runs).to(tl.int64)
    first = (tl.program_id(0) % runs).to(tl.int64) * T - (K - 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    is_channel = d < D
    taps = _taps(w, d, is_channel, K)
    offset = _offset(bias, d, is_channel, taps[0])
    window = _window_before(x, state, resets, taps, d, b, first, S, D, xb, xs, K, REVERSE, True)
    waiting = _blank(taps[0], K - 1)
    reaches = _copies(first == first, K - 1)
    sums = _blank(taps[0], K)
    total = taps[0] * 0.0
    for i in range(0, T, STEPS):
        values, grads, marks = (), (), ()
        for j in tl.static_range(STEPS):
            at = first + i + j
            values = values + (_read(x, state, d, b, at, S, D, xb, xs, K, K > 1, REVERSE),)
            grads = grads + (_read(dy, state, d, b, at, S, D, gb, gs, K, False, REVERSE),)
            if resets is not None:
                marks = marks + (_mark(resets, b, at, S, REVERSE),)
        for j in tl.static_range(STEPS):
            value = values[j].to(tl.float32)
            if resets is not None:
                window = _emptied(window, marks[j] != 0, K - 1)
                value = tl.where(marks[j] >= 2, 0.0, value)
                reaches = _reaching(reaches, marks[j], K - 1)
            g = _pre_gradient(grads[j], taps, offset, value, window, SILU, K)
            total += g
            added = (sums[0] + g * value,)
            for lag in tl.static_range(1, K):
                added = added + (sums[lag] + g * window[lag - 1],)
            sums = added
            spread = _spread(waiting, reaches, taps, g, K, resets is not None)
            waiting = _pushed(spread, spread[0], K - 1, 1)
            window = _pushed(window, value, K - 1, 0)
            _write(dx, dstate, spread[K - 1], b, first + i + j - (K - 1), first, S, D, d, K, REVERSE)
    for j in tl.static_range(K - 1):  # later outputs whose windows reach into this run
        at = first + T + j
        value = _read(x, state, d, b, at, S, D, xb, xs, K, True, REVERSE)
        grad = _read(dy, state, d, b, at, S, D, gb, gs, K, False, REVERSE)
        if resets is not None:
            mark = _mark(resets, b, at, S, REVERSE)
            window = _emptied(window, mark != 0, K - 1)
            value = tl.where(mark >= 2, 0.0, value)
            reaches = _reaching(reaches, mark, K - 1)
        g = _pre_gradient(grad, taps, offset, value, window, SILU, K)
        spread = _spread(waiting, reaches, taps, g, K, resets is not None)
        waiting = _pushed(spread, spread[0], K - 1, 1)
        window = _pushed(window, value, K - 1, 0)
        _write(dx, dstate, spread[K - 1], b, at - (K - 1), first, S, D, d, K, REVERSE)
    part = tl.program_id(0).to(tl.int64)
    for lag in tl.static_range(K):
        tl.store(dw + (part * K + K - 1 - lag) * D + d, sums[lag], is_channel)
    if bias is not None:
        tl.store(dbias + part * D + d, total, is_channel)


# ------------------------------------------------------------------------------
# Launching


def tiles(length: int, width: int, batch: int, dtype: torch.dtype, backward: bool) -> dict[str, int]:
    """Return the tokens of a run (T), channels of a program (BD), tokens loaded ahead (STEPS) and warps.

    A thread has as many channels as it reads at once (16 bytes); half as many in the backward pass, which needs more
    registers for each. Runs are long, because the K - 1 tokens before each are read twice, but not so long that there
    are too few programs.
    """
    each = 16 // dtype.itemsize // (2 if backward else 1)
    BD = min(max(32, common.power_of_two(width)), 32 * each)
    sizes = ("length", length), ("batch", batch), ("width", width)
    length, batch, width = (launch_size(*of) for of in sizes)
    T = min(64, max(8, common.power_of_two(length)))
    while T > 8 and batch * ceil_div(length, T) * ceil_div(width, BD) < MIN_WARPS:
        T //= 2
    return {"T": T, "BD": BD, "STEPS": 4, "num_warps": 1}


def _laid_out(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Any:
    return last_contiguous(x), weight.contiguous(), None if bias is None else bias.contiguous(), state.contiguous()


@custom_op("seqblocks::causal_conv_triton")
def _op(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, silu: bool, reverse: bool
) -> Tensor:
    batch, S, D = x.shape
    x, weight, bias, state = _laid_out(x, weight, bias, state)
    y, resets = _op_fake(x, weight, bias, state, resets, silu, reverse), common.marks(resets)
    K = weight.shape[-1]
    tile = tiles(S, D, batch, x.dtype, False)
    with common.on(x):
        _conv[batch * ceil_div(S, tile["T"]), ceil_div(D, tile["BD"])](
            x, weight, bias, state, resets, y, S, D, *x.stride()[:2], SILU=silu, REVERSE=reverse, K=K, **tile,
        )
    return y


@_op.register_fake
def _op_fake(x, weight, bias, state, resets, silu, reverse):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@custom_op("seqblocks::causal_conv_triton_backward")
def _op_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias (empty without a bias) and state."""
    batch, S, D = x.shape
    K = weight.shape[-1]
    dy, resets = last_contiguous(dy), backward_marks([dy], [], resets, reverse)
    x, weight, bias, state = _laid_out(x, weight, bias, state)
    if resets is not None:  # Where the first token is a reset, the state is not used and may not be finite.
        state = state.masked_fill(along(resets[:, -1 if reverse else 0] != 0, state), 0.0)
    dx, dstate = x.new_empty(x.shape), state.new_empty(state.shape)
    tile = tiles(S, D, batch, x.dtype, True)
    programs = batch * ceil_div(S + K - 1, tile["T"])
    dw = x.new_empty(programs, K, D, dtype=torch.float32)
    dbias = dw.new_empty(0) if bias is None else dw.new_empty(programs, D)
    with common.on(x):
        _conv_backward[programs, ceil_div(D, tile["BD"])](
            dy, x, weight, bias, state, resets, dx, dstate, dw, dbias, S, D, *dy.stride()[:2], *x.stride()[:2],
            SILU=silu, REVERSE=reverse, K=K, **tile,
        )
    # The result is contiguous even with one tap, as the fake op states.
    dweight = dw.sum(0).t().to(weight.dtype).reshape(-1).view(weight.shape)
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


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("causal_conv", "Triton"))


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, activation: str | None,
    reverse: bool,
) -> Tensor:
    """Return y of `causal_conv` for a depthwise weight."""
    if x.numel() == 0:
        return empty_with_gradients(x.to(torch.promote_types(x.dtype, weight.dtype)), x, weight, bias)
    marks = common.marks(resets)
    return _op(x, weight[:, 0], bias, state, marks, activation == "silu", reverse)


@common.can_unless
def _can(**facts: Any) -> str:
    if facts.get("mixing"):
        return "a convolution that mixes channels is a matrix product: torch's own is used"
    if facts.get("taps", 1) > MAX_TAPS:
        return f"{facts['taps']} taps; at most {MAX_TAPS}"
    return ""


def _tiles(
    arch: str, width: int, length: int = 1 << 20, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    dtype = (dtypes or {}).get("x", dtype)
    return {phase: tiles(length, width, batch, dtype, phase == "backward") for phase in ("forward", "backward")}


def _example(
    width: int, taps: int, activation: str | None = "silu", resets: bool = False, reverse: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.causal_conv import causal_conv

    D = few_of(width, 256)
    tensors = {"x": normal(2, 70, D), "weight": normal(D, 1, taps, seed=1), "bias": normal(D, seed=2)}
    tensors["state"] = normal(2, taps - 1, D, seed=3)
    options: dict[str, Any] = {"reverse": reverse, "activation": activation, "return_state": True}
    if resets:
        options["resets"] = (normal(2, 70) > 1.5).to(facts["device"])
    return causal_conv, tensors, options


register("causal_conv", "triton", run, _can, _tiles, _example)
