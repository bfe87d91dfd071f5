"""One token of linear attention, without gradients.

B batch, H heads of q and k, HV heads of values, K width of keys, V width of values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Maybe = Tensor | None
Step = Callable[..., tuple[Tensor, Tensor]]


def prepare(heads: int, scale: float | None, unit: bool, fixed: Maybe, bonus: Maybe, normalize: bool) -> Step:
    """Return f(S [B, HV, K, V], q, k [B, H * K], v [B, HV * V], decay, beta, a, b), the last four per value head.

    f returns o [B, HV * V] and the next S, with the same values as `linear_attention` for one token. unit: normalise q
    and k to length 1. fixed: constant log decays [HV]; bonus [H, K]; with `normalize`, S has a last column for z.
    in_place: write the next S to the memory of S.
    """
    fixed_factor = None if fixed is None else fixed.exp()
    baddbmm = _baddbmm_to_compile if torch.compiler.is_compiling() else torch.baddbmm

    def one(
        S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Maybe = None, beta: Maybe = None, a: Maybe = None,
        b: Maybe = None, *, in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        B, HV, K, _ = S.shape
        q, k = _of_heads(q, k, heads, HV // heads, unit)  # [B * HV, 1, K], rows of one batched product
        v, before = v.reshape(B * HV, 1, -1), S.flatten(0, 1)
        if normalize:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        factor = fixed_factor if decay is None else decay.exp()
        S = before if factor is None else _decayed(S, factor).flatten(0, 1)
        if a is not None and b is not None:
            read = torch.bmm(a.reshape(B * HV, 1, K), before)
            S = _with(S, b.reshape(B * HV, 1, K), read, in_place or S is not before)
        write = v if beta is None else baddbmm(v, k, S, alpha=-1).mul_(beta.reshape(-1, 1, 1))
        S = _with(S, k, write, in_place or S is not before)
        used = S if bonus is None else before
        times = K**-0.5 if scale is None else scale
        o = baddbmm(v, q, used, beta=0, alpha=times)
        if bonus is not None:
            o = _with_bonus(o, v, q * k, bonus.repeat_interleave(HV // heads, 0).view(HV, 1, K) * times)
        o = o[..., :-1] / (o[..., -1:] + 1e-10) if normalize else o
        return o.reshape(B, -1), S.view(B, HV, K, -1)

    return one


def _baddbmm_to_compile(x: Tensor, a: Tensor, b: Tensor, *, beta: int = 1, alpha: float = 1) -> Tensor:
    """Return beta x + alpha a b for a beta of 0 or 1; torch's compiler needs no library for it if `a` has one row."""
    product = torch.bmm(a, b) * alpha
    return x + product if beta else product


def _of_heads(q: Tensor, k: Tensor, heads: int, groups: int, unit: bool) -> tuple[Tensor, Tensor]:
    """Repeat q and k [B, H * K] for each head of values, [B * HV, 1, K], normalised to length 1 if `unit`."""
    B, K = q.shape[0], q.shape[1] // heads
    if unit:
        both = torch.cat([q, k], 1).view(B, 2, heads, K)
        q, k = both.mul_(both.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()).unbind(1)
    if groups > 1:
        q, k = (x.reshape(B, heads, K).repeat_interleave(groups, 1) for x in (q, k))
    return q.reshape(B * heads * groups, 1, K), k.reshape(B * heads * groups, 1, K)


def _decayed(S: Tensor, factor: Tensor) -> Tensor:
    """Return S times decay factors [HV], [B, HV] or [B, HV * K]."""
    factor = factor.view(-1, S.shape[1], S.shape[2] if factor.shape[-1] != S.shape[1] else 1, 1)
    return S * factor


def _with(S: Tensor, x: Tensor, y: Tensor, in_place: bool) -> Tensor:
    """Return S [N, K, V] + x^T y for rows x and y, in the memory of S if `in_place`."""
    return S.addcmul_(x.mT, y) if in_place else torch.addcmul(S, x.mT, y)


def _with_bonus(o: Tensor, v: Tensor, qk: Tensor, weights: Tensor) -> Tensor:
    """Return o + (sum over keys of q k weights) v; weights [HV, 1, K]."""
    HV, _, K = weights.shape
    return o.addcmul_((qk.view(-1, HV, 1, K) * weights).sum(-1).view(-1, 1, 1), v)
