"""Skip connection with a learned weight per feature or per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("learnable_skip")
class LearnableSkip(Op):
    """Add another wire, scaled by a learned weight per feature (or per head, with `heads`): x + weight * with."""

    independent = "heads"
    ports = (
        Port("x", "the first summand", main=True, kinds=ANY.kinds, broadcast=True),
        Port("with", "the wire to scale and add", kinds=ANY.kinds, broadcast=True),
    )
    heads: int = argument(0, "heads with one weight each; must divide the width (0: one weight per feature)", ge=0)
    mixed = True
    source = "xLSTM (arXiv:2405.04517), mLSTM block; per head: D of Mamba-2 (arXiv:2405.21060)"

    def shape(self, x: Wire, skip: Wire) -> Wire:
        if self.heads:
            must_divide(self.heads, x.features, "heads", "the width")
        must_match("with", skip, x.features, "the width of what it is added to")
        return x

    def parameters(self, x: Wire, skip: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((self.heads or x.features,), Init("ones"), decay=False)}

    def macs(self, x: Wire, skip: Wire) -> int:
        return x.features

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from torch import addcmul

        weight = p["weight"]
        return None if self.heads else TokenFunction(lambda x, skip: addcmul(x, weight, skip))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, skip: Value) -> Value:
        weight = tape.expand(p["weight"], x.shape[-1:]) if self.heads else p["weight"]
        return tape.add(x, tape.multiply(weight, skip))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, skip: Tensor) -> Tensor:
        weight = p["weight"]
        weight = weight.repeat_interleave(x.shape[-1] // self.heads) if self.heads else weight
        return x + weight * skip
