"""Normalisation of the features of each token."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from seqblocks.op import ANY, Op, Port, argument, must_divide, must_match, primitive
from seqblocks.ops.gate import ActivationName, activate
from seqblocks.parameters import Init, Parameter
from seqblocks.types import Wire

Gain = Literal["plain", "one_plus", "none"]


class Norm(Op):
    """Base: a gain and a bias per feature. Neither is customarily decayed."""

    ports: ClassVar[tuple[Port, ...]] = (ANY,)
    gain: Gain = argument(
        "plain", "plain: the gain is the weight, from 1; one_plus: it is 1 + weight, from 0; none: no gain"
    )
    bias: bool = argument(True, "whether a bias is added")
    eps: float = argument(1e-5, "added to the variance", gt=0)

    def gain_width(self, x: Wire) -> int:
        """How many numbers the gain and the bias have."""
        return x.features

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out, shape = {}, (self.gain_width(x),)
        if self.gain != "none":
            out["weight"] = Parameter(shape, Init("ones" if self.gain == "plain" else "zeros"), decay=False)
        if self.bias:
            out["bias"] = Parameter(shape, Init("zeros"), decay=False)
        return out

    def effective_gain(self, p: Any) -> Any:
        weight = p.get("weight")
        return 1 + weight if self.gain == "one_plus" else weight

    def macs(self, x: Wire) -> int:
        return 2 * x.features  # variance and scaling; the mean is additions


@primitive("layer_norm")
class LayerNorm(Norm):
    """Layer normalisation over the features: (x - mean) / sqrt(var + eps) * gain + bias."""

    source = "Ba et al. 2016 (arXiv:1607.06450)"

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import layer_norm

        return layer_norm(x, x.shape[-1:], self.effective_gain(p), p.get("bias"), self.eps)


@primitive("rms_norm")
class RMSNorm(Norm):
    """Division by the root mean square of the features: x / sqrt(mean(x^2) + eps) * gain + bias.

    With z, gated: the norm of x * silu(z), or, with `gate: after`, the norm of x times silu(z). With groups, the mean
    is taken over each group of neighbouring features; `shared` gives all groups one gain and bias. The mean is taken
    in float32 at least.
    """

    ports = (ANY, Port("z", "a gate, as wide as x", optional=True, kinds=ANY.kinds))
    gate: Literal["before", "after"] = argument("before", "where the gate is multiplied: before the norm, or after")
    activation: ActivationName = argument("silu", "the gate's nonlinearity")
    groups: int = argument(1, "groups of features with a mean of their own; must divide the width", ge=1)
    shared: bool = argument(False, "whether all groups share one gain and one bias, as wide as a group")
    bias: bool = argument(False, "whether a bias is added")
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

    def forward(self, p: Any, call: Any, x: Any, z: Any = None) -> Any:
        import torch

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


@primitive("head_norm")
class HeadNorm(Norm):
    """Layer normalisation of each head's own features; gain and bias run over all features, or are shared by heads."""

    heads: int = argument(..., "number of heads; must divide the width", ge=1)
    gain: Gain = argument("one_plus", Norm.model_fields["gain"].description or "")
    bias: bool = argument(False, "whether a bias is added")
    shared: bool = argument(False, "whether all heads share one gain and one bias, as wide as a head")
    source = "xLSTM (arXiv:2405.04517), MultiHeadLayerNorm"

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x

    def gain_width(self, x: Wire) -> int:
        return x.features // self.heads if self.shared else x.features

    def effective_gain(self, p: Any) -> Any:
        return self._of_all_heads(super().effective_gain(p))

    def effective_bias(self, p: Any) -> Any:
        return self._of_all_heads(p.get("bias"))

    def _of_all_heads(self, x: Any) -> Any:
        return x.repeat(self.heads) if self.shared and x is not None else x

    def calls(self, x: Wire) -> tuple[str, dict[str, Any]]:
        return "head_norm", {"heads": self.heads, "width": x.features}

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from seqblocks.kernels import head_norm

        return head_norm(x, self.heads, self.effective_gain(p), self.effective_bias(p), self.eps)


@primitive("l2_norm")
class L2Norm(Op):
    """Division of each head's features by their length: x / sqrt(sum(x^2) + eps), taken in float32 at least."""

    ports = (ANY,)
    heads: int = argument(1, "number of heads; must divide the width", ge=1)
    eps: float = argument(1e-6, "added to the sum of squares", gt=0)
    source = "queries and keys of DeltaNet (arXiv:2406.06484)"

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        import torch

        exact = (x if x.dtype == torch.float64 else x.float()).unflatten(-1, (self.heads, -1))
        return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + self.eps)).flatten(-2).to(x.dtype)
