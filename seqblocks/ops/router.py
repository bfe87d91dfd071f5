"""The router of `experts`: a score for each expert, per token.   I features in, C experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


class Router(Op):
    """Linear map to a score per expert, in at least float32. Created by `experts`; not a verb itself."""

    verb = "router"
    builtin = True
    ports = (ANY,)
    count: int = argument(..., "number of experts, C", ge=1)
    bias: bool = argument(False, "whether to add a bias per expert")
    corrected: bool = argument(False, "whether to add a correction per expert when choosing experts")

    def shape(self, x: Wire) -> Wire:
        return x.with_features(self.count)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out = {"weight": Parameter((self.count, x.features), Init("fan_in_uniform"))}
        if self.bias:
            out["bias"] = Parameter((self.count,), Init("zeros"), decay=False)
        if self.corrected:
            out["correction"] = Parameter((self.count,), Init("zeros"), decay=False, full_precision=True)
        return out

    def macs(self, x: Wire) -> int:
        return x.features * self.count

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        item = max(x.item, 4)
        bias = tape.cast(p["bias"], item) if self.bias else None
        return tape.product(tape.cast(x, item), tape.cast(p["weight"], item), bias)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        import torch
        from torch.nn.functional import linear

        from seqblocks.kernels.numerics import without_autocast

        precise = torch.promote_types(x.dtype, torch.float32)
        bias = p["bias"].to(precise) if self.bias else None
        with without_autocast(x.device.type):
            return linear(x.to(precise), p["weight"].to(precise), bias)
