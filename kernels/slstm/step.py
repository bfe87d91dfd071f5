"""One token of the sLSTM, with the recurrent weights of each head as one matrix.

B batch, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare(recurrent: Tensor, biases: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return f(y, c, n, m [B, H, D], i, f, z, o [B, H * D]) -> (y [B, H * D], the next y, c, n, m).

    recurrent [H, D, 4, D], biases [H, D] of i, f, z, o. f computes the same values as `slstm` for one token, without
    gradients.
    """
    H, D = recurrent.shape[:2]
    matrix, bias = recurrent.flatten(2), torch.stack([*biases], 1).view(H, 1, 4 * D)

    def step(
        y: Tensor, c: Tensor, n: Tensor, m: Tensor, i: Tensor, f: Tensor, z: Tensor, o: Tensor
    ) -> tuple[Tensor, ...]:
        gates = torch.cat([i, f, z, o], 1).view(-1, 4, H, D)
        recurrent = torch.baddbmm(bias, y.transpose(0, 1), matrix)  # [H, B, 4 D]
        i, f, z, o = gates.add_(recurrent.view(H, -1, 4, D).permute(1, 2, 0, 3)).unbind(1)
        through = F.logsigmoid(f).add_(m)
        m = torch.where(n == 0, i, torch.maximum(i, through))  # Before the first token, m has no meaning.
        write, keep = (i - m).exp_(), through.sub_(m).clamp_(max=0.0).exp_()
        c = z.tanh().mul_(write).addcmul_(keep, c)
        n = write.addcmul_(keep, n)
        y = o.sigmoid().mul_(c).div_(n)
        return y.flatten(1), y, c, n, m

    return step
