"""Rotary positions as a step of its own."""

from __future__ import annotations

from typing import Any

from seqblocks.errors import Fault
from seqblocks.op import Op, argument, must_divide, primitive
from seqblocks.parameters import State
from seqblocks.types import Wire


@primitive("rotary")
class Rotary(Op):
    """Turn pairs of each head's features by an angle that grows with the position in the sequence.

    Of a head of D features, features j and j + D / 2 turn by position / base^(2 j / D). Positions count from the last
    reset. State: the position of the next token, int64. `attention` has `rotary:` for its own q and k.
    """

    reads = "past"  # the number of tokens before a token
    heads: int = argument(..., "number of heads; must divide the width into an even number of features", ge=1)
    base: float = argument(10000.0, "base of the wavelengths", ge=1)
    source = "RoFormer (arXiv:2104.09864)"

    def shape(self, x: Wire) -> Wire:
        width = must_divide(self.heads, x.features, "heads", "the width")
        if width % 2:
            raise Fault("E401", f"rotary positions turn pairs of features, and a head has {width}", at="heads")
        return x

    def state(self, x: Wire) -> dict[str, State]:
        return {"position": State((), "int64")}

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from seqblocks.kernels.positions import rotary, running_positions

        before = call.state["position"] if call.state else None
        index, after = running_positions(x.shape[0], x.shape[1], before, call.resets, x.device)
        index = index[:1] if before is None and call.resets is None else index  # one row of angles serves the batch
        turned = rotary(x.unflatten(-1, (self.heads, -1)), index, self.base)
        return turned.flatten(-2), {"position": after}
