"""Write a folder atomically (docs/decisions/0034-a-model-is-a-folder.md)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seqblocks.checkpoint.record import EXTRA, RECORD
from seqblocks.checkpoint.weight_files import ENDINGS
from seqblocks.errors import UsageError, unwritable

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
STALE = 24 * 3600  # seconds without a change until an unfinished folder is removed, on systems without locks
OWN_FILES = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.json|spec\.yaml|config\.json|{RECORD}|{EXTRA}"
)
UNFINISHED, REPLACED = "saving", "replaced"


def target_of(path: Path, replace: bool = True) -> Path:
    """Return the folder to write, which need not exist, with symbolic links resolved.

    Raises UsageError if the path cannot be a folder, or is the working directory or the name of a weights file. Without
    `replace`, an existing folder must be empty.
    """
    mode = 0
    try:
        target = Path(os.path.realpath(path))  # fails for a relative path in a working directory that was removed
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(target).st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISLNK(mode):
        raise UsageError(f"{path} is a symbolic link in a cycle; save needs a folder")
    if mode and not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is not a folder; save needs one")
    if not mode and path.suffix.lower() in ENDINGS:
        raise UsageError(f"a folder is written, but {path} is the name of a file. Use {path.with_suffix('')}")
    if mode and os.path.samefile(os.curdir, target):  # processes, such as a shell, would stay in the old folder
        raise UsageError(f"{path} is the working directory, which cannot be replaced. Write to a folder in it")
    names = os.listdir(target) if mode else []
    if names and not replace:
        raise UsageError(f"{path} is not empty; use a new folder")
    if not (all(map(_is_own, names)) or os.access(target, os.W_OK)):  # it takes the files of others out of the target
        raise UsageError(f"{path} cannot be written: {os.strerror(errno.EACCES)}")
    return target


def own_files(target: Path) -> list[str]:
    """Return the names of files in a folder that `write` replaces; all other files and folders stay."""
    return [name for name in sorted(os.listdir(target)) if _is_own(name)] if target.is_dir() else []


def _is_own(name: str) -> bool:
    return OWN_FILES.fullmatch(name) is not None


def write(target: Path, work: Callable[[Path], None]) -> None:
    """Call `work(folder)` with a new folder, then replace the target with it. Files of others in the target stay.

    After a full disk, an interrupt or a kill, `current(target)` is either the old folder or the complete new one.
    """
    prefix = _prefix(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target, prefix)
        _remove_stale(target, prefix)
        folder, handle = _create(target.parent, prefix)
    except OSError as error:
        raise unwritable(target, error) from None
    try:
        work(folder)
        _finish(folder, target)
        _place(folder, target, prefix)
    except BaseException as error:
        _retire(folder, target)
        if isinstance(error, OSError) and error.errno and str(error.filename or folder).startswith(str(folder)):
            raise OSError(error.errno, error.strerror, str(target)) from error  # the file named there is gone
        raise
    finally:
        if handle is not None:
            os.close(handle)
    _sync(target.parent)
    for old in _siblings(target.parent, prefix, REPLACED):
        _retire(old, target)


def _prefix(target: Path) -> str:
    name = target.name if len(os.fsencode(target.name)) < 200 else hashlib.sha1(os.fsencode(target.name)).hexdigest()
    return f".{name}."


def _finish(folder: Path, target: Path) -> None:
    """Set the modes of the new files and their folder, and sync them to disk."""
    usual = os.stat(folder).st_mode & 0o666  # follows the umask; a library may have created the files as private
    before = None
    if target.is_dir():
        before = os.stat(target)
        with contextlib.suppress(FileNotFoundError):
            usual = os.stat(target / RECORD).st_mode
    for file in folder.iterdir():
        os.chmod(file, stat.S_IMODE(usual))
        _take_owner(file, before)
        _sync(file)
    _link_others(target, folder)
    if before:
        os.chmod(folder, stat.S_IMODE(before.st_mode))
        _take_owner(folder, before)
    _sync(folder)


def _take_owner(path: Path, before: os.stat_result | None) -> None:
    if before and fcntl and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):  # only root may change an owner
            os.chown(path, before.st_uid, before.st_gid)


def _place(folder: Path, target: Path, prefix: str) -> None:
    """Rename the target to a `.replaced` folder, and a complete folder to the target.

    Until the second rename, `current` finds the `.replaced` folder. It is removed once the target is complete.
    """
    while True:
        old = target.parent / f"{prefix}{secrets.token_hex(4)}.{REPLACED}"
        if os.path.isdir(target):
            with contextlib.suppress(FileNotFoundError):  # another process has renamed it in the meantime
                os.rename(target, old)
        try:
            os.rename(folder, target)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue  # another process has put its folder there in the meantime
            if old.exists():
                os.rename(old, target)
            raise
        return


def current(target: Path) -> Path:
    """Return the current path of a target's folder, which differs after a kill between two renames."""
    if not own_files(target):  # another program may have made the folder again, for files of its own
        for found in _siblings(target.parent, _prefix(target), REPLACED):
            return found
    return target


def _recover(target: Path, prefix: str) -> None:
    """Undo the first of two renames if the second did not happen."""
    for old in _siblings(target.parent, prefix, REPLACED):
        if not target.exists():
            with contextlib.suppress(OSError):  # `current` finds it there too, until the new folder is complete
                os.rename(old, target)


def _siblings(folder: Path, prefix: str, ending: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and re.fullmatch(rf"[0-9a-f]{{8}}\.{ending}", rest):
                path = folder / name
                if path.is_dir() and not path.is_symlink():
                    yield path


def _create(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Create an unfinished folder and lock it while it is written: a free lock means that the writer has exited."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}.{UNFINISHED}"
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        if fcntl is None:
            return folder, None
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            if _lock(handle) is not False and _is_same_file(handle, folder):
                return folder, handle
            os.close(handle)  # another save removed the folder as stale before it was locked


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool | None:
    """Lock an open folder. Return False if another process has locked it, None if the system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_stale(target: Path, prefix: str) -> None:
    """Remove the folders of killed saves of the same target. A running save holds a lock on its folder."""
    for folder in _siblings(target.parent, prefix, UNFINISHED):
        with contextlib.suppress(OSError):
            if _is_stale(folder):
                _retire(folder, target)


def _is_stale(folder: Path) -> bool:
    if fcntl is None:
        return time.time() - os.stat(folder).st_mtime > STALE
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        free = _lock(handle)
        return bool(free) or (free is None and time.time() - os.fstat(handle).st_mtime > STALE)
    finally:
        os.close(handle)


def _link_others(target: Path, folder: Path) -> None:
    """Put the files of others in a target also into the folder that will replace it, so that they are never missing.

    Folders, and files on systems without hard links, are moved after the replacement.
    """
    for entry in os.scandir(target) if target.is_dir() else ():
        if not _is_own(entry.name) and not entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError, NotImplementedError):
                os.link(entry.path, folder / entry.name, follow_symlinks=False)


def _retire(old: Path, target: Path, is_top: bool = True) -> None:
    """Move what others put into an old folder to the target, and remove the rest. What cannot be moved stays."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(old), key=lambda each: _is_own(each.name)):  # those of others first
            with contextlib.suppress(OSError):
                _retire_entry(entry, target / entry.name, is_top)
        os.rmdir(old)


def _retire_entry(entry: os.DirEntry[str], place: Path, is_top: bool) -> None:
    is_folder = entry.is_dir(follow_symlinks=False)
    if is_top and _is_own(entry.name) and not is_folder:
        os.unlink(entry)
    elif not os.path.lexists(place):
        os.rename(entry, place)
    elif is_folder:
        _retire(Path(entry), place, is_top=False)
    elif entry.stat(follow_symlinks=False).st_mtime_ns <= os.lstat(place).st_mtime_ns:  # the same file, or an older one
        os.unlink(entry)
    else:
        os.replace(entry, place)


def _sync(path: Path) -> None:
    """Sync a file or a folder to disk, so that it survives a power cut; folders only if the system supports it."""
    is_folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY if is_folder or os.name == "posix" else os.O_RDWR)
    except OSError:
        if is_folder:
            return
        raise
    try:
        os.fsync(handle)
    except OSError:
        if not is_folder:
            raise
    finally:
        os.close(handle)
