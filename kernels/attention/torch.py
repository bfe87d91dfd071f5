"""Attention by torch's fused kernel, whose memory does not grow with the square of the length.

With a window, the sequence is cut into blocks of the window's length, and a block sees itself and its neighbours. For
packed sequences without a window, queries run in blocks whose masks are recomputed in the backward pass. The fused
kernel has no soft cap, linear biases or sinks: with these, weights are computed explicitly, block by block.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from seqblocks.kernels.attention.kept import Kept
from seqblocks.kernels.attention.reference import later, sees
from seqblocks.kernels.attention.scores import Scores, product
from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import forward_mode, unknown, watched
from seqblocks.kernels.numerics import empty_with_gradients, in_float32, no_second_derivative

BLOCK = 512


def run(
    q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, causal: bool, window: int | None, scores: Scores,
    kept: Kept | None = None,
) -> Tensor:
    """Attend, with the arguments of `attention_reference.run`."""
    S, T = q.shape[1], k.shape[1]
    if S == 0 or q.shape[0] == 0:
        return empty_with_gradients(scores.nothing(q, v), q, k, v, scores.slopes, scores.sinks, scores.bias)
    if kept is not None:
        assert window is not None
        return _with_first(q, k, v, sequence, window, scores, kept)
    if window is not None and (unknown(S) or window < S):
        return _windowed(q, k, v, sequence, causal, window, scores)
    if scores.plain and sequence is None and (window is None or window >= S):
        return _fused(q, k, v, None, causal, scores.scale)
    place = torch.arange(T, device=q.device)
    if unknown(S) or S <= BLOCK:
        at = torch.arange(T - S, T, device=q.device)  # a memory may have fewer keys than queries
        mask = sees(at, place, sequence, causal, window)
        return masked(q, k, v, mask, _distance(at, place, scores), scores)

    def block(query: Tensor, a: int, b: int, first: int, last: int) -> Tensor:
        at, keys = torch.arange(a, b, device=q.device), place[first:last]
        mask = sees(at, keys, sequence, causal, window)
        some = scores.of(a - (T - S), b - (T - S))
        return masked(query, k[:, first:last], v[:, first:last], mask, _distance(at, keys, scores), some)

    parts = []
    for a in range(T - S, T, BLOCK):
        b = min(a + BLOCK, T)
        query = q[:, a - (T - S) : b - (T - S)]
        last = b if causal else T
        parts.append(checkpoint(block, query, a, b, 0, last, use_reentrant=False))
    return torch.cat(parts, 1)


def _with_first(
    q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, window: int, scores: Scores, kept: Kept
) -> Tensor:
    """Attend in blocks of queries, with the keys of their windows and the first ones.

    If resets separate sequences within a row, each block reads all keys before it.
    """
    S, T = q.shape[1], k.shape[1]

    def block(query: Tensor, at: Tensor, keys: Tensor | None) -> Tensor:
        some_k, some_v = (k, v) if keys is None else (k[:, keys], v[:, keys])
        keys = torch.arange(T, device=q.device) if keys is None else keys
        mask = sees(at, keys, sequence, True, window, kept)
        return masked(query, some_k, some_v, mask, _distance(at, keys, scores, kept), scores)

    place = torch.arange(T - S, T, device=q.device)
    if unknown(S) or S <= BLOCK:
        return block(q, place, None)
    parts = []
    for a in range(0, S, BLOCK):
        b = min(a + BLOCK, S)
        first = T - S + min(kept.first, a) if kept.single else T - S + a  # all that is cached, and the first new tokens
        near = torch.arange(max(first, T - S + a - window + 1), T - S + b, device=q.device)
        keys = torch.cat([torch.arange(first, device=q.device), near])
        parts.append(checkpoint(block, q[:, a:b], place[a:b], keys, use_reentrant=False))
    return torch.cat(parts, 1)


def _distance(query: Tensor, key: Tensor, scores: Scores, kept: Kept | None = None) -> Tensor | None:
    """Return the number of tokens between queries and keys [B or 1, queries, keys], if their scores depend on it."""
    return None if scores.slopes is None else later(query, key, kept).abs()


def masked(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, distance: Tensor | None, scores: Scores, none: Tensor | None = None
) -> Tensor:
    """Attend with a mask [B or 1, S, T].

    distance [B or 1, S, T]: tokens between query and key, for slopes. none [B or 1, S, 1]: which queries see no key.
    """
    if scores.plain:
        y = _fused(q, k, v, seen, False, scores.scale)
        return y if none is None else y.masked_fill(none.unsqueeze(-1), 0.0)
    # A power of two as factor of q prevents overflow of products in float16, and rounds nothing.
    rest, exponent = math.frexp(scores.scale)
    H, G = q.shape[2], k.shape[2]
    if G != H:
        k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    # Heads before the batch, which may have an open size: exporters cannot divide by it.
    queries, keys, values = (x.movedim(2, 0) for x in (q * 2.0**exponent, k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scores.with_heads(H, 1)
    # no names for products of queries and keys: they would stay alive
    if scores.logsumexp:
        visible = scores.visible(rest * product(queries, keys.transpose(2, 3)).to(wide), seen, distance)
        return scores.with_logsumexp(visible, values, none).movedim(0, 2)
    p = scores.weights(rest * product(queries, keys.transpose(2, 3)).to(wide), seen, distance)
    y = product(p.to(v.dtype), values, rounds=True).movedim(0, 2).to(v.dtype)
    return y if none is None else y.masked_fill(none.unsqueeze(-1), 0.0)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Call torch's fused attention; mask [B or 1, S, T]."""
    return in_float32(lambda q, k, v: _attended(q, k, v, mask, causal, scale), q, k, v)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    D, DV = q.shape[-1], v.shape[-1]
    if D != DV:  # torch would compute all pairs explicitly; padding with zeros changes neither scores nor values
        q, k, v = (pad(x, [0, max(D, DV) - x.shape[-1]]) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH) if forward_mode() else nullcontext():  # fused kernels have reverse mode only
        y = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, scale=scale,
            attn_mask=None if mask is None else mask.unsqueeze(1), enable_gqa=bool(q.shape[2] != k.shape[2]),
        )
    if y.requires_grad and not watched():
        _refuse_second_derivative(y)
    return y[..., :DV].transpose(1, 2).to(v.dtype)


def _refuse_second_derivative(y: Tensor) -> None:
    """Let the second derivative of a fused attention raise our error instead of torch's, which names an internal op."""
    node = y.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_marked)


def _marked(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():  # no graph of the backward pass is created
        return None
    return tuple(None if g is None else _FirstDerivative.apply(g) for g in grads)


class _FirstDerivative(torch.autograd.Function):
    """Return a gradient unchanged. It cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(no_second_derivative("attention", "torch"))


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, sequence: Tensor | None, causal: bool, window: int, scores: Scores
) -> Tensor:
    """Attend in blocks of `window` queries, each with the keys from one window before the block to its end.

    If not causal, the keys extend to one window after the block. Exported programs must not depend on the length: for
    these, axes are cut by `unfold`, whose backward pass is slower. Blocks have at least two tokens.
    """
    B, S, H, _ = q.shape
    past = k.shape[1] - S
    block = max(2, window)
    any_length = unknown(S)
    blocks = (S + block - 1) // block + (1 if any_length else 0)
    after = blocks * block - S
    spare = 0 if causal else block
    span = 2 * block + spare
    device = q.device

    def cut(x: Tensor, fill: float = 0) -> Tensor:
        """Cut keys into [B, blocks, span, ...], from one block before the first query to the last visible key."""
        have = min(past, block)
        x = x[:, past - have :]
        rest = [0, 0] * (x.dim() - 2)
        x = pad(x, [*rest, block - have, after + spare], value=fill)
        return x.unfold(1, span, block).movedim(-1, 2)

    def queries(x: Tensor, fill: float = 0) -> Tensor:
        """Cut queries into blocks [B, blocks, block, ...]."""
        x = pad(x, [*[0, 0] * (x.dim() - 2), 0, after], value=fill)
        return x.unfold(1, block, block).movedim(-1, 2) if any_length else x.unflatten(1, (blocks, block))

    owner = torch.zeros(B, k.shape[1], dtype=torch.long, device=device) if sequence is None else sequence
    keys_of = cut(owner, -1)
    queries_of = queries(owner[:, past:], -1)
    place = torch.arange(span, device=device)
    near = sees(place[block : 2 * block], place, None, causal, window)
    seen = near & (queries_of.unsqueeze(-1) == keys_of.unsqueeze(-2))
    # Padding of the last block sees padding, so that no row of the mask is empty.
    y = masked(
        queries(q).flatten(0, 1),
        cut(k).flatten(0, 1),
        cut(v).flatten(0, 1),
        seen.flatten(0, 1),
        _distance(place[block : 2 * block], place, scores),
        scores,
    )
    y = y.reshape(B, blocks, block, H, scores.width(v)).flatten(1, 2)
    return pad(y, [0, 0, 0, 0, 0, -after]) if any_length else y[:, :S]


register("attention", "torch", run, always("torch's fused attention, on any device"))
