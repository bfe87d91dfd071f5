"""An exported model serves all lengths. (Kernels: tests/kernels/test_conformance.py.)"""

from __future__ import annotations

import pytest
import torch

import seqblocks

MADE_OF_THE_SAME = ("mamba_small", "transformer_small")  # hybrid_small has their mixers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mlstm_small", *(pytest.param(n, marks=pytest.mark.long) for n in ("hybrid_small", *MADE_OF_THE_SAME))],
)
def test_an_exported_model_takes_any_length(name: str) -> None:
    model = seqblocks.build(name, seed=0).eval()
    tokens = torch.randint(40, (2, 300), generator=torch.Generator().manual_seed(0))
    sizes = {"x": {1: torch.export.Dim("seq", min=2, max=4096)}}
    program = torch.export.export(model, (tokens[:, :40].clone(),), dynamic_shapes=sizes, strict=False).module()
    with torch.no_grad():
        for length in (2, 41, 300):
            x = tokens[:, :length].clone()
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
