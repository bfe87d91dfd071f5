"""Pool a sequence to one vector, or turn tokens back into an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import RunError
from seqblocks.op import Op, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_have_grid

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

Mode = Literal["mean", "max", "first", "cls", "middle", "last", "bilateral_mean", "bilateral_concat"]


@primitive("pool")
class Pool(Op):
    """Pool the whole sequence to one vector.

    mean: mean of all tokens. max: maximum of each feature (or, after a linear head as in Vision Mamba, of each class).
    first, middle, last: that token; cls: the class token at the beginning. bilateral_mean, bilateral_concat: of the
    first and the last token. With resets, `last` is the last token of the last sequence; other modes are an error.
    """

    mode: Mode = argument("mean", "pooling mode")
    source = "bilateral: Vision-LSTM (arXiv:2406.04303)"

    def shape(self, x: Wire) -> Wire:
        width = 2 * x.features if self.mode == "bilateral_concat" else x.features
        return Wire("vector", width)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def cannot_stream(self, x: Wire) -> str | None:
        return None if self.mode == "last" else f"mode {self.mode} reads the whole sequence"

    def ignores_resets(self, x: Wire) -> str | None:
        return self.cannot_stream(x)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        match self.mode:
            case "mean":
                return tape.mean(x, tape.out)
            case "max":
                return tape.extreme(x, tape.out)
            case "bilateral_mean":
                first, last = tape.slice(x, tape.out), tape.slice(x, tape.out)
                return tape.unary(tape.add(first, last), ())
            case "bilateral_concat":
                part = (x.shape[0], x.shape[2])
                return tape.cat([tape.slice(x, part), tape.slice(x, part)])
        return tape.slice(x, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        import torch

        if x.shape[1] == 0:
            raise RunError("pool needs at least one token, but the sequence is empty")
        match self.mode:
            case "mean":
                return x.mean(1)
            case "max":
                return x.amax(1)
            case "first" | "cls":
                return x[:, 0]
            case "middle":
                return x[:, (x.shape[1] - 1) // 2]
            case "last":
                return x[:, -1]
            case "bilateral_mean":
                return (x[:, 0] + x[:, -1]) / 2
            case "bilateral_concat":
                return torch.cat([x[:, 0], x[:, -1]], -1)


@primitive("to_image")
class ToImage(Op):
    """Convert the tokens of an image to feature maps [batch, features, rows, columns]."""

    reads = "all"

    def is_upright(self, x: Wire) -> bool:
        return True

    def shape(self, x: Wire) -> Wire:
        must_have_grid(x, "to_image")
        assert x.grid
        return Wire("image", x.features, None, x.grid, x.origin)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.turn(x, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from einops import rearrange

        rows, columns = call.grid_of(x)
        pattern = "batch (rows columns) features -> batch features rows columns"
        return rearrange(x, pattern, rows=rows, columns=columns)
