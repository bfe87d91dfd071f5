"""Causal convolution along the sequence, with carried windows.

B batch, S sequence, D channels, K taps, l = 0 .. K-1 the lag of a tap.

    y_t = bias + sum_l w[K-1-l] x_(t-l)          depthwise: w [D, 1, K];  mixing channels: w [D_out, D, K]

The state consists of the last K-1 inputs, oldest first, which the next token needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.dispatch.custom_op import is_batch
from seqblocks.kernels.positions import check_resets
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained, finite, where_true

SUM_MAX_TOKENS = 8  # tokens: for at most this many, the sum over taps is faster than a convolution
SUM_TOKENS = 64  # tokens summed at a time in the weight's gradient, so that the sums stay in cache
PART_ELEMENTS = 1 << 18  # elements convolved at a time, so that copies and results of a long sequence stay in cache


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: str | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve x [B, S, D] with weight [D, 1, K] (each channel by itself) or [D_out, D, K] (mixing channels).

    Tap K-1 multiplies the current token. For D = D_out = 1, both shapes of the weight agree.
    activation: None or "silu", applied to the result. bias [D_out].
    state [B, K-1, D]: the inputs before x in the order of the scan, oldest first; zeros if not given.
    resets [B, S] bool: true where a token is the first of a new sequence, in the order of the scan; no window
    reaches across a reset.
    reverse: scan from right to left: windows extend to the right, and the state contains the inputs right of x.

    Returns y [B, S, D_out], in the dtype to which torch promotes x and weight, and with return_state also the next
    state, in the dtype of x, where inputs before the last reset are zeros. To stream token by token, call with S = 1.
    The Triton implementation has first derivatives only.
    Raises ValueError for wrong shapes or an unknown activation, BackendError (see dispatch).
    """
    mixing = _check(x, weight, bias, activation, state, resets)
    K = weight.shape[-1]
    dispatch.check_real("causal_conv", {"state": state}, ("state",) if x.is_complex() else ())
    state = x.new_zeros(x.shape[0], K - 1, x.shape[2]) if state is None else state.to(x.dtype)
    inputs = {"x": x, "weight": weight, "bias": bias, "state": state, "resets": resets}
    run = dispatch.choose(
        "causal_conv", backend, inputs, {"batch": x.shape[0], "length": x.shape[1], "width": x.shape[2]},
        may_be_complex=inputs if x.is_complex() else (),
        dtype=torch.promote_types(x.dtype, weight.dtype), taps=K, width=x.shape[2], mixing=mixing,
        activation=activation, resets=resets is not None, reverse=reverse,
    )
    y = run(x, weight, bias, state, resets, activation, reverse)
    return (y, _last(x, state, resets, K, reverse)) if return_state else y


def _windowed(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an implementation of convolve(x, state, weight, bias, segment, activation, reverse) -> y.

    segment: the number of resets up to each position of the window, [B, S + K - 1], or None.
    """

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, resets: Tensor | None, activation: str | None,
        reverse: bool,
    ) -> Tensor:
        segment = None if resets is None else _segments(resets, weight.shape[-1], reverse)

        def convolved(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
            # A window that extends to the right equals one to the left with its taps in reverse order.
            return (convolve(x, state, weight.flip(-1) if reverse else weight, bias, segment, activation, reverse),)

        tensors, kinds = (x, state, weight, bias), (TOKENS, STATE, SHARED, SHARED)
        return contained(convolved, tensors, kinds, resets, reverse)[0]

    return run


def _activated(y: Tensor, activation: str | None) -> Tensor:
    """Return the activation of y, which may be overwritten."""
    # In place if no derivative needs y: for a long sequence, allocating memory takes longer than the SiLU.
    return F.silu(y, inplace=not torch.is_grad_enabled()) if activation == "silu" else y


def _window(x: Tensor, state: Tensor, reverse: bool) -> Tensor:
    if state.shape[1] == 0:
        return x
    return torch.cat([x, state.flip(1)] if reverse else [state, x], 1)


def _segments(resets: Tensor, K: int, reverse: bool) -> Tensor:
    """Return the number of resets up to and including each position of the window: [B, S + K - 1]."""
    count = resets.long()
    count = count.flip(1).cumsum(1).flip(1) if reverse else count.cumsum(1)
    return F.pad(count, (0, K - 1) if reverse else (K - 1, 0))


def _last(x: Tensor, state: Tensor, resets: Tensor | None, K: int, reverse: bool) -> Tensor:
    """Return the last K-1 inputs of the scan, oldest first."""
    if K == 1:
        return x[:, :0]
    if not torch.compiler.is_compiling():  # A compiler skips the unused part of the window by itself.
        recent = slice(0, K - 1) if reverse else slice(1 - K, None)
        x, resets = x[:, recent], None if resets is None else resets[:, recent]
        if resets is None and not reverse:
            return torch.cat([state[:, x.shape[1] :], x], 1)  # This saves operations in the most frequent case.
    window = _window(x, state, reverse)
    P = window.shape[1]
    span = slice(0, K - 1) if reverse else slice(P - K + 1, P)
    tail = window[:, span]
    if resets is not None:
        segment = _segments(resets, K, reverse)
        newest = segment[:, :1] if reverse else segment[:, P - 1 :]
        tail = tail.masked_fill((segment[:, span] != newest).unsqueeze(-1), 0.0)
    return tail.flip(1) if reverse else tail.clone()  # A view would keep the memory of the whole window allocated.


def _tap(x: Tensor, weight: Tensor, j: int) -> Tensor:
    """Return the product of tap j with inputs x [B, S, D]."""
    w = weight[..., j]
    return x * w[:, 0] if _depthwise(x, weight) else x @ w.t()


def _depthwise(x: Tensor, weight: Tensor) -> bool:
    return weight.shape[1] == 1 and weight.shape[0] == x.shape[-1]


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None, segment: Tensor | None, reverse: bool) -> Tensor:
    """Return the convolution as a sum over taps."""
    K = weight.shape[-1]
    S = window.shape[1] - K + 1
    now = slice(0, S) if reverse else slice(K - 1, K - 1 + S)
    known = segment is not None and finite(window)

    def tap(j: int) -> Tensor:
        part = window[:, j : j + S]
        if segment is not None:
            part = where_true((segment[:, j : j + S] == segment[:, now]).unsqueeze(-1), part, known)
        return _tap(part, weight, j)

    y = tap(0)
    for j in range(1, K):
        y = y + tap(j)
    return y if bias is None else y + bias


def _reference(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, segment: Tensor | None, activation: str | None,
    reverse: bool,
) -> Tensor:
    """Return the convolution by its definition, computed in float32 at least."""
    window = _window(x, state, reverse)
    out = torch.promote_types(window.dtype, weight.dtype)
    dtype = torch.promote_types(out, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    return _activated(_taps(window.to(dtype), weight.to(dtype), bias, segment, reverse).to(out), activation)


def _fast(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, segment: Tensor | None, activation: str | None,
    reverse: bool,
) -> Tensor:
    """Return the convolution by torch's conv2d on channels-last data, which needs no transposed copy."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    x, state, weight, bias = x.to(dtype), state.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # The sum over taps is better for compilers, which fuse it, for float64, which has no fast convolution, and for few
    # tokens, where the overhead of the call dominates.
    plain = segment is not None or dtype == torch.float64 or torch.compiler.is_compiling()
    if plain or x.shape[1] <= SUM_MAX_TOKENS or x.numel() == 0:
        return _activated(_taps(_window(x, state, reverse), weight, bias, segment, reverse), activation)
    if not _depthwise(x, weight):
        return _activated(_convolve(_window(x, state, reverse), weight, bias, 0), activation)
    save = activation == "silu" and _is_saved(x, state, weight, bias)
    y: Tensor = _Depthwise.apply(x, state, weight, bias, activation, reverse, save)[0]
    return y


def _is_saved(*inputs: Tensor | None) -> bool:
    """Return whether the values before the activation are saved for the backward pass."""
    needed = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
    return needed and inputs[0] is not None and numerics.is_worth_saving(inputs[0])


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolve x [B, P, D] and return [B, P + 2 padding - K + 1, D_out].

    x is passed to conv2d as a channels-last image of height 1, which has the same layout in memory.
    """

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(x.unsqueeze(2), weight.unsqueeze(2), bias, padding=(0, padding), groups=groups)

    return numerics.in_float32(convolved, x.transpose(1, 2), weight, bias).squeeze(2).transpose(1, 2)


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution and activation, a chunk of the sequence at a time, in half the time of the built-in ones.

    The backward pass computes the windows again, and of long sequences the values before the activation too.
    """

    @staticmethod
    def forward(
        x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, reverse: bool,
        save: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the values before the activation if they are saved."""
        with numerics.without_autocast(x.device.type):
            chunks = _chunks(x)
            if len(chunks) == 1:
                before = _depthwise_chunk(x, state, weight, bias, reverse, chunks[0])
                return (F.silu(before), before) if save else (_silu(before, activation), None)
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            saved = torch.empty_like(y) if save else None
            for a, b in chunks:
                before = _depthwise_chunk(x, state, weight, bias, reverse, (a, b))
                if saved is not None:
                    saved[:, a:b] = before
                y[:, a:b] = _silu(before, activation)
            return y, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        *tensors, ctx.activation, ctx.reverse, _ = inputs
        ctx.set_materialize_grads(False)
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
        if dy is None:
            return (None,) * 7
        with numerics.without_autocast(dy.device.type):
            return *_gradients(ctx, dy, *saved), None, None, None


def _gradients(
    ctx: Any, dy: Tensor, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, saved: Tensor | None
) -> list[Tensor | None]:
    """Return the needed gradients of x, state, weight and bias of `_Depthwise`."""
    if torch.is_grad_enabled() or is_batch(dy):
        needed = ctx.needs_input_grad[:4]
        return _from_reference(dy, needed, x, state, weight, bias, ctx.activation, ctx.reverse)
    S, later, chunks = x.shape[1], state.shape[1], _chunks(x)
    dwindow = x.new_empty(x.shape[0], S + later, x.shape[2]) if len(chunks) > 1 else None
    before = zeros = torch.zeros_like(state)  # the gradients of the outputs before a chunk, and after the last one
    of_weight, of_bias = _WeightGradient(x, later + 1), x.new_zeros(())
    for a, b in chunks:
        grad = dy[:, a:b]
        if ctx.activation == "silu":
            y = _depthwise_chunk(x, state, weight, bias, ctx.reverse, (a, b)) if saved is None else saved[:, a:b]
            grad = torch.ops.aten.silu_backward(grad, y)
        if ctx.needs_input_grad[2]:
            of_weight.add(_window_of(x, state, ctx.reverse, a, b), grad)
        if ctx.needs_input_grad[3]:
            of_bias = of_bias + grad.sum((0, 1), dtype=of_weight.dtype)
        if dwindow is None:
            dwindow = _convolve(grad, weight.flip(-1), None, later)
            break
        near = torch.cat([before, grad] if b < S else [before, grad, zeros], 1)
        dwindow[:, a : a + near.shape[1] - later] = _convolve(near, weight.flip(-1), None, 0)
        before = near[:, b - a : b - a + later]
    assert dwindow is not None
    dx, dstate = dwindow[:, later:], dwindow[:, :later]
    if ctx.reverse:
        dx, dstate = dwindow[:, :S], dwindow[:, S:].flip(1)
    dweight = of_weight.total().to(weight.dtype) if ctx.needs_input_grad[2] else None
    return [dx, dstate, dweight, of_bias.to(weight.dtype) if ctx.needs_input_grad[3] else None]


def _from_reference(
    dy: Tensor, needed: Sequence[bool], x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
    activation: str | None, reverse: bool,
) -> list[Tensor | None]:
    """Return the needed gradients of x, state, weight, bias as functions that torch can differentiate or batch.

    It can do neither with writes into one tensor for all chunks, nor differentiate the derivative of the SiLU.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        y = _reference(x, state, weight, bias, None, activation, reverse)
    given = zip((x, state, weight, bias), needed, strict=True)
    chosen = [each for each, is_needed in given if each is not None and is_needed]
    # With a single tap, y does not depend on the empty state.
    options = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
    grads = iter(torch.autograd.grad(y, chosen, dy, **options))
    return [next(grads) if is_needed else None for is_needed in needed]


def _silu(y: Tensor, activation: str | None) -> Tensor:
    return F.silu(y, inplace=True) if activation == "silu" else y


def _chunks(x: Tensor) -> list[tuple[int, int]]:
    """Return the chunks (first, end) of the tokens of x [B, S, D] that are convolved at a time."""
    rows = _rows(x.shape[0])
    size = max(rows, PART_ELEMENTS // (x.shape[0] * x.shape[2]) // rows * rows)
    return [(a, min(a + size, x.shape[1])) for a in range(0, x.shape[1], size)]


def _window_of(x: Tensor, state: Tensor, reverse: bool, a: int, b: int) -> Tensor:
    """Return the inputs of tokens a to b, [B, b - a + K - 1, D]."""
    earlier = state.shape[1]
    if not reverse:
        return x[:, a - earlier : b] if a >= earlier else torch.cat([state[:, a:], x[:, :b]], 1)
    missing = b + earlier - x.shape[1]
    return x[:, a : b + earlier] if missing <= 0 else torch.cat([x[:, a:], state.flip(1)[:, :missing]], 1)


def _depthwise_chunk(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool, chunk: tuple[int, int]
) -> Tensor:
    """Return the convolution for some tokens, before the activation."""
    y = _convolve(_window_of(x, state, reverse, *chunk).contiguous(), weight, None, 0)
    return y if bias is None else y.add_(bias)


def _rows(batch: int) -> int:
    return max(1, SUM_TOKENS // batch)


class _WeightGradient:
    """The sums over b and t of dy[b, t] x[b, t + j], [D, 1, K], computed in float32 at least."""

    def __init__(self, x: Tensor, K: int) -> None:
        B, _, D = x.shape
        self._rows = _rows(B)
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self._sums = [x.new_zeros(B, self._rows, D, dtype=self.dtype) for _ in range(K)]

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Add the products of dy [B, L, D] and x [B, L + K - 1, D]."""
        for first in range(0, dy.shape[1], self._rows):
            part = dy[:, first : first + self._rows].to(self.dtype)
            n = part.shape[1]
            for j, total in enumerate(self._sums):
                total[:, :n].addcmul_(part, x[:, first + j : first + j + n].to(self.dtype))

    def total(self) -> Tensor:
        return torch.stack([s.sum((0, 1)) for s in self._sums], -1).unsqueeze(1)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None, resets: Tensor | None
) -> bool:
    """Return whether the weight mixes channels. Raises ValueError for invalid arguments."""
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[-1] < 1:
        raise ValueError(
            "causal_conv expects x [B, S, D] and weight [D, 1, K] or [D_out, D, K] with K >= 1; "
            f"got x {list(x.shape)}, weight {list(weight.shape)}"
        )
    B, _, D = x.shape
    mixing = not _depthwise(x, weight)
    if mixing and weight.shape[1] != D:
        raise ValueError(
            f"causal_conv over {D} channels expects weight [{D}, 1, K] or [D_out, {D}, K]; got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"causal_conv expects bias [{weight.shape[0]}]; got {list(bias.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"unknown activation {activation!r}; choose None or 'silu'")
    window = (B, weight.shape[-1] - 1, D)
    if state is not None and state.shape != window:
        raise ValueError(f"causal_conv expects state [B, K-1, D] = {list(window)}; got {list(state.shape)}")
    check_resets("causal_conv", resets, x.shape[:2])
    return mixing


dispatch.register(
    "causal_conv", "reference", _windowed(_reference), dispatch.always("a sum over taps runs wherever torch does")
)
dispatch.register(
    "causal_conv", "torch", _windowed(_fast), dispatch.always("torch's own convolution, on any device"), by_hand=True
)
dispatch.load_implementations("causal_conv")
