"""Store results for later processes, one small file for each, in the user's cache folder.

A record contains its whole key. A record that is unreadable, truncated or has another key counts as absent, so several
processes may write at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path


def folder() -> Path:
    """Return $SEQBLOCKS_CACHE, else `seqblocks` in the user's cache folder."""
    own = os.environ.get("SEQBLOCKS_CACHE")
    # Without a home directory, expanduser leaves "~" unchanged: the folder is then below the working directory.
    return Path(os.path.expanduser(own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "seqblocks")))


def path(key: str) -> Path:
    """Return the path of the record for a key."""
    return folder() / "checks" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def read(key: str) -> str | None:
    """Return the text stored for a key, or None."""
    try:
        record = json.loads(path(key).read_text("utf-8"))
        return str(record["text"]) if record["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(key: str, text: str) -> None:
    """Store a text under a key. Warns if the file cannot be written."""
    file = path(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "text": text}), "utf-8")
    except OSError as error:
        warnings.warn(f"{file} cannot be written: {error}", stacklevel=2)
