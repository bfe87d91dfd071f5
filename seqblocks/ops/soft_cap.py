"""Smooth clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("soft_cap")
class SoftCap(Op):
    """Limit values smoothly to (-cap, cap): cap * tanh(x / cap)."""

    independent = "features"
    ports = (ANY,)
    cap: float = argument(..., "the bound", ge=1e-6)

    def facts(self, x: Wire) -> Facts:
        low, high = (self.cap * math.tanh(end / self.cap) for end in (x.facts.low, x.facts.high))
        return Facts(low, high)

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.unary(tape.unary(tape.unary(x, ()), ["output"]), ())

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return self.cap * (x / self.cap).tanh()
