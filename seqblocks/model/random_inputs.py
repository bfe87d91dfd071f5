"""Random inputs of a model: for measurements, for programs traced from examples, and for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.types import Wire, common_rate

Context = dict[str, Any]  # tensors: inputs that do not stream, by name


def random_input(model: SequenceModel, batch: int, seq: int, seed: int = 0) -> Tensor:
    """Return a random input of a model: token ids, or features from N(0, 1) that require gradients.

    Images have the size in the spec; `seq` does not apply to them.
    """
    return _random(model, model.spec.input, batch, seq, torch.Generator("cpu").manual_seed(seed))


def random_context(model: SequenceModel, batch: int, seed: int = 0, seq: int | None = None) -> Context:
    """Return random inputs that do not stream, by name, as `random_input` does. Open lengths become a few tokens.

    seq: the length of the input that streams, for those that share it.
    """
    generator = torch.Generator("cpu").manual_seed(seed + 1000)
    others = [*model.spec.inputs.items()][1:]
    return {name: _random(model, wire, batch, _context_length(model, wire, seq), generator) for name, wire in others}


def _context_length(model: SequenceModel, wire: Wire, seq: int | None) -> int:
    if isinstance(wire.length, int):
        return wire.length
    return seq if seq and wire.length == model.spec.input.length else open_context_length(model)


def open_context_length(model: SequenceModel) -> int:
    """Return a length accepted by all steps that change the rate of a context."""
    rates = (node.type.rate for node in graph.walk(model.graph) if graph.is_context(node) and node.type)
    return 3 * common_rate(1, *rates).numerator


def _random(model: SequenceModel, wire: Wire, batch: int, seq: int, generator: torch.Generator) -> Tensor:
    device = model.some_tensor().device
    if wire.kind == "tokens":
        return torch.randint(wire.features, (batch, seq), generator=generator, device="cpu").to(device)
    sizes = {"image": (wire.features, *(wire.grid or ())), "vector": (wire.features,)}
    shape = (batch, *sizes.get(wire.kind, (seq, wire.features)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(device, dtype_of(model)).requires_grad_()


def dtype_of(model: SequenceModel) -> torch.dtype:
    """Return the dtype that a model computes in."""
    return model.own_dtype()
