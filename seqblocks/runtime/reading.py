"""A few tokens of a stream at once, such as a short prompt or a frame, read by the function of a stepper.

Steps without state process all tokens at once, like the tokens of several sequences, and those with a state one token
after another, or in a function of their own. For many tokens, the kernels of whole sequences take less time.

The tokens are rows [seq * batch, ...]: the first token of each sequence, then the second of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from seqblocks.graph import Node
from seqblocks.state import States
from seqblocks.types import Wire

MOST_TOKENS = 16  # It is faster than the modules for at most so many tokens of a sequence,
MOST_ROWS = 64  # and so many of all sequences.

Reading = Callable[[States, Tensor, int], tuple[Any, States] | None]  # of state, x [seq * batch, ...] and batch


def is_short(x: Tensor) -> bool:
    """Return whether a stepper reads the tokens x [batch, seq] faster than the modules do."""
    return x.shape[1] <= MOST_TOKENS and x.numel() <= MOST_ROWS


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


def runs_on_tokens(node: Node, types: Mapping[int, Wire | None]) -> bool:
    """Return whether a step only reads tokens of the stream, and treats each by itself or has a state.

    A cache of all tokens is read faster by all new tokens at once.
    """
    assert node.op is not None
    is_local = node.op.reads == "token" or bool(node.state)
    cached = any(state.per_token for state in node.state.values())
    values = *node.reads, *node.outputs[:1]
    return is_local and not cached and all(has_tokens(types[value]) for value in values)


def has_tokens(wire: Wire | None) -> bool:
    """Return whether a wire holds tokens of the stream rather than of the context."""
    return wire is not None and wire.kind in ("sequence", "tokens") and not wire.context


def over_tokens(
    run: Callable[..., Sequence[Tensor]], batch: int, outputs: int, state: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Call a function of one token for each of several, and return the outputs of all and the last state.

    run(*state, *inputs [batch, ...]) returns that many outputs and then the state; inputs [seq * batch, ...]. A
    function `run.several`, if there is one, does the same for all tokens in fewer operations (`Op.prepare_step`).
    """
    if several := getattr(run, "several", None):
        made: tuple[Tensor, ...] = several(batch, *state, *inputs)
        return made
    outputs_of = []
    for now in zip(*(repeat(None) if x is None else x.split(batch) for x in inputs), strict=False):
        done = run(*state, *now)
        outputs_of.append(done[:outputs])
        state = done[outputs:]
    return *(torch.cat(each) for each in zip(*outputs_of, strict=True)), *state
