"""Figures of `expect:` with limits, units and tolerances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seqblocks
from seqblocks.errors import ExpectationError, SpecError

PARAMS = 72  # of the model below
MODEL = "{{input: {{features: 8}}, steps: [linear: {{features: n}}]}}"
TEXT = f"{{{{seqblocks: 1, let: {{{{n: 8}}}}, model: {MODEL}, expect: {{{{{{}}}}}}}}}}"


def holds(entry: str) -> bool:
    try:
        seqblocks.load_text(TEXT.format(entry))
    except ExpectationError:
        return False
    return True


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("params: 72", True), ("params: 0.072k", True), ("params: 0.000072 M", True), ("params: 73", False),
        ("params: '<= 72'", True), ("params: '<= 71'", False), ("params: '>= 72'", True), ("params: '>=73'", False),
        ("params: '<= n * 9'", True), ("params: '<= n * 9 - 1'", False), ("params: '<= 0.1k'", True),
        ("params: {at_most: 72}", True), ("params: {at_most: 71}", False), ("params: {at_least: 72}", True),
        ("params: {at_least: 60, at_most: 70}", False), ("params: {at_least: 60, at_most: 80}", True),
        ("params: {about: 70, tolerance: 3%}", True), ("params: {about: 70, tolerance: 0.02}", False),
        ("params: 70, tolerance: 0.03", True), ("params: {about: 70}, tolerance: 3 %", True),
        ("params: {about: 70, tolerance: 0}, tolerance: 0.03", False), ("params: {at_most: 70, tolerance: 3%}", True),
        ("state_bytes: 0 B", True), ("state_bytes: '<= 0 kB'", True), ("state_bytes: '>= 1 B'", False),
        ("flops_per_token: '<= 0.128k'", True), ("flops_per_token: 128", True), ("flops_per_token: '<= 127'", False),
    ],
)  # fmt: skip
def test_a_limit(entry: str, expected: bool) -> None:
    assert holds(entry) is expected


@given(
    limit=st.integers(1, 200), kind=st.sampled_from(["about", "at_most", "at_least"]), percent=st.integers(0, 99),
    unit=st.sampled_from([("", 1), ("k", 1000), (" k", 1000)]),
)  # fmt: skip
def test_any_limit(limit: int, kind: str, percent: int, unit: tuple[str, int]) -> None:
    room = limit * percent / 100
    low, high = (limit - room if kind != "at_most" else 0), (limit + room if kind != "at_least" else 1e9)
    if min(abs(PARAMS - low), abs(PARAMS - high)) < 1e-9:  # a value on the limit may be rounded to either side
        return
    text = f"params: {{{kind}: {limit / unit[1]:.6f}{unit[0]}, tolerance: {percent}%}}"
    assert holds(text) is (low <= PARAMS <= high)


WRONG = ["'1.3m'", "1.3 Mparams", "3 Q", "1.3M 2", "'<= <= 3'", "'< 3'", "'== 3'", "'<= M'", "{}", "[1]", "''", "true"]


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("key", ["params", "state_bytes", "latency_ms"])
def test_anything_else_is_a_fault_with_a_place(key: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        seqblocks.load_text(TEXT.format(f"{key}: {given}"))
    assert not isinstance(caught.value, ExpectationError)
    assert caught.value.diagnostics[0].span


@pytest.mark.parametrize(("figure", "width"), [("8.2M", 8200), ("4.1M", 4100), ("{at_most: 8.2M}", 8200)])
def test_a_unit_of_a_decimal_fraction_is_exact(figure: str, width: int) -> None:
    """4.1 * 1e6 is 4099999.9999999995."""
    steps = f"[linear: {{features: {width}, bias: false}}]"
    model = f"{{input: {{features: 1000}}, steps: {steps}}}"
    seqblocks.load_text(f"{{seqblocks: 1, model: {model}, expect: {{params: {figure}}}}}")


@pytest.mark.parametrize("entry", ["params: 1e400M", "params: {at_most: 1e400 M}", "params: 72, tolerance: 1e400%"])
def test_a_number_beyond_floats_is_a_fault(entry: str) -> None:
    with pytest.raises(SpecError, match=r"E203.*expected a finite number"):
        seqblocks.load_text(TEXT.format(entry))


def test_a_message_shows_all_digits_of_a_large_figure() -> None:
    model = "{input: {features: 1000003}, steps: [linear: {features: 70001, bias: false}]}"
    with pytest.raises(ExpectationError) as caught:
        seqblocks.load_text(f"{{seqblocks: 1, model: {model}, expect: {{params: 70_001_210_002, flops_per_token: 1}}}}")
    params, flops = caught.value.diagnostics
    assert (params.expected, params.found) == ("70,001,210,002", "70,001,210,003 (+1)")
    assert flops.found == "140,002,420,006 (+140,002,420,005)"


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("{input: {features: 1, sample_rate: 44100}, steps: [downsample: {factor: 512}, linear: 4]}", "latency_ms"),
        ("{input: {features: 1}, steps: [downsample: {factor: 7}, linear: 4]}", "flops_per_token"),
    ],
)
def test_a_figure_that_is_not_whole_is_met_by_what_the_message_shows(model: str, key: str) -> None:
    text = f"{{seqblocks: 1, model: {model}, expect: {{{key}: %s}}}}"
    with pytest.raises(ExpectationError) as caught:
        seqblocks.load_text(text % 1)
    shown = (caught.value.diagnostics[0].found or "").split()[0]
    assert "." in shown
    seqblocks.load_text(text % shown)
