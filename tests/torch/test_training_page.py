"""The loops of docs/training.md: they learn, and continue after a kill bit for bit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import seqblocks
from tests.sampled import slow

pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text("utf-8")
BLOCKS = {name: code for code, name in re.findall(r"```\w+\n(# (\w+)\.py\n.*?)```", PAGE, re.S)}
TEXT = b"The quick brown fox jumps over the lazy dog. " * 40
IDS = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
# Steps of several kinds, dropout, a tied embedding.
SPEC = """
seqblocks: 1
use: [xlstm, transformer]
model:
  input: {tokens: 256}
  steps:
    - embed: {features: 16}
    - mlstm_block: {dim: 16, heads: 2, dropout: 0.1}
    - attention_layer: {dim: 16, heads: 2, window: 8}
    - layer_norm
    - unembed: {bias: false, tie: embed}
"""


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def page(name: str) -> Any:
    module = ModuleType(name)
    sys.modules[name] = module  # for dataclasses
    try:
        exec(compile(BLOCKS[name], f"docs/training.md, {name}.py", "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return str(tmp_path / "spec.yaml")


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Return a function that lets the given optimiser step, counted from now, kill the training."""
    real = torch.optim.AdamW.step

    def arm(count: int) -> None:
        left = [count]

        def step(self: Any, *args: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real(self, *args, **keywords)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)

    yield arm
    monkeypatch.setattr(torch.optim.AdamW, "step", real)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


# ------------------------------------------------------------------------------
# Plain torch

# 12 steps of 40 tokens pass the end of each row, and checkpoints are written after 4, 8 and 12 of them.
SMALL: dict[str, Any] = {
    "steps": 12, "rows": 4, "length": 40, "every": 4, "warm_up": 3, "device": "cpu", "autocast": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("autocast", "kills"), [(False, [3, 4, 6, 99]), slow((True, [6]))])
def test_a_killed_loop_continues_bit_for_bit(
    tmp_path: Path, spec: str, kill_at: Any, autocast: bool, kills: list[int]
) -> None:
    train = page("train")
    settings = train.Settings(spec, str(tmp_path / "whole"), **{**SMALL, "autocast": autocast})
    whole, losses = train.train(TEXT, settings)
    settings = replace(settings, folder=str(tmp_path / "killed"))
    for count in kills:
        kill_at(count)
        try:
            train.train(TEXT, settings)
        except Killed:
            torch.rand(7)  # the random state of a new process is another
    kill_at(0)
    again, others = train.train(TEXT, settings)
    assert losses == others
    assert same(whole, again)
    last = [seqblocks.load(tmp_path / name / "last") for name in ("whole", "killed")]
    assert same(*last)
    assert not same(whole, last[0]), "the average is not the last model"


def test_the_loop_learns_and_finishes(tmp_path: Path, spec: str) -> None:
    pytest.importorskip("matplotlib", reason="the loop plots; the test extra installs it")
    train = page("train")
    settings = train.Settings(spec, str(tmp_path / "run"), **{**SMALL, "steps": 40, "every": 40, "rate": 0.03})
    model, losses = train.train(TEXT, settings)
    assert losses[-1] < 0.75 * losses[0]
    sample = train.finish(model, losses, settings.folder)
    assert sample.startswith("The statement ")
    assert len(sample) > len("The statement ")
    assert same(seqblocks.load(tmp_path / "run" / "averaged"), model)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000


def test_the_learning_rate() -> None:
    train = page("train")
    settings = train.Settings(steps=100, warm_up=10, rate=1.0)
    rates = [train.rate_at(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.long
def test_processes_that_are_killed(tmp_path: Path, spec: str) -> None:
    """Real processes, killed at arbitrary moments, also while they write a checkpoint."""
    (tmp_path / "train.py").write_text(BLOCKS["train"])
    (tmp_path / "run.py").write_text(
        f"import sys, torch, train\ntorch.set_num_threads(1)\n"
        f"train.train({TEXT!r}, train.Settings({spec!r}, sys.argv[1], **{ {**SMALL, 'steps': 30, 'every': 1}!r}))\n"
    )
    command = [sys.executable, "-u", "run.py"]
    train = page("train")
    train.train(TEXT, train.Settings(spec, str(tmp_path / "whole"), **{**SMALL, "steps": 30, "every": 1}))
    kills = 0
    for wait in (0.1, 600.0):
        with subprocess.Popen([*command, "killed"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()  # the first checkpoint of this process is complete
            time.sleep(min(wait, 1))
            if wait < 600 and process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.stdout.read()
        kills += process.returncode == -signal.SIGKILL
    assert kills, "the training was over before it could be killed"
    assert process.returncode == 0
    assert same(seqblocks.load(tmp_path / "whole" / "last"), seqblocks.load(tmp_path / "killed" / "last"))


# ------------------------------------------------------------------------------
# Lightning and the Trainer


@pytest.mark.filterwarnings("ignore")  # Lightning's, of a first run without a checkpoint
def test_lightning_continues_bit_for_bit(tmp_path: Path, spec: str, kill_at: Any) -> None:
    pytest.importorskip("lightning", reason="needs lightning, which no extra installs")
    run = page("lightning_run")
    assert len(BLOCKS["lightning_run"].splitlines()) < 45

    def fitted(folder: str, kill: int = 0) -> torch.nn.Module:
        torch.manual_seed(0)
        module = run.Streams(spec, IDS, rows=4, length=40)
        kill_at(kill)
        run.fit(module, tmp_path / folder, 12, every=4)
        return module.model

    whole = fitted("whole")
    for kill in (6, 5):
        with pytest.raises(Killed):
            fitted("killed", kill)
    assert same(whole, fitted("killed"))
    assert not same(whole, seqblocks.build(spec))


@pytest.mark.slow
def test_the_trainer_continues_bit_for_bit(tmp_path: Path, spec: str, kill_at: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="an optional extra; the test extra installs it")
    pytest.importorskip("accelerate", reason="the Trainer needs it; the test extra installs it")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run = page("trainer_run")
    options = {"per_device_train_batch_size": 2, "save_steps": 4, "use_cpu": True, "disable_tqdm": True}

    def fitted(folder: str, kill: int = 0) -> torch.nn.Module:
        kill_at(kill)
        return run.fit(spec, IDS, str(tmp_path / folder), 12, length=40, **options)

    whole = fitted("whole")
    for kill in (6, 5):
        with pytest.raises(Killed):
            fitted("killed", kill)
    assert same(whole, fitted("killed"))
    assert not same(whole, seqblocks.build(spec))
