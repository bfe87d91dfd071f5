"""Types of wires: named axes with integer or symbolic sizes, and a kind.

image      [batch, channels, height, width]  float
tokens     [batch, seq]                      integers below `features`
sequence   [batch, seq, features]            float; `grid` says how an image's tokens were cut (rows, columns)
vector     [batch, features]                 float
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from seqblocks.errors import Fault, Note, Span
from seqblocks.record import Record

Kind = Literal["image", "tokens", "sequence", "vector"]
Size = int | str  # a number, or the name of an axis whose size is known only in a call
Rate = int | Fraction
Tokens = float | Fraction  # a number of tokens of the model's input: a part of one if it became several


class Origin(NamedTuple):
    """The step that determined a width, or a number of tokens."""

    verb: str
    span: Span | None


class Facts(NamedTuple):
    """Known properties of the values on a wire: low <= value <= high, and the number of heads with norm 1.

    With `low == high` the wire is constant, so no gradient flows through it. unit: number of unit-norm heads, or 0.
    """

    low: float = -math.inf
    high: float = math.inf
    unit: int = 0

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "any number" if self.high == math.inf else f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high == math.inf else f"{self.low:g} to {self.high:g}"

    @property
    def is_constant(self) -> bool:
        return self.low == self.high

    @property
    def range(self) -> Facts:
        """Return only the bounds, which hold for any selection of the features."""
        return self._replace(unit=0) if self.unit else self

    def plus(self, other: Facts) -> Facts:
        return Facts(self.low + other.low, self.high + other.high)

    def times(self, other: Facts) -> Facts:
        ends = [a * b if a and b else 0.0 for a in self[:2] for b in other[:2]]  # 0 * inf is 0 here
        return Facts(min(ends), max(ends))

    def or_zero(self) -> Facts:
        """Return the facts that hold after replacing some values by 0."""
        return Facts(min(self.low, 0.0), max(self.high, 0.0))


UNBOUNDED = Facts()


class Wire(Record):
    """The type of a value. Immutable; ops derive new ones with `with_features` and friends.

    Wires are equal if all but their origins are.
    """

    kind: Kind
    features: int
    length: Size | None = None
    grid: tuple[int, int] | None = None
    origin: Origin | None = None
    rate: Rate = 1  # tokens of the model's input per token of this wire; below 1 if each of them becomes several
    sample_rate: float | None = None  # tokens of the model's input per second
    facts: Facts = UNBOUNDED
    context: bool = False  # depends on no streaming input, so a stream computes it once
    prefix: int = 0  # how many of its first tokens come before those of the stream, and depend on none of them
    lanes: tuple[int | str, ...] = ()  # the sequences that `each` makes of one: their number, or its axis if open

    @property
    def _compared(self) -> tuple[Any, ...]:
        like = self.kind, self.features, self.length, self.grid, self.rate, self.sample_rate
        return *like, self.facts, self.context, self.prefix, self.lanes

    def __eq__(self, other: object) -> bool:
        return self._compared == other._compared if isinstance(other, Wire) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Wire is immutable: make another with _replace({name}=…)")

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self._names if name in self.__dict__)
        return f"Wire({', '.join(values)})"

    @property
    def axes(self) -> tuple[Size, ...]:
        """Sizes by axis, `batch` first: `batch*7` for the 7 sequences that `each` makes of one."""
        batch = "*".join(["batch", *map(str, self.lanes)]) if self.lanes else "batch"
        match self.kind:
            case "image":
                assert self.grid
                return (batch, self.features, *self.grid)
            case "tokens":
                return (batch, self.length or "seq")
            case "sequence":
                return (batch, self.length or "seq", self.features)
            case "vector":
                return (batch, self.features)

    @property
    def places(self) -> tuple[Size, ...]:
        """The sizes that must agree to join, add or combine wires: all except batch and features."""
        match self.kind:
            case "image":
                return self.axes[2:]
            case "vector":
                return ()
            case _:
                return self.axes[1:2]

    @property
    def feature_axis(self) -> int:
        """The axis of the features of a tensor of this kind. Raises Fault E403 for token ids, which have none."""
        assert self.kind != "tokens"
        return 1 if self.kind == "image" else -1

    def __str__(self) -> str:
        return show_axes(self.axes)

    def with_features(self, features: int) -> Wire:
        """Return the wire with another width, without an origin and facts."""
        return self._replace(features=features, origin=None, facts=UNBOUNDED)

    def with_facts(self, facts: Facts) -> Wire:
        """Return the wire with other facts about its values."""
        return self if facts == self.facts else self._replace(facts=facts)

    def part(self, width: int) -> Wire:
        """Return the wire with a subset of the features."""
        return self.with_features(width).with_facts(self.facts.range)

    def at_rate(self, rate: Rate) -> Wire:
        """Return the wire at another rate: `rate` tokens of the model's input per token.

        Raises Fault E419 if its tokens are those of several parts, whose rates would differ.
        """
        if self.prefix or (isinstance(self.length, str) and PLUS in self.length):
            found = f"{self}, with {self.prefix} tokens before it" if self.prefix else f"{self}"
            hint = "merge or split the tokens before joining them, or after `slice` has removed the others"
            raise Fault("E419", "tokens that were joined cannot be merged or split", found=found, hint=hint)
        rate = simplest(rate)
        if isinstance(self.length, int):
            return self._replace(length=int(self.length * self.rate // rate), grid=None, rate=rate, origin=None)
        name = names_of(self.length or "seq")[0]
        return self._replace(length=length_at(name, rate), grid=None, rate=rate, origin=None)

    def spans(self, other: Wire) -> bool:
        """Return whether two sequences cover the same tokens of the model's input, each at its own rate."""
        if self.kind != "sequence" or other.kind != "sequence" or self.prefix or other.prefix:
            return False
        alike = self.context == other.context and self.lanes == other.lanes
        if isinstance(self.length, int) and isinstance(other.length, int):
            return alike and self.length * self.rate == other.length * other.rate
        names = [str(wire.length or "seq") for wire in (self, other)]
        return alike and len({name for each in names for name in names_of(each)}) == 1 and PLUS not in "".join(names)

    def of_tokens(self, tokens: Rate) -> Wire:
        """Return the wire for `tokens` of the streaming input, if its length is open and depends on that input."""
        if self.context or not isinstance(self.length, str):
            return self
        return self._replace(length=size_of(self.length, lambda name: tokens))

    def made_by(self, origin: Origin) -> Wire:
        """Return the wire with the step that determined its sizes, unless one is known."""
        return self if self.origin else self._replace(origin=origin)

    def origin_note(self, name: str) -> Note | None:
        """Return a note such as: `u` is [batch, seq, 768]: made by proj_up (file:line:column)."""
        if self.origin is None:
            return None
        made = "the model's input" if self.origin.verb == "input" else f"made by {self.origin.verb}"
        return Note(f"{name} is {self}: {made}", self.origin.span)


PLUS = " + "  # between the parts of a length whose sum is only known in a call


def summed(lengths: Iterable[Size]) -> Size:
    """Return the sum of lengths: a number, or a name such as `seq + 4`, with the names in alphabetical order."""
    parts = [part for length in lengths for part in str(length).split(PLUS)]
    names = sorted(part for part in parts if not part.isdigit())
    number = sum(int(part) for part in parts if part.isdigit())
    return PLUS.join([*names, *([str(number)] if number else [])]) if names else number


def less(length: Size | None, number: int) -> Size:
    """Return a length without some of its tokens, which are a number in it: `seq` for `seq + 4` less 4."""
    if isinstance(length, int):
        return length - number
    *names, last = str(length).split(PLUS)
    return summed([*names, *([int(last) - number] if int(last) > number else [])])


def simplest(rate: Rate) -> Rate:
    """Return a whole rate as an int."""
    return rate.numerator if rate.denominator == 1 else rate


def common_rate(*rates: Rate) -> Rate:
    """Return the least number of input tokens that is a multiple of all rates."""
    numerators, denominators = ([getattr(rate, part) for rate in rates] for part in ("numerator", "denominator"))
    return simplest(Fraction(math.lcm(*numerators), math.gcd(*denominators))) if rates else 1


def length_at(name: str, rate: Rate) -> str:
    """Return the length of an axis at a rate: `seq/4` for a rate of 4, `seq*4` for 1/4."""
    times = f"*{rate.denominator}" if rate.denominator > 1 else ""
    return f"{name}{times}/{rate.numerator}" if rate.numerator > 1 else f"{name}{times}"


def names_of(length: Size) -> list[str]:
    """Return the names of the axes that determine a length: `seq` for `seq/4 + 2` and for `seq*4`."""
    parts = [part for part in str(length).split(PLUS) if not part.isdigit()]
    return [part.partition("/")[0].partition("*")[0] for part in parts]


def size_of(length: Size, known: Callable[[str], Rate]) -> int:
    """Return a length in a call. known: returns the size of the axis of an input from its name."""
    total = 0
    for part in str(length).split(PLUS):
        multiple, _, divisor = part.partition("/")
        name, _, factor = multiple.partition("*")
        total += int(part) if part.isdigit() else int(known(name) * int(factor or 1) // int(divisor or 1))
    return total


def show_axes(axes: tuple[Any, ...]) -> str:
    """Return axes as text: `[batch, seq, 768]`."""
    return "[" + ", ".join(str(a) for a in axes) + "]"


def divisors_near(width: int, target: int) -> str:
    """Return a hint: the four divisors of `width` that are closest to `target`."""
    small = [d for d in range(1, min(width, 4096) + 1) if width % d == 0]
    divisors = {*small, *(width // d for d in small)}
    near = sorted(sorted(divisors, key=lambda d: (abs(d - target), d))[:4])
    return f"divisors of {width} near {target}: {', '.join(map(str, near))}"


def has_same_tokens(wire: Wire, x: Wire) -> bool:
    """Return whether a wire has a token for each token of the input x."""
    if wire.kind not in ("sequence", "tokens"):
        return False
    return all(getattr(wire, name) == getattr(x, name) for name in ("places", "rate", "context", "prefix", "lanes"))
