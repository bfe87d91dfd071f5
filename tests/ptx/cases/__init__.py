"""Calls of all kernels, forward and backward, small enough for the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ptx.compare import Call, Case

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
CASES: dict[str, Case] = {}


OPS = (
    "causal_conv", "centaurus", "head_norm", "headwise_linear", "linear_attention", "mlstm", "residual_norm",
    "selective_scan", "slstm",
)


def op_of(name: str) -> str:
    """Return the kernel family of a case. Those of linear attention have the names of mixers."""
    first = name.removeprefix("far ").split()[0].replace("scan", "selective_scan")
    return first if first in OPS else "linear_attention"


def case(name: str, make: Callable[[], Call], **facts: Any) -> None:
    """Add a case."""
    assert name not in CASES, name
    CASES[name] = Case(name, make, **facts)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def marks(batch: int, tokens: int, rate: float = 0.12) -> Tensor:
    """Return resets at random tokens, and at the first token of a chunk."""
    found = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(5)) < rate
    if tokens > 64:
        found[:, 64] = found[:, 32] = True
    return found


def inside(x: Tensor) -> Tensor:
    """Return the same values as a view into a larger tensor, like one part of a joint projection."""
    width = x.shape[-1]
    wide = torch.full((*x.shape[:-1], 3 * width), 7.0, dtype=x.dtype)
    part = wide[..., width : 2 * width]
    part.copy_(x)
    return part


def cast(tensors: dict[str, Tensor], dtype: torch.dtype, view: bool = False) -> dict[str, Tensor]:
    return {name: inside(x.to(dtype)) if view else x.to(dtype) for name, x in tensors.items()}


def load() -> dict[str, Case]:
    """Return all cases by name."""
    from tests.ptx.cases import chunks, far, rows, scans, slstm  # noqa: F401  # they import this file

    return CASES
