"""Log decays of recurrences, computed from a projection.   D features, H heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, X, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import UNBOUNDED, Facts, Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

DecayKind = Literal["softplus", "rate", "logsigmoid", "bounded", "sigmoid", "exp", "rg_lru"]
WITH_RATE = ("softplus", "rate", "bounded")  # kinds that own A_log
WITH_BIAS = ("softplus", "bounded")


def in_float32(x: Tensor) -> Tensor:
    """Return x in at least float32, because decays close to 1 lose precision in 16 bits."""
    import torch

    return x if x.dtype == torch.float64 else x.float()


@primitive("time_step")
class TimeStep(Op):
    """Step sizes of a state space: softplus(x + bias), clamped to [least, most]. Computed in at least float32."""

    independent = "features"
    least: float = argument(0.0, "lower bound of the step size", ge=0)
    most: float = argument(math.inf, "upper bound of the step size", gt=0)
    source = "Mamba-2 (arXiv:2405.21060)"
    exact = True

    def shape(self, x: Wire) -> Wire:
        if self.least >= self.most:
            expected = f"less than most, {self.most:g}"
            raise Fault("E209", "'least' must be below 'most'", at="least", expected=expected, found=f"{self.least:g}")
        return x

    def facts(self, x: Wire) -> Facts:
        return Facts(self.least, self.most)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        init = Init("inverse_softplus", (1e-3, 0.1, 1e-4))
        return {"bias": Parameter((x.features,), init, decay=False, full_precision=True)}

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        steps = tape.unary(tape.add(tape.cast(x, max(x.item, 4)), p["bias"]))
        return tape.unary(steps, backward=2 * steps.numbers)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import softplus

        return softplus(in_float32(x) + p["bias"]).clamp(self.least, self.most)


@primitive("log_decay")
class LogDecay(Op):
    """Log decays, at most 0, for `linear_attention` and `gated_recurrence`; at least float32.

    | kind | log decay | used by |
    |---|---|---|
    | softplus | -exp(A_log) softplus(x + dt_bias) | Gated DeltaNet, KDA |
    | rate | -exp(A_log) x, for steps x of `time_step` | Mamba-2 |
    | logsigmoid | logsigmoid(x) / temperature; with wire `lower`, log(lower + (1 - lower) sigmoid(x)) | GLA, HGRN2 |
    | bounded | bound sigmoid(exp(A_log) (x + dt_bias)) | KDA with bounded gates |
    | sigmoid | bound sigmoid(x) | RWKV-7 |
    | exp | -exp(x) | RWKV-6 |
    | rg_lru | -8 softplus(rate) sigmoid(x) | Griffin |

    A_log is [H], one for each head's D / H features; dt_bias and rate are [D].
    """

    independent = "heads"
    ports = (X, Port("lower", "kind logsigmoid: the smallest decays, from 0 to 1, as wide as x", optional=True))
    kind: DecayKind = argument(..., "formula of the log decay, see the table")
    heads: int = argument(0, "heads with one A_log each; must divide the width (0: one per feature)", ge=0)
    temperature: float = argument(16.0, "kind logsigmoid: divisor of the log decay", gt=0)
    bound: float = argument(-5.0, "kinds bounded and sigmoid: the strongest log decay", lt=0)
    exact = True

    def shape(self, x: Wire, lower: Wire | None = None) -> Wire:
        if self.heads:
            must_divide(self.heads, x.features, "heads", "the width")
        if lower and self.kind != "logsigmoid":
            raise Fault("E209", f"`kind: {self.kind}` does not take 'lower'", at="lower", hint="kind: logsigmoid")
        if lower:
            must_match("lower", lower, x.features, "the width of x")
        return x

    def facts(self, x: Wire, lower: Wire | None = None) -> Facts:
        match self.kind:
            case "bounded" | "sigmoid":
                return Facts(self.bound, 0.0)
            case "rate" if x.facts.low < 0:
                return UNBOUNDED
        return UNBOUNDED if lower and not 0 <= lower.facts.low <= lower.facts.high <= 1 else Facts(high=0.0)

    def parameters(self, x: Wire, lower: Wire | None = None) -> dict[str, Parameter]:
        out = {}
        if self.kind in WITH_RATE:
            rates = (self.heads or x.features,)
            init = Init("zeros") if self.kind == "bounded" else Init("log_of_uniform", (1.0, 16.0))
            out["A_log"] = Parameter(rates, init, decay=False, full_precision=True)
        if self.kind in WITH_BIAS:
            steps = Init("inverse_softplus", (1e-3, 0.1, 1e-4))
            out["dt_bias"] = Parameter((x.features,), steps, decay=False, full_precision=True)
        if self.kind == "rg_lru":
            out["rate"] = Parameter((x.features,), Init("ring", (0.9, 0.999)), decay=False, full_precision=True)
        return out

    def macs(self, x: Wire, lower: Wire | None = None) -> int:
        return x.features

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from torch.nn.functional import softplus

        if self.kind != "softplus":
            return TokenFunction(partial(self.forward, p, None))  # it treats each feature of each token by itself
        rates, bias = -p["A_log"].exp(), p["dt_bias"]
        rates = rates.repeat_interleave(len(bias) // len(rates))
        return TokenFunction(lambda x, lower=None: softplus(x + bias).mul_(rates))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, lower: Value | None = None) -> Value:
        x = tape.cast(x, max(x.item, 4))
        x = tape.add(x, p["dt_bias"]) if self.kind in WITH_BIAS else x
        rate = tape.expand(tape.unary(p["A_log"], ["output"]), x.shape[-1:]) if "A_log" in p else tape.new(())
        match self.kind:
            case "softplus":
                return tape.multiply(tape.unary(rate, ()), tape.unary(x))
            case "rate":
                return tape.multiply(tape.unary(rate, ()), x)
            case "bounded" | "sigmoid":
                x = tape.multiply(rate, x) if "A_log" in p else tape.unary(x, ())
                return tape.unary(tape.unary(x, ["output"]), ())
            case "exp":
                return tape.unary(tape.unary(x, ["output"]), ())
            case "rg_lru":
                return tape.multiply(tape.unary(tape.unary(p["rate"]), ()), tape.unary(x, ["output"]))
        alone = tape.logsigmoid(x)
        if lower is None:
            return tape.unary(alone, ())
        lower = tape.cast(lower, x.item)
        first = tape.unary(tape.where(lower, lower, tape.new(())))
        second = tape.add(tape.unary(tape.unary(lower, ())), alone)
        both = tape.pointwise(first, second, keeps=[first, second], backward=2 * x.bytes)
        small = tape.unary(tape.unary(tape.unary(x, ())), ["output"])
        return tape.where(both, both, tape.add(alone, tape.multiply(lower, small)))

    def forward(self, p: Mapping[str, Tensor], call: Call | None, x: Tensor, lower: Tensor | None = None) -> Tensor:
        from torch.nn.functional import logsigmoid, softplus

        x = in_float32(x)
        x = x + p["dt_bias"] if self.kind in WITH_BIAS else x
        rate = p["A_log"].exp().repeat_interleave(x.shape[-1] // p["A_log"].shape[0]) if "A_log" in p else 1.0
        match self.kind:
            case "softplus":
                return -rate * softplus(x)
            case "rate":
                return -rate * x
            case "bounded" | "sigmoid":
                return self.bound * (rate * x).sigmoid()
            case "exp":
                return -x.exp()
            case "rg_lru":
                return -8 * softplus(p["rate"]) * x.sigmoid()
        if lower is None:
            return logsigmoid(x) / self.temperature
        return at_least(lower, x)


def at_least(lower: Tensor, x: Tensor) -> Tensor:
    """Return log(lower + (1 - lower) sigmoid(x)), for 0 <= lower < 1."""
    import torch
    from torch.nn.functional import logsigmoid

    lower, alone = lower.to(x.dtype), logsigmoid(x)
    both = torch.logaddexp(torch.where(lower > 0, lower, 1.0).log(), torch.log1p(-lower) + alone)
    return torch.where(lower > 0, both, alone + lower * (-x).clamp(max=80).exp())  # the logarithm of 0 has no gradient


@primitive("lower_decays")
class LowerDecays(Op):
    """Learned lower bounds of the decay of each feature in each layer, which increase with the layer.

    Weight [layers, D]: softmax over the layers, then cumulative sums minus that of the first layer, whose bound is 0.
    Each token gets the bounds of all layers, [batch, seq, layers * D]; use `select` for one layer. Only the number of
    tokens of the input matters, not their values.
    """

    ports = (X._replace(size_only=True),)
    layers: int = argument(..., "number of layers", ge=1)
    features: int = argument(..., "decays per layer, D", ge=1)
    source = "HGRN (arXiv:2311.04823)"
    exact = True

    def shape(self, x: Wire) -> Wire:
        return x.with_features(self.layers * self.features)

    def facts(self, x: Wire) -> Facts:
        return Facts(0.0, 1.0)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((self.layers, self.features), Init("zeros"), decay=False, full_precision=True)}

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        shares = tape.unary(tape.unary(p["weight"], ["output"]), ())
        return tape.expand(tape.view(tape.unary(shares, ()), (shares.numbers,)), tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        shares = p["weight"].softmax(0).cumsum(0)
        return (shares - shares[:1]).flatten().expand(*x.shape[:-1], -1)
