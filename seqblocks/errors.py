"""Exceptions, warnings and diagnostics.

    SeqblocksError                 base of all exceptions of seqblocks
    ├── SpecError                  the spec is invalid; has diagnostics                  exit status 1
    │   ├── NoSpecError            the file of the spec cannot be opened                 exit status 2
    │   └── ExpectationError       the spec is valid but does not meet its `expect:`     exit status 3
    ├── UsageError                 the command or the call is invalid                    exit status 2
    ├── UnavailableError           a dependency, device or resource is missing           exit status 4
    │   └── BackendError           a requested implementation of a kernel cannot run
    │       └── BackendNameError   there is no implementation of that name               exit status 2
    └── RunError (ValueError)      a built model was called with invalid arguments       exit status 2

    SpecWarning (UserWarning)      a valid spec contains a probable mistake
    └── OverrideWarning            set={…} has a value that no step uses
    PartialWarning (UserWarning)   weights were loaded partially, as requested

Inner code raises a `Fault` without a position; code that knows the position (seqblocks/analysis) turns it into a
`Diagnostic`. Its message is written where the fault is found: in `shape` and the like of an op, or in the file of
seqblocks/analysis or seqblocks/language that makes the check. docs/messages.md lists all messages.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Literal, NamedTuple

Style = Callable[[str, str], str]
Lazy = str | Callable[[], str | None] | None  # text that is computed only if the fault is shown
MAX_DIAGNOSTICS = 20
MAX_TEXT = 1000  # maximum characters of a message, a hint etc.
_WINDOW = 100  # maximum characters shown of a source line


class SeqblocksError(Exception):
    """Base class of all exceptions of seqblocks. The message is escaped and clipped, as it may echo any value."""

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(readable(str(message)))


class UsageError(SeqblocksError):
    """The command line or the call is invalid, as opposed to the spec."""

    exit_status = 2


class UnavailableError(SeqblocksError):
    """Something required is missing: torch, a device, an optional dependency, memory, space on a disk."""

    exit_status = 4


class BackendError(UnavailableError):
    """A requested implementation of a kernel cannot run here."""


class BackendNameError(BackendError):
    """There is no implementation of the requested name."""

    exit_status = 2


class RunError(SeqblocksError, ValueError):
    """A built model was called with invalid arguments."""

    exit_status = 2


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritable(path: object, error: OSError) -> SeqblocksError:
    """Return the error about a file that cannot be written: the path is wrong, unless the disk is full."""
    what = f"{visible(str(path))} cannot be written: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return UnavailableError(f"{what}. Free some space there, or name another folder")
    return UsageError(what)


class SpecWarning(UserWarning):
    """A probable mistake in a valid spec, described by `diagnostic`."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.render())
        self.diagnostic = diagnostic

    def __reduce__(self) -> Any:
        return type(self), (self.diagnostic,)


class OverrideWarning(SpecWarning):
    """An override that no step of the model uses, probably because its name is wrong."""


class PartialWarning(UserWarning):
    """Weights were loaded partially (`partial=True`); the message lists the missing or extra ones."""

    def __init__(self, message: object = "") -> None:
        super().__init__(readable(str(message)))


def user_stacklevel() -> int:
    """Return the `stacklevel` of a warning for the line outside seqblocks that led to the caller."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "seqblocks":
        frame, depth = frame.f_back, depth + 1
    return depth


SourceKind = Literal["own", "text", "bundled", "override", "call"]


class Source(NamedTuple):
    """A source text with its display name and its kind.

    kind: own (a file of the user), text (a spec without a file), bundled (a file of this package, reached by `use:`),
    override (an option `--set`), call (an entry of `set={…}`)
    """

    name: str
    text: str
    lines: tuple[str, ...] = ()
    kind: SourceKind = "own"

    @classmethod
    def of(cls, name: str, text: str, kind: SourceKind = "own") -> Source:
        return cls(name, text, tuple(text.splitlines()), kind)

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {len(self.lines)} lines)"

    @property
    def bundled(self) -> bool:
        """Whether it is a file of this package that was imported by `use:`."""
        return self.kind == "bundled"

    @property
    def is_override(self) -> bool:
        """Whether it is an override, which has no position in a file."""
        return self.kind in ("override", "call")

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def character(self, offset: int) -> Span:
        """Return the span of the character at an offset in the text."""
        before = f"{self.text[:offset]}.".splitlines()
        return self.character_at(len(before), len(before[-1]))

    def character_at(self, line: int, column: int) -> Span:
        return Span(self, line, column, line, column + 1)


class Span(NamedTuple):
    """A range of a source text. Lines and columns count from 1, the end is exclusive."""

    source: Source
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"

    def as_data(self) -> dict[str, Any]:
        """Return the file and the range as plain data (in the records of `--format json`)."""
        return {
            "file": self.source.name,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "end_column": self.end_column,
        }

    @property
    def text(self) -> str:
        """What is written in the range, if it is in one line."""
        line = self.source.line(self.line) if self.line == self.end_line else ""
        return line[self.column - 1 : self.end_column - 1]

    def holds(self, other: Span) -> bool:
        """Return whether another span of the same source begins inside."""
        return (self.line, self.column) <= (other.line, other.column) < (self.end_line, self.end_column)

    def within(self, start: int, length: int) -> Span:
        """Return a part of a one-line span, beginning at character `start`."""
        if self.line != self.end_line:
            return self
        column = self.column + start
        return Span(self.source, self.line, column, self.line, min(column + max(length, 1), self.end_column))


class Note(NamedTuple):
    """An additional note, optionally with a span."""

    text: str
    span: Span | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.span})" if self.span else self.text


class Suggestion(str):
    """A hint that names the word that was probably meant.

    written: the word of the spec. word: what to write there. more: what to write elsewhere too.
    """

    __slots__ = ("more", "word", "written")
    written: str
    word: str
    more: tuple[tuple[Span, str], ...]

    @classmethod
    def of(cls, text: str, written: str, word: str, more: Iterable[tuple[Span, str]] = ()) -> Suggestion:
        made = cls(text)
        made.written, made.word, made.more = written, word, tuple(more)
        return made


class Fix(NamedTuple):
    """An edit that removes a fault: the text to write in a range. span: None if it is not in a file (an override).

    more: further ranges of the same file, and the texts to write there at once. They may be empty.
    """

    span: Span | None
    text: str
    more: tuple[tuple[Span, str], ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the edit as plain data, with the key `more` only if there are further ones."""
        data = {"text": self.text} | (self.span.as_data() if self.span else {})
        return data | ({"more": [{"text": text} | span.as_data() for span, text in self.more]} if self.more else {})


def _fix(hint: str | None, span: Span | None, notes: Iterable[Note]) -> Fix | None:
    """Return the edit that a hint suggests, if the misspelt word is at `span`, or is a value that a note points to."""
    if not isinstance(hint, Suggestion) or span is None:
        return None
    if span.source.is_override:
        return Fix(None, hint.word)
    line = span.source.line(span.line)
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    at = line.find(hint.written, span.column - 1, end) if hint.written else -1
    if at < 0:
        values = (note.span for note in notes if note.span and not note.span.source.bundled)
        return next((Fix(value, hint.word) for value in values if value.text == hint.written), None)
    if any(other.source.name != span.source.name for other, _ in hint.more):
        return None
    return Fix(Span(span.source, span.line, at + 1, span.line, at + 1 + len(hint.written)), hint.word, hint.more)


Severity = Literal["error", "warning"]


class Diagnostic(NamedTuple):
    """One error or warning about a spec: message, span, what was expected and found, hint and notes.

    The code of a warning begins with W, even if `--strict` turns it into an error.
    """

    code: str
    message: str
    span: Span | None = None
    expected: str | None = None
    found: str | None = None
    notes: tuple[Note, ...] = ()
    hint: str | None = None
    severity: Severity = "error"
    fix: Fix | None = None

    def as_data(self) -> dict[str, Any]:
        """Return the diagnostic as plain data (the `--format json` record)."""
        data: dict[str, Any] = {"code": self.code, "severity": self.severity, "message": self.message}
        if self.span:
            data |= self.span.as_data()
        data |= {"expected": self.expected, "found": self.found, "hint": self.hint}
        data["notes"] = [{"text": note.text} | (note.span.as_data() if note.span else {}) for note in self.notes]
        data["fix"] = self.fix.as_data() if self.fix else None
        return data

    def clipped(self) -> Diagnostic:
        """Return the diagnostic with texts of limited length."""
        texts = (self.message, self.expected, self.found, self.hint)
        message, expected, found, hint = (text if text is None else clip(text) for text in texts)
        notes = tuple(note._replace(text=clip(note.text)) for note in self.notes)
        return self._replace(message=message or "", expected=expected, found=found, hint=hint, notes=notes)

    def render(self, style: Style = lambda role, text: text) -> str:
        """Return the diagnostic as text: header, source line with a caret, notes, styled by `style(role, text)`."""
        out = [style(self.severity, f"{self.severity}[{self.code}]") + style("message", f": {_line(self.message)}")]
        gutter = " "
        if self.span:
            gutter = " " * len(str(self.span.line))
            out.append(f"{gutter}{style('gutter', '-->')} {_line(str(self.span))}")
            out += _excerpt(self.span, gutter, style)
        remarks = [("expected", self.expected), ("found", self.found)]
        remarks += [("note", str(note)) for note in self.notes]
        remarks += [("hint", self.hint)]
        marks = style("gutter", "=")
        out += [f"{gutter} {marks} {style(label, label)}: {_line(text)}" for label, text in remarks if text]
        return "\n".join(out)


def _excerpt(span: Span, gutter: str, style: Style) -> list[str]:
    line = span.source.line(span.line)
    start = span.column - 1
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    cut = max(0, start - _WINDOW // 2) if len(line) > _WINDOW else 0
    shown = "".join(c if c.isprintable() else " " for c in line[cut : cut + _WINDOW])
    lead, tail = ("…" if cut else ""), ("…" if cut + _WINDOW < len(line) else "")
    width = max(1, min(end, cut + len(shown)) - start)
    caret = " " * (start - cut + len(lead)) + style("caret", "^" * width)
    bar = style("gutter", "|")
    return [f"{gutter} {bar}", f"{span.line} {bar} {lead}{shown}{tail}".rstrip(), f"{gutter} {bar} {caret}"]


class SpecError(SeqblocksError):
    """An invalid spec. `diagnostics` lists all faults; `str()` returns them as readable text."""

    exit_status = 1

    def __init__(self, diagnostics: Sequence[Diagnostic], dropped: int = 0) -> None:
        self.diagnostics = tuple(diagnostics)
        self.dropped = dropped
        Exception.__init__(self, render_all(self.diagnostics, dropped))  # whose parts are escaped and clipped

    def __reduce__(self) -> Any:  # keep the diagnostics when pickled across processes
        return type(self), (self.diagnostics, self.dropped)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the user's line and the diagnostics, without frames of seqblocks."""
        call = _users_line(self.__traceback__)
        return [type(self).__name__, *([call] if call else []), "", *str(self).splitlines()]


def _users_line(frames: TracebackType | None) -> str:
    """Return the last line outside seqblocks that led to an error, with its number; empty if it is unknown."""
    import linecache  # only needed in a notebook

    shown = ""
    while frames and frames.tb_frame.f_globals.get("__name__", "").split(".")[0] != "seqblocks":
        code = linecache.getline(frames.tb_frame.f_code.co_filename, frames.tb_lineno, frames.tb_frame.f_globals)
        shown = f"----> {frames.tb_lineno} {visible(code.strip())}" if code else ""
        frames = frames.tb_next
    return shown


class NoSpecError(SpecError):
    """The spec does not exist, or its file cannot be opened."""

    exit_status = 2


class ExpectationError(SpecError):
    """The spec is valid but does not meet its own `expect:`."""

    exit_status = 3


def render_all(diagnostics: Sequence[Diagnostic], dropped: int = 0, style: Style = lambda role, text: text) -> str:
    """Return all diagnostics as text, with a total count. dropped: number of further ones that are not listed."""
    parts = [d.render(style) for d in diagnostics]
    closing: list[str] = []
    for severity in dict.fromkeys(d.severity for d in diagnostics):
        shown = sum(d.severity == severity for d in diagnostics)
        more = 0 if closing else dropped
        closing.append(f"{shown + more} {severity}{'s' if shown + more != 1 else ''}")
        closing[-1] += f" (the first {shown} shown)" if more else ""
    return "\n\n".join([*parts, ", ".join(closing)])


class Fault(Exception):
    """A fault raised by code that does not know the position.

    at: the faulty argument or port. entry: the faulty one of its values, if the argument is a list.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        at: str | None = None,
        entry: str | None = None,
        expected: Lazy = None,
        found: str | None = None,
        hint: Lazy = None,
        notes: Iterable[Note] = (),
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.at, self.entry = code, message, at, entry
        self.expected, self.found, self.hint = expected, found, hint
        self.notes = tuple(notes)

    @property
    def severity(self) -> Severity:
        return "warning" if self.code.startswith("W") else "error"

    def copy(self) -> Fault:
        """Return a copy of the fault that has not been raised."""
        return Fault(
            self.code, self.message, at=self.at, entry=self.entry, expected=self.expected, found=self.found,
            hint=self.hint, notes=self.notes,
        )  # fmt: skip

    def as_diagnostic(self, span: Span | None, notes: Iterable[Note] = ()) -> Diagnostic:
        """Return the diagnostic of this fault at `span`."""
        expected = self.expected() if callable(self.expected) else self.expected
        hint = self.hint() if callable(self.hint) else self.hint
        notes = (*self.notes, *notes)
        fix = _fix(hint, span, notes)
        hint = None if hint is None else str(hint)
        made = Diagnostic(self.code, self.message, span, expected, self.found, notes, hint, self.severity, fix)
        return made.clipped()


class _Wrong:
    """A fault that depends on values: its code with each possible cause, the reported one first, and its diagnostic.

    The diagnostic is None if it is not listed.
    """

    def __init__(self, causes: list[tuple[Any, ...]]) -> None:
        self.causes = causes
        self.diagnostic: Diagnostic | None = None


class Report:
    """Collect diagnostics: one per code and cause, and at most `limit` (None: all).

    The cause of a fault is the place where the wrong value was written, if known, else the place of the fault. A wrong
    number is therefore reported once, however often it is used, and so is a faulty line that is used in 48 layers.
    """

    def __init__(self, limit: int | None = MAX_DIAGNOSTICS) -> None:
        self.limit = limit
        self.diagnostics: list[Diagnostic] = []
        self.dropped = 0
        self.calls = 0  # also of those that are not shown
        self._seen: set[tuple[Any, ...]] = set()  # codes with the causes of faults
        self._wrong: dict[frozenset[tuple[str, int, int]], _Wrong] = {}  # by places of values, one of which is wrong

    def add(self, diagnostic: Diagnostic) -> None:
        """Add a diagnostic, unless there is one with the same code and place, or there are too many."""
        self.calls += 1
        if self._is_new(diagnostic.code, diagnostic.message, [diagnostic.span]):
            self._append(diagnostic)

    def fault(
        self,
        fault: Fault,
        span: Span | None,
        notes: Callable[[], Iterable[Note]] = tuple,
        causes: Sequence[Span | None] = (),
        values: Sequence[Span] = (),
    ) -> None:
        """Report a fault at `span`, unless it was reported before. Its hint and notes are computed only if it is shown.

        causes: where the wrong value was written, then the values that it was computed from.
        values: if the computation itself is correct (a bundled block), those of the causes that are values. One of them
        is wrong. If another fault depends on all of these and on more, only this one is listed.
        """
        self.calls += 1
        fault.__traceback__ = None  # it would keep every frame between here and the check that raised it
        places = frozenset((value.source.name, value.line, value.column) for value in values)
        if self._is_new(fault.code, fault.message, causes or [span], places):
            self._append(fault.as_diagnostic(span, notes()))
            if places:
                self._wrong[places].diagnostic = self.diagnostics[-1]

    def _is_new(
        self,
        code: str,
        message: str,
        causes: Sequence[Span | None],
        values: frozenset[tuple[str, int, int]] = frozenset(),
    ) -> bool:
        """Return whether to show a fault. New faults over the limit are only counted."""
        places = [(code, span.source.name, span.line, span.column) if span else (code, message) for span in causes]
        if not self._seen.isdisjoint(places) or any(places[0] in wrong.causes for wrong in self._wrong.values()):
            return False
        if values:
            if any(wrong <= values for wrong in self._wrong):
                return False
            for wrong in [wrong for wrong in self._wrong if values < wrong]:
                self._remove(self._wrong.pop(wrong))
            self._wrong[values] = _Wrong(places)
        self._seen.add(places[0])
        shown = self.limit is None or len(self.diagnostics) < self.limit
        self.dropped += not shown
        return shown

    def _remove(self, wrong: _Wrong) -> None:
        self._seen.discard(wrong.causes[0])
        if wrong.diagnostic is None:
            self.dropped -= 1
        else:
            self.diagnostics.remove(wrong.diagnostic)

    def _append(self, diagnostic: Diagnostic) -> None:
        diagnostic = diagnostic.clipped()
        if odd := diagnostic.span and _non_ascii_note(diagnostic.span):
            diagnostic = diagnostic._replace(notes=(*diagnostic.notes, odd))
        self.diagnostics.append(diagnostic)

    def __bool__(self) -> bool:
        return bool(self.diagnostics)

    def raise_if_any(self) -> None:
        if self.diagnostics:
            raise SpecError(in_order(self.diagnostics), self.dropped)


def _non_ascii_note(span: Span) -> Note | None:
    """Return a note on a non-ASCII character, which may look like an ASCII one; words of the language have none."""
    text = span.source.line(span.line)[span.column - 1 : span.end_column - 1] if span.line == span.end_line else ""
    replaced = "\ufffd"  # replaces invalid bytes
    found = next((c for c in text if not c.isascii() and c != replaced), None)
    if found is None:
        return None
    import unicodedata  # only needed after an error

    return Note(f"it contains U+{ord(found):04X}, {unicodedata.name(found, 'a character without a name').lower()}")


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sort diagnostics by file, in order of first appearance, then by position."""
    found = list(diagnostics)
    files = {name: at for at, name in reversed(list(enumerate(d.span.source.name if d.span else "" for d in found)))}
    return sorted(
        found, key=lambda d: (files[d.span.source.name], d.span.line, d.span.column) if d.span else (-1, 0, 0)
    )


def listing(words: Iterable[object], limit: int = 12) -> str:
    """Format a list of words for a message: `a, b, c, …`."""
    texts = [str(w) for w in islice(words, limit + 1)]
    return ", ".join(texts[:limit]) + (", …" if len(texts) > limit else "")


# --- text that may echo a value of the user ---------------------------------------------------------------------------


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return text of at most `limit` characters: its beginning and its end, if it is longer."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[len(text) - limit // 2 + 3 :]}"


def visible(text: str) -> str:
    r"""Return text in one line, with unprintable characters escaped: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escape_controls(text: str) -> str:
    """Return text with unprintable characters escaped, except line ends."""
    return text if text.isprintable() else "\n".join(map(visible, text.split("\n")))


def readable(text: str, limit: int = 2 * MAX_TEXT) -> str:
    """Return text for a message that may echo any value: clipped, and escaped except line ends."""
    return clip(escape_controls(clip(text, limit)), limit)


def _line(text: str) -> str:
    return clip(visible(clip(text)))


def quote(text: str, limit: int = 60) -> str:
    """Quote user text for a message, escaped and truncated."""
    clean = "".join(c if c.isprintable() else "·" for c in text[: limit + 1])
    return f"'{clean}'" if len(clean) <= limit else f"'{clean[:limit]}…'"
