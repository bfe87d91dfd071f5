"""Fixtures and settings of all tests. Nothing here imports torch, because the language tests must run without it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {"NO_COLOR": "1", "COLUMNS": "100"}
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# Triton decides at its first import whether to interpret its kernels. Without a GPU they are tested in the
# interpreter.
# `auto` never selects interpreted kernels, so the other tests are unaffected.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # a tenth of the time of compiling

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many processes of the tests compiles what it imports

if IN_WORKER:  # there is already one process per core, so more threads would only compete
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"

# The default profile is deterministic. Use `--hypothesis-profile=thorough` to search for new failures.
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden/ with what the tests see now"
    )
    parser.addoption("--results", type=Path, metavar="FILE", help="write each result to this file as it arrives")
    parser.addoption(
        "--record-launches", type=Path, metavar="FOLDER",
        help="write the compiled code of the Triton kernels of each test in tests/kernels, and their memory before and "
        "after each launch, to this folder (benchmarks/launches.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Python's own choice, a collection of garbage for each 700 new objects, takes a tenth of the time of all tests, and
    # a fifth of the time before the first one.
    gc.set_threshold(300_000, 3, 10)
    path = config.getoption("--results")
    if path is not None and not IN_WORKER:
        from tests.results import Results

        config.pluginmanager.register(Results(path, config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not _cuda_is_available():
        if "gpu" in config.option.markexpr:  # asked for, so each says why it does not run
            for item in for_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        else:  # more than a thousand
            config.hook.pytest_deselected(items=for_gpu)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    sort(items, slow_first=IN_WORKER and "gpu" not in config.option.markexpr)


def sort(items: list[pytest.Item], slow_first: bool) -> None:
    """Move tests that measure time to the end, and slow ones to the front, so that processes end together."""
    items.sort(key=lambda item: (  # stable: the others keep their order
        item.get_closest_marker("timing") is not None, slow_first and item.get_closest_marker("slow") is None
    ))  # fmt: skip


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of later collections of garbage, which some tests start themselves."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with _share_of_the_machine(item):
        return (yield)


@contextlib.contextmanager
def _share_of_the_machine(item: pytest.Item) -> Iterator[None]:
    """Hold a common lock during each test under xdist: shared by most tests, exclusive for those that measure time."""
    if not IN_WORKER:
        yield
        return
    import fcntl  # missing on Windows, where the tests run in one process

    with (item.config.cache.mkdir("machine") / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if item.get_closest_marker("timing") else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Return whether a snapshot test should write the actual output instead of comparing it."""
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `seqblocks ARGUMENTS` in a separate process from the checkout, installed or not.

    The result has `returncode`, `stdout` and `stderr`; the caller checks them. Without `env` the output has no colour
    and is 100 columns wide, so that it can be compared.
    """

    def run(
        *arguments: object,
        input: str | None = None,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-m", "seqblocks.cli", *map(str, arguments)],
            input=input,
            cwd=cwd or ROOT,
            env={**os.environ, "PYTHONPATH": path, **PLAIN, **(env or {})},
            timeout=timeout,
            capture_output=True,
            encoding="utf-8",
        )

    return run


@pytest.fixture
def limited_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Return a context in which this process writes no file beyond a number of bytes, as on a full disk."""
    resource = pytest.importorskip("resource", reason="limits the size of files, which needs a POSIX system")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # modules imported meanwhile would be stored cut off

    @contextlib.contextmanager
    def limited(count: int) -> Iterator[None]:
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)

    return limited


@pytest.fixture
def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `seqblocks ARGUMENTS` in this process, as `run_cli` does in a new one. `build` then imports torch only once.
    """

    def run(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
        from seqblocks.cli.main import main

        words = [*map(str, arguments)]
        with monkeypatch.context() as patch:
            patch.chdir(cwd or ROOT)
            for name, value in {**PLAIN, **(env or {})}.items():
                patch.setenv(name, value)
            capsys.readouterr()
            status = main(words)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, printed.out, printed.err)

    return run
