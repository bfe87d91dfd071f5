"""Arguments of blocks in their long form, and defaults that are expressions of earlier arguments."""

from __future__ import annotations

from typing import Any

import pytest

import seqblocks
from seqblocks.descriptions.schema import schema
from seqblocks.errors import SpecError

TEXT = """
seqblocks: 1
blocks:
  ffn:
    args: {dim: int, %s}
    steps: [linear: {features: hidden, bias: false}]
model:
  input: {features: 8}
  steps: [%s]
"""


def features(argument: str, *calls: str) -> list[int]:
    steps = (f"{{ffn: {{name: n{at}, {call}}}}}" for at, call in enumerate(calls))
    _, model = seqblocks.load_text(TEXT % (argument, ", ".join(steps)))
    assert model
    return [node.type.features for node in model.graph.nodes if node.type]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("hidden: 2 * dim", [8, 12]), ("hidden: dim", [4, 6]), ("hidden: {default: 2 * dim + 1}", [9, 13]),
        ("hidden: {type: int, default: 'round_up(dim, 8)'}", [8, 8]), ("hidden: {type: int, default: 3 * 4}", [12, 12]),
        ("wide: true, hidden: 'dim * (2 if wide else 1)'", [8, 12]), ("half: dim // 2, hidden: half * 6", [12, 18]),
        ("depth: 3, hidden: depth", [3, 3]), ("hidden: {type: int, default: depth * dim}", [4, 6]),
        ("hidden: {default: dim, about: 'width: x'}", [4, 6]),
    ],
)  # fmt: skip
def test_a_default_of_earlier_arguments(argument: str, expected: list[int]) -> None:
    assert features(argument, "dim: 4", "dim: 6") == expected


def test_a_given_value_replaces_the_expression() -> None:
    assert features("hidden: 2 * dim", "dim: 4, hidden: 5", "dim: 4") == [5, 8]


VALUES = [(1, False), (2, True), (8, True), (9, False), ("dim - 7", False), ("dim", True)]


@pytest.mark.parametrize(("value", "valid"), VALUES)
def test_bounds(value: Any, valid: bool) -> None:
    argument = "hidden: {type: int, at_least: 2, at_most: 8}"
    text = "let: {dim: 8}" + TEXT % (argument, f"ffn: {{dim: 4, hidden: {value}}}")
    if valid:
        seqblocks.load_text(text)
        return
    with pytest.raises(SpecError, match="out of bounds") as caught:
        seqblocks.load_text(text)
    (found,) = caught.value.diagnostics
    assert found.code == "E209"
    assert found.expected == ("at most 8" if value == 9 else "at least 2")


@pytest.mark.parametrize("bound", ["at_least: .nan", "at_most: .inf"])
def test_a_bound_that_is_no_finite_number(bound: str) -> None:
    with pytest.raises(SpecError, match=r"E203.*must be a number"):
        seqblocks.load_text("let: {dim: 8}" + TEXT % (f"hidden: {{type: int, {bound}}}", "ffn: {dim: 4, hidden: 9}"))


def test_a_bound_is_shown_with_all_its_digits() -> None:
    argument = "hidden: {type: int, at_least: 1048577}"
    with pytest.raises(SpecError) as caught:
        seqblocks.load_text("let: {dim: 8}" + TEXT % (argument, "ffn: {dim: 4, hidden: 9}"))
    assert caught.value.diagnostics[0].expected == "at least 1048577"
    valid = TEXT % (argument.replace("1048577}", "1048577, default: 1048577}"), "ffn: {dim: 4}")
    assert seqblocks.load_text(valid)[0].blocks["ffn"].args["hidden"].bounds() == "at least 1048577"


def test_a_default_out_of_bounds_is_reported_where_it_is_written() -> None:
    with pytest.raises(SpecError, match="out of bounds") as caught:
        features("hidden: {default: 2 * dim, at_most: 9}", "dim: 5")
    assert caught.value.diagnostics[0].span.line == 5


def test_what_an_argument_is_about_is_shown() -> None:
    text = TEXT % ("hidden: {default: 2 * dim, about: inner width, at_least: 1}", "ffn: {dim: 4}")
    file, _ = seqblocks.load_text(text)
    assert file.blocks["ffn"].args["hidden"].meaning() == "inner width; at least 1"
    properties = str(schema(file))
    assert "inner width; at least 1" in properties


def test_heads_of_rwkv7_have_a_width() -> None:
    with pytest.raises(SpecError) as error:
        seqblocks.load_model("rwkv7_0_4b", set={"head": 0})
    assert error.value.diagnostics[0].message == "'head' of block rwkv7_mixer is out of bounds"
