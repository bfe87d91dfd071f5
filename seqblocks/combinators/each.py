"""Arguments of `each`: an axis that is folded into the batch."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument

Axis = Literal["windows", "rows", "columns", "features", "frames", "places"]
ON_GRIDS = ("windows", "rows", "columns")


@combinator("each")
class Each(Combinator):
    """Cut each sequence into several along an axis, and run the steps on each of them, with the same parameters.

    windows: the tokens of an image in windows of `size` rows and columns; the steps see a grid of that size. With
    `shift`, windows begin that many rows and columns later, and the last ones hold tokens of both edges, which
    `attention` keeps apart; a window as high (or wide) as the image is not shifted. With `pad`, rows and columns of
    zeros are added below and on the right until windows tile the image, and removed after the steps. rows, columns:
    the tokens of each row or column of an image. frames: `size` consecutive tokens, such as those of an image in a
    video. places: the tokens at the same place of all frames of `size` tokens. features: each feature, or `size`
    consecutive ones, as a sequence of all tokens.

    The steps keep the tokens of `input`. They may read other wires with these tokens, which are cut in the same way,
    except over `features`, where each sequence reads all of such a wire, as it does a context. Over `features` they
    may also merge tokens, or make a vector, and over `frames` a vector becomes one token for each frame. Over
    `features` and `places` the steps carry states from chunk to chunk. Frames and places stream in whole frames;
    windows, rows and columns do not stream.
    """

    axis: Axis = argument(..., "the axis that becomes part of the batch")
    size: int | None = argument(
        None, "rows and columns of a window, tokens of a frame, or features of a sequence (default: 1)", ge=1, le=65_536
    )
    shift: int = argument(0, "rows and columns by which windows are shifted; less than size", ge=0)
    pad: bool = argument(False, "whether zeros are added where windows do not tile the image")
    steps: Any = argument(..., "the steps to run on each of the sequences")
    main_kinds = ("sequence",)

    @property
    def carries(self) -> bool:
        """Whether steps carry states: the number of sequences does not depend on the length of the input."""
        return self.axis in ("features", "places")

    @property
    def on_grid(self) -> bool:
        return self.axis in ON_GRIDS

    def tiles(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the number of windows along both axes of an image, including those that hold zeros."""
        return -(-grid[0] // self.width), -(-grid[1] // self.width)

    def padded(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of an image whose edges are padded as far as windows need."""
        down, across = self.tiles(grid)
        return down * self.width, across * self.width

    @property
    def in_frames(self) -> bool:
        return self.axis in ("frames", "places")

    @property
    def width(self) -> int:
        """The size: of windows, frames, or groups of features."""
        return self.size or 1
