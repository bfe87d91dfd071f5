"""Arithmetic on wires: naming, adding, multiplying, scaling, constants."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from seqblocks.errors import Fault
from seqblocks.language.expressions import parse
from seqblocks.op import ANY, FLOATS, Op, Over, Port, argument, primitive
from seqblocks.parameters import LISTED, Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import UNBOUNDED, Facts, Wire
from seqblocks.widths import must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call

MAX_CONSTANT = 1e6  # magnitude of constants
FORMULA_MAX_FEATURES = 4096  # of a formula, which is evaluated for each


@primitive("identity")
class Identity(Op):
    """Pass a wire on unchanged, to name it or to split it with `as:`."""

    independent = "features"
    ports = (Port("x", "the input", main=True, kinds=(*FLOATS, "tokens")),)

    def facts(self, x: Wire) -> Facts:
        return x.facts

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return TokenFunction(lambda x: x)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return x

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x


@primitive("add")
class Add(Op):
    """Add another wire: x + with. See `residual` to add the input of some steps to their output."""

    independent = "features"
    ports = (
        Port("x", "the first summand", main=True, kinds=FLOATS, broadcast=True),
        Port("with", "the second summand, as wide as x", kinds=FLOATS, broadcast=True),
    )

    def shape(self, x: Wire, other: Wire) -> Wire:
        must_match("with", other, x.features, "the width of what it is added to")
        return x

    def facts(self, x: Wire, other: Wire) -> Facts:
        return x.facts.plus(other.facts)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, other: Value) -> Value:
        return tape.add(x, other)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, other: Tensor) -> Tensor:
        return x + other


@primitive("multiply")
class Multiply(Op):
    """Multiply by another wire, feature by feature: x * by. See `gate` for a factor with an activation."""

    independent = "features"
    ports = (
        Port("x", "the first factor", main=True, kinds=FLOATS, broadcast=True),
        Port("by", "the second factor, as wide as x", kinds=FLOATS, broadcast=True),
    )

    def shape(self, x: Wire, by: Wire) -> Wire:
        must_match("by", by, x.features, "the width of what it multiplies")
        return x

    def facts(self, x: Wire, by: Wire) -> Facts:
        return x.facts.times(by.facts)

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, by: Value) -> Value:
        return tape.multiply(x, by)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, by: Tensor) -> Tensor:
        return x * by


@primitive("divide")
class Divide(Op):
    """Divide by another wire, feature by feature: x / by."""

    independent = "features"
    ports = (
        Port("x", "the dividend", main=True, kinds=FLOATS, broadcast=True),
        Port("by", "the divisor, as wide as x", kinds=FLOATS, broadcast=True),
    )

    def shape(self, x: Wire, by: Wire) -> Wire:
        must_match("by", by, x.features, "the width of what it divides")
        return x

    def macs(self, x: Wire, by: Wire) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, by: Value) -> Value:
        return tape.divide(x, by)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, by: Tensor) -> Tensor:
        return x / by


@primitive("lerp")
class Lerp(Op):
    """Interpolate linearly towards another wire: x + by * (to - x); `by` is a wire or a learned weight [features]."""

    independent = "features"
    ports = (
        Port("x", "the start of the interpolation", main=True, kinds=ANY.kinds, broadcast=True),
        Port("to", "the end of the interpolation, as wide as x", kinds=ANY.kinds, broadcast=True),
        Port(
            "by", "the interpolation factor, as wide as x (default: a learned weight)", optional=True, kinds=ANY.kinds,
            broadcast=True,
        ),
    )

    def shape(self, x: Wire, to: Wire, by: Wire | None = None) -> Wire:
        must_match("to", to, x.features, "the width of x")
        if by:
            must_match("by", by, x.features, "the width of x")
        return x

    def facts(self, x: Wire, to: Wire, by: Wire | None = None) -> Facts:
        if by is None or by.facts.low < 0 or by.facts.high > 1:
            return UNBOUNDED
        return Facts(min(x.facts.low, to.facts.low), max(x.facts.high, to.facts.high))

    def parameters(self, x: Wire, to: Wire, by: Wire | None = None) -> dict[str, Parameter]:
        return {} if by else {"weight": Parameter((x.features,), Init("constant", (0.5,)), decay=False)}

    def macs(self, x: Wire, to: Wire, by: Wire | None = None) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, to: Value, by: Value | None = None) -> Value:
        return tape.add(x, tape.multiply(p["weight"] if by is None else by, tape.subtract(to, x)))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor, to: Tensor, by: Tensor | None = None) -> Tensor:
        return x + (p["weight"] if by is None else by) * (to - x)


@primitive("select")
class Select(Op):
    """Select `features` consecutive features, starting at index `first`."""

    ports = (Port("x", "the input", main=True, kinds=FLOATS),)
    features: int = argument(..., "how many", ge=1)
    first: int = argument(0, "index of the first feature, from 0", ge=0)

    def shape(self, x: Wire) -> Wire:
        end = self.first + self.features
        if end > x.features:
            raise Fault("E412", "the selection exceeds the width", at="first", expected=f"at least {end}", found=f"{x}")
        return x.with_features(self.features)

    def facts(self, x: Wire) -> Facts:
        return x.facts.range

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.slice(x, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        features = slice(self.first, self.first + self.features)
        return x[:, features] if x.dim() == 4 else x[..., features]


@primitive("scale")
class Scale(Op):
    """Multiply every feature by one fixed number: by * x."""

    independent = "features"
    ports = (Port("x", "the input", main=True, kinds=FLOATS),)
    by: float = argument(..., "the factor", ge=-1e6, le=1e6)

    def facts(self, x: Wire) -> Facts:
        return x.facts.times(Facts(self.by, self.by))

    def macs(self, x: Wire) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.unary(x, ())

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return self.by * x


@primitive("constant")
class Constant(Op):
    """Replace every token by the same vector: learned (weight [D]), fixed numbers, or numbers that are kept.

    With `learned: false`, the numbers are those of `value` or `formula`, and take no memory. With `persistent: true`
    too, they are a parameter `weight` [D] without gradient: `init:` may draw it, and checkpoints contain it. Only the
    number of tokens of the input matters, not their values.
    """

    ports = (ANY._replace(size_only=True),)
    features: int = argument(..., "width of the vector, D", ge=1)
    learned: bool = argument(True, "whether the vector is trained")
    value: float = argument(0.0, "the constant, or the initial value of each feature", ge=-1e6, le=1e6)
    formula: Annotated[str, Over(("feature", "features"))] | None = argument(
        None, "the values instead: an expression of `feature`, the index from 0, and of `features`"
    )
    persistent: bool = argument(False, "whether a vector that is not trained is kept in the state_dict")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values by feature, or one for all. Raises Fault."""
        return (self.value,) if self.formula is None else _numbers(self.formula, self.features)

    def shape(self, x: Wire) -> Wire:
        if self.formula is not None and self.value:
            raise Fault("E210", "`value` and `formula` are mutually exclusive", at="formula", hint="remove one of them")
        if self.learned and self.persistent:
            message, hint = "a learned vector is kept anyway", "add `learned: false`, or remove `persistent`"
            raise Fault("E210", message, at="persistent", hint=hint)
        if max(map(abs, self.numbers)) > MAX_CONSTANT:
            raise Fault("E209", "the values are too large", at="formula", expected=f"at most {MAX_CONSTANT:,.0f}")
        return x.with_features(self.features)

    def facts(self, x: Wire) -> Facts:
        return UNBOUNDED if self.learned or self.persistent else Facts(min(self.numbers), max(self.numbers))

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        if not (self.learned or self.persistent):
            return {}
        init = Init("constant", self.numbers) if self.formula is None else Init(LISTED, self.numbers)
        return {"weight": Parameter((self.features,), init, decay=False, trained=self.learned)}

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        if "weight" in p:
            return tape.expand(p["weight"], tape.out)
        numbers = tape.new(tape.out if self.formula is None else (self.features,))
        return numbers if self.formula is None else tape.expand(numbers, tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        places = (*x.shape[:-1], self.features)
        if "weight" in p:
            return p["weight"].expand(places)
        return x.new_full(places, self.value) if self.formula is None else x.new_tensor(self.numbers).expand(places)


def _numbers(formula: str, features: int) -> tuple[float, ...]:
    return _evaluated(formula, features)


_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers call it instead of tracing the parser


@lru_cache(maxsize=256)
def _evaluated(formula: str, features: int) -> tuple[float, ...]:
    """Return the values of a formula for each feature. Raises Fault."""
    if features > FORMULA_MAX_FEATURES:
        message = f"a formula computes at most {FORMULA_MAX_FEATURES:,} features"
        raise Fault("E504", message, at="formula", found=f"{features:,}")
    expression = parse(formula)
    try:
        return tuple(float(expression.evaluate({"feature": at, "features": features})) for at in range(features))
    except Fault as fault:
        fault.at = "formula"
        raise
