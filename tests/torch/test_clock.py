"""The clock of a training leaves out the time in which the process was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from seqblocks.training.clock import working_time

CODE = """
import sys, time
from seqblocks.training.clock import working_time
begin = time.perf_counter()
with working_time() as clock:
    print("ready", flush=True)
    sys.stdin.readline()
    print(clock(), time.perf_counter() - begin)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="processes cannot be stopped on Windows")
@pytest.mark.slow
def test_time_while_stopped_does_not_count() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # the signal is handled
        process.stdin.write("\n")
        process.stdin.flush()
        counted, whole = map(float, process.stdout.read().split())
    assert whole >= 1
    assert 0 < counted <= whole - 1


def test_it_counts_time() -> None:
    handler = signal.getsignal(signal.SIGCONT) if hasattr(signal, "SIGCONT") else None
    before = time.perf_counter()
    with working_time() as clock:
        first = clock()
        time.sleep(0.02)
        second = clock()
    assert 0 <= first <= second - 0.02 <= time.perf_counter() - before
    if handler is not None:
        assert signal.getsignal(signal.SIGCONT) is handler


def test_another_thread_has_a_clock() -> None:
    found: list[float] = []

    def work() -> None:
        with working_time() as clock:
            found.append(clock())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] >= 0
