"""One token of a stream, planned once and run many times.

In a small model, the computation of one token takes less time than the Python code that dispatches it. The first step
without gradients therefore makes a `TokenPlan`, which runs one function of all steps of the model in order, with
parameters already in the layout that one token needs. `seqblocks/streaming/writer.py` writes that function.

A plan is valid while modules, hooks and parameters are unchanged. Changes through `parameter.data` cannot be detected,
so values derived from parameters are computed again for each stream and after each step of an optimiser (`renewed`). A
plan does not change once it is made, since several threads may run it: computing its values again makes another one.
Nothing in a plan refers to the plan or its model, so that a deleted model frees its memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.graph import ModelSpec
from seqblocks.kernels.int8 import scales
from seqblocks.runtime.body import Body
from seqblocks.runtime.modules import is_hooked
from seqblocks.state import States
from seqblocks.streaming import combinators  # noqa: F401 - its functions register themselves
from seqblocks.streaming.guard import Updates
from seqblocks.streaming.half import can_plan, half_dtype
from seqblocks.streaming.source import Values
from seqblocks.streaming.token_rows import Reading, read
from seqblocks.streaming.writer import PlanWriter


def plan_tokens(
    model: Body, spec: ModelSpec, declared: States, stream: object = None, kind: type[PlanWriter] = PlanWriter
) -> TokenPlan | None:
    """Return the plan of a model, or None if some step is not supported, or if parameters changed meanwhile.

    declared: the declared states of the steps, nested by name. stream: what identifies the model's latest stream. kind:
    the class of what writes the function.
    """
    parameters = list(model.parameters())
    stored = [*parameters, *scales(model)]
    if model.training or is_hooked(model) or any(x.is_inference() for x in stored):
        return None
    half, kinds = half_dtype(stored), {x.dtype for x in stored}
    is_uniform = kind.takes_half and can_plan(spec.graph) if half else kinds in ({torch.float32}, {torch.float64})
    if not is_uniform or not all(type(x) is nn.Parameter for x in parameters) or any(not x.is_cpu for x in stored):
        return None
    before, made_after = _as_they_are(parameters), (Updates.latest, stream)
    writer = kind(model, spec, declared, half)
    if _as_they_are(model.parameters()) != before or not writer.can_run:
        return None
    return TokenPlan(writer, parameters, spec, declared, made_after)


class TokenPlan:
    """Run one token, x [batch, features] or token ids [batch], through a model.

    run(state, x) returns (y, state), or None if the state does not match its declaration. holds() returns whether the
    model is unchanged.

    If the model changes the rate of its tokens, x is a frame [batch, frame, features] or ids [batch, frame], and y has
    the output tokens of that frame.
    """

    def __init__(
        self, writer: PlanWriter, parameters: list[nn.Parameter], spec: ModelSpec, declared: States,
        made_after: tuple[object, object],
    ) -> None:
        """made_after: the update and stream before which values were derived."""
        self.writer, self.dtype, self.holds = writer, writer.dtype, writer.guard.holds
        self._made_after, self._parameters = made_after, parameters
        self._memory = [_memory(x) for x in parameters]
        self._frames, self._source = writer.frames, writer.source
        of_tokens = spec.input.kind == "tokens"
        self._dtypes = (torch.int64, torch.int32) if of_tokens else (self.dtype,)
        frame = (self._frames.size,) if self._frames.have_several_tokens else ()
        self._sizes = frame + (() if of_tokens else (spec.input.features,))
        self._make_run = self._source.function(writer.result, declared, self._frames.have_several_tokens)
        several = partial(self._source.function_of_several, writer.result, declared)
        self._make_reading = cache(several)  # few models read prompts
        self._set_values(self._source.values)

    def _set_values(self, values: Values) -> None:
        self._values = values
        self.run: Callable[..., tuple[Tensor, States] | None] = self._make_run(values)
        self._reading: Reading | None = None

    def is_current(self, stream: object) -> bool:
        """Return whether values were derived from parameters in this stream and since the latest update."""
        return self._made_after == (Updates.latest, stream)

    def renewed(self, stream: object) -> TokenPlan | None:
        """Return a plan with all values derived from parameters again, or None if it has to be built instead."""
        made_after = (Updates.latest, stream)
        if [_memory(x) for x in self._parameters] != self._memory:
            return None
        values = self._source.prepared_again()
        if values is None:
            return None
        found = copy(self)
        found._made_after = made_after
        found._set_values(values)
        return found

    def read(self, state: States, x: Tensor) -> tuple[Any, States] | None:
        """Run several tokens, ids [batch, seq], and return (y [batch, 1, features] of the last token, state).

        Return None for many tokens, if a step makes anything other than tokens, or if the state does not match its
        declaration.
        """
        if not self._source.splits or not self._frames.is_short(x) or x.dtype not in self._dtypes:
            return None
        if self._reading is None:
            self._reading = self._make_reading()(self._values)
        return read(self._reading, state, x)

    @property
    def calls_modules(self) -> bool:
        """Return whether the function calls modules, such as replaced and hooked ones, or code of a user."""
        return self._source.calls_modules

    def takes(self, x: Tensor) -> bool:
        """Return whether x is a valid token for each sequence, so that no other check is needed."""
        return x.dtype in self._dtypes and x.shape[1:] == self._sizes and x.dim() > 0

    def suits(self, x: Tensor) -> bool:
        """Return whether the function is to run x: one frame, of so few sequences that modules would take longer."""
        frames = self._frames
        return x.shape[0] <= frames.most_batch and (not frames.have_several_tokens or x.shape[1] == frames.size)


def _memory(x: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is in memory, and how it is read."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _as_they_are(parameters: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """Return what changes when one of these parameters is replaced, moved or modified."""
    return [(id(x), x._version, *_memory(x)) for x in parameters]
