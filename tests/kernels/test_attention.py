"""Properties specific to attention: an independent implementation, linear memory, rotary positions, exports.

Common properties are in test_conformance.py, layers of models in tests/torch/test_attention_layers.py.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqblocks.kernels import attention, use_backend
from seqblocks.kernels.attention import alibi_slopes
from seqblocks.kernels.positions import rotary
from tests.kernels.conformance import draw, marked
from tests.kernels.family_of_attention import attention_inputs
from tests.sampled import sampled

# float64: sums of up to 2,000 terms with weights that add to one, of values of order one.
ROUNDING = 1e-12


def inputs(S: int, dtype: Any = torch.float64, **sizes: int) -> list[Tensor]:
    """q, k, v."""
    x = attention_inputs(S=S, **sizes)
    return [x[name].to(dtype).requires_grad_() for name in "qkv"]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, base: float | None, resets: Tensor | None,
    chunk: int | None = None, first: int | None = None, soft_cap: float | None = None, slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute each query separately."""
    B, S, H, D = q.shape
    group = H // k.shape[2]
    rows = []
    for b in range(B):
        owner = [0] * S if resets is None else resets[b].long().cumsum(0).tolist()
        for t in range(S):
            near = [s for s in range(S) if owner[s] == owner[t] and (s <= t or not causal)]
            begin = owner.index(owner[t])
            near = [s for s in near if window is None or abs(s - t) < window or (first and s - begin < first)]
            near = [s for s in near if chunk is None or (s - begin) // chunk == (t - begin) // chunk]
            for h in range(H):
                query, keys, values = q[b, t, h], k[b, near, h // group], v[b, near, h // group]
                if base is None:
                    scores = keys @ query
                else:  # Re(conj(q) e^{i (s - t) rate} k) for each pair of features
                    rates = base ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
                    turn = torch.exp(1j * (torch.tensor(near).double() - t)[:, None] * rates)
                    pairs = torch.complex(query[: D // 2], query[D // 2 :])
                    others = torch.complex(keys[:, : D // 2], keys[:, D // 2 :])
                    scores = (pairs.conj() * turn * others).real.sum(-1)
                scores = scores / math.sqrt(D)
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if slopes is not None:
                    scores = scores - slopes[h] * torch.tensor([abs(s - t) for s in near])
                odds = scores.exp()
                total = odds.sum() if sinks is None else odds.sum() + sinks[h].exp()
                rows.append(odds / total @ values)
    return torch.stack(rows).view(B, S, H, -1)


def near(a: Any, b: Any, bar: float = ROUNDING) -> None:
    for x, y in zip(a, b, strict=True):
        scale = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * scale)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@settings(max_examples=20)
@given(
    seq=st.integers(1, 24),
    window=st.sampled_from([None, 1, 2, 3, 7]),
    base=st.sampled_from([None, 10_000.0]),
    causal=st.booleans(),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 23)), max_size=3),
    chunk=st.sampled_from([None, None, 1, 3, 5]),
    first=st.sampled_from([None, 1, 2, 5]),
    soft_cap=st.sampled_from([None, 1.5]),
    added=st.sets(st.sampled_from(["slopes", "sinks"])),
)
def test_by_hand(
    backend: str, seq: int, window: int | None, base: float | None, causal: bool, marks: list[tuple[int, int]],
    chunk: int | None, first: int | None, soft_cap: float | None, added: set[str],
) -> None:
    x = inputs(seq)
    options: dict[str, Any] = {"chunk": chunk, "soft_cap": soft_cap}
    if first and window and causal:
        options |= {"first": first, "chunk": None}
    options |= {name: draw(4, seed=7).abs().requires_grad_() for name in added}
    resets = marked(seq, marks) if marks else None
    found = attention(*x, causal=causal, window=window, rotary=base, resets=resets, backend=backend, **options)
    expected = by_hand(*x, causal, window, base, resets, **options)
    x += [options[name] for name in added]
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    near([found], [expected])
    near(*(torch.autograd.grad((y * weights).sum(), x) for y in (found, expected)))


@pytest.mark.parametrize(("causal", "packed", "explicit"), sampled(product((True, False), repeat=3), 7, ci=1))
def test_sequences_in_blocks(causal: bool, packed: bool, explicit: bool) -> None:
    """There are more queries than a block has, and no window: masks and scores are made block by block."""
    x = inputs(1100, H=2, G=1, D=2)
    resets = marked(1100, [(0, 3), (0, 700), (1, 600)]) if packed else None
    options: dict[str, Any] = {"soft_cap": 2.0, "slopes": draw(2).abs(), "sinks": draw(2)} if explicit else {}
    x += [t.requires_grad_() for t in options.values() if isinstance(t, Tensor)]
    near(*(
        [y, *torch.autograd.grad(y.square().sum(), x)]
        for backend in ("torch", "reference")
        for y in [attention(*x[:3], causal=causal, resets=resets, backend=backend, **options)]
    ))  # fmt: skip


@pytest.mark.parametrize("S", [1, 7, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("others", [True, False])
def test_a_bias_and_segments_in_any_order(S: int, backend: str, others: bool) -> None:
    """Weights are computed here for each segment by itself. 600 queries are more than a block has."""
    x = inputs(S, H=4, G=2, D=2)
    q, k, v = x
    bias, segments = draw(4, S, S).double().requires_grad_(), torch.arange(2 * S).view(2, S) * 5 % 3
    options: dict[str, Any] = {"soft_cap": 2.0, "sinks": draw(4).double()} if others else {}
    found = attention(q, k, v, causal=False, bias=bias, segments=segments, backend=backend, **options)
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) / math.sqrt(2)
    scores = (2 * torch.tanh(scores / 2) if others else scores) + bias
    apart = segments.unsqueeze(1) != segments.unsqueeze(2)
    odds = scores.exp().masked_fill(apart.unsqueeze(1), 0)
    total = odds.sum(-1, keepdim=True) + (options["sinks"].exp()[:, None, None] if others else 0)
    expected = torch.einsum("bhst,bthd->bshd", odds / total, v.repeat_interleave(2, 2))
    weights = draw(*found.shape).double()
    near(*([y, *torch.autograd.grad((y * weights).sum(), [*x, bias])] for y in (found, expected)))


def test_errors_of_a_bias_and_segments() -> None:
    q, k, v = inputs(6, H=2, G=2)
    bias, segments = draw(2, 6, 6), torch.zeros(2, 6, dtype=torch.long)
    for options in ({"causal": True}, {"causal": False, "window": 3}, {"causal": False, "resets": segments > 0}):
        with pytest.raises(ValueError, match="bias and segments need causal=False"):
            attention(q, k, v, segments=segments, **options)
    with pytest.raises(ValueError, match="bias"):
        attention(q, k, v, causal=False, bias=bias[:1])
    with pytest.raises(ValueError, match="segments"):
        attention(q, k, v, causal=False, segments=segments[:, :3])


@pytest.mark.parametrize(
    ("packed", "explicit", "past"), sampled(product((True, False), (True, False), (0, 1, 900)), 4, ci=1)
)
def test_first_tokens_in_blocks(packed: bool, explicit: bool, past: int) -> None:
    """Without resets, a block of queries reads the first tokens and its window only; with them, all tokens before."""
    x = inputs(1100, H=2, G=1, D=2)
    resets = marked(1100, [(0, 3), (0, 700), (1, 600)]) if packed else None
    options: dict[str, Any] = {"slopes": draw(2).abs(), "sinks": draw(2)} if explicit else {}
    options |= {"window": 70, "first": 3}
    state = None
    if past:
        earlier = [t.detach() for t in inputs(past, H=2, G=1, D=2)]
        _, state = attention(*earlier, return_state=True, **options)
    near(*(
        [y, *torch.autograd.grad(y.square().sum(), x)]
        for backend in ("torch", "reference")
        for y in [attention(*x, resets=resets, state=state, backend=backend, **options)]
    ))  # fmt: skip


def test_first_tokens_of_an_earlier_chunk_are_not_seen() -> None:
    """A token sees its own chunk only, also in a stream."""
    x, state, parts = inputs(9), None, []
    options: dict[str, Any] = {"chunk": 4, "window": 2, "first": 2}
    for t in range(9):
        y, state = attention(*(each[:, t : t + 1] for each in x), **options, state=state, return_state=True)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), attention(*x, **options), rtol=0, atol=ROUNDING)


def test_first_tokens_do_not_square_the_length() -> None:
    """The largest tensor is the mask of a block of 512 queries, or the queries themselves."""
    found = {}
    for S in (2048, 8192):
        x = inputs(S, H=2, G=1, D=8, DV=8, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x, window=64, first=4).sum().backward()
        found[S] = largest.numel
    assert found[8192] <= max(2 * 512 * (512 + 64 + 4), 8192 * 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"soft_cap": 50.0}, {"sinks": torch.zeros(4)}, {"logsumexp": True}])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_are_not_rounded_to_16_bits(dtype: torch.dtype, options: dict[str, Any], autocast: bool) -> None:
    """Rounding scores, of up to 60 here, would change gradients by 2.4 to 4 eps.

    Weights, gradients of scores and results are rounded, each by at most eps / 2, on average by half of that.
    """
    generator = torch.Generator().manual_seed(0)
    x = [(amp * torch.randn(1, 64, 4, 64, generator=generator)).to(dtype) for amp in (4, 4, 1)]
    exact = [each.double().requires_grad_() for each in x]
    given = [each.float() if autocast else each for each in x]
    given = [each.requires_grad_() for each in given]
    results = []
    with torch.autocast("cpu", dtype, enabled=autocast):
        for leaves, backend in ((exact, "reference"), (given, "torch")):
            y = attention(*leaves, **options, backend=backend)
            results.append([y, *torch.autograd.grad((y[..., :64].double() * torch.arange(64)).sum(), leaves)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < 0.6 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12])
def test_the_slopes_of_alibi(heads: int) -> None:
    """As in the paper: 1/2, 1/4, … for 8 heads, whose ratio is the first slope; for 6 heads, 2 of those of 8 follow."""
    found = alibi_slopes(heads).tolist()
    expected = {
        1: [2**-8], 2: [2**-4, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
        8: [2.0**-j for j in range(1, 9)],
        12: [*(2.0**-j for j in range(1, 9)), *(2.0**-j for j in (0.5, 1.5, 2.5, 3.5))],
    }[heads]
    assert found == pytest.approx(expected, rel=1e-15)


class Largest(TorchDispatchMode):
    """Record the largest tensor created while this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_a_window_does_not_square_the_length() -> None:
    """The largest tensor is the mask [blocks, window, 2 window] or the keys of the blocks: linear in the length."""
    found = {}
    for S in (2048, 8192):
        x = inputs(S, H=2, G=1, D=8, DV=8, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x, window=64).sum().backward()
        found[S] = largest.numel
    assert found[8192] == 4 * found[2048] <= 8192 * 128


def test_a_soft_cap_does_not_square_the_length() -> None:
    """The largest tensor has the products of a block of 512 queries with all keys."""
    found = {}
    for S in (1024, 2048):
        x = inputs(S, H=2, G=1, D=8, DV=8, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x, soft_cap=3.0).sum().backward()
        found[S] = largest.numel
    assert found[2048] == 2 * found[1024] == 2 * 512 * 2048


@pytest.mark.parametrize("DV", [4, 12])
def test_values_of_another_width_do_not_square_the_length_either(DV: int) -> None:
    """Torch's fused kernels need keys and values of equal width; the alternative would store all pairs."""
    found = {}
    for S in (512, 1024):
        x = inputs(S, H=2, G=1, D=8, DV=DV, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x).sum().backward()
        found[S] = largest.numel
    assert found[1024] == 2 * found[512]
    x = inputs(9, D=6, DV=8)
    near([attention(*x)], [by_hand(*x, True, None, None, None)])


def test_rotary_turns_by_the_difference_however_far() -> None:
    """Angles are float64: float32 scores after a billion tokens equal those at the start."""
    q, k, _ = (t.detach() for t in inputs(8, H=1, G=1, dtype=torch.float32))
    place = torch.arange(8).expand(2, 8)

    def scores(at: int) -> Tensor:
        return torch.einsum("bshd,bthd->bst", rotary(q, place + at), rotary(k, place + at))

    assert (scores(10**9) - scores(0)).abs().max() <= 20 * 2**-24 * scores(0).abs().max()


class Windowed(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, resets: Tensor, state: Any) -> Any:
        return attention(q, k, v, resets=resets, state=state, window=5, **self.options)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_exported_with_resets_and_state(causal: bool, strict: bool) -> None:
    def call(S: int) -> tuple[Any, ...]:
        x = [t.detach() for t in inputs(S)]
        state = [t.detach() for t in inputs(4)[1:]] + [torch.tensor([3, 0])]
        return *x, marked(S, [(0, S // 2)]), state if causal else None

    module = Windowed(causal=causal, return_state=causal)
    length = {1: torch.export.Dim("length", min=2, max=4096)}
    sizes = (*(length,) * 4, [None] * 3 if causal else None)
    program = torch.export.export(module, call(20), dynamic_shapes=sizes, strict=strict).module()
    with use_backend("reference"):
        for S in (2, 5, 6, 40, 63):
            found, expected = program(*call(S)), module(*call(S))
            near([found[0], *found[1]], [expected[0], *expected[1]]) if causal else near([found], [expected])


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 2), (1, 7), (530, 3)])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_memory_has_a_length_of_its_own(queries: int, keys: int, backend: str, soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, queries, 4, 3), (2, keys, 2, 3), (2, keys, 2, 5))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
    y = attention(q, k, v, causal=False, backend=backend, soft_cap=soft_cap)
    wide = [x.repeat_interleave(2, 2) for x in (k, v)]
    scores = torch.einsum("bshd,bthd->bhst", q, wide[0]) / 3**0.5
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), wide[1])
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y.square().sum(), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("more", [{}, {"causal": False, "window": 3}, {"causal": False, "rotary": 100.0}])
def test_only_a_memory_has(more: dict[str, Any]) -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 5, 1, 2)
    with pytest.raises(ValueError, match="attention expects q"):
        attention(q, k, k, **more)
