"""Findings that later processes can use again: one small file for each, in the user's cache folder.

The first line of a record is its whole key, so that the file of another key is never used instead. Files are written
whole and then renamed: processes may write at the same time. A record that cannot be read counts as absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path


def folder() -> Path:
    """Return $SEQBLOCKS_CACHE, else `seqblocks` in the user's cache folder."""
    own = os.environ.get("SEQBLOCKS_CACHE")
    # without a home directory expanduser leaves "~" as it is: the folder is then below the working directory
    return Path(os.path.expanduser(own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "seqblocks")))


def path(key: str) -> Path:
    """Return the file of a record."""
    return folder() / "checks" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"


def read(key: str) -> str | None:
    """Return the text stored for a key of one line, or None."""
    try:
        text = path(key).read_text("utf-8")
    except (OSError, ValueError):
        return None
    whole = text.startswith(f"{key}\n") and text.endswith("\n") and text.count("\n") == 2
    return text.removeprefix(f"{key}\n")[:-1] if whole else None


def write(key: str, text: str) -> None:
    """Store a text of one line. A folder that cannot be written gives a warning, not an error."""
    file = path(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
            whole = Path(temporary, file.name)
            whole.write_text(f"{key}\n{text}\n", "utf-8")
            whole.replace(file)
    except OSError as error:
        warnings.warn(f"{file} cannot be written: {error}", stacklevel=2)
