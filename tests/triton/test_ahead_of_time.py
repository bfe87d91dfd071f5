"""Every kernel compiles for GPUs that are not here, fits into their shared memory, and keeps its values in registers.

`ahead_of_time.py` does the compiling, in a process of its own. tests/golden/triton/ahead_of_time.txt is what it prints
with the Triton named in its first line; other versions are held to the bounds alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton here")

SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}  # bytes that a program may have
LOCAL = 16  # bytes: a value or two put aside outside the loops is no harm
REGISTERS = {"sm_80": 255, "sm_90": 255, "gfx942": 256}  # gfx942: beyond that the second half of the file is used


def table(words: list[str], root: Path, cache: Path) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.triton.ahead_of_time", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hold(lines: list[str]) -> None:
    assert len(lines) > 1
    for line in lines[1:]:
        _, _, arch, _, *numbers = (cell.strip() for cell in line.split("|"))
        registers, local, shared = map(int, numbers)
        assert local <= LOCAL, line
        assert shared <= SHARED[arch], line
        assert registers <= REGISTERS[arch], line


def test_one_of_each(root: Path, tmp_path: Path) -> None:
    lines = table(["N=16 bf16 constant", "K=4 bf16 silu reverse"], root, tmp_path)
    assert len(lines) == 1 + 2 * 2 * len(SHARED)
    hold(lines)


@pytest.mark.slow
def test_all(root: Path, tmp_path: Path, update_golden: bool) -> None:
    lines = table([], root, tmp_path)
    golden = root / "tests" / "golden" / "triton" / "ahead_of_time.txt"
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hold(lines)
    recorded = golden.read_text(encoding="utf-8").splitlines()
    if lines[0] == recorded[0]:
        assert lines == recorded
    else:  # another compiler has other numbers, for the same launches
        assert [line.split("|")[:4] for line in lines[1:]] == [line.split("|")[:4] for line in recorded[1:]]
