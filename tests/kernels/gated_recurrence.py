"""The description of the gated recurrence for the conformance suite."""

from __future__ import annotations

import torch

from seqblocks import kernels
from tests.kernels.conformance import Kernel, Tensors, draw


def gated_recurrence_inputs(batch: int = 2, S: int = 9, E: int = 4) -> Tensors:
    """Return inputs with decays from weak to as strong as exp(-50)."""
    x = {"x": draw(batch, S, E), "decay": -torch.exp(2 * draw(batch, S, E, seed=1) - 2)}
    return {**x, "state": draw(batch, E, seed=2)}


GATED_RECURRENCE = Kernel(
    name="gated_recurrence",
    function=kernels.gated_recurrence,
    make=gated_recurrence_inputs,
    sequences=("x", "decay"),
    states=("state",),
    narrow=("x",),
    shapes=({"S": 1}, {"S": 2}, {"S": 3}, {"S": 17}, {"S": 64}, {"S": 131}, {"batch": 1, "S": 9, "E": 4100}),
    ranges={"batch": range(4), "S": range(80), "E": range(1, 5)},
    small={"batch": 1, "S": 5, "E": 2},
    implementations=("reference", "torch", "device"),
    errors=(
        (lambda x: {"decay": x["decay"][:, :3]}, r"expects x, decay \[B, S, E\]"),
        (lambda x: {"state": x["state"][:1]}, r"expects a state \[2, 4\]"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"resets \[B, S\] = \[2, 9\]"),
    ),
)
