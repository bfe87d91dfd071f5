"""The causal convolution: golden numbers, the state law, windows cut by resets, forms against each other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from seqblocks.kernels import causal_conv, use_backend

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "xlstm").glob("conv1d_*.npz"))
FORMS = ("reference", "torch")
EXACT = 1e-13  # sums of at most K D = 30 products of size 1 in float64


def draw(*shape, dtype=torch.float64, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def case(B=2, S=11, D=3, K=4, mixing=False, dtype=torch.float64):
    out = 5 if mixing else D
    weight = draw(out, D, K, dtype=dtype, seed=1) if mixing else draw(D, 1, K, dtype=dtype, seed=1)
    return draw(B, S, D, dtype=dtype), weight, draw(out, dtype=dtype, seed=2), draw(B, K - 1, D, dtype=dtype, seed=3)


def with_gradients(outputs, wanted):
    loss = sum((o * draw(*o.shape, seed=n + 7).detach()).sum() for n, o in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)]


def assert_near(actual, expected, tolerance=EXACT):
    for a, e in zip(actual, expected, strict=True):
        scale = max(1.0, e.detach().abs().max().item()) if e.numel() else 1.0
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden(path, dtype, form):
    z = np.load(path)
    meta = json.loads(str(z["meta"]))
    names = [k for k in ("in/x", "w/conv.weight", "w/conv.bias") if k in z]
    leaves = [torch.tensor(z[k], dtype=dtype).requires_grad_() for k in names]
    y, state = causal_conv(*leaves, return_state=True, backend=form)
    grads = torch.autograd.grad((y * torch.tensor(z["ct"], dtype=dtype)).sum(), leaves)
    got = {"out": y.detach(), **{f"grad_{k}": g for k, g in zip(names, grads, strict=True)}}
    for key, value in got.items():
        # the official code has the same form: rounding alone; in float32 ten times its own loss
        loss = 10 * meta["f32_max_abs_err"][key] if dtype == torch.float32 else 0.0
        scale = meta["max_abs"][key] * (1e-6 if dtype == torch.float32 else 1e-12)
        assert (value.double() - torch.tensor(z[key])).abs().max() <= loss + scale, key
    if "state/last_inputs" in z:
        torch.testing.assert_close(state.detach().double(), torch.tensor(z["state/last_inputs"]), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("reverse", "resets", "mixing"), [*itertools.product([False, True], repeat=3)])
def test_whole_is_chunks_is_steps(form, reverse, resets, mixing):
    S = 11
    x, weight, bias, state = case(S=S, mixing=mixing)
    mask = torch.zeros(2, S, dtype=torch.bool)
    if resets:
        mask[0, 4] = mask[0, 5] = mask[1, 0] = mask[1, 10] = True
    options = {"activation": "silu", "reverse": reverse, "return_state": True, "backend": form}
    wanted = [x, weight, bias, state]
    expected = with_gradients(causal_conv(x, weight, bias, state=state, resets=mask, **options), wanted)
    for cuts in ((5,), (1, 3, 4, 9), tuple(range(1, S))):
        spans = [*itertools.pairwise((0, *cuts, S))]
        carried, parts = state, []
        for a, b in reversed(spans) if reverse else spans:
            y, carried = causal_conv(x[:, a:b], weight, bias, state=carried, resets=mask[:, a:b], **options)
            parts.append(y)
        assert_near(with_gradients([torch.cat(parts[::-1] if reverse else parts, 1), carried], wanted), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reverse", [False, True])
def test_resets_are_each_piece_on_its_own(form, reverse):
    x, weight, bias, _ = case(B=1)
    mask = torch.zeros(1, 11, dtype=torch.bool)
    mask[0, [3, 6] if reverse else [4, 7]] = True
    packed = causal_conv(x, weight, bias, resets=mask, reverse=reverse, backend=form)
    alone = [causal_conv(x[:, a:b], weight, bias, reverse=reverse, backend=form) for a, b in ((0, 4), (4, 7), (7, 11))]
    assert_near(with_gradients([packed], [x, weight, bias]), with_gradients([torch.cat(alone, 1)], [x, weight, bias]))


@pytest.mark.parametrize("form", FORMS)
def test_reverse_is_the_flipped_convolution(form):
    x, weight, bias, state = case()
    y, last = causal_conv(x, weight, bias, state=state, return_state=True, reverse=True, backend=form)
    flipped, last_flipped = causal_conv(x.flip(1), weight, bias, state=state, return_state=True, backend=form)
    assert_near([y, last], [flipped.flip(1), last_flipped])


@given(
    B=st.integers(0, 3), S=st.integers(0, 20), D=st.integers(1, 4), K=st.integers(1, 6),
    mixing=st.booleans(), reverse=st.booleans(), resets=st.booleans(), wide=st.booleans(),
)
def test_forms_agree_on_any_shape(B, S, D, K, mixing, reverse, resets, wide):
    x, weight, bias, state = case(B, S, D, K, mixing, torch.float64 if wide else torch.float32)
    mask = (draw(B, S, seed=S) > 0.5) if resets else None
    results = []
    for form in FORMS:
        options = {"resets": mask, "reverse": reverse, "return_state": True, "backend": form}
        y, last = causal_conv(x, weight, bias, state=state, **options)
        assert y.shape == (B, S, weight.shape[0])
        assert last.shape == state.shape
        results.append(with_gradients([y, last], [x, weight, bias, state]))
    # float32: gradients sum up to B S = 60 products; 1e-5 is a hundred roundings
    assert_near(results[1], results[0], EXACT if wide else 1e-5)


@pytest.mark.parametrize("mixing", [False, True])
def test_derivative(mixing):
    leaves = case(B=1, S=5, mixing=mixing)
    mask = torch.tensor([[False, False, False, True, False]])
    for resets in (None, mask):
        assert torch.autograd.gradcheck(
            lambda x, w, b, s: causal_conv(x, w, b, state=s, return_state=True, activation="silu", resets=resets),  # noqa: B023
            leaves,
        )


def test_the_fast_gradient_is_right_on_a_long_sequence():
    # longer than the rows that are summed side by side, and not a multiple of them; float32 takes the fast path
    x, weight, bias, _ = case(B=3, S=203, D=7, dtype=torch.float32)
    wanted = [x, weight, bias]
    got = with_gradients([causal_conv(x, weight, bias, backend="torch")], wanted)
    # 609 terms of size 1 summed in float32, in another order: sqrt(609) * 6e-8 * a few, relative to sums of size 50
    assert_near(got, with_gradients([causal_conv(x, weight, bias, backend="reference")], wanted), 1e-5)


def test_the_fast_gradient_can_be_differentiated():
    x, weight, _, _ = case(B=1, S=15, dtype=torch.float32)
    second = []
    for form in FORMS:
        (g,) = torch.autograd.grad(causal_conv(x, weight, backend=form).square().sum(), weight, create_graph=True)
        second.append(torch.autograd.grad(g.square().sum(), [x, weight]))
    assert_near(second[0], second[1], 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(form, dtype):
    x, weight, bias, state = case(dtype=dtype)
    y, last = causal_conv(x, weight, bias, state=state, return_state=True, backend=form)
    assert y.dtype == last.dtype == dtype
    expected = causal_conv(*(t.double() for t in (x, weight, bias)), state=state.double(), backend="reference")
    # K + 1 = 5 roundings of sums below 8: at worst each loses half an eps of 8
    assert (y.double() - expected).abs().max() <= 5 * 4 * torch.finfo(dtype).eps
    assert torch.autograd.grad(y.sum(), x)[0].dtype == dtype


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mixing", [False, True])
def test_autocast(form, mixing):
    x, weight, bias, _ = case(S=30, mixing=mixing, dtype=torch.float32)
    expected = with_gradients([causal_conv(x, weight, bias, backend=form)], [x, weight, bias])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = causal_conv(x, weight, bias, backend=form)
    # matrix products may be bfloat16 (eps 2^-7) under autocast: a few roundings of sums of up to 60 products
    assert_near([t.float() for t in with_gradients([y.float()], [x, weight, bias])], expected, 0.05)


def test_the_last_state_does_not_hold_on_to_the_sequence():
    x, weight, _, _ = case(S=1000)
    _, last = causal_conv(x, weight, return_state=True)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_one_channel_is_depthwise_or_mixing():
    x, weight = draw(1, 5, 1), draw(3, 1, 2, seed=1)
    assert_near([causal_conv(x, weight)[..., 1:2]], [causal_conv(x, weight[1:2])])


def test_errors_name_shapes():
    x, weight, bias, state = (t.detach() for t in case())
    with pytest.raises(ValueError, match=r"wants x \[B, S, D\]"):
        causal_conv(x[0], weight)
    with pytest.raises(ValueError, match="K >= 1"):
        causal_conv(x, weight[..., :0])
    with pytest.raises(ValueError, match=r"3 channels wants weight \[3, 1, K\] or \[D_out, 3, K\]; got \[2, 1, 4\]"):
        causal_conv(x, weight[:2])
    with pytest.raises(ValueError, match=r"bias \[3\]"):
        causal_conv(x, weight, bias[:2])
    with pytest.raises(ValueError, match=r"state \[B, K-1, D\] = \[2, 3, 3\]; got \[2, 2, 3\]"):
        causal_conv(x, weight, state=state[:, 1:])
    with pytest.raises(ValueError, match=r"resets \[B, S\]"):
        causal_conv(x, weight, resets=torch.zeros(2))
    with pytest.raises(ValueError, match="choose None or 'silu'"):
        causal_conv(x, weight, activation="gelu")


@pytest.mark.parametrize("form", FORMS)
def test_compile_in_one_graph_and_export(form):
    x, weight, bias, state = case(dtype=torch.float32)

    def f(x, weight, bias, state):
        return causal_conv(x, weight, bias, activation="silu", state=state, return_state=True)

    class Caller(torch.nn.Module):
        def forward(self, *args):
            return f(*args)

    leaves = [x, weight, bias, state]
    with use_backend(form):
        expected = with_gradients(f(*leaves), leaves)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        assert_near(with_gradients(compiled(*leaves), leaves), expected, 1e-5)
        length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
        program = torch.export.export(Caller(), tuple(leaves), dynamic_shapes={"args": (length, None, None, None)})
        longer = F.pad(x, (0, 0, 0, 9)).detach()
        assert_near(program.module()(longer, *leaves[1:]), f(longer, *leaves[1:]), 1e-5)
