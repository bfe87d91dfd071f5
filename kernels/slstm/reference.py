"""The sLSTM cell by its definition, token by token (arXiv:2405.04517, eq. 8-18).

B batch, S sequence, H heads, D width of a head; gates in the order i, f, z, o.
y [B, H, D] output, c cell, n normaliser, m stabiliser: c and n are stored divided by exp(m).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained


class SLSTMState(NamedTuple):
    """The state of an sLSTM. Each tensor is [B, H, D], float32, or float64 if the inputs are."""

    y: Tensor
    c: Tensor
    n: Tensor
    m: Tensor


def cell(gates: Tensor, recurrent: Tensor, bias: Tensor, state: SLSTMState) -> SLSTMState:
    """Return the state after one token.

    gates [B, 4, H, D]: pre-activations before recurrence and bias; recurrent [H, D, 4, D]; bias [4, H, D].
    """
    y, c, n, m = state
    i, f, z, o = (gates + torch.einsum("bhd,hdge->bghe", y, recurrent) + bias).unbind(1)
    through = m + F.logsigmoid(f)
    m_new = torch.where(n == 0, i, torch.maximum(i, through))  # Before the first token, m has no meaning.
    write = torch.exp(i - m_new).clamp(max=1.0)
    keep = torch.exp((through - m_new).clamp(max=0.0))
    c = keep * c + write * torch.tanh(z)
    n = keep * n + write
    return SLSTMState(torch.sigmoid(o) * c / n, c, n, m_new)


def run(
    inputs: Sequence[Tensor], recurrent: Tensor, bias: Tensor, state: SLSTMState, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, SLSTMState]:
    """Run the scan over i, f, z, o [B, S, H * D] and return y [B, S, H, D] and the last state.

    recurrent and bias have the dtype of the state.
    """
    kinds = (*(TOKENS,) * 4, SHARED, SHARED, *(STATE,) * 4)
    y, *last = contained(
        lambda *x: _run(x[:4], x[4], x[5], SLSTMState(*x[6:]), resets, reverse),
        (*inputs, recurrent, bias, *state), kinds, resets, reverse,
    )  # fmt: skip
    return y, SLSTMState(*last)


def _run(
    inputs: Sequence[Tensor], recurrent: Tensor, bias: Tensor, state: SLSTMState, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, ...]:
    gates = rearrange([x.to(state.y.dtype) for x in inputs], "gate b s (h d) -> b s gate h d", h=state.y.shape[1])
    with without_autocast(gates.device.type):
        if gates.shape[1] == 0:
            return empty_with_gradients(gates[:, :, 0], gates, recurrent, bias), *state

        def token(state: States, x: list[Tensor]) -> tuple[Tensor, States]:
            new = cell(x[0], recurrent, bias, SLSTMState(*state))
            return new.y, new

        y, last = token_by_token(token, state, (gates,), resets, reverse)
    return y, *last


register("slstm", "reference", run, always("the recurrent definition runs wherever torch does"))
