"""What a drawing shows: a box for each row of the summary, in boxes, and the wires between the boxes of one list."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from seqblocks import graph
from seqblocks.descriptions.summary import Row, rows_of, summarise
from seqblocks.errors import Diagnostic, Span, visible
from seqblocks.graph import Graph, ModelSpec
from seqblocks.types import Wire

START = -1  # as the maker of a wire: the input of the list


@dataclass(frozen=True)
class Read:
    """A wire that a box reads. maker: the box of the same list that makes it, START, or None: a list around it."""

    port: str
    label: str
    type: str
    maker: int | None


@dataclass
class Box:
    """A step, or several layers that are alike. Counts are those of one of them; None: unknown after a fault.

    names: in the list around it, one for each layer. mark: a word that a page may show in a colour.
    """

    path: str
    title: str
    verb: str
    kind: str
    input: str
    output: str
    params: int
    macs: float | None
    state: int
    count: int = 1
    span: Span | None = None
    notes: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    reads: tuple[Read, ...] = ()
    boxes: list[Box] = field(default_factory=list)
    names: tuple[str, ...] = ()
    mark: str = ""

    @property
    def side_by_side(self) -> bool:
        """Whether the boxes inside read one input each, instead of following one another."""
        return self.kind in ("parallel", "experts")

    @property
    def facts(self) -> str:
        """The shape of the output and the counts, in one line."""
        counts = [f"{self.params:,} parameters" if self.params else "", f"state {self.state:,}" if self.state else ""]
        return " · ".join(filter(None, [self.output, *counts, *self.notes]))

    def inside(self) -> Iterator[Box]:
        """Yield the box and all in it, outer ones first."""
        yield self
        for box in self.boxes:
            yield from box.inside()


def boxes_of(
    body: Graph, model: ModelSpec | None, depth: int | None = None, problems: Iterable[Diagnostic] = ()
) -> list[Box]:
    """Return the boxes of a model's steps, at most `depth` levels of them, with the problems at their lines."""
    types: Mapping[int, Wire | None] = defaultdict(lambda: None, model.types if model else {})
    labels = defaultdict(lambda: "?", model.labels if model else {})
    problems = list(problems)
    faulty = any(each.severity == "error" for each in problems) or not all(node.type for node in graph.walk(body))
    rows = rows_of(body, types) if model is None or faulty else summarise(model).rows
    found = _Maker(types, labels).boxes(rows, body, "", depth)
    _place(found, problems)
    return found


class _Maker:
    """Makes boxes from rows of the summary."""

    def __init__(self, types: Mapping[int, Wire | None], labels: Mapping[int, str]) -> None:
        self.types, self.labels = types, labels

    def boxes(self, rows: Sequence[Row], body: Graph | None, path: str, depth: int | None) -> list[Box]:
        """Return the boxes of the rows of one list. body: the list, if the rows are its steps."""
        makers: dict[int, int] = dict.fromkeys(body.reads[:1], START) if body else {}
        found = []
        for at, row in enumerate(rows):
            found.append(self.box(row, path, makers, depth))
            if row.node:
                makers |= dict.fromkeys(row.node.outputs, at)
        return found

    def box(self, row: Row, path: str, makers: Mapping[int, int], depth: int | None) -> Box:
        node = row.node
        own = graph.join(path, row.names[0])
        notes = ["added to its input"] if row.kind == "residual" else []
        box = Box(
            own, title(row), row.verb, row.kind, row.input, "?" if row.output == "None" else row.output, row.params,
            row.macs, row.state, len(row.names), node.span if node else None, (*notes, *row.remarks),
            names=tuple(row.names),
        )  # fmt: skip
        if node:
            box.reads = tuple(
                Read(port, self.labels[value], str(self.types[value] or "?"), makers.get(value))
                for port, values in node.inputs.items()
                for value in values
            )
        if depth is None or depth > 1:
            body = row.body or (node.bodies.get("") if node and not isinstance(node, graph.ExpertsNode) else None)
            box.boxes = self.boxes(row.rows, body, own, None if depth is None else depth - 1)
        return box


def title(row: Row) -> str:
    """Return the names of a row, those of layers as ranges, and its verb if that is another word."""
    if len(row.names) == 1:
        (name,) = row.names
    elif all(name.isdigit() for name in row.names):
        name = ", ".join(_ranges([int(name) for name in row.names])) + f" ({len(row.names)} x)"
    else:
        name = ", ".join(row.names)
    if not row.verb:
        return f"{row.kind} {name}"
    return name if row.verb == name else f"{name}: {row.verb}"


def _ranges(numbers: list[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        first, *others = [number for _, number in run]
        yield f"{first}-{others[-1]}" if others else f"{first}"


def _place(boxes: list[Box], problems: Iterable[Diagnostic]) -> None:
    """Add each problem to the innermost box that is written at its place or before it."""
    placed: dict[str, list[tuple[tuple[int, int], int, Box]]] = defaultdict(list)  # by file, in the order of places
    for number, box in enumerate(box for each in boxes for box in each.inside()):
        if box.span:
            placed[box.span.source.name].append((_start(box.span), number, box))
    for each in placed.values():
        each.sort()
    for problem in problems:
        known = placed.get(problem.span.source.name, []) if problem.span else []
        at = bisect_right(known, _start(problem.span), key=lambda one: one[0])
        if at:
            known[at - 1][2].problems.append(f"{problem.code}: {visible(problem.message)}")


def _start(span: Span | None) -> tuple[int, int]:
    return (span.line, span.column) if span else (0, 0)


def lanes(boxes: Sequence[Box]) -> list[tuple[int, int, int, Read]]:
    """Return the wires of a list that skip boxes, as (maker, reader, lane, wire). Wires in a lane do not overlap.

    A wire from one maker goes to all its readers in one lane.
    """
    skipping = [
        (read.maker, at, read)
        for at, box in enumerate(boxes)
        for read in box.reads
        if read.maker is not None and read.maker < at - 1
    ]
    ends: dict[int, int] = {}
    for maker, at, _ in skipping:
        ends[maker] = max(at, ends.get(maker, 0))
    free: list[int] = []  # by lane: the box at which its last wire ends
    lane: dict[int, int] = {}
    for maker in sorted(ends):
        lane[maker] = next((number for number, end in enumerate(free) if end <= maker), len(free))
        free[lane[maker] : lane[maker] + 1] = [ends[maker]]
    return [(maker, at, lane[maker], read) for maker, at, read in skipping]


def follows(boxes: Sequence[Box]) -> list[bool]:
    """Return for each pair of neighbours whether the second reads what the first makes."""
    return [not after.reads or any(r.maker == at for r in after.reads) for at, (_, after) in enumerate(pairwise(boxes))]
