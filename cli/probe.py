"""`seqblocks probe`: train a spec on small synthetic tasks, and print how well it solves them."""

from __future__ import annotations

import argparse
import math
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from seqblocks._version import __version__
from seqblocks.analysis.check import require_model
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.check import load
from seqblocks.cli.imports import import_torch
from seqblocks.cli.progress import progress
from seqblocks.cli.trial import device_of
from seqblocks.errors import UsageError, visible
from seqblocks.language.writing import write_text
from seqblocks.messages.suggestions import did_you_mean

if TYPE_CHECKING:
    from seqblocks.probes import Result, Task

HEAD = "task               seed  length  accuracy  last 1/8  chance   steps       s"


def run(options: argparse.Namespace) -> int:
    """Train on each task with each seed; print a line for each length. Raises UsageError for an unknown task."""
    model = require_model(*load(options.spec, options))
    torch = import_torch("training requires torch")
    from seqblocks.probes import probe
    from seqblocks.probes.training import check_fit

    tasks = _tasks(options)
    for task in tasks:
        check_fit(model, task)
    device = str(device_of(options, torch))
    if options.plot and not Path(options.plot).parent.is_dir():  # found before hours of training, not after
        folder = visible(str(Path(options.plot).parent))
        raise UsageError(f"--plot {visible(options.plot)}: there is no folder {folder}")
    is_text = options.format != "json" and not options.quiet
    if is_text:
        output.write(f"{visible(model.name)}, trained from scratch on each task\n{HEAD}")
    found: list[Result] = []
    for task, seed in product(tasks, range(options.seeds)):
        with progress(options, f"{task.name}, seed {seed}") as advance:
            results = probe(
                model, task, seed, steps=options.steps, rate=options.lr, seconds=options.seconds or math.inf,
                device=device, advance=advance,
            )  # fmt: skip
        found += results
        for result in results if is_text else ():
            output.write(_line(result))
            output.stdout().flush()
        if results[0].interrupted:
            break
    if options.plot:
        from seqblocks.probes.plot import plot

        write_text(Path(options.plot), plot(found, model.name))
    if options.format == "json":
        reported = {task.name: [each.as_data() for each in task.published] for task in tasks if task.published}
        output.dump(
            {"version": __version__, "ok": True, "spec": options.spec, "preset": options.preset,
             "rows": [r.as_data() for r in found], "published": reported}
        )  # fmt: skip
    elif is_text:
        output.write("\n".join(["", *(_about(task) for task in tasks)]))
    return INTERRUPTED if found[-1].interrupted else 0


def _tasks(options: argparse.Namespace) -> list[Task]:
    """Return the chosen tasks, each once. Raises UsageError for an unknown one, or one without a published setting."""
    from seqblocks.probes import PAPER, TASKS
    from seqblocks.probes.tasks import QUICK

    known = PAPER if options.preset == "paper" else TASKS
    names = [*dict.fromkeys(options.task or QUICK)]
    for name in names:
        if name not in TASKS:
            raise UsageError(f"there is no task {visible(name)}: {did_you_mean(name, TASKS) or ', '.join(TASKS)}")
        if name not in known:
            raise UsageError(f"{name} has no published setting here; those that have one: {', '.join(known)}")
    return [known[name] for name in names]


def _about(task: Task) -> str:
    return "\n".join([f"{task.name}: {task.about}", *(f"  published, {each}" for each in task.published)])


def _line(result: Result) -> str:
    steps = f"{result.steps}{'*' if result.cut else ''}"
    accuracy = f"{result.accuracy:>8.3f}  {result.last_eighth:>8.3f}  {result.chance:>6.3f}"
    return f"{result.task:<17}  {result.seed:>4}  {result.length:>6}  {accuracy}  {steps:>6}  {result.seconds:>6.1f}"
