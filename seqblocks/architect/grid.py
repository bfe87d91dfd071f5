"""Read the options of a grid: `dim=64..512:64`, `layers=2,4,8`, and demands on figures: `params=125M`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from seqblocks.analysis.passes import budgets
from seqblocks.architect.facts import FACTS
from seqblocks.errors import UsageError, quote
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

MAX_VALUES = 100_000  # of one option
_NUMBER = r"[-+]?\d[\d_]{0,29}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?"  # of a size that a float has, and an int in no time
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?::\s*({_NUMBER}))?\s*")
_LIKE_RANGE = re.compile(r"\s*[-+]?\d[\w.\s:+-]*")
_TARGET = re.compile(rf"\s*([A-Za-z_]\w*)\s*(<=|>=|==|=|<|>)\s*({_NUMBER})\s*([A-Za-z]*)\s*")
_BYTES = frozenset(name for name in FACTS if "bytes" in name)
_TEXTS = frozenset({"streams"})  # facts that are no numbers
Value = Any  # int, float or str


class Option(Record):
    """An option of a grid: the path of an override, and its values. Numbers are in ascending order."""

    path: str
    values: list[Value]
    is_number: bool


class Demand(Record):
    """A demand on a figure: "=" (as near as possible), "<=", "<", ">=" or ">"."""

    fact: str
    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.fact}{self.kind}{self.value:,.12g}"


def read_option(path: str, values: Any) -> Option:
    """Return an option from a text (`64..512:64`, `2,4,8`), a number, or an iterable such as `range(64, 513, 64)`.

    Raises UsageError for anything else, and for an empty or too large option.
    """
    if not isinstance(path, str) or not path.strip():
        raise UsageError(f"an option is named by the path of an override, such as dim, not {path!r}")
    if isinstance(values, str):
        found = _from_text(path, values)
    else:
        found = list(values) if hasattr(values, "__iter__") and not isinstance(values, Mapping) else [values]
    if not found:
        raise UsageError(f"{path} has no values")
    if len(found) > MAX_VALUES:
        raise UsageError(f"{path} has more than {MAX_VALUES:,} values")
    is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in found)
    unique = list(dict.fromkeys(found)) if is_number else found
    return Option(path.strip(), sorted(unique) if is_number else unique, is_number)


def _from_text(path: str, text: str) -> list[Value]:
    if match := _RANGE.fullmatch(text):
        first, last, step = (Fraction(part.replace("_", "")) for part in match.groups("1"))
        if step <= 0 or last < first:
            raise UsageError(f"{path}={text}: a range is written FIRST..LAST:STEP, with a positive step")
        count = (last - first) // step + 1
        if count > MAX_VALUES:
            raise UsageError(f"{path} has more than {MAX_VALUES:,} values")
        return [_plain(first + step * at) for at in range(int(count))]
    if _LIKE_RANGE.fullmatch(text) and (":" in text or ".." in text):
        raise UsageError(f"{path}={text}: a range is written FIRST..LAST:STEP, as in 64..512:64")
    parts = _split(text)
    if not all(parts):
        raise UsageError(f"{path} takes a range or a list, as in {path}=64..512:64 or {path}=64,128, not {quote(text)}")
    return [_plain(Fraction(part.replace("_", ""))) if re.fullmatch(_NUMBER, part) else part for part in parts]


def _split(text: str) -> list[str]:
    """Split a list at its commas, except inside brackets and quotes."""
    parts, depth, quoted = [""], 0, ""
    for char in text:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "\"'":
            quoted = char
        else:
            depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def read_demand(text: str, what: str = "target") -> Demand:
    """Return a demand from `params=125M`, `state_bytes<=2MB`, `flops_per_token<1e9`. Raises UsageError.

    what: the word for it in messages.
    """
    match = _TARGET.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"a {what} is written params=125M or state_bytes<=2MB, not {quote(str(text))}")
    name, kind, number, unit = match.groups()
    numbers = [fact for fact in FACTS if fact not in _TEXTS]
    if name not in numbers:
        hint = did_you_mean(name, numbers) or f"one of {', '.join(numbers)}"
        raise UsageError(f"there is no figure {quote(name)}: {hint}")
    units = {"": 1.0, **budgets.COUNTS, **(budgets.BYTES if name in _BYTES else {})}
    if unit not in units:
        hint = did_you_mean(unit, units) or f"one of {', '.join(filter(None, units))}"
        raise UsageError(f"{text.strip()}: there is no unit {quote(unit)} of {name}: {hint}")
    value = float(Fraction(number.replace("_", "")) * Fraction(units[unit]))
    return Demand(name, "=" if kind == "==" else kind, value)


def assignment(path: str, value: Value) -> str:
    """Return an override as it is written on the command line."""
    return f"{path}={value}"
