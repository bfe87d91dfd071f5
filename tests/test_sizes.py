"""Check that functions and files stay short."""

from __future__ import annotations

import ast
import functools
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("seqblocks", "kernels", "cli", "tests", "benchmarks", "examples", "docs")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
LIBRARY = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("seqblocks", "kernels", "cli")]
MAX_LINES = 700


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lengths(paths: list[Path]) -> list[int]:
    """Return the lengths in lines of all functions, nested ones and methods included, in ascending order."""
    return sorted(length for path in paths for length in lengths_in(path))


@functools.cache
def lengths_in(path: Path) -> list[int]:
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef))
    return [(node.end_lineno or 0) - node.lineno + 1 for node in functions]


def test_functions_are_short() -> None:
    """Functions outside Triton are short. Splitting a Triton kernel into functions has a cost."""
    found = lengths([path for path in LIBRARY if "triton" not in ids(path)])
    assert len(found) > 1000
    assert statistics.median(found) <= 8
    assert statistics.quantiles(found, n=10)[-1] <= 25


def test_functions_with_triton_are_short_in_the_median() -> None:
    assert statistics.median(lengths(LIBRARY)) <= 8


def test_files_are_short() -> None:
    lines = {ids(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert len(lines) > 700
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split them"
