"""Select consecutive tokens of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, argument, primitive
from seqblocks.ops.concat import passes_on
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Size, Tokens, Wire, less

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("slice")
class Slice(Op):
    """Select consecutive tokens: `count` from index `first` on, or the `last` ones. The result has no grid.

    `slice: {first: 4}` after `prefix: {count: 4}` removes the prefix, and streams.
    """

    reads = "all"
    first: int | None = argument(None, "index of the first token, from 0 (default: 0)", ge=0)
    count: int | None = argument(None, "how many tokens (default: all from `first` on)", ge=1)
    last: int | None = argument(None, "how many tokens from the end, in place of `first` and `count`", ge=1)

    def check_arguments(self) -> None:
        """Raise Fault E210 for tokens that are given twice, E411 for none at all."""
        if self.last and (self.first is not None or self.count):
            raise Fault("E210", "the tokens are given twice: by `last`, and by `first` or `count`", at="last")
        if self.first is None and not (self.count or self.last):
            hint = "slice: {first: 1}, {first: 0, count: 4}, or {last: 4}"
            raise Fault("E411", "slice needs to know which tokens to select", hint=hint)

    def shape(self, x: Wire) -> Wire:
        self.check_arguments()
        first = self.first or 0
        needed = self.last or first + (self.count or 1)
        if isinstance(x.length, int) and needed > x.length:
            at = "last" if self.last else "count" if self.count else "first"
            expected = f"at least {needed}"
            raise Fault("E412", "the selection exceeds the length", at=at, expected=expected, found=f"{x}")
        count: Size | None = self.last or self.count
        if count is None and self._is_in_prefix(x):
            return x._replace(length=less(x.length, first), grid=None, origin=None, prefix=x.prefix - first)
        if count is None and not isinstance(x.length, int):
            message = "the number of tokens from `first` to the end is not known"
            raise Fault("E412", message, at="first", found=f"{x}", hint="add `count:`, or give the input a length")
        if count is None:
            assert isinstance(x.length, int)
            count = x.length - first
        return x._replace(length=count, grid=None, origin=None, prefix=0)

    def _is_in_prefix(self, x: Wire) -> bool:
        """Return whether only tokens of a prefix are left out."""
        return not (self.count or self.last) and 0 < (self.first or 0) <= x.prefix

    def facts(self, x: Wire) -> Facts:
        return x.facts

    def looks_ahead(self, x: Wire) -> Tokens:
        return float("inf") if self.last else max((self.first or 0) - x.prefix, 0) * x.rate

    def looks_back(self, x: Wire) -> Tokens:
        return 0 if self._is_in_prefix(x) else float("inf")

    def cannot_stream(self, x: Wire) -> str | None:
        return None if self._is_in_prefix(x) else "it selects tokens of the whole sequence"

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return passes_on()

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.slice(x, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        if call.phase == "stream" and not (self.count or self.last):
            return x  # the tokens that it leaves out came before the stream
        first = x.shape[1] - self.last if self.last else self.first or 0
        end = x.shape[1] if self.last or not self.count else first + self.count
        if not 0 <= first < end <= x.shape[1]:
            raise RunError(f"slice needs at least {self.last or end} tokens, and the sequence has {x.shape[1]}")
        return x[:, first:end]
