"""One token of linear attention, without gradients.

B batch, H heads of q and k, HV heads of values, K and V their widths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Maybe = Tensor | None
Step = Callable[..., tuple[Tensor, Tensor]]


def prepare(heads: int, scale: float | None, unit: bool, fixed: Maybe, bonus: Maybe, normalize: bool) -> Step:
    """Return f(S [B, HV, K, V], q, k [B, H * K], v [B, HV * V], decay, beta, a, b), the last four per value head.

    It returns o [B, HV * V] and the next S: the same numbers as `linear_attention` for one token. unit: q and k are
    divided by their length. fixed: log decays [HV]; bonus [H, K]; with `normalize` S has a last column for the keys.
    """

    def step(
        S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Maybe = None, beta: Maybe = None, a: Maybe = None,
        b: Maybe = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        B, HV, K, _ = S.shape
        q, k = (_of_heads(x.view(B, heads, K), HV // heads, unit) for x in (q, k))
        v, q = v.view(B, HV, -1), q * (K**-0.5 if scale is None else scale)
        if normalize:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        before, S = S, _decayed(S, fixed if decay is None else decay)
        if a is not None and b is not None:
            read = _read(a.view(B, HV, K), before)
            S = _with(S, b.view(B, HV, K), read, S is not before)
        write = v if beta is None else beta.unsqueeze(-1) * (v - _read(k, S))
        S = _with(S, k, write, S is not before)
        if bonus is None:
            o = _read(q, S)
        else:
            weight = (q * bonus.repeat_interleave(HV // heads, 0) * k).sum(-1, keepdim=True)
            o = torch.addcmul(_read(q, before), weight, v)
        return (o[..., :-1] / (o[..., -1:] + 1e-10) if normalize else o).flatten(1), S

    return step


def _of_heads(x: Tensor, groups: int, unit: bool) -> Tensor:
    """q or k [B, H, K] for each head of values, of length 1 if `unit`."""
    if unit:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _decayed(S: Tensor, decay: Maybe) -> Tensor:
    """By log decays [HV], [B, HV] or [B, HV * K]."""
    if decay is None:
        return S
    return S * decay.exp().view(-1, S.shape[1], S.shape[2] if decay.shape[-1] != S.shape[1] else 1, 1)


def _with(S: Tensor, x: Tensor, y: Tensor, own: bool) -> Tensor:
    """S + x y^T, in place if S is our own."""
    x, y = x.unsqueeze(-1), y.unsqueeze(-2)
    return S.addcmul_(x, y) if own else torch.addcmul(S, x, y)


def _read(x: Tensor, S: Tensor) -> Tensor:
    """x^T S."""
    return torch.matmul(x.unsqueeze(-2), S).squeeze(-2)
