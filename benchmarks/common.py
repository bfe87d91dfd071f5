"""Functions shared by the benchmarks: versions of packages, and writing files."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

import seqblocks


def versions(peers: Iterable[str]) -> list[str]:
    """Return "name version" of torch, triton, this package (also from a checkout) and the installed peers."""
    out = []
    for name in ("torch", "triton", "seqblocks", *peers):
        try:
            out.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name == "seqblocks":
                out.append(f"seqblocks {seqblocks.__version__}")
    return out


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text.rstrip() + "\n", encoding="utf-8")
    os.replace(temporary, path)
