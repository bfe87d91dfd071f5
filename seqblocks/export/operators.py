"""Translations to ONNX of torch operators that torch's exporter does not support."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def translations() -> dict[Any, Any]:
    """Return functions that translate operators to ONNX, for `custom_translation_table`."""
    return {torch.ops.aten.sort.stable: _sort}


def _sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Sort with TopK over all elements, which is stable."""
    op: Any = importlib.import_module("onnxscript").opset18
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]), axis=0)
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)
