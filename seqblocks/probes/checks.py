"""Exact checks of resets, without training: what a model computes for several episodes in a row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqblocks.graph import ModelSpec
from seqblocks.model.builder import build_model
from seqblocks.probes.batches import Task
from seqblocks.probes.model import Probed, fit_task

ROWS = 4
TOLERANCE = 1e-9  # of float64, relative to the largest output or 1; outputs add up some thousand terms


@dataclass
class Check:
    """A fact about an untrained model: whether it holds, and the largest difference of the outputs compared."""

    task: str
    check: str
    holds: bool
    difference: float

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def reset_checks(spec: ModelSpec, task: Task, seed: int = 0) -> list[Check]:
    """Compare a row with its episodes alone, with the same row without resets, and with a reset at its first token.

    All in float64 with random weights. Raises UsageError for a model that does not take the task's tokens.
    """
    task = fit_task(spec, task)
    x, _, resets = task.draw(torch.Generator().manual_seed(seed), ROWS, task.length)
    assert resets is not None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Probed(build_model(spec, seed=seed), task).double().eval()
    packed, joined = model(x, resets), model(x)
    at_first = torch.zeros_like(resets)
    at_first[:, 0] = True
    compared = {
        "a row with resets equals its episodes alone": (_alone(model, x, resets), packed, True),
        "without resets it differs": (joined, packed, False),
        "a reset at the first token changes nothing": (model(x, at_first), joined, True),
    }
    largest = max(1.0, packed.abs().max().item())
    found = []
    for what, (a, b, is_equal) in compared.items():
        difference = (a - b).abs().max().item() / largest
        found.append(Check(task.name, what, (difference <= TOLERANCE) == is_equal, difference))
    return found


def _alone(model: Probed, x: Tensor, resets: Tensor) -> Tensor:
    """Return the outputs of each episode in a call of its own, in their places."""
    rows = []
    for row, starts in zip(x, resets, strict=True):
        bounds = [*starts.nonzero().flatten().tolist(), len(row)]
        rows.append(torch.cat([model(row[None, a:b]) for a, b in pairwise(bounds)], 1))
    return torch.cat(rows)
