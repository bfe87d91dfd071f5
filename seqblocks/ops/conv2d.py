"""Convolutions over the rows and columns of an image.   D features, O features out, K x K taps, G groups."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault
from seqblocks.op import argument, primitive
from seqblocks.ops import grid as grids
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split, evenly
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_have_grid

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


class _Conv2d(grids.GridOp):
    """Base of both convolutions: a weight and a bias, an input on a grid, and an output on another."""

    bias: bool = argument(True, "whether to add a bias")

    def grid(self, size: grids.Grid) -> grids.Grid:
        """Return the rows and columns of the output."""
        raise AssertionError

    def weight_shape(self, x: Wire) -> tuple[int, ...]:
        raise AssertionError

    def width(self, x: Wire) -> int:
        """Return the width of the output."""
        raise AssertionError

    def check(self, x: Wire) -> None:
        """Raise a Fault for arguments that do not fit the input."""
        raise AssertionError

    def shape(self, x: Wire) -> Wire:
        must_have_grid(x, self.verb, instead="causal_conv" if self.verb == "conv2d" else "")
        assert x.grid
        self.check(x)
        return grids.on_grid(x, self.grid(x.grid), self.width(x))

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        shape = self.weight_shape(x)
        fan_in = shape[1] * shape[2] * shape[3]
        out = {"weight": Parameter(shape, Init("fan_in_uniform"), fan_in=fan_in)}
        if self.bias:
            out["bias"] = Parameter((self.width(x),), Init("fan_in_uniform"), decay=False, fan_in=fan_in)
        return out


@primitive("conv2d")
class Conv2d(_Conv2d):
    """K x K convolution over the tokens of an image, or over an image, whose result is tokens. Resets are an error.

    Without `features`, it is depthwise: weight [D, 1, K, K]. With `features`, it is dense, or in `groups`: weight
    [O, D / G, K, K], as torch's Conv2d. By default zero padding keeps the grid at a stride of 1; with a stride, the
    output has (rows + 2 padding - span) // stride + 1 rows, and columns likewise, where a window spans
    (K - 1) dilation + 1 rows. Later steps use this grid.
    """

    features: int | None = argument(None, "width of the output, O (default: D, depthwise)", ge=1)
    kernel: int = argument(
        3, "height and width of the kernel, K; odd, unless `padding` is set", ge=1, le=grids.MAX_WINDOW
    )
    stride: int = argument(1, "distance between windows", ge=1, le=grids.MAX_WINDOW)
    padding: int | None = argument(
        None, "zeros on each side (default: (K - 1) dilation / 2)", ge=0, le=grids.MAX_WINDOW
    )
    dilation: int = argument(1, "distance between taps", ge=1, le=grids.MAX_WINDOW)
    groups: int | None = argument(
        None, "number of groups of features that are convolved separately, G (default: 1; D without `features`)", ge=1
    )
    activation: Literal["none", "silu"] = argument("none", "applied to the result")
    source = "depthwise on tokens: Vision-LSTM (arXiv:2406.04303), version 2"

    @property
    def span(self) -> int:
        """The rows and columns that a window covers."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def pad(self) -> int:
        """The zeros on each side."""
        return grids.same_padding(self.kernel, self.dilation, self.verb) if self.padding is None else self.padding

    def groups_of(self, x: Wire) -> int:
        return self.groups or (1 if self.features else x.features)

    def width(self, x: Wire) -> int:
        return self.features or x.features

    def check(self, x: Wire) -> None:
        must_divide(self.groups_of(x), x.features, "groups", "the width of the input")
        must_divide(self.groups_of(x), self.width(x), "groups", "features")
        assert x.grid
        grids.check_fits(x.grid, self.span, self.pad, self.verb)

    def grid(self, size: grids.Grid) -> grids.Grid:
        return grids.window_grid(size, self.span, self.stride, self.pad)

    def weight_shape(self, x: Wire) -> tuple[int, ...]:
        return self.width(x), x.features // self.groups_of(x), self.kernel, self.kernel

    def macs(self, x: Wire) -> int:
        return self.width(x) * (x.features // self.groups_of(x)) * self.kernel**2

    def splits(self, ranks: int, x: Wire) -> list[Split]:
        depthwise = self.features is None and self.groups is None and x.kind == "sequence"
        return evenly(self, ranks, "features", [x]) if depthwise else []

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace.convolution import convolve

        weight = p["weight"]
        groups = (x.shape[1] if len(x.shape) == 4 else x.features) // weight.shape[1]
        run = partial(convolve, tape, shape=tape.out, groups=groups, dilation=self.dilation)
        y = tape.in_float32(run, x, weight, p.get("bias"))
        return tape.unary(y) if self.activation == "silu" else y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import conv2d, silu

        from seqblocks.kernels.numerics import in_float32

        image, weight = grids.as_maps(x, call), p["weight"]
        grids.check_maps(image, self.span, self.pad, self.verb)
        groups = image.shape[1] // weight.shape[1]
        run = partial(conv2d, stride=self.stride, padding=self.pad, dilation=self.dilation, groups=groups)
        y = in_float32(run, image, weight, p.get("bias"))
        y = grids.as_tokens(y, call)
        return silu(y) if self.activation == "silu" else y


@primitive("conv_transpose2d")
class ConvTranspose2d(_Conv2d):
    """Transposed convolution over the tokens of an image, or over an image, whose result is tokens.

    Weight [D, O / G, K, K], as torch's ConvTranspose2d. The result has (rows - 1) stride + K - 2 padding +
    output_padding rows, and columns likewise: `kernel: 2, stride: 2` doubles both. Resets are an error.
    """

    features: int = argument(..., "width of the output, O", ge=1)
    kernel: int = argument(..., "height and width of the kernel, K", ge=1, le=grids.MAX_WINDOW)
    stride: int = argument(1, "rows of the output per row of the input", ge=1, le=grids.MAX_WINDOW)
    padding: int = argument(0, "rows and columns that are cut off on each side", ge=0, le=grids.MAX_WINDOW)
    output_padding: int = argument(0, "rows and columns that are added at the end", ge=0, le=grids.MAX_WINDOW)
    groups: int = argument(1, "number of groups of features that are convolved separately, G", ge=1)

    def width(self, x: Wire) -> int:
        return self.features

    def check(self, x: Wire) -> None:
        must_divide(self.groups, x.features, "groups", "the width of the input")
        must_divide(self.groups, self.features, "groups", "features")
        if self.output_padding >= self.stride:
            found, expected = str(self.output_padding), f"less than the stride ({self.stride})"
            raise Fault("E412", "output_padding is too large", at="output_padding", found=found, expected=expected)
        assert x.grid
        if min(self.grid(x.grid)) < 1:
            rows, columns = x.grid
            message = f"a padding of {self.padding} leaves nothing of the {rows} rows and {columns} columns"
            raise Fault("E412", message, at="padding", hint="use a smaller padding")

    def grid(self, size: grids.Grid) -> grids.Grid:
        added = self.kernel - 2 * self.padding + self.output_padding
        rows, columns = ((side - 1) * self.stride + added for side in size)
        return rows, columns

    def weight_shape(self, x: Wire) -> tuple[int, ...]:
        return x.features, self.features // self.groups, self.kernel, self.kernel

    def macs(self, x: Wire) -> int:
        return x.features * (self.features // self.groups) * self.kernel**2 // self.stride**2

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace.convolution import convolve

        return convolve(tape, x, p["weight"], p.get("bias"), shape=tape.out, groups=self.groups)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import conv_transpose2d

        image, more = grids.as_maps(x, call), self.output_padding
        y = conv_transpose2d(image, p["weight"], p.get("bias"), self.stride, self.padding, more, self.groups)
        return grids.as_tokens(y, call)
