"""The sLSTM cell: scalar memories with exponential gates, recurrent within each head.   H heads, D head width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall
    from seqblocks.runtime.call import Call


@primitive("slstm")
class SLSTM(Op):
    """sLSTM: a scalar memory per feature, whose gates also depend on the previous output of their head.

    i, f, z, o are the gate pre-activations without recurrence and bias, each [batch, seq, H * D]. Parameters: the
    recurrent matrices [H, D, 4, D] (initially zero) and a bias per gate [H, D]; that of the forget gate is initialised
    from 5 to -7 over each head (powerlaw). State per sequence: y, c, n and the stabiliser m, each [H, D], float32.
    """

    independent = "heads"
    ports = (
        Port("i", "input gate", gate=True),
        Port("f", "forget gate", gate=True),
        Port("z", "cell input"),
        Port("o", "output gate"),
    )
    reads = "past"
    reversible = True
    heads: int = argument(..., "number of heads; must divide the width", ge=1)
    source = "xLSTM (arXiv:2405.04517), eq. 8-18"

    def shape(self, i: Wire, f: Wire, z: Wire, o: Wire) -> Wire:
        must_divide(self.heads, i.features, "heads", "the width")
        for name, wire in (("f", f), ("z", z), ("o", o)):
            must_match(name, wire, i.features, "the width of i")
        return i

    def parameters(self, i: Wire, f: Wire, z: Wire, o: Wire) -> dict[str, Parameter]:
        heads, width = self.heads, i.features // self.heads
        zeros, ramp = Init("zeros"), Init("powerlaw", (0.0,))
        out = {"recurrent": Parameter((heads, width, 4, width), zeros, decay=False, fan_in=width)}
        for gate in "ifzo":
            out[f"{gate}_bias"] = Parameter((heads, width), ramp if gate == "f" else zeros, decay=False)
        return out

    def state(self, i: Wire, f: Wire, z: Wire, o: Wire) -> dict[str, State]:
        return {name: State((self.heads, i.features // self.heads)) for name in "ycnm"}

    def macs(self, i: Wire, f: Wire, z: Wire, o: Wire) -> int:
        return 4 * i.features * (i.features // self.heads) + 4 * i.features

    def calls(self, i: Wire, f: Wire, z: Wire, o: Wire) -> KernelCall:
        return "slstm", {"heads": self.heads, "head_dim": i.features // self.heads}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.slstm.token import prepare

        return prepare(p["recurrent"], [p[f"{gate}_bias"] for gate in "ifzo"])

    def memory(self, tape: Tape, p: Mapping[str, Value], i: Value, f: Value, z: Value, o: Value) -> Value:
        from seqblocks.workspace import slstm

        bias = tape.stack([p[f"{gate}_bias"] for gate in "ifzo"])
        return tape.cast(slstm.scan(tape, [i, f, z, o], p["recurrent"], bias), i.item)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, i: Tensor, f: Tensor, z: Tensor, o: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels import SLSTMState, slstm

        bias = torch.stack([p[f"{gate}_bias"] for gate in "ifzo"])
        state = SLSTMState(**call.state) if call.state else None
        out = slstm(
            i,
            f,
            z,
            o,
            p["recurrent"],
            bias,
            state=state,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
        )
        return output_and_state(out)
