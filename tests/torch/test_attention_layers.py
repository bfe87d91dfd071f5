"""Attention layers: the state law, a full cache, compilers, reverse order, an independent transformer block.

The kernel is tested in tests/kernels/test_attention.py and tests/kernels/test_conformance.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels import use_backend
from seqblocks.testing import check_law
from tests.kernels.test_attention import by_hand, marked, near


def build(steps: str, features: int = 8, **options: Any) -> Any:
    text = f"seqblocks: 1\nuse: [transformer]\nmodel:\n  input: {{features: {features}}}\n  steps:\n{steps}"
    return seqblocks.build_text(text, dtype=torch.float64, **options)


@pytest.mark.parametrize("given", ["window: 5", "kv_heads: 1, cache: 23", "rotary: 0, window: 1"])
def test_the_law(given: str) -> None:
    model = build(f"    - attention_layer: {{dim: 8, heads: 2, {given}}}\n")
    check_law(model, resets=((0, 3), (1, 22)))
    check_law(model)


def test_a_full_cache_is_reported() -> None:
    model = build("    - attention_layer: {dim: 8, heads: 2, cache: 4}\n")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    model(x)  # nothing is cached, so nothing can be missing
    _, state = model(x[:, :4], return_state=True)
    with pytest.raises(seqblocks.RunError, match="has seen 5 tokens, but its cache has room for 4"):
        model.step(x[:, 4], state)
    resets = torch.ones(1, 1, dtype=torch.bool)
    model(x[:, 4:], state=state, return_state=True, resets=resets)  # a new sequence begins


@pytest.mark.slow
@torch.no_grad()
def test_a_full_cache_is_reported_by_compiled_models_too() -> None:
    model = build("    - attention_layer: {dim: 8, heads: 2, cache: 4}\n").eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    state = model.init_state(1)
    for t in range(4):
        y, state = compiled(x[:, t : t + 1], state=state, return_state=True)
        near([y], [model(x)[:, t : t + 1]])
    with pytest.raises(RuntimeError, match="its cache has room for 4"):
        compiled(x[:, 4:], state=state, return_state=True)


@pytest.mark.long  # test_attention_scores.py compiles and exports attention
@torch.no_grad()
@pytest.mark.parametrize("given", ["kv_heads: 1, cache: 16", "window: 3"])
def test_models_compile_and_export(given: str) -> None:
    """A model compiles to one graph, also with resets and state."""
    model = build(f"    - attention_layer: {{dim: 8, heads: 2, {given}}}\n").eval()
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    resets = marked(11, [(0, 4)])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near([compiled(x), compiled(x, resets=resets)], [model(x), model(x, resets=resets)])
    y, state = compiled(x[:, :6], return_state=True)
    rest, _ = compiled(x[:, 6:], state=state, return_state=True)
    near([torch.cat([y, rest], 1)], [model(x)])
    near([torch.export.export(model, (x,), strict=False).module()(x)], [model(x)])


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "backend"),
    [
        pytest.param("window: 3", "auto", marks=pytest.mark.slow),
        pytest.param("window: 1", "auto", marks=pytest.mark.slow),
        pytest.param("window: 3", "reference", marks=pytest.mark.slow), ("cache: 16", "auto"),
    ],
)
def test_one_export_serves_every_length(given: str, backend: str) -> None:
    """Lengths within the window are included."""
    model = build(f"    - attention_layer: {{dim: 8, heads: 2, {given}}}\n").eval()
    length = torch.export.Dim("length", min=2, max=4096)
    with use_backend(backend):
        x = torch.randn(2, 11, 8, dtype=torch.float64)
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}}, strict=False)
    for seq in (2, 3, 4, 9, 37):
        x = torch.randn(2, seq, 8, dtype=torch.float64)
        near([exported.module()(x)], [model(x)])


@pytest.mark.slow
def test_packed_sequences_compile() -> None:
    """Longer than a block, so that recomputation in the backward pass compiles as well."""
    model = build("    - attention_layer: {dim: 8, heads: 2}\n")
    x = torch.randn(1, 1100, 8, dtype=torch.float64, requires_grad=True)
    resets = marked(1100, [(0, 600)])[:1]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(*([y, *torch.autograd.grad(y.square().sum(), x)] for y in (f(x, resets=resets) for f in (compiled, model))))


@pytest.mark.parametrize("given", ["window: 3", "kv_heads: 1"])
def test_the_reverse_order(given: str) -> None:
    """Each packed sequence is read from its right end, like a sequence flipped explicitly; gradients too."""
    layer = f"{{attention_layer: {{dim: 8, heads: 2, {given}}}}}"
    backward = build(f"    - scan: {{order: reverse, steps: [{layer}]}}\n")
    forward = build(f"    - {layer}\n")
    forward.load_state_dict({k.removeprefix("scan."): v for k, v in backward.state_dict().items()})
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)
    found = backward(x, cu_seqlens=torch.tensor([0, 4, 5, 12]))
    expected = torch.cat([forward(x[:, a:b].flip(1)).flip(1) for a, b in ((0, 4), (4, 5), (5, 12))], 1)
    near(*([y, *torch.autograd.grad(y.square().sum(), x)] for y in (found, expected)))


def test_the_scale_argument() -> None:
    model = build(
        "    - linear: {features: 24, as: [q, k, v]}\n    - attention: {q: q, k: k, v: v, heads: 2, scale: 0.3}\n"
    )
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    made = torch.nn.functional.linear(x, model.linear.weight, model.linear.bias)
    q, k, v = (t.unflatten(-1, (2, 4)) for t in made.chunk(3, -1))
    near([model(x)], [by_hand(q * 0.3 * 2, k, v, True, None, None, None).flatten(-2)])  # the 2 cancels its 1 / sqrt(4)


def test_not_causal_does_not_stream() -> None:
    model = build(
        "    - linear: {features: 24, as: [q, k, v]}\n    - attention: {q: q, k: k, v: v, heads: 2, causal: false}\n"
    )
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    assert not torch.equal(model(x)[:, :4], model(x[:, :4]))
    with pytest.raises(seqblocks.RunError, match="not causal"):
        model.init_state(1)


def test_a_block_against_plain_torch() -> None:
    """The spec equals a LLaMA block written out for one sequence, with rotary positions as complex numbers."""
    model = build("    - transformer_block: {dim: 8, heads: 4, kv_heads: 2, hidden: 12}\n", seed=3)
    w = {k.removeprefix("transformer_block."): p for k, p in model.named_parameters()}
    x = torch.randn(1, 9, 8, dtype=torch.float64)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    u = normed(x, w["attention.residual.norm.weight"]) @ w["attention.residual.qkv.weight"].t()
    q, k, v = (t.unflatten(-1, (-1, 2)) for t in u.split([8, 4, 4], -1))
    y = x + by_hand(q, k, v, True, None, 10_000.0, None).flatten(-2) @ w["attention.residual.out.weight"].t()
    u = normed(y, w["mlp.residual.norm.weight"])
    gate, up, down = (w[f"mlp.residual.swiglu.{name}_weight"] for name in ("gate", "up", "down"))
    expected = y + (torch.nn.functional.silu(u @ gate.t()) * (u @ up.t())) @ down.t()
    near([model(x)], [expected])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("gate", ["before", "after"])
def test_gated_rms_norm(gate: str, groups: int) -> None:
    """`gate: after` multiplies by the gate after gain and bias."""
    model = build(
        "    - linear: {features: 16, as: [x, z]}\n"
        f"    - rms_norm: {{x: x, z: z, gate: {gate}, groups: {groups}, bias: true}}\n"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.rms_norm.parameters():
            p.copy_(torch.randn(8, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    a, z = (x @ model.linear.weight.t() + model.linear.bias).chunk(2, -1)
    opening = z * torch.sigmoid(z)
    a = a * opening if gate == "before" else a
    parts = [part / torch.sqrt(part.square().mean(-1, keepdim=True) + 1e-6) for part in a.chunk(groups, -1)]
    expected = torch.cat(parts, -1) * model.rms_norm.weight + model.rms_norm.bias
    near([model(x)], [expected * opening if gate == "after" else expected])


def test_the_gelu_network() -> None:
    model = build("    - gelu_mlp: {dim: 8, expand: 2}\n")
    w = {k.removeprefix("gelu_mlp."): p for k, p in model.named_parameters()}
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    u = x @ w["up.weight"].t() + w["up.bias"]
    expected = (u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))) @ w["down.weight"].t() + w["down.bias"]
    near([model(x)], [expected])
