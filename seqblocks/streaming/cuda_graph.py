"""Capture one token of a stream as a CUDA graph: a single launch instead of one per kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from seqblocks.errors import RunError
from seqblocks.state import States

Step = Callable[..., tuple[Any, States]]
Recorder = Callable[[Callable[[], None], torch.device], Callable[[], None]]
WARM_UPS = 3  # kernels are compiled and checked, and libraries reserve memory, before anything is recorded


class CapturedStep:
    """Run one step on fixed memory, so that its kernel launches can be recorded once and replayed as a whole.

    `state` is overwritten at each run; other captured steps may share it.
    """

    def __init__(self, step: Step, state: States, x: Tensor, resets: Tensor | None, record: Recorder) -> None:
        self._step, self.state = step, state
        self._x, self._resets = x.clone(), None if resets is None else resets.clone()
        self._y: Any = None
        before = tree_map(torch.clone, state)
        try:
            self._replay = record(self._compute, x.device)
        finally:
            overwrite(state, before)

    def _compute(self) -> None:
        self._y, state = self._step(self._x, self.state, resets=self._resets)
        overwrite(self.state, state)

    def fits(self, x: Tensor, resets: Tensor | None) -> bool:
        """Return whether the step was recorded for inputs of this shape, dtype and device."""
        return all(_is_like(*each) for each in ((x, self._x), (resets, self._resets)))

    def run(self, x: Tensor, resets: Tensor | None) -> Any:
        """Return the output for one token of each sequence."""
        self._x.copy_(x)
        if self._resets is not None and resets is not None:
            self._resets.copy_(resets)
        self._replay()
        return tree_map(torch.clone, self._y)


def _is_like(x: Tensor | None, recorded: Tensor | None) -> bool:
    if x is None or recorded is None:
        return x is recorded
    return x.shape == recorded.shape and x.dtype == recorded.dtype and x.device == recorded.device


def overwrite(state: States, by: States) -> None:
    """Copy one state into another in place. Raises RunError if their shapes differ."""
    old, new = dict(_by_path(state)), dict(_by_path(by))
    if {path: x.shape for path, x in old.items()} != {path: x.shape for path, x in new.items()}:
        raise RunError("the shapes of the state differ from those with which the stream was captured")
    for path, target in old.items():
        target.copy_(new[path])


def _by_path(state: States, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of a state with their paths: dicts of equal states may differ in order."""
    for key, item in state.items():
        if isinstance(item, dict):
            yield from _by_path(item, (*path, key))
        else:
            yield (*path, key), item


def cuda_graph(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record the kernel launches of a function on a device, and return a function that replays them."""
    with torch.cuda.device(device):  # Launches on any other than the current device are not recorded.
        return _cuda_graph(function)


def _cuda_graph(function: Callable[[], None]) -> Callable[[], None]:
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    try:
        # A call in another thread that cannot be captured, such as an allocation, does not end this capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"a step of this model cannot be captured in a CUDA graph: {reason}") from error
    return graph.replay


RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}  # by type of device
