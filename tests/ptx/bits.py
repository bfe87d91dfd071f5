"""Instructions that move, compare and convert: logic, shifts, fields, selections, conversions of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.arithmetic import of_bits
from tests.ptx.dtypes import (
    TYPES,
    Array,
    Fault,
    bits_of,
    from_bf16,
    halves,
    is_float,
    pair,
    size_of,
    to_bf16,
    values_of,
)
from tests.ptx.instructions import Compute, Context, instruction
from tests.ptx.parse import Statement, elements

LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
}


@instruction("and or xor not")
def logic(statement: Statement, context: Context) -> Compute:
    return of_bits(statement, LOGIC[statement.parts[0]])


@instruction("shl shr")
def shift(statement: Statement, context: Context) -> Compute:
    """Shift by any number of bits: everything is shifted out from the width of the type on, except a sign."""
    name, dtype = statement.parts
    to, x, by = statement.operands
    bits = 8 * size_of(dtype)

    def shifted(x: Array, by: Array) -> Array:
        least = np.minimum(by, bits - 1).astype(x.dtype)
        if name == "shr" and dtype[0] == "s":
            return x >> least
        return np.where(by >= bits, 0, x << least if name == "shl" else x >> least).astype(x.dtype)

    return Compute(shifted, (to,), ((x, dtype), (by, "u32")))


@instruction("bfe")
def extract(statement: Statement, context: Context) -> Compute:
    """The field of `length` bits from bit `at` on, with its sign if the type is signed."""
    dtype = statement.parts[-1]
    to, x, at, length = statement.operands
    bits = 8 * size_of(dtype)

    def field(x: Array, at: Array, length: Array) -> Array:
        at, length = (np.minimum(n & 0xFF, bits).astype(np.int64) for n in (at, length))
        moved = x >> np.minimum(at, bits - 1).astype(x.dtype)
        if dtype[0] == "u":
            moved = np.where(at >= bits, 0, moved).astype(x.dtype)
        spare = np.minimum(bits - length, bits - 1).astype(x.dtype)
        return np.where(length == 0, 0, (moved << spare) >> spare).astype(x.dtype)

    return Compute(field, (to,), ((x, dtype), (at, "u32"), (length, "u32")))


@instruction("bfi")
def insert(statement: Statement, context: Context) -> Compute:
    """The second source, with `length` bits from bit `at` on replaced by the lowest ones of the first."""
    dtype = statement.parts[-1]
    to, x, into, at, length = statement.operands
    bits = 8 * size_of(dtype)

    def inserted(x: Array, into: Array, at: Array, length: Array) -> Array:
        at, length = (n & 0xFF for n in (at, length))
        place = np.arange(bits)
        inside = (place >= at[..., None]) & (place < at[..., None].astype(np.int64) + length[..., None])
        weights = np.array([1 << n for n in range(bits)], x.dtype)
        mask = np.where(inside, weights, 0).sum(-1, dtype=x.dtype)
        moved = np.where(at >= bits, 0, x << np.minimum(at, bits - 1).astype(x.dtype)).astype(x.dtype)
        return (into & ~mask) | (moved & mask)

    return Compute(inserted, (to,), ((x, dtype), (into, dtype), (at, "u32"), (length, "u32")))


@instruction("prmt")
def permute(statement: Statement, context: Context) -> Compute:
    """Four of the eight bytes of two sources. Bit 3 of a selector repeats the sign of the byte instead."""

    def permuted(x: Array, y: Array, selectors: Array) -> Array:
        eight = x.astype(np.uint64) | (y.astype(np.uint64) << np.uint64(32))
        out = np.zeros(np.broadcast(x, selectors).shape, np.uint32)
        for at in range(4):
            selector = (selectors >> np.uint32(4 * at)) & np.uint32(0xF)
            byte = (eight >> ((selector & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(selector & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
            out |= byte << np.uint32(8 * at)
        return out

    return of_bits(statement, permuted)


@instruction("selp")
def select(statement: Statement, context: Context) -> Compute:
    dtype = statement.parts[-1]
    to, x, y, which = statement.operands
    return Compute(lambda x, y, c: np.where(c, x, y), (to,), ((x, dtype), (y, dtype), (which, "pred")))


@instruction("mov")
def move(statement: Statement, context: Context) -> Compute:
    """Copy a register, or take it apart into `{a, b}`, or put it together from these."""
    to, of = statement.operands
    dtype = statement.parts[-1]
    if to.startswith("{"):
        outputs = elements(to)
        part = TYPES[f"b{8 * size_of(dtype) // len(outputs)}"]

        def taken_apart(x: Array) -> tuple[Array, ...]:
            values = np.ascontiguousarray(x).view(part).reshape(*x.shape, len(outputs))
            return tuple(values[..., at] for at in range(len(outputs)))

        return Compute(taken_apart, tuple(outputs), ((of, dtype),))
    if of.startswith("{"):
        inputs = elements(of)
        small = f"b{8 * size_of(dtype) // len(inputs)}"

        def put_together(*xs: Array) -> Array:
            return np.ascontiguousarray(np.stack(xs, -1)).view(TYPES[dtype])[..., 0]

        return Compute(put_together, (to,), tuple((x, small) for x in inputs))
    return Compute(lambda x: x, (to,), ((of, dtype),))


def _known(x: Array, y: Array) -> Array:
    return ~(np.isnan(x) | np.isnan(y))


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "num": _known, "nan": lambda x, y: ~_known(x, y),
}
UNORDERED = {f"{name}u": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def comparison(name: str, dtype: str) -> Callable[[Array, Array], Array]:
    """Return a comparison. Of floats, those that end with u are true if a source is NaN, the others false."""
    compare = COMPARISONS[UNORDERED.get(name, name)]
    if not is_float(dtype) or name in ("num", "nan"):
        return compare
    if name in UNORDERED:
        return lambda x, y: compare(x, y) | ~_known(x, y)
    return lambda x, y: compare(x, y) & _known(x, y)


@instruction("setp", " ".join([*COMPARISONS, *UNORDERED, "and", "or", "xor"]))
def compare(statement: Statement, context: Context) -> Compute:
    """Compare; combine with a predicate; the second result is the comparison negated, or that of the upper halves."""
    to, x, y, *rest = statement.operands
    dtype, outputs = statement.parts[-1], tuple(to.split("|"))
    test = comparison(statement.parts[1], dtype)
    if dtype in ("bf16x2", "f16x2"):
        if rest:
            raise Fault(f"unknown instruction {statement.text}")

        def of_pairs(x: Array, y: Array) -> tuple[Array, ...]:
            parts = zip(halves(x), halves(y), strict=True)
            return tuple(test(*(values_of(z, dtype[:-2]) for z in part)) for part in parts)[: len(outputs)]

        return Compute(of_pairs, outputs, ((x, "b32"), (y, "b32")))
    if dtype in ("bf16", "f16"):
        held, read = "b16", lambda x: values_of(x, dtype)
    else:
        held, read = dtype, lambda x: x
    combine = LOGIC[statement.parts[2]] if rest else None

    def compared(x: Array, y: Array, *with_: Array) -> Any:
        found = test(read(x), read(y))
        both = (found, ~found)
        both = both if combine is None else (combine(both[0], with_[0]), combine(both[1], with_[0]))
        return both if len(outputs) > 1 else both[0]

    return Compute(compared, outputs, ((x, held), (y, held), *((p, "pred") for p in rest)))


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil,
}


@instruction("cvt", " ".join(["rn", "rna", *ROUNDINGS]))
def convert(statement: Statement, context: Context) -> Compute:
    to, of = (part for part in statement.parts[1:] if part in TYPES)
    result, *sources = statement.operands
    rounding = next((part for part in statement.parts if part in ROUNDINGS), "")
    known = {"bf16": "b16", "f16": "b16"}
    types = tuple((x, known.get(of, of)) for x in sources)
    if to in ("bf16x2", "f16x2"):
        return Compute(lambda high, low: pair(bits_of(low, to[:-2]), bits_of(high, to[:-2])), (result,), types)
    if to == "tf32":
        return Compute(_to_tf32, (result,), types)
    return Compute(_converter(to, of, rounding), (result,), types)


def _to_tf32(x: Array) -> Array:
    """Round float32 to tf32, to nearest, ties away from zero, as bits."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)


def _converter(to: str, of: str, rounding: str) -> Callable[[Array], Array]:
    if not is_float(of):
        return (lambda x: to_bf16(x.astype(np.float64))) if to == "bf16" else lambda x: x.astype(TYPES[to])
    read: Callable[[Array], Array] = {
        "bf16": from_bf16, "f16": lambda x: x.view(np.float16),
    }.get(of, lambda x: x)
    if is_float(to):
        whole = ROUNDINGS.get(rounding, lambda x: x)
        return lambda x: bits_of(whole(read(x)), to) if to in ("bf16", "f16") else whole(read(x)).astype(TYPES[to])
    if not rounding:
        raise Fault(f"no rounding of {of} to {to}")
    limits = np.iinfo(TYPES[to])

    def to_integer(x: Array) -> Array:
        """Round, and clamp to the limits of the type. NaN becomes 0."""
        whole = np.nan_to_num(ROUNDINGS[rounding](read(x).astype(np.float64)), nan=0.0)
        inside = np.clip(whole, float(limits.min), float(limits.max))
        high, low = whole >= float(limits.max), whole <= float(limits.min)
        return np.where(high, limits.max, np.where(low, limits.min, np.where(high, 0, inside).astype(TYPES[to])))

    return to_integer
