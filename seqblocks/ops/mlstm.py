"""The mLSTM cell: a matrix memory with an exponential input gate.   H heads, DK/DV head widths of q, k / v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("mlstm")
class MLSTM(Op):
    """mLSTM: a matrix memory C, the gated sum of v k^T, read by q and normalised; input and forget gates per head.

    q, k are [batch, seq, H * DK], v is [batch, seq, H * DV], i and f are the gate pre-activations [batch, seq, H];
    1/sqrt(DK) is applied inside. State per sequence: C [H, DK, DV], n [H, DK] and the stabiliser m [H], float32.
    """

    independent = "heads"
    ports = (
        Port("q", "queries"),
        Port("k", "keys"),
        Port("v", "values"),
        Port("i", "input gate, one number per head", gate=True),
        Port("f", "forget gate, one number per head", gate=True),
    )
    reads = "past"
    reversible = True
    summary_cost = 0.15
    heads: int = argument(..., "number of heads; must divide the widths of q and v", ge=1)
    input_gate: Literal["exp", "sigmoid"] = argument("exp", "activation of the input gate")
    normalize: bool = argument(True, "whether to divide h by the normaliser; can be disabled only for a sigmoid gate")
    eps: float = argument(1e-6, "added to the normaliser", ge=0)
    sigmoid: ClassVar[bool] = True  # whether the input gate may be a sigmoid
    source = "xLSTM (arXiv:2405.04517), eq. 19-27"

    def shape(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> Wire:
        must_divide(self.heads, q.features, "heads", "the width of q")
        must_match("k", k, q.features, "the width of q")
        must_divide(self.heads, v.features, "heads", "the width of v")
        must_match("i", i, self.heads, "one for each head")
        must_match("f", f, self.heads, "one for each head")
        if not self.normalize and self.input_gate == "exp":
            hint = "normalize: true" + (", or input_gate: sigmoid" if self.sigmoid else "")
            raise Fault("E209", "an exponential input gate overflows without the normaliser", at="normalize", hint=hint)
        return v

    def state(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> dict[str, State]:
        dk, dv = q.features // self.heads, v.features // self.heads
        return {"C": State((self.heads, dk, dv)), "n": State((self.heads, dk)), "m": State((self.heads,))}

    def macs(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> int:
        """Count those of the recurrence: to update and read C and n."""
        dk, dv = q.features // self.heads, v.features // self.heads
        return self.heads * (2 * dk * dv + 2 * dk)

    def calls(self, q: Wire, k: Wire, v: Wire, i: Wire, f: Wire) -> KernelCall:
        dims = (q.features // self.heads, v.features // self.heads)
        return "mlstm", {"head_dims": dims, "input_gate": self.input_gate}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.mlstm.token import prepare

        return prepare(self.heads, self.eps, self.input_gate, self.normalize)

    def transition(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> Transition | None:
        from seqblocks.kernels.summaries import of_mlstm

        k, v = (x.unflatten(-1, (self.heads, -1)) for x in (k, v))
        summary = of_mlstm(k, v, i, f, call.resets, self.input_gate)
        return lambda state: dict(zip("Cnm", summary(state["C"], state["n"], state["m"]), strict=True))

    def memory(self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value, i: Value, f: Value) -> Value:
        from seqblocks.workspace import mlstm

        q, k, v = (tape.view(x, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)) for x in (q, k, v))
        return tape.view(mlstm.scan(tape, q, k, v, i, f), tape.out)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import MLSTMState, mlstm

        state = call.state
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))
        out = mlstm(
            q,
            k,
            v,
            i,
            f,
            state=MLSTMState(state["C"], state["n"], state["m"]) if state else None,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
            eps=self.eps,
            input_gate=self.input_gate,
            normalize=self.normalize,
        )
        h, after = output_and_state(out)
        return h.flatten(-2), after
