"""Gates, and the activations by name."""

from __future__ import annotations

from typing import Any, Literal

from seqblocks.op import ANY, Op, Port, argument, must_match, primitive
from seqblocks.types import Facts, Wire

ActivationName = Literal["silu", "gelu", "relu", "squared_relu", "selu", "sigmoid", "tanh", "softplus", "none"]


def activate(name: str, x: Any) -> Any:
    """Apply an activation by name. gelu is the exact one, by erf."""
    from torch.nn import functional

    if name == "squared_relu":
        return functional.relu(x).square()
    return x if name == "none" else getattr(functional, name)(x)


_RANGES = {  # of all numbers
    "silu": Facts(-0.2785), "gelu": Facts(-0.17), "relu": Facts(0), "squared_relu": Facts(0), "selu": Facts(-1.7581),
    "sigmoid": Facts(0, 1), "tanh": Facts(-1, 1), "softplus": Facts(0),
}  # fmt: skip
_AT_ZERO = ("silu", "gelu", "relu", "squared_relu", "selu", "tanh")  # 0 stays 0


def activated(name: str, facts: Facts) -> Facts:
    """Return what is known of numbers after an activation."""
    if name == "none" or (facts == Facts(0, 0) and name in _AT_ZERO):
        return facts
    if name == "relu":
        return Facts(max(facts.low, 0.0), max(facts.high, 0.0))
    return _RANGES[name]


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

    def facts(self, x: Wire, by: Wire) -> Facts:
        return x.facts.times(activated(self.activation, by.facts))

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def forward(self, p: Any, call: Any, x: Any, by: Any) -> Any:
        return x * activate(self.activation, by)
