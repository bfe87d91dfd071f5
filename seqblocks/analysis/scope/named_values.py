"""Named values: `let:` entries and arguments of blocks."""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Callable, Container, Iterator
from typing import Any

from seqblocks.errors import Fault, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.expressions import MAX_LENGTH, UNKNOWN, has_syntax, parse

_INITIALISER = r"(?s)\w+\(.*\)|.+\sif\s.+\selse\s.+"  # is not always an expression; compiled after a fault
Compute = Callable[[list[str]], Any]  # of a `let:` entry; takes the cycle of names that it closes, if any


class Names(abc.Mapping[str, Any]):
    """The names of one scope and its enclosing scopes.

    `let:` entries are computed on demand, so their order does not matter. A scope is incomplete if some of its names
    could not be read. Any name that it lacks is then UNKNOWN.
    """

    def __init__(self, outer: Names | None = None, values: dict[str, Any] | None = None) -> None:
        self.outer = outer
        self.known: dict[str, Any] = values or {}
        self.pending: dict[str, Compute] = {}
        self.written: dict[str, tuple[Node, Names]] = {}  # the node of each value, and the names in scope there
        self.incomplete = False
        self.is_of_repeat = False  # whether its names are those of the number of a layer

    def __getitem__(self, name: str) -> Any:
        scope: Names | None = self
        while scope is not None:
            if name in scope.pending:
                scope._compute(name)
            if name in scope.known:
                return scope.known[name]
            scope = scope.outer
        if self.incomplete or name in self:
            return UNKNOWN
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        scope: Names | None = self
        incomplete = False
        while scope is not None:
            if name in scope.known or name in scope.pending:
                return True
            incomplete |= scope.incomplete
            scope = scope.outer
        return incomplete and isinstance(name, str) and name.isidentifier()

    def __iter__(self) -> Iterator[str]:
        return iter({**self.known, **self.pending, **dict.fromkeys(() if self.outer is None else self.outer)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def source(self, name: str) -> tuple[Node, Names] | None:
        """Return the node that defines the value of a name, and the names in scope there."""
        scope: Names | None = self
        while scope is not None:
            if name in scope.known or name in scope.pending:
                return scope.written.get(name)
            scope = scope.outer
        return None

    def is_of_layer(self, name: str) -> bool:
        """Return whether a name is that of the number of a layer, or of layers, which hides other names."""
        scope: Names | None = self
        while scope is not None and not (scope.is_of_repeat and name in scope.known):
            scope = scope.outer
        return scope is not None

    def compute_all(self, some: Container[str] | None = None) -> None:
        """Compute all `let:` entries, or some of them, so that faults in unused ones are reported too."""
        for name in list(self.pending):
            if some is None or name in some:
                self[name]

    def _compute(self, name: str) -> None:
        # Dependencies are computed first, so that a long chain of entries does not recurse deeply.
        open_entries = {name: iter(needed_names(self.written[name][0]))}
        while open_entries:
            last = next(reversed(open_entries))
            ring: list[str] = []
            for each in open_entries[last]:
                if each in open_entries:
                    names = [*open_entries]
                    ring = [*names[names.index(each) :], each]
                elif each in self.pending:
                    open_entries[each] = iter(needed_names(self.written[each][0]))
                else:
                    continue
                break
            if ring or next(reversed(open_entries)) == last:
                compute = self.pending.pop(last)
                self.known[last] = compute(ring)
                del open_entries[last]


def shown_value(value: Any) -> str:
    """Format a value for a message."""
    if isinstance(value, list):
        return f"[{listing('[…]' if isinstance(each, list) else shown_value(each) for each in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quote(value) if isinstance(value, str) else str(value)[:60]


def names_in(text: str) -> list[str]:
    """Return the names in an expression, or none if the text is not an expression."""
    if text.isidentifier():
        return [text]
    if not has_syntax(text):
        return []
    try:
        return [name for name, _ in parse(text).names]
    except Fault:
        return []


def needed_names(node: Node) -> list[str]:
    """Return the names that a value may depend on, possibly including plain words."""
    if isinstance(node, Sequence):
        return [name for item in node.items for name in needed_names(item)]
    return names_in(node.value) if isinstance(node, Scalar) and isinstance(node.value, str) else []


def names_inside(node: Node) -> list[str]:
    """Return the names that any part of a value may depend on, as in an initialiser; possibly including other words."""
    match node:
        case Mapping():
            return [name for _, _, value in node for name in names_inside(value)]
        case Sequence():
            return [name for item in node.items for name in names_inside(item)]
        case Scalar(value=str(text)):
            if (found := names_in(text)) or len(text) > MAX_LENGTH or not re.fullmatch(_INITIALISER, text):
                return found
            return re.findall(r"[A-Za-z_]\w*", text)
    return []
