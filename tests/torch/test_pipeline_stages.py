"""Stages of a pipeline, run one after the other in one process."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.distributed import pipeline_stage

STEPS = """
seqblocks: 1
use: [mamba]
model:
  input: {features: 8}
  steps:
    - linear: {features: 16, as: first}
    - repeat:
        name: layers
        times: 3
        steps:
          - repeat: {name: inner, times: 2, steps: [{residual: [rms_norm, {linear: 16}]}]}
          - add: {with: first, when: layer > 0}
    - parallel: {merge: sum, branches: [{a: [{linear: 16}]}, {b: [{linear: {from: first, features: 16}}]}]}
    - linear: {features: 4, name: out, as: y}
    - linear: {from: first, features: 2, name: side, as: z}
  outputs: [y, z]
"""


def in_stages(model, stages, *inputs):
    for index in range(stages):
        results = pipeline_stage(model, index, stages)(*inputs)
        inputs = results if isinstance(results, tuple) else (results,)
    return inputs


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_consecutive_stages_equal_the_model(stages):
    model = seqblocks.build_text(STEPS)
    x = torch.randn(2, 5, 8)
    expected = model(x)
    for found, name in zip(in_stages(model, stages, x), ("y", "z"), strict=True):
        torch.testing.assert_close(found, expected[name])
    names = [name for at in range(stages) for name in pipeline_stage(model, at, stages).state_dict()]
    assert sorted(names) == sorted(model.state_dict())


def test_running_statistics_are_those_of_the_model():
    text = "{image: {size: 6}}\n  steps: [{patch_embed: {patch: 3, features: 4}}, batch_norm, pool, {classifier: 2}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel:\n  input: {text}")
    x = torch.randn(8, 3, 6, 6)
    torch.testing.assert_close(in_stages(model, 2, x)[0], model(x))  # in training: both update the statistics
    assert model.batch_norm.num_batches_tracked == 2
    torch.testing.assert_close(in_stages(model.eval(), 2, x)[0], model(x))
    stages = [pipeline_stage(model, at, 2) for at in range(2)]
    for stage in stages:
        stage.reset_parameters()
    assert model.batch_norm.num_batches_tracked == 0


def test_tokens_of_images_keep_their_grid():
    model = seqblocks.build("vil_digits").eval()
    x = torch.randn(2, model.spec.input.features, *model.spec.input.grid)
    torch.testing.assert_close(in_stages(model, 2, x)[0], model(x))


GRIDS = """
seqblocks: 1
model:
  inputs: {a: {features: 2, grid: [2, 3]}, b: {features: 2, grid: [3, 2]}, c: {image: {size: 4, channels: 2}}}
  steps:
    - linear: {from: a, features: 2, as: p}
    - linear: {from: b, features: 2, as: q, name: of_b}
    - patch_embed: {from: c, patch: 1, features: 2, as: r}
    - reduce: {from: p, pattern: "rows columns f -> f columns", as: x}
    - reduce: {from: q, pattern: "rows columns f -> f columns", as: y, name: second}
    - reduce: {from: r, pattern: "rows columns f -> f columns", as: z, name: third}
  outputs: [x, y, z]
"""


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_grids_with_as_many_tokens_stay_apart(stages):
    model = seqblocks.build_text(GRIDS)
    inputs = torch.randn(1, 6, 2), torch.randn(1, 6, 2), torch.randn(1, 2, 4, 4)
    expected = model(**dict(zip("abc", inputs, strict=True)))
    for found, name in zip(in_stages(model, stages, *inputs), "xyz", strict=True):
        assert torch.equal(found, expected[name])


def test_an_image_of_another_shape_does_not_reach_the_next_stage():
    steps = '[{patch_embed: {patch: 1, features: 2}}, {linear: 2}, {reduce: {pattern: "rows columns f -> rows f"}}]'
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{image: {{size: 4, channels: 2}}}}, steps: {steps}}}")
    for x in (torch.randn(1, 2, 4, 4), torch.randn(1, 2, 2, 8)):
        assert torch.equal(in_stages(model, 1, x)[0], model(x))
    torch.testing.assert_close(in_stages(model, 2, torch.ones(1, 2, 4, 4))[0], model(torch.ones(1, 2, 4, 4)))
    message = "the next stage .* tokens of 4 rows and 4 columns, as in the spec, not of 2 and 8"
    with pytest.raises(seqblocks.RunError, match=message):
        in_stages(model, 2, x)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_repeat_without_layers_is_a_step(stages):
    steps = "[{repeat: {times: 0, steps: [{linear: 4}]}}, {linear: {features: 4, name: last}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}")
    x = torch.randn(1, 3, 4)
    torch.testing.assert_close(in_stages(model, stages, x)[0], model(x))


def test_stages_compute_about_as_much():
    model = seqblocks.build("gla_1_3b", set={"dim": 64, "depth": 4, "vocabulary": 64}, device="meta")
    layers = [len(pipeline_stage(model, at, 2).layers) for at in (0, 1)]
    assert layers == [2, 2]


def test_parameters_tied_across_stages_are_refused():
    model = seqblocks.build("mamba_small", device="meta")
    with pytest.raises(seqblocks.UsageError, match=r"unembed.weight and embed.weight share .* stages 0 and 1.*untie"):
        pipeline_stage(model, 0, 2)
    with pytest.raises(seqblocks.UsageError, match="8 steps and layers, too few for 9 stages"):
        pipeline_stage(model, 0, 9)
    with pytest.raises(seqblocks.UsageError, match="there is no stage 2 among 2 stages"):
        pipeline_stage(model, 2, 2)
    with pytest.raises(seqblocks.UsageError, match=r"must be whole numbers, not 0 and 2\.0"):
        pipeline_stage(model, 0, 2.0)


def test_stages_of_16_bits_read_what_decays_compute_in_float32():
    steps = "[{linear: 8}, {log_decay: {kind: logsigmoid}}, {linear: {features: 8, name: after}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: {steps}}}", dtype="bf16")
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    assert torch.equal(in_stages(model, 2, x)[0], model(x))
