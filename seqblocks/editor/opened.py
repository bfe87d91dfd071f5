"""A spec that is being edited: its text, and what is known of it while it has faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from seqblocks.analysis.analyse import Analysis, Folders, analyse
from seqblocks.analysis.scope.references import Reference
from seqblocks.analysis.step_list import LocatedStep
from seqblocks.editor.positions import Lines, Spot, lines_of, touches
from seqblocks.errors import Source, Span
from seqblocks.language.document import Mapping

_SPEC = re.compile(r"""(?m)^(["']?)seqblocks\1[ \t]*:|\A(?:\s|\#.*\n)*\{\s*(["']?)seqblocks\2\s*:""")


def is_spec(text: str) -> bool:
    """Return whether a YAML text declares to be a spec: other YAML files get no diagnostics."""
    return bool(_SPEC.search(text))


class Opened:
    """One state of the text of a spec, and its analysis.

    Text that cannot be read as YAML has no steps or references: those of `before`, an earlier state that could be read,
    are then used where the lines have not changed since.
    """

    def __init__(
        self, text: str, path: Path | None, allow_use: Folders = (), before: Opened | None = None, name: str = ""
    ) -> None:
        self.text, self.path = text, path
        self.name = str(path) if path else name or "<text>"
        self.allow_use = allow_use
        self.analysis = self.again(text)
        self.source = Source.of(self.name, text, "own")
        self.known = self
        if self.analysis.file is None and before is not None:
            self.known = before.known
        self.moved = _Moved(self.known.text, text)

    def again(self, text: str) -> Analysis:
        """Analyse another text in the place of this one."""
        # Without a file there is no folder that the paths of used files could be relative to.
        files: dict[str, str] | None = None if self.path else {}
        return analyse(text, self.name, self.path and self.path.parent, files=files, allow_use=self.allow_use)

    def span(self, start: int, end: int) -> Span:
        """Return the span between two offsets of the text."""
        return Span(self.source, *self.lines.spot_at(start), *self.lines.spot_at(end))

    @property
    def lines(self) -> Lines:
        return lines_of(self.text, "utf-32")

    @property
    def root(self) -> Mapping | None:
        """The tree of the last text that could be read."""
        file = self.known.analysis.file
        return file.root if file else None

    @cached_property
    def steps(self) -> list[LocatedStep]:
        """The steps written in this file, in the places where they are known."""
        return self.known.analysis.steps if self.known is self else self.known.steps

    @cached_property
    def own_references(self) -> dict[Span, Reference]:
        """The references in this file."""
        found = self.known.analysis.references
        return {each.span: each for each in found if each.span.source.name == self.name}

    def is_own(self, span: Span) -> bool:
        """Return whether a span is in this file."""
        return span.source.name == self.name

    def before(self, spot: Spot) -> Spot | None:
        """Return where a position of the text is in the known text; None in lines that have changed."""
        line = self.moved.before(spot.line)
        return Spot(line, spot.column) if line else None

    def now(self, span: Span) -> Span | None:
        """Return where a span of the known text is now; None in lines that have changed. Other files do not change."""
        if self.known is self or not self.is_own(span):
            return span
        line, end = self.moved.now(span.line), self.moved.now(span.end_line)
        return Span(self.source, line, span.column, end, span.end_column) if line and end else None

    def now_all(self, spans: Iterator[Span]) -> list[Span]:
        return [found for each in spans if (found := self.now(each))]

    def reference_at(self, spot: Spot) -> Reference | None:
        """Return the reference at a position of the known text."""
        return next((each for span, each in self.own_references.items() if touches(span, spot)), None)


class _Moved:
    """Which lines of two texts are the same: those above and below what was edited."""

    def __init__(self, old: str, new: str) -> None:
        ours, theirs = old.splitlines(), new.splitlines()
        self.old, self.new = len(ours), len(theirs)
        self.same = old is new
        pairs = zip(ours, theirs, strict=False)
        self.head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rest = min(self.old, self.new) - self.head
        ends = zip(ours[::-1][:rest], theirs[::-1][:rest], strict=False)
        self.tail = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))

    def before(self, line: int) -> int | None:
        return line if self.same else self._moved(line, self.new, self.old)

    def now(self, line: int) -> int | None:
        return line if self.same else self._moved(line, self.old, self.new)

    def _moved(self, line: int, of: int, to: int) -> int | None:
        if line <= self.head:
            return line
        return line + to - of if line > of - self.tail else None
