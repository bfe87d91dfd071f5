"""Run a launch: its programs one after the other, and of each program a warp at a time up to the next barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from tests.ptx import access, arithmetic, asynchronous, bits, control, exchange, tensor_cores
from tests.ptx.dtypes import LANE, LANES, Array, Fault
from tests.ptx.instructions import Batchable, Context, Instruction, decode, together
from tests.ptx.memory import Memory, SharedMemory, mark
from tests.ptx.operands import FILES, Mask, Register
from tests.ptx.parse import Listing, parse

FAMILIES = (access, arithmetic, asynchronous, bits, control, exchange, tensor_cores)  # imported for their instructions
SHARED = {"sm_80": 166_912, "sm_90": 232_448}  # bytes available to a program; 101,376 elsewhere
MAX_INSTRUCTIONS = 2_000_000  # of a warp between two barriers
POISON = {"r": 0x7FC0BEEF}  # registers before their first write: NaN


@dataclass(frozen=True)
class Settings:
    """What a GPU may choose. order: of warps and programs, "up", "down" or "random"; copies: "late" or "early".

    omit: "barriers", "waits" (for copies) and "folder/file.py:line" of barriers, separated by commas, are left out.
    """

    order: str = "up"
    copies: str = "late"
    omit: str = ""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0), compare=False)

    def arrange(self, items: Sequence[Any]) -> list[Any]:
        if self.order == "random":
            return [items[at] for at in self.random.permutation(len(items))]
        return list(items)[:: -1 if self.order == "down" else 1]


class Code:
    """A decoded listing. `runs`: by its first statement, the end of a run that only computes, and what computes it."""

    def __init__(self, listing: Listing, omit: str) -> None:
        self.listing = listing
        context = Context(listing, frozenset(omit.split(",")))
        self.instructions: list[Instruction] = []
        for at, statement in enumerate(listing.statements):
            try:
                self.instructions.append(decode(statement, context))
            except Fault as fault:
                raise Fault(f"{fault} at {listing.where(at)}") from None
        self.runs: dict[int, tuple[int, list[Callable[[Warp], None]]]] = {}
        # Programs that may wait for others take turns.
        self.waits_for_programs = any({"atom", "red", "acquire", "relaxed"} & {*x.parts} for x in listing.statements)
        self._find_runs(min_length=4)

    def _find_runs(self, min_length: int) -> None:
        targets, at, end = set(self.listing.labels.values()), 0, len(self.instructions)
        while at < end:
            stop = at
            while stop < end and self.instructions[stop].batch and (stop == at or stop not in targets):
                stop += 1
            if stop - at >= min_length:
                self.runs[at] = stop, batches([x.batch for x in self.instructions[at:stop] if x.batch])
            at = max(stop, at + 1)


def batches(several: list[Batchable]) -> list[Callable[[Warp], None]]:
    """Return functions that together compute these instructions. Those of one kind that do not depend on one another
    share a function."""
    wrote: dict[Register, int] = {}  # the level of the last write, and of the last read since
    read: dict[Register, int] = {}
    found: dict[tuple[int, Any], list[Batchable]] = {}
    for each in several:
        after = [wrote[x] for x in each.reads | each.writes if x in wrote] + [read[x] for x in each.writes if x in read]
        level = max(after, default=-1) + 1
        for x in each.writes:
            wrote[x] = level
            read.pop(x, None)
        for x in each.reads:
            read[x] = max(level, read.get(x, -1))
        found.setdefault((level, each.kind), []).append(each)
    return [together(found[key]) for key in sorted(found, key=lambda key: key[0])]


@cache
def decoded(ptx: str, omit: str) -> Code:
    return Code(parse(ptx), omit)


class Warp:
    """32 lanes. pcs: the next statement of each lane where they diverge; otherwise `pc` is that of all."""

    def __init__(self, program: Program, index: int) -> None:
        counts = program.code.listing.registers
        self.program, self.index = program, index
        self.files = {
            file: np.full((counts[file], LANES), POISON.get(file, 0), dtype) for file, dtype in FILES.items()
        }
        self.pc = self.at = 0  # at: the statement that messages name
        self.pcs: Array | None = None
        self.done = np.zeros(LANES, bool)
        self.copies, self.products = asynchronous.Groups(self), asynchronous.Groups(self)
        self.accumulators = tensor_cores.Accumulators()
        self.received: dict[int, int] = {}  # by program: what it did before this barrier of its own is visible
        self.mark = mark(program.number, 0, index)

    def special(self, name: str) -> Array:
        """Return a special register [32]."""
        program = self.program
        of_axes = {"ctaid": program.place, "nctaid": program.grid, "ntid": (program.code.listing.threads, 1, 1)}
        base, _, axis = name.partition(".")
        if base == "tid":
            return LANE + 32 * self.index if axis == "x" else 0 * LANE
        if base in of_axes:
            return np.full(LANES, of_axes[base]["xyz".index(axis)])
        if name in ("laneid", "warpid"):
            return LANE if name == "laneid" else np.full(LANES, self.index)
        raise Fault(f"unknown register %{name}")

    def note(self, *texts: str, space: str = "") -> None:
        """Record what is wrong, at the current statement, without an end of the execution."""
        for text in texts:
            where = self.program.code.listing.where(self.at)
            self.program.notes[", ".join(filter(None, (text, space, where)))] += 1

    def unordered(self, marks: Array) -> bool:
        """Return whether any of these accesses, by other programs, is not before a release that this warp acquired."""
        for event in np.unique(marks >> 8):
            program, epoch = int(event) >> 32, int(event) & 0xFFFFFFFF
            if program not in (-1, self.program.number) and self.received.get(program, -1) <= epoch:
                return True
        return False

    def release(self, place: int) -> None:
        said = self.program.released.setdefault(place, {})
        for program, epoch in (*self.received.items(), (self.program.number, self.program.epoch)):
            said[program] = max(epoch, said.get(program, -1))

    def acquire(self, place: int) -> None:
        for program, epoch in self.program.released.get(place, {}).items():
            self.received[program] = max(epoch, self.received.get(program, -1))

    def run(self) -> str:
        """Run up to a barrier or the end. Return which of them."""
        code = self.program.code
        for _ in range(MAX_INSTRUCTIONS):
            if self.pcs is None and self.pc in code.runs:
                stop, functions = code.runs[self.pc]
                for function in functions:
                    function(self)
                self.program.steps += stop - self.pc
                self.pc = stop
                continue
            active = self._active()
            self.at = self.pc
            instruction = code.instructions[self.pc]
            mask = self._mask(instruction, active)
            self.program.steps += 1
            if instruction.control is not None:
                if reason := self._control(instruction, active, mask):
                    return reason
                continue
            if mask is None or mask.any():
                assert instruction.run is not None
                try:
                    instruction.run(self, mask)
                except Fault as fault:
                    raise Fault(f"{fault} at {code.listing.where(self.at)}") from None
            self._advance(active, self.pc + 1)
        raise Fault(f"{MAX_INSTRUCTIONS} steps without a barrier or an end at {code.listing.where(self.at)}")

    def _active(self) -> Mask:
        """Return the lanes that run next, those at the lowest statement, or None for all."""
        if self.pcs is None:
            return None
        live = ~self.done
        self.pc = int(self.pcs[live].min())
        active = live & (self.pcs == self.pc)
        if active.all():
            self.pcs = active = None
        return active

    def _mask(self, instruction: Instruction, active: Mask) -> Mask:
        predicate = instruction.statement.predicate
        if predicate is None:
            return active
        mask = self.files["p"][predicate] ^ instruction.statement.negated
        if active is not None:
            return mask & active
        return None if mask.all() else mask

    def _advance(self, active: Mask, pc: int) -> None:
        if active is None or self.pcs is None:
            self.pc = pc
        else:
            self.pcs[active] = pc

    def _control(self, instruction: Instruction, active: Mask, mask: Mask) -> str:
        """Carry out a branch, a return or a barrier. Return "" if the warp goes on."""
        control, listing = instruction.control, self.program.code.listing
        assert control is not None
        taken = np.ones(LANES, bool) if mask is None else mask
        if control.kind == "barrier":
            if mask is not None:
                raise Fault(f"barrier in divergent code at {listing.where(self.at)}")
            self.pc += 1
            return "barrier"
        if control.kind == "trap" and taken.any():
            raise Fault(f"trap at {listing.where(self.at)}")
        after = self.pc + 1
        if control.kind == "bra":
            target = listing.labels[control.label]
            if mask is None:
                self.pc = target
                return ""
            if self.pcs is None:
                self.pcs = np.full(LANES, self.pc)
            self.pcs[active if active is not None else slice(None)] = after
            self.pcs[taken] = target
            return ""
        self._advance(active, after)
        if control.kind == "ret":
            self.done |= taken
            if self.pcs is None and not self.done.all():
                self.pcs = np.full(LANES, after)
        return "end" if self.done.all() else ""


class Program:
    """One program of the grid, with its shared memory."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.code, self.memory, self.settings = launch.code, launch.memory, launch.settings
        self.parameters, self.grid, self.notes, self.released = (
            launch.parameters, launch.grid, launch.notes, launch.released)
        x, y, _ = self.grid
        self.number, self.place = number, (number % x, number // x % y, number // (x * y))
        warps = self.code.listing.threads // LANES
        self.shared = SharedMemory(launch.shared, warps)
        self.epoch = self.steps = 0
        self.warps = [Warp(self, index) for index in range(warps)]

    def run(self) -> Iterator[None]:
        """Run to the end. Yields at each barrier, where other programs may run."""
        waiting = self.warps
        while waiting:
            reasons = {warp.index: warp.run() for warp in self.settings.arrange(waiting)}
            if len(set(reasons.values())) > 1:
                raise Fault(f"some warps have ended, others wait at a barrier: {self.code.listing.name}")
            waiting = [warp for warp in waiting if reasons[warp.index] == "barrier"]
            self.epoch += 1
            received: dict[int, int] = {}
            for warp in waiting:
                for program, epoch in warp.received.items():
                    received[program] = max(epoch, received.get(program, -1))
            for warp in waiting:
                warp.mark = mark(self.number, self.epoch, warp.index)
                warp.received = dict(received)
            yield


@dataclass
class Launch:
    """One launch. notes: races and reads of memory that nothing wrote, with the number of times."""

    ptx: str
    grid: tuple[int, ...]
    parameters: list[int]
    memory: Memory
    shared: int
    settings: Settings = field(default_factory=Settings)
    notes: Counter[str] = field(default_factory=Counter)
    released: dict[int, dict[int, int]] = field(default_factory=dict)  # by address: what a release there hands on

    def __post_init__(self) -> None:
        self.code = decoded(self.ptx, self.settings.omit)
        x, y, z = (*(int(n) for n in self.grid), 1, 1)[:3]
        self.grid = x, y, z
        if min(self.grid) < 1 or x >= 1 << 31 or max(y, z) > 65535:
            raise Fault(f"no grid: {self.grid}")
        most = SHARED.get(self.code.listing.target, 101_376)
        if self.shared > most:
            raise Fault(f"{self.shared} bytes of shared memory, where a program has {most}")

    def run(self) -> int:
        """Return the number of instructions that warps ran."""
        count = int(np.prod(self.grid))
        numbers = self.settings.arrange(range(count))
        with np.errstate(all="ignore"):
            if self.code.waits_for_programs:
                return self._run([Program(self, number) for number in numbers])
            return sum(self._run([Program(self, number)]) for number in numbers)

    def _run(self, programs: list[Program]) -> int:
        running = [program.run() for program in programs]
        while running:
            running = [each for each in running if next(each, "end") is None]
        return sum(program.steps for program in programs)
