"""Layer norm within each head, with an optional skip and gate.

H heads of D channels:  y[h, d] = (x[h, d] - mean_d x[h]) / sqrt(var_d x[h] + eps) * weight[h, d] + bias[h, d],
where the variance divides by D, not D - 1. With a skip, skip_weight * skip is added. With a gate, the sum is multiplied
by activation(gate).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from seqblocks.kernels import dispatch, numerics

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "silu": F.silu, "sigmoid": torch.sigmoid, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh,
    "softplus": F.softplus,
}


def head_norm(
    x: Tensor, heads: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    skip: Tensor | None = None,
    skip_weight: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "silu",
    one_plus: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Normalise each head of x [..., H * D] and return [..., H * D]; channels of one head are adjacent.

    weight, bias [H * D]; the gain is weight, or 1 + weight with one_plus.
    skip, gate: the shape of x; skip_weight [H * D]: given if and only if skip is. activation: of the gate, one of
    ACTIVATIONS. Statistics are computed in float32 at least; the result has the dtype to which torch promotes x, skip
    and gate. The Triton implementation has first derivatives only.
    Raises ValueError for wrong shapes or an unknown activation, BackendError (see dispatch).
    """
    if x.dim() < 1 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"head_norm expects x [..., H * D] with H = {heads}; got {list(x.shape)}")
    for name, p in (("weight", weight), ("bias", bias), ("skip_weight", skip_weight)):
        if p is not None and p.shape != x.shape[-1:]:
            raise ValueError(f"head_norm expects {name} [{x.shape[-1]}]; got {list(p.shape)}")
    for name, t in (("skip", skip), ("gate", gate)):
        if t is not None and t.shape != x.shape:
            raise ValueError(f"head_norm expects {name} with the shape of x, {list(x.shape)}; got {list(t.shape)}")
    if (skip is None) != (skip_weight is None):
        raise ValueError("head_norm expects skip and skip_weight together")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose from {', '.join(ACTIVATIONS)}")
    dtype = numerics.computed_in(x, weight, bias, skip, skip_weight, gate)
    inputs = {"x": x, "weight": weight, "bias": bias, "skip": skip, "skip_weight": skip_weight, "gate": gate}
    run = dispatch.choose(
        "head_norm", backend, inputs, dtype=dtype, heads=heads, width=x.shape[-1],
        skip=skip is not None, gate=None if gate is None else activation, one_plus=one_plus,
    )
    return run(x, heads, weight, bias, eps, skip, skip_weight, gate, activation, one_plus)


def _reference(
    x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    skip: Tensor | None = None, skip_weight: Tensor | None = None, gate: Tensor | None = None, activation: str = "none",
    one_plus: bool = False,
) -> Tensor:
    y = rearrange(x, "... (h d) -> ... h d", h=heads).to(torch.promote_types(x.dtype, torch.float32))
    y = y - y.mean(-1, keepdim=True)
    y = rearrange(y / (y.square().mean(-1, keepdim=True) + eps).sqrt(), "... h d -> ... (h d)")
    return _with_skip_and_gate(_affine(y, weight, bias, one_plus).to(x.dtype), skip, skip_weight, gate, activation)


def _native(
    x: Tensor, heads: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    skip: Tensor | None = None, skip_weight: Tensor | None = None, gate: Tensor | None = None, activation: str = "none",
    one_plus: bool = False,
) -> Tensor:
    """Use torch's layer norm, which computes statistics in float32 for lower dtypes."""
    D = x.shape[-1] // heads
    y = F.layer_norm(x.unflatten(-1, (heads, D)), (D,), eps=eps).flatten(-2)
    return _with_skip_and_gate(_affine(y, weight, bias, one_plus).to(x.dtype), skip, skip_weight, gate, activation)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, one_plus: bool) -> Tensor:
    if weight is not None:
        y = y * (1 + weight if one_plus else weight)
    return y if bias is None else y + bias


def _with_skip_and_gate(
    y: Tensor, skip: Tensor | None, skip_weight: Tensor | None, gate: Tensor | None, activation: str
) -> Tensor:
    if skip is not None and skip_weight is not None:
        y = y + skip_weight * skip
    return y if gate is None else y * ACTIVATIONS[activation](gate)


dispatch.register("head_norm", "reference", _reference, dispatch.always("the formula"))
dispatch.register("head_norm", "torch", _native, dispatch.always("torch's layer norm, on any device"))
dispatch.load_implementations("head_norm")
