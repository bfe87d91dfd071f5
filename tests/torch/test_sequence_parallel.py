"""A sequence whose parts are on several ranks: outputs, loss and gradients are those of the whole sequence.

float64: 1e-12 of the largest value of a tensor, some thousand roundings; gradients, of the largest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import seqblocks
from seqblocks.distributed import sequence_parallel
from seqblocks.runtime.model import SequenceModel
from tests.torch import test_context_models, test_law
from tests.torch.sequence_ranks import SHARES, Errors, Example, larger, relative, run_ranks

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
        found[name] = Example(model, SHARES[size]).compare(sequence_parallel(model, group, **options))
    return found


def families() -> dict[str, Any]:
    found = {
        "in turn": compared(FAMILIES, 2, summaries=False),
        "summaries": compared(FAMILIES, 3, summaries=True),
    }
    pair = distributed.new_group([0, 1])
    cases = {case.__name__: case(pair) for case in CASES} if distributed.get_rank() < 2 else {}
    return found | {"cases": cases, "rounded": rounded(pair) if cases else {}}


def an_empty_part(group: Any) -> Errors:
    model = larger(built("hybrid_small"))
    return Example(model, (0, 9), marks=False).compare(sequence_parallel(model, group))


def micro_batches(group: Any) -> Errors:
    """All forward passes come first: the ranks work on different ones at the same time."""
    model = larger(built("hybrid_small"))
    parallel = sequence_parallel(model, group)
    tokens = torch.randint(11, (4, 20), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    whole = cross_entropy(model(tokens).mT, targets)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    parts = [(parallel.part(x), parallel.part(y)) for x, y in zip(tokens.split(2), targets.split(2), strict=True)]
    losses = [cross_entropy(parallel(x).mT, y, reduction="none") for x, y in parts]
    loss = parallel.mean(torch.stack(losses))
    loss.backward()
    parallel.sum_gradients()
    gradients = [relative(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True)]
    return {"loss": relative(loss.detach(), whole.detach()), "gradient": max(gradients)}


def checkpointed_layers(group: Any) -> Errors:
    """Steps that are computed again receive and send nothing again."""
    model = larger(built("hybrid_small"))
    example = Example(model, SHARES[2])
    errors: Errors = {}
    for kind in CheckpointImpl:
        for at, layer in enumerate(model.layers):
            model.layers[at] = checkpoint_wrapper(getattr(layer, "_checkpoint_wrapped_module", layer), kind)
        example.model = model
        parallel = sequence_parallel(model, group, summaries=kind is CheckpointImpl.REENTRANT)
        errors |= {f"{kind.name} {name}": value for name, value in example.compare(parallel).items()}
    return errors


def evaluation(group: Any) -> Errors:
    """Nothing is differentiated; sequences packed into one row."""
    model = larger(built("mamba_130m"))
    parallel = sequence_parallel(model, group)
    tokens, bounds = torch.arange(20).unsqueeze(0) % 11, torch.tensor([0, 3, 10, 20])
    with torch.no_grad():
        y = parallel(parallel.part(tokens), cu_seqlens=bounds)
        return {"output": relative(y, parallel.part(model(tokens, cu_seqlens=bounds)))}


def frozen(group: Any) -> Errors:
    """A model without trainable parameters hands back no gradients."""
    model = larger(built("hybrid_small")).requires_grad_(False)
    parallel = sequence_parallel(model, group)
    tokens = torch.arange(20).unsqueeze(0) % 11
    return {"output": relative(parallel(parallel.part(tokens)), parallel.part(model(tokens)))}


def distributed_data_parallel(group: Any) -> Errors:
    """DDP over the same ranks divides what it adds by their number."""
    model = larger(built("hybrid_small"))
    tokens = torch.arange(40).reshape(2, 20) % 11
    whole = cross_entropy(model(tokens).mT, tokens.flip(1))
    expected = torch.autograd.grad(whole, list(model.parameters()))
    parallel = sequence_parallel(DistributedDataParallel(model, process_group=group), group)
    losses = cross_entropy(parallel(parallel.part(tokens)).mT, parallel.part(tokens.flip(1)), reduction="none")
    (parallel.mean(losses) * parallel.size).backward()
    return {"gradient": max(relative(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))}


def weighted(group: Any) -> Errors:
    """Targets that do not count, unevenly over the ranks."""
    parallel = sequence_parallel(larger(built("mingru_small")), group)
    losses = torch.arange(6.0, dtype=torch.float64) ** 2
    counts = torch.tensor([0, 0, 1, 1, 0, 1.0])
    found = parallel.mean(parallel.part(losses, 0), parallel.part(counts, 0))
    return {"loss": relative(found, (losses * counts).sum() / 3)}


def rounded(group: Any) -> dict[str, tuple[float, float]]:
    """Return the errors of parts and of the whole sequence in coarser dtypes, relative to float64, as norms."""
    tokens = torch.arange(48).reshape(2, 24) * 7 % 11
    found: dict[str, tuple[float, float]] = {}
    parallel: Any = None

    def run(name: str, dtype: Any, parts: bool, summaries: bool = False) -> list[Tensor]:
        nonlocal parallel
        model = built(name).to(dtype)
        if parts:
            parallel = sequence_parallel(model, group, summaries=summaries)
            losses = cross_entropy(parallel(parallel.part(tokens)).float().mT, parallel.part(tokens), reduction="none")
            parallel.mean(losses).backward()
            parallel.sum_gradients()
        else:
            cross_entropy(model(tokens).float().mT, tokens).backward()
        return [p.grad.double() for p in model.parameters()]

    def error(gradients: list[Tensor], exact: list[Tensor]) -> float:
        differences = [(a - b).square().sum() for a, b in zip(gradients, exact, strict=True)]
        return (sum(differences) / sum(g.square().sum() for g in exact)).sqrt().item()

    for name in ("hybrid_small", "gla_1_3b"):
        for dtype in (torch.float32, torch.bfloat16):
            exact, whole = (run(name, each, parts=False) for each in (torch.float64, dtype))
            for summaries in (False, True):
                parts = run(name, dtype, parts=True, summaries=summaries)
                found[f"{name} {dtype} {summaries}"] = error(parts, exact), error(whole, exact)
    return found


CASES = (
    an_empty_part, micro_batches, checkpointed_layers, evaluation, frozen, distributed_data_parallel, weighted,
)  # fmt: skip


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


@pytest.mark.parametrize("case", CASES)
def test_cases(case: Callable[..., Errors], results: Callable[[str], list[Any]]) -> None:
    for found in results("families")[:2]:
        errors = found["cases"][case.__name__]
        assert errors
        assert max(errors.values()) <= 1e-12, errors


def test_rounding_is_that_of_the_whole(results: Callable[[str], list[Any]]) -> None:
    """In float32 and bfloat16 parts are about as far from float64 as the whole sequence: the roundings are others."""
    for found in results("families")[:2]:
        for name, (parts, whole) in found["rounded"].items():
            assert 0 < parts <= 4 * whole, (name, parts, whole)


@pytest.mark.long
@pytest.mark.parametrize("how", ["all, in turn", "all, summaries"])
@pytest.mark.parametrize("name", SMALL)
def test_parts_of_all_models(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("others"), how, name)
