"""Torch's fused attention, whole or in blocks of a window (kernels/attention/), and rotary positions."""

from __future__ import annotations

from seqblocks.tape import Tape, Value

ID = 8


def rotary(tape: Tape, x: Value, interleaved: bool = False) -> Value:
    """Record the rotation of all features of x [B, S, H, D], like `kernels.positions.turned`."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    angles, item = (1, x.shape[1], 1, half[-1]), max(x.item, 4)
    angle = tape.new(angles, 8)
    wide = [tape.new(angles, 8) for _ in range(2)]
    cos, sin = (tape.new(angles, item) for _ in range(2))
    del wide
    a, b = tape.slice(x, half), tape.slice(x, half)
    first = tape.subtract(tape.multiply(a, cos), tape.multiply(b, sin))
    second = tape.add(tape.multiply(b, cos), tape.multiply(a, sin))
    y = tape.cast(tape.cat([first, second]), x.item)
    del angle
    return y


def fused(tape: Tape, q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
    """Record the attention of q [B, S, H, D], k and v; it keeps its inputs, its output and a number for each query."""
    B, S, H, D = q.shape
    width = v.shape[-1]
    if width != D:
        q, k, v = (tape.pad(x, (*x.shape[:-1], max(D, width))) for x in (q, k, v))
    y = tape.new((B, S, H, q.shape[-1]), v.item)
    sums = tape.new((B, H, S), max(q.item, 4))
    keeps = [q, k, v, y, sums, *([] if mask is None else [mask])]
    queries = 256 if S >= 768 else 64 if S >= 192 else 32
    tape.function([q, k, v], [y], keeps, 2 * queries * min(512, k.shape[1]) * sums.item)
    return y if width == D else tape.slice(y, (B, S, H, width))


def windowed(tape: Tape, q: Value, k: Value, v: Value, window: int, causal: bool) -> Value:
    """Record attention in blocks of `window` queries, with the keys of the neighbouring blocks."""
    B, S, H, _ = q.shape
    block = max(2, window)
    blocks = -(-S // block)
    span = (2 if causal else 3) * block
    seen = tape.new((B * blocks, block, span), 1)

    def cut(x: Value, length: int) -> Value:
        """Return blocks of keys, which overlap, as copies [B * blocks, length, heads, width]."""
        padded = tape.pad(x, (B, (blocks - 1) * block + length, *x.shape[2:]))
        return tape.copy(tape.expand(padded, (B * blocks, length, *x.shape[2:])))

    queries = q if blocks * block == S else tape.pad(q, (B, blocks * block, *q.shape[2:]))
    queries = tape.view(queries, (B * blocks, block, *q.shape[2:]))
    keys, values = cut(k, span), cut(v, span)
    mask = tape.new(seen.shape, q.item)  # torch adds it to the scores
    y = fused(tape, queries, keys, values, mask)
    y = tape.view(y, (B, blocks * block, H, v.shape[-1]))
    return y if blocks * block == S else tape.slice(y, (B, S, H, v.shape[-1]))
