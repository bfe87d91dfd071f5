"""Random numbers of the tests, the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Return normally distributed numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
