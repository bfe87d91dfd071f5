"""`seqblocks diff`: print how one spec differs from another."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqblocks._version import __version__
from seqblocks.architect.designs import Design, find_design
from seqblocks.architect.diff import TensorChange, diff
from seqblocks.cli import output
from seqblocks.cli.check import overrides
from seqblocks.cli.compare import designs
from seqblocks.cli.imports import import_torch
from seqblocks.errors import UsageError, quote, visible
from seqblocks.language.writing import write_picture

DIFFERENT = 1


def run(options: argparse.Namespace) -> int:
    """Print the differences. Status 1 with --exit-code: there are some. The status of a faulty spec is that of `check`.
    """
    if options.html == "-" and options.format == "json":
        raise UsageError("only one of --html - and --format json can be written to standard output")
    pair = [find_design(each) for each in designs([options.first, options.second], options)]
    found = diff(*pair, set=overrides(options), dtype=options.dtype, allow_use=options.allow_use)
    faulty = [each.status for each in found.analyses if not each.ok]
    if options.weights:
        found = found._replace(tensors=_tensors(pair))
    if options.html and options.html != "-":
        write_picture(Path(options.html), found.html())
        output.notes([f"{visible(options.html)}: written"], options)
    if options.html == "-":
        output.write(found.html().rstrip("\n"), raw=True)
    elif options.format == "json":
        output.dump({"version": __version__, "specs": [*found.labels]} | found.as_data())
    elif (found or faulty or not options.quiet) and not options.html:
        output.write(found.text())
    return min(faulty, default=DIFFERENT if found and options.exit_code else 0)


def _tensors(pair: list[Design]) -> list[TensorChange]:
    for design in pair:
        if design.folder is None:
            label = quote(design.label)
            raise UsageError(f"--weights compares two folders written by seqblocks.save, and {label} is none")
    import_torch("comparing weights requires torch")
    from seqblocks.checkpoint.values import differences

    first, second = (str(design.folder) for design in pair)
    return differences(first, second)
