"""Data structures of the composer of random specs (compose.py)."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

Step = dict[str, Any]
SIZES = [1, 2, 3, 4, 6, 8]  # `sizes` in the file's `let:`
FINEST = Fraction(1, 6)  # the lowest rate: six tokens for each of the input
TAKEN = ("lambda", "step", "global", "rows", "type", "in")  # names that Python or torch's modules use themselves
UNNAMED = ("add", "concat", "gate", "identity", "multiply", "reduce", "scale", "shift", "silu", "slice")  # own nothing


@dataclass(frozen=True)
class Kind:
    """Describe a wire: sequence, vector, image or tokens."""

    name: str
    width: int
    length: int | None = None  # None: open
    grid: tuple[int, int] | None = None
    rate: Fraction = Fraction(1)  # tokens of the input per token
    prefix: int = 0  # of its tokens, in a sequence

    @property
    def place(self) -> Any:
        return self.name, self.length, self.rate, self.prefix, self.grid if self.name == "image" else None


class Owner(NamedTuple):
    """Record a step of the spec, with its input and output."""

    verb: str
    inside: Step
    reads: Kind
    makes: Kind


def has_own(owner: Owner) -> bool:
    """Return whether the step certainly has parameters of its own and a single output wire."""
    own = {"linear", "causal_conv", "conv1d", "conv_transpose1d", "centaurus", "swiglu", "slstm"}
    verbs = set(re.findall(r'"(\w+)": \{', json.dumps({owner.verb: owner.inside})))
    return bool(verbs & own) and not {"when", "as", "from", "tie", "share"} & set(owner.inside)


@dataclass
class Body:
    """Collect a list of steps: its wires by name, and the input of the next step."""

    now: Kind
    wires: dict[str, Kind]
    steps: list[Step] = field(default_factory=list)
    linears: list[tuple[str, int, int, bool]] = field(default_factory=list)  # names that a tie may use
    depth: int = 0
    fixed: bool = False  # the last wire must have the kind of the first, except for the width
    columns: bool = False  # inside a scan by columns
    owned: bool = False  # inside a scan whose orders have parameters
    layered: bool = False  # inside a repeat, where the layer has a number
    owners: list[Owner] = field(default_factory=list)  # steps whose parameters later steps may share
    in_each: bool = False  # inside an `each`, whose steps read its input only
    chosen: bool = False  # inside a `choose`, whose tokens are any number
    alone: bool = False  # inside an expert, which processes each token separately


class Call(NamedTuple):
    """Describe the arguments of a block: the wire it reads, wire arguments, numbers, and steps.

    steps: by argument name, a body with the wire that the block passes in and the wire that it expects back.
    """

    block: str
    reads: Kind
    makes: Kind
    ports: list[str]
    numbers: dict[str, int]
    steps: dict[str, Body]
    outputs: dict[str, Kind]  # further wires that it returns


class Writer:
    """Write a spec, with helpers for its small parts. `streams`: use only steps that run token by token."""

    def __init__(self, chance: random.Random, streams: bool | None = None) -> None:
        self.chance = chance
        self.streams = chance.random() < 0.5 if streams is None else streams
        self.numbers: dict[str, int] = {}  # names that expressions may use
        self.let: dict[str, int] = {}  # the subset of these that the file's own `let:` defines
        self.blocks: dict[str, Any] = {}
        self.alongside: set[str] = set()  # inputs with the length of the first one, which do not stream
        self.calls: list[Call] = []
        self.count = 0
        self.budget = self.chance.randint(3, 12)  # steps other than those that only complete another

    # --- helpers

    def fresh(self, letter: str) -> str:
        self.count += 1
        if letter in "walps" and self.count % 4 == 0 and self.count // 4 <= len(TAKEN):
            return TAKEN[self.count // 4 - 1]
        return f"{letter}{self.count}"

    def maybe(self, share: float) -> bool:
        return self.chance.random() < share

    def number(self, value: int) -> int | str:
        """Return the number, or an expression of that value."""
        if value in SIZES and self.maybe(0.05):
            return f"sizes[{SIZES.index(value) - self.chance.choice([0, len(SIZES)])}]"
        if self.numbers and self.maybe(0.2):
            name, known = self.chance.choice(list(self.numbers.items()))
            if known == value:
                return name
            if known and value % known == 0:
                return f"{value // known} * {name}"
            return f"{name} + {value - known}" if value >= known else f"{name} - {known - value}"
        return value

    def divisor(self, value: int) -> int:
        return self.chance.choice([d for d in range(1, value + 1) if value % d == 0])

    def width(self) -> int:
        return self.chance.choice([1, 2, 3, 4, 4, 6, 8])

    def add(self, body: Body, verb: str, made: Kind, **arguments: Any) -> Step:
        """Append a step whose output is the input of the next one."""
        named = {} if verb in UNNAMED else {"name": self.fresh("n")}
        inside = {**named, **{key: value for key, value in arguments.items() if value is not None}}
        body.steps.append({verb: inside})
        body.owners.append(Owner(verb, inside, body.now, made))
        body.now = made
        return inside

    def share(self, body: Body) -> bool:
        """Repeat a step that reuses the parameters of an earlier one. Return whether such a step exists."""
        alike = [owner for owner in body.owners if owner.reads == body.now and has_own(owner)]
        if not alike or body.owned:
            return False
        owner = self.chance.choice(alike)
        again = {key: value for key, value in owner.inside.items() if key not in ("name", "as", "init", "tie", "share")}
        self.add(body, owner.verb, owner.makes, **again, share=owner.inside["name"])
        return True

    def condition(self, body: Body) -> bool | str:
        if body.layered and self.maybe(0.5):
            return self.chance.choice(["layer % 2 == 0", "layer > 0", "layer == layers - 1", "layer > 5"])
        return self.chance.choice([True, False, "1 > 2", "not 1 > 2 and 2 == 2"])

    def add_maybe(self, body: Body, verb: str, made: Kind, **arguments: Any) -> None:
        """Append a step. If it keeps the kind of its input, it may get a condition."""
        when = self.condition(body) if made == body.now and self.maybe(0.15) else None
        self.add(body, verb, made, **arguments, when=when)

    def named(self, body: Body) -> str:
        """Return a name for the input of the next step."""
        if not body.steps:
            return "input"
        if "aside" in body.steps[-1]:
            body.steps.append({"identity": {}})
        ((verb, inside),) = body.steps[-1].items()
        if verb == "calc":
            return str([key for key in inside if key not in ("learned", "when")][-1])
        if isinstance(inside.get("as"), str):
            return str(inside["as"])
        inside["as"] = self.fresh("w")
        body.wires[inside["as"]] = body.now
        return str(inside["as"])

    def like(self, body: Body, width: int | None = None) -> list[str]:
        """Return other wires that can be combined with the current one."""
        return [
            name for name, kind in body.wires.items()
            if kind.place == body.now.place and (width is None or kind.width == width)
        ]  # fmt: skip
