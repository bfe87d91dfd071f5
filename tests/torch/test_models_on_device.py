"""Whole models on a CUDA device: outputs, gradients and streams against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqblocks

pytest.importorskip("pydantic", reason="builds models, which need pydantic; the machine of a GPU may lack it")
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.streaming import cuda_graph
from seqblocks.testing import random_input

MODELS = (
    "mlstm_small", "mamba_small", "hybrid_small", "kimi_linear_small", "qwen3_next_small", "samba_small",
    "zamba2_small", "xlstm_deltanet_small", "jamba_small", "mingru_small", "minlstm_small", "looped_small",
    "vil_digits", "centaurus_keywords", "centaurus_mlstm", "slstm_forecaster", "transformer_small", "caduceus_small",
)  # fmt: skip
TOKENS = 96  # more than one chunk of every kernel, and a remainder


def results(model: SequenceModel, x: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradient of each parameter for cotangents that float32 represents."""
    y = model(x)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad((y * cotangent).sum(), [*named.values()], allow_unused=True, materialize_grads=True)
    return {"output": y.detach(), **dict(zip(named, gradients, strict=True))}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each result relative to its largest value, or to a thousandth of all gradients'."""
    largest = max(g.abs().max().item() for name, g in exact.items() if name != "output") / 1000
    return {
        name: (found[name].cpu().double() - x).abs().max().item() / max(x.abs().max().item(), largest)
        for name, x in exact.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_device(name: str) -> None:
    """It may be ten times as far from float64 as float32 is on the CPU, where sums have another order.

    The floor is a thousand roundings: a model has up to a hundred steps, each of which sums over features and tokens.
    """
    plain = seqblocks.build(name, seed=0).eval()
    length = plain.spec.input.length
    x = random_input(plain, 2, length if isinstance(length, int) else plain.frame_size * TOKENS).detach()
    exact = results(seqblocks.build(name, seed=0, dtype="float64").eval(), x.double() if x.is_floating_point() else x)
    near = errors(results(plain, x), exact)
    found = errors(results(plain.to("cuda"), x.to("cuda")), exact)
    floor = 1000 * torch.finfo(torch.float32).eps
    assert {name: (e, near[name]) for name, e in found.items() if not e <= max(10 * near[name], floor)} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlstm_small", "mamba_small", "hybrid_small", "transformer_small"])
def test_tokens_from_a_graph_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of `generate` are recorded there; without a recorder they are not. Both launch the same kernels."""
    model = seqblocks.build(name, seed=0, device="cuda").eval()
    prompt = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(1))
    found = seqblocks.generate(model, prompt, 40, stop=7, temperature=1.0, seed=1)
    monkeypatch.delitem(cuda_graph.RECORDERS, "cuda")
    plain = seqblocks.generate(model, prompt, 40, stop=7, temperature=1.0, seed=1)
    assert [row.tolist() for row in found] == [row.tolist() for row in plain]
