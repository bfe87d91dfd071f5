"""Convolutions over tokens.   D features, K taps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.op import Op, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split, evenly
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Tokens, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call

Activation = Literal["none", "silu"]


@primitive("causal_conv")
class CausalConv(Op):
    """Causal convolution over the current token and the K - 1 tokens before it; tap K - 1 is the current token.

    Depthwise weight [D, 1, K], or [D, D, K] with `mixing`. State: the last K - 1 inputs [K - 1, D], oldest first.
    """

    reads = "past"
    reversible = True
    kernel: int = argument(4, "number of taps, K", ge=1, le=4096)
    activation: Activation = argument("none", "applied to the result")
    mixing: bool = argument(False, "mix the features (full convolution) instead of depthwise")
    bias: bool = argument(True, "whether to add a bias")

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        return [] if self.mixing else evenly(self, ranks, "features", [x])

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        width = x.features if self.mixing else 1
        fan_in = width * self.kernel
        out = {"weight": Parameter((x.features, width, self.kernel), Init("fan_in_uniform"), fan_in=fan_in)}
        if self.bias:
            out["bias"] = Parameter((x.features,), Init("fan_in_uniform"), decay=False, fan_in=fan_in)
        return out

    def state(self, x: Wire) -> dict[str, State]:
        return {"window": State((self.kernel - 1, x.features), "model")} if self.kernel > 1 else {}

    def macs(self, x: Wire) -> int:
        return x.features * self.kernel * (x.features if self.mixing else 1)

    def looks_back(self, x: Wire) -> Tokens:
        return (self.kernel - 1) * x.rate

    def calls(self, x: Wire) -> KernelCall:
        return "causal_conv", {"taps": self.kernel, "width": x.features, "mixing": self.mixing and x.features > 1}

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        from seqblocks.ops.shift import window_after

        return window_after(x, self.kernel - 1, call)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        if self.mixing or self.kernel == 1:
            return None
        from seqblocks.kernels.causal_conv.token import prepare

        return prepare(p["weight"], p.get("bias"), None if self.activation == "none" else self.activation)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace import causal_conv

        convolve = causal_conv.mix if self.mixing and x.features > 1 else causal_conv.convolve
        return convolve(tape, x, p["weight"], p.get("bias"), self.activation)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import causal_conv

        activation = None if self.activation == "none" else self.activation
        out = causal_conv(
            x,
            p["weight"],
            p.get("bias"),
            activation=activation,
            state=call.state["window"] if call.state else None,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
        )
        y, state = output_and_state(out, "window")
        return y, state if self.kernel > 1 else {}
