"""Try a spec: learn for a few minutes, and keep what was learned in a folder, which continues exactly.

The batch and the random numbers of a step depend on the seed and the number of the step alone, and the rate rises for
`WARM_UP` steps and then stays, so that a run that was interrupted is the same as one that was not, and can be extended.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from seqblocks import graph
from seqblocks._version import __version__
from seqblocks.architect.designs import CHECKPOINT
from seqblocks.architect.run_page import LOG, SETTINGS
from seqblocks.checkpoint import load, load_extra, save
from seqblocks.cost import longest
from seqblocks.errors import RunError, UsageError, unwritable, visible
from seqblocks.graph import ModelSpec
from seqblocks.language.writing import write_text
from seqblocks.model.builder import build_model
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.streaming.generate import generate
from seqblocks.training.clock import working_time
from seqblocks.training.data import BYTES, HELD_OUT_SEED, READ, Data, Text
from seqblocks.training.loop import adamw, step

WARM_UP = 50  # steps
EVERY = 50  # steps between two readings of held-out data
KEPT = 30.0  # seconds between two checkpoints
UNFINISHED = "not finished: it was killed, or is still learning"
SAMPLE, PROMPT, WARMTH = 240, 24, 0.8  # bytes of a sample, of its prompt, and its temperature


@dataclass(frozen=True)
class Settings:
    """What determines the course of a run, apart from the spec. length: of sequences in a text."""

    batch: int = 16
    length: int = 256
    rate: float = 3e-3
    seed: int = 0


class Trial:
    """A run in a folder: `log.jsonl` (a line for each step), `run.json` (settings, samples), `checkpoint` (for
    `seqblocks.load`)."""

    def __init__(self, folder: Path, model: SequenceModel, data: Data, settings: Settings, device: Any) -> None:
        self.folder, self.data, self.settings = folder, data, settings
        self.model, self.device = model.to(device), torch.device(device)
        self.optimizer = adamw(self.model, settings.rate)
        self.done, self.seconds, self.is_logged = 0, 0.0, True
        self.record: dict[str, Any] = {}

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        x, _ = self.data.batch(0, 1)
        return self.data.tokens(x) * self.settings.batch

    def run(
        self, steps: int | None, seconds: float, advance: Callable[[float, dict[str, Any]], object]
    ) -> Iterator[dict[str, Any]]:
        """Learn until there are so many steps, or so many seconds are over; yield the row of each step.

        Checkpoints are written from time to time, and when the iteration ends, also by an interrupt.
        """
        self.note(ended=UNFINISHED)
        with working_time() as clock:
            yield from self._steps(steps, seconds, advance, clock)

    def _steps(
        self, steps: int | None, seconds: float, advance: Callable[[float, dict[str, Any]], object],
        clock: Callable[[], float],
    ) -> Iterator[dict[str, Any]]:
        saved, before, tokens = 0.0, self.seconds, self.tokens
        try:
            while (steps is None or self.done < steps) and clock() < seconds:
                with _uninterrupted():  # a step is done with its line in the log, or not at all
                    started = clock()
                    row = self._step()
                    now = clock()
                    self.seconds = before + now
                    row |= {"seconds": round(self.seconds, 3), "tokens": self.done * tokens}
                    row["tokens_per_second"] = round(tokens / max(now - started, 1e-9), 1)
                    if self.done % EVERY == 0:
                        row["held_out"] = self.held_out()
                    self._log(row)
                parts = [clock() / seconds, self.done / steps if steps else 0.0]
                advance(min(1.0, max(parts)), row)
                yield row
                if clock() - saved > KEPT:
                    self.save()
                    saved = clock()
        finally:
            if self.is_logged:  # else the run continues from an earlier checkpoint, so that each step has its line
                self.save()

    def _step(self) -> dict[str, Any]:
        number, settings = self.done, self.settings
        torch.manual_seed(_seed(settings.seed, number))  # of dropout
        rate = settings.rate * min(1.0, (number + 1) / WARM_UP)
        x, target = (each.to(self.device) for each in self.data.batch(_seed(settings.seed, number), settings.batch))
        self.model.train()

        def loss_of() -> torch.Tensor:
            found = self.data.loss(self.model(x), target)
            others = self.model.auxiliary_losses()
            return found + 0.01 * sum(others.values()) if others else found

        loss = step(self.model, self.optimizer, rate, loss_of)
        if not math.isfinite(loss):
            what = f"the loss or a gradient is not finite at step {number + 1}"
            self.note(ended=what)
            hint = f"begin another run with a smaller --lr than {settings.rate:g}"
            raise RunError(f"{what}: {hint}. The checkpoint is of step {number}")
        self.done += 1
        return {"step": self.done, "loss": loss, "rate": rate}

    @torch.no_grad()
    def held_out(self) -> float:
        """Return the loss of data that was not learned."""
        self.model.eval()
        total = 0.0
        for number in range(READ):
            held_out = self.data.batch(HELD_OUT_SEED + number, self.settings.batch, True)
            x, target = (each.to(self.device) for each in held_out)
            total += float(self.data.loss(self.model(x), target))
        return total / READ

    def sample(self) -> str | None:
        """Return text that the model writes after the first bytes of the held-out ones, None if it cannot."""
        if not isinstance(self.data, Text) or graph.stream_obstacle(self.model.spec):
            return None
        most = int(min(PROMPT + SAMPLE, longest(self.model.spec.graph, in_stream=True)))
        prompt = bytes(self.data.held[: min(PROMPT, most // 2)].tolist())
        self.model.eval()
        count = most - len(prompt)
        (found,) = generate(self.model, [[*prompt]], count, temperature=WARMTH, seed=self.settings.seed)
        return (prompt + bytes(each for each in found.tolist() if each < BYTES)).decode("utf-8", "replace")

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _log(self, row: dict[str, Any]) -> None:
        path = self.folder / LOG
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self.is_logged = False
            raise unwritable(path, error) from None

    def save(self) -> None:
        """Write the checkpoint, completely or not at all."""
        state = {"optimizer": self.optimizer.state_dict(), "step": self.done, "seconds": self.seconds}
        save(self.model, self.folder / CHECKPOINT, extra=state)

    def note(self, **entries: Any) -> None:
        """Add entries to `run.json`."""
        self.record |= entries
        write_text(self.folder / SETTINGS, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt for an interrupt only at the end, unless interrupts are ignored."""
    pending: list[int] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    except ValueError:  # not in the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending:
        raise KeyboardInterrupt


def _seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % HELD_OUT_SEED


def begin(
    folder: Path, spec: ModelSpec, data: Data, settings: Settings, device: Any, about: dict[str, Any]
) -> Trial:
    """Start a run in a new folder. about: further entries of `run.json`. Raises UsageError if the folder has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        name = visible(str(folder))
        given = visible(shlex.quote(str(folder)))
        others = f"continue it with --resume {given}, or name" if (folder / SETTINGS).is_file() else "name"
        raise UsageError(f"{name} exists: {others} another --out")
    if not graph.count(spec.graph):
        raise UsageError("the model has no parameters, so there is nothing to learn")
    trial = Trial(folder, build_model(spec, seed=settings.seed), data, settings, device)
    x, target = data.batch(0, 1)
    try:
        with torch.no_grad():
            data.check(trial.model.eval()(x.to(trial.device)), target)
    except RunError as error:
        hint = f". Try another --length than {settings.length:,}" if isinstance(data, Text) else ""
        raise UsageError(f"{error}{hint}") from None
    threads = torch.get_num_threads()
    trial.record = {
        **about, "settings": asdict(settings), "digest": data.digest, "unit": data.unit, "name": spec.name,
        "params": graph.count(spec.graph), "versions": {"seqblocks": __version__, "torch": torch.__version__},
        "machine": f"{platform.machine()}, {threads} thread{'s' * (threads != 1)}, {device}",
    }  # fmt: skip
    with _complete(folder) as trial.folder:
        trial.save()
        trial.note(before=trial.sample(), held_out_before=trial.held_out())
        (trial.folder / LOG).touch()
    trial.folder = folder
    return trial


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Give a folder that gets its name at the end, so that one of this name is a run whenever the process is killed."""
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        draft.mkdir(parents=True)
        yield draft
        os.rename(draft, folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return `run.json` of a run. Raises UsageError if there is none."""
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        Settings(**found["settings"]), found["digest"], found["unit"]
    except OSError:
        raise UsageError(f"{visible(str(folder))} is not a run of seqblocks try: it has no {SETTINGS}") from None
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{visible(str(folder))} is not a run of seqblocks try: {SETTINGS} is damaged") from None
    return dict(found)


def resume(folder: Path, data: Data, device: Any) -> Trial:
    """Continue a run from its checkpoint; steps that were logged after it are dropped from the log.

    Raises UsageError if the data are not those of the run.
    """
    record = settings_of(folder)
    if record["digest"] != data.digest:
        raise UsageError(f"the data are not those of the run in {visible(str(folder))}: it would not continue exactly")
    model = load(folder / CHECKPOINT)
    state = load_extra(folder / CHECKPOINT)
    if not state:
        raise UsageError(f"{visible(str(folder))} cannot continue: its checkpoint has no state of the optimiser")
    trial = Trial(folder, model, data, Settings(**record["settings"]), device)
    trial.optimizer.load_state_dict(state["optimizer"])
    trial.done, trial.seconds, trial.record = state["step"], state["seconds"], record
    _keep_rows(folder / LOG, trial.done)
    return trial


def _keep_rows(log: Path, steps: int) -> None:
    """Keep the first rows of a log, whose last line may be cut short."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(log, "".join(line for line in lines[:steps] if line.endswith("\n")))
    elif steps:
        raise UsageError(f"{visible(os.fspath(log))} is missing, so the run cannot continue")
