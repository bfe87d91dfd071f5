"""Declarations of parameters, and initialisers.

The analysis counts these declarations and the builder allocates from them, so both counts agree.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from seqblocks.errors import Fault, listing, quote
from seqblocks.language.expressions import MAX_LENGTH, UNKNOWN, parse, syntax_tree, unknown_name
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean, instead_of

MAX_SHOWN = 8  # numbers of an initialiser in listings
LISTED = "listed"  # the initialiser with a number for each place of the last axis, which specs cannot name
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-18, 1e18  # of an initialiser's arguments, so that values are finite in float32


class Init(NamedTuple):
    """An initialiser: its name and numbers, for instance `normal(0, 0.1)`."""

    name: str
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        shown = [f"{value:g}" for value in self.values]
        shown = [*shown[:3], "…", shown[-1]] if len(shown) > MAX_SHOWN else shown
        return f"{self.name}({', '.join(shown)})" if shown else self.name


class Parameter(NamedTuple):
    """One learned tensor of an op.

    fan_in: for initialisers that depend on it (default: the product of all axes except the first). decay: whether
    weight decay applies by default. full_precision: whether it is float32 in a half-precision model. settled: whether
    the step's own `init:` names it, so that no rule of a file or a block applies. trained: whether it gets gradients.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    fan_in: int | None = None
    full_precision: bool = False
    settled: bool = False
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def inputs(self) -> int:
        """The fan in, by which some initialisers scale."""
        return self.fan_in or max(1, math.prod(self.shape[1:]))


class Initialiser(Record):
    """An initialiser of `init:`. arguments: names with defaults (None if required). about: a line for the docs.

    holds: conditions on the numbers, as expressions over their names.
    """

    arguments: tuple[tuple[str, float | None], ...]
    about: str
    holds: tuple[str, ...] = ()


INITIALISERS: dict[str, Initialiser] = {
    "zeros": Initialiser((), "all 0"),
    "ones": Initialiser((), "all 1"),
    "constant": Initialiser((("value", None),), "all equal to value"),
    "normal": Initialiser((("mean", 0.0), ("std", 1.0)), "normal distribution", ("std >= 0",)),
    "uniform": Initialiser((("low", None), ("high", None)), "uniform between low and high", ("low <= high",)),
    "trunc_normal": Initialiser(
        (("std", 0.02),), "normal(0, std), redrawn outside [-2, 2]", ("std > 0", "std <= 1e6")
    ),
    "linspace": Initialiser((("first", None), ("last", None)), "evenly spaced from first to last over the last axis"),
    "fan_in_uniform": Initialiser((), "uniform within 1/sqrt(fan in): torch's default for Linear and Conv"),
    "xavier_uniform": Initialiser((), "Glorot & Bengio 2010, on the matrix [first axis, the rest]"),
    "small": Initialiser(
        (("width", 0.0),), "normal(0, sqrt(2 / (5 width))); width defaults to the fan in", ("width >= 0",)
    ),
    "ramp": Initialiser((("step", None),), "0, step, 2 step, … over the last axis (frequencies of S4D-Lin: pi)"),
    "log_range": Initialiser((), "log(1), log(2), … over the last axis (the decay rates of S4D-real)"),
    "inverse_softplus": Initialiser(
        (("low", 1e-3), ("high", 0.1), ("floor", 1e-4)),
        "softplus of it is log-uniform between low and high, and at least floor",
        ("low > 0", "low <= high", "floor > 0"),
    ),
    "log_of_uniform": Initialiser(
        (("low", None), ("high", None)), "logarithms of numbers that are uniform between low and high",
        ("low >= 0", "high > low"),
    ),
    "ring": Initialiser(
        (("low", 0.9), ("high", 0.999)), "e^-softplus of it is between low and high, its square uniform",
        ("low > 0", "high > low", "high < 1"),
    ),
    "orthogonal": Initialiser(
        (("gain", 1.0),), "orthonormal rows or columns of the matrix [first axis, the rest], times gain"
    ),
    "falling": Initialiser((("power", None),), "1 - (j / n)^power over the last axis j < n", ("power >= 0",)),
    "waves": Initialiser(
        (("first", None), ("last", None), ("power", 1.0), ("height", 0.0), ("width", 1.0)),
        "first to last as (j / (n - 1))^power over the last axis j < n, plus height z|z|, z from -1 to 1 in each width",
        ("power >= 0", "width >= 1"),
    ),
    "powerlaw": Initialiser(
        (("position", 0.0),),
        "5 - 12 (j / (n - 1))^(0.3 + 1.3 position) over the last axis j < n; position: the block's, from 0 to 1",
        ("position >= 0",),
    ),
    "alibi": Initialiser((), "ALiBi's slopes (arXiv:2108.12409) over the last axis: 2^(-8 j / n), j = 1, 2, … n"),
    "grid_waves": Initialiser(
        (("base", 10000.0),),
        "positions [rows, columns, D]: sin(c / base^(4 j / D)), j < D / 4, of the column c, then cosines, then both of "
        "the row (MAE, DiT)",
        ("base >= 1",),
    ),
    "wang": Initialiser(
        (("width", None), ("blocks", None)), "normal(0, 2 / (blocks sqrt(width)))", ("width > 0", "blocks > 0")
    ),
}


DEFAULT = Init("default")  # the parameter keeps the initial values that its primitive declares


def read_init(text: str, names: Mapping[str, Any]) -> Init | None:
    """Parse `normal(0, 0.1)`, `normal(std=0.1)` or `zeros if bias else default`; numbers may be expressions.

    Return None if a number is UNKNOWN, DEFAULT if the condition is. Raises Fault (E408, E209, and what expressions
    raise), also for unknown names in a choice that is not taken.
    """
    for each in _names(text):
        if each not in names:
            raise unknown_name(each, names, 0)
    while (choice := _choice(text)) is not None:
        condition, chosen, other = choice
        value = parse(condition).evaluate(names, is_condition=True)
        if value is UNKNOWN:
            return DEFAULT
        text = chosen if value else other
    name, numbers = _call(text)
    if name == DEFAULT.name:
        return DEFAULT
    known = INITIALISERS[name]
    values = dict(known.arguments) | {key: parse(number).evaluate(names) for key, number in numbers.items()}
    if any(value is UNKNOWN for value in values.values()):
        return None
    _check_values(text, name, known, values)
    return Init(name, tuple(float(value) for value in values.values()))


def names_read(text: str) -> Iterator[tuple[str, int]]:
    """Yield the names that an initialiser reads, with their places in its text. Raises Fault as `read_init` does."""
    for name in dict.fromkeys(_names(text)):
        for found in re.finditer(rf"\b{name}\b(?!\s*=[^=])", text):  # `normal(std=std)` reads the second one
            yield name, found.start()


@lru_cache(maxsize=1024)
def _names(text: str) -> tuple[str, ...]:
    """Return the names in all choices. Raises Fault for an unknown initialiser or an invalid expression in any."""
    condition, *choices = _choice(text) or (None,)
    expressions = _call(text)[1].values() if condition is None else (condition,)
    own = (name for expression in expressions for name, _ in parse(expression).names)
    return (*own, *chain.from_iterable(map(_names, choices)))


@lru_cache(maxsize=1024)
def _choice(text: str) -> tuple[str, str, str] | None:
    """Return the condition and the two initialisers of a choice; None for a single initialiser."""
    if len(text) > MAX_LENGTH:
        raise Fault("E504", "the initialiser is too long", expected=f"at most {MAX_LENGTH} characters")
    match syntax_tree(text):
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _written(text, test), _written(text, body), _written(text, orelse)
    return None


@lru_cache(maxsize=1024)
def _call(text: str) -> tuple[str, dict[str, str]]:
    """Return the name of an initialiser and its numbers by parameter name. Raises Fault (E408)."""
    match syntax_tree(text):
        case ast.Name(id=name):
            numbers: list[tuple[str | None, str]] = []
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            numbers = [(None, _written(text, each)) for each in args]
            numbers += [(each.arg or "**", _written(text, each.value)) for each in keywords]
        case _:
            raise Fault("E408", f"{quote(text)} is not an initialiser", expected="a name, or name(numbers)")
    allowed = [*INITIALISERS, DEFAULT.name]
    if name not in allowed:
        message = f"there is no initialiser {quote(name)}"
        hint = did_you_mean(name, allowed) or instead_of(name)
        raise Fault("E408", message, expected=f"one of {listing(allowed, 21)}", hint=hint)
    arguments = INITIALISERS[name].arguments if name in INITIALISERS else ()
    return name, _by_name(name, dict(arguments), numbers)


def _written(text: str, part: ast.expr) -> str:
    """Return a part of an initialiser as it is written, if it is on one line."""
    written = ast.get_source_segment(text.strip(), part) or ""
    return written if len(written.splitlines()) == 1 else ast.unparse(part)


def _by_name(
    name: str, defaults: Mapping[str, float | None], numbers: list[tuple[str | None, str]]
) -> dict[str, str]:
    """Return the numbers by parameter name. Raise Fault E408 for an unknown one, too many or too few."""
    count = len(numbers)
    in_order = list(defaults)[: sum(key is None for key, _ in numbers)]
    keys = [*in_order, *(key for key, _ in numbers if key)]
    unknown = next((key for key in keys if key not in defaults), None)
    if unknown:
        raise Fault("E408", f"{name} does not know {quote(unknown)}", expected=_signature(name, defaults))
    missing = any(default is None and key not in keys for key, default in defaults.items())
    if missing or len(set(keys)) < count:
        message = f"{name} does not take {count} number{'s' if count != 1 else ''}"
        raise Fault("E408", message, expected=_signature(name, defaults))
    return {key: number for key, (_, number) in zip(keys, numbers, strict=True)}


def _signature(name: str, numbers: Mapping[str, float | None]) -> str:
    written = (key if default is None else f"{key}={default:g}" for key, default in numbers.items())
    return f"{name}({', '.join(written)})"


def _check_values(text: str, name: str, known: Initialiser, values: Mapping[str, Any]) -> None:
    """Raise Fault E209 for numbers that the initialiser does not accept."""
    for key, value in values.items():
        if value and not MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE:
            expected = f"0, or a number between {MIN_MAGNITUDE:g} and {MAX_MAGNITUDE:g} in magnitude"
            raise Fault("E209", f"{quote(key)} of {name} is out of range", expected=expected, found=f"{value:g}")
    for law in known.holds:
        if not parse(law).evaluate(values):
            found = ", ".join(f"{key}: {value:g}" for key, value in values.items())
            raise Fault("E209", f"the arguments of {quote(text)} are out of range", expected=law, found=found)
