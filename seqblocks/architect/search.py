"""Find the points of a grid whose figures are nearest to targets, looking at few of them.

Figures rise or fall along most axes. So the figures of two points bound those of all points between them, and an
interval whose best conceivable point is worse than what was found is left out (branch and bound). At every point that
is looked at, the order is compared with that of the others; where it is wrong, no bounds are drawn along that axis.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Point = tuple[int, ...]  # indices into the axes
Figures = tuple[float, ...] | str  # why the point is invalid
Key = tuple[Any, ...]
INFINITE = math.inf
WHOLE_GRID_MAX_POINTS = 48


class Target(NamedTuple):
    """A demand on the figure at position `at`: kind "=" (as near as possible), "<=", "<", ">=" or ">"."""

    at: int
    kind: str
    value: float

    def distance(self, low: float, high: float) -> float:
        """Return the smallest relative distance of a number from low to high to the value."""
        if low <= self.value <= high:
            return 0.0
        nearest = high if high < self.value else low
        return abs(nearest - self.value) / (abs(self.value) or 1.0)

    def violation(self, low: float, high: float) -> float:
        """Return the smallest relative amount by which a number from low to high misses a limit."""
        best = low if self.kind[0] == "<" else high
        held = best <= self.value if self.kind[0] == "<" else best >= self.value
        if held and (len(self.kind) == 2 or best != self.value):
            return 0.0
        return abs(best - self.value) / (abs(self.value) or 1.0) or math.ulp(1.0)


class _Interval(NamedTuple):
    """Points of a row that were not looked at: those with `rest` on the other axes and `low` to `high` on the row's."""

    rest: Point
    low: int
    high: int


class Search:
    """A search in a grid.

    values: of each axis; numbers in ascending order. ordered: whether the figures may rise or fall along an axis.
    evaluate: the figures of a point, or why it is invalid. targets: of the figures. ties: the position of the figure
    that decides between equally good points (the smaller wins); then the smaller value of the first axis, and so on.
    small: grids of so few points are tried out completely.
    """

    def __init__(
        self,
        values: Sequence[Sequence[Any]],
        ordered: Sequence[bool],
        evaluate: Callable[[Point], Figures],
        targets: Sequence[Target],
        ties: int,
        advance: Callable[[float], None] = lambda part: None,
        small: float = WHOLE_GRID_MAX_POINTS,
    ) -> None:
        self.values, self.ordered, self.evaluate, self.advance = values, ordered, evaluate, advance
        self.small = small
        self.sizes = [len(each) for each in values]
        self.limits = [each for each in targets if each.kind != "="]
        self.aims = [each for each in targets if each.kind == "="] or self.limits[:1]
        self.ties = ties
        self.count = max([ties, *(each.at for each in targets)]) + 1  # of the figures
        self.known: dict[Point, Figures] = {}
        self.ranking: list[Key] = []  # the keys of the valid points that were looked at, in order
        self.faults: dict[Point, dict[str, tuple[int, int]]] = {}  # by line of the grid, the ends of each fault
        self.modes: list[list[str]] = []  # by figure and axis: "+" rises, "-" falls, "=" neither
        self.row = max(range(len(values)), key=lambda axis: (ordered[axis], self.sizes[axis]))

    # --- keys: the smaller, the better ------------------------------------------------------------------------

    def key(self, point: Point) -> Key:
        """Return what orders valid points: missed limits, distance from the targets, then the ties."""
        figures = self.known[point]
        assert not isinstance(figures, str)
        return self._key(figures, figures, point)

    def _key(self, low: Sequence[float], high: Sequence[float], point: Point) -> Key:
        missed = sum(each.violation(low[each.at], high[each.at]) for each in self.limits)
        away = sum(each.distance(low[each.at], high[each.at]) for each in self.aims)
        return (missed, away, low[self.ties], *point)

    def best(self, count: int) -> list[Point]:
        """Return the best known points, best first."""
        return [key[3:] for key in self.ranking[:count]]

    # --- looking at points ------------------------------------------------------------------------------------

    def look(self, point: Point) -> Figures:
        """Return the figures of a point. Raises _Disorder if they contradict the assumed order."""
        if point in self.known:
            return self.known[point]
        found = self.known[point] = self._inferred_fault(point) or self.evaluate(point)
        if isinstance(found, str):
            self._note_fault(point, found)
            return found
        bisect.insort(self.ranking, self.key(point))
        if self.modes:
            self._check_order(point, found)
        return found

    def _note_fault(self, point: Point, why: str) -> None:
        for axis, index in enumerate(point):
            faults = self.faults.setdefault((axis, *point[:axis], *point[axis + 1 :]), {})
            low, high = faults.get(why, (index, index))
            faults[why] = min(low, index), max(high, index)

    def _inferred_fault(self, point: Point) -> str | None:
        """Return the fault of a point, if two points on both sides of it along an axis have literally the same fault.

        What it says then does not depend on that value: with 5 heads for a width of 64, another depth does not help.
        Two on one side do not suffice: with `dim // 64` heads, each width below 64 has the same fault.
        """
        for axis, index in enumerate(point if len(point) > 1 and self.small < INFINITE else ()):
            faults = self.faults.get((axis, *point[:axis], *point[axis + 1 :]), {}) if self.ordered[axis] else {}
            why = next((why for why, (low, high) in faults.items() if low < index < high), None)
            if why is not None:
                return why
        return None

    def _check_order(self, point: Point, figures: Sequence[float]) -> None:
        for at, value in enumerate(figures[: self.count]):
            low, high = self._bounds(at, point, skip=point)
            if not low <= value <= high:
                self._reorder(at, point)
                raise _Disorder

    def _reorder(self, at: int, point: Point) -> None:
        """Choose the modes of a figure again; give up the order of all axes along which a contradiction remains."""
        old = self.modes[at]
        self.modes[at] = [self._mode(at, axis) for axis in range(len(self.sizes))]
        low, high = self._bounds(at, point, skip=point)
        figures = self.known[point]
        assert not isinstance(figures, str)
        if self.modes[at] == old or not low <= figures[at] <= high:
            self.modes[at] = ["="] * len(self.sizes)

    def _mode(self, at: int, axis: int) -> str:
        """Return how a figure moves along an axis, by the points that were looked at."""
        if not self.ordered[axis]:
            return "="
        lines: dict[Point, list[tuple[int, float]]] = {}
        for point, figures in self.known.items():
            if not isinstance(figures, str):
                lines.setdefault(point[:axis] + point[axis + 1 :], []).append((point[axis], figures[at]))
        moves = {
            (after > before) - (after < before)
            for line in lines.values()
            for (_, before), (_, after) in itertools.pairwise(sorted(line))
        }
        return "=" if {1, -1} <= moves else "-" if -1 in moves else "+"

    def _bounds(self, at: int, point: Point, skip: Point | None = None) -> tuple[float, float]:
        """Return the bounds of a figure at a point."""
        low, high = -INFINITE, INFINITE
        modes = self.modes[at]
        if modes == ["="] * len(modes):
            return low, high
        for other, figures in self.known.items():
            if isinstance(figures, str) or other == skip:
                continue
            below = above = True
            for mode, a, b in zip(modes, other, point, strict=True):
                if a != b:
                    less = (a < b) == (mode == "+") and mode != "="
                    below &= less
                    above &= not less and mode != "="
                    if not (below or above):
                        break
            if below:
                low = max(low, figures[at])
            if above:
                high = min(high, figures[at])
        return low, high

    # --- the search -------------------------------------------------------------------------------------------

    def run(self, count: int = 1) -> list[Point]:
        """Return the `count` best points, best first: fewer if fewer are valid."""
        total = math.prod(self.sizes)
        if total <= self.small:
            for done, point in enumerate(itertools.product(*map(range, self.sizes))):
                self.look(point)
                self.advance(done / total)
            return self.best(count)
        self._probe()
        while True:
            try:
                self._search(count)
                return self.best(count)
            except _Disorder:
                continue

    def reaches(self, target: Target) -> bool:
        """Return whether some point that holds all limits has at least, and some at most, the value of a target."""
        return all(self._has(target._replace(kind=kind)) for kind in ("<=", ">="))

    def _has(self, limit: Target) -> bool:
        within = Search(self.values, self.ordered, self.evaluate, [*self.limits, limit], self.ties)
        within.aims, within.known, within.modes, within.faults = [], self.known, self.modes, self.faults
        valid = (point for point, figures in self.known.items() if not isinstance(figures, str))
        within.ranking = sorted(map(within.key, valid))
        if not within._is_met():
            within.run()
        return within._is_met()

    def _is_met(self) -> bool:
        """Return whether a point that holds all limits was looked at."""
        return bool(self.ranking) and self.ranking[0][0] == 0

    def _probe(self) -> None:
        """Look at some points on two lines along each axis, to see how the figures move."""
        if self.modes:
            return
        for part in (0.25, 0.75):
            middle = tuple(int(part * (size - 1)) for size in self.sizes)
            for axis, size in enumerate(self.sizes):
                for index in sorted({0, middle[axis], size - 1}):
                    self.look((*middle[:axis], index, *middle[axis + 1 :]))
        self.modes = [[self._mode(at, axis) for axis in range(len(self.sizes))] for at in range(self.count)]

    def _search(self, count: int) -> None:
        """Settle row after row where the targets may lie, then all other intervals, the most promising one first."""
        waiting: list[tuple[Key, _Interval]] = []
        others = [range(1) if axis == self.row else range(size) for axis, size in enumerate(self.sizes)]
        rows = list(itertools.product(*map(_halving, others)))
        crossings: list[tuple[Point, float]] = []
        for done, rest in enumerate(rows):
            self.advance(done / len(rows))
            for part in self._settle(rest, self._guess(rest, crossings), count):
                heapq.heappush(waiting, (self._lower(part), part))
            if (found := self._crossing(rest)) is not None:
                crossings = [*crossings[-1:], (rest, found)]
        while waiting:
            lower, interval = heapq.heappop(waiting)
            if self._is_hopeless(lower, count):
                break
            if (now := self._lower(interval)) > lower:  # what was found since then bounds it better
                heapq.heappush(waiting, (now, interval))
                continue
            for part in self._split(interval, self._middle_or_end(interval)):
                heapq.heappush(waiting, (self._lower(part), part))

    def _is_hopeless(self, lower: Key, count: int) -> bool:
        """Return whether no point with at least this key is among the `count` best.

        Without aims, only whether some point holds all limits is of interest.
        """
        if not self.aims:
            return lower[0] > 0 or self._is_met()
        return len(self.ranking) >= count and lower > self.ranking[count - 1]

    def _settle(self, rest: Point, guess: int | None, count: int) -> list[_Interval]:
        """Look at a row until no interval that remains may meet all targets. Return these intervals."""
        remaining, waiting = [], [_Interval(rest, 0, self.sizes[self.row] - 1)]
        looks = 0
        while waiting:
            part = waiting.pop()
            lower = self._lower(part)
            if lower[:2] > (0, 0) or self._is_hopeless(lower, count):
                remaining.append(part)
                continue
            index = (part.low + part.high) // 2
            if guess is not None and looks < 6:
                index = min(max(guess, part.low), part.high)
                guess = guess if part.low <= guess + 1 and guess - 1 <= part.high else None
            waiting += self._split(part, index)
            looks += 1
            if looks % 2 == 0:
                guess = self._secant(rest)
        return remaining

    def _split(self, interval: _Interval, index: int) -> Iterator[_Interval]:
        """Look at a point of an interval, and yield what remains on both sides."""
        self.look(self._point(interval.rest, index))
        if interval.low < index:
            yield interval._replace(high=index - 1)
        if index < interval.high:
            yield interval._replace(low=index + 1)

    def _middle_or_end(self, interval: _Interval) -> int:
        """Return where to look: in the middle if a target or limit is met somewhere inside, else at the better end."""
        lows, highs = self._range(interval)
        both = zip((*self.aims, *self.limits), ("=",) * len(self.aims) + ("",) * len(self.limits), strict=True)
        for target, kind in both:
            low, high = lows[target.at], highs[target.at]
            inside = low < target.value < high if kind else self._is_split(target, low, high)
            if inside or math.isinf(high - low):
                return (interval.low + interval.high) // 2
        ends = (interval.low, interval.high)
        return min(ends, key=lambda index: self._lower(interval._replace(low=index, high=index)))

    def _is_split(self, limit: Target, low: float, high: float) -> bool:
        return (limit.violation(low, low) == 0) != (limit.violation(high, high) == 0)

    def _point(self, rest: Point, index: int) -> Point:
        return (*rest[: self.row], index, *rest[self.row + 1 :])

    def _range(self, interval: _Interval) -> tuple[list[float], list[float]]:
        """Return bounds of the figures in an interval."""
        first, last = self._point(interval.rest, interval.low), self._point(interval.rest, interval.high)
        lows, highs = [], []
        for at, modes in enumerate(self.modes):
            ends = {"+": (first, last), "-": (last, first)}.get(modes[self.row])
            lows.append(self._bounds(at, ends[0])[0] if ends else -INFINITE)
            highs.append(self._bounds(at, ends[1])[1] if ends else INFINITE)
        return lows, highs

    def _lower(self, interval: _Interval) -> Key:
        """Return a key that no point of an interval is below."""
        lows, highs = self._range(interval)
        return self._key(lows, highs, self._point(interval.rest, interval.low))

    # --- where to look first ----------------------------------------------------------------------------------

    def _bracket(self, rest: Point) -> tuple[int, int] | None:
        """Return the nearest points of a row, among those looked at, with less and with more than the first target."""
        aim = self.aims[0] if self.aims else self.limits[0]
        below: list[int] = []
        above: list[int] = []
        for index in range(self.sizes[self.row]):
            figures = self.known.get(self._point(rest, index))
            if figures is not None and not isinstance(figures, str):
                (below if figures[aim.at] <= aim.value else above).append(index)
        if not (below and above):
            return None
        return (below[-1], above[0]) if below[0] < above[0] else (below[0], above[-1])

    def _crossing(self, rest: Point) -> float | None:
        """Return the index in a row, with a fraction, at which the first figure would be that of its target."""
        found = self._bracket(rest)
        if found is None:
            return None
        aim = self.aims[0] if self.aims else self.limits[0]
        below, above = (self.known[self._point(rest, index)] for index in found)
        assert not isinstance(below, str)
        assert not isinstance(above, str)
        part = (aim.value - below[aim.at]) / (above[aim.at] - below[aim.at])
        return found[0] + (found[1] - found[0]) * (part if math.isfinite(part) else 0.5)

    def _secant(self, rest: Point) -> int | None:
        found = self._crossing(rest)
        return None if found is None else int(found)

    def _guess(self, rest: Point, crossings: list[tuple[Point, float]]) -> int | None:
        """Continue the crossings of the last two rows, as a power of the value of the axis that moved."""
        if not crossings:
            return None
        (before, first), (last, second) = crossings[0], crossings[-1]
        moved = [axis for axis, (a, b) in enumerate(zip(last, rest, strict=True)) if a != b]
        if len(crossings) == 2 and len(moved) == 1 and self.ordered[moved[0]]:
            (axis,) = moved
            rest_of = [each[:axis] + each[axis + 1 :] for each in (before, last)]
            x = [float(self.values[axis][each[axis]]) for each in (before, last, rest)]
            y = [self._value(first), self._value(second)]
            if rest_of[0] == rest_of[1] and min(*x, *y) > 0 and x[0] != x[1]:
                power = math.log(y[1] / y[0]) / math.log(x[1] / x[0])
                return self._index(y[1] * (x[2] / x[1]) ** power)
        return int(second)

    def _value(self, index: float) -> float:
        """Return the value at an index with a fraction."""
        values, low = self.values[self.row], int(index)
        high = min(low + 1, len(values) - 1)
        return float(values[low]) + (index - low) * (float(values[high]) - float(values[low]))

    def _index(self, value: float) -> int:
        """Return the index of the greatest value that is not above a number."""
        return max(0, sum(1 for each in self.values[self.row] if each <= value) - 1)


def _halving(numbers: range) -> list[int]:
    """Return numbers in an order in which each lies far from those before it, which bound its figures on both sides."""
    found, waiting = [], [(0, len(numbers))]
    for low, high in waiting:
        if low < high:
            middle = (low + high) // 2
            found.append(numbers[middle])
            waiting += [(low, middle), (middle + 1, high)]
    return found


class _Disorder(Exception):
    """Figures did not move as was assumed; `modes` were changed."""
