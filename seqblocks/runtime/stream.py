"""A stream that holds its own state: what a server or an agent has one of."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

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
        self._model, self.state = model, state

    @torch.inference_mode()
    def step(self, x: Tensor, *, resets: Tensor | None = None) -> Any:
        """Return the output for one token of each sequence; arguments as `model.step`."""
        y, self.state = self._model.step(x, self.state, resets=resets)
        return y

    @torch.inference_mode()
    def read(self, x: Tensor, *, resets: Tensor | None = None) -> Any:
        """Return the output for several tokens of each sequence, such as a prompt; arguments as the model's."""
        y, self.state = self._model(x, state=self.state, return_state=True, resets=resets)
        return y

    @torch.inference_mode()
    def select(self, index: Tensor) -> None:
        """Go on with the sequences `index` [n], in that order; one may be taken several times. Raises RunError."""
        self.state = index_select(self.state, index)
