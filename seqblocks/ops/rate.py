"""Downsample and upsample tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Tokens, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


def merged_tokens(x: Wire, factor: int, at: str) -> Wire:
    """Return the wire with `factor` tokens merged into one; `at` names the argument. Raises Fault (E401)."""
    if isinstance(x.length, int) and x.length % factor:
        near = max(x.length // factor, 1) * factor
        hint = f"lengths that work: {near}, {near + factor}"
        raise Fault("E401", f"{at} ({factor}) must divide the number of tokens ({x.length})", at=at, hint=hint)
    return x.at_rate(x.rate * factor)


def split_tokens(x: Wire, factor: int) -> Wire:
    """Return the wire with each token split into `factor`."""
    return x.at_rate(x.rate * Fraction(1, factor))


class PartOfWindow(RunError):
    """Tokens that are no whole windows of `factor` tokens."""

    def __init__(self, message: str, factor: int) -> None:
        super().__init__(message)
        self.factor = factor

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.factor)


def check_tokens(x: Tensor, factor: int, verb: str) -> None:
    """Raise RunError unless x [batch, seq, features] holds whole windows of `factor` tokens."""
    if x.shape[1] % factor:
        raise PartOfWindow(f"{verb} by {factor} needs a multiple of that many tokens, not {x.shape[1]}", factor)


def _of_frames(several: Callable[[int, Tensor], Tensor]) -> TokenFunction:
    """Return a function of several tokens. A single token is only passed to it if the factor is 1."""
    return TokenFunction(lambda x: x, several)


class _Rate(Op):
    """Base of both ops. No sequence may start in the middle of a window, and a stream advances by whole windows."""

    factor: int = argument(..., "repeats per token, or tokens merged into one", ge=1, le=2**20)
    reads = "all"

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def cannot_stream(self, x: Wire) -> str | None:
        return None  # the model requires frames of whole windows (`graph.frame_size`)

    def ignores_resets(self, x: Wire) -> str | None:
        return "a window may span two sequences"


@primitive("downsample")
class Downsample(_Rate):
    """Merge windows of `factor` tokens into one: their mean, or the last. A stream takes whole windows."""

    method: Literal["mean", "last"] = argument("mean", "how to merge a window")

    def shape(self, x: Wire) -> Wire:
        return merged_tokens(x, self.factor, "factor")

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        factor, means = self.factor, self.method == "mean"

        def several(batch: int, x: Tensor) -> Tensor:
            windows = x.view(-1, factor, batch, x.shape[1])
            return (windows.mean(1) if means else windows[:, -1]).reshape(-1, x.shape[1])

        return _of_frames(several)

    def looks_ahead(self, x: Wire) -> Tokens:
        return x.rate * (self.factor - 1)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        if self.method == "mean":
            return tape.mean(x, tape.out)
        y = tape.slice(x, tape.out)
        y.rows = x.dense  # equally far apart
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        check_tokens(x, self.factor, self.verb)
        windows = x.unflatten(1, (-1, self.factor))
        return windows.mean(2) if self.method == "mean" else windows[:, :, -1]


@primitive("upsample")
class Upsample(_Rate):
    """Repeat each token `factor` times."""

    def shape(self, x: Wire) -> Wire:
        return split_tokens(x, self.factor)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        factor = self.factor

        def several(batch: int, x: Tensor) -> Tensor:
            copies = x.view(-1, 1, batch, x.shape[1]).expand(-1, factor, -1, -1)
            return copies.reshape(-1, x.shape[1])

        return _of_frames(several)

    def looks_ahead(self, x: Wire) -> Tokens:
        return 0  # copies come at or after the token that they copy

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.new(tape.out, x.item)
        tape.function([x], [y])
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.factor, 1)
