"""Compare the weights of two saved models tensor by tensor."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from seqblocks.architect.diff import TensorChange
from seqblocks.checkpoint.folder import load
from seqblocks.model.quantize import quantized
from seqblocks.model.sequence_model import SequenceModel


def differences(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[TensorChange]:
    """Return the tensors of two folders written by `save` that have the same name and shape and differ in any bit.

    Loads both models. Matrices in 8 bits are compared as the weights that they stand for. Raises what `load` raises.
    """
    old, new = (_tensors(load(folder)) for folder in (a, b))
    both = [name for name, x in old.items() if name in new and new[name].shape == x.shape]
    return [_change(name, old[name], new[name]) for name in both if not _same_bits(old[name], new[name])]


def _tensors(model: SequenceModel) -> dict[str, Tensor]:
    matrices = quantized(model)
    others = {name: x for name, x in model.state_dict().items() if name.rpartition(".")[0] not in matrices}
    return {**others, **{name: matrix.dequantized() for name, matrix in matrices.items()}}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _change(name: str, a: Tensor, b: Tensor) -> TensorChange:
    a, b = a.double().flatten(), b.double().flatten()
    size = float(a.norm())
    product = size * float(b.norm())
    relative = float((b - a).norm()) / size if size else float("inf")
    return TensorChange(name, relative, float(a @ b) / product if product else 0.0)
