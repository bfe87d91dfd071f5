"""The table of instructions: which opcodes are known, and what decoding one of them returns.

The files that implement instructions add them with the decorator `instruction`. An opcode that no file adds, or one
with a modifier that its file does not know, is a fault that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.dtypes import TYPES, Array, Fault
from tests.ptx.operands import Mask, Read, Register, Write, as_register, as_type, register, source, target
from tests.ptx.parse import Listing, Statement

if TYPE_CHECKING:
    from tests.ptx.execute import Warp

Run = Callable[["Warp", Mask], None]


@dataclass
class Compute:
    """An instruction that only computes: `function` maps sources to results, all of them arrays [..., 32].

    `check` receives the mask and the sources where some lanes are inactive.
    """

    function: Callable[..., Any]
    to: tuple[str, ...]
    of: tuple[tuple[str, str], ...]  # operands with their types
    check: Callable[..., None] | None = None


@dataclass
class Control:
    """An instruction that changes what runs next: bra, ret, trap, barrier."""

    kind: str
    label: str = ""


@dataclass
class Context:
    """What the functions that decode an instruction know beside its statement."""

    listing: Listing
    omit: frozenset[str] = frozenset()  # "barriers", "waits", or source lines of barriers, which are then left out

    def read(self, operand: str, dtype: str) -> Read:
        return source(operand, dtype, self.listing.symbols)

    def reads(self, operands: list[str], dtype: str) -> list[Read]:
        return [self.read(operand, dtype) for operand in operands]


Decoded = Compute | Control | Run
Decode = Callable[[Statement, Context], Decoded]
INSTRUCTIONS: dict[str, tuple[Decode, frozenset[str]]] = {}


def instruction(names: str, modifiers: str = "") -> Callable[[Decode], Decode]:
    """Return a decorator for the function that decodes these instructions, with the modifiers that it knows."""

    def add(decode: Decode) -> Decode:
        for name in names.split():
            INSTRUCTIONS[name] = decode, frozenset(modifiers.split())
        return decode

    return add


@dataclass
class Instruction:
    """A decoded statement. `batch` is present if it can be computed together with others of the same kind."""

    statement: Statement
    run: Run | None
    control: Control | None = None
    batch: Batchable | None = None


@dataclass
class Batchable:
    """The registers of a Compute. Constants are arrays [32] in place of registers."""

    kind: Hashable
    function: Callable[..., Any]
    types: tuple[str, ...]
    to: list[Register]
    of: list[Register | Array]
    writes: set[Register] = field(default_factory=set)
    reads: set[Register] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.writes = set(self.to)
        self.reads = {x for x in self.of if isinstance(x, Register)}


def decode(statement: Statement, context: Context) -> Instruction:
    name, *rest = statement.parts
    if name not in INSTRUCTIONS:
        raise Fault(f"unknown instruction {statement.opcode}")
    make, modifiers = INSTRUCTIONS[name]
    unknown = [part for part in rest if part.partition("::")[0] not in modifiers and part not in TYPES]
    if unknown:
        raise Fault(f"unknown modifier .{unknown[0]} of {statement.opcode}")
    made = make(statement, context)
    if isinstance(made, Control):
        return Instruction(statement, None, made)
    if isinstance(made, Compute):
        batch = None if statement.predicate is not None else _batchable(statement.opcode, made, context)
        return Instruction(statement, _run(made, context), batch=batch)
    return Instruction(statement, made)


def _run(made: Compute, context: Context) -> Run:
    """Return a function for one instruction, which finds its operands at its first call: most run in batches only."""
    function, check = made.function, made.check
    reads: list[Read] = []
    writes: list[Write] = []

    def run(warp: Warp, mask: Mask) -> None:
        if not writes:
            reads.extend(context.read(operand, dtype) for operand, dtype in made.of)
            writes.extend(map(target, made.to))
        values = [read(warp) for read in reads]
        if check is not None and mask is not None:
            check(mask, *values)
        results = function(*values)
        for write, result in zip(writes, results if isinstance(results, tuple) else (results,), strict=True):
            write(warp, result, mask)

    return run


def _batchable(opcode: str, made: Compute, context: Context) -> Batchable | None:
    to = [register(operand) for operand in made.to]
    of: list[Register | Array] = []
    for operand, dtype in made.of:
        named = register(operand)
        if named is None and operand.startswith(("%", "!")):
            return None
        of.append(named or context.read(operand, dtype)(None))  # type: ignore[arg-type]  # a constant reads no warp
    if None in to:
        return None
    targets = [x for x in to if x is not None]
    files = tuple(x.file if isinstance(x, Register) else "" for x in of)
    types = tuple(dtype for _, dtype in made.of)
    return Batchable((opcode, tuple(x.file for x in targets), files, types), made.function, types, targets, of)


def together(several: list[Batchable]) -> Callable[[Warp], None]:
    """Return a function that computes several instructions of one kind, as one of arrays [instructions, 32]."""
    first = several[0]
    results = [(x.file, np.array([each.to[at].number for each in several])) for at, x in enumerate(first.to)]
    sources: list[tuple[str, str, Array]] = []
    for at, (x, dtype) in enumerate(zip(first.of, first.types, strict=True)):
        if isinstance(x, Register):
            numbers = [each.of[at].number for each in several]  # type: ignore[union-attr]
            sources.append((x.file, dtype, np.array(numbers)))
        else:
            sources.append(("", dtype, np.array([each.of[at] for each in several])))
    function = first.function

    def run(warp: Warp) -> None:
        files = warp.files
        found = function(*[as_type(files[file][part], dtype) if file else part for file, dtype, part in sources])
        for (file, numbers), result in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
            files[file][numbers] = as_register(result, file)

    return run
