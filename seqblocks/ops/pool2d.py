"""Pool windows of rows and columns of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault
from seqblocks.op import argument, primitive
from seqblocks.ops import grid as grids
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_have_grid

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("pool2d")
class Pool2d(grids.GridOp):
    """Pool each K x K window of the tokens of an image, or of an image, to one token. Resets are an error.

    max: maximum of each feature, of the tokens in the window. mean: sum of the window divided by K x K, where padding
    counts as zeros. The result has (rows + 2 padding - K) // stride + 1 rows, and columns likewise. Later steps use
    this grid.
    """

    mode: Literal["max", "mean"] = argument("max", "pooling mode")
    kernel: int = argument(2, "height and width of a window, K", ge=1, le=grids.MAX_WINDOW)
    stride: int | None = argument(None, "distance between windows (default: K)", ge=1, le=grids.MAX_WINDOW)
    padding: int = argument(0, "rows and columns on each side, at most half of K", ge=0, le=grids.MAX_WINDOW)

    @property
    def step(self) -> int:
        """The distance between windows."""
        return self.stride or self.kernel

    def shape(self, x: Wire) -> Wire:
        must_have_grid(x, self.verb, instead="pool or downsample")
        assert x.grid
        if self.padding > self.kernel // 2:
            found, expected = str(self.padding), f"at most {self.kernel // 2}, half of the kernel"
            raise Fault("E412", "the padding of pool2d is too large", at="padding", found=found, expected=expected)
        grids.check_fits(x.grid, self.kernel, self.padding, self.verb)
        made = grids.window_grid(x.grid, self.kernel, self.step, self.padding)
        return grids.on_grid(x, made, x.features)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range.or_zero() if self.mode == "mean" and self.padding else x.facts.range

    def macs(self, x: Wire) -> int:
        return 0  # maxima and additions, as in pool

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.new(tape.out, x.item).turn(not x.is_channels_last)
        indices = 8 * y.numbers if self.mode == "max" else 0  # of the maxima
        tape.passing(0 if x.whole else x.bytes)
        tape.function([x], [y], [x, indices] if indices else [x], 0 if x.whole else x.bytes, turned=x.bytes + indices)
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import avg_pool2d, max_pool2d

        image = grids.as_maps(x, call)
        grids.check_maps(image, self.kernel, self.padding, self.verb)
        pooled = max_pool2d if self.mode == "max" else avg_pool2d
        return grids.as_tokens(pooled(image, self.kernel, self.step, self.padding), call)
