"""The Triton forms on a device, against the recurrence in float64: longer, wider, in every dtype, repeatable."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks.kernels import causal_conv, head_norm, headwise_linear, selective_scan, triton_common, why
from seqblocks.kernels.selective_scan import triton as selective_scan_triton
from tests.triton import compare
from tests.triton.compare import draw, float32_bar

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 130, 1000]


def scan(batch: int, S: int, E: int, N: int, groups: int = 0, constant: str = "") -> dict[str, Tensor]:
    shared = (batch, S, groups, N) if groups else (batch, S, N)
    out = {"u": draw(batch, S, E), "dt": draw(batch, S, E, seed=1), "A": -draw(E, N, seed=2).exp()}
    out |= {name: draw(*((E, N) if name in constant else shared), seed=3 + at) for at, name in enumerate("BC")}
    more = {"D": draw(E, seed=5), "z": draw(batch, S, E, seed=6), "dt_bias": draw(E, seed=7)}
    return {**out, **more, "state": draw(batch, E, N, seed=8)}


def check_scan(given: dict[str, Tensor], **options: Any) -> None:
    bar = float32_bar(given["u"].shape[1])
    narrow = ("u", "dt", "z", "B", "C")
    compare.check(selective_scan, given, bar, narrow=narrow, device=compare.DEVICE, return_state=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S", LENGTHS)
def test_selective_scan_of_any_length(S: int, reverse: bool, dtype: torch.dtype) -> None:
    check_scan(scan(2, S, 70, 16), reverse=reverse, dtype=dtype, resets=compare.resets(2, S, every=50))


@pytest.mark.parametrize("N", [1, 3, 8, 16, 17, 64, 128, 256])
def test_selective_scan_with_any_states(N: int) -> None:
    """Every shape of tile."""
    check_scan(scan(2, 40, 48, N), reverse=True)


@pytest.mark.parametrize("shape", [{"groups": 2}, {"groups": 3}, {"constant": "B"}, {"constant": "BC"}], ids=str)
def test_selective_scan_with_groups_and_constants(shape: dict[str, Any]) -> None:
    check_scan(scan(2, 70, 96, 16, **shape))


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_selective_scan_in_any_layout(view: compare.View) -> None:
    check_scan(scan(2, 40, 48, 16), views=dict.fromkeys(("u", "dt", "z", "B", "C", "A", "state"), view))


@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_scan_backward_in_several_launches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence each, of which all but the first begin where no wide word does."""
    monkeypatch.setattr(selective_scan_triton, "AT_ONCE", 1)
    check_scan(scan(3, 37, 71, 16), dtype=dtype, resets=compare.resets(3, 37))


def conv(batch: int, S: int, D: int, K: int) -> dict[str, Tensor]:
    out = {"x": draw(batch, S, D), "weight": draw(D, 1, K, seed=1), "state": draw(batch, K - 1, D, seed=2)}
    return {**out, "bias": draw(D, seed=3)}


def check_conv(given: dict[str, Tensor], **options: Any) -> None:
    B, S, _ = given["x"].shape
    compare.check(
        causal_conv, given, float32_bar(B * S), narrow=("x", "state"), device=compare.DEVICE, return_state=True,
        activation="silu", **options,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S", LENGTHS)
def test_causal_conv_of_any_length(S: int, reverse: bool, dtype: torch.dtype) -> None:
    check_conv(conv(3, S, 70, 4), reverse=reverse, dtype=dtype, resets=compare.resets(3, S, every=50))


@pytest.mark.parametrize("K", range(1, 9))
def test_causal_conv_with_any_taps(K: int) -> None:
    check_conv(conv(2, 50, 96, K), resets=compare.resets(2, 50))


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_causal_conv_in_any_layout(view: compare.View) -> None:
    check_conv(conv(2, 40, 48, 4), views=dict.fromkeys(("x", "weight", "state"), view))


def norm(*shape: int) -> dict[str, Tensor]:
    return {"x": draw(*shape), "weight": draw(shape[-1], seed=1), "bias": draw(shape[-1], seed=2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [4, 16, 64, 192, 512, 5000])
def test_head_norm_of_any_width(D: int, dtype: torch.dtype) -> None:
    """The bar: statistics are sums over a head, the gain's gradient over 3 x 130 tokens."""
    bar = float32_bar(max(D, 390))
    compare.check(head_norm, norm(3, 130, 2 * D), bar, heads=2, dtype=dtype, narrow=("x",), device=compare.DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [4, 64, 192, 4096])
def test_norm_skip_and_gate_of_any_width(D: int, dtype: torch.dtype) -> None:
    given = norm(3, 130, 2 * D)
    given |= {name: draw(3, 130, 2 * D, seed=at) for at, name in ((3, "skip"), (5, "gate"))}
    given["skip_weight"] = draw(2 * D, seed=4)
    bar, narrow = float32_bar(max(D, 390)), ("x", "skip", "gate")
    compare.check(head_norm, given, bar, heads=2, dtype=dtype, narrow=narrow, device=compare.DEVICE)


def linear(*lead: int, G: int, O: int, I: int) -> dict[str, Tensor]:
    return {"x": draw(*lead, G * I), "weight": draw(G, O, I, seed=1)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [(192, 4, 4), (7, 3, 5), (33, 16, 16), (5, 1, 2)], ids=str)
def test_headwise_linear_with_any_blocks(blocks: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = linear(3, 130, **dict(zip("GOI", blocks, strict=True)))
    compare.check(headwise_linear, given, float32_bar(390), dtype=dtype, narrow=("x", "weight"), device=compare.DEVICE)


CALLS: dict[str, Any] = {
    "selective_scan": (selective_scan, scan(4, 300, 256, 16)),
    "causal_conv": (causal_conv, conv(4, 300, 256, 4)),
    "head_norm": (functools.partial(head_norm, heads=4), norm(4, 300, 256)),
    "headwise_linear": (headwise_linear, linear(4, 300, G=64, O=4, I=4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_every_time(name: str) -> None:
    """No sum depends on which program comes first: a race would show as a difference sooner or later."""
    kernel, given = CALLS[name]
    leaves = {k: v.float().cuda().requires_grad_() for k, v in given.items()}
    first = compare.outputs_and_gradients(kernel, leaves, {}, {"backend": "triton"})
    for _ in range(20):
        again = compare.outputs_and_gradients(kernel, leaves, {}, {"backend": "triton"})
        for key, value in first.items():
            assert torch.equal(value, again[key]), key


@pytest.mark.parametrize("name", CALLS)
def test_auto_takes_it_and_a_compiler_sees_one_node(name: str) -> None:
    kernel, given = CALLS[name]
    assert why(name, device="cuda")[0].can
    leaves = {k: v.float().cuda() for k, v in given.items()}
    expected = kernel(**leaves, backend="triton")
    assert torch.equal(kernel(**leaves), expected)
    compiled = torch.compile(lambda **x: kernel(**x), fullgraph=True)
    torch.testing.assert_close(compiled(**leaves), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_under_autocast_and_in_a_graph(name: str) -> None:
    """Autocast narrows what it narrows elsewhere, and a CUDA graph replays what was captured: nothing waits."""
    kernel, given = CALLS[name]
    leaves = {k: v.float().cuda() for k, v in given.items()}
    expected = kernel(**leaves, backend="triton")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, as_torch = (kernel(**leaves, backend=form) for form in ("triton", "torch"))
    assert found.dtype == as_torch.dtype
    if found.dtype == expected.dtype:
        assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(**leaves, backend="triton")
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
