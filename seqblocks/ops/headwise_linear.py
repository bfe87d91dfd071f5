"""Block-diagonal linear maps.   I features in, O features out, G blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.kernels.joined import Matrix
    from seqblocks.roles import KernelCall
    from seqblocks.runtime.call import Call


@primitive("headwise_linear")
class HeadwiseLinear(Op):
    """Block-diagonal linear map: the features are split into blocks of width `block`, each with its own matrix.

    Weight [G, O/G, I/G] with G = I / block, initialised with small(block). With `shared`, all blocks share one matrix
    [O/G, I/G] and one bias.
    """

    ports = (ANY,)
    block: int = argument(..., "width of a block; must divide the input width", ge=1)
    features: int | None = argument(None, "width of the output (default: that of the input)", ge=1)
    bias: bool = argument(False, "whether to add a bias")
    shared: bool = argument(False, "whether all blocks share one matrix and one bias")
    source = "xLSTM (arXiv:2405.04517), LinearHeadwiseExpand"

    def sizes(self, x: Wire) -> tuple[int, int, int]:
        """Return G, O/G, I/G."""
        groups = must_divide(self.block, x.features, "block", "the input width")
        out = must_divide(groups, self.features or x.features, "the number of blocks", "features", at="features")
        return groups, out, self.block

    def shape(self, x: Wire) -> Wire:
        groups, out, _ = self.sizes(x)
        return x.with_features(groups * out)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        groups, out, width = self.sizes(x)
        shape = (out, width) if self.shared else (groups, out, width)
        table = {"weight": Parameter(shape, Init("small", (float(width),)), fan_in=width)}
        if self.bias:
            table["bias"] = Parameter((out if self.shared else groups * out,), Init("zeros"), decay=False)
        return table

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        groups, out, _ = self.sizes(x)
        if groups % ranks or self.shared:  # a shared matrix has no part for a rank
            return []
        features = self.features and groups * out // ranks
        return [Split(self.model_copy(update={"features": features}), ("x",), {"weight": 0, "bias": 0})]

    def macs(self, x: Wire) -> int:
        groups, out, width = self.sizes(x)
        return groups * out * width

    def calls(self, x: Wire) -> KernelCall | None:
        return None if self.shared else ("headwise_linear", {"block": self.sizes(x)})

    def matrix(self, p: Mapping[str, Tensor]) -> Matrix | None:
        from seqblocks.kernels.headwise_linear.token import matrix

        return None if self.shared else matrix(p["weight"], p.get("bias"))

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.headwise_linear.token import prepare

        return None if self.shared else prepare(p["weight"], p.get("bias"))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace import headwise_linear

        return headwise_linear.product(tape, x, p["weight"], p.get("bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import linear

        from seqblocks.kernels import headwise_linear

        if self.shared:
            return linear(x.unflatten(-1, (-1, self.block)), p["weight"], p.get("bias")).flatten(-2)
        return headwise_linear(x, p["weight"], p.get("bias"))
