"""Gates, and activations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.op import ANY, Op, Port, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

ActivationName = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "leaky_relu", "squared_relu", "elu", "selu", "sigmoid", "tanh", "softplus",
    "none", "positive", "one_minus_exp", "rational_exp", "elu_plus_one", "exp",
]  # fmt: skip

GELU_MAX_ELEMENTS = 1 << 13  # up to which gelu takes longer in oneDNN


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by name: a function that returns a new tensor (`none`: the same one)."""
    import torch
    from torch.nn import functional

    match name:
        case "none":
            return lambda x: x
        case "squared_relu":
            return lambda x: functional.relu(x).square()
        case "gelu_tanh":
            return lambda x: functional.gelu(x, approximate="tanh")
        case "positive":
            return lambda x: torch.where(x >= 0, x + 0.5, x.sigmoid())
        case "exp":
            return torch.exp
        case "one_minus_exp":
            return lambda x: -torch.expm1(x)
        case "elu_plus_one":
            return lambda x: torch.where(x > 0, 1 + x, x.clamp(max=0).exp())
        case "rational_exp":
            return lambda x: torch.where(x >= 0, 1 + x, 1 / (1 + x.abs()))
    found: Callable[[Tensor], Tensor] = getattr(functional, name)
    return found


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation by name."""
    return activation(name)(x)


def activation_memory(tape: Tape, name: str, x: Value) -> Value:
    """Record an activation by name on a tape, like `activate`."""
    one = tape.new(())
    match name:
        case "none":
            return x
        case "relu" | "sigmoid" | "tanh" | "exp":
            return tape.unary(x, ["output"])
        case "squared_relu":
            return tape.square(tape.unary(x, ["output"]))
        case "one_minus_exp":
            return tape.unary(tape.unary(x, ["output"], backward=x.bytes), ())
        case "positive":
            return tape.where(x, tape.add(x, one), tape.unary(x, ["output"]))
        case "elu_plus_one":
            return tape.where(x, tape.add(x, one), tape.unary(tape.unary(x), ["output"]))
        case "rational_exp":
            return tape.where(x, tape.add(x, one), tape.inverse(tape.add(tape.unary(x, backward=x.bytes), one)))
    return tape.unary(x)


def activation_of_token(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by name for a function of one token, which runs without gradients."""
    import torch

    return activation(name) if name != "gelu" or torch.compiler.is_compiling() else _gelu_of_token


def _gelu_of_token(x: Tensor) -> Tensor:
    """Return gelu(x) for any x, 1.5 to 1.9 times as fast for up to 1,024 elements (AMD Zen 4).

    For contiguous float32 on a CPU, torch calls oneDNN, which takes 3 us or more to begin. The same elements with other
    strides do not go there, and are read in the same order.
    """
    from torch.nn.functional import gelu

    count = x.numel()
    if count > GELU_MAX_ELEMENTS or count % 2 or not x.is_contiguous():
        return gelu(x)
    half = count // 2
    return gelu(x.as_strided((half, 2), (1, half))).as_strided(x.shape, x.stride())


_RANGES = {  # of all numbers
    "silu": Facts(-0.2785), "gelu": Facts(-0.17), "relu": Facts(0), "squared_relu": Facts(0), "selu": Facts(-1.7581),
    "sigmoid": Facts(0, 1), "tanh": Facts(-1, 1), "softplus": Facts(0), "gelu_tanh": Facts(-0.171),
    "positive": Facts(0), "one_minus_exp": Facts(high=1), "rational_exp": Facts(0), "elu_plus_one": Facts(0),
    "elu": Facts(-1), "leaky_relu": Facts(), "exp": Facts(0),
}  # fmt: skip
_AT_ZERO = {*_RANGES} - {"sigmoid", "softplus", "positive", "rational_exp", "elu_plus_one", "exp"}  # 0 stays 0


def activated(name: str, facts: Facts) -> Facts:
    """Return the facts about values after an activation."""
    if name == "none" or (facts == Facts(0, 0) and name in _AT_ZERO):
        return facts
    if name == "relu":
        return Facts(max(facts.low, 0.0), max(facts.high, 0.0))
    if name in ("exp", "one_minus_exp") and facts.high <= 0:
        return Facts(0, 1)
    return _RANGES[name]


@primitive("gate")
class Gate(Op):
    """Multiply by another wire after an activation: x * activation(by). With `heads`, `by` has one number per head."""

    independent = "heads"
    ports = (
        Port("x", "the wire to gate", main=True, kinds=ANY.kinds, broadcast=True),
        Port("by", "the gate, before its activation", kinds=ANY.kinds, broadcast=True),
    )
    activation: ActivationName = argument("silu", "activation of the gate")
    heads: int = argument(0, "heads with one gate each; must divide the width (0: one gate per feature)", ge=0)

    def shape(self, x: Wire, by: Wire) -> Wire:
        if self.heads:
            must_divide(self.heads, x.features, "heads", "the width")
        must_match("by", by, self.heads or x.features, "one per head" if self.heads else "the width of what is gated")
        return x

    def facts(self, x: Wire, by: Wire) -> Facts:
        return x.facts.times(activated(self.activation, by.facts))

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        if self.heads or self.activation == "none":
            return None
        function = activation_of_token(self.activation)
        return TokenFunction(lambda x, by: function(by).mul_(x))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, by: Value) -> Value:
        opening = activation_memory(tape, self.activation, by)
        if not self.heads:
            return tape.multiply(x, opening)
        heads = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        y = tape.multiply(tape.view(x, heads), tape.view(opening, (*opening.shape, 1)))
        return tape.cast(tape.view(y, x.shape), x.item)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, by: Tensor) -> Tensor:
        opening = activate(self.activation, by)
        if not self.heads:
            return x * opening
        return (x.unflatten(-1, (self.heads, -1)) * opening.unsqueeze(-1)).flatten(-2).to(x.dtype)
