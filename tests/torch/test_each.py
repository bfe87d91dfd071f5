"""`each`: an axis folded into the batch, against the same steps on each part, and two published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn.functional import pad, scaled_dot_product_attention

import seqblocks
from seqblocks.cost import input_macs, macs
from seqblocks.distributed import sequence_parallel
from seqblocks.errors import RunError
from seqblocks.testing import check_law, check_shapes
from tests.draws import draw

STREAMS = {
    "features": "{axis: features, steps: [{causal_conv: {kernel: 3}}, {linear: 3}, silu]}",
    "groups_of_features": "{axis: features, size: 2, steps: [{linear: {features: 4, as: q}}, "
    "{attention: {q: q, k: q, v: q, heads: 2, cache: 40}}]}",
    "merged_tokens": "{axis: features, size: 3, steps: [{downsample: 2}, causal_conv, {upsample: 2}]}",
    "places": "{axis: places, size: 3, steps: [causal_conv, {linear: 3}]}",
    "a_cell": "{axis: features, size: 3, steps: [{cell: {state: {s: {features: 3, start: 1, learned: true}}, steps: "
    "[{calc: {s: tanh(s) + input}}]}}]}",
    "a_linear_cell": "{axis: places, size: 3, steps: [{cell: {state: {s: 6}, steps: [{calc: {s: 0.9 * s + input}}]}}]}",
    "a_cell_in_frames": "{axis: frames, size: 3, steps: [{cell: {state: {s: 6}, steps: [{calc: {s: tanh(s + x)}}]}}]}",
    "nested": "{axis: places, size: 3, steps: [{each: {axis: features, size: 3, steps: [causal_conv]}}]}",
    "frames": "{axis: frames, size: 3, steps: [{linear: {features: 4, as: q}}, "
    "{attention: {q: q, k: q, v: q, heads: 2, causal: false, bias: relative}}]}",
    "a_vector_of_each_frame": "{axis: frames, size: 3, steps: [{each: {axis: features, steps: [causal_conv]}}, "
    "{pool: mean}]}",
    "scans_of_frames": "{axis: frames, size: 3, steps: [{scan: {order: [forward, reverse], steps: [causal_conv]}}]}",
}


def built(steps: str, input: str = "{features: 6}", **options: Any) -> seqblocks.SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {input}, steps: [{steps}]}}\n"
    return seqblocks.build_text(text, dtype=torch.float64, **options)


@pytest.mark.parametrize("name", STREAMS)
def test_the_state_law(name: str) -> None:
    model = built(f"{{each: {STREAMS[name]}}}, causal_conv, {{linear: {{features: 2, name: out}}}}")
    one = model.frame_size == 1
    check_law(model, seq=13 if one else 5, resets=((0, 4), (1, 9)) if one else ())


PARTS = {
    "features": ("{features: 6}", "size: 2", lambda x: x.unflatten(2, (3, 2)).movedim(2, 1)),
    "frames": ("{features: 4}", "size: 3", lambda x: x.unflatten(1, (-1, 3))),
    "places": ("{features: 4}", "size: 3", lambda x: x.unflatten(1, (-1, 3)).movedim(2, 1)),
    "rows": ("{features: 4, grid: [4, 6]}", "", lambda x: x.unflatten(1, (4, 6))),
    "columns": ("{features: 4, grid: [4, 6]}", "", lambda x: x.unflatten(1, (4, 6)).movedim(2, 1)),
    "windows": (
        "{features: 4, grid: [4, 6]}", "size: 2",
        lambda x: x.unflatten(1, (2, 2, 3, 2)).movedim(3, 2).flatten(1, 2).flatten(2, 3),
    ),
}  # fmt: skip


CELL = "[{linear: 5}, {cell: {state: {s: {features: 5, start: 1, learned: true}}, steps: [{calc: {s: tanh(s) + x}}]}}]"


@pytest.mark.parametrize("steps", ["[{ssm: {x: input, dt: input, state: 2}}, {linear: 5}]", CELL], ids=["ssm", "cell"])
@pytest.mark.parametrize("axis", PARTS)
def test_each_part_is_computed_like_a_sequence_of_its_own(axis: str, steps: str) -> None:
    """The parts [batch, parts, tokens, features] are cut by torch here, and run one by one."""
    given, size, cut = PARTS[axis]
    more = f", {size}" if size else ""
    whole = built(f"{{each: {{axis: {axis}{more}, steps: {steps}}}}}", given)
    x = draw(2, 24, 6 if axis == "features" else 4)
    parts = cut(x)
    alone = built(steps.strip("[]"), f"{{features: {parts.shape[-1]}}}")
    alone.load_state_dict({name.removeprefix("each."): value for name, value in whole.state_dict().items()})
    expected = torch.stack([alone(part) for part in parts.unbind(1)], 1)
    found = whole(x)
    restored = found.unflatten(2, (3, 5)).movedim(2, 1) if axis == "features" else cut(found)
    torch.testing.assert_close(restored, expected, rtol=1e-12, atol=1e-12)  # the same sums, in another batch


def swin_attention(x: Tensor, model: Any, shift: int, side: int, heads: int) -> Tensor:
    """Return attention of each token of x [batch, rows, columns, features] over its window, pair by pair.

    Two tokens see each other if their rolled rows and columns are in one window, and no edge was rolled between them.
    """
    rows, columns = x.shape[1:3]
    q, k, v = model.qkv(x).flatten(1, 2).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    places = [(r, c) for r in range(rows) for c in range(columns)]
    table = model.scores.relative
    mask = torch.full((heads, len(places), len(places)), -torch.inf, dtype=x.dtype)
    by = shift if rows > side else 0, shift if columns > side else 0

    def window(place: tuple[int, int]) -> list[tuple[int, int, bool]]:
        """Return the window along both axes, the place in it, and whether the token was rolled over the edge."""
        moved = [(at - s) % n for at, s, n in zip(place, by, (rows, columns), strict=True)]
        return [(m // side, m % side, at < s) for m, at, s in zip(moved, place, by, strict=True)]

    for i, one in enumerate(places):
        for j, other in enumerate(places):
            (row, column), (row_, column_) = window(one), window(other)
            if (row[0], column[0], row[2], column[2]) == (row_[0], column_[0], row_[2], column_[2]):
                index = (row[1] - row_[1] + side - 1) * (2 * side - 1) + column[1] - column_[1] + side - 1
                mask[:, i, j] = table[index]
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return model.proj(y.transpose(1, 2).flatten(2)).unflatten(1, (rows, columns))


@pytest.mark.parametrize(("grid", "shift"), [((4, 6), 1), ((6, 4), 0), ((2, 6), 1), ((2, 2), 1)])
def test_shifted_windows(grid: tuple[int, int], shift: int) -> None:
    windows_agree(grid, shift)


@pytest.mark.parametrize(("grid", "shift"), [((3, 5), 0), ((5, 4), 1), ((1, 5), 1), ((4, 6), 1)])
def test_padded_windows(grid: tuple[int, int], shift: int) -> None:
    """Zeros are tokens like others, as in Swin: with a bias in `qkv`, the scores of others see them."""
    windows_agree(grid, shift, (-grid[0] % 2, -grid[1] % 2))


def test_padded_windows_are_counted() -> None:
    """An image of 5 x 3 has 6 windows of 2 x 2: 24 tokens of linear maps 4 x 4."""
    spec = seqblocks.load_text(
        "seqblocks: 1\nmodel: {input: {features: 4, grid: [5, 3]}, steps: [{each: {axis: windows, size: 2, pad: true, "
        "steps: [{linear: 4}]}}]}\n"
    )[1]
    assert spec
    assert input_macs(spec.graph, None) == 24 * 16
    assert macs(spec.graph, None) == pytest.approx(24 * 16 / 15)
    check_shapes(seqblocks.build_model(spec))


def windows_agree(grid: tuple[int, int], shift: int, padding: tuple[int, int] = (0, 0)) -> None:
    more = ", pad: true" if any(padding) else ""
    steps = "[{linear: {name: qkv, features: 18, as: [q, k, v]}}, {attention: {name: scores, q: q, k: k, v: v, "
    steps += "heads: 2, causal: false, bias: relative}}, {linear: {name: proj, features: 6}}]"
    given = f"{{features: 6, grid: {[*grid]}}}"
    model = built(f"{{each: {{axis: windows, size: 2, shift: {shift}{more}, steps: {steps}}}}}", given)
    with torch.no_grad():
        model.each.scores.relative.normal_()
    x = draw(2, grid[0] * grid[1], 6).requires_grad_()
    found = model(x)
    image = pad(x.unflatten(1, grid), (0, 0, 0, padding[1], 0, padding[0]))
    expected = swin_attention(image, model.each, shift, 2, 2)[:, : grid[0], : grid[1]].flatten(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = draw(*found.shape)
    leaves = [x, *model.parameters()]
    pairs = (torch.autograd.grad((y * weights).sum(), leaves) for y in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_images_of_other_sizes_and_windows_that_do_not_tile_them() -> None:
    steps = "{patch_embed: {patch: 2, features: 4}}, {each: {axis: windows, size: 2, shift: 1, steps: [{linear: 4}]}}"
    steps += ", {each: {axis: rows, name: rows_of, steps: [causal_conv]}}"
    model = built(steps, "{image: {size: 8, channels: 3}}")
    check_shapes(model)
    assert model(draw(1, 3, 12, 8)).shape == (1, 24, 4)
    with pytest.raises(RunError, match="windows of 2 x 2 do not tile the 3 rows and 4 columns"):
        model(draw(1, 3, 6, 8))


OUTSIDE = """
seqblocks: 1
model:
  input: INPUT
  steps:
    - linear: {features: 5, as: u, name: outer}
    - each:
        from: input
        axis: AXIS
        steps:
          - causal_conv: {as: c, name: conv}
          - linear: {from: [c, u], features: 3, name: out}
"""


@pytest.mark.parametrize("axis", PARTS)
def test_steps_read_the_same_tokens_of_other_wires(axis: str) -> None:
    """Over features, each sequence reads all of the wire. Sums of ten products have errors of 1e-15."""
    given, size, cut = PARTS[axis]
    text = OUTSIDE.replace("INPUT", given).replace("AXIS", f"{axis}\n        {size}" if size else axis)
    model = seqblocks.build_text(text, dtype=torch.float64)
    check_shapes(model)
    p, x = dict(model.named_parameters()), draw(2, 24, 6 if axis == "features" else 4)
    u = x @ p["outer.weight"].T + p["outer.bias"]
    parts = cut(x)
    conv = built("{causal_conv: {name: conv}}", f"{{features: {parts.shape[-1]}}}")
    conv.load_state_dict({f"conv.{name}": p[f"each.conv.{name}"] for name in ("weight", "bias")})
    c = torch.stack([conv(part) for part in parts.unbind(1)], 1)
    whole = axis == "features"
    same = u.unsqueeze(1).expand(-1, 3, -1, -1) if whole else cut(u)
    expected = torch.cat([c, same], -1) @ p["each.out.weight"].T + p["each.out.bias"]
    found = model(x).unflatten(2, (3, 3)).movedim(2, 1) if whole else cut(model(x))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    if axis in ("features", "frames", "places"):
        check_law(model, seq=5, resets=((0, 4), (1, 2)) if whole else ())


@pytest.mark.parametrize("axis", ["features, size: 2", "frames, size: 3", "places, size: 3"])
def test_steps_read_a_context(axis: str) -> None:
    """Each sequence reads all of it; a stream computes it once."""
    model = seqblocks.build_text(f"""
seqblocks: 1
model:
  inputs: {{x: {{features: 6}}, notes: {{features: 4}}, kind: {{vector: 3}}}}
  steps:
    - linear: {{from: kind, features: 4, as: w}}
    - linear: {{from: notes, features: 8, as: [k, v], name: kv}}
    - each:
        from: x
        axis: {axis.replace(", ", chr(10) + "        ")}
        steps:
          - linear: {{features: 4, as: q}}
          - cross_attention: {{q: q, k: k, v: v, heads: 2}}
          - multiply: {{by: w}}
          - causal_conv
""", dtype=torch.float64)
    check_law(model, seq=5)
    x, notes, kind = draw(1, 6, 6), draw(1, 4, 4), draw(1, 3)
    y = model(x=x, notes=notes, kind=kind)
    assert not torch.equal(y, model(x=x, notes=notes.flip(2), kind=kind))
    assert not torch.equal(y, model(x=x, notes=notes, kind=-kind))


def test_reasons_why_it_does_not_stream() -> None:
    model = built("{each: {axis: rows, steps: [causal_conv]}}", "{features: 4, grid: [2, 3]}")
    with pytest.raises(RunError, match="it reads the rows of a whole image"):
        model.init_state(1)
    frames = built("{each: {axis: frames, size: 3, steps: [causal_conv]}}")
    with pytest.raises(RunError, match="a sequence may begin in the middle of its frames"):
        frames(draw(1, 6, 6), resets=torch.tensor([[True, False, True, False, False, False]]))
    with pytest.raises(RunError, match="multiple"):
        frames(draw(1, 7, 6))


def test_counts() -> None:
    """State and cost are those of all sequences: 6 of a feature, or 3 of two features."""
    found = seqblocks.summarise(built("{each: {axis: features, steps: [{causal_conv: {kernel: 4, bias: false}}]}}"))
    assert (found.params, found.state, found.macs_per_token) == (4, 6 * 3, 6 * 4)
    linear = "steps: [{linear: {features: 5, bias: false}}]"
    found = seqblocks.summarise(built(f"{{each: {{axis: features, size: 2, {linear}}}}}"))
    assert (found.params, found.macs_per_token) == (10, 3 * 10)
    found = seqblocks.summarise(built(f"{{each: {{axis: places, size: 3, {linear}}}}}"))
    assert (found.params, found.macs_per_token, found.frame_size) == (30, 30, 3)
    grid = "{features: 6, grid: [4, 4]}"
    attend = "{attention: {q: input, k: input, v: input, heads: 1, causal: false}}"
    found = seqblocks.summarise(built(f"{{each: {{axis: windows, size: 2, steps: [{attend}]}}}}", grid))
    assert found.macs_per_token == 4 * 2 * 6  # 4 visible tokens, 6 features of keys and of values


def test_swin_t_in_small_against_its_blocks() -> None:
    """The table of relative positions, the order of merged tokens and the shift are those of the release."""
    sizes = {"dim": 4, "depth": 2, "middle": 2, "heads": 1, "window": 2, "classes": 3, "input.image.size": 64}
    model = seqblocks.build("swin_t", set=sizes, dtype=torch.float64)
    x = draw(2, 3, 64, 64)
    y = model.patches_norm(model.patches(x)).unflatten(1, (16, 16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("relative"):
                parameter.normal_()
    for number in range(1, 5):
        if number > 1:
            merge = model.get_submodule(f"merge{number}")
            corners = [y[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            y = merge.reduction(merge.norm(torch.cat(corners, -1)))
        for at, block in enumerate(model.get_submodule(f"stage{number}").blocks):
            normed = block.mix.norm(y)
            y = y + swin_attention(normed, block.mix.attn, at % 2, 2, 2 ** (number - 1))
            y = y + block.ffn.down(torch.nn.functional.gelu(block.ffn.up(block.ffn.norm(y))))
    expected = model.head(model.norm(y).mean((1, 2)))
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


PATCHTST = """
seqblocks: 1
about: PatchTST (arXiv:2211.14730), which forecasts each channel by itself
let: {dim: 16, heads: 4, horizon: 24}
model:
  input: {features: 7, length: 96}
  steps:
    - reduce: {pattern: "seq features -> features", by: mean, as: mean}
    - reduce: {from: input, pattern: "seq features -> features", by: std, as: std}
    - calc: {from: input, scaled: (x - mean) / std}
    - each:
        axis: features
        steps:
          - rearrange: {pattern: "(seq patch) features -> seq (patch features)", patch: 16}
          - linear: {features: dim, name: patches}
          - position_embed
          - repeat:
              name: layers
              times: 2
              steps:
                - residual:
                    name: mix
                    steps:
                      - batch_norm: {as: normed}
                      - linear: {features: dim, as: q}
                      - linear: {from: normed, features: dim, as: k}
                      - linear: {from: normed, features: dim, as: v}
                      - attention: {q: q, k: k, v: v, heads: heads, causal: false}
                      - linear: {features: dim, name: out}
                - residual:
                    name: ffn
                    steps:
                      - batch_norm
                      - linear: {features: 2 * dim, name: up}
                      - gelu
                      - linear: {features: dim, name: down}
          - rearrange: {pattern: "seq features -> (seq features)"}
          - linear: {features: horizon, name: head}
    - rearrange: {pattern: "(channels horizon) -> horizon channels", channels: 7}
    - calc: {forecast: x * std + mean}
"""
OF_PATCHTST = {
    "mix.normed": "norm_sublayer1.batchnorm", "mix.q": "self_attn.q_proj", "mix.k": "self_attn.k_proj",
    "mix.v": "self_attn.v_proj", "mix.out": "self_attn.out_proj", "ffn.batch_norm": "norm_sublayer3.batchnorm",
    "ffn.up": "ff.0", "ffn.down": "ff.3",
}  # fmt: skip


def test_patchtst_against_transformers() -> None:
    """The same count, and the same forecasts of a model in float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.PatchTSTConfig(
        num_input_channels=7, context_length=96, prediction_length=24, patch_length=16, patch_stride=16, d_model=16,
        num_attention_heads=4, ffn_dim=32, num_hidden_layers=2, loss="mse", use_cls_token=False, pooling_type=None,
        positional_encoding_type="random",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.PatchTSTForPrediction(config).double().eval()
    with torch.no_grad():
        for value in theirs.state_dict().values():
            if value.is_floating_point():
                value.add_(0.2 * torch.rand_like(value))
    ours = seqblocks.build_text(PATCHTST, dtype=torch.float64).eval()
    assert sum(x.numel() for x in ours.parameters()) == sum(x.numel() for x in theirs.parameters())
    names = {"patches": "embedder.input_embedding", "position_embed.weight": "positional_encoder.position_enc"}
    for layer in range(2):
        names |= {f"layers.{layer}.{one}": f"layers.{layer}.{other}" for one, other in OF_PATCHTST.items()}
    names = {f"each.{one}": f"model.encoder.{other}" for one, other in names.items()} | {"each.head": "head.projection"}
    given = theirs.state_dict()
    own = {}
    for name, value in ours.state_dict().items():
        step = next(step for step in names if name == step or name.startswith(f"{step}."))
        own[name] = given[names[step] + name.removeprefix(step)].reshape(value.shape)
    ours.load_state_dict(own)
    x = draw(3, 96, 7)
    with torch.no_grad():
        expected = theirs(past_values=x).prediction_outputs
        torch.testing.assert_close(ours(x), expected, rtol=1e-11, atol=1e-11)


def test_relative_positions_in_a_sequence_and_on_a_grid_of_another_size() -> None:
    """Row i - j + L - 1 of the table is added to the score of query i and key j."""
    steps = "{attention: {q: input, k: input, v: input, heads: 2, causal: false, bias: relative}}"
    model = built(steps, "{features: 6, length: 5}")
    table = model.attention.relative
    assert table.shape == (9, 2)
    with torch.no_grad():
        table.normal_()
    x = draw(2, 5, 6)
    bias = torch.stack([torch.stack([table[i - j + 4] for j in range(5)]) for i in range(5)]).permute(2, 0, 1)
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    expected = scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    steps = "{patch_embed: {patch: 2, features: 6, as: x}}, " + steps.replace("input", "x")
    image = built(steps, "{image: {size: 8, channels: 1}}")
    assert image(draw(1, 1, 8, 8)).shape == (1, 16, 6)
    with pytest.raises(RunError, match="attention has 49 relative positions, and these 8 tokens have others"):
        image(draw(1, 1, 8, 4))


def test_states_of_several_sequences_are_not_handed_on_between_ranks() -> None:
    model = built("{each: {axis: features, steps: [causal_conv]}}")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match=r"each .* carries the states of several sequences"):
            sequence_parallel(model)
    finally:
        distributed.destroy_process_group()


def test_no_tokens_and_a_wire_whose_tokens_are_those_of_a_single_frame() -> None:
    inner = "{linear: {from: [input, w], features: 2}}"
    steps = f"{{linear: {{features: 2, as: w}}}}, {{each: {{axis: frames, size: 4, steps: [{inner}]}}}}"
    model = built(steps, "{features: 2, length: 4}")
    y, state = model(draw(2, 4, 2), return_state=True)
    assert y.shape == (2, 4, 2)
    assert model(draw(2, 0, 2), state=state).shape == (2, 0, 2)
