"""A skip with a learned weight for each feature."""

from __future__ import annotations

from typing import Any

from seqblocks.op import ANY, Op, Port, must_match, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.types import Wire


@primitive("learnable_skip")
class LearnableSkip(Op):
    """Add another wire, scaled by a learned weight per feature: x + weight * with."""

    ports = (
        Port("x", "what is added to", main=True, kinds=ANY.kinds),
        Port("with", "what is scaled and added", kinds=ANY.kinds),
    )
    source = "xLSTM (arXiv:2405.04517), mLSTM block"

    def shape(self, x: Wire, skip: Wire) -> Wire:
        must_match("with", skip, x.features, "the width of what it is added to")
        return x

    def parameters(self, x: Wire, skip: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((x.features,), Init("ones"), decay=False)}

    def macs(self, x: Wire, skip: Wire) -> int:
        return x.features

    def forward(self, p: Any, call: Any, x: Any, skip: Any) -> Any:
        return x + p["weight"] * skip
