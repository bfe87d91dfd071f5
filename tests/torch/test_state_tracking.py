"""Eigenvalues of the state's transition limit state tracking: parity needs negative ones (arXiv:2411.12537)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqblocks

SPEC = """
seqblocks: 1
use: [deltanet, prenorm]
model:
  input: {tokens: 2}
  steps:
    - embed: {features: 16, init: {weight: normal}}
    - prenorm: {mixer: [{deltanet_mixer: {dim: 16, heads: 2, kernel: 1, negative: NEGATIVE, std: 0.3}}]}
    - swiglu: {hidden: 32}
    - unembed
"""
LENGTH = 16


def bits(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random bits, and for each token whether the number of ones so far is odd."""
    x = torch.randint(0, 2, (batch, length), generator=generator)
    return x, x.cumsum(1) % 2


def accuracy_of_longer_ones(negative: bool) -> float:
    """Train on sequences of LENGTH; return the share of right answers in the second half of sequences four times as
    long."""
    model = seqblocks.build_text(SPEC.replace("NEGATIVE", str(negative).lower()), seed=0)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        x, y = bits(64, LENGTH, generator)
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, y = bits(64, 4 * LENGTH, generator)
    with torch.no_grad():
        right = model(x).argmax(-1) == y
    return right[:, -2 * LENGTH :].float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("negative", "solved"), [(True, True), (False, False)])
def test_deltanet_counts_parity_with_negative_eigenvalues_alone(negative: bool, solved: bool) -> None:
    accuracy = accuracy_of_longer_ones(negative)
    assert accuracy > 0.98 if solved else accuracy < 0.7
