"""Convert between the positions of seqblocks and those of the language server protocol."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from seqblocks.errors import Span

_LINE_ENDS = re.compile(r"\r\n|\n|\r")  # those of the protocol; YAML and Python know more


class Spot(NamedTuple):
    """A position as in a Span: line and column from 1, in characters."""

    line: int
    column: int


def touches(span: Span, spot: Spot) -> bool:
    """Return whether a position is in a span, or at its end."""
    return (span.line, span.column) <= spot <= (span.end_line, span.end_column)


class Place(NamedTuple):
    """A position as in the protocol: line and column from 0, in units of the agreed encoding."""

    line: int
    character: int


def _units(text: str, encoding: str) -> int:
    """Return the length of a text in the units of an encoding: utf-8, utf-16 or utf-32."""
    if encoding == "utf-32" or text.isascii():
        return len(text)
    if encoding == "utf-8":
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text) + sum(character > "\uffff" for character in text)


class Lines:
    """The lines of a text as both sides count them."""

    def __init__(self, text: str, encoding: str = "utf-16") -> None:
        self.text, self.encoding = text, encoding
        lines = text.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, lines))]
        if lines and lines[-1].splitlines() == [lines[-1]]:
            self.starts.pop()  # the last line has no line end: no other one begins after it
        self.their_starts = [0, *(match.end() for match in _LINE_ENDS.finditer(text))]

    def offset_of(self, spot: Spot) -> int:
        """Return the number of characters before a position, which is moved into the text if it is outside."""
        if spot.line > len(self.starts):
            return len(self.text)
        return min(self.starts[max(spot.line, 1) - 1] + max(spot.column, 1) - 1, len(self.text))

    def spot_at(self, offset: int) -> Spot:
        """Return the position after a number of characters."""
        line = bisect_right(self.starts, offset)
        return Spot(line, offset - self.starts[line - 1] + 1)

    def place(self, spot: Spot) -> Place:
        """Return a position of the protocol."""
        offset = self.offset_of(spot)
        line = bisect_right(self.their_starts, offset) - 1
        return Place(line, _units(self.text[self.their_starts[line] : offset], self.encoding))

    def spot(self, place: Place) -> Spot:
        """Return a position of seqblocks. One beyond the end of its line is moved to the end, as the protocol says."""
        if place.line >= len(self.their_starts):
            return self.spot_at(len(self.text))
        start = self.their_starts[max(place.line, 0)]
        end = self.their_starts[place.line + 1] if place.line + 1 < len(self.their_starts) else len(self.text)
        line = self.text[start:end].rstrip("\r\n")
        return self.spot_at(start + self._characters(line, place.character))

    def _characters(self, line: str, units: int) -> int:
        """Return how many whole characters of a line the first units are."""
        if line.isascii() or self.encoding == "utf-32":
            return min(max(units, 0), len(line))
        lengths = accumulate(_units(character, self.encoding) for character in line)
        return bisect_right([*lengths], units)

    def area(self, span: Span) -> tuple[Place, Place]:
        """Return the range of a span of this text."""
        return self.place(Spot(span.line, span.column)), self.place(Spot(span.end_line, span.end_column))


@lru_cache(maxsize=32)
def lines_of(text: str, encoding: str) -> Lines:
    """Return the lines of a text; those of the last few texts are kept."""
    return Lines(text, encoding)
