"""A stream that holds its own state: what a server or an agent has one of."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from seqblocks.errors import UnavailableError
from seqblocks.runtime.captured import RECORDERS, CapturedStep, Recorder, overwrite
from seqblocks.state import States, index_select


class Streams(Protocol):
    """What a stream needs of a model."""

    def __call__(
        self, x: Tensor, *, state: States | None, return_state: bool, resets: Tensor | None = None
    ) -> tuple[Any, States]: ...

    def step(self, x: Tensor, state: States | None = None, *, resets: Tensor | None = None) -> tuple[Any, States]: ...


class Stream:
    """Runs a model over `batch_size` sequences as their tokens arrive, without gradients.

    `state` is that of the sequences now: it may be read, saved, and replaced by another of as many sequences. Outputs
    and states are inference tensors, which autograd does not take.
    """

    def __init__(self, model: Streams, state: States) -> None:
        self._model, self._state = model, state
        self._record: Recorder | None = None  # by which steps are captured
        self._captured: dict[bool, CapturedStep] = {}  # by whether it takes resets; all write to `_state`

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
    def step(self, x: Tensor, *, resets: Tensor | None = None) -> Any:
        """Return the output for one token of each sequence; arguments as `model.step`."""
        if self._record:
            return self._step_captured(x, resets, self._record)
        y, self._state = self._model.step(x, self._state, resets=resets)
        return y

    def _step_captured(self, x: Tensor, resets: Tensor | None, record: Recorder) -> Any:
        marked = resets is not None
        if marked not in self._captured or not self._captured[marked].fits(x, resets):
            if not self._captured:
                self._state = tree_map(torch.clone, self._state)  # the caller may hold what it was set to
            self._captured[marked] = CapturedStep(self._model.step, self._state, x, resets, record)
        return self._captured[marked].run(x, resets)

    @torch.inference_mode()
    def read(self, x: Tensor, *, resets: Tensor | None = None) -> Any:
        """Return the output for several tokens of each sequence, such as a prompt; arguments as the model's."""
        y, self.state = self._model(x, state=self._state, return_state=True, resets=resets)
        return y

    @torch.inference_mode()
    def select(self, index: Tensor) -> None:
        """Go on with the sequences `index` [n], in that order; one may be taken several times. Raises RunError."""
        selected = index_select(self._state, index)
        self._captured.clear()
        self._state = selected

    def capture(self) -> None:
        """Have `step` launched as a CUDA graph from the next token on: one launch in place of hundreds.

        The graph is recorded at the first token, anew after `select`, and for `resets` by itself. It reads the
        parameters where they are now: change them in place, or capture again. Raises UnavailableError where the model
        is on no CUDA device; a step that cannot be recorded raises RunError at the first token.
        """
        kind = next(iter(tree_leaves(self._state)), torch.empty(0)).device.type
        if kind not in RECORDERS:
            raise UnavailableError(f"a stream is captured in a CUDA graph, and this one is on {kind}")
        self._record = RECORDERS[kind]
        self._captured.clear()
