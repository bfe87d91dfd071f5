"""The bundled DiT against the same network written with torch's functions, with weights as its release has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, scaled_dot_product_attention, silu

import seqblocks
from seqblocks.checkpoint import load_official
from tests.draws import draw

DIM, HEADS, DEPTH, CLASSES = 12, 3, 2, 5
SIZES = {"dim": DIM, "heads": HEADS, "depth": DEPTH, "classes": CLASSES}


def weights() -> dict[str, Tensor]:
    """Return random weights by the names of the release."""
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (DIM, 4, 2, 2), "x_embedder.proj.bias": (DIM,), "pos_embed": (1, 256, DIM),
        "y_embedder.embedding_table.weight": (CLASSES + 1, DIM),
    }  # fmt: skip
    maps = {
        "t_embedder.mlp.0": (DIM, 256), "t_embedder.mlp.2": (DIM, DIM),
        "final_layer.adaLN_modulation.1": (2 * DIM, DIM), "final_layer.linear": (32, DIM),
    }  # fmt: skip
    for block in range(DEPTH):
        sizes = {
            "adaLN_modulation.1": (6 * DIM, DIM), "attn.qkv": (3 * DIM, DIM), "attn.proj": (DIM, DIM),
            "mlp.fc1": (4 * DIM, DIM), "mlp.fc2": (DIM, 4 * DIM),
        }  # fmt: skip
        maps |= {f"blocks.{block}.{name}": size for name, size in sizes.items()}
    for name, (out, into) in maps.items():
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    return {name: 0.3 * draw(*shape) for name, shape in shapes.items()}


def expected(image: Tensor, time: Tensor, label: Tensor, p: dict[str, Tensor]) -> Tensor:
    def mapped(x: Tensor, name: str) -> Tensor:
        return linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return layer_norm(x, (DIM,), eps=1e-6) * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)

    rates = torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float64) / 128)
    angles = time[:, None] * rates
    condition = mapped(torch.cat([angles.cos(), angles.sin()], -1), "t_embedder.mlp.0")
    condition = mapped(silu(condition), "t_embedder.mlp.2") + p["y_embedder.embedding_table.weight"][label]
    x = conv2d(image, p["x_embedder.proj.weight"], p["x_embedder.proj.bias"], stride=2)
    x = x.flatten(2).transpose(1, 2) + p["pos_embed"]
    for block in range(DEPTH):
        name = f"blocks.{block}"
        parts = mapped(silu(condition), f"{name}.adaLN_modulation.1").chunk(6, -1)
        qkv = mapped(modulated(x, *parts[:2]), f"{name}.attn.qkv").unflatten(-1, (3, HEADS, -1))
        y = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        x = x + parts[2].unsqueeze(1) * mapped(y, f"{name}.attn.proj")
        y = gelu(mapped(modulated(x, *parts[3:5]), f"{name}.mlp.fc1"), approximate="tanh")
        x = x + parts[5].unsqueeze(1) * mapped(y, f"{name}.mlp.fc2")
    shift, scale = mapped(silu(condition), "final_layer.adaLN_modulation.1").chunk(2, -1)
    y = mapped(modulated(x, shift, scale), "final_layer.linear")
    return torch.einsum("nhwpqc->nchpwq", y.view(-1, 16, 16, 2, 2, 8)).reshape(-1, 8, 32, 32)


def test_outputs_and_gradients() -> None:
    given = weights()
    model = seqblocks.build("dit_s2", set=SIZES, dtype=torch.float64)
    load_official(model, given)
    image, time, label = draw(2, 4, 32, 32).requires_grad_(), torch.tensor([3.0, 950.0]).double(), torch.tensor([0, 5])
    found = model(image=image, time=time[:, None], label=label[:, None])
    wanted = expected(image, time, label, given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = draw(*wanted.shape)
    (one,), (other,) = (torch.autograd.grad((y * weight).sum(), image) for y in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (16, 16)])
def test_initial_positions(rows: int, columns: int) -> None:
    """Sines and cosines of the column in the first half of the features, those of the row in the second, in float32."""
    text = f"""
    seqblocks: 1
    model:
      input: {{features: 16, grid: [{rows}, {columns}]}}
      steps: [{{position_embed: {{learned: false, init: {{weight: grid_waves}}}}}}, {{linear: 2}}]
    """
    model = seqblocks.build_text(text, dtype=torch.float64)
    weight = model.position_embed.weight
    assert not weight.requires_grad
    assert weight.shape == (1, rows, columns, 16)
    for row in range(rows):
        for column in range(columns):
            angles = [[place / 10_000 ** (j / 4) for j in range(4)] for place in (column, row)]
            waves = [wave(angle) for each in angles for wave in (math.sin, math.cos) for angle in each]
            assert weight[0, row, column].tolist() == pytest.approx(waves, abs=6e-8)  # half of its spacing below 1


def test_a_new_model_predicts_zeros() -> None:
    """The last map and the modulations begin with zeros, so that each block is the identity."""
    model = seqblocks.build("dit_s2", set=SIZES)
    y = model(image=torch.randn(1, 4, 32, 32), time=torch.tensor([[7.0]]), label=torch.tensor([[1]]))
    assert not y.any()
