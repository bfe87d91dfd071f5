"""Convert images to tokens: patches, class tokens.   D features, P patch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("patch_embed")
class PatchEmbed(Op):
    """Split an image [batch, C, height, width] into P x P patches and project each to D features, row by row.

    Weight [D, C, P, P], Glorot-uniform as a matrix; bias 0.
    """

    ports = (Port("x", "the image", main=True, kinds=("image",)),)
    patch: int = argument(..., "height and width of a patch, P", ge=1)
    features: int = argument(..., "width of a token, D", ge=1)
    stride: int | None = argument(None, "distance between patches (default: P, no overlap)", ge=1)
    bias: bool = argument(True, "whether to add a bias")
    source = "Dosovitskiy et al. 2021 (arXiv:2010.11929)"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens."""
        step = self.stride or self.patch
        return (height - self.patch) // step + 1, (width - self.patch) // step + 1

    def shape(self, x: Wire) -> Wire:
        assert x.grid
        step = self.stride or self.patch
        for side in x.grid:
            if side < self.patch or (side - self.patch) % step:
                sizes = f"{x.grid[0]} x {x.grid[1]}"
                near = self.patch + max(0, side - self.patch) // step * step
                raise Fault(
                    "E401",
                    f"patches of {self.patch} at a stride of {step} do not tile an image of {sizes}",
                    at="patch",
                    hint=f"sides that work: {near}, {near + step}",
                )
        rows, columns = self.grid(*x.grid)
        return Wire("sequence", self.features, rows * columns, (rows, columns))

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out = {"weight": Parameter((self.features, x.features, self.patch, self.patch), Init("xavier_uniform"))}
        if self.bias:
            out["bias"] = Parameter((self.features,), Init("zeros"), decay=False)
        return out

    def macs(self, x: Wire) -> int:
        return self.features * x.features * self.patch**2

    def cannot_stream(self, x: Wire) -> str | None:
        return "it reads a whole image"

    def makes_grid(self) -> bool:
        return True

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace.convolution import convolve

        return tape.in_float32(partial(convolve, tape, shape=tape.out), x, p["weight"], p.get("bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from einops import rearrange
        from torch.nn.functional import conv2d

        from seqblocks.kernels.numerics import in_float32

        step = self.stride or self.patch
        if x.shape[-2] < self.patch or x.shape[-1] < self.patch:
            raise RunError(f"an image of {x.shape[-2]} x {x.shape[-1]} is smaller than a patch of {self.patch}")
        if (x.shape[-2] - self.patch) % step or (x.shape[-1] - self.patch) % step:
            raise RunError(
                f"patches of {self.patch}, {step} apart, do not cover an image of {x.shape[-2]} x {x.shape[-1]}; "
                "crop or resize it first"
            )
        y = in_float32(partial(conv2d, stride=step), x, p["weight"], p.get("bias"))
        call.set_grid((y.shape[-2], y.shape[-1]))
        return rearrange(y, "batch features rows columns -> batch (rows columns) features")


@primitive("class_token")
class ClassToken(Op):
    """Insert a learned token at the beginning, middle or end. The result has no grid. Resets are an error."""

    reads = "all"
    position: Literal["first", "middle", "last"] = argument("first", "where the token is inserted")

    def shape(self, x: Wire) -> Wire:
        if not isinstance(x.length, int):
            hint = "give the input a length"
            raise Fault("E412", "class_token needs a sequence of known length", found=str(x), hint=hint)
        return x._replace(length=x.length + 1, grid=None, prefix=0)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((1, 1, x.features), Init("trunc_normal", (0.02,)), decay=False)}

    def ignores_resets(self, x: Wire) -> str | None:
        return "it inserts one token into the whole sequence"

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        at = {"first": 0, "middle": x.shape[1] // 2, "last": x.shape[1]}[self.position]
        token = tape.cast(tape.expand(p["weight"], (x.shape[0], 1, x.shape[2])), x.item)
        before, after = ((x.shape[0], n, x.shape[2]) for n in (at, x.shape[1] - at))
        return tape.cat([tape.slice(x, before), token, tape.slice(x, after)], 1)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        import torch

        at = {"first": 0, "middle": x.shape[1] // 2, "last": x.shape[1]}[self.position]
        token = p["weight"].expand(x.shape[0], 1, -1).to(x.dtype)
        return torch.cat([x[:, :at], token, x[:, at:]], 1)
