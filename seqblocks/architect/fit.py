"""Fit a spec to a budget: choose values of its options so that its figures meet targets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from seqblocks.analysis.analyse import Folders, yaml
from seqblocks.analysis.check import require_model
from seqblocks.architect import tables
from seqblocks.architect.designs import Design, find_design
from seqblocks.architect.facts import FACTS, measure, shown
from seqblocks.architect.grid import Demand, Option, Value, assignment, read_demand, read_option
from seqblocks.architect.rewrite import rewritten
from seqblocks.architect.search import INFINITE, WHOLE_GRID_MAX_POINTS, Figures, Point, Search, Target
from seqblocks.cost import dtype_named
from seqblocks.errors import Diagnostic, SpecError, UsageError, quote
from seqblocks.graph import ModelSpec
from seqblocks.language.spec_files import locate
from seqblocks.language.writing import write_text
from seqblocks.record import Record

MAX_ROWS = 100_000  # combinations of all options but the longest
_MORE = ("params", "state_bytes", "macs_per_token")  # shown besides the targets
_ALWAYS = ("params", "state")  # compared after writing
_GENERAL = frozenset({"E101", "E310"})  # faults of an override itself, which no other value removes


class Candidate(Record):
    """A point of the grid. values: by path. facts: the figures. deviation: the relative distance from the targets,
    summed; missed: the same for limits that it does not hold, 0 if it holds all."""

    values: dict[str, Value]
    facts: dict[str, Any]
    deviation: float
    missed: float

    @property
    def command(self) -> str:
        """The options that give these values to any command of seqblocks."""
        return " ".join(f"--set {assignment(path, value)}" for path, value in self.values.items())

    def as_data(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
        return {"set": self.values, "facts": self.facts, "deviation": self.deviation, "missed": self.missed}


class Fit(Record):
    """The result of `fit`. `print` shows it as a table.

    candidates: the best points, best first. reached: whether all limits hold and the targets lie within what the grid
    offers. unreached: the demands for which this is false. points: of the grid; checks: how many were checked;
    invalid: how many of those are invalid specs. warnings: of the best spec. interrupted: whether points were left out.
    """

    design: Design
    demands: list[Demand]
    candidates: list[Candidate]
    unreached: list[Demand]
    points: int
    checks: int
    invalid: int
    warnings: tuple[Diagnostic, ...] = ()
    interrupted: bool = False

    @property
    def best(self) -> Candidate:
        """The optimum of the grid, or of the points that were checked before an interrupt."""
        return self.candidates[0]

    @property
    def reached(self) -> bool:
        return not self.unreached

    def write(self, path: str | os.PathLike[str], allow_use: Folders = ()) -> tuple[Diagnostic, ...]:
        """Write the spec with the best values in place of those written there; all else stays as it is.

        Numbers in `expect:` that no longer hold are replaced too. Returns the other entries of `expect:` that the model
        does not meet. Raises UsageError for a value that is not written in the spec, for a file that is the spec
        itself and was changed meanwhile, and for one that is no spec; UnavailableError if the file cannot be written.
        """
        text, found = rewritten(self.design, _overrides(self.best.values), Path(path), allow_use)
        facts = self.best.facts
        if found.model is None or any(measure(found.model, name) != facts[name] for name in _ALWAYS):
            raise UsageError("the values cannot be written: another place of the spec shares one of them by an alias")
        if _is_other(Path(path)):
            raise UsageError(f"{os.fspath(path)} is not a spec, so it is not overwritten: name another file")
        if _has_changed(self.design, path):
            raise UsageError(f"{os.fspath(path)} was changed during the fit: it is not overwritten. Fit it again")
        write_text(Path(path), text)
        return tuple(each for each in found.diagnostics if each.severity == "error")

    def __str__(self) -> str:
        return self.text()

    def _table(self) -> tuple[list[str], list[list[str]]]:
        first = self.best
        names = [name for name in first.facts if name != "state" or any(each.fact == name for each in self.demands)]
        header = [*first.values, *(FACTS[name].title for name in names), "deviation"]
        rows = []
        for each in self.candidates:
            figures = [shown(name, each.facts[name]) for name in names]
            away = f"{each.deviation:.3%}" if each.deviation else "0"
            rows.append([*map(str, each.values.values()), *figures, away + " misses a limit" * bool(each.missed)])
        return header, rows

    def text(self) -> str:
        """Return a table of the candidates."""
        return tables.aligned(*self._table(), left=0)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return tables.markdown(*self._table(), left=0)

    def csv(self) -> str:
        """Return a line for each candidate, with unrounded numbers."""
        header = [*self.best.values, *self.best.facts, "deviation", "missed"]
        rows = ([*each.values.values(), *each.facts.values(), each.deviation, each.missed] for each in self.candidates)
        return tables.csv(header, rows)

    def as_data(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "reached": self.reached,
            "unreached": [str(each) for each in self.unreached],
            "best": self.best.as_data(),
            "candidates": [each.as_data() for each in self.candidates],
            "points": self.points,
            "checks": self.checks,
            "invalid": self.invalid,
            "interrupted": self.interrupted,
        }


def _has_changed(design: Design, path: str | os.PathLike[str]) -> bool:
    """Return whether a file is that of a design, and has another text by now."""
    is_own = design.base is not None and os.path.isfile(path) and os.path.isfile(design.name)
    return is_own and os.path.samefile(path, design.name) and locate(design.name)[0] != design.text


def _is_other(path: Path) -> bool:
    """Return whether a file has text that is no spec, also none with faults."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    except OSError:  # writing reports it
        return False
    return bool(text) and not re.search(r"\bseqblocks\b\W*:", text)


def fit(
    spec: str | os.PathLike[str] | ModelSpec | Any,
    solve: Mapping[str, Any],
    to: str | Iterable[str],
    *,
    set: Mapping[str, Any] | None = None,
    top: int = 5,
    length: int | None = None,
    dtype: str = "float32",
    exhaustive: bool = False,
    allow_use: Folders = (),
    strict: bool = False,
    advance: Callable[[float], None] = lambda part: None,
) -> Fit:
    """Choose values of options so that the figures of a spec meet targets, without building it.

    solve: for each override its values, as text (`{"dim": "64..4096:64"}`, `{"heads": "4,8,16"}`) or an iterable
    (`range(2, 49)`). to: targets such as `"params=125M"` (as near as possible) and limits such as
    `"state_bytes<=2MB"`; see `architect.facts.FACTS` for the names. Only limits: as near to the first as possible.
    set: overrides of all points, which may be expressions of the solved ones. top: number of candidates.

    The result is the optimum of the whole grid: the least sum of relative distances, then the smaller number of
    parameters, then the smaller value of the first option. Invalid points are left out, such as those with heads that
    do not divide the width. Figures that rise or fall with an option allow the search to check few points; it compares
    each with the others, and tries all values of an option where they do not. exhaustive: check every point. A
    KeyboardInterrupt ends the search: the result is then the optimum of the points that were checked.

    Raises SpecError if no point is valid, UsageError for an invalid call.
    """
    options = [read_option(path, values) for path, values in _checked(solve).items()]
    demands = [read_demand(text) for text in ([to] if isinstance(to, str) else to)]
    if not demands:
        raise UsageError("fit takes at least one target, such as params=125M")
    if twice := [option.path for option in options if option.path in (set or {})]:
        raise UsageError(f"{quote(twice[0])} is to be solved, so it cannot be set")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"top is a number of candidates, at least 1, not {top!r}")
    _check_size(options, exhaustive)
    grid = _Grid(find_design(spec, set), options, demands, dtype_named(str(dtype), "dtype"), length, allow_use, strict)
    search = Search(
        [option.values for option in options], [option.is_number for option in options], grid.figures,
        grid.targets, grid.names.index("params"), advance, INFINITE if exhaustive else WHOLE_GRID_MAX_POINTS,
    )  # fmt: skip
    interrupted = False
    try:
        found = search.run(top)
    except KeyboardInterrupt:
        found, interrupted = search.best(top), True
        if not found:
            raise
    if not found:
        raise grid.errors[0]
    candidates = [grid.candidate(point, search.key(point)) for point in found]
    missed = candidates[0].missed > 0
    open_ones = [
        demand for demand, target in zip(demands, grid.targets, strict=True)
        if (missed and target.kind != "=" and _misses(target, grid.known[found[0]]))
        or (not missed and target.kind == "=" and not interrupted and not search.reaches(target))
    ]  # fmt: skip
    points = math.prod(len(option.values) for option in options)
    invalid = sum(isinstance(each, str) for each in grid.known.values())
    warnings = grid.model(found[0]).warnings
    return Fit(grid.design, demands, candidates, open_ones, points, len(grid.known), invalid, warnings, interrupted)


def _misses(target: Target, figures: Figures) -> bool:
    value = float(figures[target.at])
    return target.violation(value, value) > 0


def _checked(solve: Any) -> Mapping[str, Any]:
    if not isinstance(solve, Mapping) or not solve:
        raise UsageError('solve must be a mapping of overrides to values: {"dim": "64..4096:64"}')
    return solve


def _check_size(options: list[Option], exhaustive: bool) -> None:
    sizes = sorted(len(option.values) for option in options)
    rows = math.prod(sizes if exhaustive else sizes[:-1])
    if rows > MAX_ROWS:
        raise UsageError(f"the grid is too large: {math.prod(sizes):,} points. Use larger steps, or fewer options")


class _Grid:
    """The points of a grid, checked when they are asked for."""

    def __init__(
        self, design: Design, options: list[Option], demands: list[Demand], dtype: str, length: int | None,
        allow_use: Folders, strict: bool,
    ) -> None:  # fmt: skip
        self.design, self.options, self.dtype, self.length = design, options, dtype, length
        self.given: dict[str, Any] = {"allow_use": allow_use, "strict": strict}
        self.names = list(dict.fromkeys([*(demand.fact for demand in demands), "params"]))
        self.targets = [Target(self.names.index(each.fact), each.kind, each.value) for each in demands]
        self.known: dict[Point, Figures] = {}
        self.errors: list[SpecError] = []  # the first one

    def values(self, point: Point) -> dict[str, Value]:
        return {option.path: option.values[at] for option, at in zip(self.options, point, strict=True)}

    def model(self, point: Point) -> ModelSpec:
        found = self.design.analyse(_overrides(self.values(point)), **self.given)
        if found.file is None or not found.ok:
            raise found.error()
        return require_model(found.file, found.model)

    def figures(self, point: Point) -> Figures:
        """Return the figures of a point, or why it is invalid. Raises SpecError for a fault that all points have."""
        try:
            model = self.model(point)
        except SpecError as error:
            if any(each.code in _GENERAL for each in error.diagnostics):
                raise
            self.errors = self.errors or [error]
            found: Figures = "\n".join(each.message + str(each.found) + str(each.span) for each in error.diagnostics)
        else:
            found = tuple(self._number(model, name) for name in self.names)
        self.known[point] = found
        return found

    def _number(self, model: ModelSpec, name: str) -> float:
        value = measure(model, name, self.dtype, self.length)
        if value is None:
            raise UsageError(f"{name} of {model.name} is unknown{self._why(name)}")
        return math.inf if isinstance(value, str) else value  # a lookahead of "all"

    def _why(self, name: str) -> str:
        if not FACTS[name].at_length:
            return ""
        return f" for {self.length:,} tokens" if self.length else ": give the length of a sequence"

    def candidate(self, point: Point, key: tuple[Any, ...]) -> Candidate:
        model = self.model(point)
        names = dict.fromkeys([*self.names, *_MORE, "state"])
        facts = {name: measure(model, name, self.dtype, self.length) for name in names}
        return Candidate(self.values(point), facts, key[1], key[0])


def _overrides(values: Mapping[str, Value]) -> dict[str, Value]:
    return {path: yaml(str(value)) for path, value in values.items()}
