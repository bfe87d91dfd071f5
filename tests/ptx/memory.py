"""Memory with shadows: who wrote and read each byte last, and whether anything has written it.

Every allocation has a range of addresses of its own, so that no offset leads from one into another. Memory that nothing
has written holds 0xFF: NaN, or -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.dtypes import Array, Fault

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

RANGE = 40  # bits of the offset in an allocation
SHADOWED = 1 << 30  # larger allocations are sparse tests of offsets, and have no shadows
SEVERAL = 0xFF  # in place of a warp: several warps have read it


def mark(program: int, epoch: int, warp: int) -> int:
    """Return what an access leaves in a shadow. epoch: the number of barriers that the program has passed."""
    return program << 40 | epoch << 8 | warp


class Shadow:
    """The marks of the last write and the last read of each byte, or -1."""

    def __init__(self, size: int) -> None:
        self.wrote = np.full(size, -1, np.int64)
        self.read = np.full(size, -1, np.int64)

    def access(self, warp: Warp, at: Array, write: bool) -> list[str]:
        """Note an access at these bytes. Return the races: accesses that nothing orders, one of which writes."""
        word = "write" if write else "read"
        found = [f"{word} after another {who}'s write" for who in _unordered(warp, self.wrote[at])]
        if write:
            found += [f"write after another {who}'s read" for who in _unordered(warp, self.read[at])]
            self.wrote[at] = warp.mark
            return found
        read, mine = self.read[at], warp.mark
        by_others = (read >> 8 == mine >> 8) & (read != mine) if read.max() >= mine & ~SEVERAL else False
        self.read[at] = np.where(by_others, mine | SEVERAL, mine)
        return found


def _unordered(warp: Warp, marks: Array) -> list[str]:
    """Return by whom ("warp", "program") there are accesses that nothing orders before one by this warp."""
    mine, low, high = warp.mark, marks.min(), marks.max()
    if high < 0 or (low >= mine >> 40 << 40 and high < mine & ~SEVERAL):
        return []  # nothing, or all of this program and before its last barrier
    found = ["warp"] if ((marks >> 8 == mine >> 8) & (marks != mine)).any() else []
    if ((marks >> 40 != mine >> 40) & (marks >= 0)).any() and warp.unordered(marks):
        found.append("program")
    return found


class Allocation:
    """Bytes of global memory. fresh: which of them nothing has written, or None if all are."""

    def __init__(self, data: Array, name: str, fresh: Array | None) -> None:
        self.data, self.name, self.fresh = data, name, fresh
        self.shadow = Shadow(data.size) if data.size <= SHADOWED else None


class Memory:
    """The global memory that a launch may touch."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.index: dict[Any, int] = {}

    def add(self, key: Any, data: Array, name: str, fresh: Array | None = None) -> int:
        """Return the address of an allocation: a new one, or that of the same key. `fresh` is kept up to date."""
        if key not in self.index:
            self.index[key] = len(self.allocations)
            self.allocations.append(Allocation(data, name, fresh))
        return (self.index[key] + 1) << RANGE

    def parts(self, addresses: Array, size: int, what: str) -> Iterator[tuple[Allocation, Array, Array]]:
        """Yield each allocation that the addresses lead to, which of them do, and the offsets of their bytes."""
        numbers, offsets = (addresses >> RANGE) - 1, addresses & ((1 << RANGE) - 1)
        first = numbers[0]
        for number in [first] if (numbers == first).all() else np.unique(numbers):
            if not 0 <= number < len(self.allocations):
                raise Fault(f"{what} out of bounds: an address that belongs to no tensor")
            own, found = numbers == number, self.allocations[number]
            last = offsets[own].max() + size
            if last > found.data.size:
                raise Fault(f"{what} out of bounds: {found.name} has {found.data.size} bytes, not {last}")
            yield found, own, offsets[own][:, None] + byte_numbers(size)

    def load(self, warp: Warp, addresses: Array, size: int, checked: bool = True) -> Array:
        """Return the bytes [addresses, size]. Atomic loads are not checked for races."""
        aligned(addresses, size, "global load")
        data = np.empty((addresses.size, size), np.uint8)
        for allocation, own, at in self.parts(addresses, size, "global load"):
            if checked and allocation.shadow is not None:
                warp.note(*allocation.shadow.access(warp, at, write=False), space="global")
            data[own] = found = allocation.data[at]
            if (allocation.fresh is not None and allocation.fresh[at[:, 0]].any()
                    and (allocation.fresh[at] & (found == 0xFF)).all(-1).any()):
                warp.note(f"read of memory that nothing wrote, {allocation.name}")
        return data

    def store(self, warp: Warp, addresses: Array, data: Array) -> None:
        """Write bytes [addresses, size]. A write that leaves a byte as it is is none: warps may hold copies."""
        size = data.shape[1]
        aligned(addresses, size, "global store")
        for allocation, own, at in self.parts(addresses, size, "global store"):
            part = data[own]
            changed = allocation.data[at] != part
            if allocation.fresh is not None:
                changed |= allocation.fresh[at]
                allocation.fresh[at] = False
            if allocation.shadow is not None and changed.any():
                warp.note(*allocation.shadow.access(warp, at[changed], write=True), space="global")
            allocation.data[at] = part

    def cell(self, address: int, dtype: Any) -> Array:
        """Return the place [1] of an atomic operation."""
        size = np.dtype(dtype).itemsize
        where = np.array([address])
        aligned(where, size, "atomic")
        (allocation, _, at), = self.parts(where, size, "atomic")
        return allocation.data[at[0, 0] : at[0, 0] + size].view(dtype)


class SharedMemory:
    """The shared memory of one program. A single warp cannot race with others, so that it is not shadowed."""

    def __init__(self, size: int, warps: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.fresh = np.ones(size, bool)
        self.shadow = Shadow(size) if warps > 1 else None

    def load(self, warp: Warp, addresses: Array, size: int) -> Array:
        """Return the bytes [addresses, size]."""
        aligned(addresses, size, "shared load")
        at = self.bytes_at(addresses, size, "shared load")
        self.reading(warp, at)
        return self.data[at]

    def reading(self, warp: Warp, at: Array) -> None:
        """Check a read of these bytes [accesses, size]."""
        if self.shadow is not None:
            warp.note(*self.shadow.access(warp, at, write=False), space="shared")
        if self.fresh[at[:, 0]].any() and self.fresh[at].all(-1).any():
            warp.note("read of shared memory that nothing wrote")

    def store(self, warp: Warp, addresses: Array, data: Array) -> None:
        """Write bytes [addresses, size]. A write that leaves a byte as it is is none: warps may hold copies."""
        aligned(addresses, data.shape[1], "shared store")
        at = self.bytes_at(addresses, data.shape[1], "shared store")
        if self.shadow is not None:
            changed = (self.data[at] != data) | self.fresh[at]
            if changed.any():
                warp.note(*self.shadow.access(warp, at[changed], write=True), space="shared")
        self.data[at] = data
        self.fresh[at] = False

    def bytes_at(self, addresses: Array, size: int, what: str) -> Array:
        if addresses.min() < 0 or addresses.max() + size > self.data.size:
            raise Fault(f"{what} out of bounds: a program has {self.data.size} bytes, not {addresses.max() + size}")
        return addresses[:, None] + byte_numbers(size)


@cache
def byte_numbers(size: int) -> Array:
    return np.arange(size)


def aligned(addresses: Array, size: int, what: str) -> None:
    if (addresses & (size - 1)).any():
        raise Fault(f"{what} misaligned: {size} bytes at {int(addresses[addresses % size != 0][0]) % 16} of 16")
