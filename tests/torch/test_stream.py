"""`model.stream`: a state of its own, and a step that is launched as a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import seqblocks

pytest.importorskip("pydantic", reason="builds models, which need pydantic; the machine of a GPU may lack it")
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.streaming import cuda_graph

TOKENS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))
NAMES = ("mlstm_small", "mamba_small", "hybrid_small")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return seqblocks.build(request.param, seed=0).eval()


def record(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Simulate on a CPU what a CUDA graph does to memory: the function runs before it is recorded, and at each launch.
    """
    for _ in range(2):
        function()
    return function


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_graph.RECORDERS, "cpu", record)


def test_a_graph_is_recorded_on_the_device_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on any other than the current device run at once, and a replay would not repeat them."""
    current, calls, modes = [torch.device("cuda", 0)], [], set()

    @contextlib.contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def note(*args: Any, **options: Any) -> Any:
        calls.append(current[-1].index)
        modes.update(options.values())
        return mock.MagicMock()

    monkeypatch.setattr(torch.cuda, "device", switched)
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, note)
    cuda_graph.cuda_graph(note, torch.device("cuda", 1))  # type: ignore[arg-type]
    assert len(calls) > 6
    assert {*calls} == {1}
    assert len(current) == 1
    assert modes == {"thread_local"}  # calls in other threads do not end the capture


def by_hand(model: SequenceModel, tokens: Tensor, resets: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(tokens, resets=resets)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare steps with the whole: they differ by rounding in float32, because chunks add in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_captured_stream_is_the_whole(model: SequenceModel, recorded: None) -> None:
    stream = model.stream(3)
    stream.read(TOKENS[:, :4])
    stream.capture()
    ys = [stream.step(TOKENS[:, t]) for t in range(4, 12)]
    assert_close(torch.stack(ys, 1), by_hand(model, TOKENS)[:, 4:])


def test_it_equals_an_ordinary_stream_bit_for_bit(model: SequenceModel, recorded: None) -> None:
    plain, stream = model.stream(3), model.stream(3)
    stream.capture()
    marks = torch.zeros(3, dtype=torch.bool)
    marks[1] = True
    for t, resets in enumerate((None, None, marks, None, marks, ~marks)):
        assert torch.equal(stream.step(TOKENS[:, t], resets=resets), plain.step(TOKENS[:, t], resets=resets))
    assert torch.equal(stream.read(TOKENS[:, 6:9]), plain.read(TOKENS[:, 6:9]))
    assert torch.equal(stream.step(TOKENS[:, 9]), plain.step(TOKENS[:, 9]))
    for each in (plain, stream):
        each.select(torch.tensor([2, 0]))
    assert torch.equal(stream.step(TOKENS[:2, 10]), plain.step(TOKENS[:2, 10]))


def test_select_records_again_only_for_another_number_of_sequences(
    model: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = []

    def noted(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        recordings.append(device)
        return record(function, device)

    monkeypatch.setitem(cuda_graph.RECORDERS, "cpu", noted)
    plain, stream = model.stream(3), model.stream(3)
    stream.capture()
    counts = []
    for t, index in enumerate(([2, 0, 0], [1, 1, 2], [0, 2], [1, 0])):  # the first two as in beam search
        tokens = TOKENS[: 3 if t < 3 else 2, t]
        assert torch.equal(stream.step(tokens), plain.step(tokens))
        kept = stream.state
        for each in (plain, stream):
            each.select(torch.tensor(index))
        counts.append(len(recordings))
        assert all(x.shape[0] == tokens.shape[0] for x in tree_leaves(kept))
    assert torch.equal(stream.step(TOKENS[:2, 4]), plain.step(TOKENS[:2, 4]))
    assert counts == [1, 1, 1, 2]
    with pytest.raises(seqblocks.RunError, match="no such sequences"):
        stream.select(torch.tensor([0, 2]))
    assert torch.equal(stream.step(TOKENS[:2, 5]), plain.step(TOKENS[:2, 5]))


CONTEXT = """
seqblocks: 1
model:
  inputs: {x: {features: 4}, memory: {features: 4}}
  steps:
    - shift: {by: 3, as: s}
    - linear: {from: memory, features: 4, as: k}
    - cross_attention: {q: s, k: k, v: k, heads: 2}
    - shift: {by: 3}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # with and without a planned step
def test_a_captured_stream_writes_to_its_state_by_name(dtype: torch.dtype, recorded: None) -> None:
    """A call and a planned step order the parts of a state differently. No output is a view of what is overwritten."""
    model, x = seqblocks.build_text(CONTEXT, seed=0, dtype=dtype).eval(), torch.randn(2, 3, 6, 4, dtype=dtype)
    stream = model.stream(3, memory=x[1, :, :3])
    stream.capture()
    ys = [stream.step(x[0, :, t]) for t in range(6)]
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(ys, 1), model(x[0], memory=x[1, :, :3]), rtol=1e-2, atol=1e-2)


def test_its_state_is_a_value(model: SequenceModel, recorded: None) -> None:
    stream = model.stream(3)
    stream.capture()
    stream.step(TOKENS[:, 0])
    kept = stream.state
    first = stream.step(TOKENS[:, 1])
    stream.step(TOKENS[:, 2])
    stream.state = kept
    assert torch.equal(stream.step(TOKENS[:, 1]), first)
    stream.state = kept  # the step above did not change it
    assert torch.equal(stream.step(TOKENS[:, 1]), first)


def test_a_foreign_state_is_refused(recorded: None) -> None:
    model = seqblocks.build("mlstm_small", seed=0).eval()
    stream = model.stream(3)
    stream.capture()
    stream.step(TOKENS[:, 0])
    with pytest.raises(seqblocks.RunError, match="shapes of the state differ"):
        stream.state = model.init_state(2)
    with pytest.raises(seqblocks.RunError, match="holds 3 sequences"):
        stream.step(TOKENS[:2, 1])
    assert_close(stream.step(TOKENS[:, 1]), by_hand(model, TOKENS)[:, 1])  # neither call changed the state


def test_marks_of_other_shapes_are_refused(recorded: None) -> None:
    """They are not broadcast to all sequences."""
    stream = seqblocks.build("mlstm_small", seed=0).eval().stream(3)
    stream.capture()
    stream.step(TOKENS[:, 0], resets=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(seqblocks.RunError, match="resets"):
        stream.step(TOKENS[:, 1], resets=torch.ones(1, dtype=torch.bool))


def test_without_a_cuda_device_it_is_refused(model: SequenceModel) -> None:
    with pytest.raises(seqblocks.UnavailableError, match="but this stream is on cpu"):
        model.stream(1).capture()


@pytest.mark.gpu
def test_a_cuda_graph_gives_what_the_step_gives(model: SequenceModel) -> None:
    model, tokens = model.to("cuda"), TOKENS.to("cuda")
    plain, stream = model.stream(3), model.stream(3)
    stream.capture()
    for t in range(8):
        assert_close(stream.step(tokens[:, t]), plain.step(tokens[:, t]))
