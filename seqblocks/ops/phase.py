"""Rotations by data-dependent angles.   D angles, H heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, X, argument, primitive
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("phase")
class Phase(Op):
    """Cumulative sums of angles modulo 2 pi, computed in float64. State per sequence: the sums so far [D], float32."""

    independent = "features"
    ports = (X._replace(about="the angle added by each token"),)
    reads = "past"
    reversible = True
    source = "Mamba-3 (ICLR 2026)"
    exact = True

    def facts(self, x: Wire) -> Facts:
        return Facts(0.0, 2 * math.pi)

    def state(self, x: Wire) -> dict[str, State]:
        return {"sum": State((x.features,), period=2 * math.pi)}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        def step(before: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            angle = before.double() + x.double()
            turns = (angle - 2 * math.pi * (angle / (2 * math.pi)).floor()).to(x.dtype)
            return turns, turns.clone()

        return TokenFunction(step)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace import gated_recurrence

        exact = tape.cast(x, 8)
        zeros = tape.new(x.shape, 8)
        angle = gated_recurrence.scan(tape, exact, zeros)
        turns = tape.new(x.shape, 8)  # 2 pi times the number of whole turns
        tape.passing(turns.bytes)
        return tape.cast(tape.subtract(angle, turns), max(x.item, 4))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels import gated_recurrence

        dtype = torch.promote_types(x.dtype, torch.float32)
        if call.state and not x.shape[1]:  # a phase that was rounded to 2 pi would become 0
            return x.to(dtype), {"sum": call.state["sum"]} if call.return_state else {}
        exact = x.double()
        out: Any = gated_recurrence(
            exact, torch.zeros_like(exact), state=call.state["sum"] if call.state else None,
            return_state=True, resets=call.resets, reverse=call.reverse,
        )  # fmt: skip
        turns, last = (angle - 2 * math.pi * (angle / (2 * math.pi)).floor().detach() for angle in out)
        return turns.to(dtype), {"sum": last.to(dtype)} if call.return_state else {}


@primitive("rotate")
class Rotate(Op):
    """Rotate pairs of features 2j and 2j + 1 of each head by angles; features without an angle stay unchanged."""

    independent = "heads"
    ports = (X, Port("by", "the angles, the same number for each head"))
    heads: int = argument(..., "number of heads; must divide the width and the number of angles", ge=1)
    source = "Mamba-3 (ICLR 2026)"

    def shape(self, x: Wire, by: Wire) -> Wire:
        width = must_divide(self.heads, x.features, "heads", "the width")
        angles = must_divide(self.heads, by.features, "heads", "the number of angles", at="by")
        if 2 * angles > width:
            expected = f"at most {width // 2 * self.heads}, one for each pair of {width} features"
            raise Fault(
                "E402",
                "there are more angles than pairs of features",
                at="by",
                expected=expected,
                found=str(by.features),
            )
        return x

    def facts(self, x: Wire, by: Wire) -> Facts:
        return Facts(unit=x.facts.unit if x.facts.unit == self.heads else 0)  # a rotation preserves lengths

    def macs(self, x: Wire, by: Wire) -> int:
        return 4 * by.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, by: Value) -> Value:
        heads = (*x.shape[:-1], self.heads)
        width, angles = x.shape[-1] // self.heads, by.shape[-1] // self.heads
        x, by = tape.view(x, (*heads, width)), tape.view(by, (*heads, angles))
        turned = tape.slice(x, (*heads, 2 * angles))
        rest = tape.slice(x, (*heads, width - 2 * angles))
        a, b = tape.split(tape.view(turned, (*heads, angles, 2)), [1, 1])
        a, b = tape.view(a, by.shape, dense=False), tape.view(b, by.shape, dense=False)
        first = tape.subtract(tape.multiply(a, tape.wave(by)), tape.multiply(b, tape.wave(by)))
        second = tape.add(tape.multiply(a, tape.wave(by)), tape.multiply(b, tape.wave(by)))
        pairs = tape.cast(tape.stack([first, second]), x.item)
        y = tape.cat([tape.view(pairs, (*heads, 2 * angles)), rest])
        return tape.view(y, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, by: Tensor) -> Tensor:
        import torch

        x, by = x.unflatten(-1, (self.heads, -1)), by.unflatten(-1, (self.heads, -1))
        turned, rest = x[..., : 2 * by.shape[-1]].unflatten(-1, (-1, 2)), x[..., 2 * by.shape[-1] :]
        a, b = turned.unbind(-1)
        pairs = torch.stack([a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()], -1).to(x.dtype)
        return torch.cat([pairs.flatten(-2), rest], -1).flatten(-2)
