"""Torch's fused attention, whole or in blocks of a window (kernels/attention/), and rotary positions."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks.tape import Tape, Value

PART = 512  # queries that are computed at a time if not by the fused kernel


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


class Scores(NamedTuple):
    """What scores have besides a scale: a soft cap, linear biases (with slopes that may be a parameter), and sinks."""

    soft_cap: bool = False
    alibi: bool = False
    slopes: Value | None = None
    sinks: Value | None = None

    @property
    def plain(self) -> bool:
        return not (self.soft_cap or self.alibi or self.sinks)


def attend(
    tape: Tape, q: Value, k: Value, v: Value, window: int, causal: bool, separate: bool, scores: Scores
) -> Value:
    """Record the attention of q [B, S, H, D], k and v. separate: whether chunks of a sequence are separate ones."""
    S, T = q.shape[1], k.shape[1]
    if window and window < S:
        return windowed(tape, q, k, v, window, causal, scores)
    if scores.plain and not separate:
        return fused(tape, q, k, v)
    if S <= PART:
        return masked(tape, q, k, v, tape.new((1, S, T), 1), scores)
    parts = []
    for first in range(0, S, PART):
        rows, keys = min(PART, S - first), min(first + PART, S) if causal else T
        query = tape.slice(q, (q.shape[0], rows, *q.shape[2:]))

        def block(query: Value = query, keys: int = keys) -> Value:
            some = [tape.slice(x, (x.shape[0], keys, *x.shape[2:])) for x in (k, v)]
            return masked(tape, query, *some, tape.new((1, query.shape[1], keys), 1), scores)

        parts.append(tape.layer(block))
    return tape.cat(parts, 1)


def masked(tape: Tape, q: Value, k: Value, v: Value, seen: Value, scores: Scores) -> Value:
    """Record attention with a mask; all pairs of queries and keys are computed unless scores are plain."""
    if scores.plain:
        return fused(tape, q, k, v, tape.new(seen.shape, q.item))
    (B, S, H, _), T, item = q.shape, k.shape[1], max(q.item, 4)
    if k.shape[2] != H:
        k, v = (_repeated(tape, x, H) for x in (k, v))
    q = tape.unary(q, ())
    # The heads become the first axis of a batch of products.
    queries, keys, values = (
        tape.copy(tape.view(x, (H * B, x.shape[1], x.shape[3]), dense=False)) for x in (q, k, v)
    )
    pairs = tape.cast(tape.matmul(queries, keys, (H * B, S, T)), item)
    pairs = tape.unary(pairs, ())
    if scores.soft_cap:
        pairs = tape.unary(tape.unary(tape.unary(pairs, ()), ["output"]), ())
    pairs = tape.view(pairs, (H, B, S, T))
    if scores.alibi:
        distance = tape.new((S, T), item)
        slopes = scores.slopes or tape.new((H,), item)
        pairs = tape.subtract(pairs, tape.multiply(tape.view(slopes, (H, 1, 1, 1)), distance))
    hidden = tape.new(seen.shape, 1)
    pairs = tape.pointwise(pairs, keeps=[hidden])
    if scores.sinks is None:
        p = tape.unary(pairs, ["output"])
    else:
        sink = tape.view(scores.sinks, (H, 1, 1, 1))
        most = tape.new((H, B, S, 1), item)
        odds = tape.unary(tape.subtract(pairs, most), ["output"])
        total = tape.add(tape.sum(odds, most.shape), tape.unary(tape.subtract(sink, most), ["output"]))
        p = tape.divide(odds, total)
    p = tape.view(tape.cast(p, v.item), (H * B, S, T))
    y = tape.matmul(p, values, (H * B, S, v.shape[-1]))
    return tape.view(y, (B, S, H, v.shape[-1]), dense=False)


def _repeated(tape: Tape, x: Value, heads: int) -> Value:
    y = tape.new((*x.shape[:2], heads, x.shape[3]), x.item)
    tape.function([x], [y])
    return y


def windowed(
    tape: Tape, q: Value, k: Value, v: Value, window: int, causal: bool, scores: Scores
) -> Value:
    """Record attention in blocks of `window` queries, with the keys of the neighbouring blocks."""
    B, S, H, _ = q.shape
    block = max(2, window)
    blocks = -(-S // block)
    span = (2 if causal else 3) * block
    seen = tape.new((B * blocks, block, span), 1)

    def cut(x: Value, length: int) -> Value:
        """Return blocks of keys [B * blocks, length, heads, width], which overlap; of several sequences, copies."""
        padded = tape.pad(x, (B, (blocks - 1) * block + length, *x.shape[2:]))
        found = tape.expand(padded, (B * blocks, length, *x.shape[2:]))
        return found if B == 1 else tape.copy(found)

    queries = q if blocks * block == S else tape.pad(q, (B, blocks * block, *q.shape[2:]))
    queries = tape.view(queries, (B * blocks, block, *q.shape[2:]))
    y = masked(tape, queries, cut(k, span), cut(v, span), seen, scores)
    y = tape.view(tape.dense(y), (B, blocks * block, H, v.shape[-1]))
    return y if blocks * block == S else tape.slice(y, (B, S, H, v.shape[-1]))
