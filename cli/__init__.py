"""Command-line interface: argparse verbs over the library. No other module imports it."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def entry() -> NoReturn:
    """Run the installed command, `seqblocks VERB …`.

    An interrupt ends the process at once. A KeyboardInterrupt raised during an import could be lost, because torch
    replaces it by its own errors. If the caller ignores interrupts, as a shell does for background jobs, so do we.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from seqblocks.cli.main import process

    process()
