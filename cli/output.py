"""How things are printed: diagnostics as text, JSON or workflow annotations; colours; numbers for people."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from seqblocks.errors import Diagnostic, SpecError, Style, render_all

_CODES = {
    "error": "1;31",
    "message": "1",
    "gutter": "34",
    "caret": "1;31",
    "hint": "1;32",
    "note": "1;36",
    "expected": "1",
    "found": "1",
}


def coloured(stream: TextIO, choice: str) -> bool:
    """Whether to colour what goes to `stream`."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def style(stream: TextIO, choice: str) -> Style:
    """A painter for diagnostics."""
    if not coloured(stream, choice):
        return lambda role, text: text
    return lambda role, text: f"\x1b[{_CODES[role]}m{text}\x1b[0m"


def write(text: str, stream: TextIO | None = None) -> None:
    """Print, whatever the stream's encoding can hold."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=stream)


def dump(data: Any) -> None:
    """One JSON document on stdout."""
    import json

    write(json.dumps(data, indent=2))


def diagnostics(error: SpecError, options: Any) -> None:
    """A spec's faults, in the format that was asked for."""
    kind = options.format if options else "text"
    if kind == "json":
        dump(failed(error))
    elif kind == "github":
        for diagnostic in error.diagnostics:
            write(annotation(diagnostic))
    else:
        choice = options.color if options else "auto"
        write(render_all(error.diagnostics, error.dropped, style(sys.stderr, choice)), sys.stderr)


def failed(error: SpecError) -> dict[str, Any]:
    """The JSON record of a spec that does not validate."""
    from seqblocks._version import __version__

    return {
        "version": __version__,
        "ok": False,
        "status": error.exit_status,
        "diagnostics": [d.as_data() for d in error.diagnostics],
        "dropped": error.dropped,
    }


def annotation(diagnostic: Diagnostic) -> str:
    """A workflow command that marks the line in a review."""

    def escape(text: str, more: str = "") -> str:
        for char in "%\r\n" + more:
            text = text.replace(char, f"%{ord(char):02X}")
        return text

    where = ""
    span = diagnostic.span
    if span and span.source.name.startswith("<bundled"):  # the line of the reader's own file that led there
        own = [note.span for note in diagnostic.notes if note.span and not note.span.source.name.startswith("<")]
        span = own[-1] if own else None
    if span:
        file = escape(span.source.name, ":,")
        where = f"file={file},line={span.line},col={span.column},endLine={span.end_line},endColumn={span.end_column},"
    parts = [diagnostic.message, diagnostic.expected and f"expected: {diagnostic.expected}"]
    parts += [diagnostic.found and f"found: {diagnostic.found}", diagnostic.hint and f"hint: {diagnostic.hint}"]
    return f"::error {where}title={diagnostic.code}::{escape('; '.join(p for p in parts if p))}"


def notes(texts: list[str], options: Any) -> None:
    """Remarks on what is not at fault; in JSON they stand among the results."""
    for text in texts if options.format != "json" else ():
        if options.format == "github":
            write(f"::notice ::{text}")
        else:
            write(f"{style(sys.stderr, options.color)('note', 'note')}: {text}", sys.stderr)


def problem(message: str, options: Any) -> None:
    """An error that is not a spec's."""
    if options is not None and options.format == "json":
        dump({"ok": False, "error": message})
    else:
        choice = options.color if options else "auto"
        write(f"{style(sys.stderr, choice)('error', 'error')}: {message}", sys.stderr)


def count(value: float) -> str:
    """1,234,567."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def short(value: float) -> str:
    """1.23 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def bytes_of(value: float) -> str:
    """24.4 MB."""
    return f"{short(value)}B" if value >= 1000 else f"{value:.0f} B"
