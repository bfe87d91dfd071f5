"""Associative scans, whose operations autograd records: of the mLSTM (kernels/mlstm/memoroid.py), and of cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from seqblocks.language.linear_forms import form_of
from seqblocks.tape import Shape, Tape, Value


class Element(NamedTuple):
    """f and m together [B, S, 2, H], C [B, S, H, DK, DV], n [B, S, H, DK]."""

    gates: Value
    C: Value
    n: Value


def mlstm(tape: Tape, q: Value, k: Value, v: Value, i: Value, f: Value) -> Value:
    """Record the scan of q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]; return h [B, S, H, DV]."""
    (B, S, H, DK), DV, out = q.shape, v.shape[-1], v.item
    item = max(4, *(x.item for x in (q, k, v, i, f)))
    q, k, v, i, f = (tape.cast(x, item) for x in (q, k, v, i, f))
    decay = tape.logsigmoid(f)
    outer = tape.multiply(tape.view(k, (B, S, H, DK, 1), dense=k.dense), tape.view(v, (B, S, H, 1, DV), dense=v.dense))
    gates = tape.stack([decay, i])
    first = Element(
        tape.new((B, 1, 2 * H), item), tape.new((B, 1, H, DK, DV), item), tape.new((B, 1, H, DK), item)
    )
    given = Element(tape.view(gates, (B, S, 2 * H)), outer, k)
    del gates
    joined = Element(*(tape.cat([a, b], 1) for a, b in zip(first, given, strict=True)))
    found = Element(*scan(tape, joined, combined))
    del joined, outer
    last = [tape.copy(tape.slice(x, (B, 1, *x.shape[2:]))) for x in found]
    states = Element(*(tape.slice(x, (B, S, *x.shape[2:])) for x in found))
    del found
    asked = tape.unary(q, ())
    top = tape.sum(tape.multiply(tape.view(asked, (B, S, H, DK, 1)), states.C), (B, S, H, DV))
    size = tape.sum(tape.multiply(asked, states.n), (B, S, H))
    floor = tape.unary(tape.unary(tape.new((B, S, H), item), ()), ["output"])
    size = tape.add(tape.pointwise(tape.unary(size), floor, keeps=[size, floor]), tape.new((), item))
    h = tape.divide(top, tape.view(size, (B, S, H, 1)))
    del last
    return tape.cast(h, out)


Leaves = Sequence[Value]
Combine = Callable[[Tape, Leaves, Leaves], Leaves]


def scan(tape: Tape, x: Leaves, combine: Combine) -> list[Value]:
    """Record `associative_scan.torch.run` on leaves [B, S, ...]."""
    S = x[0].shape[1]
    if S == 1:
        return [*x]
    half = S // 2
    odd = scan(tape, combine(tape, _part(tape, x, half), _part(tape, x, half)), combine)
    if S == 2:
        return [tape.cat([_tokens(tape, a, 1), b], 1) for a, b in zip(x, odd, strict=True)]
    count = (S - 1) // 2
    even = combine(tape, _part(tape, odd, count), _part(tape, x, count))
    return [_interleaved(tape, *each) for each in zip(x, even, odd, strict=True)]


def combined(tape: Tape, earlier: Leaves, later: Leaves) -> Element:
    """Record the operator of the mLSTM."""
    a, b = Element(*earlier), Element(*later)
    gates = tape.pointwise(a.gates, b.gates, keeps=[a.gates, b.gates])
    weights = (*a.C.shape[:3],)
    old, new = (tape.unary(tape.slice(gates, weights), ["output"]) for _ in range(2))
    wide = [tape.view(x, (*weights, 1)) for x in (old, new)]
    square = [tape.view(x, (*weights, 1, 1)) for x in wide]
    C = tape.add(tape.multiply(square[0], a.C), tape.multiply(square[1], b.C))
    n = tape.add(tape.multiply(wide[0], a.n), tape.multiply(wide[1], b.n))
    return Element(gates, C, n)


def affine(size: int) -> Combine:
    """Return the operator of `size` states that are linear in each other: a matrix by rows, then a vector."""

    def combine(tape: Tape, earlier: Leaves, later: Leaves) -> list[Value]:
        columns = [earlier[at : size * size : size] for at in range(size)]
        rows = [later[at * size : (at + 1) * size] for at in range(size)]
        matrix = [product(tape, row, column) for row in rows for column in columns]
        before, added = earlier[size * size :], later[size * size :]
        return [*matrix, *(tape.add(product(tape, row, before), x) for row, x in zip(rows, added, strict=True))]

    return combine


def states(
    tape: Tape, new: Sequence[Any], group: Sequence[str], before: Mapping[str, Value], tokens: int
) -> list[Value]:
    """Record `states` of runtime/affine.py: those of a group whose new values are linear in each other.

    new: a Form for each, or a value that depends on no state. before: the states [batch, features] before.
    """
    first = before[group[0]]
    (batch, width), item = first.shape, first.item
    found = [form_of(each) for each in new]
    shape = batch, tokens, width
    matrix = [[_full(tape, form.coefficients.get(name), shape, item) for name in group] for form in found]
    vector = [_full(tape, form.constant, shape, item) for form in found]
    old = [tape.view(before[name], (batch, 1, width)) for name in group]
    for at, (row, b) in enumerate(zip(matrix, vector, strict=True)):
        added = product(tape, [_tokens(tape, a, 1) for a in row], old)
        vector[at] = tape.cat([tape.add(_tokens(tape, b, 1), added), _tokens(tape, b, tokens - 1)], 1)
    leaves = [*(a for row in matrix for a in row), *vector]
    return scan(tape, leaves, affine(len(group)))[len(group) ** 2 :]


def _full(tape: Tape, x: Any, shape: Shape, item: int) -> Value:
    """Record a coefficient, a number or None for 0, at each token and feature."""
    x = tape.cast(x, item) if isinstance(x, Value) else tape.new((1, 1, 1), item)
    return x if x.shape == shape else tape.expand(x, shape)


def product(tape: Tape, row: Leaves, column: Leaves) -> Value:
    """Record the sum of products."""
    total = tape.multiply(row[0], column[0])
    for x, y in zip(row[1:], column[1:], strict=True):
        total = tape.add(total, tape.multiply(x, y))
    return total


def _tokens(tape: Tape, x: Value, count: int) -> Value:
    return tape.slice(x, (x.shape[0], count, *x.shape[2:]))


def _part(tape: Tape, x: Leaves, count: int) -> list[Value]:
    return [_tokens(tape, leaf, count) for leaf in x]


def _interleaved(tape: Tape, elements: Value, even: Value, odd: Value) -> Value:
    """Record the states in order, after the first element."""
    count, left = even.shape[1], odd.shape[1] - even.shape[1]
    both = tape.stack([_tokens(tape, odd, count), even])
    both = tape.view(both, (elements.shape[0], 2 * count, *elements.shape[2:]))
    parts = [_tokens(tape, elements, 1), both]
    if left:
        parts.append(_tokens(tape, odd, left))
    return tape.cat(parts, 1)
