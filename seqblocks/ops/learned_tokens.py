"""Learned sequences: as a wire of their own, or before the tokens of another.   D features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqblocks.errors import Fault
from seqblocks.op import FLOATS, Op, Port, X, argument, primitive
from seqblocks.ops.concat import passes_on
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import UNBOUNDED, Facts, Wire, summed

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("learned_tokens")
class LearnedTokens(Op):
    """A learned sequence, [count, D]: queries of a cross attention, registers, class tokens.

    Only the number of sequences of the input matters. A stream computes what depends on these tokens alone only once.
    """

    ports = (
        Port("x", "any wire", main=True, size_only=True, kinds=(*FLOATS, "tokens")),
    )  # fmt: skip
    reads = "all"
    fixed = True
    usual = ("features",)
    count: int = argument(..., "number of tokens", ge=1, le=2**20)
    features: int | None = argument(None, "width, D (default: that of the input)", ge=1)
    std: float = argument(0.02, "standard deviation of the initial values", ge=0)

    def shape(self, x: Wire) -> Wire:
        if self.features is None and x.kind == "tokens":
            hint = "features: 64, or put it after embed"
            raise Fault("E202", "learned_tokens needs a width, as token ids have none", hint=hint)
        return Wire("sequence", self.features or x.features, self.count, context=True)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": _tokens(self.count, self.features or x.features, self.std)}

    def looks_ahead(self, x: Wire) -> int:
        return 0

    def cannot_stream(self, x: Wire) -> str | None:
        return None

    def ignores_resets(self, x: Wire) -> str | None:
        return None

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.expand(p["weight"], tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor | None) -> Tensor:
        return p["weight"].expand(call.batch if x is None else x.shape[0], -1, -1)


@primitive("prefix")
class Prefix(Op):
    """Put learned tokens [count, D] before the sequence. The length grows by `count`; the result has no grid.

    A stream reads them once, before its first token, so that `slice: {first: COUNT}` must remove them before the
    output. Resets are an error.
    """

    reads = "all"
    ports = (X,)
    count: int = argument(..., "number of tokens", ge=1, le=2**20)
    std: float = argument(0.02, "standard deviation of the initial values", ge=0)
    source = "meta tokens of Hymba (arXiv:2411.13676); registers (arXiv:2309.16588)"

    def shape(self, x: Wire) -> Wire:
        prefix = 0 if x.context else x.prefix + self.count
        return x._replace(length=summed([x.length or "seq", self.count]), grid=None, origin=None, prefix=prefix)

    def facts(self, x: Wire) -> Facts:
        return UNBOUNDED

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": _tokens(self.count, x.features, self.std)}

    def looks_ahead(self, x: Wire) -> int:
        return 0

    def looks_back(self, x: Wire) -> int:
        return 0

    def cannot_stream(self, x: Wire) -> str | None:
        return None

    def ignores_resets(self, x: Wire) -> str | None:
        return "it puts tokens before the first sequence only"

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return passes_on()

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        tokens = tape.cast(tape.expand(p["weight"], (x.shape[0], self.count, x.shape[2])), x.item)
        return tape.cat([tokens, x], 1)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Any) -> Tensor:
        import torch

        if call.phase == "stream":
            return x  # the prefix was read before the first token
        if x is None:  # before the first token, no other tokens are known
            return p["weight"].expand(call.batch, -1, -1)
        return torch.cat([p["weight"].expand(x.shape[0], -1, -1).to(x.dtype), x], 1)


def _tokens(count: int, features: int, std: float) -> Parameter:
    return Parameter((1, count, features), Init("normal", (0.0, std)), decay=False)
