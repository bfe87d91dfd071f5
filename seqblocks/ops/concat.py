"""Join wires along their features or along their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.op import FLOATS, Op, Port, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("concat")
class Concat(Op):
    """Join wires into one, along the features (or the channels of images) or along the tokens.

    Along the features, a vector is repeated for each token of the others. Along the tokens, the wires are sequences of
    the same width, one after another; the length of the result is the sum of theirs. The result has no grid. It streams
    if only the last one does, and the others are learned tokens or context of a fixed length.
    """

    ports = (Port("x", "the wires, in order", main=True, joins=True, several=True, kinds=FLOATS),)
    reads = "all"
    axis: Literal["features", "tokens"] = argument("features", "the axis along which the wires are joined")

    def joins_tokens(self) -> bool:
        return self.axis == "tokens"

    def looks_ahead(self, x: Wire) -> int | float:
        return float("inf") if self._joins_sequences(x) else 0

    def looks_back(self, x: Wire) -> int | float:
        return float("inf") if self._joins_sequences(x) else 0

    def cannot_stream(self, x: Wire) -> str | None:
        if not self._joins_sequences(x):
            return None
        return "it joins sequences of which more than the last one stream, or are of open length"

    def ignores_resets(self, x: Wire) -> str | None:
        return "it puts tokens before the first sequence only" if self.joins_tokens() else None

    def _joins_sequences(self, x: Wire) -> bool:
        """Return whether the tokens are not those of a stream after a fixed prefix."""
        return self.joins_tokens() and not x.prefix

    def facts(self, x: Wire) -> Facts:
        return x.facts

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return passes_on()

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return x

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x  # the module has joined the wires of the list


def passes_on() -> TokenFunction:
    """Return a function that returns its tokens unchanged, one or several."""
    return TokenFunction(lambda x: x, lambda batch, x: x)
