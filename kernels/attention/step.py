"""Attention of one token over a cache of keys and values, without gradients.

B batch, H heads, G heads of keys and values, D head width, DV that of the values, K tokens of the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqblocks.kernels.positions import rotary_rates, turned


def prepare(heads: int, shared: int, rotary: float | None, scale: float | None) -> Callable[..., tuple[Tensor, ...]]:
    """Return f(keys [B, K, G * D], values [B, K, G * DV], length [B], q [B, H * D], k [B, G * D], v [B, G * DV]).

    It returns y [B, H * DV] and the next keys, values and length: the same numbers as `attention` for one token that
    sees itself and the whole cache.
    """

    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what depends on sizes alone, by D and K

    def constants(D: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if (D, K) not in made:
            rates = rotary_rates(D, rotary or 1.0, device)
            made[D, K] = rates, torch.arange(K, -1, -1, device=device)
        return made[D, K]

    def step(
        keys: Tensor, values: Tensor, length: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        B, K, _ = keys.shape
        rates, age = constants(q.shape[1] // heads, K, keys.device)
        if rotary is not None:
            both = torch.cat([q, k], -1).view(B, 1, heads + shared, -1)
            q, k = turned(both, length[:, None], rates).flatten(1).split([q.shape[1], k.shape[1]], -1)
        keys, values = torch.cat([keys, k[:, None]], 1), torch.cat([values, v[:, None]], 1)
        y = scaled_dot_product_attention(
            q.view(B, shared, heads // shared, -1),
            keys.view(B, K + 1, shared, -1).transpose(1, 2),
            values.view(B, K + 1, shared, -1).transpose(1, 2),
            (age <= length[:, None])[:, None, None],
            scale=scale,
        )
        return y.flatten(1), keys[:, 1:].clone(), values[:, 1:].clone(), length + 1

    return step
