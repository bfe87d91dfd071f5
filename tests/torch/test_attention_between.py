"""Attention between rates: tokens see the keys of merged tokens that are complete, or merged tokens see finer ones.

Definitions are loops over queries and keys in float64. Sums of at most 40 products have errors of a few 1e-16, so the
tolerances of 1e-12 leave a factor of 1000.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.descriptions.summary import summarise
from seqblocks.kernels.attention import attention, attention_between
from seqblocks.ops.attention import complete_pairs
from seqblocks.testing import check_law, check_lookahead, check_shapes

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def given(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow(
    q: Tensor, k: Tensor, v: Tensor, rates: tuple[int, int], window: int | None = None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with two loops. rates: input tokens of a query and of a key. Times are in input tokens."""
    B, S, H, D = q.shape
    y = q.new_zeros(B, S, H, v.shape[-1])
    for s in range(S):
        end = (s + 1) * rates[0]  # the first input token that is not in the query
        own = (end - 1) // rates[1]  # the key of the last token that is
        seen = [t for t in range(k.shape[1]) if (t + 1) * rates[1] <= end and (window is None or t > own - window)]
        for h in range(H if seen else 0):
            g = h // (H // k.shape[2])
            scores = torch.stack([(q[:, s, h] * k[:, t, g]).sum(-1) / math.sqrt(D) for t in seen], -1)
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            more = scores if sinks is None else torch.cat([scores, sinks[h].expand(B, 1)], -1)
            p = torch.softmax(more, -1)[:, : len(seen)]
            y[:, s, h] = sum(p[:, i, None] * v[:, t, g] for i, t in enumerate(seen))
    return y


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 3}, {"window": 2, "soft_cap": 0.5, "sinks": True}])
@pytest.mark.parametrize("rates", [(1, 4), (3, 1), (2, 3), (6, 4), (1, 1)])
def test_the_definition(rates: tuple[int, int], options: dict[str, Any], backend: str) -> None:
    """In one call, and in calls of one frame each, which continue from the state."""
    frame = math.lcm(*rates)
    S, T = 3 * frame // rates[0], 3 * frame // rates[1]
    q, k, v = given(2, S, 4, 3), given(2, T, 2, 3, seed=1), given(2, T, 2, 5, seed=2)
    if "sinks" in options:
        options = {**options, "sinks": given(4)}
    expected = slow(q, k, v, rates, options.get("window"), options.get("soft_cap"), options.get("sinks"))
    torch.testing.assert_close(attention_between(q, k, v, **options, backend=backend), expected, **CLOSE)
    state, parts = None, []
    for queries, keys, values in zip(q.chunk(3, 1), k.chunk(3, 1), v.chunk(3, 1), strict=True):
        keep = None if "window" in options else T
        y, state = attention_between(
            queries, keys, values, **options, state=state, keep=keep, return_state=True, backend=backend
        )
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)


def test_at_one_rate_it_is_attention() -> None:
    q, k, v = given(2, 9, 4, 3), given(2, 9, 2, 3, seed=1), given(2, 9, 2, 3, seed=2)
    for window in (None, 1, 4):
        expected = attention(q, k, v, window=window)
        torch.testing.assert_close(attention_between(q, k, v, window=window), expected, **CLOSE)


def test_a_state_that_does_not_fit() -> None:
    """One with fewer keys than the window would give other results, as would the length of another batch."""
    q, k, v = given(2, 4, 4, 3), given(2, 1, 2, 3), given(2, 1, 2, 5)
    for keep, length, why in ((1, 2, "a state of 1 tokens is too short for a window of 4"), (3, 1, "state of shapes")):
        state = given(2, keep, 2, 3), given(2, keep, 2, 5), torch.ones(length, dtype=torch.long)
        with pytest.raises(ValueError, match=why):
            attention_between(q, k, v, window=4, state=state)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients(window: int | None) -> None:
    inputs = [given(1, 6, 2, 2).requires_grad_(), given(1, 2, 1, 2, seed=1).requires_grad_(), given(1, 2, 1, 3, seed=2)]
    inputs[2].requires_grad_()
    sinks = given(2, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v: attention_between(q, k, v, window=window), inputs)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: attention_between(q, k, v, window=window, sinks=s, soft_cap=1.0), [*inputs, sinks]
    )


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("rates", [(1, 4), (4, 1)])
def test_long_sequences_in_blocks(rates: tuple[int, int], window: int | None) -> None:
    """More than 512 queries are computed block by block, with gradients. Sums have up to 2,400 terms."""
    S, T = (1200, 300) if rates[1] == 4 else (600, 2400)
    found = []
    for backend in ("torch", "reference"):
        shapes = (1, S, 1, 2), (1, T, 1, 2), (1, T, 1, 2)
        q, k, v = (given(*shape, seed=at).requires_grad_() for at, shape in enumerate(shapes))
        y = attention_between(q, k, v, window=window, backend=backend)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_pairs_are_counted() -> None:
    for rate, of_keys in ((1, 4), (3, 1), (2, 3), (6, 4), (1, 1)):
        for queries in (0, 1, 2, 7, 24):
            for window in (0, 1, 2, 5):
                count = sum(
                    (t + 1) * of_keys <= (s + 1) * rate and (not window or t > ((s + 1) * rate - 1) // of_keys - window)
                    for s in range(queries) for t in range(queries * rate // of_keys + 1)
                )
                assert complete_pairs(queries, rate, of_keys, window) == count, (rate, of_keys, queries, window)


COMPRESSED = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 8, as: q, name: q}
    - conv1d: {from: input, features: 4, kernel: 8, stride: 4, as: k, name: k}
    - conv1d: {from: input, features: 6, kernel: 8, stride: 4, as: v, name: v}
    - attention: {q: q, k: k, v: v, heads: 4, kv_heads: 2, OPTIONS}
expect: {lookahead: 0}
"""


@pytest.mark.parametrize("options", ["cache: 30", "window: 2", "window: 1, sinks: true, soft_cap: 3"])
def test_the_law(options: str) -> None:
    model = seqblocks.build_text(COMPRESSED.replace("OPTIONS", options), dtype=torch.float64)
    assert model.frame_size == 4
    check_law(model, seq=9, cuts=(1, 5))
    with pytest.raises(seqblocks.RunError, match="may span two sequences"):
        model(given(1, 8, 6), resets=torch.zeros(1, 8, dtype=torch.bool))


def test_a_model_is_the_definition() -> None:
    model = seqblocks.build_text(COMPRESSED.replace("OPTIONS", "cache: 30"), dtype=torch.float64, seed=2)
    p, x = dict(model.named_parameters()), given(2, 24, 6)
    q = (x @ p["q.weight"].T + p["q.bias"]).view(2, 24, 4, 2)
    padded = torch.cat([x.new_zeros(2, 4, 6), x], 1).transpose(1, 2)
    k, v = (torch.nn.functional.conv1d(padded, p[f"{n}.weight"], p[f"{n}.bias"], stride=4).mT for n in "kv")
    expected = slow(q, k.reshape(2, 6, 2, 2), v.reshape(2, 6, 2, 3), (1, 4)).flatten(2)
    torch.testing.assert_close(model(x), expected, **CLOSE)
    assert not expected[:, :3].any()
    assert expected[:, 3].all()  # nothing is complete before the fourth token


TO_MERGED = "{attention: {q: h, k: k, v: k, heads: 2}}"


@pytest.mark.parametrize(("steps", "ahead"), [
    ("{downsample: {factor: 4, as: k}}, " + TO_MERGED, 0),
    ("{downsample: {factor: 4, as: k}}, {attention: {q: k, k: h, v: h, heads: 2}}, {upsample: 4}", 3),
    ("{downsample: {factor: 4, as: k}}, {shift: {by: 1, as: s}}, {attention: {q: h, k: s, v: s, heads: 2}}", 0),
    ("{downsample: 4}, {upsample: {factor: 2, as: k}}, " + TO_MERGED, 3),
    ("{scan: {order: reverse, steps: [{shift: 2}]}}, {downsample: {factor: 4, as: k}}, " + TO_MERGED, 2),
])
def test_lookahead(steps: str, ahead: int) -> None:
    """A half of a frame that is copied to two tokens is no more complete than the frame."""
    text = f"""
seqblocks: 1
model:
  input: {{features: 4}}
  steps: [{{identity: {{as: h}}}}, {steps}]
expect: {{lookahead: {ahead}}}
"""
    model = seqblocks.build_text(text, dtype=torch.float64)
    check_shapes(model)
    check_lookahead(model, seq=8)


def test_costs_and_state() -> None:
    """Six keys of 24 tokens: tokens 0 to 2 see none, then each four tokens one more; a window of 2 holds the key of a
    token itself, once it is complete, and the one before."""
    text = COMPRESSED.replace("features: 6}", "features: 6, length: 24}", 1)
    full, windowed = (seqblocks.load_text(text.replace("OPTIONS", o))[1] for o in ("cache: 30", "window: 2"))
    seen = 4 * (1 + 2 + 3 + 4 + 5) + 6
    in_window = sum([0, 0, 0, 1, *([1, 1, 1, 2] * 5)])
    nodes = [next(node for node in spec.graph.nodes if node.verb == "attention") for spec in (full, windowed)]
    width = 8 + 6 // 2 * 4
    assert [node.macs for node in nodes] == [seen * width // 24, in_window * width // 24]
    assert [node.state["k"].shape for node in nodes] == [(30, 4), (1, 4)]
    assert summarise(full).lookahead == 0


# Native sparse attention (arXiv:2502.11089): the branches of compressed keys and of a window, each gated for each head.
# Blocks of 8 tokens begin every 4; a network makes a key and a value of each.
SPARSE = """
seqblocks: 1
let: {dim: 12, heads: 4, head: 3}
model:
  input: {features: dim}
  steps:
    - identity: {as: h}
    - linear: {features: heads * head, as: q, name: q}
    - linear: {from: h, features: 2 * head, as: [k, v], name: kv}
    - conv1d: {from: k, features: 8, kernel: 8, stride: 4, name: k_up}
    - gelu
    - linear: {features: head, as: block_k, name: k_down}
    - conv1d: {from: v, features: 8, kernel: 8, stride: 4, name: v_up}
    - gelu
    - linear: {features: head, as: block_v, name: v_down}
    - attention: {q: q, k: block_k, v: block_v, heads: heads, kv_heads: 1, cache: 40, as: compressed}
    - attention: {q: q, k: k, v: v, heads: heads, kv_heads: 1, window: 5, as: near}
    - linear: {from: h, features: 2 * heads, name: gates}
    - sigmoid
    - repeat_heads: {heads: 2 * heads, times: head, as: [a, b]}
    - calc: a * compressed + b * near
    - linear: {features: dim, name: out}
expect: {lookahead: 0}
"""


def network(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the keys or values of blocks, each from the 8 tokens up to its end."""
    padded = torch.cat([x.new_zeros(x.shape[0], 4, x.shape[2]), x], 1)
    blocks = torch.stack([padded[:, 4 * j : 4 * j + 8] for j in range(x.shape[1] // 4)], 1)
    y = torch.einsum("bjcd,odc->bjo", blocks, p[f"{name}_up.weight"]) + p[f"{name}_up.bias"]
    y = torch.nn.functional.gelu(y)
    return y @ p[f"{name}_down.weight"].T + p[f"{name}_down.bias"]


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def test_compressed_and_near_branches() -> None:
    model, x = seqblocks.build_text(SPARSE, dtype=torch.float64, seed=3), given(2, 20, 12)
    p = dict(model.named_parameters())
    q, (k, v) = linear(p, "q", x).view(2, 20, 4, 3), linear(p, "kv", x).split(3, -1)
    blocks = [network(p, name, of).unsqueeze(2) for name, of in (("k", k), ("v", v))]
    compressed = slow(q, *blocks, (1, 4))
    near = slow(q, k.unsqueeze(2), v.unsqueeze(2), (1, 1), window=5)
    a, b = linear(p, "gates", x).sigmoid().view(2, 20, 2, 4, 1).unbind(2)
    torch.testing.assert_close(model(x), linear(p, "out", (a * compressed + b * near).flatten(2)), **CLOSE)
    check_law(model, seq=7, cuts=(1, 4))


# Like Hourglass (arXiv:2110.13711): attention makes one token of three and reads the coarse tokens again.
HOURGLASS = """
seqblocks: 1
let: {dim: 8, by: 3}
model:
  input: {features: dim}
  steps:
    - identity: {as: fine}
    - downsample: {factor: by, as: pooled}
    - linear: {features: dim, as: q, name: down_q}
    - linear: {from: fine, features: 2 * dim, as: [k, v], name: down_kv}
    - attention: {q: q, k: k, v: v, heads: 2, cache: 60, name: down}
    - add: {with: pooled}
    - residual: [rms_norm, {swiglu: {hidden: 16, bias: true}}]
    - identity: {as: coarse}
    - linear: {from: fine, features: dim, as: up_q}
    - linear: {from: coarse, features: 2 * dim, as: [up_k, up_v], name: up_kv}
    - attention: {q: up_q, k: up_k, v: up_v, heads: 2, cache: 20, name: up}
    - add: {with: fine}
expect: {lookahead: 0}
"""


def test_tokens_are_merged_and_read_by_attention() -> None:
    model, x = seqblocks.build_text(HOURGLASS, dtype=torch.float64, seed=4), given(2, 12, 8)
    p = dict(model.named_parameters())
    pooled = x.view(2, 4, 3, 8).mean(2)
    k, v = linear(p, "down_kv", x).view(2, 12, 2, 2, 4).unbind(2)
    y = pooled + slow(linear(p, "down_q", pooled).view(2, 4, 2, 4), k, v, (3, 1)).flatten(2)
    y = y + branch(p, y)
    k, v = linear(p, "up_kv", y).view(2, 4, 2, 2, 4).unbind(2)
    found = x + slow(linear(p, "up_q", x).view(2, 12, 2, 4), k, v, (1, 3)).flatten(2)
    torch.testing.assert_close(model(x), found, **CLOSE)
    check_law(model, seq=7, cuts=(1, 4))


def branch(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the gated network of a residual."""
    q = {name.removeprefix("residual."): value for name, value in p.items() if name.startswith("residual.")}
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * q["rms_norm.weight"]
    gate, up = (y @ q[f"swiglu.{name}_weight"].T + q[f"swiglu.{name}_bias"] for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ q["swiglu.down_weight"].T + q["swiglu.down_bias"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [COMPRESSED.replace("OPTIONS", "window: 2"), pytest.param(SPARSE, marks=pytest.mark.long)],
    ids=["window", "branches"],
)
def test_programs(text: str) -> None:
    """Compiled without graph breaks, and exported for any number of frames."""
    model = seqblocks.build_text(text, dtype=torch.float64).eval()
    x, longer = given(2, 16, model.spec.input.features), given(2, 40, model.spec.input.features)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), **CLOSE)
    frames = {1: 4 * torch.export.Dim("frames", min=2, max=100)}
    program = torch.export.export(model, (x,), dynamic_shapes=(frames,))
    torch.testing.assert_close(program.module()(longer), model(longer), **CLOSE)
