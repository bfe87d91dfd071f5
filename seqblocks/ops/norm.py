"""Normalisation of the features of each token: the base of the norms, and layer normalisation."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from seqblocks.op import ANY, Op, Port, argument, drop_inherited, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split, evenly
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

Gain = Literal["plain", "one_plus", "none"]


class Norm(Op):
    """Base of the norms: a gain and a bias per feature, both without weight decay."""

    ports: ClassVar[tuple[Port, ...]] = (ANY,)
    gain: Gain = argument(
        "plain",
        "plain: the gain is the weight, initialised to 1; one_plus: 1 + weight, initialised to 0; none: no gain",
    )
    bias: bool = argument(True, "whether to add a bias")
    eps: float = argument(1e-5, "added to the variance", gt=0)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        drop_inherited(cls, Norm, ["adds_before"])

    def gain_width(self, x: Wire) -> int:
        """Return the width of the gain and the bias."""
        return x.features

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out, shape = {}, (self.gain_width(x),)
        if self.gain != "none":
            out["weight"] = Parameter(shape, Init("ones" if self.gain == "plain" else "zeros"), decay=False)
        if self.bias:
            out["bias"] = Parameter(shape, Init("zeros"), decay=False)
        return out

    def splits(self, ranks: int, *wires: Wire) -> list[Split]:
        found = evenly(self, ranks, self.independent, wires) if self.independent else []
        is_shared = self.gain_width(wires[0]) < wires[0].features  # by all heads or groups
        return [each._replace(cuts={}) for each in found] if is_shared else found

    def effective_gain(self, p: "Mapping[str, Tensor]") -> "Tensor | None":
        return 1 + p["weight"] if self.gain == "one_plus" else p.get("weight")

    def gain_memory(self, tape: Tape, p: Mapping[str, Value]) -> Value | None:
        """Record `effective_gain` on a tape."""
        return tape.add(p["weight"], tape.new(())) if self.gain == "one_plus" else p.get("weight")

    @property
    def adds_before(self) -> bool:
        """Return whether `of_sum` can compute it."""
        return False

    def of_sum(self, p: "Mapping[str, Tensor]", x: "Tensor", added: "Tensor | None") -> "tuple[Tensor, Tensor]":
        """Return the norm of x + added, and that sum, by one kernel. Requires `adds_before`; added may be None."""
        raise NotImplementedError

    def macs(self, x: Wire) -> int:
        return 2 * x.features  # variance and scaling; the mean is additions


@primitive("layer_norm")
class LayerNorm(Norm):
    """Layer normalisation over the features: (x - mean) / sqrt(var + eps) * gain + bias."""

    source = "Ba et al. 2016 (arXiv:1607.06450)"

    def prepare_token(self, p: "Mapping[str, Tensor]") -> TokenFunction | None:
        from torch import layer_norm

        gain, bias, eps = self.effective_gain(p), p.get("bias"), self.eps
        return TokenFunction(lambda x: layer_norm(x, x.shape[-1:], gain, bias, eps))

    @property
    def adds_before(self) -> bool:
        return True

    def of_sum(self, p: "Mapping[str, Tensor]", x: "Tensor", added: "Tensor | None") -> "tuple[Tensor, Tensor]":
        from seqblocks.kernels import residual_norm

        one_plus = self.gain == "one_plus"
        return residual_norm(x, added, p.get("weight"), p.get("bias"), self.eps, centred=True, one_plus=one_plus)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.layer_norm(x, self.gain_memory(tape, p), p.get("bias"))

    def forward(self, p: "Mapping[str, Tensor]", call: "Call", x: "Tensor") -> "Tensor":
        from torch.nn.functional import layer_norm

        from seqblocks.kernels.dispatch import saves_launches

        if saves_launches(x):
            return self.of_sum(p, x, None)[0]
        gain, bias = self.effective_gain(p), p.get("bias")
        if gain is None and bias is not None and bias.dtype != x.dtype:  # torch's backward pass needs both
            gain = bias.new_ones(bias.shape)
        return layer_norm(x, x.shape[-1:], gain, bias, self.eps)
