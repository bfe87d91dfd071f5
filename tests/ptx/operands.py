"""Read and write the operands of instructions: registers, constants, special registers, addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.ptx.dtypes import LANES, TYPES, Array, Fault, is_float, size_of, unsigned

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

Mask = Array | None  # which lanes are active; None: all
Read = Callable[["Warp"], Array]
Write = Callable[["Warp", Any, Mask], None]
FILES: dict[str, Any] = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}


class Register(NamedTuple):
    file: str
    number: int


@cache
def register(operand: str) -> Register | None:
    """Return the register that an operand names, or None."""
    found = re.fullmatch(r"%(p|rs|rd|r)(\d+)", operand)
    return Register(found[1], int(found[2])) if found else None


def as_type(values: Array, dtype: str) -> Array:
    """Return the contents of registers as values of a type, which may be smaller than the register."""
    if dtype == "pred":
        return values
    small = size_of(dtype)
    if small > values.dtype.itemsize:
        raise Fault(f"a register of {values.dtype.itemsize} bytes as {dtype}")
    return (values if small == values.dtype.itemsize else values.astype(unsigned(small))).view(TYPES[dtype])


def as_register(values: Any, file: str) -> Array:
    """Return values as the contents of registers. Smaller signed integers keep their sign."""
    values, holds = np.asarray(values), np.dtype(FILES[file])
    if file == "p" or values.dtype.itemsize == holds.itemsize:
        return values.view(holds)
    if values.dtype.kind == "i":
        return values.astype(np.dtype(f"i{holds.itemsize}")).view(holds)
    return values.view(unsigned(values.dtype.itemsize)).astype(holds)


@cache
def constant(operand: str, dtype: str) -> Array | None:
    """Return a constant for all lanes, or None if the operand is none."""
    if found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
        bits = np.array(int(found[1], 16), unsigned(len(found[1]) // 2))
        return np.full(LANES, bits.view(np.float32 if bits.itemsize == 4 else np.float64)).view(TYPES[dtype])
    if operand.lower() in ("true", "false"):
        return np.full(LANES, operand.lower() == "true")
    if not re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
        return None
    value = int(operand.rstrip("U"), 0)
    if dtype == "pred":
        return np.full(LANES, bool(value))
    size = size_of(dtype)
    return np.full(LANES, value & ((1 << 8 * size) - 1), unsigned(size)).view(TYPES[dtype])


def source(operand: str, dtype: str, symbols: frozenset[str]) -> Read:
    """Return a function that reads an operand as values [32] of a type."""
    if operand.startswith("!"):
        inner = source(operand[1:], dtype, symbols)
        return lambda warp: ~inner(warp)
    if (named := register(operand)) is not None:
        file, number = named
        return lambda warp: as_type(warp.files[file][number], dtype)
    if operand in symbols:
        return lambda warp: np.zeros(LANES, TYPES[dtype])
    if (held := constant(operand, dtype)) is not None:
        return lambda warp: held
    if operand.startswith("%") and not is_float(dtype):
        return lambda warp: np.zeros(LANES, TYPES[dtype]) + warp.special(operand[1:]).astype(TYPES[dtype])
    raise Fault(f"operand {operand} as {dtype}")


def target(operand: str) -> Write:
    """Return a function that writes values [32] to a register, in active lanes. `_` drops them."""
    if operand == "_":
        return lambda warp, values, mask: None
    named = register(operand)
    if named is None:
        raise Fault(f"result in {operand}")
    file, number = named

    def write(warp: Warp, values: Any, mask: Mask) -> None:
        row = warp.files[file][number]
        if mask is None:
            row[:] = as_register(values, file)
        else:
            np.copyto(row, as_register(values, file), where=mask)

    return write


def address(operand: str) -> Read:
    """Return a function that computes the address `[register + offset]` or `[symbol + offset]`, as int64 [32]."""
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if found is None:
        raise Fault(f"address {operand}")
    offset, named = int(found[2] or "0", 0), register(found[1])
    if named is None:  # all shared memory is one symbol
        return lambda warp: np.full(LANES, offset)
    file, number = named
    return lambda warp: warp.files[file][number].astype(np.int64) + offset
