"""Mamba's scan, block and language model, and Vision Mamba's blocks, against the official code (its float64 run).

The recurrence is the same on both sides, so float64 differs only by rounding: 1e-10 of the largest value of an array.
float32: ten times the error of the official float32 run for each case separately, and at least 16 units in the last
place of the largest value, since that error can be zero by chance for few numbers. The files lack the official float32
error of gradients; an independent float32 run had 1.1e-6 of the largest entry, so the bound is 1.1e-5.

A quirk that the spec reproduces, without support by a primitive: Vision Mamba v1 shares D between its directions and
adds it in both, so D x is added twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import seqblocks
from seqblocks.checkpoint import load_official, official_name
from seqblocks.kernels import selective_scan
from tests.torch import golden

FOLDER = golden.FOLDER / "mamba"
SCANS = sorted(p.stem for p in FOLDER.glob("scan_*"))
MODELS = sorted(p.stem for kind in ("block", "bi", "lm") for p in FOLDER.glob(f"{kind}_*"))
FORMS = ("reference", "torch")


def close(name: str, found: torch.Tensor, expected: Any, bar: float) -> None:
    theirs = torch.from_numpy(np.asarray(expected))
    assert found.shape == theirs.shape, name
    assert (found.detach() - theirs).abs().max() <= bar * max(1.0, theirs.abs().max().item()), name


def bars(data: Any, key: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerances of the output `key` and of gradients, relative to the largest value (at least 1) of each.
    """
    if dtype == torch.float64:
        return 1e-10, 1e-10
    exact = data[f"out/{key}"]
    return 10 * np.abs(data[f"out32/{key}"] - exact).max() / max(1.0, np.abs(exact).max()) + 16 * 2**-24, 1.1e-5


def scan_inputs(data: Any, cfg: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return leaves in the official layout."""
    out = {}
    for key in (k for k in data if k.startswith("in/")):
        x = torch.from_numpy(data[key])
        kind = {torch.float64: torch.complex128, torch.float32: torch.complex64}[dtype] if x.is_complex() else dtype
        out[key[3:]] = x.to(kind).requires_grad_()
    return out


def matrix(x: torch.Tensor, variable: bool, complex_: bool) -> torch.Tensor:
    """Return B or C from [E, N], [B, N, S] or [B, G, N, S] (complex ones as interleaved pairs on the last axis)."""
    if not variable:
        return x
    if complex_:
        x = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return x.movedim(-1, 1)


@pytest.mark.parametrize(("case", "form"), [
    (case, form) for case in SCANS for form in FORMS if form == "reference" or "complex" not in case
])
def test_scan(case: str, form: str) -> None:
    """Only the reference supports a complex A; tests/kernels/test_selective_scan.py tests the error of the other."""
    data, cfg = golden.read(f"mamba/{case}", "cfg")
    assert cfg["complex_A"] == ("complex" in case)
    for dtype in (torch.float64, torch.float32):
        x = scan_inputs(data, cfg, dtype)
        y, last = selective_scan(
            x["u"].transpose(1, 2),
            x["delta"].transpose(1, 2),
            x["A"],
            matrix(x["B"], cfg["variable_B"], cfg["complex_A"]),
            matrix(x["C"], cfg["variable_C"], cfg["complex_A"]),
            D=x.get("D"),
            z=x["z"].transpose(1, 2) if "z" in x else None,
            dt_bias=x.get("delta_bias"),
            dt_softplus=cfg["delta_softplus"],
            return_state=True,
            backend=form,
        )
        (y.transpose(1, 2) * torch.from_numpy(data["cot/y"]).to(dtype)).sum().backward()
        bar, slope = bars(data, "y", dtype)
        close("y", y.transpose(1, 2), data["out/y"], bar)
        close("state", last, data["out/last_state"], bars(data, "last_state", dtype)[0])
        for name, leaf in x.items():
            close(name, leaf.grad, data[f"grad/{name}"], slope)


def model_spec(case: str, cfg: dict[str, Any]) -> str:
    dim = cfg["d_model"]
    if cfg["kind"] == "mamba_lm":
        norm = "rms_norm: {name: norm, eps: 1e-5}" if cfg["rms_norm"] else "layer_norm: {name: norm, eps: 1e-5}"
        return f"""
seqblocks: 1
use: [mamba]
model:
  input: {{tokens: {cfg["padded_vocab"]}}}
  steps:
    - embed: {{features: {dim}}}
    - repeat:
        name: layers
        times: {cfg["n_layer"]}
        steps:
          - residual:
              name: block
              steps: [{norm}, mamba_mixer: {{name: mixer, dim: {dim}, state: {cfg["d_state"]}}}]
    - {norm.replace("name: norm", "name: norm_f")}
    - unembed: {{bias: false, tie: embed}}
checkpoint:
  embed: backbone.embedding
  layers.{{layer}}.block: backbone.layers.{{layer}}
  layers.{{layer}}.block.mixer.ssm.A_log: backbone.layers.{{layer}}.mixer.A_log
  layers.{{layer}}.block.mixer.ssm.D: backbone.layers.{{layer}}.mixer.D
  norm_f: backbone.norm_f
"""
    kind = cfg.get("bimamba_type", "none")
    verb = {"v1": "vim_v1_mixer", "v2": "vim_v2_mixer"}.get(kind, "mamba_mixer")
    more = f"bias: {str(cfg.get('bias', False)).lower()}"
    if verb == "mamba_mixer":
        rank = cfg.get("dt_rank", "auto")
        more += f", conv_bias: {str(cfg.get('conv_bias', True)).lower()}, rank: {0 if rank == 'auto' else rank}"
    else:
        more += f", merge: {'mean' if kind == 'v2' and cfg.get('if_divide_out') else 'sum'}"
    scale = "    - layer_scale: {name: gamma}\n" if cfg.get("init_layer_scale") else ""
    return f"""
seqblocks: 1
use: [mamba]
model:
  input: {{features: {dim}}}
  steps:
    - {verb}: {{name: it, dim: {dim}, state: {cfg["d_state"]}, {more}}}
{scale}checkpoint: {{it: ""{", gamma.weight: gamma" if scale else ""}}}
"""


def built(case: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Any]:
    data, cfg = golden.read(f"mamba/{case}", "cfg")
    model = seqblocks.build_text(model_spec(case, cfg), dtype=dtype).eval()
    weights = {k[2:]: torch.from_numpy(data[k]).to(dtype) for k in data if k.startswith("w/")}
    load_official(model, weights)
    return data, cfg, model


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str) -> None:
    for dtype in (torch.float64, torch.float32):
        data, _, model = built(case, dtype)
        tokens = "in/input_ids" in data
        x = torch.from_numpy(data["in/input_ids" if tokens else "in/x"])
        x = x if tokens else x.to(dtype).requires_grad_()
        y = model(x)
        key = "logits" if tokens else "y"
        (y * torch.from_numpy(data[f"cot/{key}"]).to(dtype)).sum().backward()
        bar, slope = bars(data, key, dtype)
        close("y", y, data[f"out/{key}"], bar)
        if not tokens:
            close("x", x.grad, data["grad/x"], slope)
        for name, parameter in model.named_parameters():
            official = official_name(model.spec, name)
            close(official, parameter.grad, data[f"grad/{official}"], slope)


@pytest.mark.parametrize("case", [case for case in MODELS if not case.startswith("bi_v")])
def test_streams_as_the_official_steps_do(case: str) -> None:
    data, _, model = built(case, torch.float64)
    x = torch.from_numpy(data["in/input_ids" if "in/input_ids" in data else "in/x"])
    x = x if not x.is_floating_point() else x.double()
    state, parts = model.init_state(2), []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = model.step(x[:, t], state)
            parts.append(y)
    y = torch.stack(parts, 1)
    close("steps", y, data["out/logits" if "out/logits" in data else "out/y"], 1e-10)
    if "out/ssm_state" in data:
        close("h", state["it"]["ssm"]["h"], data["out/ssm_state"], 1e-10)
        close("window", state["it"]["conv1d"]["window"].transpose(1, 2), data["out/conv_state"][..., 1:], 1e-10)
