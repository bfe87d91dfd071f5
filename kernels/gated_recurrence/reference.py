"""Reference implementation of the gated recurrence: one token after the other."""

from __future__ import annotations

from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import STATE, TOKENS, contained


def run(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return y [B, S, E] and the last state, given x, decay [B, S, E], state [B, E] and resets [B, S]."""

    def whole(x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return scan(x, decay, state, resets, reverse)

    y, last = contained(whole, (x, decay, state), (TOKENS, TOKENS, STATE), resets, reverse)
    return y, last


def scan(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence alone. `run` also keeps nonfinite values out of gradients across a reset."""
    if x.shape[1] == 0:
        return empty_with_gradients(x, x, decay), state

    def token(state: States, x: list[Tensor]) -> tuple[Tensor, States]:
        h = x[1].exp() * state[0] + x[0]
        return h, (h,)

    with without_autocast(x.device.type):
        y, last = token_by_token(token, (state,), (x, decay), resets, reverse)
    return y, last[0]


register("gated_recurrence", "reference", run, always("the recurrent definition runs wherever torch does"))
