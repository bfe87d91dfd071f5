"""The mLSTM as a memoroid: an element per token, combined in any grouping.

B batch, S sequence, H heads, DK width of query and key, DV width of value. Per head, with ls = log sigmoid:

    element   f = ls(f)    C = k v^T    n = k    m = i
    a + b     f = fa + fb    m = max(ma + fb, mb)    C = e^(ma + fb - m) Ca + e^(mb - m) Cb    n likewise
    read      h = q~ C / (max(|q~ . n|, floor) + eps),  q~ = q / sqrt(DK)

`paper`: floor = exp(-m), which is 1 for the unscaled state (arXiv:2405.04517). `unit_floor`: floor = 1 on the scaled
state and q~ = q / DK, as early releases of memorax have it; its h depends on the stabiliser: for compatibility only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.associative_scan import Memoroid
from seqblocks.kernels.dispatch import without_autocast
from seqblocks.kernels.mlstm_reference import MLSTMState, largest_exponent

__all__ = ["MLSTMElement", "mlstm_algebra", "mlstm_memoroid"]

READOUTS = ("paper", "unit_floor")
NOTHING = -1e9  # the stabiliser before the first token: finite, so that no difference is NaN


class MLSTMElement(NamedTuple):
    """f, m [B, S, H]; C [B, S, H, DK, DV]; n [B, S, H, DK]."""

    f: Tensor
    C: Tensor
    n: Tensor
    m: Tensor


def elements(x: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> MLSTMElement:
    """One element per token of (q, k, v, i, f)."""
    _, k, v, i, f = x
    return MLSTMElement(F.logsigmoid(f), k.unsqueeze(-1) * v.unsqueeze(-2), k, i)


def combine(a: MLSTMElement, b: MLSTMElement) -> MLSTMElement:
    """a earlier, b later."""
    m = torch.maximum(a.m + b.f, b.m)
    old, new = torch.exp(a.m + b.f - m).unsqueeze(-1), torch.exp(b.m - m).unsqueeze(-1)
    C = old.unsqueeze(-1) * a.C + new.unsqueeze(-1) * b.C
    return MLSTMElement(a.f + b.f, C, old * a.n + new * b.n, m)


def mlstm_algebra(readout: str = "paper", eps: float = 1e-6) -> Memoroid:
    """The memoroid on (q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]), without an initial carry."""

    def read(state: MLSTMElement, x: Any) -> Tensor:
        q = x[0] / x[0].shape[-1] ** (0.5 if readout == "paper" else 1)
        top = (q.unsqueeze(-1) * state.C).sum(-2)
        size = (q * state.n).sum(-1).abs()
        if readout == "paper":
            floor = torch.exp((-state.m).clamp(max=largest_exponent(state.m.dtype)))
        else:
            floor = torch.ones_like(size)
        return top / (torch.maximum(size, floor) + eps).unsqueeze(-1)

    return Memoroid(elements, combine, read)


def mlstm_memoroid(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *,
    state: MLSTMState | tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    readout: str = "paper",
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, MLSTMState]:
    """`mlstm`, in parallel over the sequence by an associative scan, with the exponential input gate.

    Arguments and result as `mlstm`; readout: "paper" or "unit_floor". Without a state the stabiliser starts at -1e9, so
    that a reset is exactly a fresh start; `mlstm` starts it at 0, which moves h by about eps. A state of either
    continues in the other. Computes in float32, in float64 if any input is; memory as `associative_scan` says.

    Raises ValueError for shapes that do not fit and readouts that do not exist, BackendError (see dispatch).
    """
    if readout not in READOUTS:
        raise ValueError(f"mlstm_memoroid: readout is one of {', '.join(READOUTS)}, not {readout!r}")
    B, S, H, DK = q.shape
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or i.shape != q.shape[:3] or f.shape != q.shape[:3]:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v, i, f))
        raise ValueError(f"mlstm_memoroid wants q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]; got {shapes}")
    double = any(t.dtype == torch.float64 for t in (q, k, v, i, f))
    dtype = torch.float64 if double else torch.float32
    x = tuple(t.to(dtype) for t in (q, k, v, i, f))
    if state is None:
        fresh = x[4].new_full((B, H), NOTHING)
        state = MLSTMState(fresh.new_zeros(B, H, DK, v.shape[-1]), fresh.new_zeros(B, H, DK), fresh)
    C, n, m = (t.to(dtype) for t in state)
    if S == 0:
        h, last = v.new_empty(v.shape), MLSTMState(C, n, m)
    else:
        with without_autocast(q.device.type):
            h, end = mlstm_algebra(readout, eps)(
                x, state=MLSTMElement(torch.zeros_like(m), C, n, m), return_state=True, resets=resets,
                reverse=reverse, backend=backend,
            )
        h, last = h.to(v.dtype), MLSTMState(end.C, end.n, end.m)
    return (h, last) if return_state else h
