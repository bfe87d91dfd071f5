"""YAML with positions: scalars of the dialect, positions of nodes, rejected documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqblocks.errors import Report, Source, SpecError
from seqblocks.language import document
from seqblocks.language.document import Mapping, Scalar, Sequence, plain


def read(text: str) -> Any:
    report = Report()
    node = document.parse(Source.of("t.yaml", text), report)
    report.raise_if_any()
    return node


SCALARS: list[tuple[str, Any]] = [
    ("7:1", "7:1"),
    ("on", "on"),
    ("no", "no"),
    ("yes", "yes"),
    ("true", True),
    ("False", False),
    ("tRUE", "tRUE"),
    ("1e-3", 1e-3),
    ("1E+3", 1000.0),
    (".5", 0.5),
    ("5.", 5.0),
    ("-0.25", -0.25),
    ("0o17", 15),
    ("017", 17),
    ("0x1F", 31),
    ("1_000", "1_000"),
    ("+7", 7),
    ("~", None),
    ("null", None),
    ("", None),
    (".inf", float("inf")),
    ("2024-01-01", "2024-01-01"),
    ("'12'", "12"),
    ('"true"', "true"),
    ("1.2.3", "1.2.3"),
    ("-", "-"),
    ("2 * dim", "2 * dim"),
]


@pytest.mark.parametrize(("text", "value"), [case for case in SCALARS if case[0] != "-"])
def test_core_schema_scalars(text: str, value: Any) -> None:
    node = read(f"a: {text}\n")
    found = plain(node)["a"]
    assert found == value
    assert type(found) is type(value)


@given(st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_a_round_trip(value: float) -> None:
    assert plain(read(f"[{value!r}]"))[0] == value


def test_positions() -> None:
    root = read('a:\n  - x\n  - "quoted text"\nb: {c: 1,\n    d: [2, 3]}\n')
    assert isinstance(root, Mapping)
    items = root.get("a")
    assert isinstance(items, Sequence)
    first, second = items.items
    assert (first.span.line, first.span.column, first.span.end_column) == (2, 5, 6)
    assert (second.span.line, second.span.column, second.span.end_column) == (3, 5, 18)
    assert isinstance(second, Scalar)
    assert second.part(0, 6) == second.span._replace(column=6, end_column=12)
    flow = root.get("b")
    assert isinstance(flow, Mapping)
    assert [(key, span.line, span.column) for key, span, _ in flow] == [("c", 4, 5), ("d", 5, 5)]
    inner = flow.get("d")
    assert inner is not None
    assert (inner.span.line, inner.span.column, inner.span.end_column) == (5, 8, 14)


def test_block_scalars_are_words() -> None:
    assert plain(read("a: |\n  12\nb: >\n  x\n  y\n")) == {"a": "12\n", "b": "x y\n"}


def test_a_large_text_without_aliases_does_not_mention_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_NODES", 10)
    for text, mentions_alias in (("[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", False), ("[&a [1, 1, 1, 1], *a, *a]", True)):
        with pytest.raises(SpecError, match=r"E104.* too large") as caught:
            read(text)
        assert ("alias" in str(caught.value)) == mentions_alias


def test_aliases_share_and_are_followed() -> None:
    assert plain(read("a: &x [1, 2]\nb: *x\n")) == {"a": [1, 2], "b": [1, 2]}


def test_only_version_1_1_of_yaml_is_a_warning() -> None:
    for first, warned in (("%YAML 1.1\n---\n", ["W906"]), ("%YAML 1.2\n---\n", []), ("---\n", []), ("", [])):
        report, warnings = Report(), Report()
        assert document.parse(Source.of("t.yaml", f"{first}a: no\n"), report, warnings) is not None
        assert not report
        assert [each.code for each in warnings.diagnostics] == warned


def test_windows_lines_and_byte_order_marks() -> None:
    report = Report()
    text = document.decode(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", "t.yaml", report)
    assert text is not None
    root = read(text)
    assert plain(root) == {"a": 1, "b": 2}
    assert root.entries["b"][0].line == 2


def test_the_tree_as_text() -> None:
    assert document.show(read("a: [1, x]\n")).splitlines() == [
        "1:1     mapping",
        "1:4       a: list",
        "1:5         -: 1",
        "1:8         -: 'x'",
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("- a: {x: 8; y: false}", "use ',' instead of ';' before `y`"),
        ("- a: {x: 2 * dim y: false}", "a ',' is missing before `y`"),
        ("- a: {x: %dim}", "a value cannot begin with '%': remove it, or quote the value"),
        ("- a: {x: ${dim}}", "write the name without braces: `dim`"),
        ("- a: {x: model.{layer}.w, y: 3}", 'quote names with {layer}: "model.{layer}.w"'),
        ("- a: {x: b.{layer // 2}}", 'quote names with {layer // 2}: "b.{layer // 2}"'),
        ("- a: {x: [{layer}.w, y]}", 'quote names with {layer}: "{layer}.w"'),
        ("a: {blocks.{layer}: b}", 'quote names with {layer}: "blocks.{layer}"'),
        ("a: {layer}.w", 'quote names with {layer}: "{layer}.w"'),
        ("- a: {x: 3}}", "remove the extra '}', or add the missing '{'"),
        ("- a: x: dim}", "a '{' is missing: `a: {x: dim}`"),
        ("- a: {x: [3}", "is a ']' missing?"),
        ("- a: {x: 3", "is a '}' missing?"),
        ("about: memory: it is good", 'quote text that contains a colon: `about: "memory: it is good"`'),
        ("- a:\n    x:2\n    y: [z]", "x: 2"),
    ],
)
def test_the_likely_mistake_is_reported(text: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(text + "\n")
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.hint) == ("E101", hint)


@pytest.mark.parametrize("escape", [r"\q", r"\x4", r"\ud800", r"\U00110000", r"\l"])
def test_an_invalid_escape_is_not_an_open_quote(escape: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(f'- "a {2 * chr(92)}{escape}, b"\n')
    (fault,) = caught.value.diagnostics
    assert fault.message == f"invalid YAML: '{escape}' is not an escape in double quotes"
    assert fault.span
    assert (fault.span.column, fault.span.end_column) == (8, 8 + len(escape))
