"""Random valid specs (tests/compose.py) and mutations of them, checked as tests/torch/judge.py describes."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from tests.compose import compose
from tests.mutate import mutated
from tests.torch.judge import judge, moderate

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


GRID = """
seqblocks: 1
model:
  input: {features: 2, grid: [2, 2]}
  steps:
    - rearrange: {pattern: "(rows p) (columns q) features -> rows columns (p q features)", p: 1, q: 2}
    - class_token
    - downsample: {factor: 3}
"""


def test_a_grid_may_be_smaller_than_a_frame() -> None:
    """Two merged patches and a class token become one token. A frame of three patches has six tokens, the grid four."""
    assert judge(GRID, 0)


UNSEEN = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - downsample: {factor: 3, as: merged}
    - attention: {q: input, k: merged, v: merged, heads: 2, cache: 9, logsumexp: true, as: far}
    - attention: {q: input, k: input, v: input, heads: 2, cache: 9, logsumexp: true}
    - merge_attention: {with: far, heads: 2, as: y}
    - linear: {from: %s, features: 1}
"""


@pytest.mark.parametrize(("read", "compared"), [("y", True), ("far", False)])
def test_only_a_merge_can_use_the_log_of_no_exponentials(read: str, compared: bool) -> None:
    """The first tokens see no merged one: their log is -1e30, in which other numbers are lost."""
    model = seqblocks.build_text(UNSEEN % read, dtype=torch.float64, seed=0)
    before = model.linear.weight.clone()
    assert moderate(model, 0, frames=2) == compared
    assert torch.equal(model.linear.weight, before) == compared


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
