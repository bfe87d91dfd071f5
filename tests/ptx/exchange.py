"""Instructions by which the lanes of a warp exchange values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.ptx.dtypes import LANE, LANES, TYPES, Array, Fault
from tests.ptx.instructions import Compute, Context, Run, instruction
from tests.ptx.operands import Mask, target
from tests.ptx.parse import Statement

if TYPE_CHECKING:
    from tests.ptx.execute import Warp


@instruction("shfl", "sync up down bfly idx")
def shuffle(statement: Statement, context: Context) -> Compute:
    """Each lane reads the register of another, or its own if the other is outside of its segment."""
    mode = statement.parts[2]
    to, x, by, clamp, _ = statement.operands
    outputs = tuple(to.split("|"))

    def places(by: Array, clamp: Array) -> tuple[Array, Array]:
        by, segment, last = by.astype(np.int64), (clamp.astype(np.int64) >> 8) & 31, clamp.astype(np.int64) & 31
        start = LANE & segment
        end = start | (last & ~segment)
        lane = {"up": LANE - by, "down": LANE + by, "bfly": LANE ^ by, "idx": start | (by & ~segment)}[mode]
        inside = lane >= end if mode == "up" else lane <= end
        return np.where(inside, lane, LANE), inside

    def check(mask: Array, x: Array, by: Array, clamp: Array) -> None:
        lane, _ = places(by, clamp)
        if not mask[lane[mask]].all():
            raise Fault("shfl from an inactive lane")

    def shuffled(x: Array, by: Array, clamp: Array) -> Array | tuple[Array, Array]:
        lane, inside = places(by, clamp)
        values = np.take_along_axis(np.broadcast_to(x, np.broadcast_shapes(x.shape, lane.shape)), lane, -1)
        return (values, inside) if len(outputs) > 1 else values

    return Compute(shuffled, outputs, ((x, "b32"), (by, "u32"), (clamp, "u32")), check)


@instruction("redux", "sync add min max and or xor")
def reduce(statement: Statement, context: Context) -> Run:
    kind, dtype = statement.parts[2], statement.parts[-1]
    to, x, _ = statement.operands
    read, write = context.read(x, dtype), target(to)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor}

    def run(warp: Warp, mask: Mask) -> None:
        values = read(warp) if mask is None else read(warp)[mask]
        write(warp, np.full(LANES, functions[kind].reduce(values), TYPES[dtype]), mask)

    return run


@instruction("vote", "sync any all uni ballot")
def vote(statement: Statement, context: Context) -> Run:
    kind = statement.parts[2]
    to, x, _ = statement.operands
    read, write = context.read(x, "pred"), target(to)

    def run(warp: Warp, mask: Mask) -> None:
        active = np.ones(LANES, bool) if mask is None else mask
        values = read(warp)
        if kind == "ballot":
            found = np.uint32(sum(1 << int(lane) for lane in LANE[values & active]))
        else:
            true, false = values[active].all(), not values[active].any()
            found = {"all": true, "any": not false, "uni": true or false}[kind]
        write(warp, np.full(LANES, found), mask)

    return run


@instruction("activemask")
def active_lanes(statement: Statement, context: Context) -> Run:
    write = target(statement.operands[0])

    def run(warp: Warp, mask: Mask) -> None:
        lanes = LANE if mask is None else LANE[mask]
        write(warp, np.full(LANES, sum(1 << int(lane) for lane in lanes), np.uint32), mask)

    return run
