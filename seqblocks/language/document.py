"""Parse YAML text into a tree of nodes with source positions.

The dialect is a subset of YAML 1.2: core-schema scalars (`7:1`, `on` and `no` are words, `1e-3` is a number), one
document, no tags, no merge keys, no duplicate keys, and limits on size, depth and aliases. The parser works on events,
so the limits are enforced while reading, before any large structure is built.
"""

from __future__ import annotations

import itertools
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from seqblocks.errors import Diagnostic, Note, Report, Source, Span, quote
from seqblocks.record import Record

MAX_BYTES = 2 * 1024 * 1024
MAX_DEPTH = 48
MAX_NODES = 100_000  # after alias expansion
SOLE = "\0"  # key of a step's only argument after an override turned `linear: 64` into a mapping

Value = None | bool | int | float | str


# A spec has a thousand nodes. They have an `__init__` of their own, which is four times as fast as that of Record.


class Node(Record):
    """Base class of tree nodes: a span, and the number and depth of the nodes below it (after alias expansion)."""

    span: Span
    size: int
    depth: int

    def __init__(self, span: Span, size: int, depth: int) -> None:
        self.span, self.size, self.depth = span, size, depth


class Scalar(Node):
    """A leaf: `value` resolved by the core schema, `text` as written (without quotes)."""

    value: Value
    text: str

    def __init__(self, span: Span, size: int, depth: int, value: Value, text: str) -> None:
        self.span, self.size, self.depth = span, size, depth
        self.value, self.text = value, text

    def part(self, start: int, length: int) -> Span:
        """Return the span of a part of the text; the whole span if the text has escapes or several lines."""
        span = self.span
        written = span.source.line(span.line)[span.column - 1 : span.end_column - 1]
        before = written.rfind(self.text)  # the length of an anchor or a quote
        return span if before < 0 else span.within(before + start, length)


class Sequence(Node):
    """A list."""

    items: list[Node]

    def __init__(self, span: Span, size: int, depth: int, items: list[Node]) -> None:
        super().__init__(span, size, depth)
        self.items = items


class Mapping(Node):
    """Keys in order of appearance, each with its own span and its value.

    An incomplete mapping has invalid keys, or keys that are unknown where the mapping is used. Any key that it lacks
    is UNKNOWN, and is not reported as missing.
    """

    entries: dict[str, tuple[Span, Node]]
    incomplete: bool

    def __init__(
        self, span: Span, size: int, depth: int, entries: dict[str, tuple[Span, Node]], incomplete: bool = False
    ) -> None:
        super().__init__(span, size, depth)
        self.entries, self.incomplete = entries, incomplete

    def get(self, key: str) -> Node | None:
        entry = self.entries.get(key)
        return entry[1] if entry else None

    def __iter__(self) -> Iterator[tuple[str, Span, Node]]:
        return ((key, span, node) for key, (span, node) in self.entries.items())


def kind_of(node: Node | None) -> str:
    """Describe a node for a message, such as "a mapping" or "the number 3"."""
    match node:
        case None | Scalar(value=None):
            return "nothing"
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case Scalar(value=bool()):
            return f"the boolean {node.text}"
        case Scalar(value=int() | float()):
            return f"the number {node.text}" if len(node.text) < 40 else "a number"
        case Scalar():
            return f"the word {quote(node.text)}"
    return "a node"


def plain(node: Node) -> Any:
    """Return the tree as plain Python data, without positions."""
    match node:
        case Mapping():
            return {key: plain(value) for key, _, value in node}
        case Sequence():
            return [plain(item) for item in node.items]
        case Scalar():
            return node.value
    raise AssertionError(node)


def show(node: Node) -> str:
    """Return the tree as text, one line per node, as printed by `seqblocks show --stage document`."""
    return "\n".join(_show(node, "", 0))


def _show(node: Node, label: str, depth: int) -> Iterator[str]:
    head = f"{node.span.line}:{node.span.column}".ljust(8) + "  " * depth + (f"{label}: " if label else "")
    match node:
        case Mapping():
            yield head + "mapping"
            for key, _, value in node:
                yield from _show(value, key, depth + 1)
        case Sequence():
            yield head + "list"
            for item in node.items:
                yield from _show(item, "-", depth + 1)
        case Scalar():
            yield head + f"{node.value!r}"


# --- YAML 1.2 core schema, section 10.3.2 -----------------------------------------------------------------------

_HEX = r"0x[0-9a-fA-F]{1,64}\Z"  # these patterns are compiled on first use
_OCT = r"0o[0-7]{1,64}\Z"
_FLOAT = r"[-+]?(\.[0-9]{1,300}|[0-9]{1,300}(\.[0-9]{0,300})?)([eE][-+]?[0-9]{1,10})?\Z"
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


def resolve(text: str) -> Value:
    """Return the value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "0123456789+-.":
        return text
    digits = text[1:] if text[0] in "+-" else text
    if digits.isdecimal() and digits.isascii() and len(digits) <= 300:
        return int(text)
    if text.startswith("0x") and re.match(_HEX, text):
        return int(text, 16)
    if text.startswith("0o") and re.match(_OCT, text):
        return int(text[2:], 8)
    if re.match(_FLOAT, text):
        return float(text)
    return text


# --- reading ----------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Raised when parsing cannot continue. The diagnostic is already in the report."""


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def decode(data: bytes, name: str, report: Report) -> str | None:
    """Decode bytes as UTF-8, or report an error and return None."""
    data = data.removeprefix(BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        line, column = _place(before)
        source = Source.of(name, data.decode("utf-8", "replace"))
        span = Span(source, line, column, line, column + 1)
        report.add(
            Diagnostic("E103", f"byte 0x{data[error.start]:02x} is not UTF-8", span, hint="save the file as UTF-8")
        )
        return None


def parse(source: Source, report: Report) -> Node | None:
    """Parse YAML text into a tree. Errors go to the report; return None if the text cannot be parsed."""
    start = Span(source, 1, 1, 1, 1)
    if len(source.text) > MAX_BYTES:
        message = f"the text has {len(source.text):,} characters"
        report.add(Diagnostic("E104", message, start, expected=f"at most {MAX_BYTES:,}"))
        return None
    try:
        root = _Reader(source, report).read()
    except _Stop:
        return None
    if root is None:
        report.add(Diagnostic("E108", "the spec is empty", start, hint="begin with `seqblocks: 1`"))
    return root


class _Open:
    """A list or mapping whose end has not been read yet."""

    __slots__ = ("anchor", "depth", "entries", "flow", "incomplete", "items", "key", "keyed", "mapping", "size", "span")

    def __init__(self, span: Span, mapping: bool, anchor: str | None, flow: bool) -> None:
        self.span, self.mapping, self.anchor, self.flow = span, mapping, anchor, flow
        self.items: list[Node] = []
        self.entries: dict[str, tuple[Span, Node]] = {}
        self.key: tuple[str, Span] | None = None
        self.keyed = self.incomplete = False
        self.size = self.depth = 1


class _Reader:
    def __init__(self, source: Source, report: Report) -> None:
        self.source, self.report = source, report
        self.stack: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.root: Node | None = None
        self.documents = self.nodes = 0
        self.tagged = False

    def span(self, event: Any) -> Span:
        a, b = event.start_mark, event.end_mark
        return Span(self.source, a.line + 1, a.column + 1, b.line + 1, b.column + 1)

    def stop(self, diagnostic: Diagnostic) -> _Stop:
        self.report.add(diagnostic)
        return _Stop()

    def read(self) -> Node | None:
        try:
            for event in yaml.parse(self.source.text, Loader=_Loader):
                if read := _READ.get(type(event)):
                    read(self, event)
        except yaml.YAMLError as error:
            raise self.stop(self.syntax(error)) from None
        except (UnicodeError, ValueError, RecursionError) as error:
            where = Span(self.source, 1, 1, 1, 1)
            raise self.stop(Diagnostic("E101", f"the text cannot be read as YAML: {error}", where)) from None
        if self.tagged:
            raise _Stop  # Values with tags have no meaning that could be checked.
        root = self.root
        if isinstance(root, Scalar) and root.value is None:
            return None
        return root

    def document(self, event: Any) -> None:
        self.documents += 1
        if self.documents > 1:
            raise self.stop(
                Diagnostic(
                    "E105",
                    "a second YAML document begins here",
                    self.span(event),
                    expected="one document per file",
                    hint="move it to its own file and import it with `use:`",
                )
            )

    def scalar(self, event: Any) -> None:
        a, b = event.start_mark, event.end_mark  # as in `span`; most nodes are scalars
        span = tuple.__new__(Span, (self.source, a.line + 1, a.column + 1, b.line + 1, b.column + 1))
        if event.tag is not None:
            self.report_tag(event, span)
        text, style = event.value, event.style
        value = text if style else resolve(text)
        self.put(Scalar(span, 1, 1, value, text), event.anchor, bool(style))

    def begin(self, event: Any) -> None:
        span = self.span(event)
        if event.tag is not None:
            self.report_tag(event, span)
        if len(self.stack) >= MAX_DEPTH:
            raise self.stop(Diagnostic("E104", "nested too deeply", span, expected=f"at most {MAX_DEPTH} levels"))
        mapping = isinstance(event, yaml.MappingStartEvent)
        self.stack.append(_Open(span, mapping, event.anchor, bool(event.flow_style)))

    def report_tag(self, event: Any, span: Span) -> None:
        """Report a tag. A quoted scalar has the tag "!" only if it is written out."""
        written = event.tag.replace("tag:yaml.org,2002:", "!!")
        self.report.add(
            Diagnostic("E106", f"YAML tags are not allowed: {quote(written)}", span, hint="remove the tag")
        )
        self.tagged = True

    def alias(self, event: Any) -> None:
        span = self.span(event)
        node = self.anchors.get(event.anchor)
        if node is None:
            inside = any(o.anchor == event.anchor for o in self.stack)
            message = f"alias '*{event.anchor}' " + ("refers to itself" if inside else "has no anchor above it")
            raise self.stop(Diagnostic("E101", message, span))
        # The alias gets its own position; nodes below it keep those of the anchor.
        self.put(node if isinstance(node, Scalar) else node._replace(span=span), None, False)

    def put(self, node: Node, anchor: str | None, styled: bool) -> None:
        if anchor:
            self.anchors[anchor] = node
        self.nodes += node.size
        if self.nodes > MAX_NODES:
            raise self.stop(
                Diagnostic(
                    "E104",
                    "the document is too large" + (" after alias expansion" if self.anchors else ""),
                    node.span,
                    expected=f"at most {MAX_NODES:,} nodes",
                )
            )
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        top.size += node.size
        if top.depth <= node.depth:
            top.depth = node.depth + 1
        if len(self.stack) + node.depth > MAX_DEPTH:
            raise self.stop(Diagnostic("E104", "nested too deeply", node.span, expected=f"at most {MAX_DEPTH} levels"))
        if not top.mapping:
            top.items.append(node)
        elif not top.keyed:
            top.key, top.keyed = self.key(node, styled), True
        else:
            top.keyed = False
            if top.key is not None:
                name, span = top.key
                top.entries[name] = (span, node)

    def key(self, node: Node, styled: bool) -> tuple[str, Span] | None:
        """Return the name and span of a key, or report an invalid key and return None."""
        top = self.stack[-1]
        if not isinstance(node, Scalar):
            self.report.add(Diagnostic("E112", "a key must be a word", node.span, found=kind_of(node)))
            top.incomplete = True
            return None
        if node.text == "<<" and not styled:
            self.report.add(Diagnostic("E107", "merge keys are not allowed", node.span, hint="write out the keys"))
            top.incomplete = True
            return None
        if node.text not in top.entries:
            return node.text, node.span
        if top.flow and not styled and _THOUSANDS.fullmatch(node.text):
            return node.text + _AGAIN * len(top.entries), node.span  # it may be a part of a number
        self.report_again(node.text, node.span, top)
        return None

    def report_again(self, key: str, span: Span, top: _Open) -> None:
        """Report a key that the mapping already has."""
        notes = (Note("the first one is here", top.entries[key][0]),)
        self.report.add(
            Diagnostic("E102", f"key {quote(key)} appears twice", span, notes=notes, hint="keep one of them")
        )

    def close(self, event: Any) -> None:
        top = self.stack.pop()
        self.nodes -= top.size - 1  # children were already counted; put() adds the size of the whole
        end = event.end_mark
        span = Span(self.source, top.span.line, top.span.column, end.line + 1, end.column + 1)
        node: Node
        if top.mapping:
            if top.flow:
                self.drop_split_calls(top)
                self.drop_split_numbers(top)
            node = Mapping(span, top.size, top.depth, top.entries, top.incomplete)
        else:
            node = Sequence(span, top.size, top.depth, top.items)
        self.put(node, top.anchor, False)

    def drop_split_calls(self, top: _Open) -> None:
        """Report function calls that are split into several keys by a comma inside braces, and drop those keys."""
        for key, pieces in _split_calls(top.entries):
            text = ", ".join(pieces)
            message = f"the comma in {quote(text)} ends the value: inside braces, quote a call with several arguments"
            self.report.add(Diagnostic("E110", message, top.entries[key][1].span, hint=f'{key}: "{text}"'))
            for each in (key, *pieces[1:]):
                top.entries.pop(each, None)
            top.incomplete = True

    def drop_split_numbers(self, top: _Open) -> None:
        """Report a number that a comma inside braces splits, `{dim: 1,024}`, and drop its parts."""
        if not any(map(_THOUSANDS.fullmatch, top.entries)):
            return
        for key, (_, value) in [*top.entries.items()]:
            after = itertools.takewhile(_THOUSANDS.fullmatch, _keys_after(top.entries, key))
            if isinstance(value, Scalar) and re.fullmatch(r"\d{1,3}", value.text) and (parts := [*after]):
                written = ",".join([value.text, *(part.rstrip(_AGAIN) for part in parts)])
                message = f"the comma in {written} ends the value"
                self.report.add(Diagnostic("E110", message, value.span, hint=f"{key}: {written.replace(',', '')}"))
                for each in (key, *parts):
                    top.entries.pop(each)
                top.incomplete = True
        for key in [key for key in top.entries if key.endswith(_AGAIN)]:
            entry, name = top.entries.pop(key), key.rstrip(_AGAIN)
            if name in top.entries:
                self.report_again(name, entry[0], top)
            else:  # the first one was a part of a number
                top.entries[name] = entry

    def syntax(self, error: yaml.YAMLError) -> Diagnostic:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if isinstance(error, yaml.reader.ReaderError):
            return self.unreadable(error)
        if mark is None:
            return Diagnostic("E101", f"not YAML: {problem}", Span(self.source, 1, 1, 1, 1))
        line, column = mark.line + 1, mark.column + 1
        span = Span(self.source, line, column, line, column + 1)
        if "quoted scalar" in (getattr(error, "context", None) or "") and error.context_mark:  # type: ignore[attr-defined]
            if escape := self.invalid_escape(problem, span):
                return escape
            start = error.context_mark  # type: ignore[attr-defined]
            at = Span(self.source, start.line + 1, start.column + 1, start.line + 1, start.column + 2)
            return Diagnostic("E101", "invalid YAML: the quote that opens here is not closed", at)
        notes, hint = [], self.slip(line)
        if problem.startswith(_NO_COLON) and not any(o.flow for o in self.stack):
            found = self.colon(line)
            if found:
                number, start, word = found
                span = Span(self.source, number, start, number, start + len(word))
                rest = _bare(self.source.line(number))[start - 1 + len(word) :]
                what = f"a space is missing after {quote(word + ':')}" if rest.startswith(":") else None
                what = what or f"a colon is missing after {quote(word)}"
                fixed = f"{word}: {rest.removeprefix(':').strip()}".rstrip()
                return Diagnostic("E101", f"not YAML: {what}", span, hint=fixed)
            hint = _two_keys(self.source.line(line)) or hint
        unclosed = next((o for o in reversed(self.stack) if o.flow), None)
        if unclosed:
            bracket = "{" if unclosed.mapping else "["
            notes.append(Note(f"the '{bracket}' that is not closed is here", unclosed.span))
            hint = f"is a '{'}' if unclosed.mapping else ']'}' missing?"
        text = self.source.line(line)
        inside = text[unclosed.span.column : column - 1] if unclosed and unclosed.span.line == line else ""
        hint = _character(text, column) or _comma(inside[-_NEAR:], text[column - 1 :]) or hint
        if "\t" in text[:column]:
            hint = "indent with spaces: YAML does not allow tabs"
        return Diagnostic("E101", f"not YAML: {problem}", span, notes=tuple(notes), hint=hint)

    def invalid_escape(self, problem: str, span: Span) -> Diagnostic | None:
        """Return the diagnostic of an invalid escape in double quotes, or None for another problem."""
        text = self.source.line(span.line)
        start = text.rfind("\\", 0, span.column)  # the problem is at the backslash or just after it
        escape = re.match(r"\\([xuU][0-9a-fA-F]*|.)", text[start:]) if start >= 0 else None
        if escape is None or not re.search("escape|hexa?decimal", problem):
            return None
        at = Span(self.source, span.line, start + 1, span.line, start + 1 + len(escape[0]))
        hint = "use single quotes, in which a backslash is an ordinary character, or write it twice"
        return Diagnostic("E101", f"invalid YAML: {quote(escape[0])} is not an escape in double quotes", at, hint=hint)

    def colon(self, line: int) -> tuple[int, int, str] | None:
        """Return (line, column, word) of the word after which a colon is probably missing, here or just above."""
        numbers = [n for n in range(line, 0, -1) if _bare(self.source.line(n))][:4]
        for at, number in enumerate(numbers):
            text = _bare(self.source.line(number))
            before = _bare(self.source.line(numbers[at + 1])) if at + 1 < len(numbers) else ""
            below = _bare(self.source.line(numbers[at - 1])) if at else ""
            word = re.match(r"(\s*(?:- +)?)([A-Za-z_]\w*)(?=\s|$|:\S)", text)
            if not word or re.search(r":(\s|$)", text):
                continue
            if before and _indent(before) < _indent(text) and not re.search(r":$|^\s*- ", before):
                continue  # this line continues the text of the line above
            if text.lstrip().startswith("- ") and _indent(below) <= _indent(text):
                continue  # a step without arguments
            return number, len(word[1]) + 1, word[2]
        return None

    def slip(self, line: int) -> str | None:
        """Return a hint for a block that ends too early, based on this line and the lines above it."""
        current = self.source.line(line)
        above: list[tuple[int, str]] = []  # with decreasing indentation, nearest first
        for number in range(line - 1, 0, -1):
            text = self.source.line(number)
            if text.strip() and (not above or _indent(text) < _indent(above[-1][1])):
                above.append((number, text))
        for number, text in [(line, current), *above[:1]]:
            if found := re.match(rf"[ -]*(?:[\w.]+:? *)?({_SPACES})", text):  # not in texts or comments
                return f"line {number} contains U+{ord(found[1]):04X} instead of a space: replace it"
            if re.match(r"\s*-[^\s-]", text):
                return f"a space is missing after the '-' in line {number}"
        key = re.fullmatch(r"(\s*(?:- +)?)([\w.]+):", _bare(above[0][1])) if above else None
        if key and current.lstrip().startswith("- ") and _indent(current) < len(key[1]):
            return f"indent the items of `{key[2]}:` by {len(key[1]) + 2} spaces"
        same = next(((number, text) for number, text in above if _indent(text) == _indent(current)), None)
        if same and current.lstrip().startswith("- ") and not same[1].lstrip().startswith("-"):
            return f"line {same[0]} is among the items of a list: add '- ' in front"
        if same and current.strip() and not current.lstrip().startswith("-") and same[1].lstrip().startswith("- "):
            return f"line {same[0]} is an item of a list: add '- ' in front of this line, or remove it there"
        if not same and above and current.strip():
            known = " or ".join(str(n) for n in sorted({_indent(text) for _, text in above[:2]}, reverse=True))
            count = f"{_indent(current)} space{'s' if _indent(current) != 1 else ''}"
            return f"this line is indented by {count}, the lines above by {known}"
        return None

    def unreadable(self, error: yaml.reader.ReaderError) -> Diagnostic:
        text = self.source.text
        at = next((i for i, c in enumerate(text) if not re.match(_PRINTABLE, c)), 0)
        line, column = _place(text[:at])
        span = Span(self.source, line, column, line, column + 1)
        if not text:
            return Diagnostic("E101", f"not YAML: {error.reason}", span)
        hint = "save the file as UTF-8" if text[at] == "\0" else "remove or escape it"
        return Diagnostic("E109", f"character U+{ord(text[at]):04X} is not allowed in YAML", span, hint=hint)


_READ: dict[type, Callable[[_Reader, Any], None]] = {
    yaml.DocumentStartEvent: _Reader.document,
    yaml.ScalarEvent: _Reader.scalar,
    yaml.MappingStartEvent: _Reader.begin,
    yaml.SequenceStartEvent: _Reader.begin,
    yaml.MappingEndEvent: _Reader.close,
    yaml.SequenceEndEvent: _Reader.close,
    yaml.AliasEvent: _Reader.alias,
}


def _split_calls(entries: dict[str, tuple[Span, Node]]) -> list[tuple[str, list[str]]]:
    """Find calls split by commas: return each key with the beginning of the call, its value, and the keys after it."""
    found: list[tuple[str, list[str]]] = []
    keys = list(entries)
    for at, key in enumerate(keys):
        value = entries[key][1]
        if not isinstance(value, Scalar) or value.text.count("(") <= value.text.count(")"):
            continue
        pieces = [value.text]
        for other in keys[at + 1 :]:
            if kind_of(entries[other][1]) != "nothing":
                break
            pieces.append(other)
            if ")" in other:
                break
        if len(pieces) > 1:
            found.append((key, pieces))
    return found


_AGAIN = "\0"  # marks a repeated key that may be a part of a number; YAML does not allow this character
_THOUSANDS = re.compile(rf"\d{{3}}{_AGAIN}*")


def _keys_after(entries: dict[str, tuple[Span, Node]], key: str) -> Iterator[str]:
    """Return the keys after another one, up to the first with a value."""
    after = itertools.dropwhile(lambda each: each != key, entries)
    return itertools.takewhile(lambda each: kind_of(entries[each][1]) == "nothing", itertools.islice(after, 1, None))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _bare(line: str) -> str:
    """Strip the comment from a line."""
    return re.sub(r"(^|\s)#.*", "", line).rstrip()


def _two_keys(line: str) -> str | None:
    """Return a hint if a key and value appear where another key's value is expected: `- embed: features: 64`."""
    match = re.match(r"\s*(?:- +)?(\w+): +(\w+): +([^#]*[^#\s])", line)
    if not match:
        return None
    key, text = match[1], f"{match[2]}: {match[3]}"
    if key == "about":
        return f'quote text that contains a colon: `{key}: "{text}"`'
    if text.count("}") > text.count("{"):
        return f"a '{{' is missing: `{key}: {{{text}`"
    return f"write a mapping in one line with braces: `{key}: {{{text}}}`"


def _character(line: str, column: int) -> str | None:
    """Return a hint for an unexpected character, based on the character alone."""
    at, before = line[column - 1 : column], line[: column - 1]
    name = re.match(r"\{ *(\w+) *\}", line[column - 1 :])
    if before.endswith("$") and name:
        return f"write the name without braces: `{name[1]}`"
    if at and at in "%@`":
        return f"a value cannot begin with '{at}': remove it, or quote the value"
    for left, right in ("{}", "[]"):
        if at == right and before.count(right) >= before.count(left):
            return f"remove the extra '{right}', or add the missing '{left}'"
    return None


def _comma(inside: str, rest: str) -> str | None:
    """Return a hint for a missing comma between a value and the next key in braces: `{features: 8 bias: false}`."""
    match = re.search(r"[:,][^:,;]*[^\s:,;](;?) *(?<=[\s;])(\w+)$", inside)
    if not match or not rest.startswith(":"):
        return None
    return f"use ',' instead of ';' before `{match[2]}`" if match[1] else f"a ',' is missing before `{match[2]}`"


_SPACES = "[\u00a0\u2000-\u200b\u202f\u3000\ufeff]"  # characters that look like a space, or like nothing
_NEAR = 200  # number of characters before an error that hints examine
_NO_COLON = ("could not find expected ':'", "mapping values are not allowed")  # wording of libyaml and PyYAML


def _place(before: str) -> tuple[int, int]:
    """Return the line and column of the position after `before`, using the line breaks of `Source.lines`."""
    lines = f"{before}.".splitlines()
    return len(lines), len(lines[-1])


# compiled on first use: the large character class takes 5 ms
_PRINTABLE = "[\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
