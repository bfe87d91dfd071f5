"""Run the kernels on a device. From the root of a checkout, with torch, triton, pytest, pytest-xdist and hypothesis:

    TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT -k 20 240 \\
        python -m pytest tests/kernels -m gpu --tb=short -p no:benchmark -n 12 --maxschedchunk 1 \\
        --continue-on-collection-errors --results results.jsonl

Nine hundred kernels are compiled, most within a second, so `-n` starts several processes that share one device. The
check before the first use would compile as many again, and is only enabled in test_self_check_on_device.py. One case of
every test runs first, then a second, and so on, so that an interrupted run has covered all tests. (--maxschedchunk 1
preserves that order under xdist.) Results are in the file as they arrive; `python tests/results.py results.jsonl`
prints them. `benchmarks/gpu.sh FOLDER 2` runs this, and the failing tests once more with `--record-launches`.

rehearsal.py runs one case of each GPU test in the interpreter. Files with GPU tests must not need pydantic.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Warnings of torch or its compiler (about float32 products without TF32, for example) are no failures of a kernel, but
# a failed check of an implementation is. The last filter takes precedence.
WARNINGS = (
    "default", "ignore:TensorFloat32 tensor cores:UserWarning", "error:the Triton implementation of:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [at for at, item in enumerate(items) if item.get_closest_marker("gpu")]
    for at, item in zip(ours, in_turn([items[at] for at in ours]), strict=True):
        items[at] = item
        item.add_marker(pytest.mark.filterwarnings(*WARNINGS))


@pytest.fixture(autouse=True)
def no_self_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("SEQBLOCKS_SELF_CHECK", "0")


def in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order tests so that one case of each test and kernel runs first, then another of each. All processes use the same
    order."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("-")[0]].append(item)
    for name, of_one in cases.items():
        random.Random(name).shuffle(of_one)
    turns = {item.nodeid: turn for of_one in cases.values() for turn, item in enumerate(of_one)}
    return sorted(items, key=lambda item: turns[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record launches on request. End the process after a device fault, which would make all its later tests fail;
    xdist starts another."""
    folder = item.config.getoption("--record-launches")
    try:
        with contextlib.nullcontext() if folder is None else recorded(folder, item.nodeid.rpartition("/")[2]):
            return (yield)
    except Exception:
        if item.get_closest_marker("gpu") and _device_is_lost():
            capture = item.config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture()
            print(f"\n{item.nodeid} has lost the device:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
        raise


@contextlib.contextmanager
def recorded(folder: Path, name: str) -> Iterator[None]:
    """Write the code and the memory of the launches inside the context to a subfolder, also if they fail."""
    from benchmarks.launches import launches, save

    with launches(memory=True) as found:
        try:
            yield
        finally:
            save(found, folder, name)


def _device_is_lost() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return torch.cuda.is_available()  # without a device nothing can be lost
    return False
