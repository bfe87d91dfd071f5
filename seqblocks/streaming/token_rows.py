"""Several tokens of each sequence as rows [seq * batch, ...]: the first token of each, then the second of each.

`seqblocks/streaming/frames.py` decides how each step of a model computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from seqblocks.state import States
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

Reading = Callable[[States, Tensor, int], tuple[Any, States] | None]  # of state, x [seq * batch, ...] and batch


def read(function: Reading, state: States, x: Tensor) -> tuple[Any, States] | None:
    """Run a function of several tokens, ids [batch, seq]. Return (y [batch, 1, features] of the last token, state).

    Return None if the function does, because the state does not match its declaration.
    """
    batch = x.shape[0]
    if (done := function(state, as_rows(x), batch)) is None:
        return None
    y, states = done
    if isinstance(y, dict):
        return {name: each[-batch:].unsqueeze(1) for name, each in y.items()}, states
    return y[-batch:].unsqueeze(1), states


def as_rows(x: Tensor) -> Tensor:
    """Return tokens [batch, seq, ...] as rows [seq * batch, ...]."""
    return x.squeeze(0) if x.shape[0] == 1 else x.transpose(0, 1).flatten(0, 1)


def as_sequences(x: Tensor, batch: int) -> Tensor:
    """Return rows [seq * batch, ...] as tokens [batch, seq, ...]."""
    return x.unsqueeze(0) if batch == 1 else x.reshape(-1, batch, *x.shape[1:]).transpose(0, 1)


def has_tokens(wire: Wire | None) -> bool:
    """Return whether a wire holds tokens of the stream rather than of the context."""
    return wire is not None and wire.kind in ("sequence", "tokens") and not wire.context


def on_sequences(run: Callable[..., Sequence[Any]], timed: Sequence[bool], made: Sequence[bool]) -> TokenFunction:
    """Return the function of tokens of a function of sequences; with one result, it returns that alone.

    timed, made: whether each argument, and each result, holds tokens [batch, seq, ...].
    """

    def call(before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], given: Sequence[Any]) -> Any:
        results = run(*[before(x) if time else x for x, time in zip(given, timed, strict=True)])
        found = [after(y) if time and y is not None else y for y, time in zip(results, made, strict=True)]
        return tuple(found) if len(found) > 1 else found[0]

    return TokenFunction(
        lambda *given: call(lambda x: x.unsqueeze(1), lambda y: y.squeeze(1), given),
        lambda batch, *given: call(lambda x: as_sequences(x, batch), as_rows, given),
        math.inf,
    )


def over_tokens(
    run: Callable[..., Sequence[Tensor]], batch: int, state: Sequence[Tensor], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Call a function of one token for each of several, and return the output of all and the last state.

    run(*state, *inputs [batch, ...]) returns the output and then the state; inputs [seq * batch, ...].
    """
    outputs = []
    for now in zip(*(repeat(None) if x is None else x.split(batch) for x in inputs), strict=False):
        y, *state = run(*state, *now)
        outputs.append(y)
    return torch.cat(outputs), *state
