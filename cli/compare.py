"""`seqblocks compare`: print the figures of several specs side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seqblocks._version import __version__
from seqblocks.analysis.check import require_model
from seqblocks.architect.compare import compare
from seqblocks.architect.designs import Design, find_design
from seqblocks.cli import output
from seqblocks.cli.check import overrides, valid
from seqblocks.errors import Report, UsageError, visible
from seqblocks.graph import ModelSpec


def run(options: argparse.Namespace) -> int:
    """Compare the specs; the faults of all of them are reported together."""
    found = compare(
        *designs(options.spec, options),
        set=overrides(options),
        lengths=options.lengths,
        dtype=options.dtype,
        allow_use=options.allow_use,
        strict=options.strict,
    )
    if not options.quiet:
        output.warnings(found.warnings, 0, options)
    if options.format == "json":
        remarks = {"warnings": [each.as_data() for each in found.warnings]}
        output.dump({"version": __version__, "ok": True, "specs": found.to_dict()} | remarks)
    elif options.format == "markdown":
        output.write(found.markdown())
    else:
        output.write(found.csv() if options.format == "csv" else found.text())
    return 0


def designs(given: list[str], options: argparse.Namespace) -> list[Any]:
    """Return the specs of a command line; `-` is the text of standard input."""
    if given.count("-") > 1:
        raise UsageError("standard input can be read only once: write `-` once")
    return [_standard_input(options) if each == "-" else each for each in given]


def model_of(options: argparse.Namespace) -> ModelSpec:
    """Return the model of a command that takes one design; print its warnings and notes."""
    (given,) = designs([options.spec], options)
    file, model = valid(find_design(given, overrides(options)).analyse(None, options.allow_use, options.strict))
    model = require_model(file, model)
    if not options.quiet:
        output.warnings(file.warnings, file.dropped, options)
        output.notes([f"{visible(options.spec)}: {text}" for text in model.notes], options)
    return model


def _standard_input(options: argparse.Namespace) -> Design:
    from seqblocks.language.spec_files import read_stream

    report = Report()
    text = read_stream(sys.stdin.buffer, options.stdin_filename, report)
    report.raise_if_any()
    assert text is not None
    return Design(options.stdin_filename, text, options.stdin_filename, Path())
