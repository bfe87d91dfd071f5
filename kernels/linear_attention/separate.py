"""NaN and infinities stay within the sequence that they are in: see `kernels/resets/nonfinite.py`.

H heads of q and k, HV heads of values, each of which has its own state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.resets import along, nonfinite

Maybe = Tensor | None


def cleaned(
    tensors: Sequence[Maybe], resets: Maybe, reverse: bool
) -> tuple[list[Any], nonfinite.Found | None]:
    """The tensors, q, k, v, those per token, and the state, with zeros for what is not finite; and what depends on it.

    As they are without resets, or where all is finite. A decay of -inf is no fault.
    """
    if resets is None or not resets.numel() or not nonfinite.suspected(*tensors):
        return list(tensors), None
    q, k, v, decay, *others, state = tensors
    assert v is not None
    faults = [None if x is None else ~x.isfinite() for x in (q, k, v)]
    faults += [None if decay is None else ~(decay < torch.inf)]
    faults += [None if x is None else ~x.isfinite() for x in (*others, state)]
    clean = [None if x is None or mask is None else torch.where(mask, 0.0, x).to(x.dtype)
             for x, mask in zip(tensors, faults, strict=True)]
    tokens = torch.zeros(v.shape[:3], dtype=torch.bool, device=v.device)
    for mask in faults[:-1]:
        if mask is not None:
            found = mask.flatten(3).any(-1) if mask.dim() > 3 else mask
            tokens |= found.repeat_interleave(v.shape[2] // found.shape[2], 2)
    first = torch.zeros_like(tokens[:, 0]) if faults[-1] is None else faults[-1].flatten(2).any(-1)
    return clean, nonfinite.found_at(tokens, first, resets.bool(), reverse)


class Undefined(NamedTuple):
    """Tokens [B, S, HV] and initial states [B, HV] without a gradient."""

    tokens: Tensor
    states: Tensor

    def fill(
        self, lines: Sequence[Tensor], per_token: Sequence[Tensor], state: Maybe, bonus: Maybe = None
    ) -> None:
        """NaN, in place, into gradients of q, k, v, of other tensors per token, of the state and of the bonus."""
        for x in (*lines, *per_token):
            mask = self.tokens
            if x.shape[2] != mask.shape[2]:
                mask = mask.unflatten(2, (x.shape[2], -1)).any(-1)
            x.masked_fill_(along(mask, x), torch.nan)
        if state is not None:
            state.masked_fill_(along(self.states, state), torch.nan)
        if bonus is not None:
            heads = self.tokens.unflatten(2, (bonus.shape[0], -1)).any(-1).flatten(0, 1).any(0)
            bonus.masked_fill_(heads.unsqueeze(-1), torch.nan)


def without_gradient(
    dy: Maybe, dlast: Maybe, tensors: Sequence[Maybe], resets: Maybe, reverse: bool
) -> Undefined | None:
    """Of which tokens and states the gradients are undefined; None where all is finite."""
    if resets is None or not resets.numel() or not nonfinite.suspected(*tensors, dy, dlast):
        return None
    v = tensors[2]
    assert v is not None
    _, found = cleaned(tensors, resets, reverse)
    if found is None:  # gradients alone are not finite
        found = nonfinite.found_at(
            torch.zeros(v.shape[:3], dtype=torch.bool, device=v.device),
            torch.zeros(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device), resets.bool(), reverse,
        )
    return Undefined(*found.without_gradient(dy, dlast))
