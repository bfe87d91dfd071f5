"""`seqblocks sweep` with trainings and times of each design."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqblocks.probes import training

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_each_design_is_trained_and_timed(run_main: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "READ", 32)  # sequences whose answers are counted
    designs = ("mlstm_small", "--set", "dim=8,16", "--set", "depth=1")
    command = ("sweep", *designs, "--probe", "parity", "--steps", "3", "--bench", "step")
    done = run_main(*command, "--seconds", "0.02", "--format", "json", "--out", "rows.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    for row in rows:
        assert 0 <= row["accuracy of parity"] <= 1
        assert row["seconds"] > 0
    again = run_main(*command, "--seconds", "0.02", "--format", "json", "--out", "rows.jsonl", cwd=tmp_path)
    assert json.loads(again.stdout)["rows"] == rows  # kept, not measured again
    other = run_main(*command, "--seconds", "0.02", "--seeds", "2", "--out", "rows.jsonl", cwd=tmp_path)
    assert other.returncode == 0
    assert "seconds: step on " in other.stdout
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4  # more seeds give other figures
    best = max(rows, key=lambda row: row["accuracy of parity"])
    assert best["front"] is True


def test_faults(run_main: Run) -> None:
    done = run_main("sweep", "mlstm_small", "--set", "dim=8", "--probe", "partiy")
    assert done.returncode == 2
    assert "did you mean 'parity'?" in done.stderr


def test_an_interrupt_of_a_time_ends_the_sweep(run_main: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a measurement early, which returns what it has; the designs after it are not measured."""
    times = iter([(1.0, False), (2.0, True), (3.0, False)])

    def bench(*_: object) -> SimpleNamespace:
        seconds, interrupted = next(times)
        return SimpleNamespace(seconds=seconds, interrupted=interrupted)

    monkeypatch.setattr("seqblocks.bench.bench", bench)
    done = run_main("sweep", "mlstm_small", "--set", "dim=8,16,32", "--bench", "forward", "--format", "json")
    assert done.returncode == 130
    assert [row["seconds"] for row in json.loads(done.stdout)["rows"]] == [1.0]


@pytest.mark.parametrize(("words", "fault"), [
    (("transformer_small", "--set", "vocabulary=32,64", "--probe", "recall", "--steps", "1"), "a vocabulary of 64"),
    pytest.param(("vil_tiny", "--set", "dim=192", "--probe", "parity"), "not", marks=pytest.mark.slow),
])
def test_a_design_that_cannot_be_measured_has_a_fault(
    words: tuple[str, ...], fault: str, run_main: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "READ", 32)
    done = run_main("sweep", *words, "--format", "json")
    first, *others = json.loads(done.stdout)["rows"]
    assert fault in first["fault"]
    assert "accuracy of recall" not in first
    assert [row["fault"] for row in others] == [None] * len(others)
    assert done.returncode == (0 if others else 2)  # another probe or spec is needed
