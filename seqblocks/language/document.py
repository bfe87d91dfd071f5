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

from seqblocks.errors import Diagnostic, Fault, Note, Report, Source, Span, quote
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
        source = Source.of(name, data.decode("utf-8", "replace"))
        fault = Fault("E103", f"byte 0x{data[error.start]:02x} is not UTF-8", hint="save the file as UTF-8")
        report.fault(fault, source.character(len(before)))
        return None


def parse(source: Source, report: Report, warnings: Report | None = None) -> Node | None:
    """Parse YAML text into a tree. Errors go to the report; return None if the text cannot be parsed.

    warnings: a report for what is valid but probably a mistake.
    """
    start = source.character_at(1, 1)
    if len(source.text) > MAX_BYTES:
        fault = Fault("E104", f"the text has {len(source.text):,} characters", expected=f"at most {MAX_BYTES:,}")
        report.fault(fault, start)
        return None
    try:
        root = _Reader(source, report, warnings).read()
    except _Stop:
        return None
    if root is None:
        report.fault(Fault("E108", "the spec is empty", hint="begin with `seqblocks: 1`"), start)
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

    @property
    def bracket(self) -> str:
        """Return the bracket that opens it, or "" in block style."""
        return "" if not self.flow else "{" if self.mapping else "["


class _Reader:
    def __init__(self, source: Source, report: Report, warnings: Report | None) -> None:
        self.source, self.report, self.warnings = source, report, warnings
        self.stack: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.root: Node | None = None
        self.documents = self.nodes = 0
        self.tagged = False

    def span(self, event: Any) -> Span:
        a, b = event.start_mark, event.end_mark
        return Span(self.source, a.line + 1, a.column + 1, b.line + 1, b.column + 1)

    def stop(self, fault: Fault, span: Span) -> _Stop:
        self.report.fault(fault, span)
        return _Stop()

    def read(self) -> Node | None:
        try:
            for event in iter(_Loader(self.source.text).get_event, None):
                if read := _READ.get(type(event)):
                    read(self, event)
        except yaml.YAMLError as error:
            from seqblocks.language.yaml_syntax import not_yaml  # only needed after an error

            brackets = ((bracket, each.span) for each in reversed(self.stack) if (bracket := each.bracket))
            self.report.add(not_yaml(error, self.source, next(brackets, None)))
            raise _Stop from None
        except (UnicodeError, ValueError, RecursionError) as error:
            message = f"the text cannot be read as YAML: {error}"
            self.report.add(Diagnostic("E101", message, self.source.character_at(1, 1)))
            raise _Stop from None
        if self.tagged:
            raise _Stop  # Values with tags have no meaning that could be checked.
        root = self.root
        if isinstance(root, Scalar) and root.value is None:
            return None
        return root

    def document(self, event: Any) -> None:
        self.documents += 1
        if self.documents > 1:
            message = "a second YAML document begins here"
            hint = "move it to its own file and import it with `use:`"
            raise self.stop(Fault("E105", message, expected="one document per file", hint=hint), self.span(event))
        if event.version and event.version not in ((1, 1), (1, 2)):  # libyaml refuses it, PyYAML's own reader does not
            from seqblocks.language.yaml_syntax import not_yaml

            mark = event.start_mark
            error = yaml.parser.ParserError(None, None, "found incompatible YAML document", mark)
            self.report.add(not_yaml(error, self.source, None))
            raise _Stop
        if event.version == (1, 1) and self.warnings is not None:
            span = self.span(event)
            end = len(self.source.line(span.line)) + 1
            words = "in YAML 1.2, `yes`, `no`, `on` and `off` are words, `1:30` is one too, and `010` is 10"
            message = "the file declares YAML 1.1, but is read as YAML 1.2"
            fault = Fault("W906", message, hint=f"remove the line: {words}")
            self.warnings.fault(fault, span._replace(end_line=span.line, end_column=end))

    def scalar(self, event: Any) -> None:
        a, b = event.start_mark, event.end_mark  # as in `span`; most nodes are scalars
        span = tuple.__new__(Span, (self.source, a.line + 1, a.column + 1, b.line + 1, b.column + 1))
        if event.tag is not None:
            self.report_tag(event, span)
        text, style = event.value, event.style
        if not (text or style):
            span = self.place_of_nothing(span)
        value = text if style else resolve(text)
        self.put(Scalar(span, 1, 1, value, text), event.anchor, bool(style))

    def place_of_nothing(self, span: Span) -> Span:
        """Return the place of a missing value: its key, or the dash of a list item."""
        top = self.stack[-1] if self.stack else None
        if span.column != span.end_column:  # an anchor is there
            return span
        if top and top.mapping and top.keyed:
            return top.key[1] if top.key else self.source.character_at(span.line, span.column)
        before = span.source.line(span.line)[span.column - 2 : span.column - 1]
        return self.source.character_at(span.line, span.column - (before in ("-", "?")))

    def begin(self, event: Any) -> None:
        span = self.span(event)
        if event.tag is not None:
            self.report_tag(event, span)
        if len(self.stack) >= MAX_DEPTH:
            raise self.stop(_too_deep(), span)
        mapping = isinstance(event, yaml.MappingStartEvent)
        self.stack.append(_Open(span, mapping, event.anchor, bool(event.flow_style)))

    def report_tag(self, event: Any, span: Span) -> None:
        """Report a tag. A quoted scalar has the tag "!" only if it is written out."""
        written = event.tag.replace("tag:yaml.org,2002:", "!!")
        self.report.fault(Fault("E106", f"YAML tags are not allowed: {quote(written)}", hint="remove the tag"), span)
        self.tagged = True

    def alias(self, event: Any) -> None:
        span = self.span(event)
        node = self.anchors.get(event.anchor)
        if node is None:
            if any(o.anchor == event.anchor for o in self.stack):
                raise self.stop(Fault("E101", f"alias '*{event.anchor}' refers to itself"), span)
            raise self.stop(Fault("E101", f"alias '*{event.anchor}' has no anchor above it"), span)
        # The alias gets its own position; nodes below it keep those of the anchor.
        self.put(node if isinstance(node, Scalar) else node._replace(span=span), None, False)

    def put(self, node: Node, anchor: str | None, styled: bool) -> None:
        if anchor:
            self.anchors[anchor] = node
        self.nodes += node.size
        if self.nodes > MAX_NODES:
            message = "the document is too large" + (" after alias expansion" if self.anchors else "")
            raise self.stop(Fault("E104", message, expected=f"at most {MAX_NODES:,} nodes"), node.span)
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        top.size += node.size
        if top.depth <= node.depth:
            top.depth = node.depth + 1
        if len(self.stack) + node.depth > MAX_DEPTH:
            raise self.stop(_too_deep(), node.span)
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
            self.report.fault(Fault("E112", "a key must be a word", found=kind_of(node)), node.span)
            top.incomplete = True
            return None
        if node.text == "<<" and not styled:
            self.report.fault(Fault("E107", "merge keys are not allowed", hint="write out the keys"), node.span)
            top.incomplete = True
            return None
        if node.text not in top.entries:
            return node.text, node.span
        if top.flow and not styled and _THOUSANDS.fullmatch(node.text):
            return node.text + _AGAIN * len(top.entries), node.span  # it may be a part of a number
        self.report.fault(_key_twice(node.text, top.entries[node.text][0]), node.span)
        return None

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
            self.report.fault(Fault("E110", message, hint=f'{key}: "{text}"'), top.entries[key][1].span)
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
                pieces = [value.text, *(part.rstrip(_AGAIN) for part in parts)]
                message = f"the comma in {','.join(pieces)} ends the value"
                self.report.fault(Fault("E110", message, hint=f"{key}: {''.join(pieces)}"), value.span)
                for each in (key, *parts):
                    top.entries.pop(each)
                top.incomplete = True
        for key in [key for key in top.entries if key.endswith(_AGAIN)]:
            entry, name = top.entries.pop(key), key.rstrip(_AGAIN)
            if name in top.entries:
                self.report.fault(_key_twice(name, top.entries[name][0]), entry[0])
            else:  # the first one was a part of a number
                top.entries[name] = entry


def _key_twice(key: str, first: Span) -> Fault:
    notes = [Note("the first one is here", first)]
    return Fault("E102", f"key {quote(key)} appears twice", notes=notes, hint="keep one of them")


def _too_deep() -> Fault:
    return Fault("E104", "nested too deeply", expected=f"at most {MAX_DEPTH} levels")


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
