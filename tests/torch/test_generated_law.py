"""The state law for streaming specs that hypothesis generates, and shrinks when one fails.

SEQBLOCKS_LAW_SPECS=5000 pytest tests/torch/test_generated_law.py -m slow     uses other specs in each run
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.compose import Composer
from tests.torch.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.errors.SpecWarning")  # a random spec may produce warnings

OFTEN = int(os.environ.get("SEQBLOCKS_LAW_SPECS", "0"))
GENERAL = settings(
    deadline=None, database=None, derandomize=not OFTEN, print_blob=True, suppress_health_check=list(HealthCheck)
)
CHANCES = st.randoms(use_true_random=False)  # hypothesis makes each choice, so that it can shrink the spec


def obeys(chance: random.Random, seed: int, length: int) -> None:
    text = Composer(chance, streams=True).compose()
    note(text)
    judge(text, seed, length)


@pytest.mark.slow
@settings(GENERAL, max_examples=20)
@given(chance=CHANCES, seed=st.integers(0, 1000), length=st.integers(1, 9))
def test_whole_is_chunks_is_steps(chance: random.Random, seed: int, length: int) -> None:
    obeys(chance, seed, length)


@pytest.mark.slow
@settings(GENERAL, max_examples=OFTEN or 40)
@given(chance=CHANCES, seed=st.integers(0, 1000), length=st.sampled_from([1, 2, 5, 12, 30, 70]))
def test_whole_is_chunks_is_steps_for_longer_sequences(chance: random.Random, seed: int, length: int) -> None:
    """70 tokens are more than the chunk lengths of the kernels."""
    obeys(chance, seed, length)
