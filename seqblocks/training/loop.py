"""The training step of the small trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

DECAY, CLIP = 0.1, 1.0  # weight decay of matrices; largest norm of the gradients


def adamw(model: Any, rate: float, others: Iterable[nn.Parameter] = ()) -> torch.optim.AdamW:
    """Return the optimiser of a built model, and of further parameters, which do not decay."""
    groups = [*model.parameter_groups(DECAY), {"params": [*others]}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, weight_decay=0.0, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, loss_of: Callable[[], Tensor]) -> float:
    """Change the parameters once, by the gradient of `loss_of()` clipped to a norm of 1. Returns the loss.

    If the loss or a gradient is not finite, no parameter changes, and the result is not finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
        return math.nan
    optimizer.step()
    return loss.item()
