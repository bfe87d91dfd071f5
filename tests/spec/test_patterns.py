"""Test how the patterns of `repeat` are read: counts, groups, and words of single letters."""

from __future__ import annotations

import pytest

from seqblocks.analysis import check
from seqblocks.combinators import MAX_REPEATS
from seqblocks.combinators.repeat import read_pattern
from seqblocks.descriptions import listing
from seqblocks.errors import Fault


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("m", "m"),
        ("m*3 s m", "m m m s m"),
        ("(m s)*2", "m s m s"),
        ("( m s )*2 s", "m s m s s"),
        ("((m)*2 s)*2 (s)", "m m s m m s s"),
        ("(m (s m)*2)*2 m", "m s m s m m s m s m m"),
        ("ms*2 mms", "m s m s m m s"),
        ("(ms s)*2", "m s s m s s"),
        ("block*2 m", "block block m"),
        ("mb", "mb"),  # one of its letters has no steps, so it is a word, which the caller reports
    ],
)
def test_layers(pattern: str, layers: str) -> None:
    assert read_pattern(pattern, {"m", "s", "block"}) == layers.split()


def test_a_word_with_steps_is_not_split() -> None:
    assert read_pattern("ms*2 s", {"m", "s", "ms"}) == ["ms", "ms", "s"]


@pytest.mark.parametrize(
    "pattern",
    [
        "", "()", "m ()", "(m", "m)", "(m))", "m(s)", "(m)s", "m*2s", "m**2", "m*0", "(m)*0", "m *2", "(m) *2", "2m",
        "m,s",
    ],
)
def test_invalid_patterns(pattern: str) -> None:
    with pytest.raises(Fault) as caught:
        read_pattern(pattern, {"m", "s"})
    assert caught.value.code == "E601"


@pytest.mark.parametrize("pattern", ["m*9999", "((m*99)*99)*99", "((((m*9999)*9999)*9999)*9999)*9999", "ms*2049"])
def test_too_many_layers_take_no_time(pattern: str) -> None:
    with pytest.raises(Fault) as caught:
        read_pattern(pattern, {"m", "s"})
    assert caught.value.code == "E604"


def test_as_many_layers_as_are_allowed() -> None:
    assert len(read_pattern(f"(m s)*{MAX_REPEATS // 2}", {"m", "s"})) == MAX_REPEATS


def test_groups_and_letters_are_the_same_model() -> None:
    def of(pattern: str) -> str:
        text = f"""
seqblocks: 1
model:
  input: {{features: 4}}
  steps:
    - repeat: {{pattern: {pattern}, m: [{{linear: 4}}], s: [silu, {{linear: 4}}], times: 2}}
"""
        _, model = check.load_text(text)
        assert model
        return listing.text(model)

    assert of("m m s m m s s") == of("(m*2 s)*2 s") == of("mms*2 s") == of("mms mmss")
