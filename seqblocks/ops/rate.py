"""Fewer tokens, and more again."""

from __future__ import annotations

from typing import Any, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, argument, primitive
from seqblocks.types import Facts, Wire


def merged_tokens(x: Wire, factor: int, at: str) -> Wire:
    """Return the wire with one token for `factor`, the value of the argument `at`. Raises Fault (E401)."""
    if isinstance(x.length, int) and x.length % factor:
        near = max(x.length // factor, 1) * factor
        hint = f"lengths that work: {near}, {near + factor}"
        raise Fault("E401", f"{at} {factor} does not divide {x.length} tokens", at=at, hint=hint)
    return x.at_rate(x.rate * factor)


def split_tokens(x: Wire, factor: int, at: str, verb: str) -> Wire:
    """Return the wire with `factor` tokens for one. Raises Fault (E401) where these are more than the input had."""
    if x.rate % factor:
        merged = f"the tokens here were made one from {x.rate}"
        hint = merged if x.rate > 1 else "downsample comes first"
        raise Fault("E401", f"{verb} by {factor} makes more tokens than there were", at=at, hint=hint)
    return x.at_rate(x.rate // factor)


def check_tokens(x: Any, factor: int, verb: str) -> None:
    """Raise RunError unless x [batch, seq, features] holds whole windows of `factor` tokens."""
    if x.shape[1] % factor:
        raise RunError(f"{verb} by {factor} needs a multiple of that many tokens, not {x.shape[1]}")


class _Rate(Op):
    """Base of both: no sequence starts in the middle of a window, and a stream continues by whole windows."""

    factor: int = argument(..., "tokens per window, or repeats per token", ge=1, le=2**20)
    reads = "all"

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def cannot_stream(self, x: Wire) -> str | None:
        return None  # the model asks for frames that hold whole windows (`graph.frame_size`)

    def ignores_resets(self, x: Wire) -> str | None:
        return "a window of tokens may hold two sequences"


@primitive("downsample")
class Downsample(_Rate):
    """Merge windows of `factor` tokens into one: their mean, or the last. Streams then take frames of whole windows."""

    method: Literal["mean", "last"] = argument("mean", "how a window becomes one token")

    def shape(self, x: Wire) -> Wire:
        return merged_tokens(x, self.factor, "factor")

    def looks_ahead(self, x: Wire) -> int:
        return x.rate * (self.factor - 1)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        check_tokens(x, self.factor, self.verb)
        windows = x.unflatten(1, (-1, self.factor))
        return windows.mean(2) if self.method == "mean" else windows[:, :, -1]


@primitive("upsample")
class Upsample(_Rate):
    """Repeat each token `factor` times."""

    def shape(self, x: Wire) -> Wire:
        return split_tokens(x, self.factor, "factor", self.verb)

    def looks_ahead(self, x: Wire) -> int:
        return 0  # a copy is no earlier than the token that it copies

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        return x.repeat_interleave(self.factor, 1)
