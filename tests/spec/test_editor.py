"""What an editor shows of a spec, as functions without a protocol."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqblocks.editor import diagnostics, navigation
from seqblocks.editor.completion import Item, complete
from seqblocks.editor.hints import hints
from seqblocks.editor.hover import hover
from seqblocks.editor.opened import Opened, is_spec
from seqblocks.editor.positions import Lines, Place, Spot
from seqblocks.editor.symbols import Symbol, symbols
from seqblocks.errors import Report, Source, Span
from seqblocks.language.document import parse
from seqblocks.language.files import bundled

SOME = ("jamba_small", "captioner", "vil", "transformer")
FAULTS = Path(__file__).parents[1] / "golden" / "faults"
HEAD = """\
seqblocks: 1
use: [prenorm]
let: {dim: 64, act: silu, wide: 2 * dim}
blocks:
  mine:
    args: {width: int, other: wire, inner: steps}
    let: {half: width / 2}
    steps:
      - linear: {features: width, as: m}
      - inner
model:
  input: {features: dim}
  steps:
    - linear: {features: wide, as: x, name: first}
"""


def opened(text: str, path: Path | None = None, before: Opened | None = None) -> Opened:
    return Opened(text, path, before=before)


def spot_of(text: str, word: str) -> Spot:
    before = text[: text.index(word)].split("\n")
    return Spot(len(before), len(before[-1]) + 1)


# --- positions --------------------------------------------------------------------------------------------------------


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


def test_all_bundled_files_are_specs_without_diagnostics() -> None:
    for path in bundled().values():
        text = path.read_text("utf-8")
        assert is_spec(text)
        assert diagnostics.by_file(opened(text, path)) == {str(path): []}


# --- hints, outline, hover, navigation --------------------------------------------------------------------------------


def nested(outline: list[Symbol], around: Span | None = None) -> None:
    for each in outline:
        assert starts(each.span) <= starts(each.own)
        assert ends(each.own) <= ends(each.span)
        if around:
            assert starts(around) <= starts(each.span)
            assert ends(each.span) <= ends(around)
        nested(each.children, each.span)


def starts(span: Span) -> tuple[int, int]:
    return span.line, span.column


def ends(span: Span) -> tuple[int, int]:
    return span.end_line, span.end_column


@pytest.mark.parametrize("name", sorted(bundled()))
def test_everything_is_known_of_bundled_files(name: str) -> None:
    path = bundled()[name]
    found = opened(path.read_text("utf-8"), path)
    nested(symbols(found))
    shown = {hint.spot.line for hint in hints(found)}
    assert shown == {step.span.line for step in found.steps if found.is_own(step.span)}
    for span, reference in found.own_references.items():
        about = hover(found, Spot(span.line, span.column))
        assert about is not None
        assert reference.name in about.text
        assert about.span == span
        if reference.definition:
            assert navigation.definition(found, Spot(span.line, span.column)) == reference.definition
            if found.is_own(reference.definition):
                others = navigation.occurrences(found, Spot(*starts(reference.definition)))
                assert span in others


def test_hints_and_definitions_stay_where_lines_did_not_change() -> None:
    good = opened(HEAD + "    - silu\n    - linear: {from: x, features: dim}\n")
    text = good.text.replace("    - silu\n", "    - {silu\n\n")
    broken = opened(text, before=good)
    assert broken.analysis.file is None
    assert [(hint.spot.line, hint.text) for hint in hints(broken)][-1] == (17, "[batch, seq, 64] · 8,256 parameters")
    assert not any(hint.spot.line in (15, 16) for hint in hints(broken))
    assert navigation.definition(broken, spot_of(text, "x, features: dim}")) == Span(broken.source, 14, 36, 14, 37)
    again = opened(text.replace("{silu", "{silu, "), before=broken)
    assert hints(again) == hints(broken)


def test_a_hint_is_of_a_step_with_a_type() -> None:
    found = opened(HEAD + "    - slu\n    - linear: {features: 3}\n")
    assert [hint.spot.line for hint in hints(found) if hint.spot.line > 13] == [14]


# --- completion -------------------------------------------------------------------------------------------------------


def items(tail: str, head: str = HEAD) -> list[Item]:
    """Return the completions at the bar in a text."""
    text = head + tail
    at = text.index("|")
    text = text[:at] + text[at + 1 :]
    now = opened(text, before=opened(head))
    found = complete(now, now.lines.spot_at(at))
    return found.items if found else []


def labels(tail: str, head: str = HEAD) -> list[str]:
    return [item.label for item in items(tail, head)]


@pytest.mark.parametrize(
    ("tail", "first", "never"),
    [
        ("    - |", ["prenorm", "mine"], ["inner", "dim"]),
        ("    - lin|", ["prenorm"], ["dim"]),
        ("    - residual: [|", ["prenorm"], ["x"]),
        ("    - residual:\n        steps:\n          - |", ["prenorm"], ["x"]),
        ("    - linear: {|", ["features", "bias"], ["silu"]),
        ("    - linear: {features: 3, |}\n    - silu\n", ["bias"], ["features"]),
        ("    - linear:\n        features: 3\n        |", ["bias"], ["features"]),
        ("    - linear:\n        |", ["features"], ["silu"]),
        ("    - linear: {features: |", ["dim", "wide"], ["act", "x"]),
        ("    - linear: {features: 2 * |}\n", ["dim", "wide"], ["act"]),
        ('    - linear: {features: "round_up(|', ["dim", "wide"], ["act"]),
        ("    - linear: |", ["dim", "wide"], ["features"]),
        ("    - linear: {from: |", ["x", "input"], ["dim"]),
        ("    - linear: {from: [x, |]}", ["x", "input"], ["dim"]),
        ("    - gate: {by: x, activation: |", ["silu"], ["dim"]),
        ("    - linear: {features: 3, bias: |", ["true", "false"], ["dim"]),
        ("    - linear: {features: 3, share: |", ["first"], ["x"]),
        ("    - linear: {features: 3, init: {|", ["weight", "bias"], ["features"]),
        ("    - linear: {features: 3, init: {weight: |", ["zeros"], ["weight"]),
        ("    - linear: {features: 3, as: {a: |", ["dim", "wide"], ["x"]),
        ("    - mine: {|", ["width", "other", "inner"], ["features", "init"]),
        ("    - mine: {other: |", ["x", "input"], ["dim"]),
        ("    - mine: {width: 3, other: x, inner: [{linear: {from: |", ["input"], ["x", "m"]),
        ("    - mine: {width: 3, other: x, inner: [|", ["prenorm"], ["inner"]),
        ("    - repeat: {times: 2, steps: [{linear: {features: |", ["dim", "act", "wide", "layer"], ["x"]),
        ("    - repeat: {times: |", ["dim"], ["layer"]),
        ("    - silu\nexpect: {|", ["params"], ["model"]),
        ("    - silu\nexpect:\n  |", ["params"], ["model"]),
        ("    - silu\n|", ["about", "needs"], ["model", "use"]),
        ("    - silu\n  outputs: {a: |", ["x", "input"], ["dim"]),
        ("    - # |", [], ["linear"]),
    ],
)
def test_completion_knows_what_may_be_written(tail: str, first: list[str], never: list[str]) -> None:
    found = labels(tail)
    assert [label for label in found if label in first] == [label for label in first if label != "act"]
    assert found[:1] == first[:1]
    assert not {*found} & {*never}


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("seqblocks: 1\nuse: [|", "attention"),
        ("seqblocks: 1\nmodel:\n  input: {|", "tokens"),
        ("seqblocks: 1\nmodel: {|", "about"),
        ("seqblocks: 1\nblocks:\n  a:\n    |", "about"),
        ("seqblocks: 1\nblocks: {a: {args: {b: |", "int"),
        ("seqblocks: 1\nblocks: {a: {args: {b: {|", "type"),
        ("seqblocks: 1\nblocks: {a: {args: {b: {type: |", "int"),
        ("seqblocks: 1\nlet: {a: 1, b: |", "a"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: int, c: wire}\n    steps:\n      - linear: {features: |", "b"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: int, c: wire}\n    steps:\n      - linear: {from: |", "c"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: steps}\n    steps:\n      - |", "b"),
    ],
)
def test_completion_outside_of_the_steps_of_a_model(text: str, first: str) -> None:
    assert labels(text, "")[:1] == [first]


def test_a_verb_brings_its_required_arguments_and_its_braces() -> None:
    by_label = {item.label: item for item in items("    - |")}
    assert by_label["linear"].text == "linear: {features: $1}"
    assert by_label["silu"].text == "silu"
    assert by_label["mine"].text == "mine: {width: $1, other: $2, inner: [$3]}"
    assert by_label["residual"].text == "residual: {steps: [$1]}"
    in_list = {item.label: item for item in items("    - residual: [|")}
    assert in_list["linear"].text == "{linear: {features: $1}}"
    before_colon = {item.label: item for item in items("    - lin|: {features: 3}")}
    assert before_colon["linear"].text == "linear"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("use: [prenorm]\n", "use: [prenorm, mamba]\n"),
        ("use:\n  - prenorm\n", "use:\n  - prenorm\n  - mamba\n"),
        ("", "use: [mamba]\n"),
    ],
)
def test_a_bundled_block_is_added_to_the_used_files(use: str, expected: str) -> None:
    head = f"seqblocks: 1\n{use}model:\n  input: {{features: 8}}\n  steps:\n"
    item = next(each for each in items("    - |", head) if each.label == "mamba_mixer")
    assert item.more is not None
    span, text = item.more
    lines = Lines(head)
    at = lines.offset_of(Spot(*starts(span)))
    done = head[:at] + text + head[at:]
    assert done == head.replace(f"seqblocks: 1\n{use}", f"seqblocks: 1\n{expected}")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("cut", ["whole", "half", "line"])
def test_every_word_of_bundled_files_is_offered_again(name: str, cut: str) -> None:
    """Delete a word, half of it, or half of it with the rest of its line: it is among the completions."""
    path = bundled()[name]
    good = opened(path.read_text("utf-8"), path)
    references = [*good.own_references.items()]
    for span, reference in random.Random(name + cut).sample(references, min(12, len(references))):
        start = good.lines.offset_of(Spot(*starts(span)))
        end = good.lines.offset_of(Spot(*ends(span)))
        at = start if cut == "whole" else start + max((end - start) // 2, 1)
        rest = good.text.index("\n", end) if cut == "line" else end
        now = opened(good.text[:at] + good.text[rest:], path, good)
        found = complete(now, now.lines.spot_at(at))
        assert found is not None, (span, reference)
        assert reference.name in [item.label for item in found.items], (span, reference)


# --- any text ---------------------------------------------------------------------------------------------------------


@st.composite
def edited(draw: st.DrawFn) -> tuple[str, str, int]:
    """Draw a text, the text after an edit, and an offset in it."""
    files = sorted(FAULTS.glob("*.yaml"))
    path = draw(st.sampled_from(files)) if draw(st.booleans()) else bundled()[draw(st.sampled_from(SOME))]
    good = path.read_text("utf-8")
    start = draw(st.integers(0, len(good)))
    end = draw(st.integers(start, min(len(good), start + 30)))
    text = good[:start] + draw(st.text("{}[]:,-# \n\t'\"&*a1🙂", max_size=4)) + good[end:]
    near = st.integers(max(start - 40, 0), min(start + 40, len(text)))
    return good, text, draw(near)


@settings(max_examples=60, deadline=None)
@given(edited())
def test_any_text_has_an_answer(drawn: tuple[str, str, int]) -> None:
    good, text, offset = drawn
    now = opened(text, before=opened(good))
    spot = now.lines.spot_at(offset)
    nested(symbols(now))
    complete(now, spot)
    hover(now, spot)
    for span in (navigation.definition(now, spot), *navigation.references(now, spot)):
        assert span is None or starts(span) <= ends(span)
    for hint in hints(now):
        assert now.lines.spot_at(now.lines.offset_of(hint.spot)) == hint.spot
    for found in diagnostics.by_file(now).values():
        for _, diagnostic in found:
            assert diagnostics.message(diagnostic)
