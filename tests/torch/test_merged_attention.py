"""One softmax over several sets of keys: attention that returns the log of its sum of exponentials, and its merging.

Definitions are explicit sums of exponentials over all pairs, in float64. Sums of at most 60 products have errors of a
few 1e-16, so the tolerances of 1e-12 leave a factor of 1000.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels.attention import Choice, attention, attention_between, selected_attention
from seqblocks.testing import check_law, check_lookahead, check_shapes

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def given(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exponentials(q: Tensor, k: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """Return the exponentials of the scores [B, H, S, T], 0 where a query does not see a key."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bshd,bthd->bhst", q, keys).mul(scale or q.shape[-1] ** -0.5).exp() * seen


def causal(S: int, window: int | None = None) -> Tensor:
    ahead = torch.arange(S) - torch.arange(S)[:, None]
    return (ahead <= 0) & (ahead > -(window or S))


def complete(S: int, rate: int) -> Tensor:
    """Return which of S / rate merged keys each of S queries sees."""
    return (torch.arange(S // rate) + 1) * rate <= torch.arange(S)[:, None] + 1


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 3, "sinks": True}, {"causal": False}])
def test_a_head_has_the_log_of_its_exponentials(options: dict[str, Any], backend: str) -> None:
    q, k, v = given(2, 9, 4, 3), given(2, 9, 2, 3, seed=1), given(2, 9, 2, 5, seed=2)
    sinks = given(4, seed=3) if "sinks" in options else None
    seen = causal(9, options.get("window")) if options.get("causal", True) else torch.ones(9, 9)
    total = exponentials(q, k, seen).sum(-1) + (0 if sinks is None else sinks.exp()[:, None])
    found: Any = attention(q, k, v, **{**options, "sinks": sinks}, logsumexp=True, backend=backend)
    plain = attention(q, k, v, **{**options, "sinks": sinks}, backend=backend)
    torch.testing.assert_close(found[..., :-1], plain, **CLOSE)
    torch.testing.assert_close(found[..., -1], total.log().transpose(1, 2), **CLOSE)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_without_keys_has_no_exponentials(sinks: bool, backend: str) -> None:
    q, k, v = given(1, 8, 2, 3), given(1, 2, 1, 3, seed=1), given(1, 2, 1, 4, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v, given(2, seed=3))]
    found: Any = attention_between(*inputs[:3], sinks=inputs[3] if sinks else None, logsumexp=True, backend=backend)
    assert not found[:, :3, :, :-1].any()
    expected = inputs[3].expand(1, 3, 2) if sinks else torch.full((1, 3, 2), -1e30, dtype=torch.float64)
    torch.testing.assert_close(found[:, :3, :, -1], expected, **CLOSE)
    total = exponentials(q, k, complete(8, 4)).sum(-1).transpose(1, 2) + (inputs[3].exp() if sinks else 0)
    torch.testing.assert_close(found[:, 3:, :, -1], total[:, 3:].log(), **CLOSE)
    for grad in torch.autograd.grad(found.sin().sum(), inputs[: 3 + sinks]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("window", [None, 2])
def test_gradients(window: int | None) -> None:
    inputs = [given(1, 6, 2, 2), given(1, 2, 1, 2, seed=1), given(1, 2, 1, 3, seed=2), given(2, seed=3)]
    inputs = [x.requires_grad_() for x in inputs]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        far: Any = attention_between(q, k, v, window=window, sinks=sinks, logsumexp=True)
        near: Any = attention(q, q, q, window=window, logsumexp=True)
        return far[..., :-1], far[:, 2:, :, -1], near

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("window", [None, 40])
def test_long_sequences_in_blocks(window: int | None) -> None:
    """More than 512 queries are computed block by block, with gradients. Sums have up to 1,200 terms."""
    found = []
    for backend in ("torch", "reference"):
        q, k, v = (given(1, 1200, 1, 2, seed=at).requires_grad_() for at in range(3))
        y: Any = attention(q, k, v, window=window, logsumexp=True, backend=backend)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


MERGED = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 8, as: q, name: q}
    - linear: {from: input, features: 10, as: {k: 4, v: 6}, name: kv}
    - conv1d: {from: input, features: 4, kernel: 8, stride: 4, as: far_k, name: far_k}
    - conv1d: {from: input, features: 6, kernel: 8, stride: 4, as: far_v, name: far_v}
    - attention: {q: q, k: k, v: v, heads: 4, kv_heads: 2, window: 3, logsumexp: true, NEAR as: near}
    - attention: {q: q, k: far_k, v: far_v, heads: 4, kv_heads: 2, cache: 30, logsumexp: true, as: far}
    - merge_attention: {from: near, with: far, heads: 4}
expect: {lookahead: 0}
"""


def merged(near: str = "") -> Any:
    text = MERGED.replace("NEAR", near)
    return seqblocks.build_text(text, dtype=torch.float64, seed=2)


def test_a_model_is_one_softmax_over_both_sets_of_keys() -> None:
    model = merged("sinks: true,")
    p, x = dict(model.named_parameters()), given(2, 24, 6)
    with torch.no_grad():
        p["near.sinks"].copy_(given(4, seed=5))
    q = torch.nn.functional.linear(x, p["q.weight"], p["q.bias"]).view(2, 24, 4, 2)
    k, v = torch.nn.functional.linear(x, p["kv.weight"], p["kv.bias"]).split([4, 6], -1)
    padded = torch.cat([x.new_zeros(2, 4, 6), x], 1).transpose(1, 2)
    far = [torch.nn.functional.conv1d(padded, p[f"far_{n}.weight"], p[f"far_{n}.bias"], stride=4).mT for n in "kv"]
    odds = [exponentials(q, k.reshape(2, 24, 2, 2), causal(24, 3))]
    odds.append(exponentials(q, far[0].reshape(2, 6, 2, 2), complete(24, 4)))
    sums = [torch.einsum("bhst,bthd->bshd", e, values.reshape(2, -1, 2, 3).repeat_interleave(2, 2))
            for e, values in zip(odds, (v, far[1]), strict=True)]
    total = odds[0].sum(-1) + odds[1].sum(-1) + p["near.sinks"].exp()[:, None]
    expected = sum(sums) / total.transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(model(x), expected.flatten(2), **CLOSE)


@pytest.mark.parametrize("near", ["", "sinks: true,", "rotary: 100,", "soft_cap: 2,", "bias: alibi,"])
def test_the_law(near: str) -> None:
    model = merged(near)
    assert model.frame_size == 4
    check_law(model, seq=9, cuts=(1, 5))
    check_lookahead(model)


THREE = """
seqblocks: 1
model:
  inputs: {x: {features: 4}, seen: {features: 4, length: 5}}
  steps:
    - attention: {q: x, k: x, v: x, heads: 2, window: 2, logsumexp: true, as: a}
    - attention: {q: x, k: x, v: x, heads: 2, bias: alibi, cache: 30, logsumexp: true, as: b}
    - cross_attention: {q: x, k: seen, v: seen, heads: 2, logsumexp: true, as: c}
    - merge_attention: {from: a, with: b, heads: 2, logsumexp: true}
    - merge_attention: {with: c, heads: 2}
"""


def test_three_sets_of_keys_one_of_them_a_memory() -> None:
    model = seqblocks.build_text(THREE, dtype=torch.float64)
    check_shapes(model)
    x, seen = given(2, 9, 4), given(2, 5, 4, seed=1)
    q, k = x.view(2, 9, 2, 2), seen.view(2, 5, 2, 2)
    near = exponentials(q, q, causal(9, 2))
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).to(torch.float64)
    every = exponentials(q, q, causal(9)) * torch.exp(-slopes[:, None, None] * distance)
    memory = exponentials(q, k, torch.ones(9, 5))
    sums = torch.einsum("bhst,bthd->bshd", near + every, q) + torch.einsum("bhst,bthd->bshd", memory, k)
    total = (near + every).sum(-1) + memory.sum(-1)
    expected = sums / total.transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(model(x=x, seen=seen), expected.flatten(2), **CLOSE)
    state = model.init_state(2, seen=seen)
    for t in range(9):
        y, state = model.step(x[:, t], state)
        torch.testing.assert_close(y, expected[:, t].flatten(1), **CLOSE)


def test_resets_separate_sequences() -> None:
    text = MERGED.split("    - conv1d")[0] + """
    - attention: {q: q, k: k, v: v, heads: 4, kv_heads: 2, window: 3, logsumexp: true, as: near}
    - attention: {q: q, k: k, v: v, heads: 4, kv_heads: 2, rotary: 100, cache: 30, logsumexp: true, as: far}
    - merge_attention: {from: near, with: far, heads: 4}
"""
    check_law(seqblocks.build_text(text, dtype=torch.float64), seq=11, cuts=(1, 5), resets=((0, 4), (1, 1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logs_are_float32_in_a_16_bit_model(dtype: str) -> None:
    """The error is that of 16-bit products and values; logs of 16 bits would change weights by up to 3 %."""
    text = MERGED.replace("NEAR", "")
    text = text.replace("expect:", "    - linear: 5\nexpect:")
    exact = seqblocks.build_text(text, dtype=torch.float64, seed=1)
    model = seqblocks.build_text(text, dtype=dtype, seed=1)
    x = given(1, 16, 6)
    y = model(x.to(getattr(torch, dtype)))
    assert y.dtype == getattr(torch, dtype)
    torch.testing.assert_close(y.double(), exact(x), rtol=0, atol=8 * torch.finfo(y.dtype).eps)


@pytest.mark.parametrize("length", [4, 0])
def test_logs_are_float32_without_tokens_too(length: int) -> None:
    q, k = given(2, length, 4, 6).bfloat16(), given(2, length // 2, 2, 6).bfloat16()
    same = given(2, length, 2, 6).bfloat16()
    index = given(2, length, 4, 3).bfloat16(), given(2, length // 2, 1, 3).bfloat16()
    made = [
        attention(q, same, same, logsumexp=True),
        attention_between(q, k, k, logsumexp=True),
        selected_attention(q, k, k, *index, Choice(top=2, groups=2), logsumexp=True),
    ]
    for y in made:
        assert isinstance(y, Tensor)
        assert (y.shape, y.dtype) == ((2, length, 4, 7), torch.float32)
