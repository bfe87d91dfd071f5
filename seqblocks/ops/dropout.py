"""Dropout of features."""

from __future__ import annotations

from typing import Any

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.types import Facts, Wire


@primitive("dropout")
class Dropout(Op):
    """Zero features at random while training, and rescale the others by 1 / (1 - p)."""

    ports = (ANY,)
    p: float = argument(0.1, "probability of zeroing a feature", ge=0, lt=1)

    def facts(self, x: Wire) -> Facts:
        scale = 1 / (1 - self.p)
        return x.facts.times(Facts(scale, scale)).or_zero()

    def prepare_step(self, p: Any) -> Any:
        return lambda x: x  # a stepper is for evaluation

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import dropout

        return dropout(x, self.p, call.training)
