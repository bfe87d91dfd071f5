"""Find the steps that are written in a file, in its tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from seqblocks.editor.positions import Spot, touches
from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Node, Scalar, Sequence


class PathEntry(NamedTuple):
    """A node on the way to a position, and where it is in the node around it: under a key, or in a list.

    on_key: whether the position is in the key.
    """

    node: Node
    key: str | None = None
    key_span: Span | None = None
    on_key: bool = False


def trail(root: Node, spot: Spot) -> list[PathEntry]:
    """Return the nodes from the root to the innermost one at a position."""
    found = [PathEntry(root)]
    while inner := _inner(found[-1].node, spot):
        found.append(inner)
        if inner.on_key:
            break
    return found


def _inner(node: Node, spot: Spot) -> PathEntry | None:
    match node:
        case Mapping():
            for key, span, value in node:
                if touches(span, spot):
                    return PathEntry(value, key, span, on_key=True)
                if touches(value.span, spot) and value.span != span:
                    return PathEntry(value, key, span)
        case Sequence():
            return next((PathEntry(item) for item in node.items if touches(item.span, spot)), None)
    return None


class Written(NamedTuple):
    """A step as it is written. span: of its verb. arguments: None if it has none."""

    verb: str
    span: Span
    node: Node
    arguments: Node | None

    def get(self, key: str) -> Node | None:
        return self.arguments.get(key) if isinstance(self.arguments, Mapping) else None


def as_step(item: Node) -> Written | None:
    """Read an item of a list as a step, if it may be one: a word, or a mapping with one key."""
    match item:
        case Scalar(value=str(verb), span=span):
            return Written(verb, span, item, None)
        case Mapping(entries=entries) if len(entries) == 1:
            ((verb, (span, node)),) = entries.items()
            return Written(verb, span, item, node)
    return None


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, in the order of the text."""
    yield node
    match node:
        case Mapping():
            for _, _, value in node:
                yield from walk(value)
        case Sequence():
            for item in node.items:
                yield from walk(item)


def items_of_lists(root: Node) -> Iterator[Written]:
    """Yield what may be a step: the items of all lists."""
    for node in walk(root):
        if isinstance(node, Sequence):
            yield from filter(None, map(as_step, node.items))
