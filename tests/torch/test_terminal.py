"""Long commands on a terminal: they show a progress bar there alone, and Ctrl-C leaves what is done (status 130)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqblocks.cli import progress
from tests.processes import command

SPEC = """seqblocks: 1
use: [transformer]
let: {dim: 32, depth: 1, vocabulary: 256}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: dim
    - repeat: {times: depth, name: layers, steps: [{residual: [rms_norm, {swiglu: {hidden: 2 * dim}}]}]}
    - unembed
"""
BAR = "━".encode()
DIMS = "dim=1..9999"
LIMIT = 300  # seconds, for machines that other processes use: idle, a command takes three to eight

# What each command leaves: text on standard output, or a file in the folder.
COMMANDS: dict[str, tuple[list[str], Callable[[str, Path], Any]]] = {
    "probe": (
        ["probe", "spec.yaml", "parity", "--set", "vocabulary=2", "--steps", "1000000"],
        lambda text, folder: "* training stopped before its last step" in text,
    ),
    "try": (
        ["try", "spec.yaml", "--text", "text.txt", "--steps", "1000000", "--out", "run", "--length", "32"],
        lambda text, folder: (folder / "run/checkpoint/model.safetensors").stat().st_size and "held out" in text,
    ),
    "sweep": (
        ["sweep", "spec.yaml", "--set", DIMS, "--out", "rows.jsonl"],
        lambda text, folder: len((folder / "rows.jsonl").read_text().splitlines()) > 9 and "were done" in text,
    ),
    "bench": (
        # 500 turns, the most that it takes, last a minute on a quick machine.
        ["bench", "spec.yaml", "--length", "8192", "--seconds", "9999", "--threads", "1", "--format", "json"],
        lambda text, folder: json.loads(text)["interrupted"] and json.loads(text)["seconds"] > 0,
    ),
    "fit": (
        ["fit", "spec.yaml", "--solve", DIMS, "--to", "params=125M", "--exhaustive"],
        lambda text, folder: "before an interrupt" in text and "--set dim=" in text,
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 99)
    return tmp_path


def start(words: list[str], folder: Path, root: Path, stderr: Any, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    return subprocess.Popen(
        command(*words), cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=stderr, **options
    )


def until_bar(terminal: int) -> bytes:
    """Return what was written on a terminal until a bar appeared on it."""
    shown, end = b"", time.monotonic() + LIMIT
    while BAR not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096)
    return shown


QUICKER: dict[str, Any] = {"fit": (), "try": pytest.mark.slow, "bench": pytest.mark.slow}


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=QUICKER.get(name, pytest.mark.long)) for name in COMMANDS
])
def test_ctrl_c_on_a_terminal(name: str, folder: Path, root: Path) -> None:
    """The terminal itself sends the interrupt, when the bar is there."""
    import fcntl
    import pty
    import termios

    words, leaves = COMMANDS[name]
    terminal, inside = pty.openpty()
    child = start(
        words, folder, root, inside, stdin=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    try:
        shown = until_bar(terminal)
        assert BAR in shown
        time.sleep(3 if name == "bench" else 0.5)  # which needs two turns
        os.write(terminal, b"\x03")
        text, _ = child.communicate(timeout=LIMIT)
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(terminal, 4096):
                shown += more
    finally:
        child.kill()
        os.close(terminal)
    assert child.returncode == 130, shown
    assert b"Traceback" not in shown
    assert BAR.decode() not in text
    assert leaves(text, folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_pipes_show_no_bar(folder: Path, root: Path) -> None:
    words, leaves = COMMANDS["sweep"]
    child = start(words, folder, root, subprocess.PIPE)
    rows, end = folder / "rows.jsonl", time.monotonic() + LIMIT
    while not (rows.exists() and rows.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(progress.DELAY + 0.5)
    child.send_signal(2)
    text, errors = child.communicate(timeout=LIMIT)
    assert (child.returncode, errors) == (130, "")
    assert leaves(text, folder)
