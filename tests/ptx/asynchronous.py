"""Asynchronous operations: copies from global to shared memory, in groups that are waited for.

A GPU may carry out a copy at any time between its issue and its wait. Here copies happen at their wait ("late"), so
that a missing wait shows, or at their issue ("early"), so that a copy into memory that is still read shows. Run both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.access import load, store
from tests.ptx.dtypes import LANES, Fault
from tests.ptx.instructions import Context, Run, instruction
from tests.ptx.operands import Mask, address
from tests.ptx.parse import Statement

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

Operation = Callable[[], None]


class Groups:
    """The pending operations of a warp, in groups. Each keeps the statement that issued it, for messages."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.open: list[tuple[int, Operation]] = []
        self.groups: list[list[tuple[int, Operation]]] = []

    def add(self, operation: Operation) -> None:
        self.open.append((self.warp.at, operation))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> None:
        """Run all groups but the last `left`."""
        now = self.warp.at
        while len(self.groups) > left:
            for issued, operation in self.groups.pop(0):
                self.warp.at = issued
                operation()
        self.warp.at = now


@instruction("cp", "async ca cg shared global commit_group wait_group wait_all")
def copy(statement: Statement, context: Context) -> Run:
    kind = statement.parts[2]
    if kind == "commit_group":
        return lambda warp, mask: warp.copies.commit()
    if kind in ("wait_group", "wait_all"):
        if "waits" in context.omit:
            return lambda warp, mask: None
        left = int(statement.operands[0], 0) if kind == "wait_group" else 0

        def wait(warp: Warp, mask: Mask) -> None:
            if kind == "wait_all":
                warp.copies.commit()
            warp.copies.wait(left)

        return wait
    return _start_copy(statement, context)


def _start_copy(statement: Statement, context: Context) -> Run:
    """Copy `size` bytes per lane, or write zeros where the lane's number of source bytes is 0."""
    to, of = address(statement.operands[0]), address(statement.operands[1])
    size = int(statement.operands[2], 0)
    count = context.read(statement.operands[3], "u32") if len(statement.operands) > 3 else None

    def run(warp: Warp, mask: Mask) -> None:
        counts = np.full(LANES, size) if count is None else count(warp).copy()
        live = np.ones(LANES, bool) if mask is None else mask.copy()
        if not np.isin(counts[live], (0, size)).all():
            raise Fault("a copy of fewer bytes than it writes")
        places, sources, some = to(warp), of(warp), live & (counts > 0)

        def operation() -> None:
            store(warp, "shared", places, load(warp, "global", sources, size, some), live)

        if warp.program.settings.copies == "early":
            operation()
        else:
            warp.copies.add(operation)

    return run
