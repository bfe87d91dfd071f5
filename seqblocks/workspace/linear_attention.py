"""Linear attention and delta rules, chunk by chunk (kernels/linear_attention/).

The backward pass computes some tokens of some heads at a time, and differentiates them by autograd. What that needs is
found by running these operations, on a tape of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from seqblocks.tape import Shape, Tape, Value

PART_TOKENS = 512
PART_ELEMENTS = 1 << 17
CHUNK, CORRECTED_CHUNK = 32, 16  # tokens; the second for rules that correct what a state holds


class Sizes(NamedTuple):
    """Sequences, tokens, heads of keys, heads of values for each, widths of keys and values.

    decay: "", "head" or "key". rule: add, delta or dplr.
    """

    batch: int
    tokens: int
    heads: int
    groups: int
    keys: int
    values: int
    decay: str
    rule: str
    bonus: bool
    item: int


def scan(
    tape: Tape, q: Value, k: Value, v: Value, decay: Value | None, beta: Value | None, a: Value | None,
    b: Value | None, bonus: Value | None, normalize: bool,
) -> Value:
    """Record the scan of q, k [B, S, H, K] and v [B, S, HV, V], and the others; return o [B, S, HV, V]."""
    out = v.item
    if normalize:
        v = tape.cat([v, tape.new((*v.shape[:-1], 1), v.item)])
    given = [q, k, v, decay, beta, a, b, bonus]
    item = max(4, *(x.item for x in given if x is not None))
    cast = (None if x is None else tape.cast(x, item) for x in given)
    q, k, v, decay, beta, a, b, bonus = cast  # type: ignore[assignment]
    B, S, H, K = q.shape
    HV, V = v.shape[2:]
    state = tape.new((B, HV, K, V), item)
    starts = (S // PART_TOKENS + 2) * state.bytes
    kind = "" if decay is None else "head" if len(decay.shape) == 3 else "key"
    rule = "delta" if beta is not None else "dplr" if a is not None else "add"
    sizes = Sizes(B, min(S, PART_TOKENS), H, HV // H, K, V, kind, rule, bonus is not None, item)
    forward, backward = workspace(_at_a_time(sizes))
    inputs = [x for x in (q, k, v, decay, beta, a, b, bonus) if x is not None]
    several = S > PART_TOKENS or _at_a_time(sizes) != sizes
    y = tape.new(v.shape, item)
    tape.passing(forward)
    # The gradient of the last state is zeros. Gradients of one part are in use while those of the next are computed.
    before = min(PART_TOKENS, S - PART_TOKENS) if S > PART_TOKENS else S
    part = int(sum(x.bytes for x in inputs) * _share(sizes, S) * before / sizes.tokens) if several else 0
    zeros = starts  # their gradient
    tape.function(inputs, [y], [*inputs, state, starts], 3 * state.bytes + zeros + backward + part)
    if normalize:
        whole, sums = tape.slice(y, (*v.shape[:-1], V - 1)), tape.slice(y, (*v.shape[:-1], 1))
        y = tape.divide(whole, tape.add(sums, tape.new((), item)))
    return tape.cast(y, out)


def _at_a_time(x: Sizes) -> Sizes:
    """Return the sizes of the sequences and heads that are computed at a time."""
    room = max(1, PART_ELEMENTS // (x.tokens * max(x.keys, x.values)))
    values = x.heads * x.groups
    if room >= x.batch * values:
        return x
    if room >= values:
        return x._replace(batch=room // values)
    return x._replace(batch=1, heads=min(x.heads, max(1, room * x.heads // values)))


def _share(x: Sizes, S: int) -> float:
    part = _at_a_time(x)
    return part.batch * part.heads * x.tokens / (x.batch * x.heads * S)


@lru_cache(maxsize=256)
def workspace(x: Sizes) -> tuple[int, int]:
    """Return the bytes that the chunks of these tokens need in the forward pass, and with their derivative."""
    found = []
    for tracked in (False, True):
        tape = Tape(x.item)
        given = {name: tape.new(shape) for name, shape in _shapes(x).items()}
        before = tape.live
        for value in given.values():
            if tracked:
                tape.track(value)
        y = _chunked(tape, x, given)
        if tracked:
            tape.backward(y)
        found.append(tape.most() - before)
    return found[0], found[1]


def _shapes(x: Sizes) -> dict[str, Shape]:
    tokens, of_values = (x.batch, x.tokens), x.heads * x.groups
    shapes: dict[str, Shape] = {
        "q": (*tokens, x.heads, x.keys), "k": (*tokens, x.heads, x.keys), "v": (*tokens, of_values, x.values),
        "state": (x.batch, of_values, x.keys, x.values),
    }  # fmt: skip
    if x.decay:
        shapes["decay"] = (*tokens, of_values, x.keys if x.decay == "key" else 1)
    if x.rule == "delta":
        shapes["beta"] = (*tokens, of_values, 1)
    if x.rule == "dplr":
        shapes |= {"a": (*tokens, of_values, x.keys), "b": (*tokens, of_values, x.keys)}
    return shapes


class _Chunks:
    """Tensors of a call in chunks [chunks, rows, L, width], rows being those of sequences and heads."""

    def __init__(self, tape: Tape, x: Sizes) -> None:
        self.tape = tape
        most = CHUNK if x.rule == "add" else CORRECTED_CHUNK
        self.L = min(most, 1 << (x.tokens - 1).bit_length())
        self.count = -(-x.tokens // self.L)
        self.rows = x.batch * x.heads
        self.groups = x.groups
        self.split = x.decay == "key" or x.groups == 1  # weights of the decays are factors of queries and keys

    def cut(self, value: Value, wide: bool) -> Value:
        rows = self.rows * (self.groups if wide else 1)
        return self.tape.copy(self.tape.view(value, (self.count, rows, self.L, value.shape[-1]), dense=False))

    def pairs(self, a: Value, b: Value, weights: Value | None = None) -> Value:
        """Return a b', with zeros for later tokens."""
        a, b = self.alike(a, b)
        y = self.tape.matmul(a, b, (self.count, a.shape[1], self.L, self.L))
        if weights is not None:
            y = self.tape.multiply(y, weights)
        return self.tape.unary(y, ())

    def times(self, pairs: Value, x: Value) -> Value:
        pairs, x = self.alike(pairs, x)
        return self.tape.matmul(pairs, x, (self.count, pairs.shape[1], self.L, x.shape[-1]))

    def alike(self, *values: Value) -> list[Value]:
        """Return values with all heads, which a product copies for those that share them."""
        most = max(value.shape[1] for value in values)
        return [self.repeated(value, most) for value in values]

    def repeated(self, x: Value, rows: int) -> Value:
        """Return x copied for the heads that share it."""
        if x.shape[1] == rows:
            return x
        y, small = self.tape.new((x.shape[0], rows, *x.shape[2:])), x.shape
        self.tape.function([x], [y], (), lambda grads: [self.tape.new(small)])
        return y

    def rowwise(self, x: Value, weight: Value | None) -> Value:
        """Return x with each row weighted; x may have fewer heads."""
        if weight is None:
            return x
        rows = max(x.shape[1], weight.shape[1])
        y = self.tape.new((self.count, rows, self.L, x.shape[-1]))
        self.tape.function([x, weight], [y], [x, weight], y.bytes if weight.numbers < y.numbers else 0)
        return y


class _Weighted(NamedTuple):
    """Rows that read the state, or keys that are written, without and with the weights of their decays."""

    bare: Value
    weighted: Value


def _chunked(tape: Tape, x: Sizes, given: dict[str, Value]) -> Value:
    """Record the chunks of some tokens; return the output."""
    chunks = _Chunks(tape, x)
    q, k, v = chunks.cut(given["q"], False), chunks.cut(given["k"], False), chunks.cut(given["v"], True)
    cut = {name: chunks.cut(given[name], True) for name in ("decay", "beta", "a", "b") if name in given}
    start = _weights(tape, cut["decay"]) if "decay" in cut else None
    back = None if start is None else tape.inverse(start)
    later = None if start is None else tape.unary(start, ())  # from the token before
    of_heads: dict[bool, Value] = {}

    def weighted(z: Value, weights: Value | None) -> _Weighted:
        return _Weighted(z, chunks.rowwise(z, weights))

    def pairs(a: _Weighted, b: _Weighted, before: bool = False) -> Value:
        if chunks.split or start is None:
            return chunks.pairs(a.weighted, b.weighted)
        if before not in of_heads:
            of_heads[before] = tape.unary(tape.matmul(start, start, (*start.shape[:3], chunks.L)), ())
        return chunks.pairs(a.bare, b.bare, of_heads[before])

    reading = weighted(tape.unary(q, ()), later if x.bonus else start)
    writing = weighted(k, back)
    if x.rule == "delta":
        beta = cut["beta"]
        negative = weighted(tape.unary(k, ()), start)
        system = tape.multiply(beta, pairs(negative, writing))
        inverse = tape.multiply(_solved(tape, system), beta)
        rows = _joined(tape, reading.weighted, chunks.times(inverse, negative.weighted))
        seed = tape.pad(chunks.times(inverse, v), (*v.shape[:2], 2 * chunks.L, x.values))
        weights: Value | None = pairs(reading, writing)
        columns, values = writing.weighted, None
    elif x.rule == "dplr":
        seed = chunks.times(pairs(reading, writing, x.bonus), v)
        if x.bonus:
            seed = tape.add(seed, tape.multiply(v, tape.multiply(q, k)))
        c, b = weighted(cut["a"], later), weighted(cut["b"], back)
        inverse = _solved(tape, pairs(c, b, True))
        rows = _joined(tape, reading.weighted, chunks.times(inverse, c.weighted))
        columns = _joined(tape, writing.weighted, b.weighted)
        seed = _joined(tape, seed, chunks.times(inverse, chunks.times(pairs(c, writing, True), v)))
        weights, values = pairs(reading, b, x.bonus), v
    else:
        seed = chunks.times(pairs(reading, writing, x.bonus), v)
        if x.bonus:
            own = tape.multiply(tape.multiply(q, tape.new((x.keys,))), k)
            seed = tape.add(seed, tape.multiply(tape.sum(own, (*own.shape[:-1], 1)), v))
        rows, columns, weights, values = reading.weighted, writing.weighted, None, v
    rows, seed, columns = chunks.alike(rows, seed, columns)
    reads = _carried(tape, chunks, rows, seed, columns, values, start, given["state"])
    if weights is not None:
        weights = chunks.repeated(weights, reads.shape[1])
        parts = tape.split(reads, [chunks.L, chunks.L], 2)
        reads = tape.new((*reads.shape[:2], chunks.L, x.values))
        tape.function([parts[0], weights, parts[1]], [reads], [weights, parts[1]])
        del parts
    return tape.copy(tape.view(reads, (x.batch, x.tokens, x.heads * x.groups, x.values), dense=False))


def _weights(tape: Tape, decay: Value) -> Value:
    """Record the products of the decays from the start of each chunk, by doubling blocks."""
    found, size = tape.unary(decay, ["output"]), 1
    while size < decay.shape[2]:
        half = tape.new((*decay.shape[:2], decay.shape[2] // 2, decay.shape[3]))
        tape.function([found], [half], [found], half.bytes)
        joined = tape.new(decay.shape)
        tape.function([found, half], [joined])
        found = joined
        del half, joined
        size *= 2
    return found


def _solved(tape: Tape, system: Value) -> Value:
    negative = tape.unary(system, ())
    y = tape.new(system.shape)
    tape.function([negative], [y], [negative, y], system.bytes)
    return y


def _joined(tape: Tape, a: Value, b: Value) -> Value:
    rows = max(a.shape[1], b.shape[1])
    wide = [
        each if each.shape[1] == rows else tape.expand(each, (each.shape[0], rows, *each.shape[2:])) for each in (a, b)
    ]
    return tape.cat(wide, 2)


def _carried(
    tape: Tape, chunks: _Chunks, rows: Value, seed: Value, columns: Value, values: Value | None, through: Value | None,
    state: Value,
) -> Value:
    """Record the scan over the states between chunks."""
    reads = tape.new(seed.shape)
    before = chunks.count * state.bytes
    keeps: list[Value | int] = [x for x in (rows, columns, values, through) if x is not None]
    keeps += [reads, state.bytes, before]
    written = columns.numbers // columns.shape[-1] * seed.shape[-1] * seed.item
    tape.passing(3 * state.bytes)
    # the states' gradients and the zeros for those of what is kept, those of a chunk, and what one of three products
    # takes more than the later ones: the gradients of columns, of the decays, and of rows
    decays = 0 if through is None else 3 * before if chunks.split else before
    after = before if through is not None and chunks.split else 0
    extra = 2 * before + state.bytes + written // chunks.count
    extra += max(0, written - rows.bytes, decays - rows.bytes, after)
    tape.function([rows, seed, columns, values, through, state], [reads], keeps, extra)
    return reads
