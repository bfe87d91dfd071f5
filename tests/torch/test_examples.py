"""The example programs run, and the digits are learned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(root: Path, *command: str, timeout: float = 120, threads: str | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    if threads:
        env["OMP_NUM_THREADS"] = threads
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(root: Path) -> None:
    printed = run(root, "examples/quickstart.py")
    assert "image [1, 1, 8, 8] -> logits [1, 10], 73,626 parameters" in printed
    worst = float(re.search(r"step by step, to (\S+)", printed)[1])  # type: ignore[index]
    assert worst < 1e-5  # float32: about 30 units in the last place of values of order one


def digits(root: Path, out: Path, *options: str, timeout: float = 120) -> float:
    pytest.importorskip("sklearn", reason="the images come with scikit-learn (extra: examples)")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra: examples)")
    # two threads: the long run has the machine to itself (marker `timing`)
    printed = run(root, "examples/digits.py", "--out", str(out), *options, timeout=timeout, threads="2")
    assert (out / "digits.pt").stat().st_size > 100_000
    assert (out / "digits.png").stat().st_size > 10_000
    assert sorted(p.name for p in out.iterdir()) == ["digits.png", "digits.pt"]
    return float(re.search(r"test accuracy ([\d.]+)% after", printed)[1])  # type: ignore[index]


def test_digits_for_two_epochs(root: Path, tmp_path: Path) -> None:
    assert digits(root, tmp_path / "out", "--epochs", "2", "--set", "depth=2") > 5


@pytest.mark.slow
@pytest.mark.timing
def test_digits_are_learned(root: Path, tmp_path: Path) -> None:
    """It takes 77 s on two quiet cores (docs/measurements.md); a busy machine is only slower."""
    assert digits(root, tmp_path / "out", timeout=1200) >= 97
