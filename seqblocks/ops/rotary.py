"""Rotary positions.   D features are rotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, argument, primitive
from seqblocks.rotary_scaling import Scaling, unscaled
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_divide, must_have_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seqblocks.roles import Transition
    from seqblocks.runtime.call import Call


@primitive("rotary")
class Rotary(Op):
    """Rotary position encoding: rotate pairs of features of each head by angles proportional to the position.

    Of D features of a head, pair j is rotated by position / base^(2 j / D). halves: the pair are features j and
    j + D / 2; interleaved: features 2 j and 2 j + 1. Positions restart at a reset. State: the position of the next
    token, int64. `attention` has `rotary:` for its q and k.

    `scaling` changes the angles for longer sequences, and multiplies the rotated features by an attention factor:
    `{type: linear, factor: 4}`; `{type: yarn, factor: 40, original_length: 4096}`, also with beta_fast, beta_slow,
    mscale, mscale_all_dim, truncate; `{type: llama3, factor: 8, original_length: 8192}`, also with low_freq_factor,
    high_freq_factor; `{type: longrope, factor: 32, original_length: 4096, short_factor: [...], long_factor: [...]}`,
    whose long factors apply if `length` is larger than the original; `{type: dynamic, factor: 2, original_length: 2048,
    length: 8192}`. Each may set attention_factor. Other entries are named as in transformers. Angles depend on the
    `length` that is given, never on that of a call: a stream equals the whole sequence.

    `positions: grid` is for the tokens of an image: the first half of the pairs is rotated by the row, the second by
    the column, pair j of each half by position / base^(4 j / D). With `halves` it is the rotation of Qwen2-VL's images,
    with `interleaved` that of EVA-02's.
    """

    independent = "heads"
    reads = "past"  # the number of tokens before a token
    heads: int = argument(..., "number of heads; must divide the width into an even number of features", ge=1)
    base: float = argument(10000.0, "base of the wavelengths", ge=1)
    features: int | None = argument(
        None, "number of features of each head to rotate, D (default: all from `first` on)", ge=2
    )
    first: int = argument(0, "index of the first feature of each head that rotates", ge=0)
    layout: Literal["halves", "interleaved"] = argument("halves", "which features are a pair")
    scaling: Scaling | None = argument(None, "other angles, for longer sequences: see above")
    positions: Literal["sequence", "grid"] = argument(
        "sequence", "what rotates: the position in the sequence, or the row and the column in an image"
    )
    source = (
        "RoFormer (arXiv:2104.09864); a part of the features as in GPT-NeoX (arXiv:2204.06745); "
        "yarn: arXiv:2309.00071; longrope: arXiv:2402.13753; llama3: arXiv:2407.21783; "
        "grid: EVA-02 (arXiv:2303.11331), Qwen2-VL (arXiv:2409.12191)"
    )

    def turned(self, x: Wire) -> int:
        """Return the number of features of a head that rotate."""
        return self.features or x.features // self.heads - self.first

    def shape(self, x: Wire) -> Wire:
        width = must_divide(self.heads, x.features, "heads", "the width")
        room = width - self.first
        if self.first and room < 2:
            message, expected = "no pair of features is left to rotate", f"at most {width - 2} (a head has {width})"
            raise Fault("E401", message, at="first", expected=expected, found=str(self.first))
        if self.features is None and room % 2:
            what = f"a head has {width}" + (f", of which {self.first} stay" if self.first else "")
            raise Fault("E401", f"rotary positions rotate pairs of features, but {what}", at="heads")
        if self.features and (self.features % 2 or self.features > room):
            after = f" from feature {self.first} on" if self.first else ""
            message = "rotary positions rotate pairs of features"
            expected = f"an even number up to {room} (a head{after})"
            raise Fault("E401", message, at="features", expected=expected, found=str(self.features))
        if self.scaling:
            self.scaling.check(self.turned(x), self.base)
        if self.on_grid:
            self._check_grid(x)
        return x

    @property
    def on_grid(self) -> bool:
        return self.positions == "grid"

    def _check_grid(self, x: Wire) -> None:
        """Raise Fault (E210, E401, E407) unless pairs of features can be rotated by rows and columns."""
        must_have_grid(x, "`positions: grid`", at="positions", instead="`positions: sequence`")
        if self.scaling:
            hint = "remove `scaling:`"
            raise Fault("E210", "angles are scaled for sequences, not for rows and columns", at="scaling", hint=hint)
        if self.turned(x) % 4:
            message = "rows and columns each rotate half of the pairs of features"
            expected = "a multiple of 4 of each head"
            raise Fault("E401", message, at="positions", expected=expected, found=f"{self.turned(x)}")

    def is_upright(self, x: Wire) -> bool:
        return self.on_grid

    def keeps_apart(self, x: Wire) -> bool:
        return self.on_grid

    def cannot_stream(self, x: Wire) -> str | None:
        return "it has a position for each row and column of an image" if self.on_grid else None

    def ignores_resets(self, x: Wire) -> str | None:
        return self.cannot_stream(x)

    def facts(self, x: Wire) -> Facts:
        preserves = self.scaling is None or self.scaling.amplitude() == 1
        return Facts(unit=x.facts.unit if preserves and x.facts.unit == self.heads else 0)

    def state(self, x: Wire) -> dict[str, State]:
        return {} if self.on_grid else {"position": State((), "int64")}

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        from seqblocks.ops.positions import position_after

        return position_after(x, call)

    def _rates(self, width: int, device: torch.device) -> Tensor:
        import torch

        if self.on_grid:
            return torch.tensor(2 * [*unscaled(width // 2, self.base)], dtype=torch.float64, device=device)
        rates = self.scaling.rates(width, self.base) if self.scaling else unscaled(width, self.base)
        return torch.tensor(rates, dtype=torch.float64, device=device)

    def _options(self) -> dict[str, Any]:
        amplitude = self.scaling.amplitude() if self.scaling else 1.0
        return {"interleaved": self.layout == "interleaved", "amplitude": amplitude}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.positions import prepare_turning

        if self.on_grid:
            return None
        turns: dict[int, Callable[[Tensor, Tensor], Tensor]] = {}  # by width

        def step(position: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            heads = x.view(x.shape[0], self.heads, -1)
            width = self.features or heads.shape[2] - self.first
            if width not in turns:
                turns[width] = prepare_turning(self._rates(width, x.device), **self._options())
            y = turns[width](heads.narrow(2, self.first, width), position)
            return self._joined(heads, y, width).flatten(1), position + 1

        return TokenFunction(step)

    def _joined(self, heads: Tensor, turned: Tensor, width: int) -> Tensor:
        """Return whole heads [..., width of a head], given the features that were turned."""
        import torch

        if width == heads.shape[-1]:
            return turned
        return torch.cat([heads[..., : self.first], turned, heads[..., self.first + width :]], -1)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace import attention

        heads = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        whole = tape.view(x, heads)
        width = self.features or heads[-1] - self.first
        part = whole if width == heads[-1] else tape.slice(whole, (*heads[:-1], width))
        y = attention.rotary(tape, part)
        if width < heads[-1]:
            rest = (self.first, heads[-1] - self.first - width)
            before, after = (tape.slice(whole, (*heads[:-1], n)) for n in rest)
            y = tape.cat([before, y, after])
        return tape.view(y, x.shape)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels.positions import running_positions, turned

        heads = x.unflatten(-1, (self.heads, -1))
        width = self.features or heads.shape[-1] - self.first
        state = {}
        if self.on_grid:
            index = grid_positions(call.grid_of(x), width // 4, x.device)
        else:
            before = call.state["position"] if call.state else None
            index, after = running_positions(x.shape[0], x.shape[1], before, call.resets, x.device)
            index = index[:1] if before is None and call.resets is None else index  # one row of angles for all
            state = {"position": after}
        part = heads.narrow(-1, self.first, width)
        y = turned(part, index, self._rates(width, x.device), **self._options())
        return self._joined(heads, y, width).flatten(-2), state


def grid_positions(size: tuple[int, int], pairs: int, device: torch.device) -> Tensor:
    """Return the row of each token for the first pairs, then its column for as many more [1, tokens, 2 pairs]."""
    import torch

    rows, columns = (torch.arange(n, device=device) for n in size)
    places = torch.stack([rows[:, None].expand(size), columns.expand(size)], -1).flatten(0, 1)
    return places.repeat_interleave(pairs, 1).unsqueeze(0)
