"""Compare the outlines of two models: steps that were added, removed, moved, renamed or changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, Literal, NamedTuple

from seqblocks.architect.steps import PREVIOUS, Read, Step

Kind = Literal["added", "removed", "moved", "renamed", "changed"]
Path = tuple[str, ...]
Pair = tuple[int, int]  # places of one step in two bodies


class Change(NamedTuple):
    """A difference between two models A and B, in one step or in equal ones of several layers.

    path: of the step in B, or in A if B lacks it; of several layers, `layers.0-3`. details: what differs, with its text
    in A and in B; of a moved step its place among the steps of its body, from 0; of a renamed one its name. An empty
    text: it has none. params: of a step that was added or removed, in all layers.
    """

    kind: Kind
    path: str
    verb: str
    details: tuple[tuple[str, str, str], ...] = ()
    params: int = 0

    def as_data(self) -> dict[str, Any]:
        details = [{"what": what, "before": before, "after": after} for what, before, after in self.details]
        found = {"kind": self.kind, "path": self.path, "verb": self.verb, "details": details}
        return found | ({"params": self.params} if self.kind in ("added", "removed") else {})


class _Found(NamedTuple):
    kind: Kind
    path: Path
    verb: str
    details: tuple[tuple[str, str, str], ...]
    params: int = 0


def changes(a: list[Step], b: list[Step]) -> list[Change]:
    """Return the changes that make the steps of A those of B, those of equal layers as one."""
    return _merged([*_in_body(a, b, (), _Wires(set(), (set(), set())))])


class _Wires(NamedTuple):
    """The values that steps which are the same make in A and in B, as pairs, and all those of A and of B in them."""

    pairs: set[Pair]
    paired: tuple[set[int], set[int]]

    def add(self, a: Step, b: Step) -> None:
        for pair in zip(a.outputs, b.outputs, strict=False):
            self.pairs.add(pair)
            for values, value in zip(self.paired, pair, strict=True):
                values.add(value)

    def same(self, a: Read, b: Read) -> bool:
        """Return whether two reads are of the same wire: the step before, or what the same step makes under any name.

        Of steps that are not the same, and of inputs, by a name.
        """
        if PREVIOUS in a.names & b.names or (a.value, b.value) in self.pairs:
            return True
        return not (a.value in self.paired[0] or b.value in self.paired[1]) and bool(a.names & b.names)


# --- one body ---------------------------------------------------------------------------------------------------------


def _in_body(a: list[Step], b: list[Step], path: Path, wires: _Wires) -> Iterator[_Found]:
    kept, moved = _aligned(a, b)
    for at, to in (*kept, *moved):
        wires.add(a[at], b[to])
    old, new = ({pair[side] for pair in (*kept, *moved)} for side in (0, 1))
    for at, step in enumerate(a):
        if at not in old:
            yield _Found("removed", (*path, step.name), step.verb, (), step.params)
    origin = {to: at for at, to in (*kept, *moved)}
    for to, step in enumerate(b):
        own = (*path, step.name)
        if to not in new:
            yield _Found("added", own, step.verb, (), step.params)
            continue
        if (origin[to], to) in moved:
            yield _Found("moved", own, step.verb, (("place", str(origin[to]), str(to)),))
        yield from _in_step(a[origin[to]], step, own, wires)


def _in_step(a: Step, b: Step, path: Path, wires: _Wires) -> Iterator[_Found]:
    if a.name != b.name and (a.named or b.named or _without_number(a.name) != _without_number(b.name)):
        yield _Found("renamed", path, b.verb, (("name", a.name, b.name),))
    details = tuple(_details(a, b, wires))
    if any(what != "output" for what, _, _ in details):  # alone, it follows from another step's
        yield _Found("changed", path, b.verb, details)
    for label, steps in a.bodies.items():
        inner = (*path, label) if label else path
        if label not in b.bodies:
            yield _Found("removed", inner, _only_verb(steps), (), sum(step.params for step in steps))
        else:
            yield from _in_body(steps, b.bodies[label], inner, wires)
    for label, steps in b.bodies.items():
        if label not in a.bodies:
            inner = (*path, label) if label else path
            yield _Found("added", inner, _only_verb(steps), (), sum(step.params for step in steps))


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _only_verb(steps: list[Step]) -> str:
    return steps[0].verb if len(steps) == 1 else f"{len(steps)} steps"


def _details(a: Step, b: Step, wires: _Wires) -> Iterator[tuple[str, str, str]]:
    if a.verb != b.verb:
        yield "verb", a.verb, b.verb
    for name in dict.fromkeys((*a.own, *b.own)):
        before, after = a.own.get(name, ""), b.own.get(name, "")
        if (before or "none") != (after or "none"):  # arguments of a faulty step are not known
            yield name, before, after
    for port in dict.fromkeys((*a.reads, *b.reads)):
        old, new = a.reads.get(port, ()), b.reads.get(port, ())
        if len(old) != len(new) or not all(map(wires.same, old, new)):
            before, after = " + ".join(map(_name, old)), " + ".join(map(_name, new))
            if before == after:  # the name of another wire
                before, after = (" + ".join(wire.source or _name(wire) for wire in each) for each in (old, new))
            yield f"reads {port}", before, after


def _name(wire: Read) -> str:
    return min(wire.names, key=lambda name: (name == PREVIOUS, name), default="?")


# --- which steps of two bodies are the same ---------------------------------------------------------------------------


def _aligned(a: list[Step], b: list[Step]) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs of steps that are the same: those whose order is the same too, and those that have moved.

    Steps with parameters are the same if they have the same name, since weights are loaded by it. Others are found by
    their content, or between two such pairs by their verb.
    """
    kept = _longest(list(map(_mark, a)), list(map(_mark, b)))
    places = {step.name: to for to, step in enumerate(b) if step.named}
    moved = [(at, places[step.name]) for at, step in enumerate(a) if step.named and step.name in places]
    moved = [pair for pair in moved if pair not in kept]
    taken = {at for at, _ in moved}, {to for _, to in moved}
    start, between = (-1, -1), []
    for end in [*kept, (len(a), len(b))]:
        free = [at for at in range(start[0] + 1, end[0]) if at not in taken[0]]
        other = [to for to in range(start[1] + 1, end[1]) if to not in taken[1]]
        between += _in_gap(a, b, free, other)
        start = end
    kept = sorted([*kept, *between])
    return kept, [*moved, *_elsewhere(a, b, [*kept, *moved])]


def _mark(step: Step) -> Any:
    return step.name if step.named else step.key()


def _longest(a: list[Any], b: list[Any]) -> list[Pair]:
    """Return the places of a longest common subsequence: the fewest other steps have moved."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for at in reversed(range(len(a))):
        for to in reversed(range(len(b))):
            same = a[at] == b[to]
            lengths[at][to] = lengths[at + 1][to + 1] + 1 if same else max(lengths[at + 1][to], lengths[at][to + 1])
    found, at, to = [], 0, 0
    while at < len(a) and to < len(b):
        if a[at] == b[to]:
            found.append((at, to))
            at, to = at + 1, to + 1
        elif lengths[at + 1][to] >= lengths[at][to + 1]:
            at += 1
        else:
            to += 1
    return found


def _in_gap(a: list[Step], b: list[Step], free: list[int], other: list[int]) -> list[Pair]:
    """Match equal steps in order, then those between them that have the same verb."""
    pairs: list[Pair] = []
    blocks = SequenceMatcher(None, [a[at].key() for at in free], [b[to].key() for to in other], False)
    rest: list[tuple[list[int], list[int]]] = []
    for tag, i, j, k, n in blocks.get_opcodes():
        if tag == "equal":
            pairs += zip(free[i:j], other[k:n], strict=True)
        else:
            rest.append((free[i:j], other[k:n]))
    for left, right in rest:
        verbs = [a[at].verb for at in left], [b[to].verb for to in right]
        for block in SequenceMatcher(None, *verbs, False).get_matching_blocks():
            pairs += zip(left[block.a : block.a + block.size], right[block.b : block.b + block.size], strict=True)
    return pairs


def _elsewhere(a: list[Step], b: list[Step], pairs: list[Pair]) -> list[Pair]:
    """Match steps that are left over, in any order: equal ones, then those whose outputs alone differ."""
    olds, news = {at for at, _ in pairs}, {to for _, to in pairs}
    found = []
    for key in (Step.key, Step.loose_key):
        free: dict[Any, list[int]] = {}
        for to, step in enumerate(b):
            if to not in news:
                free.setdefault(key(step), []).append(to)
        for at, step in enumerate(a):
            if at not in olds and (places := free.get(key(step))):
                found.append((at, places.pop(0)))
                olds.add(at)
                news.add(found[-1][1])
    return found


# --- equal layers -----------------------------------------------------------------------------------------------------


def _merged(found: list[_Found]) -> list[Change]:
    """Return changes in which the numbers of layers with the same change are ranges."""
    depth = max((len(each.path) for each in found), default=0)
    for place in reversed(range(depth)):
        found = [*_merged_at(found, place)]
    return [Change(each.kind, ".".join(each.path), each.verb, each.details, each.params) for each in found]


def merged_names(names: Iterable[str], notes: Mapping[str, str] | None = None) -> list[str]:
    """Return names of tensors, those that differ by numbers of layers and have the same note as one, with the note."""
    found = [_Found("changed", tuple(name.split(".")), "", (("", "", (notes or {}).get(name, "")),)) for name in names]
    return [f"{each.path} {each.details[0][2]}".rstrip() for each in _merged(found)]


def _merged_at(found: list[_Found], place: int) -> Iterator[_Found]:
    groups: dict[Any, list[_Found]] = {}
    for each in found:
        path = each.path
        if place < len(path) and path[place].isdecimal():
            key: Any = (each.kind, path[:place], path[place + 1 :], each.verb, each.details, each.params)
        else:
            key = id(each)  # faulty specs may have equal changes, of two steps with one name
        groups.setdefault(key, []).append(each)
    for same in groups.values():
        first = same[0]
        if len(same) == 1:
            yield first
        else:
            numbers = ranges(int(each.path[place]) for each in same)
            path = (*first.path[:place], numbers, *first.path[place + 1 :])
            yield first._replace(path=path, params=sum(each.params for each in same))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: 0-3,5."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *others = [number for _, number in run]
        runs.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(runs)
