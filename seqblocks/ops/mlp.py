"""Feed-forward networks on each token.   D features, F hidden."""

from __future__ import annotations

from typing import Any

from seqblocks.op import ANY, Op, Split, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.types import Wire


@primitive("swiglu")
class SwiGLU(Op):
    """Gated feed-forward network: W_down(silu(W_gate x) * W_up x)."""

    ports = (ANY,)
    hidden: int = argument(..., "hidden width, F", ge=1)
    bias: bool = argument(False, "whether the three maps have biases")
    source = "Shazeer 2020 (arXiv:2002.05202)"

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        sizes = {"gate": (self.hidden, x.features), "up": (self.hidden, x.features), "down": (x.features, self.hidden)}
        out = {f"{name}_weight": Parameter(size, Init("fan_in_uniform")) for name, size in sizes.items()}
        if self.bias:
            out |= {f"{name}_bias": Parameter(size[:1], Init("zeros"), decay=False) for name, size in sizes.items()}
        return out

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        """By hidden features."""
        if self.hidden % ranks:
            return []
        cuts = {"gate_weight": 0, "up_weight": 0, "gate_bias": 0, "up_bias": 0, "down_weight": 1}
        local = self.model_copy(update={"hidden": self.hidden // ranks})
        return [Split(local, (), cuts, sums=True, added=("down_bias",))]

    def macs(self, x: Wire) -> int:
        return 3 * x.features * self.hidden

    def prepare_step(self, p: Any) -> Any:
        from seqblocks.kernels.products import linear_of_few

        return lambda x: self._mapped(p, x, linear_of_few)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import linear

        return self._mapped(p, x, linear)

    def _mapped(self, p: Any, x: Any, linear: Any) -> Any:
        from torch.nn.functional import silu

        gate = linear(x, p["gate_weight"], p.get("gate_bias"))
        up = linear(x, p["up_weight"], p.get("up_bias"))
        return linear(silu(gate) * up, p["down_weight"], p.get("down_bias"))
