"""The mLSTM as a memoroid: one element per token, and an associative operation that combines elements.

B batch, S sequence, H heads, DK width of query and key, DV width of value. Per head, with ls = log sigmoid:

    element   f = ls(f)    C = k v^T    n = k    m = i
    a + b     f = fa + fb    m = max(ma + fb, mb)    C = e^(ma + fb - m) Ca + e^(mb - m) Cb    n likewise
    read      h = q~ C / (max(|q~ . n|, floor) + eps),  q~ = q / sqrt(DK)

`paper`: floor = exp(-m), which is 1 for the unscaled state (arXiv:2405.04517). `unit_floor`: floor = 1 for the scaled
state and q~ = q / DK, as in early releases of memorax. With it h depends on the stabiliser, so it is only for
compatibility.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import dispatch
from seqblocks.kernels.associative_scan import Memoroid, as_an_op, associative_scan
from seqblocks.kernels.associative_scan import torch as associative_scan_torch
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.mlstm.interface import checked_state
from seqblocks.kernels.mlstm.reference import CLOSED, MLSTMState, largest_exponent
from seqblocks.kernels.numerics import empty_with_gradients, no_second_derivative, without_autocast
from seqblocks.kernels.positions import check_resets
from seqblocks.kernels.resets import nonfinite

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
    """Return one element per token of (q, k, v, i, f)."""
    _, k, v, i, f = x
    return MLSTMElement(F.logsigmoid(f), k.unsqueeze(-1) * v.unsqueeze(-2), k, i.clamp(min=CLOSED))


def combine(a: MLSTMElement, b: MLSTMElement) -> MLSTMElement:
    """Combine an earlier element a and a later element b."""
    m = torch.maximum(a.m + b.f, b.m)
    old, new = torch.exp(a.m + b.f - m).unsqueeze(-1), torch.exp(b.m - m).unsqueeze(-1)
    C = old.unsqueeze(-1) * a.C + new.unsqueeze(-1) * b.C
    return MLSTMElement(a.f + b.f, C, old * a.n + new * b.n, m)


# ------------------------------------------------------------------------------------------------ in compiled code
#
# The scan as one op, so that a graph is valid for all lengths, with the first derivative of `combine`. With G_t and g_t
# the gradients of C_t and m_t, w the derivative of the maximum m_t by its first argument, and a, b the gradients of the
# exponents of the old and the new term,
#
#     G_t = dC_t + e^(m_t + f_(t+1) - m_(t+1)) G_(t+1)    g_t = dm_t + a_(t+1) + w_(t+1) (g_(t+1) - a_(t+1) - b_(t+1))
#
# which are scans too, in the other direction.


@custom_op("seqblocks::mlstm_memoroid")
def _scan(
    f: Tensor, C: Tensor, n: Tensor, m: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the states after each element."""
    with without_autocast(f.device.type):
        states, _ = associative_scan(combine, MLSTMElement(f, C, n, m), resets=resets, backend="torch")
    return tuple(x.clone() for x in states) if f.shape[1] == 1 else tuple(states)


@_scan.register_fake
def _scan_fake(f, C, n, m, resets):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (f, C, n, m))


@custom_op("seqblocks::mlstm_memoroid_backward")
def _scan_backward(
    df: Tensor, dC: Tensor, dn: Tensor, dm: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor, resets: Tensor | None,
    Cs: Tensor, ns: Tensor, ms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of f, C, n, m from those of the states Cs, ns, ms."""
    with without_autocast(f.device.type):
        goes_on = torch.ones_like(f[:, 1:], dtype=torch.bool)
        if resets is not None:
            goes_on = goes_on & ~resets[:, 1:, None]

        def within(x: Tensor) -> Tensor:
            """Return x with zeros at resets, even where it is not finite."""
            return torch.where(goes_on, x, 0.0)

        carried = ms[:, :-1] + f[:, 1:]
        old = within(torch.exp(carried - ms[:, 1:]))
        new = torch.exp(m[:, 1:] - ms[:, 1:])
        GC, Gn = _back(old, dC, dn)
        gC, gn = GC[:, 1:], Gn[:, 1:]
        a = within(old * ((gC * Cs[:, :-1]).sum((3, 4)) + (gn * ns[:, :-1]).sum(3)))
        b = within(new * ((gC * C[:, 1:]).sum((3, 4)) + (gn * n[:, 1:]).sum(3)))
        w = within((carried > m[:, 1:]).to(f.dtype) + 0.5 * (carried == m[:, 1:]))
        (Gf,) = _back(goes_on.to(f.dtype), df)
        (Gm,) = _back(w, torch.cat([dm[:, :-1] + a - w * (a + b), dm[:, -1:]], 1))
        q = Gm[:, 1:] - a - b
        grad_f = torch.cat([Gf[:, :1], Gf[:, 1:] + a + w * q], 1)
        grad_m = torch.cat([Gm[:, :1], b + (1 - w) * q], 1)
        grad_C = torch.cat([GC[:, :1], gC * new[..., None, None]], 1)
        return grad_f, grad_C, torch.cat([Gn[:, :1], gn * new[..., None]], 1), grad_m


def _back(decay: Tensor, *values: Tensor) -> list[Tensor]:
    """Return G_t = values_t + decay_t G_(t+1), by a scan from the right.

    decay [B, S - 1, H], values [B, S, H, ...].
    """
    def step(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        decays = (b[0].view(*b[0].shape, *[1] * (x.dim() - 3)) for x in a[1:])
        past = (torch.where(decay == 0, 0.0, decay * x) for decay, x in zip(decays, a[1:], strict=True))
        return [a[0] * b[0], *(x + y for x, y in zip(past, b[1:], strict=True))]

    decay = torch.cat([decay, decay.new_zeros(decay.shape[0], 1, decay.shape[2])], 1)
    return [x.flip(1) for x in associative_scan_torch.run(step, [x.flip(1) for x in (decay, *values)])[1:]]


@_scan_backward.register_fake
def _scan_backward_fake(df, dC, dn, dm, f, C, n, m, resets, Cs, ns, ms):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (f, C, n, m))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output[1:])


def _differentiate(ctx, df, dC, dn, dm):  # type: ignore[no-untyped-def]
    return *_scan_backward(df, dC, dn, dm, *ctx.saved_tensors), None


_scan.register_autograd(_differentiate, setup_context=_save)
_scan_backward.register_autograd(no_second_derivative("mlstm_memoroid", "compiled"))
as_an_op[combine] = lambda leaves, resets: list(_scan(*leaves, resets))


def mlstm_algebra(readout: str = "paper", eps: float = 1e-6) -> Memoroid:
    """Return the memoroid for inputs (q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]), without initial carry."""

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
    """Run `mlstm` with the exponential input gate, in parallel over the sequence by an associative scan.

    Arguments and result as for `mlstm`; readout: "paper" or "unit_floor". Without a state, the stabiliser starts at
    -1e9, so that a reset is equivalent to a new sequence; `mlstm` starts it at 0, which changes h by about eps. States
    are interchangeable with those of `mlstm`. Computes in float32, or in float64 if any input is float64; for memory
    see `associative_scan`.

    Raises ValueError for wrong shapes or an unknown readout, BackendError (see dispatch).
    """
    _check(q, k, v, i, f, readout)
    dispatch.check_real("mlstm_memoroid", {"q": q, "k": k, "v": v, "i": i, "f": f})
    check_resets("mlstm_memoroid", resets, q.shape[:2])
    double = any(t.dtype == torch.float64 for t in (q, k, v, i, f))
    dtype = torch.float64 if double else torch.float32
    x = tuple(t.to(dtype) for t in (q, k, v, i, f))
    sizes = (q.shape[0], *q.shape[2:], v.shape[-1])
    C, n, m = _fresh(x) if state is None else checked_state(state, sizes, dtype)
    found = None
    if resets is not None and torch.is_grad_enabled() and q.shape[1] and nonfinite.suspected(*x, C, n, m):
        found = nonfinite.find(x[0], x[1], x[2], x[3], x[4], (C, n, m), resets, reverse)
        x, (C, n, m) = tuple(found.clean(*x)), found.clean_state(C, n, m)
    if q.shape[1] == 0:
        h, last = empty_with_gradients(v, *x).to(v.dtype), MLSTMState(C, n, m)
    else:
        with without_autocast(q.device.type):
            h, end = mlstm_algebra(readout, eps)(
                x, state=MLSTMElement(torch.zeros_like(m), C, n, m), return_state=True, resets=resets,
                reverse=reverse, backend=backend,
            )
        h, last = h.to(v.dtype), MLSTMState(end.C, end.n, end.m)
    if found is not None:
        h, (C, n, m) = nonfinite.marked(found, h, last)
        last = MLSTMState(C, n, m)
    return (h, last) if return_state else h


def _check(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, readout: str) -> None:
    if readout not in READOUTS:
        raise ValueError(f"mlstm_memoroid: readout must be one of {', '.join(READOUTS)}, not {readout!r}")
    fits = q.dim() == v.dim() == 4 and k.shape == q.shape and v.shape[:3] == i.shape == f.shape == q.shape[:3]
    if not fits:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v, i, f))
        raise ValueError(f"mlstm_memoroid expects q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]; got {shapes}")


def _fresh(x: tuple[Tensor, ...]) -> MLSTMState:
    """Return the state before the first token, for the inputs q, k, v, i, f."""
    q, _, v, _, f = x
    B, _, H, DK = q.shape
    m = f.new_full((B, H), NOTHING)
    return MLSTMState(m.new_zeros(B, H, DK, v.shape[-1]), m.new_zeros(B, H, DK), m)
