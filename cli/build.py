"""`seqblocks build`: build a model and show its steps."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from seqblocks._version import __version__
from seqblocks.analysis.check import require_model, yaml
from seqblocks.cli import output
from seqblocks.cli.check import load
from seqblocks.cli.imports import import_torch
from seqblocks.cost import dtype_named, params_bytes
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import SpecError, UnavailableError, UsageError, visible
from seqblocks.graph import ModelSpec


def run(options: argparse.Namespace) -> int:
    """Build on the requested device, and compare the counted parameters with those of the module."""
    dtype = dtype_named(options.dtype, "--dtype")
    model = _model(options)
    summary = summarise(model, dtype, options.length, options.depth)
    _check_memory(model, dtype, options.device)
    built = _built(model, dtype, options)
    if built != summary.params:
        raise AssertionError(f"the built module has {built:,} parameters and the summary {summary.params:,}")
    if options.format == "json":
        facts = {"version": __version__, "ok": True, "spec": options.spec, "device": options.device}
        facts |= {"batch": options.batch, "built_params": built} | summary.as_data() | output.remarks_on(model)
        output.dump(facts | {"notes": [*summary.notes, *model.notes]})
    elif options.summary:
        from seqblocks.cli import show

        show.summary(summary, options)
    elif not options.quiet:
        size = output.bytes_of(summary.params_bytes)
        output.write(f"{visible(model.name)}: built, {built:,} parameters, {dtype} on {options.device}, {size}")
    return 0


def _model(options: argparse.Namespace) -> ModelSpec:
    size = _image_size(options)
    if size is None:
        return require_model(*load(options.spec, options, {}))
    try:
        return require_model(*load(options.spec, options, {"input.image.size": size}))
    except SpecError as error:
        missing = [d.message for d in error.diagnostics if d.code == "E310"]
        if not any("'image'" in message or "'input'" in message for message in missing):
            raise
    inputs = require_model(*load(options.spec, options, {})).inputs
    images = {f"inputs.{name}.image.size": size for name, wire in inputs.items() if wire.kind == "image"}
    if not images:
        raise UsageError(f"--image-size requires an image input, and {visible(options.spec)} has none")
    return require_model(*load(options.spec, options, images))


def _image_size(options: argparse.Namespace) -> str | None:
    """Return the rows and columns as YAML, or None if no size is given."""
    if options.image_size is None:
        return None
    sides = options.image_size.lower().split("x")
    if len(sides) > 2 or not all(re.fullmatch("0*[1-9][0-9]{0,8}", side) for side in sides):
        raise UsageError(f"--image-size takes N or HxW, for instance 224 or 192x256, not {options.image_size!r}")
    return yaml(f"[{sides[0]}, {sides[-1]}]")


def _check_memory(model: ModelSpec, dtype: str, device: str) -> None:
    """Raise UnavailableError if the parameters do not fit in memory, before the machine starts to swap."""
    if not device.startswith("cpu") or not hasattr(os, "sysconf"):
        return
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need = params_bytes(model.graph, dtype)
    if need > 0.8 * have:
        raise UnavailableError(
            f"the parameters take {output.bytes_of(need)} and this machine has {output.bytes_of(have)}; "
            "--device meta builds without allocating"
        )


def _built(model: ModelSpec, dtype: str, options: argparse.Namespace) -> int:
    torch = import_torch("building requires torch", " (`seqblocks check` does not)")
    from seqblocks.model.builder import build_model

    module: Any = build_model(model, device=options.device, dtype=getattr(torch, dtype), seed=options.seed)
    return sum(p.numel() for p in module.parameters())
