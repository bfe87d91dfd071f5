"""Gated linear recurrence: a state per channel that decays and receives an input at each token.

B batch, S sequence, E channels. With g the log decay of a token and h [E] the state:

    h' = e^g h + x          y = h'

HGRN (arXiv:2311.04823), RG-LRU (arXiv:2402.19427), minGRU and minLSTM (arXiv:2410.01201) are this recurrence; they
differ in how they compute the decay and the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.positions import check_resets

__all__ = ["gated_recurrence"]

dispatch.load_implementations("gated_recurrence")


def gated_recurrence(
    x: Tensor, decay: Tensor, *,
    state: Tensor | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    x, decay [B, S, E]; decay: the log decay, at most 0. state [B, E]: zeros if not given. resets [B, S] bool: true
    where a token is the first of a new sequence, in scan order; the state before it is zero. reverse: scan from right
    to left.

    Returns y [B, S, E] in x's dtype, and with return_state the state after the last token. The state is float32,
    float64 if any input is. The torch implementation has first derivatives only.

    Raises ValueError for shapes that do not fit, BackendError (see dispatch).
    """
    if x.dim() != 3 or decay.shape != x.shape:
        raise ValueError(f"gated_recurrence expects x, decay [B, S, E]; got {list(x.shape)}, {list(decay.shape)}")
    dtype = torch.float64 if torch.float64 in (x.dtype, decay.dtype) else torch.float32
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype)
    elif state.shape != (x.shape[0], x.shape[2]):
        raise ValueError(f"gated_recurrence expects a state {[x.shape[0], x.shape[2]]}; got {list(state.shape)}")
    check_resets("gated_recurrence", resets, x.shape[:2])
    run = dispatch.choose(
        "gated_recurrence", backend, {"x": x, "decay": decay, "state": state, "resets": resets},
        dtype=numerics.computed_in(x, decay), resets=resets is not None, reverse=reverse,
    )  # fmt: skip
    marks = None if resets is None else resets.bool()
    y, last = run(x.to(dtype), decay.to(dtype), state.to(dtype), marks, reverse)
    return (y.to(x.dtype), last) if return_state else y.to(x.dtype)
