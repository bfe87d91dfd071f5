"""The sLSTM: a scalar memory per channel, exponential gates and recurrent connections within each head.

Source: arXiv:2405.04517, eq. 8-18.

B batch, S sequence, H heads, D width of a head; gates in the order i, f, z, o. With (i, f, z, o) = x + R y + b:

    l  = m + log sigmoid(f)          m' = max(i, l), or i before the first token
    c' = exp(l - m') c + exp(i - m') tanh(z)          n' = exp(l - m') n + exp(i - m')
    y' = sigmoid(o) c' / n'

Implementations: `reference.py` (the definition), `torch.py` (the same loop with a handwritten derivative), `triton`
(all tokens in one launch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.positions import check_resets
from seqblocks.kernels.slstm.reference import SLSTMState

__all__ = ["SLSTMState", "slstm"]

dispatch.load_implementations("slstm")


def slstm(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor, *,
    state: SLSTMState | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, SLSTMState]:
    """Run the cell over a sequence.

    i, f, z, o [B, S, H * D]: gate pre-activations before recurrence and bias. recurrent [H, D, 4, D]: maps the output
    of a head to its four gates. bias [4, H, D]. state: y, c, n, m, each [B, H, D]; zeros if not given.
    resets [B, S] bool: true where a token is the first of a new sequence, in the order of the scan.
    reverse: scan from right to left.

    Returns y [B, S, H * D] in the dtype of i, and with return_state also the state after the last token. The cell is
    computed in float32, or in float64 if any input is float64; the Triton implementation multiplies y and recurrent in
    bfloat16 if all gates are bfloat16. The torch and Triton implementations have first derivatives only; "reference"
    has derivatives of any order. Raises ValueError for wrong shapes, BackendError (see dispatch).
    """
    _check(i, f, z, o, recurrent, bias, resets)
    H, D = recurrent.shape[:2]
    inputs = (i, f, z, o, recurrent, bias)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    if state is None:
        state = SLSTMState(*(i.new_zeros(i.shape[0], H, D, dtype=dtype) for _ in range(4)))
    elif len(state) != 4 or any(s.shape != (i.shape[0], H, D) for s in state):
        raise ValueError(f"slstm expects a state y, c, n, m of shape [{i.shape[0]}, {H}, {D}] each")
    dispatch.check_real("slstm", dict(zip(SLSTMState._fields, state, strict=True)))
    state = SLSTMState(*(s.to(dtype) for s in state))
    sizes = {"batch": i.shape[0], "length": i.shape[1]}
    names = ("i", "f", "z", "o", "recurrent", "bias", "y", "c", "n", "m", "resets")
    run = dispatch.choose(
        "slstm", backend, dict(zip(names, (*inputs, *state, resets), strict=True)), sizes,
        dtype=numerics.computed_in(*inputs), heads=H, head_dim=D,
        resets=resets is not None, reverse=reverse,
    )
    y, last = run(
        (i, f, z, o), recurrent.to(dtype), bias.to(dtype), state, None if resets is None else resets.bool(), reverse
    )
    y = y.flatten(-2).to(i.dtype)
    return (y, last) if return_state else y


def _check(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor, resets: Tensor | None
) -> None:
    if recurrent.dim() != 4 or recurrent.shape[1:] != (recurrent.shape[1], 4, recurrent.shape[1]):
        raise ValueError(f"slstm expects recurrent [H, D, 4, D]; got {list(recurrent.shape)}")
    H, D = recurrent.shape[:2]
    if bias.shape != (4, H, D):
        raise ValueError(f"slstm expects bias [4, {H}, {D}]; got {list(bias.shape)}")
    if i.dim() != 3 or i.shape[2] != H * D or not f.shape == z.shape == o.shape == i.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (i, f, z, o))
        raise ValueError(f"slstm expects gates [B, S, {H * D}]; got {shapes}")
    check_resets("slstm", resets, i.shape[:2])
