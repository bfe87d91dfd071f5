"""The causal convolution's Triton form, run by triton's interpreter, against the sum over taps in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks import BackendError
from seqblocks.kernels import causal_conv, why
from seqblocks.kernels.causal_conv import triton as causal_conv_triton
from tests.triton import compare
from tests.triton.compare import draw, float32_bar, half

pytestmark = compare.interpreted

NARROW = ("x", "state")


def tensors(batch: int = 2, S: int = 9, D: int = 3, K: int = 4, *, bias: bool = True) -> dict[str, Tensor]:
    out = {"x": draw(batch, S, D), "weight": draw(D, 1, K, seed=1), "state": draw(batch, K - 1, D, seed=2)}
    return {**out, "bias": draw(D, seed=3)} if bias else out


def check(given: dict[str, Tensor], **more: Any) -> None:
    options = {"return_state": True, "narrow": NARROW, "activation": "silu", **more}
    compare.check(causal_conv, given, float32_bar(given["x"].shape[1]), **options)


@half(
    ("reverse", [False, True]),
    ("S", [1, 2, 3, 63, 64, 65, 130]),
)
def test_any_length(S: int, reverse: bool) -> None:
    check(tensors(S=S), reverse=reverse)
    check(tensors(S=S), reverse=reverse, resets=compare.resets(2, S))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_any_number_of_taps(K: int, activation: str | None) -> None:
    for reverse in (False, True):
        check(tensors(K=K, bias=False), activation=activation, reverse=reverse, resets=compare.resets(2, 9))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S", [31, 37])
def test_several_programs_share_a_sequence(S: int, reverse: bool) -> None:
    """More channels and tokens than a tile has, and no multiple of either; 31 tokens fit, but not with the state's."""
    check(tensors(S=S, D=70), reverse=reverse, resets=compare.resets(2, S))


def test_without_a_state() -> None:
    given = tensors()
    del given["state"]
    check(given)


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_any_layout(view: compare.View) -> None:
    check(tensors(), views=dict.fromkeys(("x", "weight", "state"), view))


def test_any_layout_of_the_upstream_gradient() -> None:
    def sliced(**given: Any) -> Any:
        y = causal_conv(**given)
        return y[..., ::2], y.transpose(0, 1), y.sum((0, 1, 2))

    compare.check(sliced, tensors(), float32_bar(9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_float32_inside(dtype: torch.dtype) -> None:
    check(tensors(), dtype=dtype, narrow=("x", "state", "weight", "bias"))


@pytest.mark.parametrize("reverse", [False, True])
def test_whole_is_chunks_is_steps(reverse: bool) -> None:
    S = 11
    given = {k: v.float().requires_grad_() for k, v in tensors(S=S).items()}
    marks = compare.resets(2, S)

    def run(edges: list[int]) -> list[Tensor]:
        parts, state = [], given["state"]
        spans = [*pairwise(edges)]
        for a, b in reversed(spans) if reverse else spans:
            y, state = causal_conv(
                given["x"][:, a:b], given["weight"], given["bias"], activation="silu", state=state, return_state=True,
                resets=marks[:, a:b], reverse=reverse, backend="triton",
            )
            parts.append(y)
        y = torch.cat(parts[::-1] if reverse else parts, 1)
        loss = (y * draw(*y.shape)).sum() + (state * draw(*state.shape)).sum()
        return [y, state, *torch.autograd.grad(loss, [*given.values()])]

    whole = run([0, S])
    for edges in ([0, 1, 3, S], [*range(S + 1)]):
        for a, b in zip(run(edges), whole, strict=True):
            assert (a - b).abs().max() <= float32_bar(S) * max(1.0, b.abs().max().item())


@pytest.mark.parametrize(("batch", "S"), [(0, 5), (2, 0)])
def test_empty(batch: int, S: int) -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(batch, S).items()}
    y, last = causal_conv(**given, return_state=True, backend="triton")
    assert y.shape == (batch, S, 3)
    torch.testing.assert_close(last, given["state"])
    (y.sum() + last.sum()).backward()


def test_offsets_beyond_31_bits() -> None:
    """Tokens 2^30 elements apart, in memory that is promised and never touched."""
    try:
        memory = torch.empty(3 * 2**30 + 3, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("6 GB of address space are not to be had")
    x = memory.as_strided((1, 4, 3), (0, 2**30, 1))
    given = {k: v.float() for k, v in tensors(batch=1, S=4).items()}
    x.copy_(given["x"])
    found = causal_conv(**{**given, "x": x}, backend="triton")
    torch.testing.assert_close(found, causal_conv(**{**given, "x": x.contiguous()}, backend="triton"), rtol=0, atol=0)


def test_compile_and_export() -> None:
    given = {k: v.float().requires_grad_() for k, v in tensors(S=5).items()}
    names = [*given]

    def run(*x: Tensor) -> Any:
        named = dict(zip(names, x, strict=True))
        return causal_conv(**named, activation="silu", return_state=True, backend="triton")

    def everything(f: Any) -> list[Tensor]:
        y, last = f(*given.values())
        return [y, last, *torch.autograd.grad(y.sum() + last.square().sum(), [*given.values()])]

    torch._dynamo.reset()
    expected = everything(run)
    for a, b in zip(everything(torch.compile(run, fullgraph=True, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    class Caller(torch.nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return run(*x)

    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    leaves = tuple(x.detach() for x in given.values())
    program = torch.export.export(Caller(), leaves, dynamic_shapes={"x": (length, *[None] * (len(leaves) - 1))})
    assert "causal_conv_triton" in str(program.graph)
    longer = torch.cat([leaves[0], leaves[0]], 1)
    torch.testing.assert_close(program.module()(longer, *leaves[1:])[0], run(longer, *leaves[1:])[0], rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_the_registration_is_sound(bias: bool) -> None:
    x, w, state, b = (v.float().requires_grad_() for v in tensors(S=5).values())
    w = w.detach()[:, 0].contiguous().requires_grad_()
    torch.library.opcheck(causal_conv_triton._op.traced, (x, w, b if bias else None, state, None, True, False))


def test_autocast_changes_nothing() -> None:
    given = {k: v.float() for k, v in tensors().items()}
    plain = causal_conv(**given, backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(causal_conv(**given, backend="triton"), plain)


def test_what_it_cannot_do_it_says() -> None:
    def verdict(**facts: Any) -> Any:
        return why("causal_conv", **{"device": "cuda", "dtype": torch.float32, "taps": 4, "mixing": False, **facts})[0]

    assert verdict().can
    assert "9 taps; at most 8" in verdict(taps=9).reason
    assert "mixes channels" in verdict(mixing=True).reason
    given = tensors()
    with pytest.raises(BackendError, match="float64"):
        causal_conv(**given, backend="triton")
