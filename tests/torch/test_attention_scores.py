"""Options of attention that change scores: soft caps, sinks, linear biases.

The kernel is tested in tests/kernels/test_attention.py, also against an implementation that computes each query alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from benchmarks.memory import measure
from seqblocks.kernels.positions import rotary
from seqblocks.ops.attention import Attention
from seqblocks.testing import check_law
from seqblocks.types import Wire
from tests.kernels.test_attention import near

OPTIONS = (
    "soft_cap: 0.7", "sinks: true", "bias: alibi", "bias: learned_alibi, rotary: 100",
    "soft_cap: 2, sinks: true, bias: alibi",
)  # fmt: skip


def build(given: str, kv_heads: int = 2, verb: str = "attention", **options: Any) -> Any:
    """Return a model of one attention with 4 heads of 2 features, with random parameters."""
    steps = f"[{{linear: {{features: {8 + 4 * kv_heads}, as: {{q: 8, k: {2 * kv_heads}, v: {2 * kv_heads}}}}}}}]"
    text = f"""
seqblocks: 1
model:
  input: {{features: 8}}
  steps:
    - {steps[1:-1]}
    - {verb}: {{q: q, k: k, v: v, heads: 4, kv_heads: {kv_heads}, {given}}}
"""
    model = seqblocks.build_text(text, dtype=torch.float64, seed=1, **options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.copy_(torch.linspace(-1, 2, 4))
    return model


@pytest.mark.parametrize("given", [
    *(f"{given}, {window}" for given in OPTIONS for window in ("window: 5", "cache: 23")),
    "chunk: 1", "chunk: 4", "chunk: 4, rotary: 100", "chunk: 5, rotary: 100, sinks: true, bias: alibi",
    "window: 1, keep_first: 1", "window: 4, keep_first: 2, rotary: 100", "window: 3, keep_first: 30",
    "window: 5, keep_first: 4, sinks: true, bias: alibi",
])
def test_the_law(given: str) -> None:
    """Of 23 tokens, so that the cache is full at the end. The second call also runs the plan of a token."""
    model = build(given).eval()
    check_law(model, resets=((0, 3), (1, 22)))
    check_law(model)


@pytest.mark.parametrize("seq", range(4, 9))
def test_chunks_after_a_reset_stay_in_the_state(seq: int) -> None:
    """Only a reset clears keys, also where a call ends in a later chunk of the same sequence."""
    check_law(build("chunk: 3").eval(), seq=seq, resets=((0, 0), (1, 1)))


def test_first_tokens_stay_visible() -> None:
    """The last of 9 tokens sees the first 2 and itself with the 2 tokens before it."""
    model = build("window: 3, keep_first: 2")
    x = torch.randn(1, 9, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[0, -1].sum(), x)
    assert [*gradient[0].any(-1)] == [True, True, *[False] * 4, *[True] * 3]
    assert {name: tuple(part.shape[1:]) for name, part in model.init_state(1)["attention"].items()} == {
        "k": (2, 4), "v": (2, 4), "length": (), "first_k": (2, 4), "first_v": (2, 4),
    }  # fmt: skip


@pytest.mark.parametrize(("length", "pairs"), [(2, 3), (4, 10), (9, 35)])
def test_costs_of_first_tokens(length: int, pairs: int) -> None:
    """Of 9 tokens, the first three see 1, 2 and 3, the fourth 4, and all later ones 3 in the window and 2 before it."""
    q, k = (Wire("sequence", width, length=length) for width in (8, 4))
    assert Attention(heads=4, kv_heads=2, window=3, keep_first=2).macs(q, k, k) == pairs * 16 // length


@pytest.mark.parametrize("causal", ["true", "false"])
def test_a_chunk_is_a_sequence_of_its_own(causal: str) -> None:
    """Without positions, chunks give the same result as resets at their starts; with resets, chunks start there."""
    chunked, whole = build(f"chunk: 4, causal: {causal}"), build(f"causal: {causal}")
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    near([chunked(x)], [whole(x, cu_seqlens=torch.tensor([0, 4, 8, 11]))])
    near([chunked(x, cu_seqlens=torch.tensor([0, 3, 11]))], [whole(x, cu_seqlens=torch.tensor([0, 3, 7, 11]))])


def test_llama_4() -> None:
    """transformers masks chunks by the index of the token, while rotary positions count on."""
    masks = pytest.importorskip("transformers.masking_utils")
    model = build("chunk: 4, rotary: 100")
    whole = build("rotary: 100")
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    sees = masks.chunked_overlay(4, torch.zeros(1, dtype=torch.long))
    mask = torch.tensor([[bool(sees(0, 0, q, k)) and k <= q for k in range(11)] for q in range(11)])
    q, k, v = (t.transpose(1, 2) for t in parts(whole, x))
    q, k = (rotary(t, torch.arange(11)[None], 100.0) for t in (q, k))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    near([model(x)], [expected.transpose(1, 2).flatten(2)])


@pytest.mark.parametrize(("length", "pairs"), [(4, 10), (11, 26), (3, 6)])
def test_costs_of_chunks(length: int, pairs: int) -> None:
    """Each visible pair costs a product of 2 and a sum of 2 for each of 4 heads; 11 tokens have 10 + 10 + 6 pairs."""
    q, k = (Wire("sequence", width, length=length) for width in (8, 4))
    assert Attention(heads=4, kv_heads=2, chunk=4).macs(q, k, k) == pairs * 16 // length


def parts(model: Any, x: Tensor) -> list[Tensor]:
    """Return q, k and v [B, heads, S, 2] of the model's attention."""
    made = torch.nn.functional.linear(x, model.linear.weight, model.linear.bias)
    return [t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in made.split([8, 4, 4], -1)]


def causal_mask(S: int) -> Tensor:
    return torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)


def test_gemma_2() -> None:
    """transformers computes this softmax in float32: weights have an error of about 2^-24."""
    module = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    model = build("soft_cap: 0.7, scale: 1.3")
    x = 3 * torch.randn(2, 11, 8, dtype=torch.float64)
    layer = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=2)
    expected, _ = module.eager_attention_forward(layer, *parts(model, x), causal_mask(11), scaling=1.3, softcap=0.7)
    near([model(x)], [expected.flatten(2)], bar=1e-6)


def test_gpt_oss() -> None:
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    model = build("sinks: true")
    x = 3 * torch.randn(2, 11, 8, dtype=torch.float64)
    layer = SimpleNamespace(num_key_value_groups=2, training=False, sinks=model.attention.sinks)
    expected, _ = module.eager_attention_forward(layer, *parts(model, x), causal_mask(11), scaling=2**-0.5)
    near([model(x)], [expected.flatten(2)])


@pytest.mark.parametrize("heads", [4, 6, 8])
def test_bloom(heads: int) -> None:
    """BLOOM adds the slope times the position of the key, which differs by a constant per query."""
    module = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    text = f"""
seqblocks: 1
model:
  input: {{features: {6 * heads}}}
  steps:
    - linear: {{from: input, features: {2 * heads}, as: q, name: q}}
    - linear: {{from: input, features: {2 * heads}, as: k, name: k}}
    - linear: {{from: input, features: {2 * heads}, as: v, name: v}}
    - attention: {{q: q, k: k, v: v, heads: {heads}, bias: alibi}}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    x = torch.randn(2, 40, 6 * heads, dtype=torch.float64)
    q, k, v = (layer(x).unflatten(-1, (heads, 2)).transpose(1, 2) for layer in (model.q, model.k, model.v))
    alibi = module.build_alibi_tensor(torch.ones(2, 40), heads, torch.float64).view(2, heads, 1, 40)
    scores = q @ k.transpose(2, 3) / 2**0.5 + alibi + causal_mask(40)
    near([model(x)], [(scores.softmax(-1) @ v).transpose(1, 2).flatten(2)])


def test_mpt_has_the_same_slopes_for_a_power_of_two() -> None:
    module = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    slopes = build("bias: learned_alibi").attention.slopes
    expected = module.build_mpt_alibi_tensor(4, 9)  # [heads, 1, keys], for the last query
    near([-slopes.detach()[:, None] * torch.arange(8, -1, -1)], [expected[:, 0].double()])


def test_learned_slopes_begin_with_those_of_alibi() -> None:
    fixed, learned = build("bias: alibi"), build("bias: learned_alibi")
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    near([learned(x)], [fixed(x)])
    learned(x).square().sum().backward()
    assert (learned.attention.slopes.grad != 0).all()
    assert seqblocks.summarise(learned).params == seqblocks.summarise(fixed).params + 4


def test_a_sink_takes_weight_from_the_tokens() -> None:
    model = build("sinks: true")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    _, _, v = parts(model, x)
    q, k, _ = parts(model, x)
    score = (q[:, :, 0] * k.repeat_interleave(2, 1)[:, :, 0]).sum(-1) / 2**0.5
    share = torch.sigmoid(score - model.attention.sinks)  # the first token sees itself and the sink
    expected = share.unsqueeze(-1) * v.repeat_interleave(2, 1)[:, :, 0]
    near([model(x)[:, 0]], [expected.flatten(1)])


@pytest.mark.parametrize("given", ["soft_cap: 0.7", "sinks: true", "soft_cap: 0.7, sinks: true"])
def test_attention_to_a_memory(given: str) -> None:
    """With a memory that is the sequence itself, as attention that is not causal."""
    over, self = build(given, verb="cross_attention"), build(f"{given}, causal: false")
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    near([over(x)], [self(x)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "length"),
    [
        *((given, 256) for given in OPTIONS[:3]), (OPTIONS[-1], 600), ("soft_cap: 2, window: 32", 600),
        ("window: 32, keep_first: 4", 600),
    ],
)
def test_the_memory_of_training_is_estimated(given: str, length: int) -> None:
    """Weights of all pairs, or of a block of queries, are most of it."""
    torch.set_num_threads(1)
    spec = build(given).spec
    found = seqblocks.memory(spec, batch=2, length=length)
    assert found.peak_bytes == pytest.approx(measure(seqblocks.build_model(spec), 2, length).peak, rel=0.1)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "given", [pytest.param("soft_cap: 0.7, sinks: true, cache: 20", marks=pytest.mark.long), "bias: alibi, window: 3"]
)
def test_models_compile_and_export(given: str) -> None:
    model = build(given).eval()
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    y, state = compiled(x[:, :6], return_state=True)
    rest, _ = compiled(x[:, 6:], state=state, return_state=True)
    near([torch.cat([y, rest], 1)], [model(x)])
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}}, strict=False).module()
    for seq in (2, 3, 37):
        x = torch.randn(2, seq, 8, dtype=torch.float64)
        near([program(x)], [model(x)])
