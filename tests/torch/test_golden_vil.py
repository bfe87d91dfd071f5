"""Vision-LSTM against reference numbers of the official code (tests/golden/xlstm): outputs and every gradient.

The official modules use the parallel form of the cell, whose stabiliser lacks the path of the initial m = 0. With the
cell's eps = 1e-6 the two forms differ by up to about 5e-7 of the value, so their float64 tolerance is 1e-6. Starting
our recurrence at m = -1e30 removes that path. Only rounding is left then, and the tolerance is 1e-10. float32: ten
times the error of the official float32 run, which adapts to each case's conditioning.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.checkpoint import load_official, official_name
from tests.torch import golden

CASES = sorted(path.stem for path in (golden.FOLDER / "xlstm").glob("vil*.npz"))


def block_spec(config: dict[str, Any], seq: int) -> str:
    two = config.get("conv_kind") == "2d"
    order = "forward" if config["direction"].endswith("top_left") else "reverse"
    grid = config.get("seqlens")
    return f"""
seqblocks: 1
use: [vil]
model:
  input: {{features: {config["dim"]}, {f"grid: {grid}" if grid else f"length: {seq}"}}}
  steps:
    - {"vil2" if two else "vil"}:
        name: block
        dim: {config["dim"]}
        order: {order}
        heads: {config["memory_heads"] if "memory_heads" in config else config["qkv_block_size"]}
        expand: {config["expansion"]}
        qkv_block: {config["qkv_block_size"]}
        kernel: {config.get("conv_kernel_size", config.get("kernel_size"))}
        proj_bias: {str(config["proj_bias"]).lower()}
        norm_bias: {str(config["norm_bias"]).lower()}
checkpoint:
  block: ""
  {"block.residual.scan.c: layer.conv.conv" if config.get("conv_kind") == "causal1d" else ""}
"""


def model_spec(config: dict[str, Any], version: int) -> str:
    dim, legacy = config["dim"], config.get("legacy_norm")
    causal = config.get("conv_kind") == "causal1d"
    names = ("rowwise_from_top_left", "rowwise_from_bot_right")
    steps = [f"patch_embed: {{patch: {config['patch_size']}, features: {dim}}}", "position_embed"]
    maps = ["patch_embed: patch_embed.proj", "position_embed.weight: pos_embed.embed"]
    if version == 1:
        steps.append(
            f"repeat: {{name: blocks, pattern: a b, times: {config['depth'] // 2}, "
            f"a: [vil: {{dim: {dim}}}], b: [vil: {{dim: {dim}, order: reverse}}]}}"
        )
        maps.append("'blocks.{layer}.vil': 'blocks.{layer}'")
        if config.get("mode", "classifier") is not None:
            steps += ["layer_norm: {name: legacy_norm, gain: one_plus, bias: false}"] if legacy else []
            steps += ["pool: {mode: bilateral_mean}"]
        steps.append("layer_norm: {name: norm, eps: 1e-6}")
    else:
        verb, more = ("vil", ", kernel: 3, proj_bias: true, norm_bias: true") if causal else ("vil2", "")
        steps.append(
            f"repeat: {{name: blocks, times: {config['depth']}, steps: [{verb}: {{name: down, dim: {dim}{more}}}, "
            f"{verb}: {{name: up, dim: {dim}, order: reverse{more}}}]}}"
        )
        for ours, theirs in zip(("down", "up"), names, strict=True):
            maps.append(f"'blocks.{{layer}}.{ours}': 'blocks.{{layer}}.{theirs}'")
            if causal:
                maps.append(f"'blocks.{{layer}}.{ours}.residual.scan.c': 'blocks.{{layer}}.{theirs}.layer.conv.conv'")
        steps.append("layer_norm: {name: norm, gain: one_plus, eps: 1e-6}")
        if config.get("pooling") == "to_image":
            steps.append("to_image")
        else:
            mode = "bilateral_mean" if config.get("pooling") == "bilateral_avg" else "bilateral_concat"
            steps.append(f"pool: {{mode: {mode}}}")
            steps += ["layer_norm: {name: legacy_norm}"] if legacy else []
    if config["classes"]:
        steps.append(f"classifier: {{name: head, classes: {config['classes']}}}")
    channels, *size = config["input_shape"]
    body = "".join(f"    - {step}\n" for step in steps)
    table = "".join(f"  {line}\n" for line in maps)
    return f"""seqblocks: 1
use: [vil]
model:
  input: {{image: {{size: {size}, channels: {channels}}}}}
  steps:
{body}
expect: {{params: {config["num_params"]}}}
checkpoint:
{table}"""


def load(case: str) -> tuple[Any, dict[str, Any], str]:
    data, meta = golden.read(f"xlstm/{case}")
    config = meta["config"]
    if "_block_" in case:
        return data, meta, block_spec(config, data["in/x"].shape[1])
    return data, meta, model_spec(config, 1 if case.startswith("vil1") else 2)


@pytest.mark.parametrize("case", CASES)
def test_float64_across_implementations(case: str) -> None:
    data, meta, spec = load(case)
    golden.compare64(data, meta, golden.run(data, spec, torch.float64)[0], 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_float64_same_implementation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, meta, spec = load(case)
    golden.without_initial_path(monkeypatch)
    golden.compare64(data, meta, golden.run(data, spec, torch.float64)[0], 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_float32(case: str) -> None:
    data, meta, spec = load(case)
    golden.compare32(data, meta, golden.run(data, spec, torch.float32)[0])


@pytest.mark.parametrize("verb", ["vil", "vil2"])
def test_the_layer_alone_is_what_the_block_adds(verb: str) -> None:
    """`vil_layer` in a residual branch has the block's parameters under the official names, and the block's output."""
    text = "seqblocks: 1\nuse: [vil]\nmodel: {input: {features: 16, grid: [3, 4]}, steps: [STEPS]}\ncheckpoint: {MAP}"
    layer = f"{verb}_layer: {{dim: 16, order: reverse, heads: 2}}"
    bias = "true" if verb == "vil2" else "false"
    own = f"residual: {{name: r, steps: [layer_norm: {{gain: one_plus, bias: {bias}}}, {layer}]}}"
    block = seqblocks.build_text(
        text.replace("STEPS", layer.replace("_layer", "")).replace("MAP", f'{verb}: ""'), seed=3, dtype=torch.float64
    )
    alone = seqblocks.build_text(
        text.replace("STEPS", own).replace("MAP", f"r.layer_norm: norm, r.{verb}_layer: layer"), dtype=torch.float64
    )
    load_official(alone, {official_name(block.spec, name): p for name, p in block.state_dict().items()})
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    torch.testing.assert_close(alone(x), block(x), rtol=0, atol=0)
    assert f"{verb}.residual.scan.proj_up.weight" in block.state_dict()
