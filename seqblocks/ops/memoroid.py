"""The mLSTM as a memoroid.   H heads, DK/DV head widths of q, k / v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.op import argument, primitive
from seqblocks.ops.mlstm import MLSTM
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("mlstm_memoroid")
class MLSTMMemoroid(MLSTM):
    """mLSTM computed by an associative scan, which stores a state [H, DK, DV] per token.

    Ports and state are those of `mlstm`. A reset clears the state completely. For training on long sequences use
    `mlstm`. `unit_floor` is the read-out of early memorax releases: it floors the normaliser at 1
    on the stabilised state and scales both q and k, so that its result depends on the stabiliser.
    """

    input_gate: Literal["exp"] = argument("exp", "activation of the input gate")
    normalize: bool = argument(
        True, "whether to divide h by the normaliser; always true, because the input gate is exponential"
    )
    sigmoid = False
    summary_cost = 0.0
    readout: Literal["paper", "unit_floor"] = argument("paper", "read-out of the state")
    source = "Revisiting recurrent RL with memory monoids (arXiv:2402.09900); xLSTM (arXiv:2405.04517)"

    def state(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> dict[str, State]:
        return {**super().state(q, k, v, i, f), "m": State((self.heads,), fill=-1e9)}

    def calls(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> KernelCall:
        return "associative_scan", {}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.mlstm.token import prepare

        # `forward` computes a tree of products
        return prepare(self.heads, self.eps, "exp", True, self.readout, most_tokens=16)

    def transition(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> Transition | None:
        return None  # the read-outs scale the contents of the state differently

    def memory(self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value, i: Value, f: Value) -> Value:
        from seqblocks.workspace import associative_scan

        q, k, v = (tape.view(x, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)) for x in (q, k, v))
        return tape.view(associative_scan.mlstm(tape, q, k, v, i, f), tape.out)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import mlstm_memoroid

        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))
        out = mlstm_memoroid(
            q,
            k,
            v,
            i,
            f,
            state=(call.state["C"], call.state["n"], call.state["m"]) if call.state else None,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
            readout=self.readout,
            eps=self.eps,
        )
        h, after = output_and_state(out)
        return h.flatten(-2), after
