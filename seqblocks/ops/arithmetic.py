"""Arithmetic on wires: naming, adding, multiplying, scaling, constants."""

from __future__ import annotations

from typing import Any

from seqblocks.errors import Fault
from seqblocks.op import ANY, Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.types import UNBOUNDED, Facts, Kind, Wire
from seqblocks.widths import must_match

FLOATS: tuple[Kind, ...] = ("sequence", "vector", "image")


@primitive("identity")
class Identity(Op):
    """Pass a wire on unchanged, to name it or to split it with `as:`."""

    independent = "features"
    ports = (Port("x", "the input", main=True, kinds=(*FLOATS, "tokens")),)

    def facts(self, x: Wire) -> Facts:
        return x.facts

    def prepare_step(self, p: Any) -> Any:
        return lambda x: x

    def memory(self, tape: Any, p: Any, x: Any) -> Any:
        return x

    def forward(self, p: Any, call: Any, x: Any) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any, other: Any) -> Any:
        return tape.add(x, other)

    def forward(self, p: Any, call: Any, x: Any, other: Any) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any, by: Any) -> Any:
        return tape.multiply(x, by)

    def forward(self, p: Any, call: Any, x: Any, by: Any) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any, by: Any) -> Any:
        return tape.divide(x, by)

    def forward(self, p: Any, call: Any, x: Any, by: Any) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any, to: Any, by: Any = None) -> Any:
        return tape.add(x, tape.multiply(p["weight"] if by is None else by, tape.subtract(to, x)))

    def forward(self, p: Any, call: Any, x: Any, to: Any, by: Any = None) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any) -> Any:
        return tape.slice(x, tape.out)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
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

    def memory(self, tape: Any, p: Any, x: Any) -> Any:
        return tape.unary(x, ())

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        return self.by * x


@primitive("constant")
class Constant(Op):
    """Replace every token by the same vector: learned (weight [features]), or a fixed number.

    Only the number of tokens of the input matters, not their values.
    """

    ports = (ANY._replace(size_only=True),)
    features: int = argument(..., "width of the vector", ge=1)
    learned: bool = argument(True, "whether the vector is a parameter initialised to `value`, or a constant")
    value: float = argument(0.0, "the constant, or the initial value of each feature", ge=-1e6, le=1e6)

    def shape(self, x: Wire) -> Wire:
        return x.with_features(self.features)

    def facts(self, x: Wire) -> Facts:
        return UNBOUNDED if self.learned else Facts(self.value, self.value)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        if not self.learned:
            return {}
        return {"weight": Parameter((self.features,), Init("constant", (self.value,)), decay=False)}

    def memory(self, tape: Any, p: Any, x: Any) -> Any:
        return tape.expand(p["weight"], tape.out) if self.learned else tape.new(tape.out)

    def forward(self, p: Any, call: Any, x: Any) -> Any:
        places = (*x.shape[:-1], self.features)
        return p["weight"].expand(places) if self.learned else x.new_full(places, self.value)
