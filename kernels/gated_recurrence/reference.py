"""The gated recurrence as defined: one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import nothing, without_autocast
from seqblocks.kernels.resets import STATE, TOKENS, along, contained


def run(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """x, decay [B, S, E], state [B, E], resets [B, S]. Returns y [B, S, E] and the last state."""

    def whole(x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return scan(x, decay, state, resets, reverse)

    y, last = contained(whole, (x, decay, state), (TOKENS, TOKENS, STATE), resets, reverse)
    return y, last


def scan(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """The bare recurrence. `run` also keeps what is not finite out of gradients that a reset separates from it."""
    S = x.shape[1]
    if S == 0:
        return nothing(x, x, decay), state
    outputs = []
    with without_autocast(x.device.type):
        for t in reversed(range(S)) if reverse else range(S):
            if resets is not None:
                state = state.masked_fill(along(resets[:, t], state), 0.0)
            state = decay[:, t].exp() * state + x[:, t]
            outputs.append(state)
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


register("gated_recurrence", "reference", run, always("the recurrent definition runs wherever torch does"))
