"""Gates, skips, dropout, and the activations by name."""

from __future__ import annotations

from typing import Any, Literal

from seqblocks.op import ANY, Op, Port, argument, must_match, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.types import Wire

BOTH = ANY.kinds
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
        Port("x", "what is gated", main=True, kinds=BOTH),
        Port("by", "the gate, before its activation", kinds=BOTH),
    )
    activation: ActivationName = argument("silu", "the gate's nonlinearity")

    def shape(self, x: Wire, by: Wire) -> Wire:
        must_match("by", by, x.features, "the width of what is gated")
        return x

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def forward(self, p: Any, call: Any, x: Any, by: Any) -> Any:
        return x * activate(self.activation, by)


@primitive("soft_cap")
class SoftCap(Op):
    """Limit values smoothly to (-cap, cap): cap * tanh(x / cap)."""

    ports = (ANY,)
    cap: float = argument(..., "the bound", ge=1e-6)

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        return self.cap * (x / self.cap).tanh()


@primitive("learnable_skip")
class LearnableSkip(Op):
    """Add another wire, scaled by a learned weight per feature: x + weight * with."""

    ports = (Port("x", "what is added to", main=True, kinds=BOTH), Port("with", "what is scaled and added", kinds=BOTH))
    source = "xLSTM (arXiv:2405.04517), mLSTM block"

    def shape(self, x: Wire, skip: Wire) -> Wire:
        must_match("with", skip, x.features, "the width of what it is added to")
        return x

    def parameters(self, x: Wire, skip: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((x.features,), Init("ones"), decay=False)}

    def macs(self, x: Wire, skip: Wire) -> int:
        return x.features

    def forward(self, p: Any, call: Any, x: Any, skip: Any) -> Any:
        return x + p["weight"] * skip


@primitive("dropout")
class Dropout(Op):
    """Zero features at random while training, and rescale the others by 1 / (1 - p)."""

    ports = (ANY,)
    p: float = argument(0.1, "probability of zeroing a feature", ge=0, lt=1)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import dropout

        return dropout(x, self.p, call.training)
