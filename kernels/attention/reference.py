"""Reference implementation of attention: all pairs, with an explicit softmax.

B batch, S queries, T = past + S keys, H heads, G heads of keys and values, D head width, DV width of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels.attention.kept import Kept
from seqblocks.kernels.attention.scores import Scores
from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import without_autocast


def sees(
    query: Tensor, key: Tensor, sequence: Tensor | None, causal: bool, window: int | None, kept: Kept | None = None
) -> Tensor:
    """Return which keys each query sees, [B or 1, queries, keys], from their places [queries] and [keys].

    sequence [B, T]: sequence index of each key.
    """
    ahead = later(query, key, kept)
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        near = ahead.abs() < window
        seen = seen & (near if kept is None else near | (kept.places[:, key] < kept.first).unsqueeze(-2))
    if sequence is not None:
        seen = seen & (sequence[:, query].unsqueeze(-1) == sequence[:, key].unsqueeze(-2))
    return seen


def later(query: Tensor, key: Tensor, kept: Kept | None) -> Tensor:
    """Return by how many tokens each key is later than each query, [B or 1, queries, keys], from their places."""
    if kept is None:
        return (key - query.unsqueeze(-1)).unsqueeze(0)
    return kept.places[:, key].unsqueeze(-2) - kept.places[:, query].unsqueeze(-1)


def run(
    q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, causal: bool, window: int | None,
    scores: Scores, kept: Kept | None = None,
) -> Tensor:
    """Return y [B, S, H, DV], given q [B, S, H, D], k [B, T, G, D], v [B, T, G, DV] and sequence [B, T]."""
    S, T = q.shape[1], k.shape[1]
    if scores.bias is not None and scores.bias.dim() == 4:
        scores = scores._replace(bias=scores.bias.movedim(1, 0))
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    place = torch.arange(T, device=q.device)
    with without_autocast(q.device.type):
        wide = (x.to(exact).repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        keys, values = wide
        products = torch.einsum("bshd,bthd->bhst", q.to(exact), keys)
        query = torch.arange(T - S, T, device=q.device)  # a memory (not causal) may have fewer keys than queries
        seen = sees(query, place, sequence, causal, window, kept).unsqueeze(1)
        distance = later(query, place, kept).abs().unsqueeze(1)
        if scores.logsumexp:
            visible = scores.visible(scores.scale * products, seen, distance)
            return scores.with_logsumexp(visible, values.transpose(1, 2)).transpose(1, 2)
        p = scores.weights(scores.scale * products, seen, distance)
        return torch.einsum("bhst,bthd->bshd", p, values).to(v.dtype)


register("attention", "reference", run, always("all pairs, wherever torch runs"))
