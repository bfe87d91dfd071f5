"""The mLSTM chunk by chunk, with a handwritten derivative.

Within a chunk, every token reads the earlier tokens of the chunk through a small matrix, as in attention; earlier
chunks are read through the state. Time is linear in S, and memory that of the inputs: there is no S x S matrix. The
backward pass recomputes the states between chunks, and W if it is larger than an input.

B batch, S sequence, H heads, DK / DV head widths, L chunk length, K number of chunks, s <= t two tokens of a chunk
in the order of the scan. Per head:

    b_t   sum of log f from the chunk's start (or the last reset) to t
    e_s   = log i_s - b_s                so that log i_s + log f_(s+1) + ... + log f_t = b_t + e_s
    p_t   stabiliser of the state before the segment of token t: the m before the chunk, or 0 after a reset
    x_t   = max(max_{s<=t} e_s, p_t)     so that m_t = b_t + x_t: exactly the recurrent m
    D_ts  = exp(e_s - x_t)               weight of token s for token t; 0 across a reset
    u_t   = exp(p_t - x_t)               weight of the chunk's initial state; 0 after a reset
    W     = (q k^T / sqrt(DK)) * D
    num_t = W_t v + u_t q_t C / sqrt(DK)          den_t = sum_s W_ts + u_t q_t n / sqrt(DK)
    h_t   = num_t / (max(|den_t|, exp(-m_t)) + eps)

and the state after the chunk is row L of the same: C' = u_L C + sum_s D_Ls k_s v_s^T, m' = m_L.
A sigmoid input gate has m = 0, that is x_t = -b_t, and the floor 1.

b, e, p and x have one value per token and are always float64, so that a difference of two e has a rounding error of
2^-53 of the sum, not 2^-24. D and other tensors of its size are computed from differences, in the dtype of the state.

So b does not have to restart with each chunk. It is summed over several chunks, and within these p is the x of the last
token before the chunk. That x only determines the scale of the stored state; no weight depends on it, so it has no
gradient.

The scan may run from right to left. Large tensors are then read in memory order; only the gates, which are small, are
flipped, and D is upper triangular.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.custom_op import custom_op, is_seen
from seqblocks.kernels.mlstm import reference as mlstm_reference
from seqblocks.kernels.mlstm.backward import backward
from seqblocks.kernels.mlstm.forward import Kept, empty_state, forward
from seqblocks.kernels.mlstm.reference import MLSTMState
from seqblocks.kernels.numerics import no_second_derivative


@custom_op("seqblocks::mlstm")
def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h and the last C, n, m, which are empty tensors unless return_state."""
    return forward(
        q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize, return_state, save=False
    )[0]


@_mlstm.register_fake
def _mlstm_fake(  # type: ignore[no-untyped-def]
    q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize, return_state
):
    return v.new_empty(v.shape), *empty_state(q, v, f, return_state)


@custom_op("seqblocks::mlstm_backward")
def _mlstm_backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, i, f and the initial C, n, m, from those of h and the last C, n, m.

    Without an initial state, its gradients are empty tensors.
    """
    return backward(
        dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
    )


@_mlstm_backward.register_fake
def _mlstm_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
):
    return *(x.new_empty(x.shape) for x in (q, k, v, i, f)), *empty_state(q, v, f, C0 is not None)


def _save(ctx, inputs, output, kept=None):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # Unused outputs then cost nothing.
    ctx.save_for_backward(*inputs[:9], *(() if kept is None else kept.tensors()))
    ctx.plan, ctx.counts = (None, None) if kept is None else (kept.plan, kept.counts)
    ctx.options, ctx.return_state = inputs[9:14], inputs[14]


def _saving_gates(ctx, *inputs):  # type: ignore[no-untyped-def]
    output, kept = forward(*inputs)
    _save(ctx, inputs, output, kept)
    return output


def _differentiate(ctx, dh, dC, dn, dm):  # type: ignore[no-untyped-def]
    if not ctx.return_state:
        dC = dn = dm = None
    if dh is None and dC is None and dn is None and dm is None:
        return (None,) * 15
    tensors = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
    saved, kept = tensors[:9], tensors[9:]
    arguments: list[Any] = [dh, dC, dn, dm, *saved, *ctx.options]
    if kept and not torch.is_grad_enabled() and not is_seen((dh, dC, dn, dm)):
        grads = backward(*[*arguments, Kept.of(ctx.plan, ctx.counts, kept)])
    else:
        grads = _mlstm_backward(*arguments)
    state = [g if given is not None else None for g, given in zip(grads[5:], saved[5:8], strict=True)]
    return *grads[:5], *state, *(None,) * 7


_mlstm.register_autograd(_differentiate, setup_context=_save, forward=_saving_gates)
_mlstm_backward.register_autograd(no_second_derivative("mlstm", "torch"))


def run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None, *,
    reverse: bool, chunk_size: int | None, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, MLSTMState | None]:
    """Run the scan chunk by chunk. Arguments as for `mlstm`, checked; i, f and state have the dtype of the state."""
    if q.shape[1] == 1 and not torch.compiler.is_compiling():  # For one token, the reference takes a third of the time.
        return mlstm_reference.run(
            q, k, v, i, f, state, resets, reverse=reverse, chunk_size=chunk_size, eps=eps, input_gate=input_gate,
            normalize=normalize, return_state=return_state,
        )
    C, n, m = (None, None, None) if state is None else state
    h, C, n, m = _mlstm(
        q, k, v, i, f, C, n, m, resets, reverse, chunk_size or 0, eps, input_gate, normalize, return_state
    )
    return h, MLSTMState(C, n, m) if return_state else None


register("mlstm", "torch", run, always("chunkwise, on any device"), by_hand=True)
