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
DEVICE = "cuda"  # rehearsals replace it
TOKENS = 96  # more than one chunk of every kernel, and a remainder
INPUT = "seqblocks: 1\nuse: [transformer, attention]\nmodel:\n  input: {features: 32}\n  steps:\n"
TEXTS = {
    "soft caps, sinks, biases": """
    - linear: {features: 96, as: [q, k, v], name: a}
    - attention: {q: q, k: k, v: v, heads: 4, soft_cap: 5, sinks: true}
    - linear: {features: 96, as: [q2, k2, v2], name: b}
    - attention: {q: q2, k: k2, v: v2, heads: 4, window: 16, bias: alibi, sinks: true, name: near}
    - linear: {features: 96, as: [q3, k3, v3], name: c}
    - attention: {q: q3, k: k3, v: v3, heads: 4, window: 16, keep_first: 2, name: first}
""",
    "latent attention": """
    - latent_attention_mixer: {dim: 32, heads: 4, head: 8, common: 8, rotary: 100, rank: 16, compressed: true}
    - latent_attention_mixer: {dim: 32, heads: 4, head: 8, rank: 16, cache: 128, name: whole}
""",
    "each": """
    - each: {axis: features, size: 8, steps: [{linear: {features: 8}}, {causal_conv: {kernel: 4}}], name: parts}
""",
    "a cell that is scanned": """
    - linear: {features: 96, as: [a, b, c], name: gates}
    - cell: {from: b, state: {s: 32}, steps: [{calc: {s: "sigmoid(a) * s + b", y: "c * s"}}]}
""",
    "a cell that loops": """
    - linear: {features: 32, as: b, name: gates}
    - cell: {from: b, state: {s: 32}, steps: [{calc: {s: "0.5 * tanh(s) + b"}}]}
""",
}  # steps that are newer than the last run on a device, of models with 32 features
WINDOWS = """
seqblocks: 1
model:
  input: {image: {size: 16, channels: 3}}
  steps:
    - patch_embed: {patch: 2, features: 24}
    - each:
        axis: windows
        size: 4
        shift: 2
        steps:
          - linear: {features: 72, as: [q, k, v], name: qkv}
          - attention: {q: q, k: k, v: v, heads: 3, causal: false, bias: relative}
"""


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
    compare(seqblocks.build(name, seed=0), seqblocks.build(name, seed=0, dtype="float64"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEXTS)
def test_newer_steps_on_a_device(name: str) -> None:
    """The same for `TEXTS`, and a stream in a graph gives what the step gives."""
    text = INPUT + TEXTS[name]
    compare(seqblocks.build_text(text, seed=0), seqblocks.build_text(text, seed=0, dtype="float64"))
    model = seqblocks.build_text(text, seed=0).eval().to(DEVICE)
    x = random_input(model, 2, 6).detach().to(DEVICE)
    plain, captured = model.stream(2), model.stream(2)
    captured.capture()
    for t in range(6):
        torch.testing.assert_close(captured.step(x[:, t]), plain.step(x[:, t]))


@pytest.mark.gpu
def test_windows_on_a_device() -> None:
    compare(seqblocks.build_text(WINDOWS, seed=0), seqblocks.build_text(WINDOWS, seed=0, dtype="float64"))


def compare(plain: SequenceModel, exact_model: SequenceModel) -> None:
    """Compare the output and all gradients on the device with those on the CPU, as the first test describes."""
    plain.eval()
    length = plain.spec.input.length
    x = random_input(plain, 2, length if isinstance(length, int) else plain.frame_size * TOKENS).detach()
    exact = results(exact_model.eval(), x.double() if x.is_floating_point() else x)
    near = errors(results(plain, x), exact)
    found = errors(results(plain.to(DEVICE), x.to(DEVICE)), exact)
    floor = 1000 * torch.finfo(torch.float32).eps
    assert {name: (e, near[name]) for name, e in found.items() if not e <= max(10 * near[name], floor)} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlstm_small", "mamba_small", "hybrid_small", "transformer_small"])
def test_tokens_from_a_graph_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of `generate` are recorded there; without a recorder they are not. Both launch the same kernels."""
    model = seqblocks.build(name, seed=0, device=DEVICE).eval()
    prompt = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(1))
    found = seqblocks.generate(model, prompt, 40, stop=7, temperature=1.0, seed=1)
    monkeypatch.delitem(cuda_graph.RECORDERS, DEVICE)
    plain = seqblocks.generate(model, prompt, 40, stop=7, temperature=1.0, seed=1)
    assert [row.tolist() for row in found] == [row.tolist() for row in plain]
