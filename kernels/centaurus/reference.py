"""Reference implementation of Centaurus: one token after the other.

B batch, S sequence, H features in, G features out, N state channels, M sub-states of a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained

MODES = ("neck", "pointwise", "dws", "full")


class Bank(NamedTuple):
    """A layer in discrete time. s' = exp(decay + i turn) s + u, and v = sum_m Re((read + i across) s').

    decay, turn, read, across [N, M]; B and C are shaped by the mode (centaurus/interface.py), and B includes the weight
    of the input.
    """

    mode: str
    decay: Tensor
    turn: Tensor
    read: Tensor
    across: Tensor
    B: Tensor
    C: Tensor

    def enter(self, x: Tensor) -> Tensor:
        """Map features [.., H] to channel inputs [.., N]."""
        if self.mode == "full":
            return x.repeat(*(1,) * (x.dim() - 1), self.B.shape[0] // x.shape[-1]) * self.B
        return x * self.B if self.mode == "dws" else x @ self.B.t()

    def leave(self, v: Tensor, H: int) -> Tensor:
        """Map channel outputs [.., N] to features [.., G]."""
        if self.mode == "full":
            return (v * self.C).unflatten(-1, (-1, H)).sum(-1)
        return v * self.C if self.mode == "dws" else v @ self.C.t()

    def fresh(self, x: Tensor) -> Tensor:
        """Return the state before the first token, [B, N, M, 2]."""
        return x.new_zeros(x.shape[0], *self.decay.shape, 2)

    def empty_output(self, x: Tensor) -> Tensor:
        """Return the output y for an empty x."""
        y = self.leave(self.enter(x), x.shape[-1])
        return empty_with_gradients(y, self.decay, self.turn, self.read, self.across)


def within_sequences(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that gradients do not cross resets, see `contained`."""

    def contained_run(
        bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool, *more: Any
    ) -> Any:
        if resets is None:
            return run(bank, x, state, resets, reverse, *more)

        def function(x: Tensor, state: Tensor | None, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            y, last = run(Bank(bank.mode, *parameters), x, state, resets, reverse, *more)
            return y, last

        kinds = (TOKENS, STATE, *(SHARED,) * 6)
        return contained(function, (x, state, *bank[1:]), kinds, resets, reverse)

    return contained_run


@within_sequences
def run(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return y [B, S, G] and the last state, given x [B, S, H] and state [B, N, M, 2]."""
    x = x.to(bank.decay.dtype)
    state = bank.fresh(x) if state is None else state
    size = torch.exp(bank.decay)
    turn_re, turn_im = size * torch.cos(bank.turn), size * torch.sin(bank.turn)
    if x.shape[1] == 0:
        return bank.empty_output(x), state

    def token(state: States, x: list[Tensor]) -> tuple[Tensor, States]:
        re, im = state[0].unbind(-1)
        re, im = turn_re * re - turn_im * im + bank.enter(x[0]).unsqueeze(-1), turn_im * re + turn_re * im
        y = bank.leave((bank.read * re - bank.across * im).sum(-1), x[0].shape[1])
        return y, (torch.stack([re, im], -1),)

    y, last = token_by_token(token, (state,), (x,), resets, reverse)
    return y, last[0]


register("centaurus", "reference", run, always("the recurrent definition runs wherever torch does"))
