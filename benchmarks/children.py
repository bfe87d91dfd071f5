"""Run jobs in separate processes: one that breaks the device, hangs or dies does not affect the others.

The processes are forked, so they do not import torch again. The caller must not have touched a CUDA device.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

J = TypeVar("J", bound=tuple[Any, ...])


class Late(Exception):
    """The time for all jobs ended before this job did."""


def records(
    work: Callable[..., Iterable[Any]], jobs: Iterable[J], at_once: int, end: float, seconds: float
) -> Iterator[tuple[J, Any]]:
    """Yield each job with the results of work(*job) as they arrive, or with an Exception if the job does not finish.

    No job starts or runs after `end` (of time.monotonic), and none runs for longer than `seconds`.
    """
    fork, waiting = multiprocessing.get_context("fork"), list(jobs)
    running: dict[Connection, tuple[J, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once and time.monotonic() < end:
                job = waiting.pop(0)
                reader, writer = fork.Pipe(duplex=False)
                process = fork.Process(target=_run, args=(writer, work, job), daemon=True)
                process.start()
                writer.close()
                running[reader] = job, process, min(end, time.monotonic() + seconds)
            if not running:
                break
            first = min(until for _, _, until in running.values())
            ready = wait([*running], max(0.0, first - time.monotonic()))
            for reader, (job, process, _) in [*running.items()]:
                if reader not in ready:
                    continue
                try:
                    yield job, reader.recv()
                except EOFError:
                    process.join()
                    reader.close()
                    del running[reader]
                    if process.exitcode:
                        yield job, RuntimeError(f"its process ended with {process.exitcode}")
            for reader, (job, process, until) in [*running.items()]:
                if time.monotonic() >= until and not reader.poll():
                    _end(process, reader)
                    del running[reader]
                    yield job, Late("out of time") if until == end else TimeoutError(f"more than {seconds:.0f} s")
        for job in waiting:
            yield job, Late("out of time")
    finally:
        for reader, (_, process, _) in running.items():
            _end(process, reader)


def _end(process: Any, reader: Connection) -> None:
    process.kill()
    process.join()
    reader.close()


def _run(writer: Connection, work: Callable[..., Iterable[Any]], job: tuple[Any, ...]) -> None:
    for record in work(*job):
        writer.send(record)
