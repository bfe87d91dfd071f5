"""Resize the grid of an image's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import argument, primitive
from seqblocks.ops import grid as grids
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_have_grid

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("resize")
class Resize(grids.GridOp):
    """Resize the tokens of an image, or an image, whose result is tokens, by a factor or to a size.

    nearest: copies the nearest token, as torch's `interpolate`. bilinear: weights the four nearest tokens
    (`align_corners=False`, without antialiasing). A factor rounds rows and columns down. Later steps use this grid.
    Resets are an error.
    """

    factor: float | None = argument(None, "rows and columns of the result per row and column", gt=0, le=256)
    rows: int | None = argument(None, "rows of the result, instead of `factor`", ge=1, le=2**16)
    columns: int | None = argument(None, "columns of the result, instead of `factor`", ge=1, le=2**16)
    mode: Literal["nearest", "bilinear"] = argument("nearest", "how values are interpolated")

    def grid(self, size: grids.Grid) -> grids.Grid:
        """Return the rows and columns of the result."""
        if self.factor is not None:
            return int(size[0] * self.factor), int(size[1] * self.factor)
        assert self.rows
        assert self.columns
        return self.rows, self.columns

    def shape(self, x: Wire) -> Wire:
        given = (self.factor is not None, self.rows is not None, self.columns is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise Fault("E412", "resize needs a factor or a size", expected="`factor`, or `rows` and `columns`")
        must_have_grid(x, self.verb, instead="upsample")
        assert x.grid
        made = self.grid(x.grid)
        if min(made) < 1:
            message = f"a factor of {self.factor:g} leaves nothing of the {x.grid[0]} rows and {x.grid[1]} columns"
            raise Fault("E412", message, at="factor", expected=f"at least 1 / {min(x.grid)}")
        return grids.on_grid(x, made, x.features)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def macs(self, x: Wire) -> int:
        return 4 * x.features if self.mode == "bilinear" else 0

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.new(tape.out, x.item).turn(not x.is_channels_last)
        tape.passing(x.bytes + y.bytes if y.turned else 0)
        tape.function([x], [y], turned=0)
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import interpolate

        image = grids.as_maps(x, call)
        if min(self.grid((image.shape[-2], image.shape[-1]))) < 1:
            raise RunError(f"resize: a factor of {self.factor} leaves nothing of {[*image.shape[-2:]]}")
        size: Any = None if self.factor is not None else (self.rows, self.columns)
        corners = False if self.mode == "bilinear" else None
        y = interpolate(image, size=size, scale_factor=self.factor, mode=self.mode, align_corners=corners)
        return grids.as_tokens(y, call)
