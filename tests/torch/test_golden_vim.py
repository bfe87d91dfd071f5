"""Whole Vision Mamba models against the official code: every class-token position and pooling of the golden data.

float64 differs only by rounding (1e-10); float32 as in test_golden_mamba.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.checkpoint import load_official, official_name
from tests.torch import golden
from tests.torch.test_golden_mamba import bars, close

CASES = sorted(p.stem for p in (golden.FOLDER / "mamba").glob("vim_*"))


def spec(cfg: dict[str, Any]) -> str:
    dim = cfg["embed_dim"]
    norm = "rms_norm" if cfg["rms_norm"] else "layer_norm"
    mixer = {"v1": "vim_v1_mixer", "v2": "vim_v2_mixer", "none": "mamba_mixer"}[cfg["bimamba_type"]]
    merge = f", merge: {'mean' if cfg['if_divide_out'] else 'sum'}" if mixer != "mamba_mixer" else ""
    maps = ["patch_embed: patch_embed.proj", "position_embed.weight: pos_embed"]
    if not cfg["if_cls_token"]:
        tokens, pool = [], {"mean": "mean", "none": "last"}[cfg["final_pool_type"]]
    elif cfg["use_double_cls_token"]:
        tokens = ["class_token: {name: head_token}", "class_token: {name: tail_token, position: last}"]
        maps += ["head_token.weight: cls_token_head", "tail_token.weight: cls_token_tail"]
        pool = "bilateral_mean"
    else:
        where = "middle" if cfg["use_middle_cls_token"] else "first"
        tokens, pool = [f"class_token: {{position: {where}}}"], where
        maps += ["class_token.weight: cls_token"]
    steps = [f"patch_embed: {{patch: {cfg['patch_size']}, stride: {cfg['stride']}, features: {dim}}}", *tokens]
    steps += [f"position_embed: {{length: {cfg['num_patches'] + cfg['num_tokens']}}}"]
    inner = f"{norm}: {{name: norm, eps: 1e-5}}, {mixer}: {{name: mixer, dim: {dim}, state: {cfg['d_state']}{merge}}}"
    layer = f"residual: {{name: block, steps: [{inner}]}}"
    steps += [f"repeat: {{name: layers, times: {cfg['depth']}, steps: [{layer}]}}"]
    steps += [f"{norm}: {{name: norm_f, eps: 1e-5}}", f"pool: {{mode: {pool}}}"]
    steps += [f"classifier: {{name: head, classes: {cfg['num_classes']}}}"]
    maps += ["'layers.{layer}.block': 'layers.{layer}'", "'layers.{layer}.block.mixer': 'layers.{layer}.mixer'"]
    body, table = ("".join(f"{pad}{line}\n" for line in lines) for pad, lines in (("    - ", steps), ("  ", maps)))
    return (
        f"seqblocks: 1\nuse: [mamba]\nmodel:\n  input: {{image: {{size: {cfg['img_size']}}}}}\n  steps:\n{body}"
        f"expect: {{params: {cfg['n_params']}}}\ncheckpoint:\n{table}"
    )


@pytest.mark.parametrize("case", CASES)
def test_models(case: str) -> None:
    data, cfg = golden.read(f"mamba/{case}", "cfg")
    for dtype in (torch.float64, torch.float32):
        model = seqblocks.build_text(spec(cfg), dtype=dtype).eval()
        load_official(model, {k[2:]: torch.from_numpy(data[k]).to(dtype) for k in data if k.startswith("w/")})
        x = torch.from_numpy(data["in/x"]).to(dtype).requires_grad_()
        y = model(x)
        (y * torch.from_numpy(data["cot/y"]).to(dtype)).sum().backward()
        bar, slope = bars(data, "y", dtype)
        close("y", y, data["out/y"], bar)
        close("x", x.grad, data["grad/x"], slope)
        for name, parameter in model.named_parameters():
            official = official_name(model.spec, name)
            close(official, parameter.grad, data[f"grad/{official}"], slope)
