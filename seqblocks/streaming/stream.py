"""A stream that manages its own state, for servers and agents."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from seqblocks.errors import UnavailableError
from seqblocks.state import States, index_select
from seqblocks.streaming.cuda_graph import RECORDERS, CapturedStep, Recorder, overwrite


class Streams(Protocol):
    """The interface of a model that a stream uses."""

    def __call__(
        self, x: Tensor, *, state: States | None, return_state: bool, resets: Tensor | None = None, **others: Any
    ) -> tuple[Any, States]: ...

    def step(
        self, x: Tensor, state: States | None = None, *, resets: Tensor | None = None, **others: Any
    ) -> tuple[Any, States]: ...

    def _get_name(self) -> str: ...  # torch's


class Stream:
    """Run a model over `batch_size` sequences as their tokens arrive, without gradients.

    `state` is the current state: it can be read, saved, and replaced by one for the same number of sequences. It is a
    value: no later step changes it. Outputs and states are inference tensors, which cannot be used with autograd.
    """

    def __init__(self, model: Streams, state: States) -> None:
        self._model, self._state = model, state
        self._record: Recorder | None = None  # records the steps, if they are captured
        self._captured: dict[bool, CapturedStep] = {}  # by whether the step takes resets; all write to `_state`

    def __repr__(self) -> str:
        tensors = [x for x in tree_leaves(self._state) if isinstance(x, Tensor)]
        size = sum(x.numel() * x.element_size() for x in tensors)
        sequences = f"{tensors[0].shape[0]} sequences, " if tensors else ""
        place = f" on {tensors[0].device}" if tensors else ""
        return f"<Stream of {self._model._get_name()}: {sequences}{size:,} bytes of state{place}>"

    @property
    def state(self) -> States:
        return tree_map(torch.clone, self._state) if self._captured else self._state

    @state.setter
    @torch.inference_mode()
    def state(self, state: States) -> None:
        if self._captured:
            overwrite(self._state, state)
        else:
            self._state = state

    @torch.inference_mode()
    def step(self, x: Tensor, *, resets: Tensor | None = None, **others: Any) -> Any:
        """Return the output for one token of each sequence; arguments as in `model.step`."""
        if others:  # the model reports them
            return self._model.step(x, self._state, **others)
        if self._record:
            return self._step_captured(x, resets, self._record)
        y, self._state = self._model.step(x, self._state, resets=resets)
        return y

    def _step_captured(self, x: Tensor, resets: Tensor | None, record: Recorder) -> Any:
        marked = resets is not None
        if marked not in self._captured or not self._captured[marked].fits(x, resets):
            if not self._captured:
                self._state = tree_map(torch.clone, self._state)  # the caller may still use the state that was set
            self._captured[marked] = CapturedStep(self._model.step, self._state, x, resets, record)
        return self._captured[marked].run(x, resets)

    @torch.inference_mode()
    def read(self, x: Tensor, *, resets: Tensor | None = None, **others: Any) -> Any:
        """Return the output for several tokens of each sequence, such as a prompt; arguments as in the model's call."""
        y, self.state = self._model(x, state=self._state, return_state=True, resets=resets, **others)
        return y

    @torch.inference_mode()
    def select(self, index: Tensor) -> None:
        """Continue with the sequences `index` [n], in that order; duplicates are allowed. Raises RunError."""
        selected = index_select(self._state, index)
        if self._captured and all(map(_same_shape, tree_leaves(self._state), tree_leaves(selected))):
            overwrite(self._state, selected)
            return
        self._state = selected
        self._captured.clear()

    def capture(self) -> None:
        """Run `step` as a CUDA graph from the next token on: one launch instead of hundreds.

        The graph is recorded at the first token, again after a `select` that changes the number of sequences, and
        separately for `resets`. It reads the parameters at their current addresses: modify them in place, or capture
        again. Raises UnavailableError if the model is not on a CUDA device; a step that cannot be captured raises
        RunError at the first token.
        """
        kind = next(iter(tree_leaves(self._state)), torch.empty(0)).device.type
        if kind not in RECORDERS:
            raise UnavailableError(f"capture needs a CUDA device, but this stream is on {kind}")
        self._record = RECORDERS[kind]
        self._captured.clear()


def _same_shape(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape
