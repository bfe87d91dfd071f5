"""`seqblocks probe`: train a spec on small synthetic tasks, and print how well it solves them."""

from __future__ import annotations

import argparse
import errno
import math
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from seqblocks._version import __version__
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.compare import model_of
from seqblocks.cli.device import device_of
from seqblocks.cli.imports import import_torch
from seqblocks.cli.progress import progress
from seqblocks.errors import UsageError, unwritable, visible
from seqblocks.language.writing import write_text
from seqblocks.suggestions import did_you_mean

if TYPE_CHECKING:
    from seqblocks.graph import ModelSpec
    from seqblocks.probes import Published, Result, Task
    from seqblocks.probes.checks import Check

HEAD = "task                 rate  seed  length  accuracy  last 1/8  chance    loss   steps       s"


def run(options: argparse.Namespace) -> int:
    """Train on each task with each seed; print a line for each length. Raises UsageError for an unknown task."""
    model = model_of(options)
    torch = import_torch("training requires torch", shares_cores=True)
    from seqblocks.probes import fit_task

    tasks = _tasks(options)
    for task in tasks:
        fit_task(model, task)
    device = str(device_of(options, torch))
    if options.plot:
        _check_file(Path(options.plot))
    is_text = options.format != "json" and not options.quiet
    if is_text:
        output.write(f"{visible(model.name)}, trained from scratch on each task\n{HEAD}")
    found: list[Result] = []
    is_interrupted = False
    try:
        for results in _trained(model, tasks, device, options):
            found += results
            for result in results if is_text else ():
                output.write(_line(result), flush=True)
            if results[0].interrupted:
                is_interrupted = True
                break
    except KeyboardInterrupt:  # before there is anything of a training
        if not found:
            raise
        is_interrupted = True
    _print_ends(model, tasks, found, options)
    if options.plot:
        from seqblocks.probes.plot import plot

        write_text(Path(options.plot), plot(found, model.name))
    return INTERRUPTED if is_interrupted else 0


def _check_file(path: Path) -> None:
    """Raise UsageError if a file cannot be written, before hours of training."""
    parent = path.parent
    if path.is_dir() or not parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {visible(str(parent))}"
        raise UsageError(f"--plot {visible(str(path))}: {why}")
    if not os.access(parent, os.W_OK):
        raise unwritable(f"--plot {path}", PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot takes the name of a file that ends in .svg, not {visible(str(path))}")


def _trained(
    model: ModelSpec, tasks: list[Task], device: str, options: argparse.Namespace
) -> Iterator[list[Result]]:
    """Yield the results of each training."""
    from seqblocks.probes import probe

    for task, rate, seed in product(tasks, options.lr or (None,), range(options.seeds)):
        with progress(options, f"{task.name}, seed {seed}") as advance:
            found = probe(
                model, task, seed, steps=options.steps, rate=rate, seconds=options.seconds or math.inf, device=device,
                advance=advance,
            )  # fmt: skip
        yield found


def _print_ends(model: ModelSpec, tasks: list[Task], found: list[Result], options: argparse.Namespace) -> None:
    """Print what follows the results: all of them as JSON, or medians, checks of resets, and what the tasks ask."""
    from seqblocks.probes.checks import reset_checks

    if options.quiet and options.format != "json":
        return
    checks = [check for task in tasks if task.has_resets for check in reset_checks(model, task)]
    if options.format == "json":
        reported = {task.name: [each.as_data() for each in _published(task)] for task in tasks if _published(task)}
        output.dump(
            {"version": __version__, "ok": True, "spec": options.spec, "preset": options.preset,
             "rows": [r.as_data() for r in found], "published": reported, "checks": [c.as_data() for c in checks]}
        )  # fmt: skip
        return
    cut = ["* training stopped before its last step"] if any(each.cut for each in found) else []
    lines = [*cut, *_medians(found), *map(_checked, checks)]
    output.write("\n".join(["", *lines, *([""] if lines else []), *(_about(task) for task in tasks)]))


def _medians(found: list[Result]) -> Iterator[str]:
    """Return the median and the lowest accuracy of several seeds, for each task, rate and length."""
    groups: dict[tuple[str, float, int], list[float]] = {}
    for result in found:
        groups.setdefault((result.task, result.rate, result.length), []).append(result.accuracy)
    for (task, rate, length), values in groups.items():
        if len(values) > 1:
            worst = f"median {median(values):.3f}, lowest {min(values):.3f}"
            yield f"{task} at {length}, rate {rate:g}, {len(values)} seeds: {worst}"


def _checked(check: Check) -> str:
    return f"{check.task}: {check.check}: {'yes' if check.holds else 'no'} (difference {check.difference:.1e})"


def _tasks(options: argparse.Namespace) -> list[Task]:
    """Return the chosen tasks, each once. Raises UsageError for an unknown one, or one without a published setting."""
    from seqblocks.probes import PAPER, TASKS
    from seqblocks.probes.tasks import ALIASES, QUICK

    known = PAPER if options.preset == "paper" else TASKS
    names = [*dict.fromkeys(ALIASES.get(name, name) for name in options.task or QUICK)]
    for name in names:
        if name not in TASKS:
            raise UsageError(f"there is no task {visible(name)}: {did_you_mean(name, TASKS) or ', '.join(TASKS)}")
        if name not in known:
            raise UsageError(f"{name} has no published setting here; those that have one: {', '.join(known)}")
    return [known[name] for name in names]


def _published(task: Task) -> tuple[Published, ...]:
    """Return what papers report of a task, also of its quick form, which has other sizes."""
    from seqblocks.probes import PAPER

    return PAPER[task.name].published if task.name in PAPER else ()


def _about(task: Task) -> str:
    other = "" if task.published else " in another setting (--preset paper)"
    return "\n".join([f"{task.name}: {task.about}", *(f"  published{other}, {each}" for each in _published(task))])


def _line(result: Result) -> str:
    steps = f"{result.steps}{'*' if result.cut else ''}"
    accuracy = f"{result.accuracy:>8.3f}  {result.last_eighth:>8.3f}  {result.chance:>6.3f}"
    at = f"{result.task:<17}  {result.rate:>6g}  {result.seed:>4}  {result.length:>6}"
    return f"{at}  {accuracy}  {result.loss:>6.3f}  {steps:>6}  {result.seconds:>6.1f}"
