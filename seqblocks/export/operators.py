"""Repairs of torch's exporter to ONNX: operators that it does not support, shapes that onnxruntime rejects."""

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


def copy_open_sizes(graph: Any) -> None:
    """Let reshapes of empty tensors, such as the state of a window of one token, copy the open size of their input.

    The exporter writes -1 for it, which cannot be inferred from 0 elements. A size 0 copies that of the input.
    """
    ir: Any = importlib.import_module("onnx_ir")
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.op_type != "Reshape" or node.inputs[1].const_value is None:
            continue
        sizes = node.inputs[1].const_value.numpy().tolist()
        before, after = ([str(size) for size in value.shape or ()] for value in (node.inputs[0], node.outputs[0]))
        copied = [at for at, size in enumerate(sizes) if size in (0, -1)]
        if {0, -1} <= {*sizes} and all(before[at : at + 1] == after[at : at + 1] for at in copied):
            name, new = f"{node.name}_sizes", [0 if size == -1 else size for size in sizes]
            shape = ir.Value(name=name, const_value=ir.tensor(new, name=name))
            graph.register_initializer(shape)
            node.replace_input_with(1, shape)
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
