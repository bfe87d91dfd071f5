"""`seqblocks export`: export a graph of a model to ONNX, torch.export or machine code."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from seqblocks._version import __version__
from seqblocks.analysis.check import require_model
from seqblocks.cli import output
from seqblocks.cli.check import load, overrides
from seqblocks.cli.imports import import_torch
from seqblocks.cost import dtype_named
from seqblocks.errors import UsageError, visible


def run(options: argparse.Namespace) -> int:
    """Export, and print a summary of the file written."""
    import_torch("exporting needs torch")
    from seqblocks import export

    kind, path = next((k, getattr(options, k)) for k in ("onnx", "pt2", "aoti") if getattr(options, k) is not None)
    if path == "-":
        raise UsageError(f"--{kind} writes a file, not standard output: give it a name")
    more = {"batch": _size(options.batch, "--batch"), "length": _size(options.length, "--length")}
    model = _model(options)
    check = {"check": options.check} if kind == "onnx" or options.check is not None else {}
    written = getattr(export, kind)(model, path, options.graph, **more, **check)
    if options.format == "json":
        facts = {"version": __version__, "ok": True, "out": path, "kind": kind, "difference": written.difference}
        output.dump({**facts, "contract": written.contract.as_data()})
    elif not options.quiet:
        output.write(f"{visible(path)}: {_described(written, model.spec.name, os.path.getsize(path))}")
    return 0


def _described(written: Any, name: str, size: int) -> str:
    parts = [f"written, graph {written.contract.graph} of {visible(name)}, {output.bytes_of(size)}"]
    if written.contract.state:
        parts.append(f"{len(written.contract.state)} tensors of state")
    compared = "not compared with the model"
    if written.difference is not None:
        compared = f"differs from the model by {written.difference:.1g} at most"
    return ", ".join([*parts, compared])


def _size(text: str, option: str) -> int | None:
    """Parse a number; return None for `dynamic`."""
    if text == "dynamic":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise UsageError(f"{option} takes a positive whole number or dynamic, not {text!r}")
    return int(text)


def _model(options: argparse.Namespace) -> Any:
    """Build the model of the spec, with its weights."""
    from seqblocks.checkpoint import folder
    from seqblocks.checkpoint.record import RECORD
    from seqblocks.model.builder import build_model

    dtype, place = dtype_named(options.dtype, "--dtype"), Path(options.spec)
    is_saved = (place / RECORD).exists()
    if is_saved and not options.weights:
        return folder.load(place, set=overrides(options), dtype=dtype)
    if is_saved:
        spec, _ = folder.read_model(place, place, overrides(options))
    else:
        spec = require_model(*load(options.spec, options, {}))
    if options.weights:
        return _with_weights(spec, options.weights, dtype)
    if not options.quiet:
        output.notes([f"no --weights given: the weights are random, with --seed {options.seed}"], options)
    return build_model(spec, dtype=dtype, seed=options.seed)


def _with_weights(spec: Any, path: str, dtype: str) -> Any:
    from seqblocks.checkpoint import folder, from_pretrained
    from seqblocks.checkpoint.record import RECORD
    from seqblocks.model.builder import build_model
    from seqblocks.model.quantize import quantized

    if not (Path(path) / RECORD).exists():
        return from_pretrained(path, spec, dtype=dtype)
    saved, model = folder.load(path, dtype=dtype), build_model(spec, dtype=dtype)
    if quantized(saved):
        what = f"{visible(path)} has a model with weights in 8 bits, which fit no other spec"
        raise UsageError(f"{what}: export the folder itself, without --weights")
    try:
        model.load_state_dict(saved.state_dict())
    except RuntimeError as error:
        first = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
        raise UsageError(f"the weights in {visible(path)} do not fit {visible(spec.name)}: {visible(first)}") from error
    return model
