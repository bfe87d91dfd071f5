"""What some tokens do to the state of a recurrence, whatever it is: the chunk summaries of an associative scan.

A sequence whose parts are on several devices needs them: each device summarises its tokens before it knows the state,
and the state then passes all of them in a few short operations. B batch, S tokens (at least one).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Piece(NamedTuple):
    """The tokens that the last state depends on: those from the last reset on, or all.

    tokens [B, S], begins [B] bool: whether a sequence begins in them, so that nothing is left of the state before;
    both None without resets.
    """

    tokens: Tensor | None
    begins: Tensor | None

    def only(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] with zeros for other tokens, whatever they hold."""
        if self.tokens is None:
            return x
        return x.masked_fill(~self.tokens.view(*self.tokens.shape, *[1] * (x.dim() - 2)), 0)

    def before(self, state: Tensor) -> Tensor:
        """Return a state [B, ...] with zeros where a sequence begins."""
        if self.begins is None:
            return state
        return state.masked_fill(self.begins.view(-1, *[1] * (state.dim() - 1)), 0)


def last_piece(resets: Tensor | None) -> Piece:
    """Return the tokens that the last state depends on. resets [B, S]: true where a token begins a sequence."""
    if resets is None:
        return Piece(None, None)
    later = resets.flip(1).cumsum(1).flip(1) - resets.long()  # how many sequences begin after each token
    return Piece(later == 0, resets.any(1))


def decay_after(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums [B, S, ...] of the log decays of the tokens after each token, and those [B, ...] of all.

    In float64: the first tokens follow many.
    """
    exact = decay.double()
    both = exact.flip(1).cumsum(1).flip(1)
    return both - exact if decay.dtype == torch.float64 else (both - exact).to(decay.dtype), both[:, 0].to(decay.dtype)


def _computed_in(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


class Affine(NamedTuple):
    """state' = exp(decay) state + added, for a state [B, ...] after the tokens of a piece."""

    piece: Piece
    decay: Tensor | None
    added: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        before = self.piece.before(state)
        return self.added + (before if self.decay is None else self.decay.exp() * before)


def of_linear_attention(k: Tensor, v: Tensor, decay: Tensor | None, resets: Tensor | None = None) -> Affine:
    """Summarise tokens of `linear_attention` by the rule add, for a state [B, HV, K, V].

    k [B, S, H, K], v [B, S, HV, V], decay [B, S, HV] or [B, S, HV, K].
    """
    piece = last_piece(resets)
    dtype = _computed_in(k, v, *(() if decay is None else (decay,)))
    k, v = (piece.only(x).to(dtype) for x in (k, v))
    k, total = k.repeat_interleave(v.shape[2] // k.shape[2], 2), None
    if decay is not None:
        decay = piece.only(decay).to(dtype)
        after, total = decay_after(decay if decay.dim() == 4 else decay.unsqueeze(-1))
        k, total = after.exp() * k, total.unsqueeze(-1)
    return Affine(piece, total, torch.einsum("bshk,bshv->bhkv", k, v))


class OfMLSTM(NamedTuple):
    """What tokens do to the state of the mLSTM: the logarithm of the decay [B, H], and what they add, over exp(m)."""

    piece: Piece
    decay: Tensor
    C: Tensor
    n: Tensor
    m: Tensor | None  # None: the state's stays 0

    def __call__(self, C: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        C, n, m = (self.piece.before(x) for x in (C, n, m))
        if self.m is None:
            before, added, most = self.decay.exp(), torch.ones_like(self.decay), m
        else:
            most = torch.maximum(self.decay + m, self.m)
            before, added = (self.decay + m - most).exp(), (self.m - most).exp()
        C = before[..., None, None] * C + added[..., None, None] * self.C
        return C, before[..., None] * n + added[..., None] * self.n, most


def of_mlstm(
    k: Tensor, v: Tensor, i: Tensor, f: Tensor, resets: Tensor | None = None, input_gate: str = "exp"
) -> OfMLSTM:
    """Summarise tokens of `mlstm`: k [B, S, H, DK], v [B, S, H, DV], gates i, f [B, S, H] before their functions."""
    piece = last_piece(resets)
    dtype = _computed_in(k, v, i, f)
    k, v, i, f = (piece.only(x).to(dtype) for x in (k, v, i, f))
    after, total = decay_after(piece.only(logsigmoid(f)))
    weight = (i if input_gate == "exp" else logsigmoid(i)) + after
    if piece.tokens is not None:
        weight = weight.masked_fill(~piece.tokens.unsqueeze(-1), -torch.inf)
    most = weight.amax(1) if input_gate == "exp" else None
    k = (weight if most is None else weight - most.unsqueeze(1)).exp().unsqueeze(-1) * k
    return OfMLSTM(piece, total, torch.einsum("bshk,bshv->bhkv", k, v), k.sum(1), most)
