"""Split the text of PTX into statements with their operands and the lines of Triton source that they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

REGISTER_FILES = ("p", "rs", "r", "rd")  # predicates, 16, 32 and 64 bits


@dataclass(frozen=True)
class Statement:
    """One instruction. `predicate` is the number of a predicate register, under which it runs, or None."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    predicate: int | None
    negated: bool
    source: str  # "triton/forward.py:120"

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass(frozen=True)
class Listing:
    """One kernel. A label is the index of the statement that follows it."""

    name: str
    target: str
    threads: int
    parameters: tuple[str, ...]
    symbols: frozenset[str]  # names of shared and global memory, whose address is 0
    registers: dict[str, int]  # how many of each file
    statements: tuple[Statement, ...]
    labels: dict[str, int]

    def where(self, at: int) -> str:
        """Describe a statement for a message."""
        statement = self.statements[at]
        return f"{self.name}, {statement.source}: {statement.text[:90]}"


def parse(text: str) -> Listing:
    head, _, body = text[text.index(".entry") :].partition("\n{\n")
    code = re.sub(r"//(?! (?:begin|end) inline asm)[^\n]*", "", body.partition("\n}\n")[0])
    files = {number: _short(path) for number, path in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    statements, labels = _statements(code, files)
    counts = dict.fromkeys(REGISTER_FILES, 0)
    counts |= {file: int(count) for file, count in re.findall(r"\.reg \.\w+\s+%(\w+?)<(\d+)>;", code)}
    return Listing(
        name=_first(r"\.entry (\w+)\(", head),
        target=_first(r"\.target (sm_\d+)", text),
        threads=int(_first(r"\.reqntid (\d+)", head)),
        parameters=tuple(re.findall(r"(\w+_param_\d+)", head)),
        symbols=frozenset({"global_smem", *re.findall(r"^\.global .*?\.b8 (\S+?)\[", text, re.MULTILINE)}),
        registers=counts,
        statements=tuple(statements),
        labels=labels,
    )


def operands(text: str) -> tuple[str, ...]:
    """Split at the commas outside of brackets."""
    return tuple(part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip())


def elements(operand: str) -> list[str]:
    """Return the elements of `{a, b}`, or the operand itself."""
    return [part.strip() for part in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]


def _statements(code: str, files: dict[str, str]) -> tuple[list[Statement], dict[str, int]]:
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    source, inline = "?", False
    for raw in re.split(r"(?<=[;:])\s|\n", code):
        line = raw.strip().lstrip("{").strip()
        if line.startswith("//"):
            inline = "begin" in line
        elif place := re.match(r"\.loc\s+(\d+) (\d+)", line):
            if inline:  # LLVM counts the lines of assembly as if they were lines of the source
                continue
            source = f"{files.get(place[1], '?')}:{place[2]}"
        elif label := re.match(r"(\$\w+):", line):
            labels[label[1]] = len(statements)
        elif line and line != "}" and not line.startswith("."):
            statements.append(_statement(line.rstrip("; "), source))
    return statements, labels


def _statement(line: str, source: str) -> Statement:
    found = re.match(r"(?:@(!?)%p(\d+)\s+)?(\S+)\s*(.*)$", line, re.DOTALL)
    assert found, line
    negated, predicate, opcode, rest = found.groups()
    return Statement(line, opcode, operands(rest), int(predicate) if predicate else None, bool(negated), source)


def _short(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[-2:])


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the PTX"
    return found[1]
