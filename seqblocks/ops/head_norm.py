"""Normalisation within each head."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqblocks.op import argument, primitive
from seqblocks.ops.norm import Gain, Norm
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall
    from seqblocks.runtime.call import Call


@primitive("head_norm")
class HeadNorm(Norm):
    """Layer normalisation within each head; gain and bias are per feature, or shared by all heads."""

    independent = "heads"
    heads: int = argument(..., "number of heads; must divide the width", ge=1)
    gain: Gain = argument("one_plus", Norm.model_fields["gain"].description or "")
    bias: bool = argument(False, "whether to add a bias")
    shared: bool = argument(False, "whether all heads share one gain and one bias, as wide as a head")
    mixed = True
    source = "xLSTM (arXiv:2405.04517), MultiHeadLayerNorm"

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x

    def gain_width(self, x: Wire) -> int:
        return x.features // self.heads if self.shared else x.features

    def effective_gain(self, p: "Mapping[str, Tensor]") -> "Tensor | None":
        return self._of_all_heads(super().effective_gain(p))

    def effective_bias(self, p: "Mapping[str, Tensor]") -> "Tensor | None":
        return self._of_all_heads(p.get("bias"))

    def _of_all_heads(self, x: "Tensor | None") -> "Tensor | None":
        return x.repeat(self.heads) if self.shared and x is not None else x

    def calls(self, x: Wire) -> "KernelCall":
        return "head_norm", {"heads": self.heads, "width": x.features}

    def prepare_token(self, p: "Mapping[str, Tensor]") -> TokenFunction | None:
        from torch import layer_norm

        gain, bias, heads, eps = self.effective_gain(p), self.effective_bias(p), self.heads, self.eps

        def step(x: "Tensor") -> "Tensor":
            y = x.unflatten(1, (heads, -1))
            y = layer_norm(y, y.shape[2:], eps=eps).flatten(1)
            y = y if gain is None else y.mul_(gain)
            return y if bias is None else y.add_(bias)

        return TokenFunction(step)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        heads = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        y = tape.view(tape.layer_norm(tape.view(x, heads)), x.shape)
        gain, bias = self.gain_memory(tape, p), p.get("bias")
        if self.shared:
            gain, bias = (None if each is None else tape.expand(each, x.shape[-1:]) for each in (gain, bias))
        y = y if gain is None else tape.multiply(y, gain)
        return y if bias is None else tape.add(y, bias)

    def forward(self, p: "Mapping[str, Tensor]", call: "Call", x: "Tensor") -> "Tensor":
        from seqblocks.kernels import head_norm

        return head_norm(x, **self.kernel_arguments(p))

    def kernel_arguments(self, p: "Mapping[str, Tensor]") -> dict[str, Any]:
        gain, bias = self._of_all_heads(p.get("weight")), self.effective_bias(p)
        one_plus = self.gain == "one_plus"
        return {"heads": self.heads, "weight": gain, "bias": bias, "eps": self.eps, "one_plus": one_plus}
