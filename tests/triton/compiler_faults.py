"""Look in compiled kernels for two faults of compilers: docs/kernels/compiler_faults.md.

    python -m tests.triton.compiler_faults FILE [FILE ...]    .ttgir files, and disassemblies from `nvdisasm -c`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# ------------------------------------------------------------------------------
# Tiles in shared memory, overwritten while an asynchronous product reads them

VALUE = re.compile(r"%[\w-]+")
BUFFERS = re.compile(r"(%[\w-]+) = ttg\.local_alloc\b.*!ttg\.memdesc<(\d+)x")
PART = re.compile(r"(%[\w-]+) = ttg\.memdesc_\w+ (%[\w-]+)")
COPY = re.compile(r"ttg\.async_copy_global_to_local %[\w-]+, (%[\w-]+)")
UNKNOWN = 0  # the line of an allocation that is not found, as that of a tile which a loop passes on
WAIT = re.compile(r"ttng\.warp_group_dot_wait (%[^{]*)\{pendings = (\d+)")


def overwritten(ttgir: str) -> list[str]:
    """Return the tiles of pipelined loops that have too few buffers, from Triton's intermediate code for sm_90.

    With n copies in flight before a loop, an iteration copies the tile of the n-th iteration after it. If its product
    is still pending then, that tile needs a buffer other than those of this iteration and the n - 1 between: n + 1.
    """
    tiles: dict[str, int] = {}  # line of the allocation of a value in shared memory; regions may use a name again
    buffers: dict[int, int] = {}
    copies: list[tuple[int, int]] = []  # allocation and region
    waits: list[tuple[int, int, str]] = []
    regions = [0]  # lines at which the open regions begin
    for number, line in enumerate(ttgir.splitlines(), 1):
        if line.lstrip().startswith("}"):
            regions.pop()
        if found := BUFFERS.search(line):
            tiles[found[1]], buffers[number] = number, int(found[2])
        elif found := PART.search(line):
            tiles[found[1]] = tiles.get(found[2], UNKNOWN)
        elif found := COPY.search(line):
            copies.append((tiles[found[1]], regions[-1]))
        elif (found := WAIT.search(line)) and int(found[2]):
            operands = [tiles[x] for x in VALUE.findall(found[1]) if x in tiles]
            operands += [UNKNOWN] * (line.count("!ttg.memdesc<") - len(operands))
            waits += [(tile, regions[-1], line.strip()) for tile in operands]
        if re.search(r"\{(?: loc\(.*)?$", line):
            regions.append(number)
    faults = []
    for tile, loop, wait in waits:
        ahead = sum(to == tile and region != loop for to, region in copies)
        if tile == UNKNOWN:
            faults.append(f"an operand of unknown buffers: {wait}")
        elif (tile, loop) in copies and buffers[tile] <= ahead:
            faults.append(f"{buffers[tile]} buffers (line {tile}) for {ahead} copies in flight and {wait}")
    return faults


# ------------------------------------------------------------------------------
# Uniform registers that are read although nothing has written them

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
WRITERS = re.compile(r"U(?!TMA|BLK|TC)|R2UR|S2UR|CS2UR|LDCU|VOTEU|REDUX")  # if their first operand is uniform
UNIFORM = re.compile(r"(g?desc\[)?\bUR(\d+)\b(\.64)?")


def registers(name: str, operands: list[str]) -> tuple[list[int], list[int]]:
    """Return the uniform registers that an instruction reads and writes."""
    reads: list[int] = []
    if re.match(r"UP\d", operands[0]):  # also written; the register comes second
        operands = operands[1:]
    written = bool(WRITERS.match(name)) and bool(operands) and operands[0].startswith("UR") and operands[0] != "URZ"
    for operand in operands[1:] if written else operands:
        for kind, first, wide in UNIFORM.findall(operand):
            if kind == "gdesc[":  # the descriptors of both factors, or of the second, if the first is in registers
                own = 2 if re.match(r"R\d", operands[1]) else 0
                reads += range(int(first) + own, int(first) + 4)
            else:
                reads += range(int(first), int(first) + (2 if kind or wide or re.match(r"U.*\.64", name) else 1))
    if not written:
        return reads, []
    first = int(operands[0][2:])
    return reads, [*range(first, first + (4 if ".128" in name else 2 if re.search(r"\.(64|WIDE)\b", name) else 1))]


def unwritten(code: str) -> list[str]:
    """Return the uniform registers whose first use in a disassembled kernel is a read, with that instruction."""
    known: set[int] = set()
    faults: list[str] = []
    for address, name, rest in INSTRUCTION.findall(code):
        reads, writes = registers(name, re.split(r",\s*(?![^\[]*\])", rest))
        unknown = {*reads} - known if name != "UPRMT" else ()  # it also packs bytes whose value does not matter
        faults += [
            f"UR{register} is read at {address}, by {name} {rest}, but nothing has written it"
            for register in sorted(unknown)
        ]
        known |= {*reads, *writes}
    return faults


def main(words: list[str]) -> None:
    for word in words:
        text = Path(word).read_text(encoding="utf-8")
        for fault in overwritten(text) if word.endswith(".ttgir") else unwritten(text):
            print(f"{word}: {fault}")


if __name__ == "__main__":
    main(sys.argv[1:])
