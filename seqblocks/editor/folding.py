"""Lines that an editor can fold, and what it selects around a position, from the tree of the text."""

from __future__ import annotations

from collections.abc import Iterator

from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.steps import trail, walk
from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Sequence


def folds(opened: Opened) -> list[tuple[int, int]]:
    """Return the first and last line of what can be folded: values of keys, and items of lists, in several lines."""
    found: dict[int, int] = {}
    for span in _parts(opened):
        now = opened.now(span)
        last = _last_line(now) if now else 0
        if now and last > now.line:
            found[now.line] = max(last, found.get(now.line, 0))
    return sorted(found.items())


def _parts(opened: Opened) -> Iterator[Span]:
    """Yield the spans of keys with their values, and of items."""
    for node in walk(opened.root) if opened.root else ():
        match node:
            case Mapping():
                for _, span, value in node:
                    if value.span.line >= span.line:  # an alias lies elsewhere
                        yield span._replace(end_line=value.span.end_line, end_column=value.span.end_column)
            case Sequence():
                yield from (item.span for item in node.items)


def _last_line(span: Span) -> int:
    """Return the last line with text of a span: that of a list without brackets ends where the next key begins."""
    line = span.end_line
    if not span.source.line(line)[: span.end_column - 1].strip():
        line -= 1
    while line > span.line and (not (text := span.source.line(line).strip()) or text.startswith("#")):
        line -= 1
    return line


def around(opened: Opened, spot: Spot) -> list[Span]:
    """Return the spans around a position, the innermost first, each inside the next."""
    known = opened.before(spot)
    if known is None or opened.root is None:
        return []
    found: list[Span] = []
    for part in trail(opened.root, known):
        spans = [part.node.span]
        if part.key_span:
            whole = part.key_span._replace(end_line=part.node.span.end_line, end_column=part.node.span.end_column)
            spans = [whole, part.key_span if part.on_key else part.node.span]
        found += [now for each in spans if (now := opened.now(each))]
    nested: list[Span] = []
    for span in found:
        if not nested or (span != nested[-1] and _within(span, nested[-1])):
            nested.append(span)
    return nested[::-1]


def _within(span: Span, outer: Span) -> bool:
    begins = (outer.line, outer.column) <= (span.line, span.column)
    return begins and (span.end_line, span.end_column) <= (outer.end_line, outer.end_column)
