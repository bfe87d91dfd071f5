"""Results of tests are in a file as soon as they are known: tests/results.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import results
from tests.gpu_machine import plain_environment

TESTS = """
import os, pytest

@pytest.mark.parametrize("at", [1, 2])
def test_passes(at): pass

def test_fails(): assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not here")
def test_skips(): pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown fails")

def test_breaks_at_its_end(broken): pass

def test_kills_the_process(): os._exit(3)

def test_does_not_begin(): pass
"""


def run(root: Path, folder: Path, *words: str) -> tuple[Path, str]:
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    (folder / "conftest.py").write_text((root / "tests" / "conftest.py").read_text("utf-8"), encoding="utf-8")
    file = folder / "out" / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)]
    done = subprocess.run(
        [*command, "--results", str(file), *words, str(folder / "test_some.py")],
        cwd=root, env=plain_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return file, done.stdout + done.stderr


def test_a_run_that_is_killed_keeps_its_results(root: Path, tmp_path: Path) -> None:
    file, printed = run(root, tmp_path)
    collected, tests = results.read(file.read_text("utf-8").splitlines())
    assert {name.partition("::")[2]: test["outcome"] for name, test in tests.items()} == {
        "test_passes[1]": "passed", "test_passes[2]": "passed", "test_fails": "failed", "test_skips": "skipped",
        "test_breaks_at_its_end": "failed", "test_kills_the_process": "did not end",
    }  # fmt: skip
    text = results.summary(collected, tests)
    assert text.startswith("2 passed, 2 failed, 1 skipped, 1 did not end; 1 of 7 did not begin")
    for words in ("one is not two", "teardown fails", "1 skipped: Skipped: not here"):
        assert words in text
    assert printed.index("test_fails failed:") < printed.index("test_breaks_at_its_end failed:")  # at once


@pytest.mark.slow
def test_several_processes_write_one_file(root: Path, tmp_path: Path) -> None:
    file, printed = run(root, tmp_path, "-p", "xdist", "-n", "2")
    collected, tests = results.read(file.read_text("utf-8").splitlines())
    assert collected == len(tests) == 7, printed
    assert "crashed while running" in next(t["message"] for n, t in tests.items() if n.endswith("kills_the_process"))
    command = [sys.executable, "tests/results.py", str(file), "--failed", "2"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert len(names) == 2
    failing = {"test_fails", "test_breaks_at_its_end", "test_kills_the_process"}
    assert {name.partition("::")[2] for name in names} < failing


def test_a_line_that_is_cut_off_is_ignored() -> None:
    lines = [json.dumps({"collected": 2}), json.dumps({"test": "a::b"}), '{"test": "a::b", "outc']
    assert results.read(lines) == (2, {"a::b": {"outcome": "did not end", "test": "a::b"}})
    assert results.summary(0, {}) == "no test began; 0 of 0 did not begin"
