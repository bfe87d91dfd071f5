"""Check a spec at every point of a grid: a row of figures for each combination of values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from operator import eq, ge, gt, le, lt
from typing import Any

from seqblocks._version import __version__
from seqblocks.analysis.analyse import Analysis, Folders, yaml
from seqblocks.analysis.check import require_model
from seqblocks.architect.compare import checked_lengths
from seqblocks.architect.designs import Design, find_design
from seqblocks.architect.facts import FACTS, measure
from seqblocks.architect.grid import Demand, Option, Value, assignment, read_demand, read_option
from seqblocks.cost import dtype_named
from seqblocks.errors import RunError, SeqblocksError, UsageError, quote
from seqblocks.graph import ModelSpec
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

CHINCHILLA = 20.0  # tokens per parameter (Hoffmann et al. 2022, arXiv:2203.15556)
BACKWARD = 3  # a training step computes the products of a forward pass, and two for each in the backward pass
_SHOWN = ("params", "active_params", "non_embedding_params", "macs_per_token", "state_bytes", "kv_bytes_per_token")

Measure = Callable[[ModelSpec], Mapping[str, Value]]


class Row(Record):
    """A point of the grid. values: by path. figures: by column, None if unknown; empty if the point is invalid, or
    cannot be measured as asked, and `fault` then says why."""

    values: dict[str, Value]
    figures: dict[str, Value]
    fault: str = ""

    @property
    def command(self) -> str:
        """The options that give these values to any command of seqblocks."""
        return " ".join(f"--set {assignment(path, value)}" for path, value in self.values.items())

    def as_data(self) -> dict[str, Any]:
        return {"set": self.values, **self.figures, "fault": self.fault or None}


class Sweep(Record):
    """A grid of designs and what to compute of each. Iterating checks the points one after another, in the order of the
    grid, and holds none of them. `columns`: the names of all figures."""

    design: Design
    options: list[Option]
    where: list[Demand]
    lengths: tuple[int, ...]
    dtype: str
    tokens_per_parameter: float
    more: Mapping[str, Any]  # columns that `measure_more` fills, each with what determines it besides the spec
    measure_more: Measure | None
    check: dict[str, Any]

    @property
    def points(self) -> int:
        return math.prod(len(option.values) for option in self.options)

    @property
    def columns(self) -> list[str]:
        at = [f"macs_per_token@{length}" for length in self.lengths]
        return [*_SHOWN, *at, "train_flops_per_token", "tokens", "train_flops", "six_nd", "exact_to_six_nd", *self.more]

    def key(self, values: Mapping[str, Value], found: Analysis) -> str:
        """Identify a row by all that determines it, so that an interrupted sweep can continue."""
        where = sorted([each.fact, each.kind, each.value] for each in self.where)
        asked = [where, self.lengths, self.dtype, self.tokens_per_parameter, self.more, self.check["strict"]]
        given = [__version__, self.design.text, found.files, {**self.design.overrides, **values}, asked]
        return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def values(self) -> Iterator[dict[str, Value]]:
        """Yield all combinations of values; the last option changes fastest."""
        for point in product(*(option.values for option in self.options)):
            yield {option.path: value for option, value in zip(self.options, point, strict=True)}

    def __iter__(self) -> Iterator[Row]:
        return filter(None, (self.row(values, self.analyse(values)) for values in self.values()))

    def analyse(self, values: Mapping[str, Value]) -> Analysis:
        """Analyse the design with the values of one point."""
        return self.design.analyse({path: yaml(str(value)) for path, value in values.items()}, **self.check)

    def row(self, values: dict[str, Value], found: Analysis) -> Row | None:
        """Return the figures of one point. None: it does not meet `where`."""
        if found.file is None or not found.ok:
            error = found.error()
            first = error.diagnostics[0]
            if first.code in ("E101", "E310"):  # the override itself: no point has it
                raise error
            return Row(values, {}, f"{first.code}: {first.message}")
        model = require_model(found.file, found.model)
        for demand in self.where:
            value = measure(model, demand.fact, self.dtype, self._length)
            if value is None:
                hint = ": give the length of a sequence" if FACTS[demand.fact].at_length and not self._length else ""
                return Row(values, {}, f"{demand.fact} is unknown{hint}")
            if not _meets(demand, value):
                return None
        figures = self._figures(model)
        if self.measure_more:
            try:
                figures |= self.measure_more(model)
            except (UsageError, RunError) as error:  # a vocabulary below that of a task, a length that it does not take
                return Row(values, {}, str(error))
        return Row(values, figures)

    def error(self, row: Row) -> SeqblocksError:
        """Return the exception of an invalid point: that of its spec, or a UsageError for what cannot be measured."""
        found = self.analyse(row.values)
        return UsageError(row.fault) if found.ok else found.error()

    @property
    def _length(self) -> int | None:
        return self.lengths[0] if self.lengths else None

    def _figures(self, model: ModelSpec) -> dict[str, Value]:
        found = {name: measure(model, name, self.dtype) for name in _SHOWN}
        found |= {f"macs_per_token@{each}": measure(model, "macs_per_token", self.dtype, each) for each in self.lengths}
        macs = found[f"macs_per_token@{self._length}"] if self.lengths else found["macs_per_token"]
        params = found["params"]
        tokens = params * self.tokens_per_parameter
        each = None if macs is None else 2 * BACKWARD * macs
        six_nd = 6 * params * tokens
        flops = None if each is None else each * tokens
        return found | {
            "train_flops_per_token": each, "tokens": tokens, "train_flops": flops, "six_nd": six_nd,
            "exact_to_six_nd": flops / six_nd if flops and six_nd else None,
        }  # fmt: skip


_COMPARED: dict[str, Callable[[float, float], bool]] = {"<=": le, "<": lt, ">=": ge, ">": gt, "=": eq}


def _meets(demand: Demand, value: Value) -> bool:
    return _COMPARED[demand.kind](math.inf if isinstance(value, str) else value, demand.value)  # a lookahead of "all"


def sweep(
    spec: Any,
    grid: Mapping[str, Any],
    *,
    set: Mapping[str, Any] | None = None,
    where: str | Iterable[str] = (),
    lengths: int | Iterable[int] = (),
    dtype: str = "float32",
    tokens_per_parameter: float = CHINCHILLA,
    more: Mapping[str, Any] | None = None,
    measure_more: Measure | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> Sweep:
    """Return the points of a grid with their figures: iterate over it to check them, without building anything.

    grid: for each override its values, as text (`{"dim": "256..1024:256"}`, `{"heads": "4,8"}`) or an iterable.
    where: conditions such as `"params<200M"`; other points are left out. lengths: numbers of tokens at which to count
    MACs per token; the first is also that of the training FLOPs, which are three times those of a forward pass.
    tokens_per_parameter: tokens of a training run for each parameter. measure_more: gives the columns `more` of a
    model, such as a time; the values of `more` say what determines them besides the spec. Invalid points have a
    row with their fault.

    Raises UsageError for an invalid call, SpecError while iterating if no point can be valid.
    """
    if not isinstance(grid, Mapping) or not grid:
        raise UsageError('the grid must be a mapping of overrides to values: {"dim": "256,512"}')
    options = [read_option(path, values) for path, values in grid.items()]
    if twice := [option.path for option in options if option.path in (set or {})]:
        raise UsageError(f"{quote(twice[0])} has values in the grid, so it cannot be set")
    if not 0 < tokens_per_parameter < math.inf:
        raise UsageError(f"tokens per parameter are a positive number, not {tokens_per_parameter!r}")
    sizes = checked_lengths(lengths)
    demands = [read_demand(text, "condition") for text in ([where] if isinstance(where, str) else where)]
    return Sweep(
        find_design(spec, set), options, demands, sizes, dtype_named(str(dtype), "dtype"), float(tokens_per_parameter),
        more or {}, measure_more, {"allow_use": allow_use, "strict": strict},
    )  # fmt: skip


# --- choosing rows ----------------------------------------------------------------------------------------------------


def pareto(rows: list[Row], columns: Iterable[str], largest: Iterable[str] = ()) -> list[bool]:
    """Return for each row whether no other is as good in all columns and better in one.

    Small figures are good, in the columns `largest` large ones. A row without one of them is not on the front.
    """
    signs = [(name, -1 if name in {*largest} else 1) for name in columns]
    points = [[None if (x := row.figures.get(name)) is None else sign * x for name, sign in signs] for row in rows]
    known = [point for point in points if None not in point]
    return [None not in point and not any(_beats(other, point) for other in known) for point in points]


def _beats(a: list[Any], b: list[Any]) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def check_columns(names: Iterable[str], known: list[str], what: str = "column") -> None:
    """Raise UsageError for a name that is not known."""
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {quote(name)}: {did_you_mean(name, known) or ', '.join(known)}")


def ladder(rows: list[Row], budgets: Iterable[float]) -> list[Row]:
    """Return for each budget of training FLOPs the row that comes nearest to it, in ratio.

    It has the column `budget`, and the tokens that the budget affords. Larger budgets have rows that cost as much or
    more. Raises UsageError if no row has a known cost.
    """
    costs = [(math.log(row.figures["train_flops"]), row) for row in rows if row.figures.get("train_flops")]
    if not costs:
        raise UsageError("no design of the sweep has a known cost, so none can be chosen for a budget")
    found = []
    for budget in sorted(budgets):
        _, row = min(costs, key=lambda pair: (abs(pair[0] - math.log(budget)), pair[1].figures["params"]))
        tokens = budget / row.figures["train_flops_per_token"]
        six_nd = 6 * row.figures["params"] * tokens
        spent = {"budget": budget, "tokens": tokens, "train_flops": budget, "six_nd": six_nd}
        found.append(row._replace(figures={**row.figures, **spent}))
    return found


def title(column: str) -> str:
    """Return the heading of a column in a table."""
    base, _, length = column.partition("@")
    titles = {
        "train_flops_per_token": "train FLOPs/token", "train_flops": "train FLOPs", "six_nd": "6ND",
        "exact_to_six_nd": "exact/6ND", "tokens": "tokens",
    }  # fmt: skip
    text = titles.get(base) or (FACTS[base].title if base in FACTS else base)
    return f"{text}, {int(length):,} tokens" if length else text


def shown(column: str, value: Value) -> str:
    """Return a figure of a column as text."""
    base = column.partition("@")[0]
    if value is None:
        return "-"
    if base in FACTS:
        return FACTS[base].show(value)
    if isinstance(value, bool):
        return "*" if value else ""
    if base in ("budget", "train_flops", "six_nd", "train_flops_per_token", "tokens"):
        return f"{value:.3g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
