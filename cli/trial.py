"""`seqblocks try`: let a spec learn for a few minutes, and keep the run."""

from __future__ import annotations

import argparse
import math
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from seqblocks._version import __version__
from seqblocks.architect.designs import find_design
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.compare import model_of
from seqblocks.cli.device import device_of
from seqblocks.cli.imports import import_torch
from seqblocks.cli.progress import progress
from seqblocks.errors import UnavailableError, UsageError, visible
from seqblocks.graph import ModelSpec

MINUTES = 3.0  # by default


def run(options: argparse.Namespace) -> int:
    """Learn, and print where the run ended. An interrupt keeps what is done, for --resume."""
    _check(options)
    torch = import_torch("learning requires torch", shares_cores=True)
    if find_spec("safetensors") is None:
        raise UnavailableError("a run is kept with safetensors: pip install 'seqblocks[try]'")
    from seqblocks.training.trial import begin, resume

    if options.resume:
        trial = resume(Path(options.resume), *_resumed(options, torch))
        if options.steps is not None and trial.done > options.steps:
            raise UsageError(f"{visible(options.resume)} has {trial.done:,} steps already, more than {options.steps:,}")
    else:
        spec, data, settings = _new(options)
        about = {"spec": options.spec, "data": options.text or options.npz, "overrides": options.set}
        with progress(options, f"{visible(spec.name)} is built"):  # an interrupt leaves no folder
            trial = begin(_folder(options, spec), spec, data, settings, device_of(options, torch), about)
    status, ended = 0, {}
    rows: list[dict[str, Any]] = []
    seconds = math.inf if options.steps is not None else 60 * (options.minutes or MINUTES)
    try:
        with progress(options, f"{visible(trial.model.spec.name)} learns") as advance:
            for row in trial.run(options.steps, seconds, lambda part, row: advance(part, _now(row, trial.data.unit))):
                rows = [row]  # the last
    except KeyboardInterrupt:
        status, ended = INTERRUPTED, {"ended": "interrupted"}
    held = trial.held_out()
    trial.record.pop("ended", None)  # absent if it was interrupted before it began
    trial.note(after=trial.sample(), held_out=held, steps=trial.done, **ended)
    _print(trial, rows, held, options)
    return status


def _now(row: dict[str, Any], unit: str) -> str:
    return f"step {row['step']:,}, {row['loss']:.3f} {unit}"


def _check(options: argparse.Namespace) -> None:
    if options.steps is not None and options.minutes is not None:
        raise UsageError("--steps and --minutes both say when to stop: leave out one")
    if options.text and options.npz:
        raise UsageError("--text and --npz both name the data: leave out one")
    if options.resume:
        if options.out:
            raise UsageError("a run continues in its own folder: leave out --out")
    elif not options.spec:
        raise UsageError("name a spec, or a run to continue with --resume")
    elif not (options.text or options.npz):
        raise UsageError("name the data: --text FILE, or --npz FILE with the arrays x and y")


def _data(options: argparse.Namespace, spec: ModelSpec, length: int) -> Any:
    from seqblocks.training.data import arrays_of, text_of

    return text_of(Path(options.text), spec, length) if options.text else arrays_of(Path(options.npz), spec)


def _new(options: argparse.Namespace) -> tuple[ModelSpec, Any, Any]:
    from seqblocks.training.trial import Settings

    spec = model_of(options)
    usual, fixed = Settings(), spec.input.length
    length = options.length or usual.length
    if options.text and isinstance(fixed, int):
        if options.length not in (None, fixed):
            raise UsageError(f"the spec fixes the input at {fixed:,} tokens: leave out --length")
        length = fixed
    settings = Settings(options.batch or usual.batch, length, options.lr or usual.rate, options.seed or 0)
    return spec, _data(options, spec, settings.length), settings


def _resumed(options: argparse.Namespace, torch: Any) -> tuple[Any, Any]:
    """Return the data and the device of a run that continues. Options that would change its course are refused."""
    from seqblocks.training.trial import settings_of

    record = settings_of(Path(options.resume))
    given = {"batch": options.batch, "length": options.length, "rate": options.lr, "seed": options.seed}
    for name, value in given.items():
        if value not in (None, record["settings"][name]):
            raise UsageError(f"the run has {name} {record['settings'][name]}: leave the option out to continue it")
    spec = find_design(options.resume).load()
    if options.set and not options.spec:
        raise UsageError("the run has its own spec and overrides: leave out --set to continue it")
    if options.spec and _texts(model_of(options)) != _texts(spec):
        raise UsageError(f"{visible(options.spec)} is not the spec of the run; leave it out to continue the run")
    if not (options.text or options.npz):
        kind, path = "text" if record["unit"] == "bits per byte" else "npz", str(record.get("data"))
        if not Path(path).exists():
            raise UsageError(f"the data of the run, {visible(path)}, are not here: name them with --{kind} FILE")
        setattr(options, kind, path)
    return _data(options, spec, record["settings"]["length"]), device_of(options, torch)


def _texts(spec: ModelSpec) -> Any:
    """Return the texts that determine a model: of its spec, of its overrides and of the files it uses."""
    found = spec.source
    return found and (found.text, sorted(found.overrides), sorted(found.files))


def _folder(options: argparse.Namespace, spec: ModelSpec) -> Path:
    """Return --out, or the first folder runs/NAME, runs/NAME-2, … that does not exist."""
    if options.out:
        return Path(options.out)
    name = "".join(each if each.isalnum() or each in "-_." else "-" for each in Path(spec.name).stem) or "model"
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
        number += 1


def _print(trial: Any, rows: list[dict[str, Any]], held: float, options: argparse.Namespace) -> None:
    unit = trial.data.unit
    if options.format == "json":
        output.dump({
            "version": __version__, "ok": True, "run": str(trial.folder), "steps": trial.done, "unit": unit,
            "loss": rows[-1]["loss"] if rows else None, "held_out": held, "seconds": round(trial.seconds, 3),
            "sample": trial.record.get("after"),
        })  # fmt: skip
        return
    if options.quiet:
        return
    name, given = visible(str(trial.folder)), visible(shlex.quote(str(trial.folder)))
    last = f", {rows[-1]['loss']:.3f} in the last step" if rows else ""
    done = f"{trial.done:,} steps of {trial.tokens:,} tokens in {trial.seconds:,.0f} s"
    output.write(f"{done}: {held:.3f} {unit} held out{last}")
    if trial.record.get("after"):
        output.write(f"\nIt writes:\n{trial.record['after']}")
    output.write(
        f"\n{name}: log.jsonl, run.json, checkpoint (seqblocks.load). Next:\n"
        f"  seqblocks report {given}                    a page with curves, sample and picture\n"
        f"  seqblocks try --resume {given} --minutes 3  continue to learn\n"
        "This shows whether a model learns. Train with Lightning, torchtitan or transformers' Trainer\n"
        "(docs/training.md)."
    )
