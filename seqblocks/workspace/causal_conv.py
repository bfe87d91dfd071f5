"""The depthwise causal convolution, part by part (kernels/causal_conv/)."""

from __future__ import annotations

from functools import partial

from seqblocks.tape import Shape, Tape, Value
from seqblocks.workspace import convolution

SUM_MAX_TOKENS = 8
SUM_TOKENS = 64
PART_ELEMENTS = 1 << 18
SAVED_MAX_BYTES = 1 << 22  # bytes


def convolve(tape: Tape, x: Value, weight: Value, bias: Value | None, activation: str) -> Value:
    """Record the convolution of x [B, S, D] with weight [D, 1, K], and the activation."""
    B, S, D = x.shape
    K = weight.shape[-1]
    if S <= SUM_MAX_TOKENS or x.item == 8:
        return _taps(tape, x, weight, bias, activation)
    rows = max(1, SUM_TOKENS // B)
    length = min(S, max(rows, PART_ELEMENTS // (B * D) // rows * rows))
    part, state = B * length * D * x.item, tape.new((B, K - 1, D), x.item)
    whole = length == S
    y = tape.new(x.shape, x.item)
    saved = activation == "silu" and x.bytes <= SAVED_MAX_BYTES
    numbers, converts = B * length * D, tape.converts and x.item == 2  # both operands and the result are in float32
    tape.passing((part if whole and not saved else 2 * part) if not converts else 8 * numbers + part * (not whole))
    sums = K * B * rows * D * max(4, x.item)
    window, size = (B, S + K - 1, D), [(v.shape, v.item) if v is not None else None for v in (weight, bias)]
    given = x.tracked

    def backward(grads: list[Value | None]) -> list[Value | None]:
        total = None if whole else tape.new(window, x_item)
        held = tape.new((sums + (part if activation == "silu" else 0),), 1)
        near = 0 if whole else part  # gradients with those before and after them
        tape.passing(max(near + (8 * numbers if converts else part), 4 * numbers if x_item == 2 else 0))
        total = total or tape.new(window, x_item)
        del held
        found = [None if each is None else tape.new(*each) for each in size]
        of_x = total.again((B, S, D), dense=False) if given else None
        return [of_x, *found[: 1 if bias is None else 2]]

    x_item = x.item
    keeps: list[Value | int] = [x, state, weight, *([x.bytes] if saved else [])]
    bias_given = bias
    tape.function([x, weight, bias_given], [y], keeps, backward)
    return y


def _taps(tape: Tape, x: Value, weight: Value, bias: Value | None, activation: str) -> Value:
    B, S, D = x.shape
    K = weight.shape[-1]
    window = tape.cat([tape.new((B, K - 1, D), x.item), x], 1) if K > 1 else x
    y = None
    for _ in range(K):
        part = tape.multiply(tape.slice(window, (B, S, D)), tape.slice(weight, (D,)))
        y = part if y is None else tape.add(y, part)
    assert y is not None
    y = y if bias is None else tape.add(y, bias)
    return tape.unary(y) if activation == "silu" else y


def mix(tape: Tape, x: Value, weight: Value, bias: Value | None, activation: str) -> Value:
    """Record the convolution of x [B, S, D] with weight [D, D, K]."""
    B, S, D = x.shape
    K = weight.shape[-1]
    window = tape.cat([tape.new((B, K - 1, D), x.item), x], 1) if K > 1 else x
    out = B, S, weight.shape[0]
    if S <= SUM_MAX_TOKENS or x.item == 8:
        y = _products(tape, window, weight, out)
        y = y if bias is None else tape.add(y, bias)
    else:
        y = tape.in_float32(partial(convolution.convolve, tape, shape=out), window, weight, bias)
    return tape.unary(y) if activation == "silu" else y


def _products(tape: Tape, window: Value, weight: Value, shape: Shape) -> Value:
    """Record the sum of the products of each tap, whose weights [D, D] are copied in turn."""
    y = None
    for _ in range(weight.shape[-1]):
        part = tape.rows(tape.slice(window, (*shape[:2], window.shape[-1])))
        tap = tape.slice(weight, weight.shape[:2])
        tape.passing(tap.bytes)
        made = tape.matmul(part, tap, shape)
        y = made if y is None else tape.add(y, made)
    assert y is not None
    return y
