"""The page of `seqblocks report` without torch: runs that diverge, short runs, and folders that are no run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from seqblocks.architect.run_page import Run as Kept
from seqblocks.architect.run_page import page, read_run

Run = Callable[..., subprocess.CompletedProcess[str]]


def write(folder: Path, losses: list[float], **more: object) -> Kept:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"unit": "bits per byte", "held_out_before": 8.0, **more}))
    lines = (json.dumps({"step": at, "loss": loss}) for at, loss in enumerate(losses, 1))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


def heights(text: str) -> list[list[float]]:
    """Return the y of the points of each curve."""
    return [[float(y) for y in re.findall(r",(\S+)", line)] for line in re.findall(r'polyline points="([^"]*)"', text)]


def test_a_run_that_diverges_does_not_flatten_the_others(tmp_path: Path) -> None:
    good = write(tmp_path / "good", [8.0, 6.0, 4.0])
    bad = write(tmp_path / "bad", [8.0, 2818.0, 3e16], ended="the loss is not finite at step 4 <")
    alone, both = page([good]), page([good, bad])
    whole, (first, *_) = heights(alone)[0], heights(both)
    assert whole[-1] - whole[0] == pytest.approx(290, abs=0.2)  # the whole height
    assert first[-1] - first[0] == pytest.approx(290 * 4 / 6, abs=0.2)  # of an axis from 4 to 10, a quarter above 8
    assert min(y for curve in heights(both) for y in curve) == 10  # nothing is drawn outside
    assert "at the upper edge: 10 or more" in both
    assert "at the upper edge" not in alone
    assert ">3e+16<" in both
    assert "8.000 (step 0)" in both  # what was held out was read before the run alone
    assert "bad: the loss is not finite at step 4 &lt;" in both


def test_a_loss_that_rises_a_little_is_drawn_whole(tmp_path: Path) -> None:
    assert "at the upper edge" not in page([write(tmp_path / "run", [8.0, 9.9, 4.0])])


def test_steps_on_the_axis_are_whole(tmp_path: Path) -> None:
    text = page([write(tmp_path / "run", [8.0, 7.0])])
    assert re.findall(r'<text x="(\S+)" y="316" text-anchor="(\w+)">(\S+)</text>', text) == [
        ("72.0", "middle", "0"), ("441.0", "middle", "1"), ("810.0", "end", "2"),
    ]  # fmt: skip


def test_folders_that_are_no_run(run_main: Run, tmp_path: Path) -> None:
    write(tmp_path / "my runs" / "one", [8.0])
    (tmp_path / "my runs" / "one" / "checkpoint").mkdir()
    (tmp_path / "text.txt").write_text("mine")
    for given, why in (
        ("absent", "there is no such folder"),
        ("text.txt", "it is a file; name the folder that has it"),
        ("my runs", "it is a folder of runs; name them, as in 'my runs'/*"),
        ("my runs/one/checkpoint", "it is a part of one; name 'my runs/one'"),
    ):
        done = run_main("report", given, "--html", "page.html", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"error: {given} is not a run of seqblocks try: {why}\n")
    assert not (tmp_path / "page.html").exists()


def test_a_page_replaces_a_page_alone(run_main: Run, tmp_path: Path) -> None:
    write(tmp_path / "run", [8.0, 7.0])
    for name, text in (("spec.yaml", "seqblocks: 1\n"), ("notes.txt", "mine")):
        (tmp_path / name).write_text(text)
        done = run_main("report", "run", "--html", name, cwd=tmp_path)
        assert done.returncode == 2
        assert f"{name} has something else" in done.stderr
        assert (tmp_path / name).read_text() == text
    for text in ("", " \n", "<!DOCTYPE html>", "\ufeff<html>"):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        assert run_main("report", "run", "--html", "page.html", cwd=tmp_path).returncode == 0
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
