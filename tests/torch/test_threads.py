"""Several threads use one model: each gets the numbers of a single thread, whatever the others do meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from tests.torch.planned import CONVOLUTIONS, EXPERTS, SMALL, SPEC, build

THREADS = 4
SECONDS = 0.5  # each test stops then
CASES = [
    pytest.param(SMALL, id="mixers"), pytest.param(CONVOLUTIONS, id="convolutions", marks=pytest.mark.slow),
    pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Have Python switch between threads 500 times as often as by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(works: list[Callable[[], None]]) -> None:
    """Run functions at the same time, and raise what one of them raises."""
    barrier = threading.Barrier(len(works))

    def begin(work: Callable[[], None]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(begin, work) for work in works]:
            done.result()


def prompts() -> Tensor:
    return torch.randint(0, 11, (THREADS, 2, 6), generator=torch.Generator().manual_seed(8))


@torch.no_grad()
def stepped(model: SequenceModel, x: Tensor) -> Tensor:
    state, outputs = model.init_state(2), []
    for t in range(x.shape[1]):
        y, state = model.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)  # float64


@pytest.mark.parametrize("is_planned", [False, True], ids=["no plan", "a plan"])
@pytest.mark.parametrize("spec", CASES)
def test_threads_that_use_a_model_for_the_first_time(spec: str, is_planned: bool) -> None:
    x, model = prompts(), build(spec)
    expected, end = [stepped(model, row) for row in x], time.monotonic() + SECONDS
    works = [lambda at=at: assert_same(stepped(model, x[at]), expected[at]) for at in range(THREADS)]
    while time.monotonic() < end:
        model.token_plan = None
        if is_planned:
            with torch.no_grad():
                model.step(x[0, :, 0])
        together(works)


@pytest.mark.parametrize("spec", CASES)
def test_streams_of_threads_while_another_thread_loads_the_same_weights(spec: str) -> None:
    """Loading changes the versions of all weights, so that plans are made again all the time."""
    x, model = prompts(), build(spec)
    expected = [stepped(model, row) for row in x]
    tokens = [seqblocks.generate(model, row, 12) for row in x]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    end = time.monotonic() + SECONDS

    def stream(at: int) -> None:
        while time.monotonic() < end:
            assert_same(stepped(model, x[at]), expected[at])
            assert all(map(torch.equal, seqblocks.generate(model, x[at], 12), tokens[at]))

    def load() -> None:
        while time.monotonic() < end:
            model.load_state_dict(weights)
            time.sleep(0.002)

    together([load, *(lambda at=at: stream(at) for at in range(THREADS))])


def test_a_plan_that_a_thread_is_running_is_not_changed() -> None:
    """Neither a new stream nor an optimiser changes what a token under way reads; later tokens use another plan."""
    model, x = build(SPEC), prompts()[0]
    stepped(model, x)
    plan = model.token_plan
    assert plan is not None
    state = model.init_state(2)
    with torch.no_grad():
        expected, _ = plan.run(state, x[:, 0]) or (torch.empty(0), {})
        taps = model.get_parameter("mamba_block.residual.mixer.conv1d.weight")  # prepared for one token
        taps.data.mul_(2.0)
        model.init_state(2)
        found, _ = model.step(x[:, 0], state)
        again, _ = plan.run(state, x[:, 0]) or (torch.empty(0), {})
    assert (found - expected).abs().max() > 1e-6
    assert torch.equal(again, expected)


def test_weights_that_change_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made of old and of new weights must not be used for later tokens."""
    model, x = build(SPEC), prompts()[0]
    state = model.init_state(2)
    conv: Any = model.get_submodule("mamba_block.residual.mixer.conv1d")
    prepare = type(conv.op).prepare_token

    def prepare_as_weights_change(op: object, parameters: dict[str, Tensor]) -> object:
        made = prepare(op, parameters)
        monkeypatch.undo()
        parameters["weight"].mul_(1.5)
        return made

    monkeypatch.setattr(type(conv.op), "prepare_token", prepare_as_weights_change)
    with torch.no_grad():
        model.step(x[:, 0], state)
        found, _ = model.step(x[:, 0], state)
        expected, _ = model(x[:, :1], state=state, return_state=True)
    assert_same(found, expected[:, 0])
