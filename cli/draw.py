"""`seqblocks draw`: write a picture of a spec."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqblocks.cli import output
from seqblocks.cli.check import analysed, overrides
from seqblocks.errors import UsageError, visible
from seqblocks.language.writing import write_picture
from seqblocks.picture.drawing import drawing_of

FORMATS = ("html", "svg", "mermaid", "dot")


def run(options: argparse.Namespace) -> int:
    """Write the drawing in each format that is asked for. A spec with faults is drawn too, and they are reported."""
    wanted = {name: path for name in FORMATS if (path := getattr(options, name))}
    if not wanted:
        raise UsageError(f"say what to write: {', '.join(f'--{name} FILE' for name in FORMATS)}; FILE may be -")
    if [*wanted.values()].count("-") > 1:
        raise UsageError("only one picture can be written to standard output")
    found = analysed(options.spec, options, overrides(options))
    drawing = drawing_of(found, options.depth)
    if not options.quiet and found.ok and found.file:
        output.warnings(found.file.warnings, found.file.dropped, options)
    for name, path in wanted.items():
        text = getattr(drawing, name)()
        if path == "-":
            output.write(text.rstrip("\n"), raw=True)
        else:
            write_picture(Path(path), text)
            output.notes([f"{visible(path)}: written"], options)
    if not found.ok:
        output.diagnostics(found.error(), options)
    return found.status
