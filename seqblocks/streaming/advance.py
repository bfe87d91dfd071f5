"""How `generate` runs one token after another: on a CUDA device from a graph, elsewhere by the model's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from seqblocks.errors import RunError
from seqblocks.state import States, index_select
from seqblocks.streaming.cuda_graph import RECORDERS, CapturedStep, Step
from seqblocks.streaming.guard import Guard

UNCHECKED = 8  # tokens between two comparisons of the model with its plan: another thread may load weights
CAPTURE_MIN_TOKENS = 16  # tokens: recording runs a step four times


class Advance(Protocol):
    """Run tokens of a batch, whose sequences may end at different times."""

    def keep(self, at: list[int]) -> None:
        """Continue with the sequences at these places alone."""

    def __call__(self, tokens: Tensor) -> Any:
        """Return the output for a token of each remaining sequence."""


def advance_of(model: Any, state: States, tokens: int, observed: bool) -> Advance:
    """Return how to run so many tokens.

    observed: whether code of the user runs between them. It may change the model, which is then compared with its plan
    before each token.
    """
    if is_compiled(model):
        return Plain(model, state, lambda _: model.step)
    if tokens >= CAPTURE_MIN_TOKENS and Captured.fits(model):
        return Captured(model, state)
    return Plain(model, state, lambda tokens: (None if observed else model.unguarded_step(tokens)) or model.step)


def is_compiled(model: Any) -> bool:
    """Return whether a model is the result of torch.compile, whose attributes are those of the original model."""
    return "_orig_mod" in model.__dict__.get("_modules", ())


class Plain:
    """Run each token by the model's step. Sequences that have ended leave the batch."""

    def __init__(self, model: Any, state: States, step_of: Callable[[Tensor], Step]) -> None:
        self._model, self._state, self._step_of, self._count = model, state, step_of, 0

    def keep(self, at: list[int]) -> None:
        self._state = index_select(self._state, torch.tensor(at, device=self._model.some_tensor().device))

    def __call__(self, tokens: Tensor) -> Any:
        self._count += 1
        if self._count == 1 or self._count % UNCHECKED == 0:
            self._step = self._step_of(tokens)
        y, self._state = self._step(tokens, self._state)
        return y


class Captured:
    """Replay the launches of one token, as long as the model has the modules, parameters and hooks that were recorded.

    Sequences that have ended stay in the batch until half of it has ended, because a smaller batch is recorded anew. A
    step that cannot be recorded, for instance because its state grows, runs by the model's step, like a model that was
    changed.
    """

    def __init__(self, model: Any, state: States) -> None:
        self._model, self._state = model, state
        self._rows: Tensor | None = None  # the places of the remaining sequences; None: all
        self._size = 0
        self._guard = _unchanged(model)
        self._captured: CapturedStep | None = None
        self._plain: Plain | None = None

    @staticmethod
    def fits(model: Any) -> bool:
        """Return whether the steps of a model may be recorded: none of them is computed with other processes."""
        return model.some_tensor().device.type in RECORDERS and not model.tensor_shards and not model.sequence_relay

    def keep(self, at: list[int]) -> None:
        if self._plain:
            self._plain.keep(at)
            return
        kept = torch.tensor(at, device=self._model.some_tensor().device)
        self._rows = kept if self._rows is None else self._rows[kept]
        if 2 * len(at) <= self._size:
            self._leave_ended()
            self._captured = None

    def _leave_ended(self) -> None:
        if self._rows is not None:
            self._state, self._rows = index_select(self._state, self._rows), None

    def __call__(self, tokens: Tensor) -> Any:
        if not self._plain and self._can_replay(tokens):
            return self._replayed(tokens)
        if not self._plain:
            self._leave_ended()
            self._plain, self._captured = Plain(self._model, self._state, lambda _: self._model.step), None
        return self._plain(tokens)

    def _can_replay(self, tokens: Tensor) -> bool:
        if not self._guard.holds():
            return False
        if self._captured:
            return True
        self._leave_ended()
        self._state = tree_map(torch.clone, self._state)  # is overwritten, and the caller may hold it
        self._size = tokens.shape[0]
        try:
            record = RECORDERS[tokens.device.type]
            self._captured = CapturedStep(self._model.step, self._state, tokens, None, record)
        except RunError:
            return False
        return True

    def _replayed(self, tokens: Tensor) -> Any:
        assert self._captured is not None
        if self._rows is None:
            return self._captured.run(tokens, None)
        rows = self._rows
        y = self._captured.run(tokens.new_zeros(self._size).index_copy_(0, rows, tokens), None)
        return tree_map(lambda each: each[rows], y)


def _unchanged(model: nn.Module) -> Guard:
    """Return a guard of all modules, parameters and buffers of a model; their values may change."""
    guard = Guard()
    for module in model.modules():
        guard.note_evaluation(module)
        guard.note_bypassed(module)
        for table in (module._parameters, module._buffers, module._modules):
            for name in table:
                guard.note_entry(table, name)
    guard.compile()
    return guard
