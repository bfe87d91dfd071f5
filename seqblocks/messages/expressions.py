"""Faults of expressions: their syntax, names, functions and values."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from seqblocks.errors import Fault, listing, quote
from seqblocks.messages.suggestions import did_you_mean

# ------------------------------------------------------------------------------
# Syntax

_NOTATIONS = {
    r"\^": "write `**` for powers",
    r"[{}]": "write names without braces",
    r"^\d+(\.\d+)? ?([kKMGBT]i?|%)$": "write the number in full, without a unit",
    r"^\d{1,3}(,\d{3})+$": "write the number without commas; `1_000` is allowed",
    r"&&|\|\|": "write `and` and `or`",
    r"(?<![=<>!])=(?!=)": "write `==` to compare",
    r"^None$": "leave the key out",
}


def invalid(text: str) -> Fault:
    return Fault("E501", f"{quote(text)} is not a valid expression", hint=_notation(text))


def unsupported(text: str) -> Fault:
    return Fault(
        "E501",
        f"{quote(text)} uses syntax that expressions do not support",
        expected="numbers, names, + - * / // % **, comparisons, and, or, not, `a if c else b`, or functions",
        hint=_notation(text),
    )


def chained_comparison(text: str, node: ast.Compare) -> Fault:
    """Describe `0 < d < 1`, which is to be written as `0 < d and d < 1`."""
    sides = [node.left, *node.comparators]
    pairs = (ast.Compare(left, [op], [right]) for left, op, right in zip(sides, node.ops, sides[1:], strict=False))
    fault = unsupported(text)
    fault.hint = f"compare two values at a time: `{' and '.join(map(ast.unparse, pairs))}`"
    return fault


def _notation(text: str) -> str | None:
    """Return a hint for the notation of another language."""
    return next((hint for pattern, hint in _NOTATIONS.items() if re.search(pattern, text)), None)


def too_long(most: int) -> Fault:
    return Fault("E504", "the expression is too long", expected=f"at most {most} characters")


def too_complex() -> Fault:
    return Fault("E504", "the expression is too complex", hint="split it into several entries of `let:`")


# ------------------------------------------------------------------------------
# Names


def unknown_name(name: str, known: Mapping[str, Any], is_function: bool) -> Fault:
    """known: the names in scope. There may be many: the expectation and the hint are computed when they are shown."""

    def expected() -> str:
        return f"one of {listing(sorted(known))}" if known else "a number"

    def hint() -> str | None:
        return f"{name} is a function: {name}(…)" if is_function else did_you_mean(name, known)

    return Fault("E303", f"unknown name {quote(name)}", expected=expected, hint=hint)


def no_function(name: str, known: Sequence[str]) -> Fault:
    return Fault(
        "E303",
        f"there is no function {quote(name)}",
        expected=f"one of {listing(known)}",
        hint=lambda: did_you_mean(name, known),
    )


def number_of_arguments(name: str, least: int, most: int, found: int) -> Fault:
    count = str(least) if least == most else f"{least} to {most}"
    return Fault("E501", f"{name} takes {count} arguments", found=f"{found}")


# ------------------------------------------------------------------------------
# Values


def divides_by_zero(text: str) -> Fault:
    return Fault("E502", f"{quote(text)} divides by zero", hint="use max(…, 1) to avoid dividing by 0")


def no_value(text: str, why: str) -> Fault:
    """why: the message of the error that evaluating it raised."""
    return Fault("E502", f"{quote(text)} has no value: {why}")


def word_with_number(text: str) -> Fault:
    return no_value(text, "it compares a word with a number")


def overflows(text: str) -> Fault:
    return Fault("E504", f"{quote(text)} is too large a number")


def too_large(text: str) -> Fault:
    return Fault("E504", f"{quote(text)} is too large a number", expected="at most 10^18")
