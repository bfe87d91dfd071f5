"""The example programs run, and the digits model learns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import listening


def run(root: Path, *command: str, timeout: float = 120, threads: str | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    if threads:
        env["OMP_NUM_THREADS"] = threads
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long  # tests/test_docs.py runs it in a clean clone, and CI
def test_quickstart(root: Path) -> None:
    quickstart(run(root, "examples/quickstart.py", "3"))


def quickstart(printed: str) -> None:
    """Check what the example prints."""
    assert re.search(r"1\. A model of [\d,]+ parameters, untrained, writes:\n\n    The .{160}\n", printed)
    assert re.search(r"3\. Now it writes:\n\n    The .{160}\n", printed)
    found = re.search(r"([\d.]+) bits per byte on text that it has not seen", printed)
    assert found
    assert float(found[1]) < 8  # what a guess among 256 bytes has
    assert "error[E401]: heads (5) must divide the width of q (64)" in printed
    assert "did you mean 'rms_norm'?" in printed


def digits(root: Path, out: Path, *options: str, timeout: float = 120, threads: str = "1") -> float:
    pytest.importorskip("sklearn", reason="the images come with scikit-learn (extra: examples)")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra: examples)")
    printed = run(root, "examples/digits.py", "--out", str(out), *options, timeout=timeout, threads=threads)
    assert (out / "digits" / "model.safetensors").stat().st_size > 100_000
    assert (out / "digits.png").stat().st_size > 10_000
    assert sorted(p.name for p in out.iterdir()) == ["digits", "digits.png"]
    return float(re.search(r"test accuracy ([\d.]+)% after", printed)[1])  # type: ignore[index]


@pytest.mark.slow
def test_digits_for_an_epoch(root: Path, tmp_path: Path) -> None:
    assert digits(root, tmp_path / "out", "--epochs", "1", "--set", "depth=2") > 5


@pytest.mark.long
def test_ctrl_c_keeps_the_model_of_the_last_full_epoch(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the images come with scikit-learn (extra: examples)")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra: examples)")
    script = ["examples/digits.py", "--out", str(tmp_path), "--epochs", "10000", "--set", "depth=2"]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with listening(script, cwd=root, env=env) as child:
        end = time.monotonic() + 100
        while child.poll() is None and not (tmp_path / "digits").exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # within the second epoch or a later one
        child.send_signal(signal.SIGINT)
        printed, complaints = child.communicate(timeout=60)
    assert child.returncode == 0, complaints
    assert "the model of the last full epoch is kept" in printed
    assert re.search(r"test accuracy [\d.]+% after \d+ epochs? in", printed)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits", "digits.png"]


# Runs scripts several times, each with other options and without one module, and prints exit statuses and messages.
REFUSALS = """
import contextlib, io, json, runpy, sys
out, runs = json.loads(sys.argv[1])
found = []
for script, missing, options in runs:
    if missing:
        sys.modules[missing] = None
    sys.argv, printed, status = [script, "--out", out, *options], io.StringIO(), 0
    with contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(f"examples/{script}.py", run_name="__main__")
        except SystemExit as end:
            status = end.code
    if missing:
        del sys.modules[missing]
    found.append((status, printed.getvalue()))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_examples_refuse_what_they_cannot_do_before_they_train(root: Path, tmp_path: Path) -> None:
    """Each runs without one module, then with wrong options, all in one process. They leave no files."""
    pytest.importorskip("sklearn", reason="the images come with scikit-learn (extra: examples)")
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra: examples)")
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    runs = [  # a script, a module that is absent, options, the exit status, and words of the message
        *(("digits", name, "", 4, (f"no {name}", "pip install 'seqblocks[examples]'"))
          for name in ("sklearn", "matplotlib")),
        ("digits", "", "--set depth", 2, ()), ("digits", "", "--epochs 0", 2, ()),
        ("digits", "", "--spec vil_digit", 2, ("vil_digit",)),
        ("language", "", "--steps 0", 2, ()), ("language", "", f"--text {tmp_path / 'none.txt'}", 2, ()),
        ("language", "", "--spec mamba_smal", 2, ("mamba_small",)),
        ("language", "", f"--text {tmp_path / 'short.txt'}", 2, ("too short",)),
    ]
    given = json.dumps([str(tmp_path / "out"), [(script, name, options.split()) for script, name, options, *_ in runs]])
    *_, last = run(root, "-c", REFUSALS, given).splitlines()
    for each, (status, message) in zip(runs, json.loads(last), strict=True):
        assert status == each[3], (each, message)
        assert all(word in message for word in each[4]), (each, message)
        assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.timing
def test_digits_are_learned(root: Path, tmp_path: Path) -> None:
    """It takes 77 s on two idle cores (docs/measurements.md), and longer on a busy machine."""
    assert digits(root, tmp_path / "out", timeout=1200, threads="2") >= 97


def language(root: Path, out: Path, *options: str) -> tuple[str, dict[str, float]]:
    """Run the example. Return its output and the bits per byte of each spec."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra: examples)")
    printed = run(root, "examples/language.py", "--out", str(out), *options, timeout=1500)
    found = re.findall(r"^(\w+): [\d,]+ parameters, [\d,]+ tokens in \d+ s, ([\d.]+) bits", printed, re.M)
    return printed, {spec: float(bits) for spec, bits in found}


@pytest.mark.slow
def test_language_for_a_few_steps(root: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 200, encoding="utf-8")
    options = ("--text", str(text), "--steps", "12", "--batch", "4", "--seq", "32", "--length", "5")
    printed, bits = language(root, tmp_path / "out", *options)
    assert list(bits) == ["mlstm_small", "mamba_small", "hybrid_small"]
    assert max(bits.values()) < 7  # 8 bits per byte is the cost without a model
    assert "5 bytes, one step each" in printed
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "hybrid_small", "language.png", "mamba_small", "mlstm_small"
    ]  # fmt: skip


@pytest.mark.long
def test_python_is_learned(root: Path, tmp_path: Path) -> None:
    """A fifth of the usual run reaches far less than 4.7 bits, the cost if only the frequencies of bytes are known."""
    _, bits = language(root, tmp_path / "out", "--steps", "48")
    assert max(bits.values()) < 3.5, bits
