"""seqblocks: a YAML spec says what a sequence model is; seqblocks proves it adds up, then builds it.

Importing this does not import torch; `build` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqblocks._version import __version__
from seqblocks.check import load, load_model, load_text
from seqblocks.errors import (
    BackendError,
    Diagnostic,
    ExpectationError,
    RunError,
    SeqblocksError,
    SpecError,
    UnavailableError,
    UsageError,
)
from seqblocks.op import Op, primitive
from seqblocks.report import Summary, summarise

if TYPE_CHECKING:
    from seqblocks.builder import build, build_model, build_text

_LAZY = ("build", "build_model", "build_text")

__all__ = [
    "BackendError",
    "Diagnostic",
    "ExpectationError",
    "Op",
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
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            from seqblocks import builder
        except ModuleNotFoundError as error:
            if error.name == "torch":
                raise UnavailableError("building a model needs torch: pip install torch") from None
            raise

        globals().update({n: getattr(builder, n) for n in _LAZY})
        return globals()[name]
    raise AttributeError(f"module 'seqblocks' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
