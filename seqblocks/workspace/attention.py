"""Torch's fused attention, attention with explicit weights, both also in blocks (kernels/attention/), and rotary
positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from seqblocks.tape import Tape, Value

ID = 8
BLOCK = 512  # queries whose weights are computed at once


class Scores(NamedTuple):
    """What weights are computed from, besides products; `slopes` and `sinks` [H], `bias` [H, S, T] or [H, B, S, T]."""

    capped: bool = False
    slopes: Value | None = None
    sinks: Value | None = None
    bias: Value | None = None
    logsumexp: bool = False

    @property
    def plain(self) -> bool:
        given = (self.slopes, self.sinks, self.bias)
        return not (self.capped or self.logsumexp) and all(each is None for each in given)


def relative(tape: Tape, table: Value, tokens: int) -> Value:
    """Record the entries [H, S, S] of a table of relative positions [positions, H] for all pairs of tokens."""
    index = tape.new((tokens**2,), ID)
    y = tape.new((tokens**2, table.shape[-1]), table.item)
    tape.function([table], [y], [index])
    return tape.view(y, (table.shape[-1], tokens, tokens), dense=False)


def rotary(tape: Tape, x: Value) -> Value:
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
    """Record torch's attention of q [B, S, H, D], k and v."""
    return tape.in_float32(partial(_fused, tape, mask=mask), q, k, v)


def _fused(tape: Tape, q: Value, k: Value, v: Value, mask: Value | None) -> Value:
    """Record what keeps its inputs, its output and a number for each query."""
    B, S, H, D = q.shape
    width = v.shape[-1]
    if width != D:
        q, k, v = (tape.pad(x, (*x.shape[:-1], max(D, width))) for x in (q, k, v))
    y = tape.new((B, S, H, q.shape[-1]), v.item)
    sums = tape.new((B, H, S), max(q.item, 4))
    keeps = [q, k, v, y, sums, *([] if mask is None else [mask])]
    queries = 256 if S >= 768 else 64 if S >= 192 else 32
    scores, is_half = queries * min(512, k.shape[1]), q.item == 2  # scores are in float32, and read in 16 bits
    tape.passing(scores * (sums.item + 2 * is_half) + queries * q.shape[-1] * sums.item)
    copies = 2 * (scores + 64 * queries)  # of a product of scores and queries, by oneDNN
    tape.function([q, k, v], [y], keeps, 2 * scores * (sums.item + 2 * is_half) + copies * is_half)
    return y if width == D else tape.slice(y, (B, S, H, width))


def explicit(tape: Tape, q: Value, k: Value, v: Value, scores: Scores, masks: int = 1) -> Value:
    """Record attention whose weights [H, B, S, T] are computed explicitly. masks: 1, or B if sequences have others."""
    (B, S, H, _), T, width = q.shape, k.shape[1], v.shape[-1]
    queries = tape.unary(q, [])
    if k.shape[2] != H:
        k, v = (tape.copy(tape.expand(x, (B, T, H, x.shape[-1]))) for x in (k, v))
    if B > 1:  # products of matrices need heads before the batch
        queries, k, v = (tape.copy(x) for x in (queries, k, v))
    seen, distance = tape.new((masks, S, T), 1), None
    if scores.slopes is not None:
        tape.passing(ID * seen.numbers)
        distance = tape.new(seen.shape, ID)
    products = tape.unary(tape.cast(_products(tape, queries, k), max(q.item, 4)), [])
    if scores.logsumexp:
        y = _with_logsumexp(tape, products, v, scores, masks)
        return tape.view(y, (B, S, H, width + 1), dense=False)
    weights = _weights(tape, products, scores, masks)
    del products
    p = tape.cast(weights, v.item)
    del weights
    y = tape.new((H, B, S, width), v.item)
    tape.function([p, v], [y], [p, v])
    del seen, distance
    return tape.view(y, (B, S, H, width), dense=False)


def _with_logsumexp(tape: Tape, x: Value, v: Value, scores: Scores, masks: int) -> Value:
    """Record weighted values [H, B, S, DV + 1] with the log of the sum of exponentials, like `with_logsumexp`."""
    x = _visible(tape, x, scores, masks)
    each = (*x.shape[:-1], 1)
    tape.passing(x.bytes)
    total = tape.new(each, x.item)
    tape.function([x], [total], [x, total], 2 * x.bytes)
    if scores.sinks is not None:
        sink = tape.view(scores.sinks, (x.shape[0], 1, 1, 1))
        sink = tape.cast(sink, x.item)
        total = tape.pointwise(total, sink, keeps=[total, sink])
    p = tape.cast(tape.unary(tape.subtract(x, total), ["output"]), v.item)
    y = tape.new((*x.shape[:-1], v.shape[-1]), v.item)
    tape.function([p, v], [y], [p, v])
    return tape.cat([tape.cast(y, x.item), total])


def _products(tape: Tape, q: Value, k: Value) -> Value:
    """Record the products of queries and keys [H, B, S, T]."""
    (B, S, H, _), T = q.shape, k.shape[1]
    y = tape.new((H, B, S, T), q.item)
    tape.function([q, k], [y], [q, k])
    return y


def _visible(tape: Tape, x: Value, scores: Scores, masks: int) -> Value:
    """Record what the softmax of scaled scores x [H, B, S, T] reads."""
    if scores.capped:
        x = tape.unary(tape.unary(tape.unary(x, []), ["output"]), [])
    if scores.slopes is not None:
        distance = tape.new((1, masks, *x.shape[2:]), x.item)
        slopes = tape.cast(tape.view(scores.slopes, (x.shape[0], 1, 1, 1)), x.item)
        x = tape.add(x, tape.multiply(slopes, distance))
    if scores.bias is not None:
        some = (x.shape[0], x.shape[1] if len(scores.bias.shape) == 4 else 1, *x.shape[2:])
        part = (*scores.bias.shape[:-2], *some[2:])
        bias = scores.bias if scores.bias.shape[-2] == some[2] else tape.slice(scores.bias, part)
        x = tape.add(x, tape.cast(tape.view(bias, some, dense=False), x.item))
    hidden = tape.new((masks, *x.shape[2:]), 1)
    y = tape.new(x.shape, x.item)
    tape.function([x], [y], [hidden])
    return y


def _weights(tape: Tape, x: Value, scores: Scores, masks: int) -> Value:
    """Record the weights of scaled scores x [H, B, S, T]."""
    y = _visible(tape, x, scores, masks)
    del x
    if scores.sinks is None:
        return tape.unary(y, ["output"])
    each = (*y.shape[:-1], 1)
    odds = tape.unary(tape.unary(y, []), ["output"])
    sink = tape.expand(tape.view(scores.sinks, (y.shape[0], 1, 1, 1)), each)
    total = tape.add(tape.sum(odds, each), tape.unary(sink, ["output"]))
    found = tape.new(odds.shape, odds.item)
    tape.function([odds, total], [found], [odds, total], 3 * odds.bytes)
    return found


def _in_blocks(tape: Tape, S: int, block: Callable[[int, int], Value]) -> Value:
    """Record a function of a range of queries: of all, or of blocks that are computed again in the backward pass."""
    if S <= BLOCK:
        return block(0, S)
    return tape.cat([tape.layer(partial(block, a, min(a + BLOCK, S))) for a in range(0, S, BLOCK)], 1)


def blocks(tape: Tape, q: Value, k: Value, v: Value, scores: Scores, causal: bool) -> Value:
    """Record attention with explicit weights, of blocks of queries to the keys that they can see."""
    S, extra = q.shape[1], k.shape[1] - q.shape[1]

    def block(a: int, b: int) -> Value:
        if S <= BLOCK:
            return explicit(tape, q, k, v, scores)
        query = tape.slice(q, (q.shape[0], b - a, *q.shape[2:]))
        last = b + extra if causal else k.shape[1]
        keys, values = (tape.slice(x, (x.shape[0], last, *x.shape[2:])) for x in (k, v))
        return explicit(tape, query, keys, values, scores)

    return _in_blocks(tape, S, block)


def with_first(tape: Tape, q: Value, k: Value, v: Value, window: int, first: int, scores: Scores) -> Value:
    """Record attention in blocks of queries that read their windows and the first tokens."""
    S = q.shape[1]

    def block(a: int, b: int) -> Value:
        begin = min(first, a)
        count = k.shape[1] if S <= BLOCK else begin + b - max(begin, a - window + 1)
        query, keys, values = q, k, v
        if S > BLOCK:
            query = tape.slice(q, (q.shape[0], b - a, *q.shape[2:]))
            keys, values = (tape.copy(tape.slice(x, (x.shape[0], count, *x.shape[2:]))) for x in (k, v))
        pairs = 1, b - a, count
        ahead = [tape.new(pairs, ID), tape.new(pairs, ID)]
        seen = tape.new(pairs, 1)
        ahead.clear()
        if not scores.plain:
            del seen
            return explicit(tape, query, keys, values, scores)
        y = fused(tape, query, keys, values, tape.new(pairs, q.item))
        del seen
        return y

    return _in_blocks(tape, S, block)


def between(tape: Tape, q: Value, k: Value, v: Value, window: int, scores: Scores) -> Value:
    """Record attention to keys of another rate, in blocks of queries that read the keys that they can see."""
    S, T = q.shape[1], k.shape[1]

    def block(a: int, b: int) -> Value:
        last = max(b * T // S, 1) if S > BLOCK else T
        first = max(-(-(a + 1) * T // S) - window, 0) if window and S > BLOCK else 0
        pairs = 1, b - a, last - min(first, last - 1)
        query, keys, values = q, k, v
        if S > BLOCK:
            query = tape.slice(q, (q.shape[0], b - a, *q.shape[2:]))
            keys, values = (tape.slice(x, (x.shape[0], pairs[2], *x.shape[2:])) for x in (k, v))
        seen = tape.new(pairs, 1)
        if scores.plain:
            y = fused(tape, query, keys, values, tape.new(pairs, q.item))
            del seen
        else:
            del seen
            y = explicit(tape, query, keys, values, scores)
        none = tape.new((1, b - a, 1, 1), 1)
        masked = tape.new(y.shape, y.item)
        tape.function([y], [masked], [none])
        return masked

    return _in_blocks(tape, S, block)


def selected(
    tape: Tape, q: Value, k: Value, v: Value, choice: tuple[int, int, int], activation: str, scores: Scores
) -> Value:
    """Record attention to selected keys. choice: numbers of blocks, of heads that score, and of groups that choose."""
    (B, S, H, _), T, (count, scoring, groups) = q.shape, k.shape[1], choice

    def block(a: int, b: int) -> Value:
        rows = b - a
        _choose(tape, (B, scoring, rows, count), groups, activation, max(q.item, 4))
        seen = tape.new((B, groups, rows, T), 1)
        parts = []
        for _ in range(groups):
            query = tape.slice(q, (B, rows, H // groups, q.shape[-1]))
            keys, values = (tape.slice(x, (*x.shape[:2], max(x.shape[2] // groups, 1), x.shape[-1])) for x in (k, v))
            if scores.plain:
                y = fused(tape, query, keys, values, tape.new((B, rows, T), q.item))
            else:
                y = explicit(tape, query, keys, values, scores, B)
            masked = tape.new(y.shape, y.item)
            tape.function([y], [masked], [tape.new((B, rows, 1, 1), 1)])
            parts.append(masked)
        del seen
        return parts[0] if groups == 1 else tape.cat(parts, 2)

    return _in_blocks(tape, S, block)


def _choose(tape: Tape, shape: tuple[int, ...], groups: int, activation: str, item: int) -> None:
    """Record the choice of blocks by scores [batch, heads, queries, blocks], which keeps nothing."""
    each = math.prod(shape)
    best = each // shape[1] * groups  # sums of the scores of heads; their copy is sorted with numbers of 64 bits
    copies = 3 if activation == "softmax" else 2
    tape.passing(max(item * copies * each, item * (each + best), (2 * item + ID) * best))


def windowed(
    tape: Tape, q: Value, k: Value, v: Value, window: int, causal: bool, scores: Scores | None = None
) -> Value:
    """Record attention in blocks of `window` queries, with the keys of the neighbouring blocks."""
    B, S = q.shape[:2]
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
    keys, values = cut(k, span), cut(v, span)
    if scores is None or scores.plain:
        mask = tape.new(seen.shape, q.item)  # torch adds it to the scores
        y = fused(tape, queries, keys, values, mask)
    else:
        del seen
        y = explicit(tape, queries, keys, values, scores, B * blocks)
    y = tape.view(y, (B, blocks * block, *y.shape[2:]))
    return y if blocks * block == S else tape.slice(y, (B, S, *y.shape[2:]))
