"""Attention to the blocks of keys that each token selects, against loops over queries and blocks in float64.

Sums of at most 60 products have errors of a few 1e-16, so the tolerances of 1e-12 leave a factor of 1000. Blocks are
chosen by scores that differ by far more, for these seeds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint import load_official
from seqblocks.kernels.attention import Choice, attention, selected_attention
from seqblocks.testing import check_law, check_lookahead

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def given(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def score(products: Tensor, activation: str) -> Tensor:
    """Apply the activation to the products [blocks] of a query with all complete blocks."""
    if activation == "softmax":
        return torch.softmax(products, -1)
    return products.relu() if activation == "relu" else products


def slow(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, choice: Choice, weight: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with loops. Query s ends at key `ends` of the sequence; times are in keys."""
    B, S, H, D = q.shape
    n, I = choice.block, index_q.shape[2]
    y = q.new_zeros(B, S, H, v.shape[-1])
    for b in range(B):
        for s in range(S):
            ends = (s + 1) * k.shape[1] // S
            complete, own = ends // n, math.ceil((s + 1) * k.shape[1] / S / n) - 1
            forced = [c for c in range(own + 1) if c < choice.first or c > own - choice.last]
            for group in range(choice.groups):
                total = torch.zeros(complete, dtype=q.dtype)
                for i in range(group * I // choice.groups, (group + 1) * I // choice.groups):
                    keys = index_k[b, :complete, i * index_k.shape[2] // I]
                    found = score(choice.scale * keys @ index_q[b, s, i], choice.activation).detach()
                    total += found * (1 if weight is None else weight[b, s, i])
                others = [*(-total).sort(stable=True).indices.tolist()]
                others = [c for c in others if c not in forced]
                chosen = {*forced, *others[: choice.top - len(forced)]}
                seen = [t for t in range(ends) if t // n in chosen]
                for h in range(group * H // choice.groups, (group + 1) * H // choice.groups):
                    g = h * k.shape[2] // H
                    odds = (k[b, seen, g] @ q[b, s, h] / math.sqrt(D)).exp()
                    rest = 0 if sinks is None else sinks[h].exp()
                    if seen:
                        y[b, s, h] = odds @ v[b, seen, g] / (odds.sum() + rest)
    return y


CHOICES = [
    Choice(2, 2), Choice(3, 2, 1, 1, 1, "none"), Choice(3, 1, 1, 0, 2, "relu", 0.5),
    Choice(2, 4, last=1, activation="none"), Choice(9, 2),
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("S", "T", "C"), [(12, 12, 4), (12, 12, 12), (24, 6, 6), (4, 12, 4), (12, 6, 2)])
def test_the_definition(S: int, T: int, C: int, choice: Choice) -> None:
    """In one call, and in two that continue from the state."""
    choice = choice._replace(block=T // C)
    q, k, v = given(2, S, 4, 3), given(2, T, 2, 3, seed=1), given(2, T, 2, 5, seed=2)
    index_q, index_k, weight = given(2, S, 4, 2, seed=3), given(2, C, 2, 2, seed=4), given(2, S, 4, seed=5).exp()
    sinks = given(4, seed=6)
    options: dict[str, Any] = {"weight": weight, "sinks": sinks} if choice.activation == "relu" else {}
    expected = slow(q, k, v, index_q, index_k, choice, **options)
    torch.testing.assert_close(selected_attention(q, k, v, index_q, index_k, choice, **options), expected, **CLOSE)
    state, parts = None, []
    for at in range(2):
        q_, k_, v_, a, b, w = (x.chunk(2, 1)[at] for x in (q, k, v, index_q, index_k, weight))
        more = {**options, "weight": w} if options else {}
        y, state = selected_attention(q_, k_, v_, a, b, choice, **more, state=state, keep=C, return_state=True)  # type: ignore[misc]
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), expected, **CLOSE)


def test_all_blocks_are_causal_attention() -> None:
    q, k, v = given(2, 8, 2, 3), given(2, 8, 2, 3, seed=1), given(2, 8, 2, 3, seed=2)
    found = selected_attention(q, k, v, q, k[:, ::4], Choice(2, 2, 4, last=1))
    torch.testing.assert_close(found, attention(q, k, v), **CLOSE)


def test_long_sequences_in_blocks() -> None:
    """More than 512 queries are computed block by block, with gradients."""
    q, k, v = (given(1, 1200, 2, 2, seed=at).requires_grad_() for at in range(3))
    index_k = given(1, 50, 2, 2, seed=3)
    choice = Choice(3, 2, 24, last=1, activation="none")
    y = selected_attention(q, k, v, q, index_k, choice)
    torch.testing.assert_close(y, slow(q.detach(), k.detach(), v.detach(), q.detach(), index_k, choice), **CLOSE)
    for grad in torch.autograd.grad(y.sin().sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_gradients() -> None:
    inputs = [x.requires_grad_() for x in (given(1, 8, 2, 2), given(1, 8, 1, 2, seed=1), given(1, 8, 1, 3, seed=2))]
    index_q, index_k = given(1, 8, 2, 2, seed=3), given(1, 4, 1, 2, seed=4)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return selected_attention(q, k, v, index_q, index_k, Choice(2, 1, 2, last=1), logsumexp=True)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("part", range(4))
def test_a_state_must_fit(part: int) -> None:
    q, k, blocks = given(2, 4, 1, 2), given(2, 4, 1, 2), given(2, 2, 1, 2)
    _, state = selected_attention(q, k, k, q, blocks, Choice(2, 1, 2), return_state=True)
    wrong = [*state]
    wrong[part] = wrong[part][:1]
    with pytest.raises(ValueError, match=r"state of shapes \[2, 4, 1, 2\], \[2, 4, 1, 2\], \[2, 2, 1, 2\], \[2\]; got"):
        selected_attention(q, k, k, q, blocks, Choice(2, 1, 2), state=tuple(wrong))


def test_inputs_and_states_are_real() -> None:
    q, k, blocks = given(2, 4, 1, 2), given(2, 4, 1, 2), given(2, 2, 1, 2)
    with pytest.raises(seqblocks.RunError, match=r"real numbers; got complex index_q, weight"):
        selected_attention(q, k, k, q.cdouble(), blocks, Choice(2, 1, 2), weight=q[..., 0].cdouble())
    with pytest.raises(seqblocks.RunError, match=r"real numbers; got complex state\[1\]"):
        selected_attention(q, k, k, q, blocks, Choice(2, 1, 2), state=(k, k.cdouble(), blocks, torch.ones(2).long()))


BLOCKS = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 8, as: q, name: q}
    - linear: {from: input, features: 10, as: {k: 4, v: 6}, name: kv}
    - downsample: {from: k, factor: 3, as: block}
    - attention: {q: q, k: block, v: block, heads: 4, kv_heads: 2, as: coarse}
    - selected_attention: {q: q, k: k, v: v, index_q: q, index_k: block, heads: 4, kv_heads: 2,
        cache: 30, block: 3, OPTIONS}
expect: {lookahead: 0}
"""


@pytest.mark.parametrize("options", [
    "top: 2, last: 1", "top: 2, first: 1, last: 1, sinks: true, soft_cap: 3", "top: 1, activation: relu",
    "top: 2, last: 1, groups: 1, activation: none", "top: 3, groups: 4, last: 2",
])  # fmt: skip
def test_the_law(options: str) -> None:
    text = BLOCKS.replace("OPTIONS", f"{options}, as: y")
    text = text.replace("expect:", "    - concat: {from: [y, coarse]}\nexpect:")
    model = seqblocks.build_text(text, dtype=torch.float64)
    assert model.frame_size == 3
    check_law(model, seq=9, cuts=(1, 5))
    check_lookahead(model)
    with pytest.raises(seqblocks.RunError, match=r"two sequences|one sequence"):
        model(given(1, 9, 6), resets=torch.zeros(1, 9, dtype=torch.bool))


INDEXER = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - linear: {features: 8, as: q, name: q}
    - linear: {from: input, features: 4, as: k, name: k}
    - linear: {from: input, features: 6, as: index_q, name: index_q}
    - linear: {from: input, features: 2, as: index_k, name: index_k}
    - linear: {from: input, features: 3, as: factor, name: factor}
    - selected_attention: {q: q, k: k, v: k, heads: 4, kv_heads: 2, groups: 1, top: 3, cache: 30, index_q: index_q,
        index_k: index_k, weight: factor, index_heads: 3, activation: relu, as: y}
    - concat: {from: [y, index_q, index_k, factor], axis: features}
expect: {lookahead: 0}
"""


def test_single_keys_are_selected_by_heads_of_their_own() -> None:
    """The indexer of DeepSeek-V3.2: keys are selected for all heads by weighted scores of other heads."""
    model = seqblocks.build_text(INDEXER, dtype=torch.float64, seed=3)
    check_law(model, seq=9, cuts=(1, 5))
    p, x = dict(model.named_parameters()), given(2, 9, 6)
    q, k, index_q, index_k, factor = (
        torch.nn.functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])
        for name in ("q", "k", "index_q", "index_k", "factor")
    )
    keys = k.view(2, 9, 2, 2)
    expected = slow(
        q.view(2, 9, 4, 2), keys, keys, index_q.view(2, 9, 3, 2), index_k.view(2, 9, 1, 2),
        Choice(3, 1, activation="relu", scale=2**-0.5), factor,
    )  # fmt: skip
    torch.testing.assert_close(model(x)[..., :8], expected.flatten(2), **CLOSE)


GOLDEN = Path(__file__).parent.parent / "golden" / "fla" / "sparse_nsa.npz"
SMALL: dict[str, Any] = {
    "let.dim": 16, "let.depth": 2, "let.heads": 4, "let.kv_heads": 2, "let.head": 4, "let.hidden": 12,
    "let.vocabulary": 11, "model.layers.token.nsa.block": 4, "model.layers.token.nsa.top": 4,
    "model.layers.token.nsa.window": 6, "expect.params": 3504,
}  # fmt: skip


def test_native_sparse_attention_is_that_of_flash_linear_attention() -> None:
    """A whole model: of 9 blocks, 4 are read. It was computed in float64 by the package's naive functions."""
    with np.load(GOLDEN) as file:
        data = dict(file)
    path = Path(__file__).parents[1] / "spec" / "published" / "nsa_1b.yaml"
    model = seqblocks.build(str(path), set=SMALL, dtype="float64").eval()
    load_official(model, {key[2:]: torch.from_numpy(x).double() for key, x in data.items() if key.startswith("w/")})
    ids, expected = torch.from_numpy(data["ids"]).long(), torch.from_numpy(data["logits"])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected, rtol=1e-9, atol=1e-9)
        stream, parts = model.init_state(1), []
        for part in ids.split(4, 1):
            y, stream = model(part, state=stream, return_state=True)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
