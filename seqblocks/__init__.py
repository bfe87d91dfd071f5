"""Describe a sequence model in YAML; seqblocks checks it, then builds it as a PyTorch module.

Importing seqblocks does not import torch; `build` does. `seqblocks.kernels` only needs torch and einops.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from seqblocks._version import __version__
from seqblocks.errors import (
    BackendError,
    Diagnostic,
    ExpectationError,
    OverrideWarning,
    PartialWarning,
    RunError,
    SeqblocksError,
    SpecError,
    SpecWarning,
    UnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from seqblocks import checkpoint as checkpoint
    from seqblocks import distributed as distributed
    from seqblocks import export as export
    from seqblocks import kernels as kernels
    from seqblocks import state as state
    from seqblocks import testing as testing
    from seqblocks.analysis.analyse import Analysis, analyse
    from seqblocks.analysis.check import load_model, load_spec, load_text, yaml
    from seqblocks.architect.compare import compare
    from seqblocks.architect.diff import diff
    from seqblocks.architect.fit import fit
    from seqblocks.architect.memory import memory
    from seqblocks.architect.sweep import sweep
    from seqblocks.checkpoint import from_pretrained, load, save
    from seqblocks.descriptions.summary import Summary, summarise
    from seqblocks.model.builder import build, build_model, build_text
    from seqblocks.model.layer import block, block_text
    from seqblocks.model.quantize import quantize
    from seqblocks.op import Op, primitive
    from seqblocks.picture.drawing import Drawing, draw
    from seqblocks.streaming.generate import generate

# Imported on first use, because some need torch, all need pydantic, and imports take most of the time of `check`.
_LAZY = dict.fromkeys(("build", "build_model", "build_text"), "seqblocks.model.builder")
_LAZY |= {"generate": "seqblocks.streaming.generate"}
_LAZY |= {"quantize": "seqblocks.model.quantize"}
_LAZY |= dict.fromkeys(("block", "block_text"), "seqblocks.model.layer")
_LAZY |= dict.fromkeys(("Analysis", "analyse"), "seqblocks.analysis.analyse")
_LAZY |= dict.fromkeys(("load_model", "load_spec", "load_text", "yaml"), "seqblocks.analysis.check")
_LAZY |= {name: f"seqblocks.architect.{name}" for name in ("compare", "diff", "fit", "memory", "sweep")}
_LAZY |= dict.fromkeys(("from_pretrained", "load", "save"), "seqblocks.checkpoint")
_LAZY |= dict.fromkeys(("Drawing", "draw"), "seqblocks.picture.drawing")
_LAZY |= dict.fromkeys(("Op", "primitive"), "seqblocks.op")
_LAZY |= dict.fromkeys(("Summary", "summarise"), "seqblocks.descriptions.summary")
# modules, `seqblocks.testing.check_law`
_LAZY |= dict.fromkeys(("checkpoint", "distributed", "export", "kernels", "state", "testing"), "")

# A checkout without symbolic links, as is usual on Windows, has files in their place: find the folders at its root.
if os.path.isfile(os.path.join(os.path.dirname(__file__), "kernels")):
    __path__.append(os.path.dirname(os.path.dirname(__file__)))

__all__ = [
    "Analysis",
    "BackendError",
    "Diagnostic",
    "Drawing",
    "ExpectationError",
    "Op",
    "OverrideWarning",
    "PartialWarning",
    "RunError",
    "SeqblocksError",
    "SpecError",
    "SpecWarning",
    "Summary",
    "UnavailableError",
    "UsageError",
    "__version__",
    "analyse",
    "block",
    "block_text",
    "build",
    "build_model",
    "build_text",
    "compare",
    "diff",
    "draw",
    "fit",
    "from_pretrained",
    "generate",
    "load",
    "load_model",
    "load_spec",
    "load_text",
    "memory",
    "primitive",
    "quantize",
    "save",
    "summarise",
    "sweep",
    "yaml",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'seqblocks' has no attribute '{name}'")
    try:
        module = importlib.import_module(_LAZY[name] or f"seqblocks.{name}")
        found = getattr(module, name) if _LAZY[name] else module
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise UnavailableError("building a model needs torch: pip install torch") from None
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
