"""Linear maps of the feature axis.   I features in, O features out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


class Affine(Op):
    """Base of the maps y = W x + b with weight [O, I] and bias [O]."""

    ports = (
        Port(
            "x", "the input; a list of wires is concatenated along the features", main=True, joins=True, kinds=ANY.kinds
        ),
    )
    matrix_names = ("weight",)
    bias: bool = argument(True, "whether to add a bias")

    def width(self) -> int:
        """Return the output width O."""
        raise AssertionError

    def weight_init(self, x: Wire) -> Init:
        return Init("fan_in_uniform")

    def bias_init(self) -> Init:
        return Init("fan_in_uniform")

    def shape(self, x: Wire) -> Wire:
        return x.with_features(self.width())

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out = {"weight": Parameter((self.width(), x.features), self.weight_init(x))}
        if self.bias:
            out["bias"] = Parameter((self.width(),), self.bias_init(), decay=False, fan_in=x.features)
        return out

    def macs(self, x: Wire) -> int:
        return x.features * self.width()

    def matrix(self, p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return p["weight"], p.get("bias")

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.product(x, p["weight"], p.get("bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from seqblocks.kernels.dispatch import saves_launches
        from seqblocks.kernels.products import linear

        bias = p.get("bias")
        if (
            bias is not None and x.dim() == 3 and saves_launches(x)
        ):  # for a slice, torch would add the bias in a separate operation
            return linear(x.flatten(0, 1), p["weight"], bias).unflatten(0, x.shape[:2])
        return linear(x, p["weight"], bias)


@primitive("linear")
class Linear(Affine):
    """Affine map of the features, y = W x + b, initialised like torch's Linear."""

    features: int = argument(..., "width of the output, O", ge=1)

    def width(self) -> int:
        return self.features

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        """Split the weight by rows (outputs are parts of the features) or by columns (outputs are summands)."""
        rows = Split(self.model_copy(update={"features": self.features // ranks}), cuts={"weight": 0, "bias": 0})
        columns = Split(self, ("x",), {"weight": 1}, sums=True, added=("bias",))
        return [columns] if self.features % ranks else [columns, rows]
