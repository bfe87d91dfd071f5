"""Weights of other packages: layouts, recipes in both directions, and omitted tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.analysis import check
from seqblocks.analysis.checkpoint_maps.translation import layouts
from seqblocks.checkpoint import load_official, official_name

LAYOUTS = """
seqblocks: 1
blocks:
  mixer:
    args: {dim: int}
    steps:
      - linear: {features: dim, bias: false, as: q}
      - linear: {from: q, features: dim, bias: false, as: k}
    checkpoint:
      q: query
      k: key
      layouts:
        fused: {q.weight: {slice: qk.weight, start: 0}, k.weight: {slice: qk.weight, start: dim}}
model:
  input: {features: 4}
  steps:
    - linear: {features: 4, bias: false, name: embed}
    - repeat: {name: blocks, times: 2, steps: [mixer: {dim: 4}]}
checkpoint:
  embed: embedding
  blocks.{i}.mixer: layers.{i}
  layouts:
    hub: {embed: backbone.embeddings, "blocks.{layer}.mixer": "backbone.layers.{layer}"}
    fused: {embed: backbone.embeddings}
"""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_layout_is_found_by_its_names() -> None:
    model = seqblocks.build_text(LAYOUTS)
    assert layouts(model.spec) == ["official", "hub", "fused"]
    names = {layout: official_name(model.spec, "blocks.1.mixer.k.weight", layout) for layout in layouts(model.spec)}
    assert names == {
        "official": "layers.1.key.weight",
        "hub": "backbone.layers.1.key.weight",
        "fused": {"slice": "layers.1.qk.weight", "start": 4},
    }
    parts = [drawn(4, 4, seed=seed) for seed in range(5)]
    files: list[dict[str, Tensor]] = [{}, {}]
    for file, prefix in zip(files, ("", "backbone."), strict=True):
        file[f"{prefix}embeddings.weight" if prefix else "embedding.weight"] = parts[0]
        for at, name in enumerate(("0.query", "0.key", "1.query", "1.key")):
            file[f"{prefix}layers.{name}.weight"] = parts[at + 1]
    fused = {"backbone.embeddings.weight": parts[0]}
    fused |= {f"layers.{i}.qk.weight": torch.cat(parts[1 + 2 * i : 3 + 2 * i]) for i in range(2)}
    for tensors in (*files, fused):
        model.reset_parameters()
        assert load_official(model, tensors) == ({}, [], {})
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), parts, strict=True))
    with pytest.raises(seqblocks.UsageError, match="no layout 'hubb', only official, hub, fused"):
        official_name(model.spec, "embed.weight", "hubb")


def test_the_layout_of_an_error_is_the_nearest() -> None:
    model = seqblocks.build_text(LAYOUTS)
    tensors = {"backbone.embeddings.weight": drawn(4, 4), "layers.0.qk.weight": drawn(8, 4), "more": drawn(1)}
    message = (
        r"no layers\.1\.qk\.weight, needed for blocks\.1\.mixer\.q\.weight\.\n"
        r".*no layers\.1\.qk\.weight, needed for blocks\.1\.mixer\.k\.weight\.\n"
        r"the official weights contain tensors that the spec does not map: more$"
    )
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model, tensors)


def linear(recipe: str, more: str = "", features: int = 8) -> Any:
    steps = f"[linear: {{features: {features}, bias: false, name: a}}]"
    return seqblocks.build_text(
        f"seqblocks: 1\nmodel: {{input: {{features: 6}}, steps: {steps}}}\ncheckpoint: {{a.weight: {recipe}}}\n{more}"
    )


def test_rows_of_heads_that_alternate() -> None:
    """Qwen3-Next: for each of two key heads the rows of its q, its k, two v and two z."""
    q, k = (drawn(2, 4, 6, seed=seed) for seed in (0, 1))
    v, z = (drawn(2, 6, 6, seed=seed) for seed in (2, 3))
    fused = torch.cat([q, k, v, z], 1).flatten(0, 1)
    for part, start, features in ((q, 0, 8), (k, 4, 8), (v, 8, 12), (z, 14, 12)):
        model = linear(f"{{slice: w, start: {start}, groups: 2}}", features=features)
        load_official(model, {"w": fused})
        assert torch.equal(model.a.weight, part.flatten(0, 1))
    with pytest.raises(seqblocks.RunError, match=r"the official w must have 6 from 16 in each of 2 groups"):
        load_official(linear("{slice: w, start: 16, groups: 2}", features=12), {"w": fused})
    with pytest.raises(seqblocks.RunError, match=r"the official w must have 2 equal groups along axis 0"):
        load_official(linear("{slice: w, groups: 2}"), {"w": fused[:-1]})


def test_parts_of_other_sizes_are_reported() -> None:
    parts = {"b": drawn(3, 6), "c": drawn(5, 6)}
    with pytest.raises(seqblocks.RunError, match=r"the parts along axis 0 are \[3, 5\]; add `sizes: \[3, 5\]`"):
        load_official(linear("{concat: [b, c]}"), parts)
    model = linear("{concat: [b, c], sizes: [3, 5]}")
    load_official(model, parts)
    assert torch.equal(model.a.weight, torch.cat([*parts.values()]))


HEADS = """
seqblocks: 1
model:
  input: {features: 4}
  steps: [linear: {features: 6, name: body}, linear: {features: CLASSES, name: head}]
"""


def test_tensors_that_do_not_fit_are_omitted_only_on_request() -> None:
    other, model = (seqblocks.build_text(HEADS.replace("CLASSES", n), seed=int(n)) for n in ("3", "5"))
    tensors = {**other.state_dict(), "extra": torch.ones(2)}
    del tensors["body.bias"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(seqblocks.RunError) as caught:
        load_official(model, tensors)
    assert len(str(caught.value).splitlines()) == 4, "one error should list everything"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    left_out = load_official(model, tensors, partial=True)
    assert sorted(left_out.missing) == ["body.bias", "head.bias", "head.weight"]
    assert left_out.left_over == ["extra"]
    assert "head.weight stays at its initial values: the weights do not fit this model: head.weight is" in str(left_out)
    assert torch.equal(model.body.weight, other.body.weight)
    for name in left_out.missing:
        assert torch.equal(model.state_dict()[name], before[name])


def test_positions_of_another_grid_are_interpolated_on_request() -> None:
    text = (
        "seqblocks: 1\nmodel: {input: {image: {size: SIZE}}, steps: [patch_embed: {patch: 4, features: 8},"
        " position_embed, pool: {mode: mean}, classifier: {classes: CLASSES}]}"
    )
    small = seqblocks.build_text(text.replace("SIZE", "16").replace("CLASSES", "3")).eval()
    large = seqblocks.build_text(text.replace("SIZE", "24").replace("CLASSES", "3"), seed=1).eval()
    with pytest.raises(seqblocks.RunError, match=r"is \[1, 4, 4, 8\], but \[1, 6, 6, 8\] in the model"):
        load_official(large, small.state_dict())
    left_out = load_official(large, small.state_dict(), partial=True)
    assert left_out == ({}, [], {"position_embed.weight": (1, 4, 4, 8)})
    assert str(left_out) == "position_embed.weight is interpolated from [1, 4, 4, 8]"
    image = drawn(1, 3, 24, 24)
    assert torch.equal(large(image), small(image)), "the model interpolates at each call"


def test_bundled_layouts() -> None:
    assert layouts(check.load_model("mamba_130m")) == ["official", "hub"]
    assert layouts(check.load_model("vil_tiny")) == ["official"]
