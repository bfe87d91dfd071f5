"""Write a text file completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from seqblocks.errors import UsageError, unwritable, visible


def write_picture(path: Path, text: str) -> None:
    """Write a page or a picture. Raises UsageError for a file that has something else, such as a spec.

    Else a slip of completion, `--html spec.yaml`, would cost the spec.
    """
    found = _begin(path)
    if found and _kind(found) != _kind(text):
        raise UsageError(f"{visible(str(path))} has something else: name another file, or remove it first")
    write_text(path, text)


def _begin(path: Path) -> str:
    """Return the first characters of a regular file."""
    if not path.is_file():
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000).strip()
    except OSError:
        return ""


def _kind(text: str) -> str:
    """Return what tells a page and the languages of pictures apart."""
    text = text.lstrip("\ufeff \n")
    return "<" if text.startswith("<") else text.split(maxsplit=1)[0]


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing an earlier one only when it is complete. Raises UsageError if it cannot be.

    Anything but a regular file, such as /dev/null or a pipe, is written to directly.
    """
    target = Path(os.path.realpath(path))
    name = None
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            with open(path, "w", encoding="utf-8", newline="") as stream:
                stream.write(text)
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            name = file.name
            file.write(text)
        if target.exists():
            shutil.copymode(target, name)
        else:
            os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise unwritable(path, error) from None


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
