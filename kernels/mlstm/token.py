"""One token of the mLSTM, without gradients.

B batch, H heads, DK width of query and key, DV width of value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.mlstm.reference import largest_exponent, log_input_gate
from seqblocks.token_function import TokenFunction


def prepare(
    heads: int, eps: float, input_gate: str, normalize: bool, readout: str = "paper", most_tokens: float | None = None
) -> TokenFunction:
    """Return a function of C [B, H, DK, DV], n [B, H, DK], m [B, H], q, k [B, H * DK], v [B, H * DV], i, f [B, H].

    It returns h [B, H * DV] and the next C, n, m: the same values as `mlstm`, or `mlstm_memoroid` with that readout.
    """
    power = 0.5 if readout == "paper" else 1.0

    def one(
        C: Tensor, n: Tensor, m: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor
    ) -> tuple[Tensor, ...]:
        B, _, DK, DV = C.shape
        q, k, v = q.view(B, heads, DK) * DK**-power, k.view(B, heads, DK), v.view(B, heads, 1, DV)
        log_i, through = log_input_gate(i, input_gate), F.logsigmoid(f).add_(m)
        m = torch.maximum(through, log_i) if input_gate == "exp" else torch.zeros_like(m)
        keep, write = through.sub_(m).exp_().unsqueeze(-1), (log_i - m).exp_().unsqueeze(-1) * k
        C = (C * keep.unsqueeze(-1)).addcmul_(write.unsqueeze(-1), v)
        n = write.addcmul_(keep, n)
        h = torch.bmm(q.reshape(-1, 1, DK), C.flatten(0, 1)).view(B, heads, DV)
        if normalize:
            size = q.mul_(n).sum(-1, keepdim=True).abs_()
            if readout == "paper":
                size = torch.maximum(size, m.neg().clamp_(max=largest_exponent(m.dtype)).exp_().unsqueeze(-1))
            else:
                size = size.clamp_(min=1.0)
            h /= size.add_(eps)
        return h.flatten(1), C, n, m

    return TokenFunction(one, most_tokens=most_tokens)
