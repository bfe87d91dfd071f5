"""`seqblocks memory`: estimate the memory of a training step and of streams, without torch."""

from __future__ import annotations

import argparse
from typing import Any

from seqblocks._version import __version__
from seqblocks.architect.memory import Estimate, largest_batch, memory, read_bytes
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.compare import model_of
from seqblocks.cli.progress import progress
from seqblocks.descriptions.numbers import bytes_of, count
from seqblocks.errors import visible
from seqblocks.graph import ChooseNode, walk

TOO_LARGE = 1


def run(options: argparse.Namespace) -> int:
    """Print the estimate. Status 1: the peak is above the limit of `--fits`.

    An interrupt of the search for the largest batch leaves the estimate.
    """
    limit = read_bytes(options.fits) if options.fits is not None else None
    model = model_of(options)
    given = {
        "length": options.length, "optimizer": options.optimizer, "dtype": options.dtype,
        "checkpoint": options.checkpoint,
    }  # fmt: skip
    found = memory(model, batch=options.batch, **given)
    fits = limit is None or found.peak_bytes <= limit
    best, is_interrupted = None, False
    if limit is not None:
        try:
            with progress(options, f"batches of {visible(model.name)}") as advance:
                best = largest_batch(limit, model, advance=advance, **given)
        except KeyboardInterrupt:
            is_interrupted = True
    if options.format == "json":
        extra: dict[str, Any] = {}
        if limit is not None:
            largest = None if is_interrupted else best.batch if best else 0
            extra = {"limit_bytes": int(limit), "fits": fits, "largest_batch": largest}
        output.dump({"version": __version__, "ok": fits, "spec": options.spec} | found.as_data() | extra)
    elif options.format == "text":
        if not options.quiet:
            _write(found, options.depth)
            if any(isinstance(node, ChooseNode) and node.arguments.top is None for node in walk(model.graph)):
                output.write("choose with `above` is assumed to choose all tokens: how many it does is known in a run")
    else:
        output.write(found.markdown(options.depth) if options.format == "markdown" else found.csv(options.depth))
    if is_interrupted:
        return INTERRUPTED
    if limit is not None and best is not None and fits and options.format == "text" and not options.quiet:
        output.write(f"fits into {bytes_of(limit)}: up to batch {count(best.batch)}, {bytes_of(best.peak_bytes)}")
    if limit is not None and not fits:
        output.problem(_too_large(found, limit, best), options)
    return 0 if fits else TOO_LARGE


def _write(found: Estimate, depth: int | None) -> None:
    tokens = f"{found.length:,} token{'s' * (found.length != 1)}"
    what = f"batch {found.batch:,}, {tokens}, {found.dtype}, {found.optimizer}"
    layers = ", layers computed again" if found.checkpoint == "blocks" else ""
    where = f"{found.phase} pass" if found.phase != "optimizer" else "update by the optimiser"
    at = f" of {visible(found.at)}" if found.at else ""
    output.write(f"{visible(found.name)}: {what}{layers}")
    output.write(f"peak of a training step: {bytes_of(found.peak_bytes)}, in the {where}{at}")
    output.write("")
    output.write(found.text(depth))
    output.write("")
    output.write(f"kept by the forward pass: {bytes_of(found.activations_bytes)}")
    parts = f"weights {bytes_of(found.weights_bytes)}"
    if found.state_bytes is None:
        output.write(f"inference: {parts} and the temporaries of one pass, as the model does not stream")
    else:
        parts += f", state {bytes_of(found.state_bytes)}"
        output.write(f"inference, token by token: {bytes_of(found.inference_bytes)} ({parts})")
    for verb in found.undeclared:
        output.write(f"{visible(verb)} does not declare its memory: its inputs and its output are counted")


def _too_large(found: Estimate, limit: float, best: Estimate | None) -> str:
    over = f"the peak of {bytes_of(found.peak_bytes)} exceeds {bytes_of(limit)}"
    if best is None:
        hint = "; try --checkpoint blocks, a shorter --length, or bf16" if found.checkpoint == "none" else ""
        return f"{over}, and so does a batch of 1{hint}"
    return f"{over}; the largest batch that fits is {count(best.batch)}, with {bytes_of(best.peak_bytes)}"
