"""A sequence split over several ranks: outputs, loss and gradients equal those of the whole sequence.

float64: 1e-12 of the largest value of a tensor, some thousand roundings; gradients, of the largest of the model.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import seqblocks
from seqblocks.distributed import clip_gradients, pipeline_stage, sequence_parallel, shard, tensor_parallel
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import random_context, random_input
from tests.compose import compose
from tests.processes import once
from tests.torch import judge, test_context_models, test_law
from tests.torch.sequence_ranks import SHARES, Errors, Example, larger, relative, run_ranks

SMALL = test_law.SMALL | test_context_models.SMALL | {"caduceus_small": {"dim": 8, "depth": 2}}
del SMALL["mod_small"]  # ranks have unequal numbers of chosen tokens: test_chosen_tokens_are_refused
# Kinds of state, and of inputs that a step may read besides its tokens; test_parts_of_all_models has the others.
SOME = ("xlstm_7b", "qwen3_next_small", "rwkv6_1_4b", "recurrentgemma_2b", "caduceus_small", "cells")
QUICK = ("xlstm_125m_7_1", "mamba2_130m", "gla_1_3b", "centaurus_denoiser", "captioner", "turned")
EMPTY = ((4, 0, 5), (0, 0, 7), (7, 0, 0))  # frames of the sequence on each rank
COMPOSED = 400  # random specs

# Reverse scans, also of steps that need flipped copies, and nested ones.
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
# A loop, and an associative scan, with learned starts.
CELLS = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - cell:
        state: {h: {features: 8, start: "normal(0, 1)", learned: true}}
        steps: [{linear: {from: [input, h], features: 8}}, {tanh: {as: h}}]
    - scan:
        order: reverse
        steps: [{cell: {state: {s: {features: 8, start: 0.5, learned: true}}, steps: [{calc: {s: "0.9 * s + input"}}]}}]
"""
# Full attention over more tokens than a stream caches, and other kinds of steps, also at another rate.
SHORT_CACHE = """
seqblocks: 1
use: [xlstm, transformer]
model:
  input: {features: 8}
  steps:
    - attention_layer: {dim: 8, heads: 2, cache: 2}
    - scan: {order: [forward, reverse], merge: mean, steps: [{attention_layer: {dim: 8, heads: 2, cache: 2}}]}
    - downsample: 2
    - slstm_block: {dim: 8, heads: 2}
    - attention_layer: {dim: 8, heads: 2, cache: 2, name: slow}
    - mlstm_block: {dim: 8, heads: 2}
    - upsample: 2
"""
Found = dict[str, Errors]


def built(name: str) -> SequenceModel:
    if name == "cells":
        return seqblocks.build_text(CELLS, dtype="float64", device="cpu", seed=0)
    if name == "turned":
        return seqblocks.build_text(TURNED, dtype="float64", device="cpu", seed=0)
    return seqblocks.build(name, set=SMALL[name], dtype="float64", device="cpu", seed=0)


def compared(names: Iterable[str], size: int, **options: Any) -> Found:
    """Run models on parts of a sequence, on the first of the ranks."""
    group = distributed.new_group(list(range(size)))
    if distributed.get_rank() >= size:
        return {}
    found = {}
    for name in names:
        model = larger(built(name))
        found[name] = Example(model, SHARES[size]).compare(sequence_parallel(model, group, **options))
    return found


def families() -> dict[str, Any]:
    """Run what the quick tests compare."""
    found = both(QUICK)
    found["empty"] = empty_parts()
    pair = distributed.new_group([0, 1])
    cases = {case.__name__: case(pair) for case in CASES} if distributed.get_rank() < 2 else {}
    return found | {"cases": cases, "rounded": rounded(pair) if cases else {}}


def both(names: Iterable[str]) -> dict[str, Found]:
    return {
        "in turn": compared(names, 2, summaries=False),
        "summaries": compared(names, 3, summaries=True),
    }


def other_families() -> dict[str, Found]:
    return both(SOME)


def an_empty_part(group: Any) -> Errors:
    model = larger(built("hybrid_small"))
    return Example(model, (0, 9), marks=False).compare(sequence_parallel(model, group))


def empty_parts() -> Found:
    """Run parts without tokens at the ends and in the middle, with resets and without."""
    model = larger(seqblocks.build_text(SHORT_CACHE, dtype="float64", device="cpu", seed=0))
    found = {}
    for shares in EMPTY:
        for way in (False, True):
            parallel = sequence_parallel(model, summaries=way)
            found[f"{shares} {way}"] = Example(model, shares, marks=way).compare(parallel)
    return found


def micro_batches(group: Any) -> Errors:
    """Run all forward passes first, so that the ranks work on different micro-batches at the same time."""
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
    """Recompute steps: they must not communicate a second time."""
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
    """Run without gradients; the sequences are packed into one row."""
    model = larger(built("mamba_130m"))
    parallel = sequence_parallel(model, group)
    tokens, bounds = torch.arange(20).unsqueeze(0) % 11, torch.tensor([0, 3, 10, 20])
    with torch.no_grad():
        y = parallel(parallel.part(tokens), cu_seqlens=bounds)
        for wrong, why in (([0, 3, 21], "ends with 21, not 20"), ([0, 10], "ends with 10, not 20")):
            with pytest.raises(seqblocks.RunError, match=why):
                parallel(parallel.part(tokens), cu_seqlens=torch.tensor(wrong))
        return {"output": relative(y, parallel.part(model(tokens, cu_seqlens=bounds)))}


def frozen(group: Any) -> Errors:
    """A model without trainable parameters returns no gradients."""
    model = larger(built("hybrid_small")).requires_grad_(False)
    parallel = sequence_parallel(model, group)
    tokens = torch.arange(20).unsqueeze(0) % 11
    return {"output": relative(parallel(parallel.part(tokens)), parallel.part(model(tokens)))}


def inputs_of_a_frozen_model(group: Any) -> Errors:
    """Gradients of the inputs include those through later ranks: a trained encoder may be before the model."""
    tokens = torch.arange(20).unsqueeze(0) % 11
    errors: Errors = {}
    for name in ("captioner", "turned"):
        model = larger(built(name)).requires_grad_(False)
        inputs = {key: x.detach() for key, x in random_context(model, 1, 0, 20).items()}
        x = tokens if inputs else random_input(model, 1, 20, 0).detach()
        leaves = [leaf.requires_grad_() for leaf in (*inputs.values(), x) if leaf.is_floating_point()]
        expected = torch.autograd.grad(model(x, **inputs).square().mean(), leaves)
        for summaries in (False, True):
            parallel = sequence_parallel(model, group, summaries=summaries)
            parallel.mean(parallel(parallel.part(x), **inputs).square()).backward()
            for leaf, gradient in zip(leaves, expected, strict=True):
                distributed.all_reduce(leaf.grad, group=group)  # the sum of all ranks, as for parameters
                errors[f"{name} {summaries}"] = relative(leaf.grad, gradient)
                leaf.grad = None
    return errors


def distributed_data_parallel(group: Any) -> Errors:
    """DDP over the same ranks divides the sum of gradients by their number."""
    model = larger(built("hybrid_small"))
    tokens = torch.arange(40).reshape(2, 20) % 11
    whole = cross_entropy(model(tokens).mT, tokens.flip(1))
    expected = torch.autograd.grad(whole, list(model.parameters()))
    parallel = sequence_parallel(DistributedDataParallel(model, process_group=group), group)
    losses = cross_entropy(parallel(parallel.part(tokens)).mT, parallel.part(tokens.flip(1)), reduction="none")
    (parallel.mean(losses) * parallel.size).backward()
    return {"gradient": max(relative(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))}


def sharded(group: Any) -> Errors:
    """Shard parameters over the same ranks, with recomputed layers: FSDP2 averages gradients."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = larger(built("hybrid_small"))
    tokens = torch.arange(40).reshape(2, 20) % 11
    expected = torch.autograd.grad(cross_entropy(model(tokens).mT, tokens), list(model.parameters()))
    shard(model, mesh, checkpointing=True)
    errors: Errors = {}
    for summaries in (False, True):
        model.zero_grad()
        parallel = sequence_parallel(model, mesh, summaries=summaries)
        losses = cross_entropy(parallel(parallel.part(tokens)).mT, parallel.part(tokens), reduction="none")
        (parallel.mean(losses) * parallel.size).backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        errors[str(summaries)] = max(relative(g, e) for g, e in zip(gradients, expected, strict=True))
    return errors


def weighted(group: Any) -> Errors:
    """Distribute ignored targets unevenly over the ranks."""
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


def keys_of_another_rate(group: Any) -> Errors:
    """Attend to fewer keys than queries, and to more: a rank receives as many keys as the earlier tokens have."""
    lines = "{from: input, features: 8}", "{from: merged, features: 8}"
    errors: Errors = {}
    for few_keys, (query, key) in enumerate((lines[::-1], lines)):
        steps = f"""
    - downsample: {{factor: 4, method: mean, as: merged}}
    - linear: {query[:-1]}, as: q}}
    - linear: {key[:-1]}, as: k}}
    - linear: {key[:-1]}, as: v}}
    - attention: {{q: q, k: k, v: v, heads: 2, cache: 2}}
"""
        text = f"seqblocks: 1\nmodel:\n  input: {{features: 8}}\n  steps:{steps}"
        model = larger(seqblocks.build_text(text, dtype="float64", device="cpu", seed=0))
        for summaries in (False, True):
            found = Example(model, (2, 4)).compare(sequence_parallel(model, group, summaries=summaries))
            errors |= {f"{few_keys} {summaries} {name}": value for name, value in found.items()}
    return errors


def positions_after_a_grid(group: Any) -> Errors:
    """A part of an image's tokens has fewer of them than there are positions."""
    steps = "[{downsample: {factor: 2, method: mean}}, position_embed, {causal_conv: {kernel: 2}}]"
    text = f"seqblocks: 1\nmodel:\n  input: {{features: 8, grid: [3, 4]}}\n  steps: {steps}\n"
    model = larger(seqblocks.build_text(text, dtype="float64", device="cpu", seed=0))
    return Example(model, (2, 4)).compare(sequence_parallel(model, group))


CASES = (
    an_empty_part, micro_batches, checkpointed_layers, evaluation, frozen, inputs_of_a_frozen_model,
    distributed_data_parallel, sharded, weighted, keys_of_another_rate, positions_after_a_grid,
)  # fmt: skip


def others() -> dict[str, Found]:
    return {
        "all, in turn": compared(SMALL, 3, summaries=False),
        "all, summaries": compared(SMALL, 2, summaries=True),
    }


def composed() -> dict[int, tuple[Errors, str]]:
    """Run random specs that can be split, by seed."""
    found: dict[int, tuple[Errors, str]] = {}
    warnings.simplefilter("ignore", seqblocks.SpecWarning)
    for seed in range(20_000, 20_000 + COMPOSED):
        text = compose(seed)
        try:
            model = seqblocks.build_text(text, dtype="float64", seed=seed).eval()
            parallel = sequence_parallel(model, summaries=seed % 2 == 0)
        except (seqblocks.SpecError, seqblocks.RunError):
            continue
        length = model.spec.input.length
        if isinstance(length, int) and length // model.frame_size < 4:
            continue
        shares = (2, 1, length // model.frame_size - 3) if isinstance(length, int) else (2, 3, 1)
        judge.moderate(model, seed)
        print(seed, text)  # reported if a rank fails
        found[seed] = Example(model, shares, seed).compare(parallel), text
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return the result of a function above on three ranks. The ranks are started once per function."""
    found: dict[str, list[Any] | str] = {}

    def run(name: str) -> list[Any]:
        if name not in found:
            found[name] = f"{name} failed before"
            found[name] = once(
                tmp_path_factory, f"sequence_parallel_{name}", lambda folder: run_ranks(__name__, name, folder, 3)
            )
        known = found[name]
        return pytest.fail(known) if isinstance(known, str) else known

    return run


def assert_close(found: list[dict[str, Found]], how: str, name: str) -> None:
    ranks = [errors[how][name] for errors in found if errors[how]]
    assert len(ranks) >= 2
    for errors in ranks:
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in turn", "summaries"])
@pytest.mark.parametrize("name", QUICK)
def test_parts_make_the_whole(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("families"), how, name)


@pytest.mark.long
@pytest.mark.parametrize("how", ["in turn", "summaries"])
@pytest.mark.parametrize("name", SOME)
def test_parts_of_other_families(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("other_families"), how, name)


@pytest.mark.slow
@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("shares", EMPTY)
def test_parts_without_tokens(shares: tuple[int, ...], way: bool, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("families"), "empty", f"{shares} {way}")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cases(case: Callable[..., Errors], results: Callable[[str], list[Any]]) -> None:
    for found in results("families")[:2]:
        errors = found["cases"][case.__name__]
        assert errors
        tolerance = 1e-6 if case is sharded else 1e-12  # FSDP2 adds gradients in float32
        assert max(errors.values()) <= tolerance, errors


@pytest.mark.slow
def test_rounding_errors_are_those_of_the_whole(results: Callable[[str], list[Any]]) -> None:
    """In float32 and bfloat16, parts have about the same error as the whole sequence, although they round differently.
    """
    for found in results("families")[:2]:
        for name, (parts, whole) in found["rounded"].items():
            assert 0 < parts <= 4 * whole, (name, parts, whole)


@pytest.mark.long
def test_composed_specs(results: Callable[[str], list[Any]]) -> None:
    for found in results("composed"):
        assert len(found) >= COMPOSED // 4
        for seed, (errors, text) in found.items():
            assert max(errors.values()) <= 1e-11, (seed, errors, text)


@pytest.mark.long
@pytest.mark.parametrize("how", ["all, in turn", "all, summaries"])
@pytest.mark.parametrize("name", SMALL)
def test_parts_of_all_models(name: str, how: str, results: Callable[[str], list[Any]]) -> None:
    assert_close(results("others"), how, name)


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def spec(*steps: str) -> SequenceModel:
    lines = "".join(f"\n    - {step}" for step in steps)
    return seqblocks.build_text(f"seqblocks: 1\nmodel:\n  input: {{features: 4}}\n  steps:{lines}\n")


CANNOT = [
    ("conv1d: {features: 4, kernel: 3, causal: false}", "it reads later tokens"),
    ("pool: {mode: mean}", "mode mean reads the whole sequence"),
    ("attention: {heads: 1, q: h, k: h, v: h, causal: false}", "it is not causal"),
]


@pytest.mark.parametrize(("step", "why"), CANNOT)
def test_steps_that_read_the_whole_sequence(step: str, why: str, alone: None) -> None:
    with pytest.raises(seqblocks.RunError, match=rf"cannot run on a part of a sequence: {why}") as caught:
        sequence_parallel(spec("linear: {features: 4, as: h}", step))
    assert step.partition(":")[0] in str(caught.value)


@pytest.mark.parametrize("inside", ["{}", "residual: [{{{}}}]"])
def test_chosen_tokens_are_refused(inside: str, alone: None) -> None:
    choose = inside.format("choose: {by: r, above: 0, steps: [{linear: 4}, {calc: r * x}]}")
    with pytest.raises(seqblocks.RunError, match=r"choose \(.*:6:\d+\) chooses tokens .* ranks have unequal numbers"):
        sequence_parallel(spec("aside: [{linear: {features: 1, as: r}}]", choose))


def test_what_is_not_a_group_or_a_model() -> None:
    with pytest.raises(seqblocks.UsageError, match="init_process_group"):
        sequence_parallel(spec("linear: 4"))


def test_misuse(alone: None) -> None:
    model = spec("linear: 4", "residual: {drop_path: 0.1, steps: [{linear: 4}]}", "downsample: 2")
    with pytest.raises(seqblocks.UsageError, match=r"from seqblocks\.build, not Linear"):
        sequence_parallel(torch.nn.Linear(4, 4))
    mesh = distributed.init_device_mesh("cpu", (1, 1))
    with pytest.raises(seqblocks.UsageError, match="the mesh has 2 dimensions, but"):
        sequence_parallel(model, mesh)
    parallel = sequence_parallel(model)
    with pytest.raises(seqblocks.RunError, match=r"residual \(.*drops whole samples at random"):
        parallel(torch.ones(1, 4, 4))
    model.eval()
    model.residual.train()
    with pytest.raises(seqblocks.RunError, match=r"residual \(.*drops whole samples at random"):
        parallel(torch.ones(1, 4, 4))
    model.train()
    model.residual.eval()
    assert parallel(torch.ones(1, 4, 4)).shape == (1, 2, 4)
    with pytest.raises(seqblocks.RunError, match="whole frames of 2 tokens, not 3"):
        parallel(torch.ones(1, 3, 4))
    with pytest.raises(seqblocks.RunError, match=r"the model reads \[batch, seq, 4\]"):
        parallel(torch.ones(1, 4, 5))
    assert parallel(torch.ones(1, 4, 4)).shape == (1, 2, 4)
    with pytest.raises(seqblocks.RunError, match="cu_seqlens is a tensor, not list"):
        sequence_parallel(spec("causal_conv"))(torch.ones(1, 5, 4), cu_seqlens=[0, 2, 5])


BOUNDS = [
    [0, 2, 6], [0, 2, 4], [0, 4, 2, 5], [0, -3], [-1, 5], [1, 5], [0], [], [[0, 5]], 5, [0.0, 5.0], [False, True],
]  # fmt: skip


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_bounds_are_checked_as_without_ranks(bounds: Any, alone: None) -> None:
    model, x, given = spec("causal_conv"), torch.ones(1, 5, 4), torch.tensor(bounds)
    with pytest.raises(seqblocks.RunError) as expected:
        model(x, cu_seqlens=given)
    with pytest.raises(seqblocks.RunError) as found:
        sequence_parallel(model)(x, cu_seqlens=given)
    assert str(found.value) == str(expected.value)


def test_a_mean_in_16_bits_is_taken_in_float32(alone: None) -> None:
    parallel = sequence_parallel(spec("linear: 4"))
    losses = torch.full((1, 70_000), 11.0, dtype=torch.float16, requires_grad=True)
    mean = parallel.mean(losses)
    assert mean == losses.mean() == 11
    assert mean.dtype == torch.float16


def test_parts_of_a_model_are_not_whole_models(alone: None, tmp_path: Path) -> None:
    whole = spec("swiglu: {hidden: 4}")
    part = tensor_parallel(whole)
    assert clip_gradients(part, 1.0) == 0, "there should be no gradients"
    with pytest.raises(seqblocks.UsageError, match=r"split over several ranks: save it, and export"):
        seqblocks.export.pt2(part, tmp_path / "m.pt2")
    with pytest.raises(seqblocks.UsageError, match=r"cannot be pickled: save it by `seqblocks\.save`"):
        pickle.dumps(part)
    stage = pipeline_stage(whole, 0, 1)
    with pytest.raises(seqblocks.UsageError, match="or a rank's part of one, not Stage"):
        clip_gradients(stage, 1.0)


def test_parts_of_a_model_can_be_copied(alone: None) -> None:
    """The copy, such as one for averaged weights, communicates with the same ranks, and has its own weights."""
    part, x = tensor_parallel(spec("swiglu: {hidden: 4}")), torch.randn(1, 3, 4)
    other = copy.deepcopy(part)
    assert torch.equal(other(x), part(x))
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert not torch.equal(other(x), part(x))


def test_a_replaced_step_carries_no_state(alone: None) -> None:
    model = spec("linear: 4", "causal_conv: {kernel: 3}")
    model.causal_conv = torch.nn.Identity()
    with pytest.raises(seqblocks.RunError, match="the Identity that replaces it carries no state"):
        sequence_parallel(model)(torch.ones(1, 4, 4))


def test_one_rank_alone(alone: None) -> None:
    model = spec("linear: 4", "causal_conv: {kernel: 3}")
    parallel = sequence_parallel(model)
    x = torch.randn(2, 5, 4)
    y = parallel(parallel.part(x))
    assert torch.equal(y, model(x))
    parallel.mean(y).backward()
    gradient = model.linear.weight.grad.clone()
    parallel.sum_gradients()
    assert torch.equal(model.linear.weight.grad, gradient)
    assert parallel.rank == 0
    assert parallel.size == 1
