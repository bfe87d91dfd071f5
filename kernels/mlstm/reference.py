"""The mLSTM cell by its definition, token by token (arXiv:2405.04517, eq. 19-27).

B batch, S sequence, H heads, DK width of query and key, DV width of value.
C [B, H, DK, DV] memory, n [B, H, DK] normaliser, m [B, H] stabiliser: C and n are stored divided by exp(m).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import nonfinite

CLOSED = -1e30  # in place of the logarithm of a closed input gate, -inf, so that no difference of two is NaN


class MLSTMState(NamedTuple):
    """The state of an mLSTM. float32, or float64 if the inputs are."""

    C: Tensor  # [B, H, DK, DV]
    n: Tensor  # [B, H, DK]
    m: Tensor  # [B, H]


def largest_exponent(dtype: torch.dtype) -> float:
    """Return the largest x for which exp(x) and small multiples of it are finite: 87 in float32, 708 in float64."""
    return 87.0 if dtype == torch.float32 else 708.0


def cell(
    q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: MLSTMState, *,
    eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, MLSTMState]:
    """Return h [B, H, DV] of one token, and the new state.

    q, k [B, H, DK] with q scaled, v [B, H, DV], log_i, log_f [B, H]; all in the dtype of the state.
    """
    C, n, m = state
    m_new = torch.maximum(log_f + m, log_i) if input_gate == "exp" else torch.zeros_like(m)
    keep = torch.exp(log_f + m - m_new)[..., None]
    write = torch.exp(log_i - m_new)[..., None]
    # C' = keep C + write k v^T
    C = torch.addcmul(keep[..., None] * C, (write * k)[..., None], v[..., None, :])
    n = keep * n + write * k
    h = (q[..., None] * C).sum(-2)  # Autocast would round a matrix product.
    if normalize:
        floor = torch.exp((-m_new).clamp(max=largest_exponent(m.dtype)))[..., None]
        h = h / (torch.maximum((q * n).sum(-1, keepdim=True).abs(), floor) + eps)
    return h, MLSTMState(C, n, m_new)


def log_input_gate(i: Tensor, input_gate: str) -> Tensor:
    """Return the log of the input gate: the pre-activation i for "exp", log sigmoid(i) for "sigmoid"."""
    return i if input_gate == "exp" else F.logsigmoid(i)


def run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None, *,
    reverse: bool, chunk_size: int | None, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, MLSTMState | None]:
    """Run the scan token by token. Arguments as for `mlstm`, checked; i, f and state have the dtype of the state."""
    with without_autocast(q.device.type):
        # In the forward pass, a reset replaces the old state, even if it is not finite. In the backward pass, zero
        # gradients would be multiplied by it, which gives NaN.
        forward_alone = not torch.is_grad_enabled() or q.numel() == 0
        if resets is None or forward_alone or not nonfinite.suspected(q, k, v, i, f, *(state or ())):
            return _scan(q, k, v, i, f, state, resets, reverse, eps, input_gate, normalize)
        found = nonfinite.find(q, k, v, i, f, state or (), resets, reverse)
        q, k, v, i, f = found.clean(q, k, v, i, f)
        state = None if state is None else MLSTMState(*found.clean_state(*state))
        h, last = _scan(q, k, v, i, f, state, resets, reverse, eps, input_gate, normalize)
        h, parts = nonfinite.marked(found, h, last)
        return h, MLSTMState(*parts)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None,
    reverse: bool, eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, MLSTMState]:
    dtype = f.dtype
    B, S, H, DK = q.shape
    if state is None:
        state = MLSTMState(f.new_zeros(B, H, DK, v.shape[-1]), f.new_zeros(B, H, DK), f.new_zeros(B, H))
    log_i, log_f = log_input_gate(i, input_gate), F.logsigmoid(f)
    scaled = q.to(dtype) * DK**-0.5
    k, values = k.to(dtype), v.to(dtype)
    if S == 0:
        return empty_with_gradients(v, q, k, i, f, v), state

    def token(state: States, x: list[Tensor]) -> tuple[Tensor, States]:
        q, k, v, log_i, log_f = x
        return cell(
            q, k, v, log_i, log_f, MLSTMState(*state), eps=eps, input_gate=input_gate, normalize=normalize
        )

    h, last = token_by_token(token, state, (scaled, k, values, log_i, log_f), resets, reverse)
    return h.to(v.dtype), MLSTMState(*last)


register("mlstm", "reference", run, always("the recurrent definition runs wherever torch does"))
