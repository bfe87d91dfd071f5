"""Bundled models whose steps share parameters: stored parameters and computed values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot, rms_norm

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law
from tests.unshared import check_unshared

SMALL: dict[str, dict[str, Any]] = {
    "zamba_small": {"dim": 16, "rounds": 3, "vocabulary": 11},
    "looped_small": {"dim": 16, "loops": 3, "vocabulary": 11},
    "caduceus_small": {"dim": 8, "depth": 2},
}


def built(name: str) -> SequenceModel:
    model = seqblocks.build(name, set=SMALL[name], dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


@pytest.mark.parametrize("name", SMALL)
def test_they_are_models_whose_parameters_are_repeated(name: str) -> None:
    check_unshared(built(name), seq=9)


@pytest.mark.parametrize("name", ["zamba_small", "looped_small"])
def test_they_stream(name: str) -> None:
    """test_law.py tests more lengths."""
    check_law(built(name), seq=9, cuts=[2, 6], resets=[(0, 4), (1, 7)], tolerance=1e-9)


def test_a_zamba_has_one_attention_block() -> None:
    model = seqblocks.build("zamba_small", device="meta")
    d, inner, low, state = 128, 256, 8, 16
    mixer = d * 2 * inner + 5 * inner + inner * (low + 2 * state) + (low + 1) * inner + inner * (state + 1) + inner * d
    shared = 2 * d + 6 * d * 2 * d + 2 * d * d + d + 3 * d * 4 * d
    ends = 256 * d + d
    assert sum(p.numel() for p in model.parameters()) == ends + 6 * (mixer + d) + shared + 2 * d * d
    names = [name for name in model.state_dict() if ".attention." in name]
    assert {name.rpartition(".attention.")[0] for name in names} == {"layers.2.residual"}
    _, state = built("zamba_small")(torch.zeros(1, 3, dtype=torch.long), return_state=True)
    attending = [label for label, layer in state["layers"].items() if "attention" in layer.get("residual", {})]
    assert attending == ["2", "5", "8"]


def test_a_looped_transformer_runs_one_block_often() -> None:
    model = built("looped_small")
    tokens = torch.randint(11, (2, 7))
    start = x = model.embed.weight[tokens]
    for at in range(3):
        x = model.loop[0].block(x + start if at else x)
    x = rms_norm(x, (16,), model.norm.weight, 1e-6)
    torch.testing.assert_close(model(tokens), linear(x, model.embed.weight), rtol=1e-12, atol=1e-12)


def reverse_complement(x: Tensor) -> Tensor:
    """Return the reverse complement. Bases are in the order A, C, G, T."""
    return x.flip(1, 2)


def test_a_caduceus_reads_both_strands_alike() -> None:
    model = built("caduceus_small")
    x = one_hot(torch.randint(4, (2, 13)), 4).double()
    torch.testing.assert_close(model(reverse_complement(x)), reverse_complement(model(x)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(x.flip(1)), model(x).flip(1))


def test_a_caduceus_has_one_layer_for_both_strands_and_directions_that_share_projections() -> None:
    names = set(seqblocks.build("caduceus_small", device="meta").state_dict())
    assert {name.split(".")[2] for name in names if name.startswith("layers.")} == {"layer"}
    inside = {name.partition("residual.scan.")[2] for name in names if "layers.0" in name}
    assert {"mixer.in_proj.weight", "mixer.out_proj.weight", "fwd.mixer.ssm.A_log", "rev.mixer.ssm.A_log"} <= inside
    assert not {name for name in inside if "_proj" in name and "fwd" in name} - {
        f"fwd.mixer.{each}" for each in ("x_proj.weight", "dt_proj.weight", "dt_proj.bias")
    }
