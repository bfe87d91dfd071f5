"""Find where in the tree of a spec the cursor is, also in a line that is only half written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from seqblocks.editor.steps import PathEntry
from seqblocks.errors import Report, Source
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, parse

HOLE = "word_at_the_cursor"  # stands for the word that is being written
_WORD_BEFORE = re.compile(r"[\w./-]*\Z")
_WORD_AFTER = re.compile(r"\w*")
_CLOSING = {"{": "}", "[": "]"}


class Cursor(NamedTuple):
    """The word at the cursor, and the way to it.

    start, end: of the word, as offsets in the text. path: from the root to the hole in the place of the word. text: the
    text with the hole, repaired. bracket: the innermost one that is open at the cursor, or "". colon: whether one
    follows the word.
    """

    start: int
    end: int
    path: list[PathEntry]
    text: str
    bracket: str
    colon: bool

    @property
    def root(self) -> Node:
        return self.path[0].node


def at_cursor(text: str, offset: int) -> Cursor | None:
    """Return what is at an offset; None in a comment, or in text that cannot be repaired."""
    word = _WORD_BEFORE.search(text[:offset])
    assert word
    start = word.start()
    while start < offset and text[start] == "-":  # the dash of a list
        start += 1
    after = _WORD_AFTER.match(text, offset)
    assert after
    opened = open_brackets(text[:start])
    for candidate in _candidates(text, start, after.end(), opened):
        root = parse(Source.of("", candidate), Report(None))
        path = _path_to_hole(root) if root else None
        if path:
            colon = bool(re.match(r"[ \t]*:(?!\S)", text[after.end() :]))
            return Cursor(start, after.end(), path, candidate, opened[-1:], colon)
    return None


def _candidates(text: str, start: int, end: int, opened: str) -> Iterator[str]:
    """Yield texts with the hole that may be YAML, the least repaired first."""
    head, rest, below = text[:start], *_split_line(text[end:])
    line = head[head.rfind("\n") + 1 :]
    quote = next((each for each in ('"', "'") if line.count(each) % 2), "")
    closing = quote + "".join(_CLOSING[each] for each in reversed(opened))
    for tail in (rest + below, closing + below, closing):
        yield f"{head}{HOLE}{tail}"
        yield f"{head}{HOLE}: {tail}"


def _split_line(text: str) -> tuple[str, str]:
    at = text.find("\n")
    return (text, "") if at < 0 else (text[:at], text[at:])


_TOKENS = re.compile(r"""(?:(?<=[\s,:{\[])|\A)(?:\#.*|'(?:[^']|'')*'|"(?:[^"\\]|\\.)*")|[{}\[\]]""")


def open_brackets(text: str) -> str:
    """Return the brackets of a text that are not closed, leaving out those in comments and quotes."""
    found: list[str] = []
    for token in _TOKENS.findall(text):
        if token in _CLOSING:
            found.append(token)
        elif token in ("}", "]") and found:
            found.pop()
    return "".join(found)


def _path_to_hole(root: Node) -> list[PathEntry] | None:
    path = [PathEntry(root)]
    return path if _extend(path) else None


def _extend(path: list[PathEntry]) -> bool:
    """Extend a path from its last node to the hole, if it is below."""
    match path[-1].node:
        case Scalar(text=text):
            return HOLE in text
        case Mapping() as node:
            for key, span, value in node:
                if HOLE in key:
                    path.append(PathEntry(value, key, span, on_key=True))
                    return True
                path.append(PathEntry(value, key, span))
                if _extend(path):
                    return True
                path.pop()
        case Sequence(items=items):
            for item in items:
                path.append(PathEntry(item))
                if _extend(path):
                    return True
                path.pop()
    return False
