"""`seqblocks serve`: a page to edit a spec, with its picture, counts and problems."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from seqblocks.cli import output
from seqblocks.errors import UsageError, visible
from seqblocks.language.spec_files import bundled, locate


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write it. Raises UsageError for standard input, or a port that is taken."""
    if options.spec == "-":
        raise UsageError("serve edits a file, not standard input")
    known = bundled().get(options.spec)
    if known is None:
        locate(options.spec)  # which reports a missing file
    path = Path(known or options.spec)
    return _write(path, options) if options.static else _serve(path, options)


def _serve(path: Path, options: argparse.Namespace) -> int:
    from seqblocks.serve.server import serve

    with serve(path, options.port, options.allow_use) as server:
        output.write(server.address, flush=True)
        if options.open:
            webbrowser.open(server.address)
        output.notes(["the page is for this machine only; Ctrl-C ends it"], options)
        server.serve_forever(poll_interval=0.1)
    return 0


def _write(path: Path, options: argparse.Namespace) -> int:
    from seqblocks.analysis.analyse import analyse_text
    from seqblocks.serve.playground import write

    folder = Path(options.static)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{options.static} is a file: --static takes a folder")
    text, name, base = locate(options.spec)
    found = analyse_text(text, name, base, allow_use=options.allow_use)
    used = {name: content for name, content in found.files if name not in bundled()}
    size = write(folder, path.name, text, used)
    output.notes(
        [
            f"{visible(str(folder))}: written, {size / 1e6:.1f} MB",
            f"see it with `python -m http.server -d {visible(str(folder))}`; any server of files can publish it",
        ],
        options,
    )
    return 0
