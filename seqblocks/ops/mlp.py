"""Feed-forward networks, applied to each token.   D features, F hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("swiglu")
class SwiGLU(Op):
    """Gated feed-forward network: W_down(silu(W_gate x) * W_up x).

    With g = W_gate x at most `limit` and u = W_up x between -`limit` and `limit`, the general formula is
    W_down(g sigmoid(slope g) * (u + offset)). gpt-oss has limit: 7, slope: 1.702, offset: 1.
    """

    ports = (ANY,)
    matrix_names = ("gate_weight", "up_weight", "down_weight")
    hidden: int = argument(..., "hidden width, F", ge=1)
    bias: bool = argument(False, "whether to add biases to the three maps")
    limit: float = argument(0.0, "limit of the two factors before their product (0: none)", ge=0)
    slope: float = argument(1.0, "factor in the sigmoid of the gate", gt=0)
    offset: float = argument(0.0, "added to the second factor")
    source = "Shazeer 2020 (arXiv:2002.05202); limit, slope and offset: gpt-oss (arXiv:2508.10925)"

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        sizes = {"gate": (self.hidden, x.features), "up": (self.hidden, x.features), "down": (x.features, self.hidden)}
        out = {f"{name}_weight": Parameter(size, Init("fan_in_uniform")) for name, size in sizes.items()}
        if self.bias:
            out |= {f"{name}_bias": Parameter(size[:1], Init("zeros"), decay=False) for name, size in sizes.items()}
        return out

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        """Split by hidden features."""
        if self.hidden % ranks:
            return []
        cuts = {"gate_weight": 0, "up_weight": 0, "gate_bias": 0, "up_bias": 0, "down_weight": 1}
        local = self.model_copy(update={"hidden": self.hidden // ranks})
        return [Split(local, (), cuts, sums=True, added=("down_bias",))]

    def macs(self, x: Wire) -> int:
        return 3 * x.features * self.hidden

    @property
    def general(self) -> bool:
        """Whether the factors are others than silu(W_gate x) and W_up x."""
        return bool(self.limit or self.offset or self.slope != 1)

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the product of the two factors, given W_gate x and W_up x."""
        import torch

        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        opening = torch.nn.functional.silu(gate) if self.slope == 1 else gate * torch.sigmoid(self.slope * gate)
        return opening * (up + self.offset) if self.offset else opening * up

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        import torch

        from seqblocks.kernels.joined import COPY_MAX_ELEMENTS, Matrix, prepare_joined
        from seqblocks.kernels.products import prepare_linear

        gate, up, down = ((p[f"{name}_weight"], p.get(f"{name}_bias")) for name in ("gate", "up", "down"))
        to_output, silu = prepare_linear(*down), torch.nn.functional.silu
        product = self.product if self.general else lambda gate, up: silu(gate).mul_(up)
        # a compiled step would copy them at each token
        if gate[0].numel() <= COPY_MAX_ELEMENTS and not torch.compiler.is_compiling():
            to_hidden, hidden = prepare_joined([Matrix(*gate), Matrix(*up)]), (self.hidden, self.hidden)

            def joined(x: Tensor) -> Tensor:
                opening, y = to_hidden(x).split_with_sizes(hidden, 1)
                return to_output(product(opening, y))

            return TokenFunction(joined)
        to_gate, to_up = prepare_linear(*gate), prepare_linear(*up)
        return TokenFunction(lambda x: to_output(product(to_gate(x), to_up(x))))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        gate = tape.product(x, p["gate_weight"], p.get("gate_bias"))
        up = tape.product(x, p["up_weight"], p.get("up_bias"))
        if self.limit:
            gate, up = tape.unary(gate), tape.unary(up)
        opening = tape.unary(gate)
        if self.slope != 1:
            opening = tape.multiply(gate, tape.unary(tape.unary(gate, []), ["output"]))
        up = tape.unary(up, []) if self.offset else up
        return tape.product(tape.multiply(opening, up), p["down_weight"], p.get("down_bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from seqblocks.kernels.products import linear

        gate = linear(x, p["gate_weight"], p.get("gate_bias"))
        up = linear(x, p["up_weight"], p.get("up_bias"))
        return linear(self.product(gate, up), p["down_weight"], p.get("down_bias"))
