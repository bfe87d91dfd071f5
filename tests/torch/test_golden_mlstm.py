"""xLSTM's mLSTM cell, layer and block against the official package: outputs, gradients, and the state of a stream.

The tolerances are those of test_golden_vil.py. The package stores keys divided by sqrt(DK) in its state; we store them
undivided, as its kernel library does, so C and n differ by that factor. Its convolution stores K inputs including the
current one, ours the K - 1 that later tokens need.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seqblocks import state as states
from tests.torch import golden

CASES = sorted(p.stem for kind in ("cell", "layer", "block") for p in (golden.FOLDER / "xlstm").glob(f"mlstm_{kind}*"))


def spec(config: dict[str, Any], kind: str) -> str:
    dim, heads = config["embedding_dim"], config["num_heads"]
    if kind == "cell":
        return f"""
seqblocks: 1
use: [xlstm]
blocks:
  parts:
    args: {{heads: int}}
    steps:
      - dropout: {{p: 0.0, as: [q, k, v]}}
      - mlstm_cell: {{name: cell, from: v, q: q, k: k, heads: heads}}
    checkpoint: {{cell: ""}}
model:
  input: {{features: {3 * dim}}}
  steps:
    - parts: {{heads: {heads}}}
checkpoint: {{parts: ""}}
"""
    return f"""
seqblocks: 1
use: [xlstm]
model:
  input: {{features: {dim}}}
  steps:
    - mlstm_{kind}:
        name: it
        dim: {dim}
        heads: {heads}
        expand: {config["proj_factor"]}
        multiple: {config["round_proj_up_to_multiple_of"]}
        qkv_block: {config["qkv_proj_blocksize"]}
        kernel: {config["conv1d_kernel_size"]}
        bias: {str(config["bias"]).lower()}
checkpoint: {{it: ""}}
"""


def load(case: str) -> tuple[Any, dict[str, Any], str, tuple[str, ...]]:
    data, meta = golden.read(f"xlstm/{case}")
    kind = case.split("_")[1]
    return data, meta, spec(meta["config"], kind), ("q", "k", "v") if kind == "cell" else ("x",)


@pytest.mark.parametrize("case", CASES)
def test_float64_across_implementations(case: str) -> None:
    data, meta, text, inputs = load(case)
    golden.compare64(data, meta, golden.run(data, text, torch.float64, inputs)[0], 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_float64_same_implementation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, meta, text, inputs = load(case)
    golden.without_initial_path(monkeypatch)
    golden.compare64(data, meta, golden.run(data, text, torch.float64, inputs)[0], 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_float32(case: str) -> None:
    data, meta, text, inputs = load(case)
    golden.compare32(data, meta, golden.run(data, text, torch.float32, inputs)[0])


@pytest.mark.parametrize("case", CASES)
def test_the_state_after_stepping(case: str) -> None:
    """Token by token from an empty state: the same recurrence on both sides, so only rounding differs (1e-10)."""
    data, _, text, inputs = load(case)
    _, model = golden.run(data, text, torch.float64, inputs)
    x = torch.cat([torch.from_numpy(data[f"in/{name}"]).double() for name in inputs], -1)
    state = model.init_state(x.shape[0])
    with torch.no_grad():
        for t in range(x.shape[1]):
            _, state = model.step(x[:, t], state)
    found = {name.split(".")[-1]: tensor for name, tensor in flat(states.detach(state))}
    names = ("state_kscaled/c", "state_kscaled/n", "state_kscaled/m")
    if names[0] not in data:
        names = ("state/mlstm_state/0", "state/mlstm_state/1", "state/mlstm_state/2")
        window = torch.from_numpy(data["state/conv_state/0"])
        torch.testing.assert_close(found["window"], window[:, 1:], rtol=1e-10, atol=1e-10)
    scale = math.sqrt(found["n"].shape[-1])
    for name, ours in zip(names, (found["C"] / scale, found["n"] / scale, found["m"]), strict=True):
        theirs = torch.from_numpy(data[name]).reshape(ours.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    out: list[tuple[str, torch.Tensor]] = []
    for key, value in tree.items():
        out += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return out
