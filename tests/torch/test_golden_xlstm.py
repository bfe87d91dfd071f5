"""xLSTM's sLSTM layer and block, block stacks, language models and xLSTM-large against the official packages.

The tolerances are those of test_golden_vil.py. The official package connects its gate `fgate` to slot i and `igate` to
f, and its checkpoints have these names. The map of `slstm_layer` swaps them; the spec uses the correct names.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.torch import golden
from tests.torch.test_golden_mlstm import flat

NAMES = ("slstm_layer", "slstm_block", "xlstm_stack", "xlstm_lm", "xlstm_large")
CASES = sorted(p.stem for name in NAMES for p in (golden.FOLDER / "xlstm").glob(f"{name}*"))


def layer_spec(config: dict[str, Any]) -> str:
    dim, kernel = config["embedding_dim"], config["conv1d_kernel_size"]
    gates = "c" if kernel else "input"
    conv = f"      - causal_conv: {{kernel: {kernel}, activation: silu, as: c}}\n" if kernel else ""
    return f"""
seqblocks: 1
use: [xlstm]
blocks:
  whole:
    steps:
{conv}      - slstm_layer: {{from: input, gates: {gates}, dim: {dim}, heads: {config["num_heads"]}, name: it}}
    checkpoint: {{it: ""{", c: conv1d.conv" if kernel else ""}}}
model: {{input: {{features: {dim}}}, steps: [whole]}}
checkpoint: {{whole: ""}}
"""


def block_spec(config: dict[str, Any]) -> str:
    dim = config["embedding_dim"]
    return f"""
seqblocks: 1
use: [xlstm]
model:
  input: {{features: {dim}}}
  steps: [{{slstm_block: {{name: it, dim: {dim}, heads: {config["num_heads"]}, expand: {config["ffn_proj_factor"]}}}}}]
checkpoint: {{it: ""}}
"""


def stack_spec(config: dict[str, Any]) -> str:
    """Return the spec of a block stack, and of the language model around it if there is a vocabulary."""
    dim, vocabulary = config["embedding_dim"], config["vocab_size"]
    words = ["s" if at in config["slstm_at"] else "m" for at in range(config["num_blocks"])]
    blocks = {"m": "mlstm_block", "s": "slstm_block"}
    heads = {"m": config["mlstm_num_heads"], "s": config["slstm_num_heads"]}
    kinds = "".join(
        f"        {word}: [{{{blocks[word]}: {{name: it, dim: {dim}, heads: {heads[word]}, blocks: layers}}}}]\n"
        for word in sorted(set(words))
    )
    prefix = "xlstm_block_stack." if vocabulary else ""
    return f"""
seqblocks: 1
use: [xlstm]
model:
  input: {{{f"tokens: {vocabulary}" if vocabulary else f"features: {dim}"}}}
  steps:
{f"    - embed: {{features: {dim}}}" if vocabulary else ""}
    - repeat:
        name: blocks
        pattern: {" ".join(words)}
{kinds}
    - layer_norm: {{name: norm, gain: one_plus, bias: false}}
{"    - unembed: {bias: false}" if vocabulary else ""}
expect: {{params: {config["num_params"]}}}
checkpoint:
  blocks.{{layer}}.it: {prefix}blocks.{{layer}}
  norm: {prefix}post_blocks_norm
{"  embed: token_embedding" if vocabulary else ""}
{"  unembed: lm_head" if vocabulary else ""}
"""


def large_spec(config: dict[str, Any]) -> str:
    dim = config["embedding_dim"]
    return f"""
seqblocks: 1
use: [xlstm]
model:
  input: {{tokens: {config["vocab_size"]}}}
  steps:
    - embed: {{features: {dim}}}
    - repeat:
        name: blocks
        times: {config["num_blocks"]}
        steps:
          - xlstm_large_block:
              dim: {dim}
              heads: {config["num_heads"]}
              qk_factor: {config["qk_dim_factor"]}
              expand: {config["ffn_proj_factor"]}
              multiple: {config["ffn_round_up_to_multiple_of"]}
              gate_cap: {config["gate_soft_cap"]}
              eps: {config["norm_eps"]}
    - rms_norm: {{name: norm, eps: {config["norm_eps"]}}}
    - unembed: {{bias: false}}
    - soft_cap: {{cap: {config["output_logit_soft_cap"]}}}
expect: {{params: {config["num_params"]}}}
checkpoint:
  embed: embedding
  blocks.{{layer}}.xlstm_large_block: backbone.blocks.{{layer}}
  norm: backbone.out_norm
  unembed: lm_head
"""


def load(case: str) -> tuple[Any, dict[str, Any], str, tuple[str, ...]]:
    data, meta = golden.read(f"xlstm/{case}")
    specs = {"slstm_layer": layer_spec, "slstm_block": block_spec, "xlstm_large": large_spec}
    spec = next((make for name, make in specs.items() if case.startswith(name)), stack_spec)
    return data, meta, spec(meta["config"]), ("idx",) if "in/idx" in data else ("x",)


@pytest.mark.parametrize("case", CASES)
def test_float64_across_implementations(case: str) -> None:
    data, meta, text, inputs = load(case)
    golden.compare64(data, meta, golden.run(data, text, torch.float64, inputs)[0], 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_float64_same_implementation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """xLSTM-large runs the official chunkwise kernel, which includes the path of m = 0 as ours does; the others do not.
    """
    data, meta, text, inputs = load(case)
    if not case.startswith("xlstm_large"):
        golden.without_initial_path(monkeypatch)
    golden.compare64(data, meta, golden.run(data, text, torch.float64, inputs)[0], 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_float32(case: str) -> None:
    data, meta, text, inputs = load(case)
    golden.compare32(data, meta, golden.run(data, text, torch.float32, inputs)[0])


@pytest.mark.parametrize("case", CASES)
def test_the_state_after_stepping(case: str) -> None:
    """Token by token from an empty state, against the official steps: only rounding differs."""
    data, _, text, inputs = load(case)
    _, model = golden.run(data, text, torch.float64, inputs)
    x = torch.from_numpy(data[f"in/{inputs[0]}"])
    x = x.double() if x.is_floating_point() else x
    state = model.init_state(x.shape[0])
    with torch.no_grad():
        for t in range(x.shape[1]):
            _, state = model.step(x[:, t], state)
    found = dict(flat(state))
    compared = 0
    for key in (k for k in data if k.startswith("state/")):
        theirs = torch.from_numpy(data[key])
        parts = key.split("/")[1:]
        block = f"blocks.{parts[0][6:]}." if parts[0].startswith("block_") else ""
        here = {name.split(".")[-1]: value for name, value in found.items() if name.startswith(block)}
        if "slstm_state" in parts:
            ours = torch.stack([here[name].flatten(1) for name in "ycnm"])
        elif "conv_state" in parts:
            ours, theirs = here["window"], theirs[:, 1:]
        elif "mlstm_state" in parts:
            scale = (1 / math.sqrt(here["n"].shape[-1]), 1 / math.sqrt(here["n"].shape[-1]), 1.0)[int(parts[-1])]
            ours = here["Cnm"[int(parts[-1])]] * scale
        else:
            ours = here[parts[-1].replace("c", "C")]
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-10, atol=1e-10)
        compared += 1
    assert compared > 0
