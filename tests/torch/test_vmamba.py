"""The bundled VMamba against its recurrence, token by token in four orders, with weights as its release has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm, linear, silu, softplus

import seqblocks
from seqblocks.checkpoint import load_official
from tests.draws import draw

DIM, DEPTHS, STATE, CLASSES = 4, (1, 1, 2, 1), 3, 5
SIZES = {"dim": DIM, "depth": 1, "middle": 2, "state": STATE, "classes": CLASSES, "input.image.size": 64}
Weights = Mapping[str, Tensor]


def weights() -> dict[str, Tensor]:
    """Return random weights by the names of the release, whose tensors stack the four orders."""
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (DIM, 3, 4, 4), "patch_embed.proj.bias": (DIM,)}
    norms = {"patch_embed.norm": DIM, "norm": 8 * DIM}
    for stage, depth in enumerate(DEPTHS):
        dim = DIM * 2**stage
        inner, low = 2 * dim, math.ceil(dim / 16)
        for block in range(depth):
            name = f"layers.{stage}.blocks.{block}"
            norms |= {f"{name}.ln_1": dim, f"{name}.self_attention.out_norm": inner}
            sizes = {
                "x_proj_weight": (4, low + 2 * STATE, inner), "dt_projs_weight": (4, inner, low),
                "dt_projs_bias": (4, inner), "A_logs": (4 * inner, STATE), "Ds": (4 * inner,),
                "in_proj.weight": (2 * inner, dim), "out_proj.weight": (dim, inner),
                "conv2d.weight": (inner, 1, 3, 3), "conv2d.bias": (inner,),
            }  # fmt: skip
            shapes |= {f"{name}.self_attention.{own}": shape for own, shape in sizes.items()}
        if stage < 3:
            shapes[f"layers.{stage}.downsample.reduction.weight"] = (2 * dim, 4 * dim)
            norms[f"layers.{stage}.downsample.norm"] = 4 * dim
    shapes |= {f"{name}.{own}": (width,) for name, width in norms.items() for own in ("weight", "bias")}
    shapes |= {"head.weight": (CLASSES, 8 * DIM), "head.bias": (CLASSES,)}
    return {name: 0.5 * draw(*shape) for name, shape in shapes.items()}


def normed(x: Tensor, p: Weights, name: str) -> Tensor:
    return layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def scanned(u: Tensor, p: Weights, order: int, inner: int) -> Tensor:
    """Return the outputs of one order's state space for tokens u [batch, tokens, inner], one after another."""
    low = p["dt_projs_weight"].shape[2]
    A, D = (p[name].unflatten(0, (4, inner))[order] for name in ("A_logs", "Ds"))
    dt, B, C = linear(u, p["x_proj_weight"][order]).split([low, STATE, STATE], -1)
    dt = softplus(linear(dt, p["dt_projs_weight"][order], p["dt_projs_bias"][order]))
    h, found = u.new_zeros(u.shape[0], inner, STATE), []
    for t in range(u.shape[1]):
        h = torch.exp(-A.exp() * dt[:, t, :, None]) * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(1)
        found.append((h * C[:, t].unsqueeze(1)).sum(-1) + D * u[:, t])
    return torch.stack(found, 1)


def mixed(x: Tensor, p: Weights) -> Tensor:
    """Return the output of a mixer for x [batch, rows, columns, dim]. Tokens are read at the places of each order."""
    rows, columns = x.shape[1:3]
    u, z = linear(x, p["in_proj.weight"]).chunk(2, -1)
    inner = u.shape[-1]
    image = conv2d(u.movedim(-1, 1), p["conv2d.weight"], p["conv2d.bias"], padding=1, groups=inner)
    tokens = silu(image).flatten(2).transpose(1, 2)
    down = [row * columns + column for column in range(columns) for row in range(rows)]
    across = list(range(rows * columns))
    total = torch.zeros_like(tokens)
    for order, places in enumerate((across, down, across[::-1], down[::-1])):
        y = scanned(tokens[:, places], p, order, inner)
        total = total.index_add(1, torch.tensor(places), y)
    y = normed(total.unflatten(1, (rows, columns)), p, "out_norm") * silu(z)
    return linear(y, p["out_proj.weight"])


def expected_logits(image: Tensor, p: Weights) -> Tensor:
    x = conv2d(image, p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], stride=4).movedim(1, -1)
    x = normed(x, p, "patch_embed.norm")
    for stage, depth in enumerate(DEPTHS):
        for block in range(depth):
            name = f"layers.{stage}.blocks.{block}."
            inside = {key.removeprefix(f"{name}self_attention."): value for key, value in p.items() if name in key}
            x = x + mixed(normed(x, p, f"{name}ln_1"), inside)
        if stage < 3:
            name = f"layers.{stage}.downsample"
            corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            x = linear(normed(torch.cat(corners, -1), p, f"{name}.norm"), p[f"{name}.reduction.weight"])
    return linear(normed(x, p, "norm").mean((1, 2)), p["head.weight"], p["head.bias"])


@pytest.mark.parametrize("size", [(64, 64), (96, 32)])
def test_logits(size: tuple[int, int]) -> None:
    given = weights()
    model = seqblocks.build("vmamba_tiny", set=SIZES, dtype=torch.float64)
    load_official(model, given)
    image = draw(2, 3, *size)
    torch.testing.assert_close(model(image), expected_logits(image, given), rtol=1e-9, atol=1e-9)
