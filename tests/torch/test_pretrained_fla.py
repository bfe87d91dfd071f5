"""`from_pretrained` on flash-linear-attention models, which tests/golden/fla/make.py ran on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint.weight_files import weights_in

safetensors = pytest.importorskip("safetensors.torch", reason="an optional extra; the test extra installs it")
FOLDER = Path(__file__).parent.parent / "golden" / "fla"
CASES = sorted({path.stem for path in FOLDER.glob("*.npz")} - {"sparse_nsa"})  # which test_selected_attention reads


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    """Return the config, the weights, the ids and the logits."""
    with np.load(FOLDER / f"{name}.npz") as file:
        data = dict(file)
    weights = {key[2:]: torch.from_numpy(value) for key, value in data.items() if key.startswith("w/")}
    ids = torch.from_numpy(data["ids"]).long()
    return json.loads(str(data["config"])), weights, ids, torch.from_numpy(data["logits"])


def written(name: str, place: Path, dtype: torch.dtype) -> tuple[Path, dict[str, Tensor], Tensor, Tensor]:
    config, weights, ids, logits = case(name)
    weights = {key: tensor.to(dtype) for key, tensor in weights.items()}
    place.mkdir()
    safetensors.save_file(weights, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config))
    return place, weights, ids, logits


VARIANTS = {"delta_net_gated", "gated_deltanet_sigmoid", "kda_bounded", "gla_shared", "retnet_shared"}  # run by hand
VARIANTS |= {"gated_deltaproduct_kept", *(f"linear_attn_{name}" for name in ("t2r", "dpfp", "elu"))}
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in VARIANTS else pytest.mark.slow if name == "rwkv7" else ())
    for name in CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_tokens_and_weights_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        place, weights, ids, logits = written(name, tmp_path / str(dtype), dtype)
        model = seqblocks.from_pretrained(place).eval()
        with torch.no_grad():
            assert (model(ids) - logits).abs().max() <= tolerance * logits.abs().max()
    steps, state = [], model.init_state(len(ids))
    with torch.no_grad():
        for t in range(ids.shape[1]):
            logits_t, state = model.step(ids[:, t], state)
            steps.append(logits_t)
    found = torch.stack(steps, 1)
    assert (found - logits).abs().max() <= tolerance * logits.abs().max()
    assert torch.equal(found.argmax(-1), logits.argmax(-1)), "all 36 greedy choices should agree"
    seqblocks.checkpoint.convert(place, "seqblocks", tmp_path / "ours")
    seqblocks.checkpoint.convert(tmp_path / "ours", "official", tmp_path / "back")
    back = weights_in(tmp_path / "back")
    assert back.headers.keys() == weights.keys()
    assert all(torch.equal(back.read(key), tensor) for key, tensor in weights.items())


def test_weights_drawn_anew_have_the_initial_values_of_the_package(tmp_path: Path) -> None:
    def redrawn(name: str) -> dict[str, Tensor]:
        place, *_ = written(name, tmp_path / name, torch.float32)
        return dict(seqblocks.build_model(seqblocks.from_pretrained(place).spec).named_parameters())

    rwkv7, hgrn2 = redrawn("rwkv7"), redrawn("hgrn2")
    assert rwkv7["embed.weight"].abs().max() <= 1e-4
    head = rwkv7["unembed.weight"]
    torch.testing.assert_close(head @ head.T, 0.25 * torch.eye(len(head)), rtol=0, atol=1e-5)
    checked = [hgrn2[name] for name in ("unembed.weight", "layers.0.channel.swiglu.gate_weight")]
    checked += [value for name in ("linear_attn", "gla") for key, value in redrawn(name).items() if is_drawn(key)]
    for value in checked:  # each std has a relative deviation of sqrt(1 / 2n)
        assert abs(value.std() / 0.3 - 1) < 5 * (2 * value.numel()) ** -0.5


def is_drawn(name: str) -> bool:
    """Return whether a parameter is a matrix, which these models draw with the std in their config, 0.3."""
    return name.endswith("weight") and "norm" not in name


@pytest.mark.parametrize(("official", "ours"), [("relu", "q_relu"), ("elu", "q_elu"), ("identity", None)])
def test_deltanet_with_other_activations_of_queries(official: str, ours: str | None, tmp_path: Path) -> None:
    place, *_ = written("delta_net", tmp_path / "it", torch.float32)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "qk_activation": official}))
    names = {name.rpartition(".")[2] for name, _ in seqblocks.from_pretrained(place).named_modules()}
    assert names & {"q_relu", "q_elu"} == ({ours} if ours else set())
