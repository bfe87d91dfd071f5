"""`seqblocks try` and `seqblocks report`: exact continuation, kills, data that do not fit, and the page."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import seqblocks
from seqblocks.architect.run_page import page, read_run, thinned
from seqblocks.training.data import HELD, Text, arrays_of
from seqblocks.training.loop import step
from seqblocks.training.trial import UNFINISHED, Settings, Trial, begin
from tests.processes import command

Run = Callable[..., subprocess.CompletedProcess[str]]
SPEC = """
seqblocks: 1
use: [mamba]
let: {dim: 16, vocabulary: 256}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: dim, init: {weight: "normal(0, 0.02)"}}
    - mamba_block: {dim: dim}
    - dropout: {p: 0.1}
    - rms_norm
    - unembed: {bias: false, tie: embed}
"""
TEXT = ("the quick brown fox jumps over the lazy dog. " * 200).encode()
SMALL = ("--length", "24", "--batch", "4", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "text.txt").write_bytes(TEXT)
    return tmp_path


def learn(run_main: Run, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = run_main("try", "spec.yaml", "--text", "text.txt", *SMALL, *words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def course(run: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["rate"], row.get("held_out"), row["tokens"]) for row in rows(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return seqblocks.load(run / "checkpoint").state_dict()


def test_a_run_that_continues_is_the_same_bit_for_bit(run_main: Run, folder: Path) -> None:
    learn(run_main, folder, "--steps", "60", "--out", "whole")
    learn(run_main, folder, "--steps", "23", "--out", "parts")
    # a kill after the checkpoint leaves further lines, the last one cut short; they are learned again
    with (folder / "parts" / "log.jsonl").open("a") as file:
        file.write('{"step": 24, "loss": 9.0}\n{"step": 2')
    done = run_main("try", "--resume", "parts", "--steps", "60", "--device", "cpu", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert course(folder / "parts") == course(folder / "whole")
    whole, parts = weights(folder / "whole"), weights(folder / "parts")
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert [row["step"] for row in rows(folder / "whole")] == [*range(1, 61)]
    assert rows(folder / "whole")[49]["held_out"] > 0
    again = run_main("try", "spec.yaml", "--text", "text.txt", "--resume", "parts", "--steps", "60", cwd=folder)
    assert again.returncode == 0  # nothing is left to do


def test_it_learns(run_main: Run, folder: Path) -> None:
    done = learn(run_main, folder, "--steps", "200", "--lr", "0.01", "--out", "run", "--format", "json")
    data = json.loads(done.stdout)
    assert data["steps"] == 200
    assert data["unit"] == "bits per byte"
    assert rows(folder / "run")[0]["loss"] > 7.5  # of 8 bits
    assert data["held_out"] < 3
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["after"] == data["sample"] != record["before"]
    assert record["held_out"] == data["held_out"]
    (row,) = rows(folder / "run")[-1:]
    assert row["tokens"] == 200 * 4 * 24


@pytest.mark.parametrize("step", [
    "position_embed: {length: 30}",
    "residual: [{identity: {as: x}}, {attention: {q: x, k: x, v: x, heads: 2, cache: 30}}]",
])
def test_a_sample_is_as_long_as_there_is_room(step: str, run_main: Run, folder: Path) -> None:
    (folder / "spec.yaml").write_text(SPEC.replace("- dropout: {p: 0.1}", f"- {step}"))
    learn(run_main, folder, "--steps", "1", "--out", "run")
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["before"].startswith(TEXT[-len(TEXT) // HELD :][:15].decode())
    longer = run_main("try", "spec.yaml", "--text", "text.txt", "--length", "31", "--steps", "1", cwd=folder)
    if "position" in step:
        assert (longer.returncode, longer.stdout) == (2, "")
        assert "Try another --length than 31" in longer.stderr


def test_a_length_that_the_spec_fixes(run_main: Run, folder: Path) -> None:
    text = SPEC.replace("{tokens: vocabulary}", "{tokens: vocabulary, length: 24}")
    (folder / "spec.yaml").write_text(text)
    done = run_main("try", "spec.yaml", "--text", "text.txt", "--length", "25", "--steps", "1", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "error: the spec fixes the input at 24 tokens: leave out --length\n")
    learn(run_main, folder, "--steps", "1", "--out", "run")
    assert json.loads((folder / "run" / "run.json").read_text())["settings"]["length"] == 24


@pytest.mark.slow
def test_a_kill_leaves_a_run_that_continues(run_main: Run, folder: Path) -> None:
    """At a random moment, and by an interrupt, after which the checkpoint is that of the last line of the log."""
    run, before = folder / "run", 0
    start = ["spec.yaml", "--text", "text.txt", *SMALL, "--out", str(run)]
    for number, kind, words in ((1, signal.SIGKILL, start), (2, signal.SIGINT, ["--resume", str(run)])):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        full, nowhere = command("try", *words, "--minutes", "5"), subprocess.DEVNULL
        with subprocess.Popen(full, cwd=folder, env=env, stdout=nowhere, stderr=nowhere) as process:
            end = time.monotonic() + 60
            while lines_of(run / "log.jsonl") <= before and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(random.Random(number).uniform(0.2, 0.8))
            process.send_signal(kind)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()
        assert process.returncode == (-signal.SIGKILL if kind == signal.SIGKILL else 130)
        logged = lines_of(run / "log.jsonl")
        assert logged > before
        kept = (seqblocks.checkpoint.load_extra(run / "checkpoint") or {})["step"]
        assert kept == logged if kind == signal.SIGINT else kept <= logged
        assert ended(run) == (UNFINISHED if kind == signal.SIGKILL else "interrupted")
        before = logged
    done = run_main("try", "--resume", str(run), "--steps", str(logged + 3), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(run)] == [*range(1, logged + 4)]
    assert ended(run) is None


def ended(run: Path) -> str | None:
    found: str | None = json.loads((run / "run.json").read_text()).get("ended")
    return found


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_nothing_is_overwritten(run_main: Run, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "precious.txt").write_text("mine")
    command = ("try", "spec.yaml", "--text", "text.txt", "--steps", "1")
    done = run_main(*command, "--out", "run", cwd=folder)
    assert done.returncode == 2
    assert "run exists: name another --out" in done.stderr
    assert [path.name for path in (folder / "run").iterdir()] == ["precious.txt"]
    for expected in ("runs/spec", "runs/spec-2"):
        assert run_main(*command, "-q", *SMALL, cwd=folder).stdout == ""
        assert (folder / expected / "run.json").exists()
    shown = run_main(*command, "--out", "my run", *SMALL, cwd=folder).stdout
    assert "seqblocks report 'my run' " in shown
    assert "seqblocks try --resume 'my run' --minutes 3" in shown
    again = run_main(*command, "--out", "my run", cwd=folder).stderr
    assert "my run exists: continue it with --resume 'my run', or name" in again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["spec.yaml"], "name the data"),
        (["--text", "text.txt"], "name a spec"),
        (["spec.yaml", "--text", "absent.txt"], "absent.txt cannot be read"),
        (["spec.yaml", "--text", "empty.txt"], "empty.txt has 0 bytes"),
        (["spec.yaml", "--text", "zero.txt"], "zero.txt is not a text: byte 1 is zero"),
        (["spec.yaml", "--text", "latin.txt"], "latin.txt is not UTF-8 text: byte 3 cannot be read"),
        (["spec.yaml", "--text", "text.txt", "--length", "5000"], "use a longer text, or a smaller --length"),
        (["spec.yaml", "--text", "text.txt", "--set", "vocabulary=50"], "--set vocabulary=256"),
        (["spec.yaml", "--text", "text.txt", "--steps", "1", "--minutes", "1"], "leave out one"),
        (["spec.yaml", "--text", "text.txt", "--npz", "a.npz"], "leave out one"),
        (["vil_tiny", "--text", "text.txt"], "--text needs a language model"),
        (["sees_all.yaml", "--text", "text.txt"], "depend on later tokens"),
        (["spec.yaml", "--npz", "text.txt"], "is not an .npz file"),
        (["--resume", "absent"], "absent is not a run"),
        (["--resume", ".", "--out", "x"], "leave out --out"),
    ],
)
def test_faults(words: list[str], message: str, run_main: Run, folder: Path) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "zero.txt").write_bytes(b"a\0b" * 4000)
    (folder / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 4000)
    (folder / "sees_all.yaml").write_text(SEES_ALL)
    done = run_main("try", *words, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (folder / "runs").exists()


def test_a_run_continues_with_its_own_data_and_spec_alone(run_main: Run, folder: Path) -> None:
    learn(run_main, folder, "--steps", "2", "--out", "run")
    (folder / "other.yaml").write_text(SPEC.replace("dim: 16", "dim: 8"))
    (folder / "text.txt").write_bytes(TEXT + b"more")
    for words, message in (
        ([], "are not those of the run"),
        (["other.yaml"], "is not the spec of the run"),
        (["--lr", "0.1"], "the run has rate 0.003"),
        (["--seed", "1"], "the run has seed 0"),
        (["--set", "dim=8"], "leave out --set"),
        (["spec.yaml", "--set", "dim=8"], "is not the spec of the run"),
        (["--steps", "1"], "are not those"),
    ):
        done = run_main("try", *words, "--resume", "run", cwd=folder)
        assert done.returncode == 2
        assert message in done.stderr


def test_runs_that_cannot_continue(run_main: Run, folder: Path) -> None:
    learn(run_main, folder, "--steps", "1", "--out", "run")
    record = (folder / "run" / "run.json").read_text()

    def continued() -> str:
        done = run_main("try", "--resume", "run", "--steps", "2", cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    (folder / "text.txt").rename(folder / "other.txt")
    assert "the data of the run, text.txt, are not here: name them with --text FILE" in continued()
    (folder / "other.txt").rename(folder / "text.txt")
    (folder / "run" / "checkpoint").rename(folder / "elsewhere")
    assert "run has no model written by seqblocks.save or seqblocks try" in continued()
    (folder / "elsewhere").rename(folder / "run" / "checkpoint")
    (folder / "run" / "run.json").write_text(record.replace('"digest"', '"digset"'))
    assert "run.json is damaged" in continued()
    (folder / "run" / "run.json").write_text(record)
    (folder / "run" / "checkpoint" / "seqblocks.extra.pt").unlink()
    assert "its checkpoint has no state of the optimiser" in continued()


def test_overrides_may_follow_the_path(run_main: Run, folder: Path) -> None:
    command = ("try", "spec.yaml@dim=8", "--text", "text.txt", *SMALL, "--steps", "1", "--out", "run", "-q")
    assert run_main(*command, cwd=folder).returncode == 0
    assert seqblocks.load(folder / "run" / "checkpoint").get_parameter("embed.weight").shape == (256, 8)


def test_a_loss_that_is_not_finite_keeps_the_checkpoint(run_main: Run, folder: Path) -> None:
    """A loss above the largest number of float32 stops the run, whose weights are those of the step before."""
    (folder / "spec.yaml").write_text(FEATURES)
    x = numpy.full((40, 6, 3), 1e19, "float32")
    numpy.savez(folder / "data.npz", x=x, y=numpy.full((40, 6, 2), 3e38, "float32"))
    done = run_main("try", "spec.yaml", "--npz", "data.npz", "--steps", "9", "--out", "run", cwd=folder)
    assert done.returncode == 2
    assert "not finite at step 1: begin another run with a smaller --lr" in done.stderr
    assert "not finite at step 1" in json.loads((folder / "run" / "run.json").read_text())["ended"]
    assert all(x.isfinite().all() for x in weights(folder / "run").values())
    assert (seqblocks.checkpoint.load_extra(folder / "run" / "checkpoint") or {})["step"] == 0


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, before = torch.optim.AdamW(model.parameters()), model.weight.detach().clone()
    assert not math.isfinite(step(model, optimizer, 0.1, lambda: model(torch.full((1, 2), torch.inf)).sum()))
    assert torch.equal(model.weight, before)
    # the loss is finite, and its gradient is not
    assert not math.isfinite(step(model, optimizer, 0.1, lambda: (model.weight - before).abs().sqrt().sum()))
    assert torch.equal(model.weight, before)
    assert math.isfinite(step(model, optimizer, 0.1, lambda: model(torch.ones(1, 2)).sum()))
    assert not torch.equal(model.weight, before)


def test_a_folder_gets_its_name_when_it_is_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written before the folder has its name, so that a kill leaves no folder that cannot continue."""
    seen = []
    data = Text(TEXT, 24)
    note = Trial.note

    def noted(self: Trial, **entries: Any) -> None:
        seen.append((folder / "run").exists())
        note(self, **entries)

    monkeypatch.setattr(Trial, "note", noted)
    _, spec = seqblocks.load_spec(folder / "spec.yaml")
    assert spec is not None
    begin(folder / "run", spec, data, Settings(batch=2, length=24), "cpu", {})
    assert seen == [False]
    assert {path.name for path in (folder / "run").iterdir()} == {"checkpoint", "log.jsonl", "run.json"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_job_in_the_background_ignores_interrupts(
    run_main: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell lets it ignore them, so that Ctrl-C ends what runs in the foreground alone."""
    step = Trial._step

    def interrupted(self: Trial) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trial, "_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        learn(run_main, folder, "--steps", "3", "--out", "run")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(rows(folder / "run")) == 3


def test_a_full_disk_leaves_no_gap_in_the_log(
    run_main: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(run_main, folder, "--steps", "2", "--out", "run")
    before, size = Path.open, len((folder / "run" / "log.jsonl").read_text())

    def limited(path: Path, mode: str = "r", **more: Any) -> Any:
        if mode == "a" and path.stat().st_size > 1.6 * size:
            with before(path, mode, **more) as file:
                file.write('{"step": 4, "lo')
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(path, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", limited)
        done = run_main("try", "--resume", "run", "--steps", "9", cwd=folder)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: run/log.jsonl cannot be written: No space left on device. Free some")
    assert run_main("try", "--resume", "run", "--steps", "5", cwd=folder).returncode == 0
    assert [row["step"] for row in rows(folder / "run")] == [1, 2, 3, 4, 5]


def test_an_interrupt_before_the_first_step_of_a_run(
    run_main: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first checkpoint is there, so that it can be continued."""

    def interrupted(self: Trial, *arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "run", interrupted)
    done = run_main("try", "spec.yaml", "--text", "text.txt", *SMALL, "--out", "run", cwd=folder)
    assert done.returncode == 130, done.stderr
    assert ended(folder / "run") == "interrupted"


def test_an_interrupt_before_the_first_step_leaves_nothing(
    run_main: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command lets an interrupt end the process at once, except while there is something to keep or to remove."""
    monkeypatch.setattr(Trial, "note", lambda self, **entries: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, lambda number, frame: os.write(2, b"ended at once"))
    try:
        done = run_main("try", "spec.yaml", "--text", "text.txt", *SMALL, "--steps", "1", "--out", "run", cwd=folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert {path.name for path in folder.iterdir()} == {"spec.yaml", "text.txt"}


# --- arrays -----------------------------------------------------------------------------------------------------------

FEATURES = """
seqblocks: 1
model:
  input: {features: 3}
  steps:
    - causal_conv: {kernel: 3}
    - linear: {features: 2}
"""
SEES_ALL = SPEC.replace("- mamba_block: {dim: dim}", "- identity: {as: x}").replace(
    "- dropout: {p: 0.1}", "- attention: {q: x, k: x, v: x, heads: 2, causal: false}"
)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_arrays(kind: str, run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(FEATURES)
    generator = numpy.random.default_rng(0)
    x = generator.standard_normal((200, 6, 3)).astype("float32")
    y = (x[..., 0] > 0).astype("int64") if kind == "classes" else numpy.stack([x[..., 0], x[..., 1]], -1)
    numpy.savez(tmp_path / "data.npz", x=x, y=y)
    command = ("try", "spec.yaml", "--npz", "data.npz", "--steps", "300", "--lr", "0.02", "--out", "run")
    done = run_main(*command, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["unit"] == ("nats" if kind == "classes" else "mean square")
    assert data["held_out"] < 0.2
    assert data["sample"] is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": [[1.0]]}, "has the arrays x; it needs x (inputs) and y"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 3, "y": [0, 1]}, "the same number of rows"),
        ({"x": [[[1.0, 2.0]]] * 2, "y": [[0], [1]]}, "the model reads"),
        ({"x": [[[1.0, 2.0, float("nan")]]] * 2, "y": [[0], [1]]}, "an input is not finite"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [[0], [7]]}, "the model has 2 outputs, and a target is 7"),
        ({"x": [[[1.0, 2.0, 3.0]]], "y": [[0]]}, "needs at least two rows"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [[0], [-7]]}, "the model has 2 outputs, and a target is -7"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [[-100], [-100]]}, "every target is -100"),
        ({"x": numpy.zeros((0, 1, 3)), "y": numpy.zeros((0, 1), int)}, "are empty: their shapes are [0, 1, 3]"),
        ({"x": [[[1.0, 2.0, 3j]]] * 2, "y": [[0], [1]]}, "inputs are real numbers"),
        ({"x": [[[1.0, 2.0, 1e300]]] * 2, "y": [[0], [1]]}, "an input is not finite"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [[0], [1]], "x_test": [[[1.0, 2.0, 3.0]]]}, "or neither"),
        ({"x": ["a", "b"], "y": [0, 1]}, "is not an .npz file of numbers"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [0, 1]}, "a target of the shape [1] for each row"),
        ({"x": [[[1.0, 2.0, 3.0]]] * 2, "y": [[[0.0]], [[1.0]]]}, "a target of the shape [1, 2] for each row"),
    ],
)
def test_arrays_that_do_not_fit(arrays: dict[str, Any], message: str, run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(FEATURES)
    numpy.savez(tmp_path / "data.npz", **{name: numpy.array(value) for name, value in arrays.items()})
    done = run_main("try", "spec.yaml", "--npz", "data.npz", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_arrays_of_any_numbers(tmp_path: Path) -> None:
    """Ids in 16 bits without a sign, as texts are often kept; numbers of another machine; and arrays beside them."""
    _, spec = seqblocks.load_text("seqblocks: 1\nmodel: {input: {tokens: 300}, steps: [{embed: 4}, {linear: 300}]}\n")
    ids = numpy.arange(297).reshape(99, 3) + 1
    for kind in ("uint16", "uint32", "uint64", ">i4", "int16"):
        numpy.savez(tmp_path / "data.npz", x=ids.astype(kind), y=ids.astype(kind), names=numpy.array(["a"]))
        data = arrays_of(tmp_path / "data.npz", spec)
        assert torch.equal(torch.cat([data.train.x, data.held.x]), torch.from_numpy(ids))
        assert torch.equal(data.train.x, data.train.y)


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    """A batch of them has no loss; the run would end as if the rate were too high."""
    _, spec = seqblocks.load_text(FEATURES)
    x, y = numpy.random.default_rng(0).random((60, 6, 3)), numpy.full((60, 6), -100)
    y[::3, 2] = 1
    numpy.savez(tmp_path / "data.npz", x=x, y=y)
    data = arrays_of(tmp_path / "data.npz", spec)
    assert len(data.train.x) + len(data.held.x) == 20
    for seed in range(9):
        given, target = data.batch(seed, 1)
        assert data.loss(torch.zeros(1, 6, 2), target) == pytest.approx(math.log(2))
        assert given[0].numpy() in x[::3].astype("float32")


def test_held_out_bytes_are_not_learned() -> None:
    content = bytes([1]) * (HELD - 1) * 100 + bytes([2]) * 100
    data = Text(content, 8)
    for seed in range(50):
        assert (data.batch(seed, 4)[0] == 1).all()
        assert (data.batch(seed, 4, held=True)[1] == 2).all()
        assert torch.equal(data.batch(seed, 4)[0], data.batch(seed, 4)[0])


# --- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collect the tags, and whatever would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "line", "polyline", "rect", "path", "circle", "use"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page(run_main: Run, folder: Path) -> None:
    learn(run_main, folder, "--steps", "60", "--out", "a<b")
    learn(run_main, folder, "--steps", "20", "--out", "second", "--set", "dim=8")
    done = run_main("report", "a<b", "second", "--html", "page.html", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    text = (folder / "page.html").read_text()
    found = Page(text)
    assert found.open == []
    assert [each for each in found.loaded if not each.startswith("#")] == []
    assert "<script" not in text
    assert "a&lt;b" in text
    assert "a<b" not in text
    assert text.count("<polyline") == 4  # two losses, and what was held out
    assert text.count("<h3>Before</h3>") == text.count("<h3>After</h3>") == 2
    assert f"{rows(folder / 'second')[-1]['loss']:.3f}" in text
    assert "Differences from" in text
    assert "/checkpoint" not in text.partition("<summary>")[0]
    assert text.count("<summary>The spec") == 2
    assert "<summary>The spec, with --set dim=8</summary>" in text
    assert (folder / "second" / "checkpoint" / "spec.yaml").read_text().splitlines()[0] in text
    data = (folder / "text.txt").read_bytes()
    assert text.count(f"sha256 of the data {hashlib.sha256(data).hexdigest()[:16]}") == 2
    done = run_main("diff", "second", "second@dim=16", "--exit-code", cwd=folder)  # a run is a design, with its weights
    assert (done.returncode, done.stderr) == (1, "")
    assert "dim=16" in done.stdout
    assert run_main("diff", "second", "second/checkpoint", "--weights", "--exit-code", cwd=folder).returncode == 0
    assert run_main("report", "second", cwd=folder).returncode == 0
    assert (folder / "second" / "report.html").exists()
    assert run_main("report", "second", "--html", "-", cwd=folder).stdout.startswith("<!doctype html>")
    assert run_main("report", "second", "--html", "-", "--format", "json", cwd=folder).returncode == 2
    assert run_main("report", "absent", cwd=folder).returncode == 2
    done = run_main("report", "second", "a<b", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "name it with --html FILE" in done.stderr


def test_a_page_without_some_fields(folder: Path) -> None:
    (folder / "run.json").write_text("{}")
    lines = ('{"step": 1}', "not json", "[]", '{"step": 2, "loss": "x"}', '{"step": 3, "loss": NaN}', '{"st')
    (folder / "log.jsonl").write_text("\n".join(lines))
    text = page([read_run(folder)])
    assert "Nothing has been logged yet." in text
    assert "There is no picture" in text


@pytest.mark.slow
def test_thinning_keeps_the_extremes() -> None:
    chance = random.Random(1)
    points = [(float(x), chance.gauss(0, 1)) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[67_890] = (67_890.0, -99.0)
    found = thinned(points)
    assert len(found) <= 1600
    assert {points[54_321], points[67_890], points[0], points[-1]} <= {*found}
    assert found == sorted(found)
