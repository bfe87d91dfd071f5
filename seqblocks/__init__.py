"""seqblocks: a YAML spec says what a sequence model is; seqblocks proves it adds up, then builds it.

Importing this does not import torch, `build` does; and `seqblocks.kernels` needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from seqblocks._version import __version__
from seqblocks.errors import (
    BackendError,
    Diagnostic,
    ExpectationError,
    OverrideWarning,
    RunError,
    SeqblocksError,
    SpecError,
    UnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from seqblocks.builder import build, build_model, build_text
    from seqblocks.check import load, load_model, load_text, yaml
    from seqblocks.op import Op, primitive
    from seqblocks.report import Summary, summarise

# imported on first use: the first need torch, all need pydantic, and `check` is as fast as its imports
_LAZY = dict.fromkeys(("build", "build_model", "build_text"), "seqblocks.builder")
_LAZY |= dict.fromkeys(("load", "load_model", "load_text", "yaml"), "seqblocks.check")
_LAZY |= dict.fromkeys(("Op", "primitive"), "seqblocks.op")
_LAZY |= dict.fromkeys(("Summary", "summarise"), "seqblocks.report")

__all__ = [
    "BackendError",
    "Diagnostic",
    "ExpectationError",
    "Op",
    "OverrideWarning",
    "RunError",
    "SeqblocksError",
    "SpecError",
    "Summary",
    "UnavailableError",
    "UsageError",
    "__version__",
    "build",
    "build_model",
    "build_text",
    "load",
    "load_model",
    "load_text",
    "primitive",
    "summarise",
    "yaml",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'seqblocks' has no attribute '{name}'")
    try:
        found = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise UnavailableError("building a model needs torch: pip install torch") from None
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
