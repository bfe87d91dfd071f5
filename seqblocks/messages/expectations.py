"""Faults of `expect:`: figures that the model does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seqblocks.errors import Fault, Span
from seqblocks.types import Wire


def figure_differs(code: str, key: str, expected: float, found: float | None, missing: str, hint: str | None) -> Fault:
    """code: E701 to E703. missing: what has an open length, so that the figure is unknown (`found` is None)."""
    shown = f"unknown: the length of {missing} is open"
    if found is not None:
        shown = f"{found:,.10g} ({found - expected:+,.10g})"
    return Fault(code, f"{key} differs from `expect:`", expected=f"{expected:,.10g}", found=shown, hint=hint)


def largest_parts(parts: Iterable[tuple[str, int]]) -> str:
    """parts: the steps with most parameters, and how many they have."""
    return "largest parts: " + ", ".join(f"{name} {count:,}" for name, count in parts)


def output_differs(axes: Sequence[object], found: Wire) -> Fault:
    message = "output differs from `expect:`"
    return Fault("E704", message, expected=str(axes).replace("'", ""), found=str(found))


def output_is_no_list(found: str) -> Fault:
    hint = "output: [batch, 1000], or {policy: [batch, 4], value: [batch, 1]} for named outputs"
    return Fault("E203", "the output must be a list of axes", found=found, hint=hint)


def outputs_without_names(key: str, example: str) -> Fault:
    """Describe an entry of `expect:` with values by the names of outputs that have none."""
    hint = f"{example}, or name the outputs: `outputs: [logits, next_logits]`"
    message = f"{key} has a value for each output, but the outputs of this model have no names"
    return Fault("E203", message, hint=hint)


def lookahead_differs(
    name: str, expected: object, found: object, introduced: tuple[str, Span] | None = None
) -> Fault:
    """name: of the output, if it is only one of several. introduced: the step that introduces the lookahead."""
    hint = introduced and f"the lookahead is introduced by {introduced[0]} ({introduced[1]})"
    message = f"lookahead{f' of `{name}`' if name else ''} differs from `expect:`"
    return Fault("E705", message, expected=str(expected), found=str(found), hint=hint)


def no_lookahead(name: str, expected: object, kind: str, output: Wire | None) -> Fault:
    """name: of the output, if it is only one of several. kind: of the input."""
    shown = {"image": "an image", "vector": "a vector"}.get(kind)
    found = f"none: the input is {shown}" if shown else f"none: the output is {output}"
    return lookahead_differs(name, expected, found)


def latency_differs(expected: float, found: float, samples: object, sample_rate: float | None) -> Fault:
    return _latency(expected, f"{found:g} ({samples} samples at {sample_rate:,g} Hz)")


def latency_is_undefined(expected: float) -> Fault:
    return _latency(expected, "undefined: an output depends on the whole sequence")


def latency_is_unknown(expected: float) -> Fault:
    hint = "input: {features: 1, sample_rate: 16000}"
    return _latency(expected, "unknown: the input has no `sample_rate`", hint)


def _latency(expected: float, found: str, hint: str | None = None) -> Fault:
    return Fault("E706", "latency_ms differs from `expect:`", expected=f"{expected:g}", found=found, hint=hint)


def tolerance(found: float) -> Fault:
    message, hint = "the tolerance must be a relative deviation", "0.01 accepts a deviation of one percent"
    return Fault("E209", message, expected="0 or more, below 1", found=f"{found:g}", hint=hint)
