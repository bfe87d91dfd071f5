"""Translate our parameter names to official ones, by the `checkpoint:` maps of a model and its blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from typing import Any

from seqblocks import graph
from seqblocks.errors import Fault, RunError, UsageError, listing
from seqblocks.graph import Entry, Graph, ModelSpec
from seqblocks.language.expressions import parse
from seqblocks.recipes import Name, Recipe
from seqblocks.record import Record

MAX_ALTERNATIVES = 16
LAYOUTS = "layouts"  # the key of a map with its further layouts
OFFICIAL = "official"  # the layout described by the map itself
OURS = "seqblocks"  # the layout of `save`: the names of the spec
HOLE = re.compile(r"\{([^}]*)\}")  # an index in a name, {layer}


@lru_cache(maxsize=1024)
def index_pattern(ours: str) -> re.Pattern[str]:
    """Return a regular expression for a key, or a part of one, with its indices as named groups."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(ours)))


def official_name(model: ModelSpec, name: str, layout: str = OFFICIAL) -> Any:
    """Return the official counterpart of a parameter: a name, or a recipe such as {concat: […]}.

    If the map gives alternatives, return the first. Raises RunError if an index has no official name, UsageError if
    the spec has no such layout.
    """
    if layout not in (known := layouts(model)):
        raise UsageError(f"the spec has no layout '{layout}', only {listing(known)}")
    return Translator(layout).official(model, name)[0].as_data()


def layouts(model: ModelSpec) -> list[str]:
    """Return the names of all layouts defined by the maps of a model and its blocks, `official` first."""
    blocks = (node for node in graph.walk(model.graph) if isinstance(node, graph.BlockNode))
    tables = [model.checkpoint, *(node.checkpoint for node in blocks)]
    return list(dict.fromkeys([OFFICIAL, *(entry.layout for table in tables for entry in table if entry.layout)]))


class _Match(Record):
    """An entry that matches the first `length` parts of a name."""

    length: int
    fixed: tuple[bool, ...]
    entry: Entry
    values: dict[str, int]

    def followed_by(self, after: list[Recipe]) -> list[Recipe]:
        """Return all combinations of the entry's alternatives with these. Raises Fault."""
        pairs = list(product(self.entry.theirs, after))
        if len(pairs) > MAX_ALTERNATIVES:
            raise Fault("E314", f"a parameter has more than {MAX_ALTERNATIVES} alternative names")
        return [_placed(theirs, self.values, rest) for theirs, rest in pairs]


class _Tree:
    """The entries of a map, indexed by the parts of their keys."""

    def __init__(self) -> None:
        self.fixed: dict[str, _Tree] = {}
        self.patterns: dict[str, _Tree] = {}
        self.entry: Entry | None = None

    @classmethod
    def of(cls, table: Iterable[Entry], layout: str) -> _Tree:
        """Return the entries of a layout: its own, which take precedence, and those of the map itself."""
        root = cls()
        for entry in sorted((each for each in table if each.layout in ("", layout)), key=lambda each: each.layout):
            at = root
            for part in entry.ours.split("."):
                at = (at.patterns if "{" in part else at.fixed).setdefault(part, cls())
            at.entry = entry
        return root

    def overlaps(self) -> bool:
        """Return whether two entries may match one name."""
        below = [*self.fixed.values(), *self.patterns.values()]
        is_ambiguous = (self.entry and below) or (self.patterns and len(below) > 1)
        return bool(is_ambiguous) or any(each.overlaps() for each in below)

    def matches(self, parts: list[str]) -> list[_Match]:
        """Return the entries that match the beginning of a name, in order of precedence.

        Longer keys come first, then keys with fixed parts instead of indices, then entries of the layout itself.
        """
        found: list[_Match] = []
        self._match(parts, 0, (), {}, found)
        return sorted(found, key=lambda at: (at.length, at.fixed, at.entry.layout, at.entry.ours), reverse=True)

    def _match(
        self, parts: list[str], at: int, fixed: tuple[bool, ...], values: dict[str, int], found: list[_Match]
    ) -> None:
        if self.entry:
            found.append(_Match(at, fixed, self.entry, values))
        if at == len(parts):
            return
        if part := self.fixed.get(parts[at]):
            part._match(parts, at + 1, (*fixed, True), values, found)
        for key, below in self.patterns.items():
            if match := index_pattern(key).fullmatch(parts[at]):
                more = {index: int(text) for index, text in match.groupdict().items()}
                below._match(parts, at + 1, (*fixed, False), values | more, found)


class Translator:
    """Translate our names to those of one layout. Caches maps and bodies; use one instance for all names of a model."""

    def __init__(self, layout: str = OFFICIAL) -> None:
        self._layout = layout
        self._trees: dict[int, _Tree] = {}
        self._nodes: dict[int, dict[str, graph.Node]] = {}

    def official(self, model: ModelSpec, name: str) -> list[Recipe]:
        """Return the alternatives for a parameter. Raises RunError."""
        if self._layout == OURS:
            return [Name(name)]
        try:
            return self._translated(model.graph, name.split("."), model.checkpoint)
        except Fault as fault:  # an expression is undefined for these indices
            raise RunError(f"the checkpoint map cannot translate {name}: {fault.message}") from None

    def tree(self, table: tuple[Entry, ...]) -> _Tree:
        if id(table) not in self._trees:
            self._trees[id(table)] = _Tree.of(table, self._layout)
        return self._trees[id(table)]

    def _translated(self, body: Graph, parts: list[str], table: tuple[Entry, ...]) -> list[Recipe]:
        found = self.tree(table).matches(parts)
        if not found:
            return self.after(body, parts, 0)
        return found[0].followed_by(self.after(body, parts, found[0].length))

    def after(self, body: Graph, parts: list[str], count: int) -> list[Recipe]:
        """Return the rest of a name after `count` parts: unchanged up to the next block, then translated by its map."""
        node, end = self._block(body, parts, count)
        if node is None:
            return [Name(".".join(parts[count:]))]
        inside = self._translated(node.bodies[""], parts[end:], node.checkpoint)
        return [_placed(Name(".".join(parts[count:end])), {}, rest) for rest in inside]

    def _block(self, body: Graph, parts: list[str], count: int) -> tuple[graph.BlockNode | None, int]:
        """Return the first block on the path whose name ends at or after part `count`, and where it ends."""
        at = 0
        while at < len(parts):
            if id(body) not in self._nodes:
                self._nodes[id(body)] = {node.name: node for node in body.nodes}
            node = self._nodes[id(body)].get(parts[at])
            at += 1
            if node is None or not node.bodies or at == len(parts):
                return None, at
            if isinstance(node, graph.BlockNode) and at >= count:
                return node, at
            if parts[at] in node.directions:
                at += 1
            if at < len(parts) and parts[at] in node.bodies:
                body = node.bodies[parts[at]]
                at += 1
            elif "" in node.bodies:
                body = node.bodies[""]
            else:
                return None, at
        return None, at


def _placed(theirs: Recipe, values: dict[str, int], rest: Recipe) -> Recipe:
    """Return the official name or recipe with its indices filled in and the rest appended. Raises Fault."""

    def fill(text: str, tail: str) -> str:
        return graph.join(HOLE.sub(lambda m: str(parse(m[1]).evaluate(values)), text), tail)

    if isinstance(rest, Name):
        return theirs.renamed(lambda text: fill(text, rest.official))
    if not isinstance(theirs, Name):
        raise Fault("E314", "a recipe cannot be applied to a recipe in the map of a block")
    return rest.renamed(lambda text: fill(theirs.official, text))
