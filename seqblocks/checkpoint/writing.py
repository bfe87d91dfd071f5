"""Writing a file so that it is whole at any moment (docs/decisions/0020-files-that-are-whole.md)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seqblocks.errors import UsageError

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
STALE = 24 * 3600  # seconds without a write, after which an unfinished file is removed where there are no locks


def target_of(path: Path) -> Path:
    """Return the regular file, present or not, that a path leads to through links. Raise UsageError for others."""
    mode = 0
    try:
        target = Path(os.path.realpath(path))
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder, and save writes one file")
    if mode and not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a link in a ring of links", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UsageError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, and save writes regular files")
    if not target.parent.is_dir():
        parent = target.parent if path.is_symlink() else path.parent
        raise UsageError(f"there is no folder {parent}")
    return target


def write(target: Path, work: Callable[[Any], Any]) -> None:
    """Write in the target's folder, then rename: a full disk, an interrupt or a kill leaves the old file as it was."""
    name = target.name if len(os.fsencode(target.name)) < 200 else hashlib.sha1(os.fsencode(target.name)).hexdigest()
    prefix = f".{name}."
    _remove_stale(target.parent, prefix)
    old = os.stat(target) if target.exists() else None
    try:
        handle, unfinished = _create(target.parent, prefix, 0o600 if old else 0o666)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    file = _RawFile(handle)
    try:
        with file:
            _take_owner_and_mode(handle, old)
            _run(work, file)
            os.fsync(handle)
            if fcntl is None:  # Windows renames closed files only; elsewhere the lock is held to the end
                file.close()
            os.replace(unfinished, target)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _take_owner_and_mode(handle: int, old: os.stat_result | None) -> None:
    """Give an open file the owner and the mode of the one that it replaces."""
    if not (old and fcntl):
        return
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):  # only root may change an owner
            os.fchown(handle, old.st_uid, old.st_gid)
    os.fchmod(handle, stat.S_IMODE(old.st_mode))


def _run(work: Callable[[Any], Any], file: _RawFile) -> None:
    """Call `work(file)`. Where the disk fails, torch's writer raises an error of its own; raise that of the disk."""
    try:
        work(file)
    except RuntimeError:
        if file.error is None:
            raise
        raise file.error from None


class _RawFile:
    """An unbuffered file for writing that stores the error of a failed write."""

    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "wb", buffering=0)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += self._file.write(view[done:]) or 0
        except OSError as error:
            self.error = error
            raise
        return done

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(folder: Path, prefix: str, mode: int) -> tuple[int, str]:
    """Create an unfinished file and lock it while it is open: if the lock is free, its writer has ended."""
    while True:
        name = str(folder / f"{prefix}{secrets.token_hex(4)}.saving")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            handle = os.open(name, flags, mode)
        except FileExistsError:
            continue
        if _lock(handle) is not False:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(name), os.fstat(handle)):
                    return handle, name
        os.close(handle)  # another save removed it as stale in the moment before it was locked


def _lock(handle: int) -> bool | None:
    """Lock an open file. False where another process has locked it; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove unfinished files of killed saves of the same target. A save that runs holds a lock on its file."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _is_unfinished(entry, prefix):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry.path)


def _is_unfinished(entry: os.DirEntry[str], prefix: str) -> bool:
    if not (entry.name.startswith(prefix) and entry.name.endswith(".saving")):
        return False
    return len(entry.name) == len(prefix) + len("01234567.saving") and entry.is_file(follow_symlinks=False)


def _remove_if_stale(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        free = _lock(handle)
        if free or (free is None and time.time() - os.fstat(handle).st_mtime > STALE):
            os.unlink(path)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
