"""The selective scan as defined: one token after the other (Mamba, arXiv:2312.00752, eq. 2-4 with exact decay).

B batch, S sequence, G groups of E / G channels that share an input and an output matrix, N states of a channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register, without_autocast


def run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """u, dt [B, S, G, E/G], A [G, E/G, N], B, C [B, S, G, N], state [B, G, E/G, N]; A, B, C, state may be complex.

    Returns y [B, S, G, E/G] and the last state.
    """
    with without_autocast(u.device.type):
        S = u.shape[1]
        outputs: list[Tensor] = []
        for t in reversed(range(S)) if reverse else range(S):
            if resets is not None:
                state = state.masked_fill(resets[:, t, None, None, None], 0.0)
            step = dt[:, t, :, :, None]
            state = torch.exp(step * A) * state + step * u[:, t, :, :, None] * B[:, t, :, None]
            y = (state * C[:, t, :, None]).sum(-1)
            outputs.append(2 * y.real if y.is_complex() else y)
    if not outputs:
        return torch.empty_like(u), state
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


register("selective_scan", "reference", run, always("the recurrent definition runs wherever torch does"))
