"""Tensor parallelism of random specs: outputs, gradients and streams of the ranks' parts equal those of the whole
model.

The ranks are threads of this process and communicate through a list; test_distributed.py uses processes. The tolerance
is 1e-9 of the largest value in float64, for some hundreds of operations.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import seqblocks
from seqblocks.distributed import tensor
from seqblocks.distributed.plan import Plan, tensor_plan
from seqblocks.model import sequence_model as runtime
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.shards import TensorShards
from seqblocks.testing import _by_name, random_context, random_input
from tests.compose import compose
from tests.torch import judge
from tests.torch.sequence_ranks import larger, relative

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.errors.SpecWarning")  # a random spec may produce warnings

FRAMES = 5
WAIT = 60  # seconds, after which a rank that waits for a failed one is stopped
GENERAL = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
CASES = {"seed": st.integers(0, 2**32), "ranks": st.sampled_from([2, 2, 2, 3, 4])}  # three quarters cannot be split


class Threads:
    """Run ranks as threads. Each runs a function with its rank, and `gathered` returns the values passed by all ranks.
    """

    def __init__(self) -> None:
        self.own = threading.local()

    def run(self, ranks: int, work: Callable[[int], Any]) -> list[Any]:
        """Return the results of the ranks. Raise the error of one, except of those that only waited for another."""
        self.barrier, self.slots = threading.Barrier(ranks, timeout=WAIT), [None] * ranks
        found: list[Any] = [None] * ranks
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            self.own.rank = rank
            try:
                found[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return found

    def gathered(self, x: Tensor) -> list[Tensor]:
        self.slots[self.own.rank] = x.contiguous()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    made = Threads()
    group = SimpleNamespace(get_world_size=lambda group: len(made.slots), get_rank=lambda group: made.own.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "dist", group)
        patch.setattr(runtime, "check_inputs", lambda group, inputs: None)  # it needs processes
        patch.setattr(tensor, "_added", lambda x, group: torch.stack(made.gathered(x)).sum(0))
        patch.setattr(tensor, "_joined", lambda x, group, axis: torch.cat(made.gathered(x), axis))
        yield made


def part_of(model: SequenceModel, plan: Plan, rank: int) -> SequenceModel:
    """Return the result of `tensor_parallel` on a rank."""
    with torch.device("meta"):
        local = SequenceModel(plan.part)
    local.tensor_shards = TensorShards(None, rank, plan.ranks, plan.shardings, plan.whole)
    tensor._exchange(local, plan)
    tensor._take_weights(local, model)
    return local.train(model.training)


class Example:
    """An input of a model, and the results to compare: outputs, gradients, and the outputs of a stream."""

    def __init__(self, model: SequenceModel, seed: int) -> None:
        length = model.spec.input.length
        length = length if isinstance(length, int) else FRAMES * model.frame_size
        self.x = random_input(model, 2, length, seed).detach()
        self.context = {name: x.detach() for name, x in random_context(model, 2, seed, length).items()}
        self.resets: Tensor | None = None
        if model.resets_obstacle is None and seed % 2:
            self.resets = torch.zeros(2, length, dtype=torch.bool)
            self.resets[1, length // 2] = True

    def outputs(self, model: SequenceModel) -> dict[str, Tensor]:
        """Run the model forward and backward."""
        found = _by_name(model(self.x, resets=self.resets, **self.context))
        generator = torch.Generator().manual_seed(1)
        losses = [
            (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
            for y in found.values() if y.requires_grad
        ]  # fmt: skip
        if losses:
            torch.stack(losses).sum().backward()
        return {name: y.detach().double() for name, y in found.items()}

    @torch.no_grad()
    def stream(self, model: SequenceModel) -> dict[str, Tensor]:
        """Run the model frame by frame, and return the outputs by name and time."""
        state, found, frame = model.init_state(2, None, None, **self.context), {}, model.frame_size
        for at in range(0, self.x.shape[1], frame):
            frames = self.x[:, at : at + frame] if model.takes_frames else self.x[:, at]
            y, state = model.step(frames, state)
            found |= {f"{name} {at}": each.double() for name, each in _by_name(y).items()}
        return found


def check(model: SequenceModel, plan: Plan, example: Example, threads: Threads) -> None:
    """Compare a model with its parts on the ranks."""
    model.zero_grad()
    expected = example.outputs(model)
    if model.streaming_obstacle is None:
        expected |= example.stream(model)
    largest = max([1.0, *(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)])

    def work(rank: int) -> tuple[dict[str, Tensor], float]:
        local = part_of(model, plan, rank)
        found = example.outputs(local)
        if model.streaming_obstacle is None:
            found |= example.stream(local)
        return found, _gradient_error(local, model) / largest

    for found, error in threads.run(plan.ranks, work):
        assert found.keys() == expected.keys()
        assert max(relative(found[name], y) for name, y in expected.items()) <= 1e-9
        assert error <= 1e-9


def _gradient_error(local: SequenceModel, model: SequenceModel) -> float:
    assert local.tensor_shards
    worst = 0.0
    for name, parameter in local.named_parameters():
        whole = model.get_parameter(name).grad
        assert (parameter.grad is None) == (whole is None), name
        if parameter.grad is not None and whole is not None:
            worst = max(worst, (parameter.grad - local.tensor_shards.take(name, whole)).abs().max().item())
    return worst


def holds(seed: int, ranks: int, threads: Threads) -> None:
    text = compose(seed)
    note(text)
    try:
        model = larger(seqblocks.build_text(text, dtype="float64", seed=seed))
        plan = tensor_plan(model.spec, ranks)
    except (seqblocks.SpecError, seqblocks.UsageError):  # the spec is invalid, or nothing can be split
        return
    note(str(plan))
    judge.moderate(model, seed)
    try:
        check(model, plan, Example(model, seed), threads)
    except seqblocks.RunError as error:
        if not re.search(r"is past the \d+ of position_embed|its cache has room for", str(error)):
            raise


# Running statistics, formulas that a scan computes, and states of several sequences, beside steps that are split.
NORM = """
  input: {image: {size: 6, channels: 2}}
  steps: [{patch_embed: {patch: 3, features: 4}}, batch_norm, {swiglu: 8}]
"""
FORMULAS = """
  input: {features: 4}
  steps:
    - cell:
        state: {a: {features: 4, start: 0.5, learned: true}, b: 4}
        steps:
          - linear: {features: 4, name: first, as: x1}
          - calc: {a: sigmoid(x1) * a + 0.3 * b, b: sigmoid(x1) * b + 0.3 * a, both: x1 + b}
          - multiply: {by: b}
          - linear: {features: 4, name: last}
    - swiglu: 8
"""
EACH = """
  input: {features: 12}
  steps:
    - each:
        axis: features
        size: 4
        steps:
          - linear: {features: 24, as: [q, k, v], name: qkv}
          - attention: {q: q, k: k, v: v, heads: 2}
          - linear: 4
"""


@pytest.mark.parametrize("text", [NORM, FORMULAS, EACH], ids=["statistics", "formulas", "states of each"])
def test_steps_that_composed_specs_rarely_have(text: str, threads: Threads) -> None:
    model = larger(seqblocks.build_text(f"seqblocks: 1\nmodel:{text}", dtype="float64", seed=0))
    for buffer in model.buffers():
        buffer.add_(2)
    check(model, tensor_plan(model.spec, 2), Example(model, 1), threads)


@settings(GENERAL, max_examples=36)
@given(**CASES)
def test_parts_make_the_whole(seed: int, ranks: int, threads: Threads) -> None:
    holds(seed, ranks, threads)


@pytest.mark.long
@settings(GENERAL, max_examples=1500)
@given(**CASES)
def test_parts_of_many_specs_make_the_whole(seed: int, ranks: int, threads: Threads) -> None:
    holds(seed, ranks, threads)
