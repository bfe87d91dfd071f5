"""One token of the sLSTM, with the recurrent weights of each head as one matrix.

B batch, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Gates = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


def prepare(recurrent: Tensor, biases: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return f(y, c, n, m [B, H, D], i, f, z, o [B, H * D]) -> (y [B, H * D], the next y, c, n, m).

    recurrent [H, D, 4, D], biases [H, D] of i, f, z, o. f computes the same values as `slstm` for one token, without
    gradients.
    """
    gates = (_gates_to_compile if torch.compiler.is_compiling() else _gates)(recurrent.flatten(2), biases)

    def step(y: Tensor, c: Tensor, n: Tensor, m: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        i, f, z, o = gates(y, inputs)
        through = F.logsigmoid(f).add_(m)
        m = torch.where(n == 0, i, torch.maximum(i, through))  # Before the first token, m has no meaning.
        write, keep = (i - m).exp_(), through.sub_(m).clamp_(max=0.0).exp_()
        c = z.tanh().mul_(write).addcmul_(keep, c)
        n = write.addcmul_(keep, n)
        y = o.sigmoid().mul_(c).div_(n)
        return torch.view_copy(y, (-1, y.shape[1] * y.shape[2])), y, c, n, m

    return step


def _gates(matrix: Tensor, biases: Sequence[Tensor]) -> Gates:
    """Return f(y, the inputs of i, f, z, o) -> i, f, z, o [B, H, D] with recurrence and bias. matrix [H, D, 4 D]."""
    H, D, _ = matrix.shape
    bias = torch.stack([*biases], 1).view(H, 1, 4 * D)

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        recurrent = torch.baddbmm(bias, y.transpose(0, 1), matrix)  # [H, B, 4 D]
        return torch.cat([*inputs], 1).view(-1, 4, H, D).add_(recurrent.view(H, -1, 4, D).permute(1, 2, 0, 3)).unbind(1)

    return gates


def _gates_to_compile(matrix: Tensor, biases: Sequence[Tensor]) -> Gates:
    """Return the function of `_gates` as operations that torch's compiler puts into one kernel for one sequence.

    It would call a library for `baddbmm`, and its code for joined gates takes longer to compile.
    """
    H, D, _ = matrix.shape

    def gates(y: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        recurrent = torch.bmm(y.transpose(0, 1), matrix).transpose(0, 1).split(D, -1)  # [B, H, D] each
        each = zip(inputs, recurrent, biases, strict=True)
        return [x.view(-1, H, D) + part + bias for x, part, bias in each]

    return gates
