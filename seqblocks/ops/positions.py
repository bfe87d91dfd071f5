"""Position encodings: learned, sinusoidal, or rotary.   D features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import Transition
    from seqblocks.runtime.call import Call


def position_after(x: Tensor, call: Call) -> Transition:
    """Return the position after tokens x, for `roles.transition`."""
    from seqblocks.kernels.positions import running_positions

    def move(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"position": running_positions(x.shape[0], x.shape[1], state["position"], call.resets, x.device)[1]}

    return move


@primitive("position_embed")
class PositionEmbed(Op):
    """Add a learned vector per position: [1, rows, columns, D] for an image's tokens, [1, length, D] otherwise.

    For images of another size the grid is interpolated (bicubic), including grids set by `rows` and `columns`. With
    `learned: false` they are a parameter without gradient, which `init:` may set: `init: {weight: grid_waves}` are the
    positions of DiT.
    """

    reads = "past"  # the number of tokens before a token
    usual = ("length",)
    length: int | None = argument(None, "number of positions, if the length of the input is not fixed", ge=1)
    rows: int | None = argument(None, "rows of the position grid of an image (default: those of the tokens)", ge=1)
    columns: int | None = argument(
        None, "columns of the position grid of an image (default: those of the tokens)", ge=1
    )
    learned: bool = argument(True, "whether the positions are trained")
    source = "Dosovitskiy et al. 2021 (arXiv:2010.11929)"

    def positions(self, x: Wire) -> tuple[int, ...]:
        if x.grid and self.length is None:
            return (self.rows or x.grid[0], self.columns or x.grid[1])
        if self.rows or self.columns:
            found = f"{x} without rows and columns" if x.grid is None else f"length {self.length} as well"
            raise Fault("E407", "rows and columns require the tokens of an image", found=found)
        length = self.length or x.length
        if not isinstance(length, int):
            hint = "length: 2048, here or in the model's input"
            raise Fault("E202", "position_embed needs the number of positions", hint=hint)
        if isinstance(x.length, int) and x.length > length:
            raise Fault("E412", "fewer positions than tokens", at="length", expected=str(x.length), found=str(length))
        return (length,)

    def shape(self, x: Wire) -> Wire:
        self.positions(x)
        return x

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        shape = (1, *self.positions(x), x.features)
        return {"weight": Parameter(shape, Init("trunc_normal", (0.02,)), decay=False, trained=self.learned)}

    def state(self, x: Wire) -> dict[str, State]:
        return {"position": State((), "int64")} if len(self.positions(x)) == 1 else {}

    def is_upright(self, x: Wire) -> bool:
        return len(self.positions(x)) == 2

    def cannot_stream(self, x: Wire) -> str | None:
        return "it has a position for each row and column of an image" if len(self.positions(x)) == 2 else None

    def ignores_resets(self, x: Wire) -> str | None:
        return self.cannot_stream(x)

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        return position_after(x, call)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        weight = p["weight"]
        if len(weight.shape) == 4:
            return tape.add(x, tape.view(weight, (1, weight.shape[1] * weight.shape[2], weight.shape[3])))
        places = tape.new(x.shape, weight.item)
        tape.function([weight], [places], [tape.new(x.shape[:2], 8)], weight.bytes)
        return tape.add(x, places)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels.dispatch.compiled import batched
        from seqblocks.kernels.positions import running_positions

        weight = p["weight"]
        if weight.ndim == 4:
            from einops import rearrange

            places = resized_grid(weight, call.grid_of(x))
            return x + rearrange(places, "1 rows columns features -> 1 (rows columns) features"), {}
        before = call.state["position"] if call.state else None
        count = weight.shape[1]
        is_whole = not call.streaming and call.relay is None
        if call.grid and call.grid.size and self.length is None and x.shape[1] != count and is_whole:
            raise RunError(
                f"position_embed has places for {count} tokens of an image, and this one has {x.shape[1]}; "
                "before class_token it has a grid, which is interpolated for images of other sizes"
            )
        if before is None and x.shape[1] > count and call.resets is None:
            raise RunError(f"position {count} is past the {count} of position_embed")
        index, after = running_positions(x.shape[0], x.shape[1], before, call.resets, x.device)
        # Only on a CPU: on other devices this would synchronise, and they check the index themselves.
        known = x.device.type == "cpu" and not call.compiling and index.numel() and not batched(index)
        if known and int(index.max()) >= count:
            first = int(index[index >= count].min())
            raise RunError(f"position {first} is past the {count} of position_embed")
        return x + weight[0][index], {"position": after}


def resized_grid(weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate positions [1, rows, columns, features] of an image to another grid (bicubic)."""
    import torch
    from einops import rearrange
    from torch.nn.functional import interpolate

    if tuple(weight.shape[1:3]) == tuple(grid):
        return weight
    image = rearrange(weight, "1 rows columns features -> 1 features rows columns")
    image = image if weight.dtype == torch.float64 else image.float()
    resized = interpolate(image, size=grid, mode="bicubic").to(weight.dtype)
    return rearrange(resized, "1 features rows columns -> 1 rows columns features")


@primitive("sinusoids")
class Sinusoids(Op):
    """Add sines and cosines of the position in the sequence, with wavelengths from 2 pi to 2 pi base.

    interleaved: features 2 j and 2 j + 1 get the sine and cosine of position / base^(2 j / D). halves: features j and
    j + D / 2 get those of position / base^(j / (D / 2 - 1)), as in tensor2tensor and Whisper. Positions restart at a
    reset. State: the position of the next token, int64.
    """

    reads = "past"  # the number of tokens before a token
    layout: Literal["interleaved", "halves"] = argument("interleaved", "arrangement of the sines and cosines")
    base: float = argument(10000.0, "base of the wavelengths", ge=1)
    source = "Vaswani et al. 2017 (arXiv:1706.03762)"

    def shape(self, x: Wire) -> Wire:
        if x.features % 2 or (x.features == 2 and self.layout == "halves"):
            expected = f"an even width of at least {4 if self.layout == 'halves' else 2}"
            raise Fault("E401", "sinusoids need pairs of features", expected=expected, found=str(x.features))
        return x

    def facts(self, x: Wire) -> Facts:
        return x.facts.plus(Facts(-1, 1))

    def state(self, x: Wire) -> dict[str, State]:
        return {"position": State((), "int64")}

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        return position_after(x, call)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        half = (*x.shape[:-1], x.shape[-1] // 2)
        angle, sine, cosine = (tape.new(half, 8) for _ in range(3))
        pairs = tape.new(x.shape, 8)
        del sine, cosine
        y = tape.add(x, tape.new(x.shape, x.item) if x.item != 8 else pairs)
        del angle
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels.positions import running_positions

        before = call.state["position"] if call.state else None
        index, after = running_positions(x.shape[0], x.shape[1], before, call.resets, x.device)
        half = x.shape[-1] // 2
        steps = half - 1 if self.layout == "halves" else half
        rates = self.base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / steps)
        angle = index.unsqueeze(-1).double() * rates
        pairs = torch.stack([angle.sin(), angle.cos()], -2 if self.layout == "halves" else -1)
        return x + pairs.flatten(-2).to(x.dtype), {"position": after}
