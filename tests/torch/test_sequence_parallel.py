"""A sequence whose parts are on several ranks: outputs, loss and gradients are those of the whole sequence.

float64: 1e-12 of the largest value of a tensor, some thousand roundings; gradients, of the largest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from torch import distributed

import seqblocks
from seqblocks.distributed import sequence_parallel
from seqblocks.runtime.model import SequenceModel
from tests.torch import test_context_models, test_law
from tests.torch.sequence_ranks import Errors, Example, larger, run_ranks

SMALL = test_law.SMALL | test_context_models.SMALL | {"caduceus_small": {"dim": 8, "depth": 2}}
FAMILIES = (  # the kinds of state, and of what a step may read besides its tokens
    "xlstm_125m_7_1", "xlstm_7b", "mamba_130m", "mamba2_130m", "gla_1_3b", "qwen3_next_small", "rwkv6_1_4b",
    "recurrentgemma_2b", "mingru_small", "hybrid_small", "transformer_small", "centaurus_mlstm", "centaurus_denoiser",
    "memoroid_agent", "captioner", "caduceus_small", "turned",
)  # fmt: skip
# Scans from the other end, also of steps that need flipped copies, and one inside another.
TURNED = """
seqblocks: 1
use: [xlstm, transformer]
model:
  input: {features: 8}
  steps:
    - scan: {order: reverse, steps: [{mlstm_block: {dim: 8, heads: 2}}]}
    - scan: {order: [forward, reverse], merge: mean, name: both, steps: [{attention_layer: {dim: 8, heads: 2}}]}
    - scan:
        order: reverse
        name: twice
        steps:
          - shift: {by: 2}
          - scan: {order: [forward, reverse], own: all, merge: sum, steps: [{causal_conv: {kernel: 3}}]}
          - sinusoids
"""
Found = dict[str, Errors]


def built(name: str) -> SequenceModel:
    if name == "turned":
        return seqblocks.build_text(TURNED, dtype="float64", device="cpu", seed=0)
    return seqblocks.build(name, set=SMALL[name], dtype="float64", device="cpu", seed=0)


def compared(names: Iterable[str], size: int, **options: Any) -> Found:
    """Run models on parts of a sequence, on the first ranks of all."""
    group = distributed.new_group(list(range(size)))
    if distributed.get_rank() >= size:
        return {}
    found = {}
    for name in names:
        model = larger(built(name))
        found[name] = Example(model, size).compare(sequence_parallel(model, group, **options))
    return found


def families() -> dict[str, Found]:
    return {
        "in turn": compared(FAMILIES, 2, summaries=False),
        "summaries": compared(FAMILIES, 3, summaries=True),
    }


def others() -> dict[str, Found]:
    return {
        "all, in turn": compared(SMALL, 3, summaries=False),
        "all, summaries": compared(SMALL, 2, summaries=True),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What a function above returns on three ranks. They are started once for each."""
    folder = tmp_path_factory.mktemp("ranks")
    return cache(lambda name: run_ranks(__name__, name, folder, 3))


def assert_close(found: list[dict[str, Found]], how: str, name: str) -> None:
    ranks = [errors[how][name] for errors in found if errors[how]]
    assert len(ranks) >= 2
    for errors in ranks:
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("how", ["in turn", "summaries"])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_make_the_whole(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("families"), how, name)


@pytest.mark.long
@pytest.mark.parametrize("how", ["all, in turn", "all, summaries"])
@pytest.mark.parametrize("name", SMALL)
def test_parts_of_all_models(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("others"), how, name)
