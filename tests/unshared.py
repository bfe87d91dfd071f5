"""Copies of models without shared parameters, to compare with models that share them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import seqblocks
from seqblocks import graph
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import random_context, random_input


def unshared(model: SequenceModel) -> tuple[SequenceModel, dict[str, str]]:
    """Return a copy with the same weights in which no step shares a parameter, and the names of the original
    parameters."""
    spec = copy.deepcopy(model.spec)
    nodes = list(graph.walk(spec.graph))
    for node in nodes:
        if isinstance(node, graph.ScanNode):
            inside = list(graph.parameters(node.bodies[""], shared=True))
            node.owned = frozenset(graph.directed(node, inside))
    for node in nodes:
        node.shared, node.owner = {}, None
    alone = seqblocks.build_model(spec, dtype=torch.float64).train(model.training)
    owners = {item.name: item.name for item in graph.parameters(model.graph)}
    owners |= {item.name: str(item.tied) for item in graph.parameters(model.graph, shared=True) if item.shared}
    weights = model.state_dict()
    alone.load_state_dict({name: weights[owners.get(name, name)] for name in alone.state_dict()})
    return alone, owners


def check_unshared(model: SequenceModel, seq: int, seed: int = 0) -> None:
    """Assert that sharing changes no value, and that the gradients of all uses add up."""
    alone, owners = unshared(model)
    x, context = random_input(model, 2, seq, seed), random_context(model, 2, seed, seq)
    found, expected = tree_leaves(model(x, **context)), tree_leaves(alone(x, **context))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for outputs in (found, expected):
        if loss := [y.mul(torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs if y.requires_grad]:
            torch.autograd.backward(loss)
    for name, total in _gradients(alone, owners).items():
        grad = model.get_parameter(name).grad
        grad = torch.zeros_like(total) if grad is None else grad
        size = max(1.0, total.abs().max().item())
        torch.testing.assert_close(grad, total, rtol=1e-9, atol=1e-9 * size, equal_nan=True)
    model.zero_grad()


def _gradients(alone: SequenceModel, owners: dict[str, str]) -> dict[str, Tensor]:
    """Return the sum of the gradients of all uses, by the name of the owner."""
    total: dict[str, Tensor] = {}
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            total[owners[name]] = total.get(owners[name], torch.zeros_like(parameter)) + parameter.grad
    return total
