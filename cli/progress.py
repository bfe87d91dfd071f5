"""Show a progress bar on a terminal for what takes longer than two seconds."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from seqblocks.cli import output

DELAY = 2.0  # seconds


@contextmanager
def progress(options: argparse.Namespace, what: str) -> Iterator[Callable[..., None]]:
    """Give a function that takes the part done, from 0 to 1, and shows it if standard error is a terminal.

    A text may follow, which takes the place of `what`.

    An interrupt raises KeyboardInterrupt inside, so that the bar is removed, and what is done can be printed. It does
    not if the caller ignores interrupts, as a shell does for jobs in the background.
    """
    bar = _Bar(what) if not options.quiet and output.stderr().isatty() else None
    handler: Any = None
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        with suppress(ValueError):  # not in the main thread
            handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield bar.advance if bar else lambda part, text=None: None
    finally:
        if bar:
            bar.context.__exit__(None, None, None)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


class _Bar:
    """A bar that appears after a delay."""

    def __init__(self, what: str) -> None:
        self.what, self.begin = what, time.monotonic()
        self.context: Any = nullcontext()
        self.task: Any = None

    def advance(self, part: float, text: str | None = None) -> None:
        if self.task is None and time.monotonic() - self.begin > DELAY:
            from rich.console import Console
            from rich.progress import Progress

            self.context = Progress(console=Console(file=output.stderr()), transient=True)
            self.context.__enter__()
            self.task = self.context.add_task(self.what, total=1.0)
        if self.task is not None:
            self.context.update(self.task, completed=part, description=text or self.what)
