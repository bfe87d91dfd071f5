"""The state of a model as a cache for `generate` of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from seqblocks import state as states
from seqblocks.errors import RunError
from seqblocks.state import States


class Recorded:
    """A state and the tokens read since, from which the state after some of these tokens can be recomputed."""

    def __init__(self, state: States | None, tokens: Tensor, resets: Tensor | None) -> None:
        self.state, self.tokens, self.resets = state, tokens, resets

    def extended(self, tokens: Tensor, resets: Tensor | None) -> Recorded:
        """Return a record with further tokens appended."""
        joined = None
        if self.resets is not None or resets is not None:
            parts = ((self.tokens, self.resets), (tokens, resets))
            joined = torch.cat([torch.zeros_like(x, dtype=torch.bool) if r is None else r for x, r in parts], 1)
        return Recorded(self.state, torch.cat([self.tokens, tokens], 1), joined)

    def first(self, count: int) -> Recorded:
        """Return a record of the first `count` tokens."""
        return Recorded(self.state, self.tokens[:, :count], None if self.resets is None else self.resets[:, :count])


class StateCache:
    """The state after `seen` tokens of each sequence, including padding. Each call returns a new one.

    It implements the cache interface of `generate`. Its size does not grow with the tokens, except for attention.
    """

    is_compileable = False
    is_croppable = True
    is_linear = (False,)  # for each layer: whether it knows no number of tokens; this cache knows one

    def __init__(self, state: States | None = None, seen: int = 0, recorded: Recorded | None = None) -> None:
        self.state, self.seen = state, seen
        self.recorded = recorded  # the tokens that `crop` can remove
        self.recording = recorded is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read."""
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1

    def activate_past_recording(self) -> None:
        """Record what `crop` needs from the next call on: one earlier state, and the tokens since then."""
        self.recording = True

    def crop(self, length: Any) -> None:
        """Keep the first `length` tokens; a number below 1 instead removes that many tokens from the end.

        Raises RunError for tokens before the latest `crop`, or in a prompt whose call returned only its last logits.
        """
        length = length.item() if isinstance(length, Tensor) and length.numel() == 1 else length
        if not isinstance(length, int):
            raise RunError(f"crop needs a number of tokens, not {length!r}")
        count = self.seen - length if length > 0 else -length
        if count <= 0:
            self.recorded = None
            return
        known = 0 if self.recorded is None else self.recorded.tokens.shape[1]
        if self.recorded is None or count > known:
            how = "Call activate_past_recording() before reading the tokens"
            raise RunError(f"cannot remove {count} tokens from a state: only {known} are recorded. {how}")
        self.recorded, self.state = self.recorded.first(known - count), None
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with the sequences `beam_idx` [n], in that order, for beam search."""
        if self.state is not None:
            self.state = states.index_select(self.state, beam_idx)
        if self.recorded is not None:
            own = self.recorded
            state = None if own.state is None else states.index_select(own.state, beam_idx)
            self.recorded = Recorded(state, own.tokens[beam_idx], None if own.resets is None else own.resets[beam_idx])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with the sequences `indices` [n]."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: Any) -> None:
        """Repeat each sequence, for several continuations. Raises RunError for an invalid number."""
        if not isinstance(repeats, int) or repeats < 1:
            raise RunError(f"repeats must be a whole number of at least 1, not {repeats!r}")
        rows = self.recorded.tokens if self.recorded else next(iter(tree_leaves(self.state)), None)
        if rows is not None:
            self.reorder_cache(torch.arange(len(rows), device=rows.device).repeat_interleave(repeats))
