"""Causal attention to blocks of keys that each query selects by scores.

B batch, S queries, T = n C new keys in C blocks of n, K cached keys, H query heads, G heads of keys and values, I heads
that score, J heads of scored keys, D, DV and E widths of heads.

    score[s, c] = sum of a(scale index_q[s, i] . index_k[c, i]) weight[s, i] over the heads i of a group

A query reads the `top` blocks with the highest scores of those that are complete when it ends, and of these the keys
that are complete. The first of two equal scores is the higher one. Blocks that are always read count among them.

The choice has no gradient. All pairs are computed, in blocks of queries; the keys that are not selected are masked.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqblocks.kernels.attention.between import visible
from seqblocks.kernels.attention.interface import check_scores, last_tokens
from seqblocks.kernels.attention.scores import Scores
from seqblocks.kernels.attention.torch import BLOCK, masked
from seqblocks.kernels.dispatch import check_real
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast

Activation = Literal["softmax", "relu", "none"]


class SelectedState(NamedTuple):
    """Cache of keys, values and scored keys, newest last: k [B, K, G, D], v [B, K, G, DV], blocks [B, K / n, J, E];
    length [B] int64: keys so far."""

    k: Tensor
    v: Tensor
    blocks: Tensor
    length: Tensor


class Choice(NamedTuple):
    """How blocks are chosen. groups: of heads, each of which chooses; block: keys of one, n; first, last: blocks that
    are always read, from the beginning and up to the one in which a query ends."""

    top: int
    groups: int
    block: int = 1
    first: int = 0
    last: int = 0
    activation: Activation = "softmax"
    scale: float = 1.0


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, choice: Choice, *,
    weight: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    logsumexp: bool = False,
    state: SelectedState | tuple[Tensor, ...] | None = None,
    keep: int | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, SelectedState]:
    """Attend to the keys in selected blocks.

    q [B, S, H, D], k [B, T, G, D], v [B, T, G, DV], index_q [B, S, I, E], index_k [B, C, J, E], weight [B, S, I]; each
    call begins with whole blocks and queries. `choice.groups` must divide H, I, and G or be a multiple of it; G divides
    H and J divides I. scale, soft_cap, sinks, logsumexp: as for `attention_between`. keep: blocks in the returned
    state (default: as many as in the given state, else all).

    Returns y [B, S, H, DV or DV + 1], 0 for queries that read no key, and with return_state the next state.
    """
    _check(q, k, v, index_q, index_k, choice)
    inputs = {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k, "weight": weight, "sinks": sinks}
    check_real("selected_attention", inputs | {f"state[{at}]": x for at, x in enumerate(state or ())})
    check_scores(q.shape[2], soft_cap, None, sinks)
    if state is not None:
        _check_state(state, k, v, index_k, choice.block)
    new, past, before = k.shape[1], 0, None
    keys, values, index = k, v, index_k
    if state is not None:
        past, before = state[2].shape[1], state[3]
        caches = zip(state[:3], (k, v, index_k), strict=True)
        keys, values, index = (torch.cat([old.to(x.dtype), x], 1) for old, x in caches)
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap, None, sinks, logsumexp=logsumexp)
    y = _attend(q, keys, values, index_q, index, weight, new, before, choice, scores)
    if not return_state:
        return y
    keep = keep if keep is not None else index.shape[1] if state is None else past
    length = torch.full((q.shape[0],), new, device=q.device) if before is None else before + new
    kinds = [x.dtype for x in (state[:3] if state is not None else (k, v, index_k))]
    sizes = keep * choice.block, keep * choice.block, keep
    kept = [last_tokens(x, size, own=state is not None) for x, size in zip((keys, values, index), sizes, strict=True)]
    last_k, last_v, blocks = (x.to(kind) for x, kind in zip(kept, kinds, strict=True))
    return y, SelectedState(last_k, last_v, blocks, length)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index: Tensor, weight: Tensor | None, new: int,
    before: Tensor | None, choice: Choice, scores: Scores,
) -> Tensor:
    """Return y, given all keys and the number of new ones."""
    S, T = q.shape[1], k.shape[1]
    if S == 0 or q.shape[0] == 0:
        return empty_with_gradients(scores.nothing(q, v), q, k, v, scores.sinks)
    known = None if before is None else before // choice.block

    def block(query: Tensor, by: Tensor, factor: Tensor | None, a: int, b: int) -> Tensor:
        at = torch.arange(a, b, device=q.device)
        with torch.no_grad():
            chosen = _chosen(by, index, factor, at, S, new // choice.block, known, choice)
            key = torch.arange(T, device=q.device) - (T - new)
            seen = visible(at, key, S, new, before, None).unsqueeze(1)
            seen = seen & chosen.repeat_interleave(choice.block, -1)  # [B, groups, queries, keys]
        each = q.shape[2] // choice.groups
        parts = []
        for group in range(choice.groups):
            heads = slice(group * each, (group + 1) * each)
            shared = _heads_of(k.shape[2], group, choice.groups)
            none = ~seen[:, group].any(-1, keepdim=True)
            own = scores if scores.sinks is None else scores._replace(sinks=scores.sinks[heads])
            parts.append(masked(
                query[:, :, heads], k[:, :, shared], v[:, :, shared], seen[:, group] | none, None, own, none
            ))  # fmt: skip
        return torch.cat(parts, 2)

    if unknown(S) or S <= BLOCK:
        return block(q, index_q, weight, 0, S)
    made = []
    for a in range(0, S, BLOCK):
        b = min(a + BLOCK, S)
        factor = None if weight is None else weight[:, a:b]
        made.append(checkpoint(block, q[:, a:b], index_q[:, a:b], factor, a, b, use_reentrant=False))
    return torch.cat(made, 1)


def _heads_of(count: int, group: int, groups: int) -> slice:
    """Return the heads of keys and values that a group of query heads reads."""
    return slice(group * count // groups, max((group + 1) * count // groups, group * count // groups + 1))


def _chosen(
    index_q: Tensor, index: Tensor, weight: Tensor | None, query: Tensor, queries: int, blocks: int,
    before: Tensor | None, choice: Choice,
) -> Tensor:
    """Return which blocks each query reads, [B, groups, queries, blocks]."""
    total = index.shape[1]
    block = torch.arange(total, device=index.device) - (total - blocks)
    complete = visible(query, block, queries, blocks, before, None).unsqueeze(1)
    own = ((query + 1) * blocks + queries - 1) // queries - 1
    number = block if before is None else block + before[:, None, None, None]
    reached = (block <= own[:, None]) & (number >= 0)
    forced = reached & ((number < choice.first) | (block > own[:, None] - choice.last))
    with without_autocast(index.device.type):
        exact = torch.float64 if index.dtype == torch.float64 else torch.float32
        keys = index.to(exact).repeat_interleave(index_q.shape[2] // index.shape[2], 2)
        found = choice.scale * torch.einsum("bsie,bcie->bisc", index_q.to(exact), keys)
        if choice.activation == "softmax":
            found = torch.softmax(found.masked_fill(~complete, -torch.inf), -1)
            found = found.masked_fill(~complete, 0.0)  # a softmax of nothing is NaN
        elif choice.activation == "relu":
            found = found.relu()
        if weight is not None:
            found = found * weight.to(exact).transpose(1, 2).unsqueeze(-1)
        found = found.unflatten(1, (choice.groups, -1)).sum(2)
    found = found.masked_fill(~complete, -torch.inf).masked_fill(forced, torch.inf)
    best = torch.sort(found, dim=-1, descending=True, stable=True).indices[..., : choice.top]
    chosen = torch.zeros_like(found, dtype=torch.bool).scatter(-1, best, True)
    return chosen & (complete | forced)


def _check(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, choice: Choice) -> None:
    """Raise ValueError for shapes that do not fit."""
    tensors = (q, k, v, index_q, index_k)
    fits = all(x.dim() == 4 and x.shape[0] == q.shape[0] for x in tensors)
    fits = fits and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3] and index_q.shape[3] == index_k.shape[3]
    fits = fits and not (q.shape[2] % k.shape[2] or index_q.shape[2] % index_k.shape[2])
    fits = fits and not (q.shape[2] % choice.groups or index_q.shape[2] % choice.groups)
    if not fits or (k.shape[2] % choice.groups and choice.groups % k.shape[2]):
        given = ", ".join(str(list(x.shape)) for x in tensors)
        raise ValueError(
            "selected_attention expects q [B, S, H, D], k [B, T, G, D], v [B, T, G, DV], index_q [B, S, I, E], "
            f"index_k [B, C, J, E] with groups a divisor of H and I; got {given} and {choice.groups} groups"
        )
    if not unknown(k.shape[1]) and k.shape[1] != index_k.shape[1] * choice.block:
        raise ValueError(f"selected_attention: {k.shape[1]} keys are not {index_k.shape[1]} blocks of {choice.block}")


def _check_state(
    state: SelectedState | tuple[Tensor, ...], k: Tensor, v: Tensor, index_k: Tensor, block: int
) -> None:
    """Raise ValueError unless a state has the shapes for new keys."""
    blocks = state[2].shape[1] if len(state) > 2 and state[2].dim() > 1 else 0
    caches = ((k, blocks * block), (v, blocks * block), (index_k, blocks))
    shapes = [*((x.shape[0], size, *x.shape[2:]) for x, size in caches), k.shape[:1]]
    if [tuple(t.shape) for t in state] != [tuple(shape) for shape in shapes]:
        expected, found = (", ".join(str(list(x)) for x in each) for each in (shapes, (t.shape for t in state)))
        raise ValueError(f"selected_attention expects a state of shapes {expected}; got {found}")
