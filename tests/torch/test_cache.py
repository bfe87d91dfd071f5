"""Records in the user's cache folder: complete, separate, and optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqblocks.kernels.dispatch import cache

KEY = '{"op": "mlstm", "launches": [{"BT": 64}]}'
ANOTHER = '{"op": "slstm"}'

WRITERS = """
import os
from seqblocks.kernels.dispatch import cache
children = []
for writer in range(6):
    children.append(os.fork())
    if not children[-1]:
        for at in range(15):
            cache.write(f"{writer} {at}", "")
            cache.write(f"all {at}", str(writer))
        os._exit(0)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEQBLOCKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_written_records_are_read(folder: Path) -> None:
    assert cache.read(KEY) is None
    cache.write(KEY, "it is wrong")
    assert cache.read(KEY) == "it is wrong"
    assert cache.read(ANOTHER) is None
    assert [path for path in folder.rglob("*") if path.is_file()] == [cache.path(KEY)]


@pytest.mark.parametrize(
    "text", ["", "{}", "null", KEY, '["key", "text"]', '{"key": "', '{"key": "", "text": ""}', "\0"]
)
def test_a_bad_record_is_absent_and_replaced(text: str, folder: Path) -> None:
    cache.write(ANOTHER, "")
    cache.write(KEY, "")
    cache.path(KEY).write_text(text)
    assert cache.read(KEY) is None
    assert cache.read(ANOTHER) == ""
    cache.write(KEY, "new")
    assert cache.read(KEY) == "new"


def test_bytes_that_are_not_text_count_as_absent(folder: Path) -> None:
    cache.write(KEY, "")
    cache.path(KEY).write_bytes(b"\xff\xfe")
    assert cache.read(KEY) is None


def test_a_record_of_another_key_is_not_used(folder: Path) -> None:
    """Simulates two keys with the same digest."""
    cache.write(KEY, "")
    cache.path(ANOTHER).write_text(cache.path(KEY).read_text())
    assert cache.read(ANOTHER) is None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forks of one process, and this system has none")
def test_six_processes_keep_all_records(folder: Path, root: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITERS], cwd=root, check=True, timeout=120)
    assert all(cache.read(f"{w} {at}") == "" for w in range(6) for at in range(15))
    assert all(cache.read(f"all {at}") in map(str, range(6)) for at in range(15))
    assert len([*folder.rglob("*")]) == 1 + 90 + 15  # no temporary files remain


def test_a_folder_that_cannot_be_written_gives_a_warning(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.write(KEY, "")
    assert cache.read(KEY) is None


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEQBLOCKS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache.folder().name == "seqblocks"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SEQBLOCKS_CACHE", "~/mine")
    assert cache.folder() == tmp_path / "mine"
