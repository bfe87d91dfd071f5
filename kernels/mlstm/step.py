"""One token of the mLSTM, without gradients.

B batch, H heads, DK width of query and key, DV width of value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.mlstm.reference import largest_exponent, log_input_gate


def prepare(heads: int, eps: float, input_gate: str, normalize: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return f(C [B, H, DK, DV], n [B, H, DK], m [B, H], q, k [B, H * DK], v [B, H * DV], i, f [B, H]).

    It returns h [B, H * DV] and the next C, n, m: the same numbers as `mlstm` for one token.
    """

    def step(
        C: Tensor, n: Tensor, m: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, ...]:
        B, _, DK, DV = C.shape
        q, k, v = q.view(B, heads, DK) * DK**-0.5, k.view(B, heads, DK), v.view(B, heads, DV)
        log_i, through = log_input_gate(i, input_gate), F.logsigmoid(f) + m
        m = torch.maximum(through, log_i) if input_gate == "exp" else torch.zeros_like(m)
        keep, write = (through - m).exp_()[..., None], (log_i - m).exp_()[..., None] * k
        C = torch.mul(C, keep[..., None]).addcmul_(write[..., None], v[..., None, :])
        n = torch.addcmul(write, keep, n)
        h = torch.matmul(q[..., None, :], C).squeeze(-2)
        if normalize:
            floor = (-m).clamp_(max=largest_exponent(m.dtype)).exp_()[..., None]
            h /= torch.maximum((q * n).sum(-1, keepdim=True).abs_(), floor).add_(eps)
        return h.flatten(1), C, n, m

    return step
