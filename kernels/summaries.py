"""Summaries of the effect that tokens have on the state of a recurrence, as functions of the state.

They are the chunk summaries of an associative scan. Sequence parallelism needs them: each device summarises its tokens
before it knows the state, which then passes through all devices in a few short operations. B batch, S tokens (at least
one).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from seqblocks.kernels.mlstm.reference import CLOSED


class SinceReset(NamedTuple):
    """The tokens on which the last state depends: those since the last reset, or all.

    tokens [B, S] bool: which tokens these are. begins [B] bool: whether any sequence begins among all the tokens, so
    that the last state does not depend on the initial one. Both are None without resets.
    """

    tokens: Tensor | None
    begins: Tensor | None

    def masked(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] with zeros for all other tokens, even where x is not finite."""
        if self.tokens is None:
            return x
        return x.masked_fill(~self.tokens.view(*self.tokens.shape, *[1] * (x.dim() - 2)), 0)

    def before(self, state: Tensor) -> Tensor:
        """Return an initial state [B, ...] with zeros for the rows in which a sequence begins."""
        if self.begins is None:
            return state
        return state.masked_fill(self.begins.view(-1, *[1] * (state.dim() - 1)), 0)


def since_reset(resets: Tensor | None) -> SinceReset:
    """Return the tokens on which the last state depends. resets [B, S]: true where a token begins a sequence."""
    if resets is None:
        return SinceReset(None, None)
    later = resets.flip(1).cumsum(1).flip(1) - resets.long()  # the number of sequences that begin after each token
    return SinceReset(later == 0, resets.any(1))


def decay_after(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums [B, S, ...] of the log decays over the tokens after each token, and the sums [B, ...] over all.

    decay [B, S, ...]: log decays. The sums are computed in float64, because those of the first tokens have many terms,
    and are returned in the dtype of decay.
    """
    exact = decay.double()
    both = exact.flip(1).cumsum(1).flip(1)
    after = torch.cat([both[:, 1:], torch.zeros_like(both[:, :1])], 1)  # both - exact is NaN for a decay of -inf
    return after.to(decay.dtype), both[:, 0].to(decay.dtype)


def _computed_in(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


class Affine(NamedTuple):
    """The map state -> exp(decay) state + added, from the state [B, ...] before some tokens to the one after them.

    decay None: no decay.
    """

    since: SinceReset
    decay: Tensor | None
    added: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        before = self.since.before(state)
        return self.added + (before if self.decay is None else self.decay.exp() * before)


def of_linear_attention(k: Tensor, v: Tensor, decay: Tensor | None, resets: Tensor | None = None) -> Affine:
    """Summarise tokens of `linear_attention` with the rule "add", for a state [B, HV, K, V].

    k [B, S, H, K], v [B, S, HV, V]; decay [B, S, HV] or [B, S, HV, K], log decays, or None.
    """
    since = since_reset(resets)
    dtype = _computed_in(k, v, *(() if decay is None else (decay,)))
    k, v = (since.masked(x).to(dtype) for x in (k, v))
    k, total = k.repeat_interleave(v.shape[2] // k.shape[2], 2), None
    if decay is not None:
        decay = since.masked(decay).to(dtype)
        after, total = decay_after(decay if decay.dim() == 4 else decay.unsqueeze(-1))
        k, total = after.exp() * k, total.unsqueeze(-1)
    return Affine(since, total, torch.einsum("bshk,bshv->bhkv", k, v))


class OfMLSTM(NamedTuple):
    """The map from the mLSTM's state (C, n, m) before some tokens to the one after them.

    decay [B, H]: the logarithm of the total decay. C [B, H, DK, DV], n [B, H, DK]: the terms the tokens add, divided by
    exp(m), m [B, H].
    """

    since: SinceReset
    decay: Tensor
    C: Tensor
    n: Tensor
    m: Tensor | None  # None with a sigmoid input gate, where the m of the state stays 0

    def __call__(self, C: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        C, n, m = (self.since.before(x) for x in (C, n, m))
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
    """Summarise tokens of `mlstm`: k [B, S, H, DK], v [B, S, H, DV], gate pre-activations i, f [B, S, H]."""
    since = since_reset(resets)
    dtype = _computed_in(k, v, i, f)
    k, v, i, f = (since.masked(x).to(dtype) for x in (k, v, i, f))
    after, total = decay_after(since.masked(logsigmoid(f)))
    weight = (i if input_gate == "exp" else logsigmoid(i)) + after
    if since.tokens is not None:
        weight = weight.masked_fill(~since.tokens.unsqueeze(-1), -torch.inf)
    most = weight.amax(1).clamp(min=CLOSED) if input_gate == "exp" else None
    k = (weight if most is None else weight - most.unsqueeze(1)).exp().unsqueeze(-1) * k
    return OfMLSTM(since, total, torch.einsum("bshk,bshv->bhkv", k, v), k.sum(1), most)
