"""Random valid specs (tests/compose.py) and mutations of them, checked as tests/torch/judge.py describes."""

from __future__ import annotations

import pytest

from tests.compose import compose
from tests.mutate import mutated
from tests.torch.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.errors.SpecWarning")  # a random spec may produce warnings


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_composed_specs(part: int) -> None:
    accepted = sum(judge(compose(seed), seed) for seed in range(40 * part, 40 * (part + 1)))
    assert accepted >= 36  # of 40


GROWING = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - cell: {state: {s: {features: 4}}, steps: [{calc: {s: 2.5 * s + 1 + 0 * x}}]}
    - calc: exp(x)
"""


def test_numbers_that_overflow_in_long_sequences_are_not_compared() -> None:
    """The state of token n is about 2.5^n / 1.5: 162 after 6 tokens, and 1016 after 8, whose exponential overflows."""
    assert judge(GROWING, 0, length=6)
    assert judge(GROWING, 0, length=12)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_specs(part: int) -> None:
    """One part of a spec is replaced: the result is rejected, or has all properties of a valid spec."""
    accepted = sum(judge(mutated(compose(seed), seed), seed) for seed in range(60 * part, 60 * (part + 1)))
    assert 0 < accepted < 60


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_many_composed_specs(part: int) -> None:
    start = 10_000 + 200 * part
    accepted = sum(judge(compose(seed), seed) for seed in range(start, start + 200))
    assert accepted >= 180
    for seed in range(start, start + 200):
        judge(mutated(compose(seed), seed), seed)
