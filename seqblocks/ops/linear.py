"""Linear maps of the feature axis.   I features in, O features out, G blocks."""

from __future__ import annotations

from typing import Any

from seqblocks.op import ANY, Op, Port, argument, must_divide, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.types import Wire


class Affine(Op):
    """Base of the maps y = W x + b with weight [O, I] and bias [O]."""

    ports = (Port("x", "what is mapped; a list is joined along the features", main=True, joins=True, kinds=ANY.kinds),)
    bias: bool = argument(True, "whether a bias is added")

    def width(self) -> int:
        """O."""
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

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import linear

        return linear(x, p["weight"], p.get("bias"))


@primitive("linear")
class Linear(Affine):
    """Affine map of the features, y = W x + b, initialised like torch's Linear."""

    features: int = argument(..., "width of the output, O", ge=1)

    def width(self) -> int:
        return self.features


@primitive("proj_up")
class ProjUp(Linear):
    """Projection into a block's inner width. Weight small(I), bias 0.

    Usually split: `as: [u, z]` gives two equal halves.
    """

    bias: bool = argument(False, "whether a bias is added")
    source = "xLSTM (arXiv:2405.04517), pre-up-projection block"

    def weight_init(self, x: Wire) -> Init:
        return Init("small", (float(x.features),))

    def bias_init(self) -> Init:
        return Init("zeros")


@primitive("proj_down")
class ProjDown(Linear):
    """Projection back to the model's width. Weight wang(O, blocks), bias 0."""

    bias: bool = argument(False, "whether a bias is added")
    blocks: int = argument(1, "residual branches of the model: the more, the smaller the initial weights", ge=1)
    source = "xLSTM (arXiv:2405.04517), pre-up-projection block"

    def weight_init(self, x: Wire) -> Init:
        return Init("wang", (float(self.features), float(self.blocks)))

    def bias_init(self) -> Init:
        return Init("zeros")


@primitive("classifier")
class Classifier(Affine):
    """Linear classification head whose weights start close to zero."""

    classes: int = argument(..., "number of classes", ge=1)
    source = "Vision-LSTM (arXiv:2406.04303)"

    def weight_init(self, x: Wire) -> Init:
        return Init("trunc_normal", (2e-5,))

    def bias_init(self) -> Init:
        return Init("zeros")

    def width(self) -> int:
        return self.classes


@primitive("headwise_linear")
class HeadwiseLinear(Op):
    """Block-diagonal map: the features are cut into blocks of `block`, each with a matrix of its own.

    Weight [G, O/G, I/G] with G = I / block; initialised small(block).
    """

    ports = (ANY,)
    block: int = argument(..., "width of a block; must divide the input width", ge=1)
    features: int | None = argument(None, "width of the output (default: that of the input)", ge=1)
    bias: bool = argument(False, "whether a bias is added")
    source = "xLSTM (arXiv:2405.04517), LinearHeadwiseExpand"

    def sizes(self, x: Wire) -> tuple[int, int, int]:
        """G, O/G, I/G."""
        groups = must_divide(self.block, x.features, "block", "the input width")
        out = must_divide(groups, self.features or x.features, "the number of blocks", "features", at="features")
        return groups, out, self.block

    def shape(self, x: Wire) -> Wire:
        groups, out, _ = self.sizes(x)
        return x.with_features(groups * out)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        groups, out, width = self.sizes(x)
        table = {"weight": Parameter((groups, out, width), Init("small", (float(width),)), fan_in=width)}
        if self.bias:
            table["bias"] = Parameter((groups * out,), Init("zeros"), decay=False)
        return table

    def macs(self, x: Wire) -> int:
        groups, out, width = self.sizes(x)
        return groups * out * width

    def calls(self, x: Wire) -> tuple[str, dict[str, Any]]:
        return "headwise_linear", {"block": self.sizes(x)}

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from seqblocks.kernels import headwise_linear

        return headwise_linear(x, p["weight"], p.get("bias"))
