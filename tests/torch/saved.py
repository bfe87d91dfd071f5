"""A small model, the folders that `save` makes of it, and what the tests of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import seqblocks
from seqblocks.checkpoint.record import RECORD

TEXT = """
seqblocks: 1
let: {dim: 4}
model:
  input: {features: dim}
  steps: [linear: {features: 6, name: up}, silu, linear: {features: dim, bias: false, name: down}]
"""
WHOLE = ["config.json", "model.safetensors", RECORD, "spec.yaml"]
SHARDS = [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json", *WHOLE[2:]]


def model(seed: int = 0) -> Any:
    return seqblocks.build_text(TEXT, seed=seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}
