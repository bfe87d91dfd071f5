"""Complete wires of layers: `layers.0.v`, `layers[-1].v or input`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from seqblocks.editor.cursor import open_brackets
from seqblocks.editor.defined import Wires

_INDEX = r"\[[^\[\]\n]*(?:\[[^\[\]\n]*\][^\[\]\n]*)*\]"  # brackets nest once, as in the language
_HALVES = (
    ("wire", rf"([^\W\d]\w*)(?:\.-?\d+|{_INDEX})\.([\w.]*)\Z"),
    ("number", r"([^\W\d]\w*)\.(-?\d*)\Z"),
    ("index", r"([^\W\d]\w*)\[([^\[\]\n\"']*(?:\w\[[^\[\]\n\"']*)?)\Z"),
)
_REST = re.compile(r"[^\n\"',{}#]*")
_REST_IN_QUOTES = re.compile(r"[^\n\"'#]*")


class Half(NamedTuple):
    """A reference to a wire of a layer that is being written.

    part: what the cursor is in: the number of the layer, the expression in brackets, or the name of the wire. start,
    end: of the reference. at: where the part, in an expression its last word, begins. rest: what follows the cursor.
    quoted: whether there are quotes around it.
    """

    part: str
    word: str
    start: int
    at: int
    end: int
    rest: str
    quoted: bool

    def needs_quotes(self, text: str) -> bool:
        """Return whether its brackets need quotes that are not there yet: inside braces and lists."""
        is_bare = not self.quoted and not self.rest and "[" in text[self.start : self.at]
        return is_bare and open_brackets(text[: self.start]) != ""


def half_written(text: str, offset: int) -> Half | None:
    """Return the reference to a layer at an offset, if the text before it looks like one."""
    line = text.rfind("\n", 0, offset) + 1
    quoted = any(text.count(quote, line, offset) % 2 for quote in ('"', "'"))
    for part, pattern in _HALVES:
        if found := re.search(pattern, text[line:offset]):
            rest = (_REST_IN_QUOTES if quoted else _REST).match(text, offset)
            assert rest
            written = found[2]
            if part == "index":
                last = re.search(r"\w*\Z", written)
                written = last[0] if last else ""
            start, at = line + found.start(), offset - len(written)
            return Half(part, found[1], start, at, rest.end(), rest[0].rstrip(), quoted)
    return None


def tails(half: Half, wires: Wires, above: bool) -> Iterator[tuple[str, str, str]]:
    """Yield what may follow, as a label, the text to write, and the name of the wire in it.

    above: whether the layers are those above the step. There may be none, so the text then says what to read instead.
    """
    default = " or input" if above and " or " not in half.rest else ""
    names = [*wires, *(["input"] if above else [])]
    for name in names:
        if half.part == "wire":
            yield name, name + ("" if half.rest.strip() else default), name
        elif half.rest.strip():
            continue
        elif half.part == "number":
            yield f"0.{name}", f"0.{name}{default}", name
        elif half.at == half.start + len(half.word) + 1:  # right after the bracket
            yield f"-1].{name}", f"-1].{name}{default}", name
