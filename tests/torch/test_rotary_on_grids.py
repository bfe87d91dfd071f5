"""Rotary positions of rows and columns, against transformers' code for images and against rotations of single pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.errors import RunError
from tests.draws import draw


def built(arguments: str, grid: tuple[int, int], width: int) -> seqblocks.SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {{features: {width}, grid: {[*grid]}}}, steps: [{{rotary: {arguments}}}]}}\n"
    return seqblocks.build_text(text, dtype=torch.float64)


def by_pairs(x: Tensor, grid: tuple[int, int], base: float, interleaved: bool) -> Tensor:
    """Return x [batch, tokens, heads, width] with each pair rotated as a complex number, token by token."""
    width = x.shape[-1]
    y = x.clone()
    for token in range(grid[0] * grid[1]):
        places = divmod(token, grid[1])
        for pair in range(width // 2):
            axis, j = divmod(pair, width // 4)
            angle = places[axis] * base ** (-4 * j / width)
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
            turned = torch.complex(x[:, token, :, a], x[:, token, :, b]) * complex(math.cos(angle), math.sin(angle))
            y[:, token, :, a], y[:, token, :, b] = turned.real, turned.imag
    return y


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_pairs_rotate_by_rows_and_columns(layout: str) -> None:
    grid, heads, width = (3, 5), 2, 8
    model = built(f"{{heads: {heads}, positions: grid, base: 100, layout: {layout}}}", grid, heads * width)
    x = draw(2, 15, heads * width)
    expected = by_pairs(x.unflatten(-1, (heads, width)), grid, 100, layout == "interleaved").flatten(-2)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_the_features() -> None:
    model = built("{heads: 2, positions: grid, first: 2, features: 4}", (2, 3), 16)
    x = draw(1, 6, 16)
    parts = x.unflatten(-1, (2, 8))
    turned = by_pairs(parts[..., 2:6], (2, 3), 10_000, False)
    expected = torch.cat([parts[..., :2], turned, parts[..., 6:]], -1).flatten(-2)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_against_qwen2_vl() -> None:
    """transformers turns queries of images by angles in float32, so that only about 6 digits agree."""
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    grid, heads, width = (4, 6), 2, 16
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], -1)
    rates = 1 / 10_000 ** (torch.arange(0, width // 2, 2).double() / (width // 2))  # VisionRotaryEmbedding(width // 2)
    angles = (places.unsqueeze(-1) * rates).flatten(1)
    both = torch.cat([angles, angles], -1)
    x = draw(24, heads, width)
    expected, _ = modeling.apply_rotary_pos_emb_vision(x, x, both.cos(), both.sin())
    model = built(f"{{heads: {heads}, positions: grid}}", grid, heads * width)
    found = model(x.flatten(1).unsqueeze(0)).squeeze(0).unflatten(-1, (heads, width))
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def test_it_keeps_norms_and_takes_images_of_other_sizes_but_does_not_stream() -> None:
    text = """
    seqblocks: 1
    model:
      input: {image: {size: 8, channels: 2}}
      steps: [{patch_embed: {patch: 2, features: 8}}, {rotary: {heads: 1, positions: grid}}]
    """
    model = seqblocks.build_text(text, dtype=torch.float64)
    image = draw(1, 2, 12, 4)
    y = model(image)
    torch.testing.assert_close(y.norm(dim=-1), model.patch_embed(image).norm(dim=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, by_pairs(model.patch_embed(image).unsqueeze(2), (6, 2), 10_000, False).squeeze(2))
    grid = built("{heads: 1, positions: grid}", (2, 2), 4)
    with pytest.raises(RunError, match="it has a position for each row and column of an image"):
        grid.init_state(1)
