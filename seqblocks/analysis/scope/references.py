"""Collect the places of a spec where a wire, a step, a name or a verb is read, each with the place that defines it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from seqblocks import graph
from seqblocks.errors import Span
from seqblocks.language.document import Node, Scalar, Sequence

ReferenceKind = Literal["wire", "name", "verb", "block", "argument", "step"]
Steps = Mapping[str, graph.Node | graph.Graph]  # by name; layers of a repeat by their number


class Reference(NamedTuple):
    """One place where something is read by name.

    kind: argument for a key in the call of a block, which sets an argument of that block; step for the name of a step,
    whose definition is `name:`, a single `as:`, or the verb.
    definition: the name where it is defined; None for what no file defines (a verb of seqblocks, the wire `input`).
    """

    kind: ReferenceKind
    name: str
    span: Span
    definition: Span | None


class References:
    """The references of one analysis, once each, though a step may be analysed in many layers."""

    def __init__(self) -> None:
        self.found: dict[Span, Reference] = {}
        self.others: dict[tuple[Span, Span], Reference] = {}  # of places that read several: an alias, or other layers
        self.tried: set[tuple[int, int]] = set()  # steps that no graph has, with the blocks around them
        self.places: dict[tuple[int, str], Span] = {}  # where the names of values are defined
        self.named: dict[tuple[Span, str], Span] = {}  # where steps have their names, by the places of their verbs

    def add(self, kind: ReferenceKind, name: str, span: Span, definition: Span | None) -> None:
        known = self.found.get(span)
        if known is None or known.definition is None:
            self.found[span] = Reference(kind, name, span, definition)
        elif definition is not None and definition != known.definition:
            self.others[span, definition] = Reference(kind, name, span, definition)

    def all(self) -> tuple[Reference, ...]:
        """Return all references. Of a place that reads several, that to the first one is the last."""
        return (*self.others.values(), *self.found.values())

    def define(self, values: Iterable[int], names: Iterable[tuple[str, Span]]) -> None:
        """Note where the names of values are defined: several, where a step with a false condition passes one on."""
        for value, (name, span) in zip(values, names, strict=False):
            self.places.setdefault((value, name), span)

    def set_state(self, old: int, values: Iterable[int], name: str, span: Span) -> None:
        """Note that a step sets a state of a cell: the state is defined where the cell declares it."""
        self.wire(name, span, old)
        if place := self.places.get((old, name)):
            self.define(values, [(name, place)])

    def wire(self, name: str, span: Span, value: int) -> None:
        """Add a place where a wire is read."""
        self.add("wire", name, span, None if name == "input" else self.places.get((value, name)))

    def step(self, node: graph.Node, span: Span) -> None:
        """Add a place where a step is named."""
        self.add("step", node.name, span, self.named.get((node.span, node.name), node.span))

    def path(self, steps: Steps, text: Scalar) -> None:
        """Add the steps on a path `STEP.STEP`. steps: those that its first name may stand for."""
        start = 0
        for name in text.text.split("."):
            found = steps.get(name)
            if found is None:
                return
            if isinstance(found, graph.Node):
                self.step(found, text.part(start, len(name)))
            steps, start = graph.children(found), start + len(name) + 1

    def paths(self, listed: Node | None, bodies: Iterable[graph.Graph]) -> None:
        """Add the steps in bodies on each path in a list."""
        names = [item for item in listed.items if isinstance(item, Scalar)] if isinstance(listed, Sequence) else []
        for body in bodies:
            for item in names:
                self.path(graph.children(body), item)


def linked(references: Iterable[Reference], definition: Span) -> set[Span]:
    """Return a definition with those that must have the same name, since some place reads both."""
    by_span, by_definition = defaultdict(list), defaultdict(list)
    for each in references:
        if each.definition:
            by_span[each.span].append(each.definition)
            by_definition[each.definition].append(each.span)
    found, waiting = {definition}, [definition]
    while waiting:
        for span in by_definition[waiting.pop()]:
            waiting += (new := set(by_span[span]) - found)
            found |= new
    return found
