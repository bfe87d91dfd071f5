"""Changes of transformers' tensors into those of llama.cpp that several families have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqblocks.checkpoint.gguf_found import Found

Change = Callable[[Tensor, Found, int], Tensor]
"""Return a tensor of llama.cpp from that of transformers. The number is that of the layer, 0 outside of layers."""
Pieces = tuple[tuple[str, Change | None], ...]
"""Names of what an official tensor becomes, as replacements of what a pattern matches, and how each is computed."""


def negative_exp(x: Tensor, found: Found, layer: int) -> Tensor:
    return -torch.exp(x)


def column(x: Tensor, found: Found, layer: int) -> Tensor:
    return x[:, None]


def squeezed(x: Tensor, found: Found, layer: int) -> Tensor:
    return x.squeeze(1)


def one_plus(x: Tensor, found: Found, layer: int) -> Tensor:
    return x + 1


def half(at: int) -> Change:
    """Return half of the rows."""
    return lambda x, found, layer: x.chunk(2, -2)[at]


def interleaved(shared: bool) -> Change:
    """Order the rows of each head that rotate for rotations of adjacent pairs; in transformers, halves rotate."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        op, rotary = found.op("attention", layer), found.op("rotary", layer)
        rows = x.unflatten(0, (op.shared if shared else op.heads, -1))
        count = (rotary and rotary.features) or rows.shape[1]
        turned = rows[:, :count].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([turned, rows[:, count:]], 1).flatten(0, 1)

    return change


def grouped(x: Tensor, found: Found, layer: int) -> Tensor:
    """Give each group of a norm a row."""
    return x.reshape(found.op("linear_attention", layer).heads, -1)


def times(*names: str) -> Change:
    """Multiply by entries of config.json, each 1 if it is absent."""

    def change(x: Tensor, found: Found, layer: int) -> Tensor:
        for name in names:
            x = x * float(found.config.get(name) or 1.0)
        return x

    return change


def times_of(name: str, at: int) -> Change:
    """Multiply by an element of an entry of config.json."""
    return lambda x, found, layer: x * float((found.config.get(name) or [1.0] * (at + 1))[at])


def qkv_by_kind(x: Tensor, found: Found, layer: int) -> Tensor:
    """Return queries, keys and values of all heads, instead of those of each head."""
    return x.unflatten(0, (found.op("attention", layer).heads, 3, -1)).transpose(0, 1).flatten(0, 2)


INTERLEAVED = (
    (r"attn_q\.(weight|bias)", interleaved(False)),
    (r"attn_k\.(weight|bias)", interleaved(True)),
)
MAMBA = ((r"ssm_a", negative_exp), (r"ssm_conv1d\.weight", squeezed))
MAMBA2 = (*MAMBA, (r"ssm_[ad]", column), (r"ssm_norm\.weight", grouped))
DT_BIAS: tuple[str, Pieces] = (r"\.dt_bias$", ((".dt_proj.bias", None),))
ONE_PLUS = ((r".*norm\.weight", one_plus),)
CORRECTION: tuple[str, Pieces] = (r"\.e_score_correction_bias$", ((".e_score_correction.bias", None),))
