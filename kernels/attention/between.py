"""Causal attention to keys and values of another rate, such as those of whole blocks of tokens.

B batch, S queries, T new keys, K cached keys, H query heads, G heads of keys and values, D head width, DV width of the
values. S queries span the same time as T keys: if a key is made of four tokens and a query of one, S = 4 T.

    y[s] = sum_t p[s, t] v[t]      p[s, :] = softmax of scale q[s] . k[t] over the visible t, or 0 if there is none

A query sees the keys that are complete when it ends: those with (t + 1) S <= (s + 1) T. The block in which it ends is
its own one; with a window, it sees this block, if complete, and the window - 1 before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqblocks.kernels import dispatch
from seqblocks.kernels.attention.interface import AttentionState, check_scores, check_state, last_tokens
from seqblocks.kernels.attention.scores import Scores
from seqblocks.kernels.attention.torch import BLOCK, masked
from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast


def attention_between(
    q: Tensor, k: Tensor, v: Tensor, *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    logsumexp: bool = False,
    state: AttentionState | tuple[Tensor, ...] | None = None,
    keep: int | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, AttentionState]:
    """Attend to complete keys of another rate.

    q [B, S, H, D], k [B, T, G, D], v [B, T, G, DV], G a divisor of H; each call begins with a whole number of keys and
    of queries. window: visible keys, the one in which the query ends included. scale, soft_cap, sinks, logsumexp: as
    for `attention`; the log is -1e30 for queries that see no key. state: that of the previous call, whose length counts
    keys. keep: keys in the returned state (default: window - 1 with a window, else as many as in the given state, else
    all).

    Returns y [B, S, H, DV or DV + 1] in v's dtype, 0 for queries that see no key, and with return_state the next state.
    Raises ValueError for shapes that do not fit, BackendError (see dispatch).
    """
    _check(q, k, v, window)
    check_scores(q.shape[2], soft_cap, None, sinks)
    T, past, before = k.shape[1], 0, None
    keys, values = k, v
    if state is not None:
        check_state(state, k, v, window)
        past, before = state[0].shape[1], state[2]
        keys, values = torch.cat([state[0].to(k.dtype), k], 1), torch.cat([state[1].to(v.dtype), v], 1)
    inputs = {"q": q, "k": keys, "v": values, "sinks": sinks}
    run = dispatch.choose("attention_between", backend, inputs, dtype=q.dtype)
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap, None, sinks, logsumexp=logsumexp)
    y: Tensor = run(q, keys, values, T, before, window, scores)
    if not return_state:
        return y
    if keep is None:
        keep = window - 1 if window is not None else keys.shape[1] if state is None else past
    length = torch.full((q.shape[0],), T, device=q.device) if before is None else before + T
    kind_k, kind_v = (k.dtype, v.dtype) if state is None else (state[0].dtype, state[1].dtype)
    keys, values = (last_tokens(x, keep, own=state is not None) for x in (keys, values))
    return y, AttentionState(keys.to(kind_k), values.to(kind_v), length)


def visible(
    query: Tensor, key: Tensor, queries: int, keys: int, before: Tensor | None, window: int | None
) -> Tensor:
    """Return which keys each query sees, [B or 1, queries, keys].

    query: numbers of queries of this call; key: of keys, negative for cached ones. queries, keys: how many there are
    in this call. before [B]: keys before this call, of which fewer may be cached.
    """
    ends = (query + 1) * keys  # in units in which a key takes `queries`
    seen = ((key + 1) * queries <= ends.unsqueeze(-1)).unsqueeze(0)
    if window is not None:
        own = (ends + queries - 1) // queries - 1
        seen = seen & (key > own.unsqueeze(-1) - window)
    return seen if before is None else seen & (key >= -before[:, None, None])


def _reference(
    q: Tensor, k: Tensor, v: Tensor, new: int, before: Tensor | None, window: int | None, scores: Scores
) -> Tensor:
    """Return y [B, S, H, DV], given k [B, K + T, G, D], v [B, K + T, G, DV] and T, explicitly for all pairs."""
    S, T = q.shape[1], k.shape[1]
    if S == 0:
        return _of_no_tokens(q, k, v, scores)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    query, key = torch.arange(S, device=q.device), torch.arange(T, device=q.device) - (T - new)
    seen = visible(query, key, S, new, before, window).unsqueeze(1)
    none = ~seen.any(-1, keepdim=True)
    with without_autocast(q.device.type):
        keys, values = (x.to(exact).repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        products = torch.einsum("bshd,bthd->bhst", q.to(exact), keys)
        if scores.logsumexp:
            read = scores.visible(scores.scale * products, seen | none, None)
            return scores.with_logsumexp(read, values.transpose(1, 2), none).transpose(1, 2)
        p = scores.weights(scores.scale * products, seen | none, None).masked_fill(none, 0.0)
        return torch.einsum("bhst,bthd->bshd", p, values).to(v.dtype)


def _torch(
    q: Tensor, k: Tensor, v: Tensor, new: int, before: Tensor | None, window: int | None, scores: Scores
) -> Tensor:
    """Return the same in blocks of queries, which read the keys that they can see."""
    S, T = q.shape[1], k.shape[1]
    past = T - new
    if S == 0 or q.shape[0] == 0:
        return _of_no_tokens(q, k, v, scores)

    def block(query: Tensor, a: int, b: int, first: int, last: int) -> Tensor:
        key = torch.arange(first, last, device=q.device) - past
        seen = visible(torch.arange(a, b, device=q.device), key, S, new, before, window)
        none = ~seen.any(-1, keepdim=True)  # a softmax of nothing would be NaN
        return masked(query, k[:, first:last], v[:, first:last], seen | none, None, scores, none)

    if unknown(S) or S <= BLOCK:
        return block(q, 0, S, 0, T)
    parts = []
    for a in range(0, S, BLOCK):
        b = min(a + BLOCK, S)
        last = past + max(b * new // S, 1 - past)  # at least one key, which need not be visible
        first = 0 if window is None else max(past + -(-(a + 1) * new // S) - window, 0)
        parts.append(checkpoint(block, q[:, a:b], a, b, min(first, last - 1), last, use_reentrant=False))
    return torch.cat(parts, 1)


def _of_no_tokens(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    return empty_with_gradients(scores.nothing(q, v), q, k, v, scores.sinks)


def _check(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[3] != k.shape[3] or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            "attention expects q [B, S, H, D], k [B, T, G, D], v [B, T, G, DV] with G a divisor of H; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1; got {window}")
    # torch.compile compares no truth values of sizes
    if not unknown(q.shape[1]) and (k.shape[1] > 0 if q.shape[1] == 0 else k.shape[1] == 0):
        raise ValueError(f"attention: {q.shape[1]} queries cannot span the time of {k.shape[1]} keys")


register("attention_between", "reference", _reference, always("all pairs, wherever torch runs"))
register("attention_between", "torch", _torch, always("torch's fused attention, on any device"))
