"""Messages that echo a value of the user are of limited length and have no control characters, as text and as data."""

from __future__ import annotations

import pickle

import pytest

from seqblocks.analysis import check
from seqblocks.errors import (
    MAX_TEXT,
    Fault,
    PartialWarning,
    RunError,
    SeqblocksError,
    SpecError,
    UnavailableError,
    UsageError,
    clip,
    quote,
    readable,
)

LONG = "x" * 100_000
ODD = "a\x1b[31mb\u202ec\x07\u2066d\x9be\r\x00\udc80"
SHOWN = r"a\x1b[31mb\u202ec\x07\u2066d\x9be\r\x00\udc80"
MODEL = "seqblocks: 1\nlet: {a: 1}\nmodel: {input: {features: 4}, steps: [{linear: {features: 4, name: e}}]}\n"


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("kind", [SeqblocksError, UsageError, UnavailableError, RunError, PartialWarning])
def test_exceptions_are_readable(kind: type[Exception]) -> None:
    assert str(kind(f"{ODD} is no device\nuse cpu")) == f"{SHOWN} is no device\nuse cpu"
    found = str(kind(f"'{LONG}' is no device"))
    assert len(found) <= 2 * MAX_TEXT
    assert found.startswith("'xxx")
    assert found.endswith("xxx' is no device")
    assert len(str(kind(f"{50_000 * chr(27)} is no device"))) <= 2 * MAX_TEXT
    for error in (kind(LONG), kind(ODD), kind(50_000 * ODD)):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("length", [0, 9, 10, 11, 12, 1000])
def test_clipped_text_has_its_beginning_and_its_end(length: int) -> None:
    text = "".join(chr(ord("a") + at % 26) for at in range(length))
    found = clip(text, 10)
    assert len(found) <= 10
    assert found == text if length <= 10 else (found[:5], found[-2:]) == (text[:5], text[-2:])
    assert clip(found, 10) == found
    assert readable(found) == found


@pytest.mark.parametrize("value", [LONG, ODD.replace("\udc80", "").replace("\x00", "")])
@pytest.mark.parametrize("place", ["value", "number", "path", "name", "let"])
def test_spec_errors_are_readable(value: str, place: str) -> None:
    overrides: dict[str, dict[str, object]] = {
        "value": {"a": [value], "let.b": 1}, "number": {"model.e.features": value}, "path": {value: 1},
    }  # fmt: skip
    text, name = MODEL, "<text>"
    if place == "let":
        text = MODEL.replace("a: 1", f'"{value}": 1'.replace("\x1b", r"\e"))
    if place == "name":
        text, name = "seqblocks: 1\nmodel: 3", value
    with pytest.raises(SpecError) as caught:
        check.load_text(text, name, set=overrides.get(place, {}))
    assert is_plain(str(caught.value))
    assert len(str(caught.value)) <= 6 * MAX_TEXT
    for each in caught.value.diagnostics:
        data = each.as_data()
        assert all(len(data[key] or "") <= MAX_TEXT for key in ("message", "expected", "found", "hint"))
        assert all(len(note["text"]) <= MAX_TEXT for note in data["notes"])


def test_a_diagnostic_without_a_report_is_clipped_too() -> None:
    found = Fault("E803", f"there is no {quote(LONG)}", hint=LONG).as_diagnostic(None)
    assert len(found.render()) <= 4 * MAX_TEXT
    assert len(found.hint or "") <= MAX_TEXT


def test_an_override_is_named_in_short() -> None:
    with pytest.warns(UserWarning, match="the override a=") as caught:
        check.load_text(MODEL, set={"a": LONG})
    assert len(str(caught[0].message)) <= 6 * MAX_TEXT
