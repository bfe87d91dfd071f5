"""`seqblocks serve`: a page to edit a spec, with its picture, counts and problems."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from seqblocks.cli import output
from seqblocks.errors import UsageError
from seqblocks.language.files import bundled, locate
from seqblocks.serve import serve


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Raises UsageError for standard input, or a port that is taken."""
    if options.spec == "-":
        raise UsageError("serve edits a file, not standard input")
    known = bundled().get(options.spec)
    if known is None:
        locate(options.spec)  # which reports a missing file
    with serve(Path(known or options.spec), options.port, options.allow_use) as server:
        output.write(server.address)
        output.stdout().flush()
        if options.open:
            webbrowser.open(server.address)
        output.notes(["the page is for this machine only; Ctrl-C ends it"], options)
        server.serve_forever(poll_interval=0.1)
    return 0
