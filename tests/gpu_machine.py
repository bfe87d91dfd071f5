"""An environment like that of a machine with a GPU: few packages, and no pydantic."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

PACKAGES = ("torch", "triton", "pytest", "pytest-xdist", "hypothesis", "einops", "pyyaml", "rich", "numpy")
OWN = "seqblocks"

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def as_on_a_gpu_machine(root: Path, folder: Path) -> dict[str, str]:
    """Return environment variables with which a Python finds only PACKAGES, what they need, and this checkout.

    The other installed packages are hidden by a file that is written to the folder.
    """
    text = HIDE.format(hidden=hidden_modules())
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    path = f"{folder}{os.pathsep}{root}"
    return {**plain_environment(), "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1"}


def plain_environment() -> dict[str, str]:
    """Return the variables of this process without those by which its pytest would change another."""
    return {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}


def hidden_modules() -> set[str]:
    """Return the top-level modules of all other installed packages."""
    kept = _with_requirements(PACKAGES) | {OWN}
    modules = importlib.metadata.packages_distributions()
    return {name for name, owners in modules.items() if not kept & {_normal(owner) for owner in owners}}


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        waiting += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required if "extra ==" not in each]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
