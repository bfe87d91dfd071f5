"""What is worth knowing again in the next run: small records in the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def folder() -> Path:
    """$SEQBLOCKS_CACHE, else seqblocks in the user's cache folder."""
    own = os.environ.get("SEQBLOCKS_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    windows = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    # expanduser leaves "~" where nobody is at home; the folder is then one of the working directory's
    return Path(windows or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "seqblocks"


@cache
def here(op: str, index: int) -> tuple[str, str, str]:
    """Device, Triton, and a digest of the sources that the op's kernels are made of: no record outlives these."""
    kernels = Path(__file__).parents[1]
    sources = b"".join((kernels / f"{name}.py").read_bytes() for name in (f"{op}/triton", "triton_common"))
    triton: Any = importlib.import_module("triton")
    return torch.cuda.get_device_name(index), f"triton {triton.__version__}", hashlib.sha256(sources).hexdigest()[:12]


class Shelf(Generic[T]):
    """Values by name, in memory and in a JSON file that other processes add to. `parse` raises for what is no value."""

    def __init__(self, file: str, about: str, parse: Callable[[Any], T]) -> None:
        self._file, self._about, self._parse = file, about, parse
        self._known: dict[Path, dict[str, T]] = {}

    def path(self) -> Path:
        return folder() / self._file

    def get(self, name: str) -> T | None:
        return self._all().get(name)

    def keep(self, name: str, value: T) -> None:
        """A folder that cannot be written is no failure: the value is known until the process ends."""
        self._all()[name] = value
        path = self.path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            together = {**self._read(path), **self._all()}
            with tempfile.TemporaryDirectory(dir=path.parent) as own:
                file = Path(own) / self._file
                file.write_text(json.dumps(together, indent=1, sort_keys=True), encoding="utf-8")
                os.replace(file, path)
        except OSError as error:
            warnings.warn(f"{self._about} are not kept: {error}", stacklevel=2)

    def forget(self) -> None:
        """Read the file again at the next question."""
        self._known.clear()

    def _all(self) -> dict[str, T]:
        path = self.path()
        if path not in self._known:
            self._known[path] = self._read(path)
        return self._known[path]

    def _read(self, path: Path) -> dict[str, T]:
        try:
            return {str(name): self._parse(value) for name, value in json.loads(path.read_text("utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            warnings.warn(f"{path} is not a record of {self._about} and is left out: {error}", stacklevel=2)
            return {}
