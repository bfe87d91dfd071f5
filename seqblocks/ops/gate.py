"""Gates, and the activations by name."""

from __future__ import annotations

from typing import Any, Literal

from seqblocks.op import ANY, Op, Port, argument, must_match, primitive
from seqblocks.types import Wire

ActivationName = Literal["silu", "gelu", "relu", "squared_relu", "selu", "sigmoid", "tanh", "softplus", "none"]


def activate(name: str, x: Any) -> Any:
    """Apply an activation by name. gelu is the exact one, by erf."""
    from torch.nn import functional

    if name == "squared_relu":
        return functional.relu(x).square()
    return x if name == "none" else getattr(functional, name)(x)


@primitive("gate")
class Gate(Op):
    """Multiply by another wire after an activation: x * activation(by)."""

    ports = (
        Port("x", "what is gated", main=True, kinds=ANY.kinds),
        Port("by", "the gate, before its activation", kinds=ANY.kinds),
    )
    activation: ActivationName = argument("silu", "the gate's nonlinearity")

    def shape(self, x: Wire, by: Wire) -> Wire:
        must_match("by", by, x.features, "the width of what is gated")
        return x

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def forward(self, p: Any, call: Any, x: Any, by: Any) -> Any:
        return x * activate(self.activation, by)
