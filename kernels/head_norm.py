"""Layer norm of each head by itself: the norm after a recurrent cell.

H heads of D channels:  y[h, d] = (x[h, d] - mean_d x[h]) / sqrt(var_d x[h] + eps) * weight[h, d] + bias[h, d],
with the variance over D, not D - 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import dispatch


def head_norm(
    x: Tensor, heads: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    backend: str | None = None,
) -> Tensor:
    """x [..., H * D] -> [..., H * D] in x's dtype, channels of one head side by side; weight, bias [H * D].

    weight is the gain itself: a checkpoint that stores w for a gain of 1 + w passes 1 + w.
    Statistics are float32 at least. The Triton form has first derivatives only.
    Raises ValueError for shapes that do not fit, BackendError (see dispatch).
    """
    if x.dim() < 1 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"head_norm wants x [..., H * D] with H = {heads}; got {list(x.shape)}")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != x.shape[-1:]:
            raise ValueError(f"head_norm wants {name} [{x.shape[-1]}]; got {list(p.shape)}")
    run = dispatch.choose("head_norm", backend, device=x.device.type, dtype=x.dtype, heads=heads, width=x.shape[-1])
    return run(x, heads, weight, bias, eps)


def _reference(x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x.unflatten(-1, (heads, -1)).to(torch.promote_types(x.dtype, torch.float32))
    y = y - y.mean(-1, keepdim=True)
    y = (y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    return _affine(y, weight, bias).to(x.dtype)


def _native(x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's layer norm, whose statistics are float32 for lower dtypes."""
    D = x.shape[-1] // heads
    y = F.layer_norm(x.unflatten(-1, (heads, D)), (D,), eps=eps).flatten(-2)
    return _affine(y, weight, bias).to(x.dtype)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


dispatch.register("head_norm", "reference", _reference, dispatch.always("the formula"))
dispatch.register("head_norm", "torch", _native, dispatch.always("torch's layer norm, on any device"))
dispatch.load_forms("head_norm")
