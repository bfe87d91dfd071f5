"""Into and out of the feature space: images, tokens, positions.   D features, P patch, V vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter, State
from seqblocks.types import Wire


@primitive("patch_embed")
class PatchEmbed(Op):
    """Cut an image [batch, C, height, width] into P x P patches and map each to D features, row by row.

    Weight [D, C, P, P], Glorot-uniform as one matrix; bias 0.
    """

    ports = (Port("x", "the image", main=True, kinds=("image",)),)
    patch: int = argument(..., "height and width of a patch, P", ge=1)
    features: int = argument(..., "width of a token, D", ge=1)
    stride: int | None = argument(None, "distance between patches (default: P, no overlap)", ge=1)
    bias: bool = argument(True, "whether a bias is added")
    source = "Dosovitskiy et al. 2021 (arXiv:2010.11929)"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
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

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from einops import rearrange
        from torch.nn.functional import conv2d

        step = self.stride or self.patch
        if x.shape[-2] < self.patch or x.shape[-1] < self.patch:
            raise RunError(f"an image of {x.shape[-2]} x {x.shape[-1]} is smaller than a patch of {self.patch}")
        if (x.shape[-2] - self.patch) % step or (x.shape[-1] - self.patch) % step:
            raise RunError(
                f"patches of {self.patch}, {step} apart, do not cover an image of {x.shape[-2]} x {x.shape[-1]}; "
                "crop or resize it first"
            )
        y = conv2d(x, p["weight"], p.get("bias"), stride=step)
        call.set_grid((y.shape[-2], y.shape[-1]))
        return rearrange(y, "batch features rows columns -> batch (rows columns) features")


@primitive("position_embed")
class PositionEmbed(Op):
    """Add a learned vector per position: [1, rows, columns, D] for an image's tokens, [1, length, D] otherwise.

    For an image of another size the grid is interpolated (bicubic), also where `rows` and `columns` are given.
    """

    reads = "past"  # the number of tokens before a token
    length: int | None = argument(None, "number of positions, where the input's length is open", ge=1)
    rows: int | None = argument(None, "rows of positions over an image (default: those of the tokens)", ge=1)
    columns: int | None = argument(None, "columns of positions over an image (default: those of the tokens)", ge=1)
    source = "Dosovitskiy et al. 2021 (arXiv:2010.11929)"

    def positions(self, x: Wire) -> tuple[int, ...]:
        if x.grid and self.length is None:
            return (self.rows or x.grid[0], self.columns or x.grid[1])
        if self.rows or self.columns:
            found = f"{x} without rows and columns" if x.grid is None else f"length {self.length} as well"
            raise Fault("E407", "rows and columns of positions are for the tokens of an image", found=found)
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
        return {"weight": Parameter(shape, Init("trunc_normal", (0.02,)), decay=False)}

    def state(self, x: Wire) -> dict[str, State]:
        return {"position": State((), "int64")} if len(self.positions(x)) == 1 else {}

    def is_upright(self, x: Wire) -> bool:
        return len(self.positions(x)) == 2

    def cannot_stream(self, x: Wire) -> str | None:
        return "it has a place for each row and column of an image" if len(self.positions(x)) == 2 else None

    def ignores_resets(self, x: Wire) -> str | None:
        return self.cannot_stream(x)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from seqblocks.kernels.positions import running_positions

        weight = p["weight"]
        if weight.ndim == 4:
            from einops import rearrange

            places = _resized(weight, call.grid_of(x))
            return x + rearrange(places, "1 rows columns features -> 1 (rows columns) features"), {}
        before = call.state["position"] if call.state else None
        count = weight.shape[1]
        if call.grid and call.grid.size and self.length is None and x.shape[1] != count and not call.streaming:
            raise RunError(
                f"position_embed has places for {count} tokens of an image, and this one has {x.shape[1]}; "
                "before class_token it has a grid, which is interpolated for images of other sizes"
            )
        if before is None and x.shape[1] > count and call.resets is None:
            raise RunError(f"position {count} is past the {count} of position_embed")
        index, after = running_positions(x.shape[0], x.shape[1], before, call.resets, x.device)
        # Only on a CPU: elsewhere this would wait for the device, which checks the index itself.
        if x.device.type == "cpu" and not call.compiling and index.numel() and int(index.max()) >= count:
            raise RunError(f"position {int(index.max())} is past the {count} of position_embed")
        return x + weight[0][index], {"position": after}


def _resized(weight: Any, grid: tuple[int, int]) -> Any:
    import torch
    from einops import rearrange
    from torch.nn.functional import interpolate

    if tuple(weight.shape[1:3]) == tuple(grid):
        return weight
    image = rearrange(weight, "1 rows columns features -> 1 features rows columns")
    image = image if weight.dtype == torch.float64 else image.float()
    resized = interpolate(image, size=grid, mode="bicubic").to(weight.dtype)
    return rearrange(resized, "1 features rows columns -> 1 rows columns features")


@primitive("class_token")
class ClassToken(Op):
    """Insert a learned token first, in the middle or last. The result has no grid. Resets are an error."""

    reads = "all"
    position: Literal["first", "middle", "last"] = argument("first", "where the token is inserted")

    def shape(self, x: Wire) -> Wire:
        if not isinstance(x.length, int):
            hint = "give the input a length"
            raise Fault("E412", "class_token needs a sequence of known length", found=str(x), hint=hint)
        return replace(x, length=x.length + 1, grid=None)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((1, 1, x.features), Init("trunc_normal", (0.02,)), decay=False)}

    def ignores_resets(self, x: Wire) -> str | None:
        return "it inserts one token into the whole sequence"

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        import torch

        at = {"first": 0, "middle": x.shape[1] // 2, "last": x.shape[1]}[self.position]
        token = p["weight"].expand(x.shape[0], 1, -1).to(x.dtype)
        return torch.cat([x[:, :at], token, x[:, at:]], 1)


@primitive("embed")
class Embed(Op):
    """Look up a learned vector for each token number. Weight [V, D]; customarily not decayed."""

    ports = (Port("x", "token numbers", main=True, kinds=("tokens",)),)
    features: int = argument(..., "width of a token, D", ge=1)

    def shape(self, x: Wire) -> Wire:
        return Wire("sequence", self.features, x.length, x.grid)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        shape = (x.features, self.features)
        return {"weight": Parameter(shape, Init("small", (float(self.features),)), decay=False)}

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        import torch
        from torch.nn.functional import embedding

        try:
            return embedding(x if x.dtype in (torch.int64, torch.int32) else x.long(), p["weight"])
        except IndexError:  # raised on a CPU; other devices stop with an assertion of their own
            raise RunError(f"a token is outside the vocabulary of {p['weight'].shape[0]}") from None


@primitive("unembed")
class Unembed(Op):
    """Scores for each token number: logits = W x + b, W [V, D]. `tie: embed` shares the embedding's weight."""

    vocabulary: int | None = argument(None, "number of tokens, V (default: the model's input)", ge=1, inherit="tokens")
    bias: bool = argument(True, "whether a bias is added")

    def shape(self, x: Wire) -> Wire:
        if self.vocabulary is None:
            hint = "vocabulary: 50304"
            raise Fault("E202", "unembed needs `vocabulary`: the model's input is not tokens", hint=hint)
        return x.with_features(self.vocabulary)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        vocabulary = self.vocabulary or 0
        out = {"weight": Parameter((vocabulary, x.features), Init("small", (float(x.features),)))}
        if self.bias:
            out["bias"] = Parameter((vocabulary,), Init("zeros"), decay=False)
        return out

    def macs(self, x: Wire) -> int:
        return x.features * (self.vocabulary or 0)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        from torch.nn.functional import linear

        return linear(x, p["weight"], p.get("bias"))
