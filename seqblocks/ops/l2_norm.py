"""Normalisation of heads to unit length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("l2_norm")
class L2Norm(Op):
    """Divide the features of each head by their norm: x / sqrt(sum(x^2) + eps), in at least float32."""

    independent = "heads"
    ports = (ANY,)
    heads: int = argument(1, "number of heads; must divide the width", ge=1)
    eps: float = argument(1e-6, "added to the sum of squares", gt=0)
    source = "queries and keys of DeltaNet (arXiv:2406.06484)"

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x

    def facts(self, x: Wire) -> Facts:
        low, high = (-1.0 if x.facts.low < 0 else 0.0), (1.0 if x.facts.high > 0 else 0.0)
        return Facts(low, high, unit=self.heads)

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        heads = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        exact = tape.view(tape.cast(x, max(x.item, 4)), heads)
        norm = tape.unary(tape.sum(tape.square(exact), (*heads[:-1], 1)), ["output"])
        return tape.cast(tape.view(tape.multiply(exact, norm), x.shape), x.item)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        import torch

        exact = (x if x.dtype == torch.float64 else x.float()).unflatten(-1, (self.heads, -1))
        return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + self.eps)).flatten(-2).to(x.dtype)
