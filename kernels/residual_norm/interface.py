"""Normalisation of each token's features, fused with the preceding residual addition.

For D features:  total = x + residual,  y = total / sqrt(mean(total^2) + eps) * gain + bias. The gain is weight or
1 + weight. With `centred`, the mean of total is subtracted before normalisation, as in layer norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics


def residual_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-6, *,
    centred: bool = False,
    one_plus: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y and total [..., D], given x, residual [..., D] and weight, bias [D]. Without a residual, total is x.

    Statistics are computed in at least float32. The dtype of total is promoted from x and residual, the dtype of y from
    total, weight and bias. The Triton implementation has first derivatives only.
    Raises ValueError for shapes that do not fit, BackendError (see dispatch).
    """
    if x.dim() < 1:
        raise ValueError("residual_norm expects x [..., D]; got a scalar")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual_norm expects residual {list(x.shape)}; got {list(residual.shape)}")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != x.shape[-1:]:
            raise ValueError(f"residual_norm expects {name} [{x.shape[-1]}]; got {list(p.shape)}")
    dtype = numerics.computed_in(x, residual, weight, bias)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    run = dispatch.choose(
        "residual_norm", backend, inputs, dtype=dtype, width=x.shape[-1], residual=residual is not None,
        centred=centred, one_plus=one_plus,
    )  # fmt: skip
    done: tuple[Tensor, Tensor] = run(x, residual, weight, bias, eps, centred, one_plus)
    return done


def _formula(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool,
    one_plus: bool,
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    y = total.to(torch.promote_types(total.dtype, torch.float32))
    if centred:
        y = y - y.mean(-1, keepdim=True)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(total.dtype)
    if weight is not None:
        y = y * (1 + weight if one_plus else weight)
    return y if bias is None else y + bias, total


dispatch.register("residual_norm", "reference", _formula, dispatch.always("the formula"))
dispatch.register("residual_norm", "torch", _formula, dispatch.always("torch's own operations, on any device"))
dispatch.load_implementations("residual_norm")
