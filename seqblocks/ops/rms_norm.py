"""Normalisation by the root mean square."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.op import ANY, Port, argument, primitive
from seqblocks.ops.gate import ActivationName, activate, activation, activation_memory
from seqblocks.ops.norm import Norm
from seqblocks.parameters import Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("rms_norm")
class RMSNorm(Norm):
    """Divide by the root mean square of the features: x / sqrt(mean(x^2) + eps) * gain + bias.

    With the gate z, it is the norm of x * silu(z), or with `gate: after` the norm of x, times silu(z). With groups, the
    mean is over each group of consecutive features; with `shared`, all groups share one gain and bias. The mean is
    computed in at least float32.
    """

    independent = "groups"
    ports = (ANY, Port("z", "a gate, as wide as x", optional=True, kinds=ANY.kinds, broadcast=True))
    gate: Literal["before", "after"] = argument("before", "whether to apply the gate before or after the norm")
    activation: ActivationName = argument("silu", "activation of the gate")
    groups: int = argument(
        1, "number of groups of features that are normalised separately; must divide the width", ge=1
    )
    shared: bool = argument(False, "whether all groups share one gain and one bias, as wide as a group")
    bias: bool = argument(False, "whether to add a bias")
    eps: float = argument(1e-6, "added to the mean square", gt=0)
    source = "Zhang & Sennrich 2019 (arXiv:1910.07467); gated as in Mamba-2 (arXiv:2405.21060)"

    def shape(self, x: Wire, z: Wire | None = None) -> Wire:
        must_divide(self.groups, x.features, "groups", "the width")
        if z:
            must_match("z", z, x.features, "the width of x")
        return x

    def gain_width(self, x: Wire) -> int:
        return x.features // self.groups if self.shared else x.features

    def parameters(self, x: Wire, z: Wire | None = None) -> dict[str, Parameter]:
        return super().parameters(x)

    def macs(self, x: Wire, z: Wire | None = None) -> int:
        return super().macs(x) + (x.features if z else 0)

    def prepare_token(self, p: "Mapping[str, Tensor]") -> TokenFunction | None:
        from seqblocks.kernels.residual_norm.token import prepare

        groups, opening_of, gated_before = self.groups, activation(self.activation), self.gate == "before"
        gain, bias = (self._by_group(each) for each in (self.effective_gain(p), p.get("bias")))
        normalise = prepare(gain, self.eps)

        def normed(x: "Tensor") -> "Tensor":
            y = normalise(x if groups == 1 else x.view(x.shape[0], groups, -1))
            y = y if bias is None else y.add_(bias)
            return y if groups == 1 else y.flatten(1)

        def step(x: "Tensor", z: "Tensor | None") -> "Tensor":
            if z is None:
                return normed(x)
            return normed(x * opening_of(z)) if gated_before else normed(x).mul_(opening_of(z))

        return TokenFunction(step)

    def _by_group(self, x: "Tensor | None") -> "Tensor | None":
        return x if x is None or self.shared or self.groups == 1 else x.view(self.groups, -1)

    @property
    def adds_before(self) -> bool:
        return self.groups == 1

    def of_sum(self, p: "Mapping[str, Tensor]", x: "Tensor", added: "Tensor | None") -> "tuple[Tensor, Tensor]":
        from seqblocks.kernels import residual_norm

        return residual_norm(x, added, p.get("weight"), p.get("bias"), self.eps, one_plus=self.gain == "one_plus")

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, z: Value | None = None) -> Value:
        exact = tape.cast(x, max(x.item, 4))
        opening = None if z is None else activation_memory(tape, self.activation, tape.cast(z, exact.item))
        if opening is not None and self.gate == "before":
            exact = tape.multiply(exact, opening)
        grouped = tape.view(exact, (*x.shape[:-1], self.groups, x.shape[-1] // self.groups))
        means = (*grouped.shape[:-1], 1)
        y = tape.multiply(grouped, tape.unary(tape.mean(tape.square(grouped), means), ["output"]))
        y = tape.cast(y, x.item)
        y = y if self.shared else tape.view(y, x.shape)
        gain, bias = self.gain_memory(tape, p), p.get("bias")
        y = y if gain is None else tape.multiply(y, gain)
        y = y if bias is None else tape.add(y, bias)
        y = tape.view(y, x.shape) if self.shared else y
        return y if opening is None or self.gate == "before" else tape.cast(tape.multiply(y, opening), y.item)

    def forward(self, p: "Mapping[str, Tensor]", call: "Call", x: "Tensor", z: "Tensor | None" = None) -> "Tensor":
        import torch

        from seqblocks.kernels.dispatch import saves_launches

        if z is None and self.groups == 1 and saves_launches(x):
            return self.of_sum(p, x, None)[0]
        exact = x if x.dtype == torch.float64 else x.float()
        opening = None if z is None else activate(self.activation, z.to(exact.dtype))
        if opening is not None and self.gate == "before":
            exact = exact * opening
        grouped = exact.unflatten(-1, (self.groups, -1))
        y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        y = y if self.shared else y.flatten(-2)
        gain, bias = self.effective_gain(p), p.get("bias")
        y = y if gain is None else y * gain
        y = y if bias is None else y + bias
        y = y.flatten(-2) if self.shared else y
        return y if opening is None or self.gate == "before" else (y * opening).to(y.dtype)
