"""Operations on the features of each head: repeat, join, merge, roll, softmax and normalisation by the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.errors import Fault
from seqblocks.op import ANY, Op, Port, X, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.types import Facts, Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("repeat_heads")
class RepeatHeads(Op):
    """Repeat the features of each head: heads a b become a a b b."""

    independent = "heads"
    heads: int = argument(1, "number of heads; must divide the width", ge=1)
    times: int = argument(..., "number of copies of each head", ge=1)

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x.with_features(self.times * x.features)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.new(tape.out, x.item)
        tape.function([x], [y])
        return y

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).repeat_interleave(self.times, -2).flatten(-2)


@primitive("join_heads")
class JoinHeads(Op):
    """Concatenate each head with the same head of another wire: heads a b and c d become a c b d."""

    independent = "heads"
    ports = (X, Port("with", "the second part of each head", main=False))
    heads: int = argument(..., "number of heads; must divide both widths", ge=1)

    def shape(self, x: Wire, other: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        must_divide(self.heads, other.features, "heads", "the width of `with`", at="with")
        return x.with_features(x.features + other.features)

    def facts(self, x: Wire, other: Wire) -> Facts:
        return Facts(min(x.facts.low, other.facts.low), max(x.facts.high, other.facts.high))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, other: Value) -> Value:
        return tape.cat([x, other])

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, other: Tensor) -> Tensor:
        import torch

        parts = [each.unflatten(-1, (self.heads, -1)) for each in (x, other)]
        return torch.cat(parts, -1).flatten(-2)


@primitive("merge_attention")
class MergeAttention(Op):
    """Join two results of attention with `logsumexp` as if one softmax had read the keys of both.

    Each head of x and of `with` is DV values y and the log of the sum of exponentials, L:

        y = (exp(L1) y1 + exp(L2) y2) / (exp(L1) + exp(L2))      L = log(exp(L1) + exp(L2))

    Each of the two may have keys of its own rate and window.
    """

    independent = "heads"
    exact = mixed = True
    ports = (X, Port("with", "the other result"))
    heads: int = argument(..., "number of heads; must divide the width", ge=1)
    logsumexp: bool = argument(False, "whether the result has L as well, for a further `merge_attention`")
    source = "online softmax (arXiv:1805.02867); states of attention: FlashInfer (arXiv:2501.01005)"

    def shape(self, x: Wire, other: Wire) -> Wire:
        width = must_divide(self.heads, x.features, "heads", "the width")
        if width < 2:
            hint = "add `logsumexp: true` to the attention"
            message = "a head needs values and the log of the sum of exponentials"
            raise Fault("E402", message, at="heads", expected="at least 2 features of each head", hint=hint)
        must_match("with", other, x.features, "the width of x")
        return x if self.logsumexp else x.with_features(x.features - self.heads)

    def macs(self, x: Wire, other: Wire) -> int:
        return 2 * x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, other: Value) -> Value:
        width = x.shape[-1] // self.heads
        heads = (*x.shape[:-1], self.heads, width)
        (a, of_a), (b, of_b) = (tape.split(tape.view(each, heads), [width - 1, 1]) for each in (x, other))
        share = tape.unary(tape.subtract(of_a, of_b), ["output"])
        y = tape.add(b, tape.multiply(share, tape.subtract(a, b)))
        if self.logsumexp:
            y = tape.cat([y, tape.pointwise(of_a, of_b, keeps=[of_a, of_b])])
        return tape.view(y, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, other: Tensor) -> Tensor:
        import torch

        (a, of_a), (b, of_b) = (each.unflatten(-1, (self.heads, -1)).tensor_split([-1], -1) for each in (x, other))
        share = torch.sigmoid(of_a - of_b)
        y = b + share * (a - b)
        return (torch.cat([y, torch.logaddexp(of_a, of_b)], -1) if self.logsumexp else y).flatten(-2)


class _OfHeads(Op):
    """Base of ops that process each head separately and keep its width."""

    ports = (ANY,)
    heads: int = argument(1, "number of heads; must divide the width", ge=1)

    def shape(self, x: Wire) -> Wire:
        must_divide(self.heads, x.features, "heads", "the width")
        return x


@primitive("roll_heads")
class RollHeads(_OfHeads):
    """Roll the features within each head by `by` positions; the last ones wrap around to the front."""

    by: int = argument(..., "number of positions", ge=1)

    def facts(self, x: Wire) -> Facts:
        return x.facts

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.unary(x, ())

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).roll(self.by, -1).flatten(-2)


@primitive("softmax")
class Softmax(_OfHeads):
    """Softmax within each head: exp(x) / sum(exp(x)), in at least float32."""

    def facts(self, x: Wire) -> Facts:
        return Facts(0.0, 1.0)

    def macs(self, x: Wire) -> int:
        return 2 * x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.cast(tape.unary(tape.cast(x, max(x.item, 4)), ["output"]), x.item)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        # without a name for the exact numbers, whose memory is then free for the result
        by_heads = (x if x.dtype == _float64() else x.float()).unflatten(-1, (self.heads, -1)).softmax(-1)
        return by_heads.flatten(-2).to(x.dtype)


@primitive("sum_norm")
class SumNorm(_OfHeads):
    """Divide the features of each head by their sum: x / (sum(x) + eps), in at least float32."""

    eps: float = argument(1e-4, "added to the sum", ge=0)
    source = "queries and keys of linear attention (arXiv:2102.11174)"

    def macs(self, x: Wire) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        exact = tape.view(tape.cast(x, max(x.item, 4)), (*x.shape[:-1], self.heads, x.shape[-1] // self.heads))
        return tape.cast(tape.view(tape.divide(exact, tape.sum(exact, (*exact.shape[:-1], 1))), x.shape), x.item)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        exact = (x if x.dtype == _float64() else x.float()).unflatten(-1, (self.heads, -1))
        return (exact / (exact.sum(-1, keepdim=True) + self.eps)).flatten(-2).to(x.dtype)


def _float64() -> torch.dtype:
    import torch

    return torch.float64
