"""Instructions that decide what runs next, and those that only order memory, which have no effect here."""

from __future__ import annotations

from tests.ptx.dtypes import Fault
from tests.ptx.instructions import Context, Control, Decoded, Run, instruction
from tests.ptx.parse import Statement


@instruction("bra", "uni")
def branch(statement: Statement, context: Context) -> Control:
    label = statement.operands[0]
    if label not in context.listing.labels:
        raise Fault(f"unknown label {label}")
    return Control("bra", label)


@instruction("ret trap")
def end(statement: Statement, context: Context) -> Control:
    return Control(statement.opcode)


@instruction("bar barrier", "sync aligned warp")
def barrier(statement: Statement, context: Context) -> Decoded:
    """All warps of the program wait for one another. A barrier of one warp has no effect: its lanes run together."""
    if "warp" in statement.parts or context.omit & {"barriers", statement.source}:
        return nothing(statement, context)
    if statement.operands != ("0",):
        raise Fault(f"unknown instruction {statement.text}")
    return Control("barrier")


@instruction("fence membar nanosleep", "proxy async shared gpu gl cta sys sc acq_rel")
def nothing(statement: Statement, context: Context) -> Run:
    return lambda warp, mask: None
