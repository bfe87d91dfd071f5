"""Kernels whose fast implementation is torch's, on a device: attention with caps, biases and sinks, recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    LAYOUTS,
    Precision,
    Subject,
    assert_close,
    cases,
    check,
    in_pieces,
    reset_marks,
    with_gradients,
)
from tests.kernels.families import KERNELS

ON_DEVICE = [kernel for kernel in KERNELS if "device" in kernel.implementations]
SEQUENTIAL = [kernel for kernel in ON_DEVICE if kernel.states]


def test_every_kernel_runs_on_a_device() -> None:
    """Each has cases of Triton's kernels, or of torch's."""
    assert all({"gpu", "device"} & {*kernel.implementations} for kernel in KERNELS)
    assert IMPLEMENTATIONS["device"].device == "cuda"


@cases(
    ON_DEVICE, ["device"], shape=lambda kernel, on: kernel.shapes, precision=lambda kernel, on: on.precisions,
    layout=lambda kernel, on: LAYOUTS, resets=lambda kernel, on: [False, True] if kernel.resets else [False],
)
def test_agrees_with_the_definition(
    subject: Subject, shape: dict[str, int], precision: Precision, layout: str, resets: bool
) -> None:
    """Outputs, last states and every gradient, against the reference in float64 on the CPU."""
    inputs = subject.inputs(**shape)
    batch, length = inputs[subject.kernel.sequences[0]].shape[:2]
    marks = reset_marks(batch, length, max(5, length // 3)) if resets else None
    check(subject, inputs, precision=precision, layout=layout, resets=marks)


@cases(SEQUENTIAL, ["device"], cuts=((1, 2, 6), range(1, 8)))
def test_whole_is_chunks_is_steps(subject: Subject, cuts: Any) -> None:
    x = subject.exact(S=8)
    marks = reset_marks(2, 8) if subject.kernel.resets else None
    whole = with_gradients(subject(x, resets=marks), x)
    bar = subject.kernel.exactness(subject.on, subject.on.exact, 8)
    assert_close(with_gradients(in_pieces(subject, x, cuts, resets=marks), x), whole, bar, smallest=1.0)


class HostRefused(TorchDispatchMode):
    """Refuse operations that a CUDA graph cannot record: those that read a value on the host, or write one from it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        assert not any(word in name for word in ("_local_scalar", "nonzero", "lift_fresh", "masked_select")), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("wrong", [torch.Tensor.item, torch.nonzero, lambda x: x + torch.tensor(1.0)])
def test_what_a_graph_cannot_record_is_refused(wrong: Any) -> None:
    with pytest.raises(AssertionError), HostRefused():
        wrong(torch.ones(1))


@cases(SEQUENTIAL, ["torch"], variants=("torch",))
def test_a_step_needs_no_value_on_the_host(subject: Subject) -> None:
    x = {name: t.detach() for name, t in subject.exact(S=1).items()}
    with torch.no_grad(), HostRefused():
        subject(x)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", SEQUENTIAL, ids=lambda kernel: kernel.name)
def test_a_step_in_a_graph(kernel: Any) -> None:
    """`generate` records a token's step."""
    subject = Subject(kernel, next(iter(kernel.variants)), IMPLEMENTATIONS["device"])
    x = {name: t.detach() for name, t in subject.exact(S=1).items()}
    with torch.no_grad():
        expected = subject(x)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            subject(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = subject(x)
    captured["out"].zero_()
    graph.replay()
    assert_close(captured, expected, kernel.exactness(subject.on, torch.float32, 1))
