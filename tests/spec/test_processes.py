"""Child processes of tests receive interrupts and end with their test."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes import listening


@pytest.fixture
def waiting(tmp_path: Path) -> list[str]:
    script = tmp_path / "waiting.py"
    script.write_text(
        "import sys, time\n"
        "try:\n"
        "    print(*sys.argv[1:], flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    return [str(script), "one", "two"]


def test_a_child_is_interrupted_though_its_parent_ignores_interrupts(waiting: list[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as when a shell runs the tests in the background
    try:
        with listening(waiting) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "one two\n"
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=30) == ("interrupted\n", "")
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.returncode == 0


def test_a_failing_test_leaves_no_process_and_no_pipe(waiting: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), listening(waiting) as child:
        _ = 1 / 0
    assert child.returncode == -signal.SIGKILL
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.closed
    assert child.stderr.closed
