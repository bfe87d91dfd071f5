"""`seqblocks lsp`: a language server, which an editor starts and talks to over the standard streams."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from seqblocks.cli import output
from seqblocks.errors import UnavailableError


def run(options: argparse.Namespace) -> int:
    """Serve an editor until it ends the connection. Raises UnavailableError without pygls or its log."""
    try:
        from seqblocks.editor.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise UnavailableError("the language server needs pygls: pip install 'seqblocks[lsp]'") from None
    gc.enable()  # it runs for hours; the command turns it off for one that ends at once
    with open(os.dup(output.stdout().fileno()), "wb") as results:  # which pygls closes
        log = Path(options.log) if options.log else None
        serve(sys.stdin.buffer, results, options.allow_use, log)
    return 0
