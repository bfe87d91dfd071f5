"""Keep NaN and infinities within the sequence that contains them, see `kernels/resets/nonfinite.py`.

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
    """Replace nonfinite values by zeros in q, k, v, other tensors per token and the state.

    Returns the tensors and a record of the outputs that depend on nonfinite values, or the unchanged tensors and None
    if there are no resets or all values are finite. A decay of -inf counts as finite.
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
    """Masks of tokens [B, S, HV] and initial states [B, HV] whose gradients are undefined."""

    tokens: Tensor
    states: Tensor

    def fill(
        self, lines: Sequence[Tensor], per_token: Sequence[Tensor], state: Maybe, bonus: Maybe = None
    ) -> None:
        """Fill undefined gradients of q, k, v, other tensors per token, the state and the bonus with NaN, in place."""
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
    """Return the tokens and states with undefined gradients, or None if all values are finite."""
    if resets is None or not resets.numel() or not nonfinite.suspected(*tensors, dy, dlast):
        return None
    v = tensors[2]
    assert v is not None
    _, found = cleaned(tensors, resets, reverse)
    if found is None:  # only gradients are nonfinite
        found = nonfinite.found_at(
            torch.zeros(v.shape[:3], dtype=torch.bool, device=v.device),
            torch.zeros(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device), resets.bool(), reverse,
        )
    return Undefined(*found.without_gradient(dy, dlast))
