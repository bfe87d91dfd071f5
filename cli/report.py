"""`seqblocks report`: write a page about runs of `seqblocks try`."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqblocks._version import __version__
from seqblocks.architect.run_page import page, read_run
from seqblocks.cli import output
from seqblocks.errors import UsageError, visible
from seqblocks.language.writing import write_picture


def run(options: argparse.Namespace) -> int:
    """Write the page; `-` prints it. Raises UsageError for a folder that is no run, and for several without --html."""
    if options.html == "-" and options.format == "json":
        raise UsageError("only one of --html - and --format json can be written to standard output")
    if len(options.run) > 1 and not options.html:
        raise UsageError("several runs have no folder in common for their page: name it with --html FILE")
    runs = [read_run(Path(folder)) for folder in options.run]
    found = page(runs)
    if options.html == "-":
        output.write(found.rstrip("\n"))
        return 0
    path = Path(options.html) if options.html else Path(options.run[0]) / "report.html"
    write_picture(path, found)
    if options.format == "json":
        output.dump({"version": __version__, "ok": True, "file": str(path), "runs": options.run})
    elif not options.quiet:
        output.write(f"{visible(str(path))} is written")
    return 0
