"""Instructions of arithmetic: sums, products, quotients, extremes, exponentials.

The approximations of the hardware (ex2, lg2, rsqrt, rcp, division) are exact here, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.dtypes import TYPES, WIDER, Array, Fault, bits_of, halves, is_float, pair, size_of, values_of
from tests.ptx.instructions import Compute, Context, instruction
from tests.ptx.parse import Statement

Function = Callable[..., Any]


def elementwise(statement: Statement, function: Function) -> Compute:
    """Apply a function of numbers to operands of the opcode's type, which may be a pair of 16-bit floats."""
    dtype = statement.parts[-1]
    to, *of = statement.operands
    held = {"bf16x2": "b32", "f16x2": "b32", "bf16": "b16", "f16": "b16"}.get(dtype, dtype)
    if dtype in ("bf16", "f16"):
        def apply(*xs: Array) -> Array:
            return bits_of(function(*(values_of(x, dtype) for x in xs)), dtype)
    elif dtype in ("bf16x2", "f16x2"):
        def apply(*xs: Array) -> Array:
            of_each = zip(*map(halves, xs), strict=True)
            low, high = (bits_of(function(*(values_of(x, dtype[:-2]) for x in part)), dtype[:-2]) for part in of_each)
            return pair(low, high)
    else:
        apply = function
    return Compute(apply, (to,), tuple((x, held) for x in of))


def of_bits(statement: Statement, function: Function) -> Compute:
    """Apply a function to operands that are numbers of the opcode's type as they are."""
    to, *of = statement.operands
    return Compute(function, (to,), tuple((x, statement.parts[-1]) for x in of))


ELEMENTWISE: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "neg": lambda x: -x,
    "abs": np.abs,
    "sqrt": np.sqrt,
}


@instruction("add sub neg abs", "rn")
@instruction("sqrt", "rn")
def simple(statement: Statement, context: Context) -> Compute:
    return elementwise(statement, ELEMENTWISE[statement.parts[0]])


@instruction("min max", "NaN")
def extreme(statement: Statement, context: Context) -> Compute:
    """A NaN counts as absent, unless the modifier NaN says that it is the result."""
    smaller, parts = statement.parts[0] == "min", statement.parts
    if is_float(parts[-1]) and "NaN" not in parts:
        return elementwise(statement, np.fmin if smaller else np.fmax)
    return elementwise(statement, np.minimum if smaller else np.maximum)


@instruction("mul mad", "lo hi wide rn")
def product(statement: Statement, context: Context) -> Compute:
    name, kind, *_ = statement.parts
    dtype = statement.parts[-1]
    if kind in ("wide", "hi") and dtype not in WIDER:
        raise Fault(f"unknown instruction {statement.opcode}")
    to, *of = statement.operands
    types = [dtype] * len(of)
    if kind == "wide":
        wide = WIDER[dtype]
        types[2:] = [wide] * (len(of) - 2)

        def multiply(x: Array, y: Array) -> Array:
            return x.astype(TYPES[wide]) * y.astype(TYPES[wide])
    elif kind == "hi":
        wide, bits = WIDER[dtype], 8 * size_of(dtype)

        def multiply(x: Array, y: Array) -> Array:
            return (x.astype(TYPES[wide]) * y.astype(TYPES[wide]) >> bits).astype(TYPES[dtype])
    elif name == "mul":
        return elementwise(statement, lambda x, y: x * y)
    else:
        def multiply(x: Array, y: Array) -> Array:
            return x * y

    function: Function = multiply if name == "mul" else lambda x, y, z: multiply(x, y) + z
    return Compute(function, (to,), tuple(zip(of, types, strict=True)))


@instruction("fma", "rn")
def fused(statement: Statement, context: Context) -> Compute:
    """x * y + z, rounded once: products of float32 and shorter are exact in float64."""
    if statement.parts[-1] == "f32":
        return of_bits(statement, lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32))
    return elementwise(statement, lambda x, y, z: x * y + z)


@instruction("div", "full approx rn")
def quotient(statement: Statement, context: Context) -> Compute:
    dtype = statement.parts[-1]
    if is_float(dtype):
        return of_bits(statement, lambda x, y: x / y)

    def divide(x: Array, y: Array) -> Array:
        """Round towards zero. Division by zero has no defined result."""
        y = np.where(y == 0, 1, y).astype(x.dtype)
        q = x // y
        return q if dtype[0] == "u" else q + ((x % y != 0) & ((x < 0) != (y < 0)))

    return of_bits(statement, divide)


@instruction("rem")
def remainder(statement: Statement, context: Context) -> Compute:
    return of_bits(statement, lambda x, y: np.fmod(x, np.where(y == 0, 1, y).astype(x.dtype)))


APPROXIMATE: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
}


@instruction("ex2 lg2 rsqrt rcp", "approx ftz rn")
def approximate(statement: Statement, context: Context) -> Compute:
    """With ftz, subnormal sources and results are zeros of their sign."""
    function, parts = APPROXIMATE[statement.parts[0]], statement.parts
    if parts[-1] != "f32":
        raise Fault(f"unknown instruction {statement.opcode}")
    tiny = np.finfo(np.float32).tiny
    flush: Function = (lambda x: np.where(np.abs(x) < tiny, x * np.float32(0), x)) if "ftz" in parts else lambda x: x
    return of_bits(statement, lambda x: flush(function(flush(x).astype(np.float64)).astype(np.float32)))
