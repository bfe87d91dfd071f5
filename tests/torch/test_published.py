"""Small models of published architectures that are not bundled: they run, train, and stream where that is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law, check_shapes, random_context, random_input
from tests.sampled import sampled

FOLDER = Path(__file__).parents[1] / "spec" / "published"
WORDS: dict[str, Any] = {"input.tokens": 11, "model.layers.times": 2}
WHOLE: dict[str, dict[str, Any]] = {
    "bert_base": {"inputs.text.tokens": 11, "dim": 24, "model.layers.times": 1},
    "dinov2_small_registers": {"dim": 24, "input.image.size": 28, "model.blocks.times": 1},
    "mambavision_t": {
        "dim": 8, "stem": 4, "depths": [1, 1, 3, 2], "heads": [2, 2, 2, 4], "windows": [8, 8, 3, 2], "classes": 5,
        "input.image.size": 64,
    },
    "mixer_b16": {"dim": 8, "model.layers.times": 1},
    "modernbert_base": {"input.tokens": 11, "dim": 12, "hidden": 8, "heads": 2, "depth": 2},
    "patchtst": {"dim": 8, "heads": 2, "hidden": 12, "depth": 1, "series": 2, "length": 40, "horizon": 3},
    "pvt_v2_b0": {"widths": [4, 8, 10, 8], "input.image.size": 64},
    "vit_b16": {"dim": 24, "input.image.size": 32, "model.layers.times": 1},
}
STREAMS: dict[str, dict[str, Any]] = {
    "codestral_mamba_7b": WORDS | {"dim": 256},
    "dual_path": {"dim": 8, "heads": 2, "hidden": 6, "chunk": 3, "depth": 1, "rounds": 1},
    "deepseek_v3": {
        "input.tokens": 11, "layers": "d m", "dim": 12, "heads": 2, "head": 4, "common": 2, "rank": 6, "q_rank": 5,
        "hidden": 16, "experts": 4, "top": 2, "groups": 2, "top_groups": 1, "each": 6,
    },
    "falcon_7b": WORDS | {"dim": 142, "head": 2},
    "falcon_h1_05b": WORDS
    | {"dim": 12, "heads": 2, "kv_heads": 1, "head": 4, "hidden": 16, "ssm": 8, "mamba_head": 4, "state": 4},
    "gemma_2b": WORDS | {"dim": 12, "head": 4, "hidden": 16},
    "gpt_oss_20b": {
        "input.tokens": 11, "rounds": 1, "dim": 12, "heads": 2, "kv_heads": 1, "head": 4, "window": 3, "experts": 4,
    },
    "jamba_v01": {
        "input.tokens": 11, "model.layers.pattern": "mam", "groups": 1, "dim": 12, "heads": 2, "kv_heads": 1,
        "hidden": 8, "state": 2, "rank": 3, "experts": 3,
    },
    "lfm2_350m": {
        "input.tokens": 11, "rounds": "c a", "dim": 12, "heads": 2, "kv_heads": 1, "head": 4, "hidden": 16,
    },
    "llama2_7b": WORDS | {"dim": 64, "hidden": 16},
    "mixtral_8x7b": WORDS | {"dim": 64, "hidden": 16},
    "mor_118m": {"input.tokens": 11, "dim": 16, "heads": 2, "kv_heads": 1, "hidden": 12, "depth": 1},
    "nemotron_h_8b": {
        "input.tokens": 11, "layers": "m f a", "dim": 16, "heads": 4, "kv_heads": 2, "hidden": 16, "inner": 512,
    },
    "nsa_1b": {
        "input.tokens": 11, "depth": 1, "dim": 12, "heads": 4, "kv_heads": 2, "head": 4, "hidden": 16,
        "model.layers.token.nsa.block": 3, "model.layers.token.nsa.window": 5, "model.layers.token.nsa.top": 3,
        "model.layers.token.nsa.cache": 60,
    },
    "opt_125m": WORDS | {"dim": 24},
    "pythia_160m": WORDS | {"dim": 48, "turned": 2},
    "qwen2_05b": WORDS | {"dim": 56, "hidden": 16},
    "soundstream": {"c": 2, "s2": 1, "s3": 3, "s4": 2},
    "tcn": {"model.levels.times": 2},
    "wavenet": {"dim": 4, "skip": 3, "model.stacks.layers.times": 3},
    "whisper_tiny": {"dim": 12, "layers": 1, "inputs.text.tokens": 11, "inputs.mel.length": 8},
}  # fmt: skip


def small(name: str, changes: dict[str, Any]) -> SequenceModel:
    path = str(FOLDER / f"{name}.yaml")
    return seqblocks.build(path, set=changes, dtype=torch.float64, device="cpu", seed=0).eval()


def test_all_of_them_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*WHOLE, *STREAMS}


@pytest.mark.parametrize("name", sampled(STREAMS, every=6, ci=1))
def test_it_streams(name: str) -> None:
    model = small(name, STREAMS[name])
    check_law(model, seq=5, cuts=[2])
    if model.frame_size == 1 and name != "tcn":  # returns a single vector
        check_law(model, seq=5, cuts=[2], resets=[(0, 3), (1, 1)])


@pytest.mark.parametrize("name", WHOLE)
def test_it_runs_and_trains(name: str) -> None:
    model = small(name, WHOLE[name])
    check_shapes(model)
    length = model.spec.input.length
    x = random_input(model, 2, length if isinstance(length, int) else 6)
    y = model(x, **random_context(model, 2, seq=x.shape[1]))
    torch.stack([each.square().sum() for each in (y.values() if isinstance(y, dict) else [y])]).sum().backward()
    for what, parameter in model.named_parameters():
        assert parameter.grad is not None, what
        assert parameter.grad.isfinite().all(), what
