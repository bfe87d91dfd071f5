"""The module of an `each`: an axis becomes part of the batch, and the steps run on all sequences at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from seqblocks.errors import RunError
from seqblocks.graph import EachNode
from seqblocks.ops.rate import check_tokens
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call, Grid, Size
from seqblocks.runtime.modules import Place, gridded, makes
from seqblocks.state import States, map_state

# by axis: tokens before, and sequences after; `lanes` is their number, for each sequence of the batch
PATTERNS = {
    "features": ("batch seq (lanes features)", "(batch lanes) seq features"),
    "frames": ("batch (lanes size) features", "(batch lanes) size features"),
    "places": ("batch (seq lanes) features", "(batch lanes) seq features"),
    "rows": ("batch (lanes columns) features", "(batch lanes) columns features"),
    "columns": ("batch (rows lanes) features", "(batch lanes) rows features"),
}
WINDOWS = "batch (rows p) (columns q) features", "(batch rows columns) (p q) features"


@makes(EachNode)
class Each(Body):
    """Run the steps on each window, row, column, frame, place or feature."""

    def __init__(self, node: EachNode, place: Place) -> None:
        super().__init__(node.bodies[""], place, node.verb)
        arguments = node.arguments
        self._axis, self._size, self._shift = arguments.axis, arguments.width, arguments.shift
        self._carries = arguments.carries
        self._padded = arguments.padded if arguments.pad else None
        self._gridded = gridded(node, place)
        wire = node.wires[0]
        assert wire
        self._known = {"size": self._size} if self._axis == "frames" else {}
        self._whole = node.reads_whole(place.types)
        self._lanes: int = wire.features // self._size if self._axis == "features" else self._size

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        x, *others = tensors
        if call.phase == "context":  # nothing in here depends on the context only
            return None, {}  # type: ignore[return-value]
        if self._axis == "windows":
            return self._in_windows(x, others, call), {}
        if self._axis in ("frames", "places"):
            check_tokens(x, self._size, f"each over {self._axis}")
        batch, lanes = x.shape[0], self._count(x, call)
        before, after = PATTERNS[self._axis]
        parts = rearrange(x, f"{before} -> {after}", lanes=lanes, **self._known)
        given = [self._given(other, at, after, before, lanes) for at, other in enumerate(others)]
        y, states = super()._compute(parts, *given, call=self._inner(call, lanes))
        if y.dim() == 2:  # a vector of each sequence
            after = after.replace(" seq", "").replace(" size", "")
            before = "batch (lanes features)" if self._axis == "features" else "batch lanes features"
        states = map_state(lambda state: state.unflatten(0, (batch, lanes)), states) if self._carries else {}
        return rearrange(y, f"{after} -> {before}", batch=batch, lanes=lanes), states

    def _given(self, x: Tensor, at: int, after: str, before: str, lanes: int) -> Tensor:
        """Return a wire from outside for all sequences: cut like the input, or the same for each."""
        if self._whole[at]:
            return x.repeat_interleave(lanes, 0)
        return rearrange(x, f"{before} -> {after}", lanes=lanes, **self._known)

    def _count(self, x: Tensor, call: Call) -> int:
        """Return the number of sequences that are made of one."""
        if self._axis == "frames":
            return x.shape[1] // self._size
        if self._carries:
            return self._lanes
        rows, columns = self._grid_of(x, call)
        return rows if self._axis == "rows" else columns

    def _inner(self, call: Call, lanes: int) -> Call:
        """Return the call of the steps, whose states are those of all sequences."""
        if not self._carries:
            return Call(call.training, directed=call.directed, routed=call.routed)  # whole sequences, also in a stream
        state = map_state(lambda x: x.flatten(0, 1), call.state) if call.state else call.state
        resets = None if call.resets is None else call.resets.repeat_interleave(lanes, 0)
        grid = call.grid if self._axis == "features" else None
        return replace(call, state=state, resets=resets, grid=grid, segments=None, made=None, last_only=False)

    # --- windows ------------------------------------------------------------------------------------------------------

    def _in_windows(self, x: Tensor, others: list[Tensor], call: Call) -> Tensor:
        given = self._grid_of(x, call)
        rows, columns = size = self._padded(given) if self._padded else given
        side = self._size
        if rows % side or columns % side:
            raise RunError(f"windows of {side} x {side} do not tile the {rows} rows and {columns} columns of an image")
        moved = (self._shift if rows > side else 0, self._shift if columns > side else 0)
        count = rows // side * (columns // side)
        windows = [
            each.repeat_interleave(count, 0) if whole else self._cut(each, given, size, moved)
            for each, whole in zip((x, *others), (False, *self._whole), strict=True)
        ]
        segments = _segments(size, side, moved, x.device).repeat(x.shape[0], 1) if any(moved) else None
        inner = Call(call.training, grid=Grid((side, side)), directed=call.directed, routed=call.routed,
                     segments=segments)
        y, _ = super()._compute(*windows, call=inner)
        before, after = WINDOWS
        counts = {"rows": rows // side, "columns": columns // side}
        image = rearrange(y, f"{after} -> {before}", batch=x.shape[0], **counts, p=side, q=side)
        if any(moved):
            image = image.roll(moved, (1, 2))
        return image[:, : given[0], : given[1]].flatten(1, 2) if size != given else image.flatten(1, 2)

    def _cut(self, x: Tensor, given: Size, size: Size, moved: Size) -> Tensor:
        """Return the windows of tokens x [batch, seq, features], whose image is padded to a size and rolled."""
        before, after = WINDOWS
        image = x.unflatten(1, given)
        if size != given:
            image = pad(image, (0, 0, 0, size[1] - given[1], 0, size[0] - given[0]))
        if any(moved):
            image = image.roll((-moved[0], -moved[1]), (1, 2))
        return rearrange(image, f"{before} -> {after}", p=self._size, q=self._size)

    def _grid_of(self, x: Tensor, call: Call) -> Size:
        if call.grid:
            call.grid.step = self._gridded
        return call.grid_of(x)

    def extra_repr(self) -> str:
        size = f", size={self._size}" if self._axis not in ("rows", "columns") else ""
        more = (f", shift={self._shift}" if self._shift else "") + (", pad=True" if self._padded else "")
        return f"axis={self._axis}{size}{more}"


def _segments(size: Size, side: int, moved: Size, device: Any) -> Tensor:
    """Return the segment of each token of each window [windows, tokens], for an image whose edges were rolled over."""
    over = [torch.arange(n, device=device) >= n - by for n, by in zip(size, moved, strict=True)]
    segments = 2 * over[0].long().unsqueeze(1) + over[1].long()
    return rearrange(segments, "(rows p) (columns q) -> (rows columns) (p q)", p=side, q=side)
