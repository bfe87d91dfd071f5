"""One token of the selective scan, with everything that does not depend on the token computed beforehand.

B batch, E channels, N states of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare(A_log: Tensor, D: Tensor | None, softplus: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return f(h [B, E, N], x, dt [B, E], B, C [B, N], z [B, E] or None) -> (y [B, E], the next h).

    A_log [E, N], D [E]. f computes the same values as `selective_scan` for one token, without gradients.
    """
    A = torch.exp(A_log) * -math.log2(math.e)  # torch's exp2 takes a fifth of the time of exp.

    def step(
        h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if softplus:
            dt = F.softplus(dt)
        h = (dt.unsqueeze(-1) * A).exp2_().mul_(h).addcmul_((dt * x).unsqueeze(-1), B.unsqueeze(1))
        y = torch.bmm(h, C.unsqueeze(-1)).squeeze(-1)
        if D is not None:
            y.addcmul_(D, x)
        return (y if z is None else y.mul_(F.silu(z))), h

    return step
