"""A classification head."""

from __future__ import annotations

from seqblocks.op import argument, primitive
from seqblocks.ops.linear import Affine
from seqblocks.parameters import Init
from seqblocks.types import Wire


@primitive("classifier")
class Classifier(Affine):
    """Linear classification head whose weights are initialised close to zero."""

    classes: int = argument(..., "number of classes", ge=1)
    source = "Vision-LSTM (arXiv:2406.04303)"

    def weight_init(self, x: Wire) -> Init:
        return Init("trunc_normal", (2e-5,))

    def bias_init(self) -> Init:
        return Init("zeros")

    def width(self) -> int:
        return self.classes
