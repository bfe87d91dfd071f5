"""Attention of one token over a cache of keys and values, without gradients.

B batch, H heads, G heads of keys and values, D head width, DV width of the values, K cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqblocks.kernels.attention.scores import Scores
from seqblocks.kernels.positions import prepare_turning, rotary_rates
from seqblocks.token_function import TokenFunction


def prepare(
    heads: int, shared: int, rotary: float | None, scale: float | None, window: bool,
    chunk: int | None = None, soft_cap: float | None = None, slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> TokenFunction:
    """Return a function of keys [B, K, G * D], values [B, K, G * DV], length [B], q [B, H * D], k [B, G * D], v.

    It returns y [B, H * DV] and the next keys, values and length, with the same values as `attention`; v [B, G * DV].
    With `window`, the token sees itself and the whole cache (with `chunk`, what belongs to its chunk). Otherwise the
    cache has room for all tokens, including the current one. The other arguments are those of `attention`.
    """
    made: dict[tuple[int, int], tuple[Callable[..., Tensor] | None, Tensor]] = {}  # by D and the number of visible keys

    def constants(D: int, seen: int, device: torch.device) -> tuple[Callable[..., Tensor] | None, Tensor]:
        if (D, seen) not in made:
            turn = None if rotary is None else prepare_turning(rotary_rates(D, rotary, device))
            made[D, seen] = turn, torch.arange(seen - 1, -1, -1, device=device)
        return made[D, seen]

    def one(
        keys: Tensor, values: Tensor, length: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        B, K, _ = keys.shape
        width = q.shape[1] // heads
        turn, age = constants(width, K + window, keys.device)
        if turn is not None:
            both = torch.cat([q, k], 1).view(B, heads + shared, -1)
            q, k = turn(both, length).split([heads, shared], 1)
        latest, all_values = (_appended(*each, K if window else K - 1) for each in ((keys, k), (values, v)))
        earlier = length if chunk is None else length % chunk  # visible tokens
        scores = Scores(width**-0.5 if scale is None else scale, soft_cap, slopes, sinks)
        y = _attend(
            q.reshape(B, shared, heads // shared, -1),
            latest.view(B, len(age), shared, -1).transpose(1, 2),
            all_values.view(B, len(age), shared, -1).transpose(1, 2),
            (age <= earlier.unsqueeze(1)).view(B, 1, 1, -1),
            age,
            scores,
        )
        if window:
            latest, all_values = (
                x.narrow(1, 1, K).clone(memory_format=torch.contiguous_format) for x in (latest, all_values)
            )
        return y.flatten(1), latest, all_values, length + 1

    return TokenFunction(one)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, age: Tensor, scores: Scores) -> Tensor:
    """Return y [B, G, H / G, DV] of one token: q [B, G, H / G, D], k [B, G, T, D], v [B, G, T, DV], age [T]."""
    if scores.plain:
        return scaled_dot_product_attention(q, k, v, seen, scale=scores.scale)
    products = scores.scale * q @ k.transpose(2, 3)
    p = scores.weights(products.flatten(1, 2).unsqueeze(2), seen, age.unsqueeze(0))
    return p.view_as(products) @ v


def _appended(before: Tensor, x: Tensor, count: int) -> Tensor:
    """Join the last `count` tokens of a cache [B, K, D] and a token with D features [B, …]."""
    B, K, D = before.shape
    return torch.cat([before.narrow(1, K - count, count), x.reshape(B, 1, D)], 1)
