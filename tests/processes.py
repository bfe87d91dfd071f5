"""Run child processes that can be interrupted as in a terminal, and that end with their test. Share what is slow."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, compute: Callable[[Path], Any]) -> Any:
    """Return what `compute` returns for a new folder. Under xdist, one process computes it and the others read it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return compute(factory.mktemp(name))
    import fcntl  # missing on Windows, where the tests run in one process

    path = folder.parent / f"{name}.pickle"
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(None))  # what the others read if this fails
            path.write_bytes(pickle.dumps(compute(factory.mktemp(name))))
        found = pickle.loads(path.read_bytes())
    return pytest.fail(f"{name} failed in another process") if found is None else found

# A child process inherits ignored interrupts, and a shell ignores them for background jobs. Python would then never
# raise KeyboardInterrupt, and a test that interrupts its child would wait forever.
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"

def command(*words: str) -> list[str]:
    """Return the command `seqblocks WORDS`, which reacts to interrupts however the tests were started."""
    return [sys.executable, "-c", f"{LISTENING}; from seqblocks.cli import entry; entry()", *words]


_INTERRUPTED = f"""
{LISTENING}
import os, sys, threading, time
def interrupt(seconds):
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, args=[float(sys.argv.pop(1))], daemon=True).start()
from seqblocks.cli import entry
entry()
"""


def interrupted(root: Path, after: float, *words: str) -> tuple[int, str]:
    """Run `seqblocks WORDS`, interrupt it that many seconds after its start, and return exit status and standard error.

    The start of Python itself comes first; no program can control that.
    """
    command = [sys.executable, "-c", _INTERRUPTED, str(after), *words]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


_SCRIPT = f"""
{LISTENING}
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextlib.contextmanager
def listening(script: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Return a Python script that reacts to interrupts however the tests were started. It ends with the test."""
    command = [sys.executable, "-c", _SCRIPT, *script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as child:
        try:
            yield child
        finally:
            child.kill()
