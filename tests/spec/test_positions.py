"""Positions in a text, counted by code points here and by code units in the protocol, and which texts are specs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqblocks.editor import diagnostics
from seqblocks.editor.opened import Opened, is_spec
from seqblocks.editor.positions import Lines, Place, Spot
from seqblocks.errors import Report, Source
from seqblocks.language.document import parse
from seqblocks.language.spec_files import bundled


def test_positions_count_utf16_and_end_lines_as_the_protocol_does() -> None:
    lines = Lines("a🙂b\r\nc\u2028d\re", "utf-16")
    assert lines.place(Spot(1, 3)) == Place(0, 3)  # the emoji is two units
    assert lines.spot(Place(0, 3)) == Spot(1, 3)
    assert lines.spot(Place(0, 2)) == Spot(1, 2)  # inside the emoji: before it
    assert lines.place(Spot(3, 1)) == Place(1, 2)  # to YAML, \u2028 ends a line
    assert lines.spot(Place(1, 2)) == Spot(3, 1)
    assert lines.spot(Place(0, 99)) == Spot(1, 4)
    assert lines.spot(Place(99, 0)) == Spot(4, 2)
    assert Lines("é", "utf-8").place(Spot(1, 2)) == Place(0, 2)
    assert Lines("🙂", "utf-32").place(Spot(1, 2)) == Place(0, 1)


@given(st.text("ab é🙂\n\r\u2028\x85", max_size=20), st.sampled_from(("utf-8", "utf-16", "utf-32")))
def test_positions_go_there_and_back(text: str, encoding: str) -> None:
    lines = Lines(text, encoding)
    for offset in range(len(text) + 1):
        spot = lines.spot_at(offset)
        assert lines.offset_of(spot) == offset
        if text[offset - 1 : offset + 1] != "\r\n":  # no position of the protocol is between the two
            assert lines.spot(lines.place(spot)) == spot


@given(st.text("ab🙂 \n\r", min_size=1, max_size=12))
def test_positions_are_those_of_yaml(text: str) -> None:
    """The span of a plain word contains the word, whatever ends the lines before it."""
    whole = f'"{text}": word\n'
    root = parse(Source.of("", whole), Report(None))
    lines = Lines(whole)
    if root is not None:
        (entry,) = root  # type: ignore[misc]
        span = entry[2].span
        start = lines.offset_of(Spot(span.line, span.column))
        assert whole[start : lines.offset_of(Spot(span.end_line, span.end_column))] == "word"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seqblocks: 1\n", True),
        ("# first\nabout: x\n'seqblocks': 1\n", True),
        ("# first\n\n{ seqblocks: 1}", True),
        ("services: {seqblocks: 1}\n", False),
        ("a:\n  seqblocks: 1\n", False),
        ("", False),
    ],
)
def test_specs_are_told_from_other_yaml(text: str, expected: bool) -> None:
    assert is_spec(text) is expected


@pytest.mark.slow
def test_all_bundled_files_are_specs_without_diagnostics() -> None:
    for path in bundled().values():
        text = path.read_text("utf-8")
        assert is_spec(text)
        assert diagnostics.by_file(Opened(text, path)) == {str(path): []}
