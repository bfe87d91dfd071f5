"""The command line: argparse verbs over the library. Nothing imports it."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def entry() -> NoReturn:
    """Run the installed command, `seqblocks VERB …`.

    An interrupt ends it at once. As an exception it would be lost in an import that is under way: torch turns it into
    errors of its own. Where the caller ignores interrupts, as a shell does for what runs in the background, so do we.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from seqblocks.cli.main import process

    process()
