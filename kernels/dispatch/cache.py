"""Small results that later processes can use again: one JSON file for each, in the user's cache folder.

A record holds its whole key, so that a file of another key, version or program is never taken for it. Files are written
whole and then renamed: processes may write at the same time. A record that cannot be read counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

Key = dict[str, Any]


def folder() -> Path:
    """$SEQBLOCKS_CACHE, else `seqblocks` in the user's cache folder."""
    own = os.environ.get("SEQBLOCKS_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    windows = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    # without a home directory expanduser leaves "~" as it is: the folder is then below the working directory
    return Path(windows or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "seqblocks"


def path(kind: str, key: Key) -> Path:
    """The file of a record."""
    text = json.dumps(key, sort_keys=True)
    return folder() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read(kind: str, key: Key) -> Any:
    """The value stored for a key of JSON values; None if there is none, or none that can be read."""
    try:
        record = json.loads(path(kind, key).read_text("utf-8"))
        return record["value"] if record["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write(kind: str, key: Key, value: Any) -> None:
    """Store a JSON value. A folder that cannot be written gives a warning, not an error."""
    to = path(kind, key)
    temporary = None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=to.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, "value": value}, file, indent=1, sort_keys=True)
        os.replace(temporary, to)
    except OSError as error:
        warnings.warn(f"{to} cannot be written: {error}", stacklevel=2)
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
