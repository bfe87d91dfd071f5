"""Single tokens of the selective scan, with everything that does not depend on the token computed beforehand.

B batch, E channels, N states of a channel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.token_function import TokenFunction


def prepare(A_log: Tensor, D: Tensor | None, softplus: bool) -> TokenFunction:
    """Return the function (h [B, E, N], x, dt [B, E], B, C [B, N], z [B, E] or None) -> (y [B, E], the next h).

    A_log [E, N], D [E]. It computes the same values as `selective_scan`, and everything but the state of several tokens
    at once.
    """
    A = torch.exp(A_log) * -math.log2(math.e)  # torch's exp2 takes a fifth of the time of exp.
    read = _read_one if torch.compiler.is_compiling() else _read

    def finished(y: Tensor, x: Tensor, z: Tensor | None) -> Tensor:
        if D is not None:
            y.addcmul_(D, x)
        return y if z is None else y.mul_(F.silu(z))

    def one(
        h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if softplus:
            dt = F.softplus(dt)
        h = (dt.unsqueeze(-1) * A).exp2_().mul_(h).addcmul_((dt * x).unsqueeze(-1), B.unsqueeze(1))
        return finished(read(h, C), x, z), h

    def several(
        batch: int, h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if softplus:
            dt = F.softplus(dt)
        y, inputs = [], (dt.unsqueeze(-1), (dt * x).unsqueeze(-1), B.unsqueeze(1), C)
        for duration, added, b, c in zip(*(each.split(batch) for each in inputs), strict=True):
            h = (duration * A).exp2_().mul_(h).addcmul_(added, b)
            y.append(read(h, c))
        return finished(torch.cat(y), x, z), h

    return TokenFunction(one, several, 32)


def _read(h: Tensor, C: Tensor) -> Tensor:
    """Return the sum over n of C[b, n] h[b, e, n], [B, E].

    MKL reads several matrices as rows C in a fifth of the time that it takes with columns: 17 us instead of 79 for 8
    sequences of 1,024 channels with 16 states. For one sequence, the columns are 0.6 us faster.
    """
    return _read_one(h, C) if h.shape[0] == 1 else torch.bmm(C.unsqueeze(1), h.transpose(1, 2)).squeeze(1)


def _read_one(h: Tensor, C: Tensor) -> Tensor:
    return torch.bmm(h, C.unsqueeze(-1)).squeeze(-1)
