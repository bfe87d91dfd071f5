"""Projections to the inner width of a block, and back."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from seqblocks.op import argument, primitive
from seqblocks.ops.linear import Linear
from seqblocks.parameters import Init
from seqblocks.types import Wire


@primitive("proj_up")
class ProjUp(Linear):
    """Projection to the inner width of a block. Weight small(I), bias 0.

    Its output is usually split: `as: [u, z]` gives two equal halves.
    """

    bias: bool = argument(False, "whether to add a bias")
    source = "xLSTM (arXiv:2405.04517), pre-up-projection block"

    def weight_init(self, x: Wire) -> Init:
        return Init("small", (float(x.features),))

    def bias_init(self) -> Init:
        return Init("zeros")


@primitive("proj_down")
class ProjDown(Linear):
    """Projection back to the model's width. Weight wang(O, blocks), bias 0."""

    bias: bool = argument(False, "whether to add a bias")
    blocks: int = argument(
        1,
        "number of residual branches of the model; initial weights are proportional to its inverse",
        ge=1,
        inherit="depth",
    )
    source = "xLSTM (arXiv:2405.04517), pre-up-projection block"

    def weight_init(self, x: Wire) -> Init:
        return Init("wang", (float(self.features), float(self.blocks)))

    def bias_init(self) -> Init:
        return Init("zeros")
