"""Masks of tokens: the first ones of sequences, and those that no gradient reaches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqblocks.kernels.dispatch.compiled import watched


def reset_times(resets: Tensor | None, S: int) -> list[bool]:
    """Return for each of S tokens whether any sequence of the batch begins there; the others need no mask."""
    if resets is None:
        return [False] * S
    if resets.is_cuda and torch.cuda.is_current_stream_capturing():
        return [True] * S
    found: list[bool] = resets.any(0).tolist()
    return found


def dead_tokens(
    grads: Sequence[Tensor | None], of_states: Sequence[Tensor | None], resets: Tensor, reverse: bool
) -> Tensor:
    """Return a mask [B, S] of the tokens whose sequence is unused, so that no gradient reaches it.

    grads [B, S, ...]: gradients of the outputs; of_states [B, ...]: gradients of the states after the last token.
    """
    B, S = resets.shape
    marks = resets.bool()
    count = (marks.flip(1).cumsum(1).flip(1) if reverse else marks.cumsum(1)) if S else marks.long()
    read = torch.zeros(B, S + 1, dtype=torch.int32, device=resets.device)
    for grad in grads:
        if grad is not None and grad.numel():
            read.scatter_add_(1, count, grad.reshape(B, S, -1).any(-1).int())
    for grad in of_states:
        if grad is not None and grad.numel():
            last = count[:, :1] if reverse else count[:, -1:]
            read.scatter_add_(1, last, grad.reshape(B, 1, -1).any(-1).int())
    return read.gather(1, count) == 0


def backward_marks(
    grads: Sequence[Tensor | None], of_states: Sequence[Tensor | None], resets: Tensor | None, reverse: bool
) -> Tensor | None:
    """Return resets as bytes for the backward kernels: 1 where a sequence begins, plus 2 where the token is dead."""
    if resets is None:
        return None
    dead = dead_tokens(grads, of_states, resets, reverse)
    return torch.add(resets.to(torch.uint8), dead, alpha=2).contiguous()


def finite(*tensors: Tensor) -> bool:
    """Return whether all values are known to be finite. Always false off the CPU, where reading would synchronise."""
    if watched() or any(x.device.type != "cpu" for x in tensors):
        return False
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return all(bool(x.detach().sum(dtype=wide).isfinite()) for x in tensors)


def where_true(mask: Tensor, x: Tensor, known: bool) -> Tensor:
    """Return x with 0 where the mask is false. known: x is finite, so that a product, which is faster, can be used."""
    return x * mask if known else x.masked_fill(~mask, 0.0)


def dead_at_start(dead: Tensor, reverse: bool) -> Tensor:
    """Return whether the token that reads the carried state is dead: [B]."""
    return dead[:, -1] if reverse else dead[:, 0]


def along(mask: Tensor, x: Tensor) -> Tensor:
    """Reshape a mask [B] or [B, S] to broadcast over x [B, S, ...]."""
    return mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim()))
