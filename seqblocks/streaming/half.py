"""How a plan computes one token of a model in bfloat16 or float16.

Everything but products with large matrices is computed in float32, on values that are converted once: between the steps
nothing is rounded, and only the large matrices are read in 16 bits. What the state keeps in 16 bits is rounded for each
token, and so is the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.graph import BlockNode, Graph, Node, OpNode, RepeatNode, ResidualNode, ScanNode, walk
from seqblocks.kernels.half import HALF_KINDS, MIN_ELEMENTS, HalfMatrix, is_half
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.runtime.call import Call
from seqblocks.runtime.primitive import is_primitive, parameters_of


def half_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the 16-bit dtype of a model, some of whose parameters may be in float32, or None."""
    kinds = {x.dtype for x in parameters} - {torch.float32}
    return kinds.pop() if len(kinds) == 1 and kinds <= {*HALF_KINDS} else None


def can_plan(body: Graph) -> bool:
    """Return whether a 16-bit model can be planned: its outputs have its dtype, no state is as long as a context."""
    keeps = any(state.length for node in walk(body) for state in node.state.values())
    return not keeps and all(_is_rounded(body, value) for value in body.results)


def _is_rounded(body: Graph, value: int) -> bool:
    """Return whether a value has the dtype of a 16-bit model, not float32."""
    node = next((node for node in body.nodes if value in (*node.outputs, *node.exports)), None)
    if node is None:  # an input of the body
        return True
    if isinstance(node, OpNode):
        if node.op.exact:
            return False
        converts = not node.op.mixed and any(not each.full_precision for each in node.parameters.values())
        return converts or all(_is_rounded(body, read) for read in node.reads)
    if value not in node.outputs or not isinstance(node, BlockNode | ScanNode | ResidualNode | RepeatNode):
        return False
    inside = all(_is_rounded(each, each.result) for each in node.bodies.values())
    return inside and all(_is_rounded(body, read) for read in node.reads)


def token_parameters(step: nn.Module, call: Call, copies: bool) -> dict[str, Any]:
    """Return the parameters of a primitive by name, as its functions of tokens take them.

    Of 16 bits, large matrices stay as they are and all others are converted. copies: whether their products may be
    computed on copies.
    """
    matrices: tuple[str, ...] = step.op.matrix_names if is_primitive(step) else ()
    return {name: _widened(x, name in matrices, copies) for name, x in parameters_of(step, call).items()}


def _widened(x: Any, is_matrix: bool, copies: bool) -> Any:
    if isinstance(x, Int8Matrix):
        return x.widened()
    if not isinstance(x, Tensor) or not is_half(x):
        return x
    return HalfMatrix(x, copies) if is_matrix and x.numel() >= MIN_ELEMENTS else x.float()


def keeps_cache(node: Node) -> bool:
    """Return whether a step's state has a place for every token: it is not converted for each."""
    return any(state.per_token for state in node.state.values())


def to_half(x: Any, dtype: torch.dtype) -> Any:
    """Return a value between steps as the modules of a model in this dtype take it."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
