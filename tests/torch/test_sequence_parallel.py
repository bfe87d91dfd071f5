"""A sequence whose parts are on several ranks: outputs, loss and gradients are those of the whole sequence.

float64: 1e-12 of the largest value of a tensor, some thousand roundings; gradients, of the largest of the model.
"""

from __future__ import annotations

import pytest

import seqblocks
from seqblocks.distributed import sequence_parallel
from tests.torch import test_context_models, test_law
from tests.torch.sequence_ranks import Errors, Example, larger, run_ranks

SMALL = test_law.SMALL | test_context_models.SMALL
MANY = 2  # ranks


def bundled(rank: int) -> dict[str, Errors]:
    found = {}
    for name, sizes in SMALL.items():
        model = larger(seqblocks.build(name, set=sizes, dtype="float64", device="cpu", seed=0))
        example = Example(model, MANY)
        found[name] = example.compare(sequence_parallel(model))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Errors]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return {"bundled": run_ranks(__name__, "bundled", folder, 2)}


@pytest.mark.parametrize("name", SMALL)
def test_parts_make_the_whole(name: str, results: dict[str, list[dict[str, Errors]]]) -> None:
    for errors in results["bundled"]:
        assert max(errors[name].values()) <= 1e-12, errors[name]
