"""Attention: its forms against each other, the state law, an independent transformer, memory.

Independent truth: a loop over queries, keys and heads in float64, with rotary positions as complex numbers.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import seqblocks
from seqblocks.kernels import attention, use_backend
from seqblocks.kernels.positions import rotary
from seqblocks.testing import check_law

# float64: sums of up to 2,000 terms with weights that add to one, of values of order one
ROUNDING = 1e-12


def inputs(
    S: int, heads: int = 4, shared: int = 2, D: int = 6, DV: int = 3, batch: int = 2, dtype: Any = torch.float64
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((heads, D), (shared, D), (shared, DV))
    x = [torch.randn(batch, S, *shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in x]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, base: float | None, resets: Tensor | None
) -> Tensor:
    """Each query by itself."""
    B, S, H, D = q.shape
    group = H // k.shape[2]
    rows = []
    for b in range(B):
        owner = [0] * S if resets is None else resets[b].long().cumsum(0).tolist()
        for t in range(S):
            near = [s for s in range(S) if owner[s] == owner[t] and (s <= t or not causal)]
            near = [s for s in near if window is None or abs(s - t) < window]
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
                rows.append(torch.softmax(scores / math.sqrt(D), 0) @ values)
    return torch.stack(rows).view(B, S, H, -1)


def near(a: Any, b: Any, bar: float = ROUNDING) -> None:
    for x, y in zip(a, b, strict=True):
        scale = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=bar, atol=bar * scale)


def marked(seq: int, marks: list[tuple[int, int]]) -> Tensor:
    resets = torch.zeros(2, seq, dtype=torch.bool)
    for row, at in marks:
        resets[row, at % seq] = True
    return resets


@pytest.mark.parametrize("form", ["reference", "torch"])
@settings(max_examples=25)
@given(
    seq=st.integers(1, 24),
    window=st.sampled_from([None, 1, 2, 3, 7]),
    base=st.sampled_from([None, 10_000.0]),
    causal=st.booleans(),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 23)), max_size=3),
)
def test_by_hand(
    form: str, seq: int, window: int | None, base: float | None, causal: bool, marks: list[tuple[int, int]]
) -> None:
    x = inputs(seq)
    resets = marked(seq, marks) if marks else None
    found = attention(*x, causal=causal, window=window, rotary=base, resets=resets, backend=form)
    wanted = by_hand(*x, causal, window, base, resets)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    near([found], [wanted])
    near(*(torch.autograd.grad((y * weights).sum(), x) for y in (found, wanted)))


@settings(max_examples=20)
@given(
    seq=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 299), max_size=3),
    window=st.sampled_from([None, 1, 5, 64]),
    marks=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 299)), max_size=3),
)
def test_whole_is_pieces(seq: int, cuts: list[int], window: int | None, marks: list[tuple[int, int]]) -> None:
    x, resets = inputs(seq), marked(seq, marks)
    options: dict[str, Any] = {"window": window, "rotary": 10_000.0, "return_state": True}
    options["keep"] = 300 if window is None else None
    whole, last = attention(*x, resets=resets if marks else None, **options)
    parts, state = [], None
    for a, b in pairwise(sorted({0, seq, *(c for c in cuts if c < seq)})):
        y, state = attention(*(t[:, a:b] for t in x), resets=resets[:, a:b] if marks else None, state=state, **options)
        parts.append(y)
    near([torch.cat(parts, 1), state.k, state.v], [whole, last.k, last.v])
    assert torch.equal(state.length, last.length)
    near(*(torch.autograd.grad(y.square().sum(), x) for y in (torch.cat(parts, 1), whole)))


def test_packed_sequences_in_blocks() -> None:
    """More queries than a block holds, and no window: the masks are made block by block."""
    x = inputs(1100, heads=2, shared=1, D=2)
    resets = marked(1100, [(0, 3), (0, 700), (1, 600)])
    for causal in (True, False):
        near(*(
            [y, *torch.autograd.grad(y.square().sum(), x)]
            for y in (attention(*x, causal=causal, resets=resets, backend=form) for form in ("torch", "reference"))
        ))  # fmt: skip


def test_gradcheck() -> None:
    x = inputs(5, heads=2, shared=1, D=2, DV=2, batch=1)
    resets = torch.tensor([[False, False, True, False, False]])
    for form in ("reference", "torch"):
        for window in (None, 2):
            def run(*t: Tensor, f: str = form, w: int | None = window) -> Tensor:
                return attention(*t, window=w, rotary=100.0, resets=resets, backend=f)

            assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, window=2, backend="reference"), x)


class Largest(TorchDispatchMode):
    """The largest tensor that is made while it is on."""

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
        x = inputs(S, heads=2, shared=1, D=8, DV=8, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x, window=64).sum().backward()
        found[S] = largest.numel
    assert found[8192] == 4 * found[2048] <= 8192 * 128


@pytest.mark.parametrize("DV", [4, 12])
def test_values_of_another_width_do_not_square_the_length_either(DV: int) -> None:
    """Torch's fused kernels take one width for keys and values; without them all pairs would be written down."""
    found = {}
    for S in (512, 1024):
        x = inputs(S, heads=2, shared=1, D=8, DV=DV, batch=1, dtype=torch.float32)
        with Largest() as largest:
            attention(*x).sum().backward()
        found[S] = largest.numel
    assert found[1024] == 2 * found[512]
    x = inputs(9, D=6, DV=8)
    near([attention(*x)], [by_hand(*x, True, None, None, None)])


def test_rotary_turns_by_the_difference_however_far() -> None:
    """Angles are float64: a billion tokens on, float32 scores are what they were at the start."""
    q, k, _ = (t.detach() for t in inputs(8, heads=1, shared=1, dtype=torch.float32))
    place = torch.arange(8).expand(2, 8)

    def scores(at: int) -> Tensor:
        return torch.einsum("bshd,bthd->bst", rotary(q, place + at), rotary(k, place + at))

    assert (scores(10**9) - scores(0)).abs().max() <= 20 * 2**-24 * scores(0).abs().max()


def test_low_precision_compile_empty_and_errors() -> None:
    x = [t.detach() for t in inputs(40, dtype=torch.float32)]
    for window in (None, 8):
        wide = attention(*x, window=window)
        half = [t.bfloat16() for t in x]
        y, state = attention(*half, window=window, return_state=True)
        assert (y.dtype, state.k.dtype, state.length.dtype) == (torch.bfloat16, torch.bfloat16, torch.int64)
        # scores of size 6 from factors of 8 bits move the weights by 6 * 2^-8, the values by 2^-8 more
        assert (y.float() - wide).abs().max() <= 8 * 2**-8 * x[2].abs().max()
        torch._dynamo.reset()
        compiled = torch.compile(lambda *t, w=window: attention(*t, window=w), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*x), wide)
        assert attention(*(t[:, :0] for t in x), window=window).shape == (2, 0, 4, 3)
        assert attention(*(t[:0] for t in x), window=window).shape == (0, 40, 4, 3)
    with pytest.raises(ValueError, match="G a divisor of H"):
        attention(x[0][:, :, :3], *x[1:])
    with pytest.raises(ValueError, match="needs causal=True"):
        attention(*x, causal=False, return_state=True)
    with pytest.raises(ValueError, match="at least one token"):
        attention(*x, window=0)
    with pytest.raises(ValueError, match="too short for a window of 9"):
        attention(*x, window=9, state=attention(*x, window=8, return_state=True)[1])
    with pytest.raises(ValueError, match="even head width"):
        attention(x[0][..., :3], x[1][..., :3], x[2], rotary=100.0)


def build(steps: str, features: int = 8, **options: Any) -> Any:
    text = f"seqblocks: 1\nuse: [transformer]\nmodel:\n  input: {{features: {features}}}\n  steps:\n{steps}"
    return seqblocks.build_text(text, dtype=torch.float64, **options)


@pytest.mark.parametrize("given", ["window: 5", "kv_heads: 1, cache: 23", "rotary: 0, window: 1"])
def test_the_law(given: str) -> None:
    model = build(f"    - attention_layer: {{dim: 8, heads: 2, {given}}}\n")
    check_law(model, resets=((0, 3), (1, 22)))
    check_law(model)


def test_a_full_cache_is_said() -> None:
    model = build("    - attention_layer: {dim: 8, heads: 2, cache: 4}\n")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    model(x)  # nothing is kept, so nothing is missing
    _, state = model(x[:, :4], return_state=True)
    with pytest.raises(seqblocks.RunError, match="has seen 5 tokens and its cache holds 4"):
        model.step(x[:, 4], state)
    resets = torch.ones(1, 1, dtype=torch.bool)
    model(x[:, 4:], state=state, return_state=True, resets=resets)  # a new sequence begins


@torch.no_grad()
def test_a_full_cache_is_said_by_compiled_models_too() -> None:
    model = build("    - attention_layer: {dim: 8, heads: 2, cache: 4}\n").eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    state = model.init_state(1)
    for t in range(4):
        y, state = compiled(x[:, t : t + 1], state=state, return_state=True)
        near([y], [model(x)[:, t : t + 1]])
    with pytest.raises(RuntimeError, match="its cache holds 4"):
        compiled(x[:, 4:], state=state, return_state=True)


@torch.no_grad()
@pytest.mark.parametrize("given", ["window: 3", "kv_heads: 1, cache: 16"])
def test_models_compile_and_export(given: str) -> None:
    """One graph, with resets and state too."""
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
    [("window: 3", "auto"), ("window: 1", "auto"), ("window: 3", "reference"), ("cache: 16", "auto")],
)
def test_one_export_serves_every_length(given: str, backend: str) -> None:
    """Also lengths within the window."""
    model = build(f"    - attention_layer: {{dim: 8, heads: 2, {given}}}\n").eval()
    length = torch.export.Dim("length", min=2, max=4096)
    with use_backend(backend):
        x = torch.randn(2, 11, 8, dtype=torch.float64)
        exported = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}}, strict=False)
    for seq in (2, 3, 4, 9, 37):
        x = torch.randn(2, seq, 8, dtype=torch.float64)
        near([exported.module()(x)], [model(x)])


class Windowed(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, resets: Tensor, state: Any) -> Any:
        return attention(q, k, v, resets=resets, state=state, window=5, **self.options)


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
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
            found, wanted = program(*call(S)), module(*call(S))
            near([found[0], *found[1]], [wanted[0], *wanted[1]]) if causal else near([found], [wanted])


def test_packed_sequences_compile() -> None:
    """More than a block of them: what is made again for the backward pass compiles as well."""
    model = build("    - attention_layer: {dim: 8, heads: 2}\n")
    x = torch.randn(1, 1100, 8, dtype=torch.float64, requires_grad=True)
    resets = marked(1100, [(0, 600)])[:1]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(*([y, *torch.autograd.grad(y.square().sum(), x)] for y in (f(x, resets=resets) for f in (compiled, model))))


@pytest.mark.parametrize("given", ["window: 3", "kv_heads: 1"])
def test_the_reverse_order(given: str) -> None:
    """Each packed sequence read from its right end, as if turned round by hand; gradients too."""
    layer = f"{{attention_layer: {{dim: 8, heads: 2, {given}}}}}"
    backward = build(f"    - scan: {{order: reverse, steps: [{layer}]}}\n")
    forward = build(f"    - {layer}\n")
    forward.load_state_dict({k.removeprefix("scan."): v for k, v in backward.state_dict().items()})
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)
    found = backward(x, cu_seqlens=torch.tensor([0, 4, 5, 12]))
    wanted = torch.cat([forward(x[:, a:b].flip(1)).flip(1) for a, b in ((0, 4), (4, 5), (5, 12))], 1)
    near(*([y, *torch.autograd.grad(y.square().sum(), x)] for y in (found, wanted)))


def test_the_scale_is_what_is_given() -> None:
    model = build(
        "    - linear: {features: 24, as: [q, k, v]}\n    - attention: {q: q, k: k, v: v, heads: 2, scale: 0.3}\n"
    )
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    made = torch.nn.functional.linear(x, model.linear.weight, model.linear.bias)
    q, k, v = (t.unflatten(-1, (2, 4)) for t in made.chunk(3, -1))
    near([model(x)], [by_hand(q * 0.3 * 2, k, v, True, None, None, None).flatten(-2)])  # the 2 undoes its 1 / sqrt(4)


def test_not_causal_does_not_stream() -> None:
    model = build(
        "    - linear: {features: 24, as: [q, k, v]}\n    - attention: {q: q, k: k, v: v, heads: 2, causal: false}\n"
    )
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    assert not torch.equal(model(x)[:, :4], model(x[:, :4]))
    with pytest.raises(seqblocks.RunError, match="not causal"):
        model.init_state(1)


def test_a_block_against_plain_torch() -> None:
    """A LLaMA block written out for one sequence, rotary positions as complex numbers."""
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
    wanted = y + (torch.nn.functional.silu(u @ gate.t()) * (u @ up.t())) @ down.t()
    near([model(x)], [wanted])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("gate", ["before", "after"])
def test_gated_rms_norm(gate: str, groups: int) -> None:
    """Gain and bias belong to the norm: `gate: after` multiplies them too."""
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
    wanted = torch.cat(parts, -1) * model.rms_norm.weight + model.rms_norm.bias
    near([model(x)], [wanted * opening if gate == "after" else wanted])


def test_the_gelu_network() -> None:
    model = build("    - gelu_mlp: {dim: 8, expand: 2}\n")
    w = {k.removeprefix("gelu_mlp."): p for k, p in model.named_parameters()}
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    u = x @ w["up.weight"].t() + w["up.bias"]
    wanted = (u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))) @ w["down.weight"].t() + w["down.bias"]
    near([model(x)], [wanted])
