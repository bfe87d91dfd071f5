"""Products of matrices: mma, and wgmma, whose operands lie in shared memory and whose results have to be waited for.

Sums are exact here and rounded to float32 once per instruction. Until its wait, an accumulator of wgmma holds NaN.
Shared operands are checked at the issue and at the wait, and read at the wait, so that a write in between shows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.dtypes import LANE, Array, Fault, tf32_values, values_of
from tests.ptx.instructions import Compute, Context, Run, instruction
from tests.ptx.operands import Mask, register
from tests.ptx.parse import Statement, elements

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

ROW, COLUMN = LANE >> 2, LANE & 3  # of a lane in the fragments below
CORNERS = ((0, 0), (0, 1), (8, 0), (8, 1))  # of the four numbers of a lane in an accumulator of 16 x 8
OPERANDS = ("bf16", "f16", "tf32")
PENDING = 0x7FC0DEAD  # a NaN
PITCH = {1: 128, 2: 64, 3: 32}  # bytes of a row, by the swizzle mode of a descriptor
SWIZZLED = {128: 0x70, 64: 0x30, 32: 0x10}


def numbers(bits: Array, dtype: str) -> Array:
    """Return registers [..., 32] as numbers [..., 32, 1 or 2]."""
    if dtype == "tf32":
        return tf32_values(bits)[..., None]
    return values_of(np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2), dtype)


def fragment_a(registers: Any, K: int, dtype: str) -> Array:
    """Return the left operand [..., 16, K] from its registers."""
    parts = [numbers(x, dtype) for x in registers]
    out, each = np.zeros((*parts[0].shape[:-2], 16, K)), parts[0].shape[-1]
    for at, part in enumerate(parts):
        for number in range(each):
            out[..., ROW + 8 * (at & 1), COLUMN * each + number + 4 * each * (at >> 1)] = part[..., number]
    return out


def fragment_b(registers: Any, K: int, dtype: str) -> Array:
    """Return the right operand [..., K, 8] from its registers."""
    parts = [numbers(x, dtype) for x in registers]
    out, each = np.zeros((*parts[0].shape[:-2], K, 8)), parts[0].shape[-1]
    for at, part in enumerate(parts):
        for number in range(each):
            out[..., COLUMN * each + number + 4 * each * at, ROW] = part[..., number]
    return out


@instruction("mma", "sync aligned m16n8k16 m16n8k8 m16n8k4 row col")
def product(statement: Statement, context: Context) -> Compute:
    to, a, b, c = (elements(operand) for operand in statement.operands)
    result, dtype, other, accumulator = statement.parts[-4:]
    if (result, accumulator) != ("f32", "f32") or dtype != other or dtype not in OPERANDS:
        raise Fault(f"unknown instruction {statement.opcode}")
    K = int(_found(r"k(\d+)", statement.opcode))

    def function(*registers: Array) -> tuple[Array, ...]:
        left, right = registers[: len(a)], registers[len(a) : len(a) + len(b)]
        sums = np.zeros((*np.broadcast_shapes(*(x.shape for x in registers))[:-1], 16, 8))
        for (row, column), x in zip(CORNERS, registers[len(a) + len(b) :], strict=True):
            sums[..., ROW + row, 2 * COLUMN + column] = x
        sums += fragment_a(left, K, dtype) @ fragment_b(right, K, dtype)
        rounded = sums.astype(np.float32)
        return tuple(rounded[..., ROW + row, 2 * COLUMN + column] for row, column in CORNERS)

    of = (*((x, "b32") for x in (*a, *b)), *((x, "f32") for x in c))
    return Compute(function, tuple(to), of)


# ------------------------------------------------------------------------------
# Products of four warps


def tile(descriptor: int, rows: Array, K: int, width: int, transposed: bool) -> Array:
    """Return the addresses [rows, K] of an operand in shared memory; width: bytes of a number.

    The layout is that of "Matrix descriptor" and "Canonical layouts" in the PTX manual, with one of the three swizzles.
    """
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 49 & 7 or descriptor >> 62 not in PITCH:
        raise Fault(f"unknown layout of a wgmma operand: descriptor {descriptor:#x}")
    pitch = PITCH[descriptor >> 62]
    r, k = rows[:, None], np.arange(K)[None, :]
    if transposed:
        each = pitch // width
        at = start + k % 8 * pitch + r % each * width + r // each * leading + k // 8 * stride
    else:
        at = start + r % 8 * pitch + r // 8 * stride + k * width
    return at ^ (at >> 3 & SWIZZLED[pitch])


SHAPES = " ".join(f"m64n{8 * n}k{k}" for n in range(1, 33) for k in (8, 16))


@instruction("wgmma", f"fence mma_async commit_group wait_group sync aligned {SHAPES}")
def group_product(statement: Statement, context: Context) -> Run:
    kind = statement.parts[1]
    if kind == "fence":
        return lambda warp, mask: None
    if kind == "commit_group":
        return lambda warp, mask: warp.accumulators.commit(warp)
    if kind == "wait_group":
        left = int(statement.operands[-1])
        return lambda warp, mask: warp.accumulators.wait(warp, left)
    return _start_product(statement, context)


class Accumulators:
    """The sums of pending products, by their first register. The registers themselves hold NaN."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Array, Array]] = {}  # registers, and their values [registers, 32]
        self.pending: list[list[int]] = []  # by group
        self.open: list[int] = []

    def use(self, warp: Warp, registers: Array) -> Array:
        """Return the sums in these registers, for a product that is added to the open group."""
        first = int(registers[0])
        if first not in self.sums:
            self.sums[first] = registers, warp.files["r"][registers].view(np.float32).copy()
            warp.files["r"][registers] = PENDING
        self.open.append(first)
        return self.sums[first][1]

    def commit(self, warp: Warp) -> None:
        warp.products.commit()
        self.pending.append(self.open)
        self.open = []

    def wait(self, warp: Warp, left: int) -> None:
        """Finish all groups but the last `left`, and return the sums to which no product is pending."""
        warp.products.wait(left)
        self.pending = self.pending[len(self.pending) - left :] if left < len(self.pending) else self.pending
        busy = {*self.open, *(first for group in self.pending for first in group)}
        for first in [first for first in self.sums if first not in busy]:
            registers, values = self.sums.pop(first)
            warp.files["r"][registers] = values.view(np.uint32)


def _start_product(statement: Statement, context: Context) -> Run:
    result, dtype, other = statement.parts[-3:]
    to, a, b, adds, *flags = statement.operands
    in_registers = a.startswith("{")
    if result != "f32" or dtype != other or dtype not in OPERANDS or flags[:2] != ["1", "1"]:
        raise Fault(f"unknown instruction {statement.text}")
    N, K = int(_found(r"n(\d+)k", statement.opcode)), int(_found(r"k(\d+)\.", statement.opcode))
    transposed_a, transposed_b = not in_registers and flags[2:3] == ["1"], len(flags) > 2 and flags[-1] == "1"
    registers = np.array([_number(x) for x in elements(to)])
    left = context.reads(elements(a), "b32" if in_registers else "u64")
    right, add = context.read(b, "u64"), context.read(adds, "pred")
    width, eights = 4 if dtype == "tf32" else 2, np.arange(N // 8)

    def run(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise Fault("wgmma in divergent code")
        accumulate, values = bool(add(warp)[0]), [x(warp) for x in left]
        fragment = fragment_a(values, K, dtype) if in_registers else None
        own = 16 * (warp.index % 4) + np.arange(16)
        at_a = None if in_registers else tile(int(values[0][0]), own, K, width, transposed_a)
        at_b = tile(int(right(warp)[0]), np.arange(N), K, width, transposed_b)
        for at in (at_a, at_b):
            if at is not None:
                _bytes(warp, at, width)
        sums = warp.accumulators.use(warp, registers)

        def operation() -> None:
            matrix = fragment if at_a is None else _operand(warp, at_a, width, dtype)
            product = matrix @ _operand(warp, at_b, width, dtype).T
            for at, (row, column) in enumerate(CORNERS):
                place = (ROW + row)[:, None], 8 * eights[None, :] + (2 * COLUMN + column)[:, None]
                held = sums[4 * eights + at].T.astype(np.float64) if accumulate else 0.0
                sums[4 * eights + at] = (held + product[place]).astype(np.float32).T

        warp.products.add(operation)

    return run


def _bytes(warp: Warp, at: Array, width: int) -> Array:
    """Check a read of the shared numbers at these addresses, and return the places of their bytes."""
    shared = warp.program.shared
    places = shared.bytes_at(at.reshape(-1), width, "wgmma operand")
    shared.reading(warp, places)
    return places


def _operand(warp: Warp, at: Array, width: int, dtype: str) -> Array:
    data = warp.program.shared.data[_bytes(warp, at, width)]
    if dtype == "tf32":
        return tf32_values(data.view(np.uint32)[:, 0]).reshape(at.shape)
    return values_of(data.view(np.uint16)[:, 0], dtype).reshape(at.shape)


def _number(operand: str) -> int:
    named = register(operand)
    if named is None or named.file != "r":
        raise Fault(f"accumulator {operand}")
    return named.number


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, text
    return found[1]


