"""`seqblocks bench`: time a model step by step, beside the least time that this machine needs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from seqblocks._version import __version__
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.compare import model_of
from seqblocks.cli.device import device_of
from seqblocks.cli.imports import import_torch
from seqblocks.cli.progress import progress
from seqblocks.cost import dtype_named
from seqblocks.errors import RunError, UsageError, visible

if TYPE_CHECKING:
    from seqblocks.bench import Bench

UNITS = {"forward": "a forward pass", "train": "a forward and a backward pass", "step": "a token of a stream"}


def run(options: argparse.Namespace) -> int:
    """Build the spec with random weights, and time it. An interrupt prints what was measured.

    Raises UsageError for a mode that it cannot run.
    """
    dtype = dtype_named(options.dtype, "--dtype")
    model = model_of(options)
    torch = import_torch("timing a model requires torch")
    device = device_of(options, torch)
    if options.threads:
        cores = os.cpu_count() or options.threads
        if options.threads > cores:  # they would wait for each other, for minutes a pass
            raise UsageError(f"--threads {options.threads:,}: this machine has {cores:,} core{'s' * (cores != 1)}")
        torch.set_num_threads(options.threads)
    from seqblocks.bench import bench
    from seqblocks.model.builder import build_model

    built = build_model(model, device=device, dtype=getattr(torch, dtype))
    try:
        with progress(options, f"timing {model.name}") as advance:
            found = bench(built, options.mode, options.batch, options.length, options.seconds, advance)
    except RunError as error:
        raise UsageError(f"{error}. Try another --length") from None
    if options.format == "json":
        output.dump({"version": __version__, "ok": True, "spec": options.spec} | found.as_data())
    elif not options.quiet:
        _write(found)
    return INTERRUPTED if found.interrupted else 0


def _write(found: Bench) -> None:
    from seqblocks.bench.measure import MAX_SPREAD

    tokens = f", {found.length} tokens" if found.length else ""
    output.write(f"{visible(found.name)}: {UNITS[found.mode]}, batch {found.batch}{tokens}, {found.dtype}")
    threads = f", {found.threads} thread{'s' * (found.threads != 1)}" if found.device == "cpu" else ""
    rates = f"{found.flops_per_second / 1e9:,.0f} GFLOP/s, {found.bytes_per_second / 1e9:,.1f} GB/s from memory"
    output.write(f"{found.processor}{threads}: {rates}")
    output.write("")
    rows = [
        (row.step + (f" ({row.count} x)" if row.count > 1 else ""), *_figures(row), row.kernel) for row in found.steps
    ]
    rows.append(("all, timed as a whole", *_figures(found), ""))
    heads = ("step", "ms", "least", "share", "ratio", "kernel")
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(6)]
    for row in [heads, *rows]:
        first, *figures, last = row
        right = (f"{cell:>{width}}" for cell, width in zip(figures, widths[1:5], strict=True))
        output.write("  ".join([f"{first:<{widths[0]}}", *right, last]).rstrip())
    output.write("")
    for why in dict.fromkeys(why for row in found.steps for why in row.why):
        output.write(f"  {why}")
    output.write(
        f"{found.clock.capitalize()}, the median of {found.repetitions} turns, each of which keeps its fastest pass; "
        f"half of them are within {found.spread:.0%} of each other. With all steps timed, a pass took "
        f"{_ms(found.seconds_with_hooks)} ms."
    )
    if any("?" in row for row in rows):
        output.write(f"?: half of the times are not within {MAX_SPREAD:.0%} of each other, so no ratio is printed.")


def _figures(row: Any) -> tuple[str, str, str, str]:
    share = getattr(row, "share", None)
    ratio = "" if not row.floor_seconds else "?" if row.ratio is None else f"{row.ratio:.1f}"
    return _ms(row.seconds), _ms(row.floor_seconds), "" if share is None else f"{share:.0%}", ratio


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"
