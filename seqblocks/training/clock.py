"""A clock for trainings that a user may stop for a while."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def working_time() -> Iterator[Callable[[], float]]:
    """Give a clock that returns the seconds since it began, without those in which the process was stopped.

    A process is stopped by Ctrl-Z, for instance, and continued by `fg`. It only learns of the latter, by SIGCONT, so
    what passed since the last reading is left out too. Outside the main thread, and on Windows, the clock counts all.
    """
    total, last = 0.0, time.perf_counter()

    def read() -> float:
        nonlocal total, last
        now = time.perf_counter()
        total, last = total + now - last, now
        return total

    def leave_out(number: int, frame: Any) -> None:
        nonlocal last
        last = time.perf_counter()

    try:
        before = signal.signal(signal.SIGCONT, leave_out)
    except (AttributeError, ValueError):  # Windows, another thread
        before = None
    try:
        yield read
    finally:
        if before is not None:
            signal.signal(signal.SIGCONT, before)
