"""A model whose steps share no parameters, to hold one whose steps do against."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import seqblocks
from seqblocks import graph
from seqblocks.runtime.model import SequenceModel
from seqblocks.testing import random_input


def unshared(model: SequenceModel) -> tuple[SequenceModel, dict[str, str]]:
    """Return a model with the same weights in which each step has its own, and whose each of its parameters is."""
    spec = copy.deepcopy(model.spec)
    for node in graph.walk(spec.graph):
        node.shared, node.owner = {}, None
    alone = seqblocks.build_model(spec, dtype=torch.float64).train(model.training)
    owners = {item.name: item.name for item in graph.parameters(model.graph)}
    owners |= {item.name: str(item.tied) for item in graph.parameters(model.graph, shared=True) if item.shared}
    weights = model.state_dict()
    alone.load_state_dict({name: weights[owners[name]] for name in alone.state_dict()})
    return alone, owners


def check_unshared(model: SequenceModel, seq: int, seed: int = 0) -> None:
    """Assert that sharing changes no value, and that the gradients of all uses add up."""
    alone, owners = unshared(model)
    x = random_input(model, 2, seq, seed)
    outputs = [model(x), alone(x)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for made, y in zip((model, alone), outputs, strict=True):
        made.zero_grad()
        (y * weight).sum().backward()
    total: dict[str, Tensor] = {}
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            owner = model.get_parameter(owners[name])
            place = next(key for key, each in model.named_parameters() if each is owner)
            total[place] = total.get(place, torch.zeros_like(parameter)) + parameter.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert not total.get(name, torch.zeros(())).any()
            continue
        size = total[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, total[name], rtol=1e-9, atol=1e-9 * max(1.0, size))
