"""`seqblocks draw`: write a picture of a spec."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from seqblocks.cli import output
from seqblocks.cli.check import analysed, overrides
from seqblocks.errors import UsageError, visible
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
            _write(Path(path), text)
            output.notes([f"{visible(path)}: written"], options)
    if not found.ok:
        output.diagnostics(found.error(), options)
    return found.status


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all. Raises UsageError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{visible(str(path))} cannot be written: {error.strerror}") from None
