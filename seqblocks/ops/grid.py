"""Windows over the rows and columns of an image: the sizes that they make, and tokens as feature maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, Port
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

Grid = tuple[int, int]
MAX_WINDOW = 255  # kernel, stride, padding, dilation


class GridOp(Op):
    """Base of ops that read the tokens of an image, or an image, and whose result is tokens on another grid."""

    ports = (Port("x", "the tokens of an image, or an image", main=True, kinds=("sequence", "image")),)
    reads = "all"

    def ignores_resets(self, x: Wire) -> str | None:
        return "it reads neighbouring tokens of an image"

    def makes_grid(self) -> bool:
        return True


def window_grid(grid: Grid, span: int, stride: int, padding: int) -> Grid:
    """Return the rows and columns of all windows of `span` that fit; the rest at the end is not read, as in torch."""
    rows, columns = ((side + 2 * padding - span) // stride + 1 for side in grid)
    return rows, columns


def same_padding(kernel: int, dilation: int, verb: str) -> int:
    """Return the padding that keeps the grid at a stride of 1. Raises Fault E412 for an even kernel."""
    if kernel % 2 == 0:
        hint = f"kernel: {kernel - 1} or {kernel + 1}, or a `padding`"
        raise Fault("E412", f"the kernel of {verb} must be odd", at="kernel", found=str(kernel), hint=hint)
    return (kernel - 1) // 2 * dilation


def check_fits(grid: Grid, span: int, padding: int, verb: str) -> None:
    """Raise Fault E412 unless a window fits into the padded grid."""
    if min(grid) + 2 * padding >= span:
        return
    window = f"a window of {span} x {span}" + (f" with a padding of {padding}" if padding else "")
    raise Fault(
        "E412", f"{window} is larger than the {grid[0]} rows and {grid[1]} columns of the input of {verb}",
        at="kernel", found=f"{span}", expected=f"at most {min(grid) + 2 * padding}",
        hint=f"use a smaller kernel, or a padding of at least {-(-(span - min(grid)) // 2)}",
    )  # fmt: skip


def on_grid(x: Wire, grid: Grid, features: int) -> Wire:
    """Return the type of tokens on another grid of the same image."""
    length = grid[0] * grid[1]
    if x.kind == "image":
        return Wire("sequence", features, length, grid)
    before = x.length if isinstance(x.length, int) else 0
    rate = x.rate * before // length if x.rate * before % length == 0 else 1
    return x._replace(length=length, grid=grid, rate=max(rate, 1)).with_features(features)


def as_maps(x: Tensor, call: Call) -> Tensor:
    """View tokens [B, S, D] as feature maps [B, D, rows, columns], channels-last in memory; images are returned.

    Of one image, torch recognises this order only if the axes are split before they are moved.
    """
    return x if x.dim() == 4 else x.unflatten(1, call.grid_of(x)).permute(0, 3, 1, 2)


def as_tokens(y: Tensor, call: Call) -> Tensor:
    """Return feature maps [B, D, rows, columns] as tokens [B, S, D], and note their grid for later steps."""
    call.set_grid((y.shape[-2], y.shape[-1]))
    return y.flatten(2).mT


def check_maps(x: Tensor, span: int, padding: int, verb: str) -> None:
    """Raise RunError for feature maps that are smaller than a window: an image of another size than in the spec."""
    if min(x.shape[-2:]) + 2 * padding < span:
        window = f"a window of {span} x {span} with a padding of {padding}"
        raise RunError(f"{verb}: {window} is larger than the {x.shape[-2]} rows and {x.shape[-1]} columns of its input")
