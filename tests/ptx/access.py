"""Instructions that access memory: loads, stores, atomic operations, matrices of 8 x 8 in shared memory.

A release hands on what its program did before the last barrier, and what it had received itself; who acquires at the
same address later receives it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.dtypes import LANE, LANES, TYPES, Array, Fault, size_of, unsigned
from tests.ptx.instructions import Context, Run, instruction
from tests.ptx.operands import Mask, address, target
from tests.ptx.parse import Statement, elements

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

ORDERS = "relaxed acquire release acq_rel gpu sys cta"


def load(warp: Warp, space: str, addresses: Array, size: int, mask: Mask, checked: bool = True) -> Array:
    """Return bytes [32, size], with zeros in inactive lanes."""
    live = addresses if mask is None else addresses[mask]
    if not live.size:
        return np.zeros((LANES, size), np.uint8)
    if space == "shared":
        found = warp.program.shared.load(warp, live, size)
    else:
        found = warp.program.memory.load(warp, live, size, checked)
    if mask is None:
        return found
    data = np.zeros((LANES, size), np.uint8)
    data[mask] = found
    return data


def store(warp: Warp, space: str, addresses: Array, data: Array, mask: Mask) -> None:
    """Write bytes [32, size] of the active lanes."""
    live, data = (addresses, data) if mask is None else (addresses[mask], data[mask])
    if live.size:
        (warp.program.shared if space == "shared" else warp.program.memory).store(warp, live, data)


def space_of(statement: Statement) -> str:
    return "shared" if any(part.startswith("shared") for part in statement.parts) else "global"


def as_bytes(values: list[Array]) -> Array:
    """Return bytes [32, size] of vectors, from their elements [32]."""
    return np.ascontiguousarray(np.stack(values, 1)).view(np.uint8).reshape(LANES, -1)


@instruction("ld", f"param global shared v2 v4 ca cg {ORDERS}")
def load_instruction(statement: Statement, context: Context) -> Run:
    dtype, size = statement.parts[-1], size_of(statement.parts[-1])
    if statement.parts[1] == "param":
        return _parameter(statement, context)
    writes = [target(operand) for operand in elements(statement.operands[0])]
    where, space = address(statement.operands[1]), space_of(statement)
    acquires = "acquire" in statement.parts  # Triton compiles an atomic addition of 0 to a load
    atomic = acquires or "relaxed" in statement.parts

    def run(warp: Warp, mask: Mask) -> None:
        at = where(warp)
        data = load(warp, space, at, size * len(writes), mask, not atomic).view(TYPES[dtype])
        if acquires:
            for place in _places(at, mask):
                warp.acquire(place)
        for number, write in enumerate(writes):
            write(warp, data[:, number], mask)

    return run


def _parameter(statement: Statement, context: Context) -> Run:
    dtype, write = statement.parts[-1], target(statement.operands[0])
    name = statement.operands[1].strip("[] ")
    if name not in context.listing.parameters:
        raise Fault(f"unknown parameter {name}")
    number, size = context.listing.parameters.index(name), size_of(dtype)

    def run(warp: Warp, mask: Mask) -> None:
        bits = warp.program.parameters[number] & ((1 << 8 * size) - 1)
        write(warp, np.full(LANES, bits, unsigned(size)).view(TYPES[dtype]), mask)

    return run


@instruction("st", f"global shared v2 v4 wb cg {ORDERS}")
def store_instruction(statement: Statement, context: Context) -> Run:
    where, space = address(statement.operands[0]), space_of(statement)
    reads = context.reads(elements(statement.operands[1]), statement.parts[-1])
    releases = "release" in statement.parts

    def run(warp: Warp, mask: Mask) -> None:
        at = where(warp)
        if releases:
            for place in _places(at, mask):
                warp.release(place)
        store(warp, space, at, as_bytes([read(warp) for read in reads]), mask)

    return run


def _places(addresses: Array, mask: Mask) -> list[int]:
    return [int(x) for x in np.unique(addresses if mask is None else addresses[mask])]


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "exch": lambda old, new: new,
}


@instruction("atom red", f"global {' '.join(ATOMIC)} {ORDERS}")
def atomic(statement: Statement, context: Context) -> Run:
    name, *parts = statement.parts
    to, where_text, x = statement.operands if name == "atom" else ("_", *statement.operands)
    function = ATOMIC[next(part for part in parts if part in ATOMIC)]
    write, where, read = target(to), address(where_text), context.read(x, parts[-1])
    releases = "release" in parts or "acq_rel" in parts
    acquires = "acquire" in parts or "acq_rel" in parts

    def run(warp: Warp, mask: Mask) -> None:
        addresses, values, old = where(warp), read(warp), np.zeros(LANES, TYPES[parts[-1]])
        for lane in LANE if mask is None else LANE[mask]:
            place = int(addresses[lane])
            cell = warp.program.memory.cell(place, values.dtype)
            old[lane] = cell[0]
            cell[0] = function(cell[0], values[lane])
            if releases:
                warp.release(place)
            if acquires:
                warp.acquire(place)
        write(warp, old, mask)

    return run


@instruction("ldmatrix", "sync aligned m8n8 x1 x2 x4 trans shared")
def load_matrices(statement: Statement, context: Context) -> Run:
    """Load 1, 2 or 4 matrices of 8 x 8 with 16 bits; lane 8 i + r has the address of row r of matrix i."""
    count, transposed = _matrices(statement)
    writes = [target(operand) for operand in elements(statement.operands[0])]
    where, rows = address(statement.operands[1]), count > LANE // 8

    def run(warp: Warp, mask: Mask) -> None:
        held = load(warp, "shared", where(warp), 16, rows).view(np.uint16).reshape(4, 8, 8)
        held = held.transpose(0, 2, 1) if transposed else held
        for matrix, write in zip(held, writes, strict=False):
            write(warp, np.ascontiguousarray(matrix).reshape(LANES, 2).view(np.uint32)[:, 0], mask)

    return run


@instruction("stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared")
def store_matrices(statement: Statement, context: Context) -> Run:
    count, transposed = _matrices(statement)
    where, reads = address(statement.operands[0]), context.reads(elements(statement.operands[1]), "b32")
    rows = count > LANE // 8

    def run(warp: Warp, mask: Mask) -> None:
        held = np.zeros((4, 8, 8), np.uint16)
        for number, read in enumerate(reads):
            matrix = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8)
            held[number] = matrix.T if transposed else matrix
        store(warp, "shared", where(warp), held.view(np.uint8).reshape(LANES, 16), rows)

    return run


def _matrices(statement: Statement) -> tuple[int, bool]:
    count = next(int(part[1:]) for part in statement.parts if part in ("x1", "x2", "x4"))
    return count, "trans" in statement.parts
