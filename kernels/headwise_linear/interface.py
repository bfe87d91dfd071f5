"""Block-diagonal linear map: each block of channels has a small matrix of its own.

G blocks with I input and O output channels each:  y[g, o] = sum_i w[g, o, i] x[g, i] + bias[g, o]
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from seqblocks.kernels import dispatch, numerics

TILE_FEATURES = 32  # on a CPU: blocks of 4 joined to tiles of 32 take half the time of single ones, to tiles of 128 too


def headwise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Apply a block-diagonal matrix to x [..., G * I] and return [..., G * O]; channels of one block are adjacent.

    weight [G, O, I], bias [G * O]. The torch implementation, and Triton's in bfloat16 and float16, join small blocks to
    tiles padded with zeros: an inf or nan may then spread to other blocks of its tile. The Triton implementation has
    first derivatives only. Raises ValueError for wrong shapes, BackendError (see dispatch).
    """
    if weight.dim() != 3 or x.dim() < 1 or x.shape[-1] != weight.shape[0] * weight.shape[2]:
        raise ValueError(
            "headwise_linear expects x [..., G * I] and weight [G, O, I]; "
            f"got x {list(x.shape)}, weight {list(weight.shape)}"
        )
    G, O, _ = weight.shape
    if bias is not None and bias.shape != (G * O,):
        raise ValueError(f"headwise_linear expects bias [G * O] = [{G * O}]; got {list(bias.shape)}")
    dtype = numerics.computed_in(x, weight)
    narrow = None if dtype == torch.float64 else numerics.autocast_dtype(x.device.type)
    if narrow is not None and x.is_cuda:  # Like autocast; `choose` then checks the dtype of the launch.
        x, weight = x.to(narrow), weight.to(narrow)
    inputs = {"x": x, "weight": weight, "bias": bias}
    run = dispatch.choose(
        "headwise_linear", backend, inputs, {"rows": x.numel() // max(1, x.shape[-1])},
        may_be_complex=inputs if x.is_complex() else (), dtype=narrow or dtype, block=tuple(weight.shape),
    )
    y = run(x, weight)
    return y if bias is None else y + bias.to(y.dtype)  # Under autocast, y has a lower dtype.


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    blocks = rearrange(x, "... (g i) -> ... g i", g=weight.shape[0])
    return rearrange(torch.einsum("...gi,goi->...go", blocks, weight), "... g o -> ... (g o)")


def _tiled(x: Tensor, weight: Tensor) -> Tensor:
    """Join small blocks to tiles, and compute one matrix product per tile. x is not copied."""
    G, O, I = weight.shape
    join = _blocks_per_tile(G, max(I, O))
    tiles = G // join
    if join > 1:
        own = torch.eye(join, dtype=weight.dtype, device=weight.device).view(1, join, 1, join, 1)
        weight = (weight.reshape(tiles, join, O, 1, I) * own).reshape(tiles, join * O, join * I)
    rows = x.reshape(-1, tiles, join * I).transpose(0, 1)
    y = numerics.in_float32(lambda rows, weight: torch.matmul(rows, weight.transpose(1, 2)), rows, weight)
    return y.transpose(0, 1).reshape(*x.shape[:-1], G * O)


def _blocks_per_tile(G: int, width: int) -> int:
    """Return the largest number of blocks per tile that divides G and makes a tile at most TILE_FEATURES wide."""
    return max([1, *[n for n in range(2, min(G, TILE_FEATURES // max(width, 1)) + 1) if G % n == 0]])


dispatch.register("headwise_linear", "reference", _reference, dispatch.always("one einsum"))
dispatch.register("headwise_linear", "torch", _tiled, dispatch.always("batched matrix products, on any device"))
dispatch.load_implementations("headwise_linear")
