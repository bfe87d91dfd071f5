"""Compare an exported graph with the model over consecutive calls that carry the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqblocks.errors import RunError
from seqblocks.export.contract import Contract
from seqblocks.export.program import Graph, evaluating, example, explained_memory
from seqblocks.model.sequence_model import SequenceModel

# Relative to the largest value, or to 1: half the digits of the dtype, but fewer for float64, because torch writes
# constants such as a scale as float32 in ONNX.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
SIZES = ((2, 5), (1, 13))  # open sizes (sequences, frames of tokens), different from the traced ones
Run = Callable[[list[Tensor]], list[Tensor]]  # from all inputs to all outputs, in the order of the contract


@explained_memory()
def agree(model: SequenceModel, contract: Contract, run: Run, what: str) -> float:
    """Return the largest relative difference between the exported graph and the model over two calls (`_relative`).

    what: the subject of the error message. Raises RunError if the difference exceeds the tolerance of the dtype,
    UnavailableError if a call does not fit in memory.
    """
    names = contract.output_names
    tolerance = max(TOLERANCES.get(kind, 0.0) for kind in contract.dtypes)
    worst = 0.0
    for sizes in SIZES:
        for name, found, expected in _calls(model, contract, run, sizes, names):
            off = _relative(found, expected)
            if not off <= tolerance:
                raise RunError(
                    f"{what} and the model differ: {name} by {off:.2g} of its largest value, {tolerance:g} is allowed "
                    f"(a call of {sizes[0]} sequences and {sizes[1]} frames, where sizes are open). Nothing was written"
                )
            worst = max(worst, off)
    return worst


def _calls(model: SequenceModel, contract: Contract, run: Run, sizes: tuple[int, int], names: list[str]) -> Any:
    """Yield (name, found, expected) for the outputs of two calls, the second of which continues from the first."""
    arguments = example(model, contract, *sizes, seed=1)
    others, whole = arguments, Graph(model, contract.graph)
    for turn in (1, 2):
        with evaluating(model, backend="auto"):
            expected = whole(*arguments)
        found = run(pytree.tree_leaves(others))
        leaves, spec = pytree.tree_flatten(expected)
        yield from zip(names, found, leaves, strict=True)
        if contract.graph not in ("step", "chunk"):
            return
        x, _ = example(model, contract, *sizes, seed=turn + 1)
        arguments, others = (x, expected[1]), (x, pytree.tree_unflatten(found, spec)[1])


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value, or to 1 if all values are smaller."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.abs().max()))
    return float((found.to(torch.float64) - expected.to(torch.float64)).abs().max()) / scale
