"""Features of heads, repeated and joined head by head."""

from __future__ import annotations

from typing import Any

from seqblocks.op import Op, Port, X, argument, must_divide, primitive
from seqblocks.types import Facts, Wire


@primitive("repeat_heads")
class RepeatHeads(Op):
    """Each head's features several times, next to each other: heads a b become a a b b."""

    independent = "heads"
    heads: int = argument(1, "number of heads; must divide the width", ge=1)
    times: int = argument(..., "how often each head occurs", ge=1)

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x.with_features(self.times * x.features)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        return x.unflatten(-1, (self.heads, -1)).repeat_interleave(self.times, -2).flatten(-2)


@primitive("join_heads")
class JoinHeads(Op):
    """Each head's features, then those of the same head of another wire: heads a b and c d become a c b d."""

    independent = "heads"
    ports = (X, Port("with", "what follows in each head", main=False))
    heads: int = argument(..., "number of heads; must divide both widths", ge=1)

    def shape(self, x: Wire, other: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        must_divide(self.heads, other.features, "heads", "the width of `with`", at="with")
        return x.with_features(x.features + other.features)

    def facts(self, x: Wire, other: Wire) -> Facts:
        return Facts(min(x.facts.low, other.facts.low), max(x.facts.high, other.facts.high))

    def forward(self, p: Any, call: Any, x: Any, other: Any) -> Any:
        import torch

        parts = [each.unflatten(-1, (self.heads, -1)) for each in (x, other)]
        return torch.cat(parts, -1).flatten(-2)
