"""Print results and diagnostics as text, JSON or workflow annotations, with colours and readable numbers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from seqblocks.descriptions.numbers import bytes_of as bytes_of
from seqblocks.descriptions.numbers import short as short
from seqblocks.errors import Diagnostic, SpecError, Style, UnavailableError, escape_controls, render_all

if TYPE_CHECKING:
    from seqblocks.graph import ModelSpec

results: TextIO | None = None
remarks: TextIO | None = None
"""The streams of results and of everything else when run as a command, independent of what plug-ins do to `sys.stdout`
and `sys.stderr`. None: use `sys.stdout` and `sys.stderr`. Only this module writes to them."""
has_document = False  # whether the command has printed a JSON document: an error after it is text, on the other stream

_CODES = {
    "error": "1;31",
    "warning": "1;33",
    "message": "1",
    "gutter": "34",
    "caret": "1;31",
    "hint": "1;32",
    "note": "1;36",
    "expected": "1",
    "found": "1",
}


def coloured(stream: TextIO, choice: str) -> bool:
    """Return whether to colour output to `stream`."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def style(stream: TextIO, choice: str) -> Style:
    """Return the function that colours the parts of a diagnostic."""
    if not coloured(stream, choice):
        return lambda role, text: text
    return lambda role, text: f"\x1b[{_CODES[role]}m{text}\x1b[0m"


class Unwritable(UnavailableError):
    """Raised when results cannot be written, for instance because the disk is full."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the result cannot be written: {getattr(error, 'strerror', None) or error}")


def stdout() -> TextIO:
    """Return the stream of the results."""
    return results or sys.stdout


def stderr() -> TextIO:
    """Return the stream of everything else."""
    return remarks or sys.stderr


def write(text: str, stream: TextIO | None = None, *, raw: bool = False, flush: bool = False) -> None:
    """Print lines, escaping characters that the encoding of the stream lacks.

    raw: do not escape control characters (for our own text, which may contain colours). flush: at once, for results
    that come one after another. Raises Unwritable if writing to the stream of results fails.
    """
    stream = stream or stdout()
    text = text if raw else escape_controls(text)
    try:
        stream.write(_encodable(text, stream.encoding or "utf-8") + "\n")
        if flush:
            stream.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        with contextlib.suppress(OSError, ValueError):
            silence(stream)
        if stream is stdout():
            raise Unwritable(error) from error
        # write errors on stderr are ignored: the exit status still reports the outcome


_ASCII = str.maketrans({"…": "...", "→": "->", "×": "x", "–": "-", "—": "-", "─": "-"})


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, after the pipe was closed or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def dump(data: Any) -> None:
    """Print one JSON document to stdout. Numbers that are not finite are null, since JSON has none."""
    import json

    global has_document
    has_document = True
    try:
        text = json.dumps(data, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), indent=2)
    write(text, raw=True)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [*map(_finite, data)]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def diagnostics(error: SpecError, options: Any) -> None:
    """Print the diagnostics of a spec in the requested format."""
    kind = options.format if options else "text"
    if kind == "json" and not has_document:
        dump(failed(error))
    elif kind == "github":
        for diagnostic in error.diagnostics:
            write(annotation(diagnostic))
    else:
        choice = options.color if options else "auto"
        write(render_all(error.diagnostics, error.dropped, style(stderr(), choice)), stderr(), raw=True)


def failed(error: SpecError) -> dict[str, Any]:
    """Return the JSON record of an invalid spec."""
    from seqblocks._version import __version__

    return {
        "version": __version__,
        "ok": False,
        "status": error.exit_status,
        "diagnostics": [d.as_data() for d in error.diagnostics],
        "dropped": error.dropped,
    }


def _escape(text: str, more: str = "") -> str:
    """Escape text for a workflow command."""
    text = escape_controls(text)
    for char in "%\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def annotation(diagnostic: Diagnostic) -> str:
    """Return a GitHub workflow command that annotates the line in a review."""

    where = ""
    span = diagnostic.span
    if span and span.source.bundled:  # annotate the line of the user's own file that led to the fault
        own = [note.span for note in diagnostic.notes if note.span and note.span.source.kind == "own"]
        span = own[-1] if own else None
    if span:
        file = _escape(span.source.name, ":,")
        where = f"file={file},line={span.line},col={span.column},endLine={span.end_line},endColumn={span.end_column},"
    parts = [diagnostic.message, diagnostic.expected and f"expected: {diagnostic.expected}"]
    parts += [diagnostic.found and f"found: {diagnostic.found}", diagnostic.hint and f"hint: {diagnostic.hint}"]
    return f"::{diagnostic.severity} {where}title={diagnostic.code}::{_escape('; '.join(p for p in parts if p))}"


def warnings(found: Sequence[Diagnostic], dropped: int, options: Any) -> None:
    """Print warnings. With `--format json` they are part of the result instead."""
    if not found or options.format == "json":
        return
    if options.format == "github":
        for diagnostic in found:
            write(annotation(diagnostic))
        return
    write(render_all(found, dropped, style(stderr(), options.color)), stderr(), raw=True)


def remarks_on(model: ModelSpec) -> dict[str, Any]:
    """Return the warnings and notes of a checked model as plain data."""
    return {"warnings": [each.as_data() for each in model.warnings], "notes": [*model.notes]}


def notes(texts: list[str], options: Any) -> None:
    """Print notes. With `--format json` they are part of the result instead."""
    for text in texts if options.format != "json" else ():
        if options.format == "github":
            write(f"::notice ::{_escape(text)}")
        else:
            write(f"{style(stderr(), options.color)('note', 'note')}: {escape_controls(text)}", stderr(), raw=True)


def problem(message: str, options: Any) -> None:
    """Print an error that is not about a spec."""
    if options is not None and options.format == "json" and not has_document:
        dump({"ok": False, "error": message})
    elif options is not None and options.format == "github":
        write(f"::error ::{_escape(message)}")
    else:
        choice = options.color if options else "auto"
        write(f"{style(stderr(), choice)('error', 'error')}: {escape_controls(message)}", stderr(), raw=True)
