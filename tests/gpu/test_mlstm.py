"""The Triton mLSTM on a device, against its recurrence in float64: every tile, dtype and gate."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from seqblocks.kernels import mlstm, triton_common, why
from tests.triton import compare
from tests.triton.test_mlstm import GATES, GRADIENT, NARROW, inputs, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]

BARS = {torch.float32: GRADIENT, **NARROW}


def check(tensors: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    compare.check(run, tensors, BARS[dtype], narrow=("q", "k", "v"), dtype=dtype, device=compare.DEVICE, **options)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("seq", [1, 2, 31, 63, 64, 65, 130, 300])
def test_any_length(seq: int, reverse: bool, dtype: torch.dtype) -> None:
    check(inputs(2, seq, 2, 32, 48, state=True), dtype, reverse=reverse, resets=compare.resets(2, seq, every=50))


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", [(4, 4), (16, 70), (64, 64), (128, 128), (192, 192), (256, 512), (512, 512)])
def test_any_width(width: tuple[int, int], gate: str, dtype: torch.dtype) -> None:
    check(inputs(1, 100, 2, *width, state=True), dtype, **GATES[gate])


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_any_layout(view: compare.View) -> None:
    check(inputs(2, 70, 2, 32, 16), views=dict.fromkeys("qkvif", view))


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("width", [(4, 4), (70, 20), (256, 512)])
def test_one_token(width: tuple[int, int], dtype: torch.dtype) -> None:
    x = inputs(3, 1, 2, *width, state=True)
    x = {name: y.to(dtype if name in "qkv" else torch.float32).to(compare.DEVICE) for name, y in x.items()}
    wanted = run(**{name: y.double() for name, y in x.items()}, backend="reference")
    for a, b in zip(run(**x, backend="triton"), wanted, strict=True):
        bar = max(2e-5, compare.ROUNDING.get(a.dtype, 0.0))
        assert (a.double() - b).abs().max() <= bar * b.abs().max()


@functools.cache
def leaves(seq: int = 300) -> list[torch.Tensor]:
    given = inputs(4, seq, 2, 64, 64)
    return [y.to(torch.bfloat16 if name in "qkv" else torch.float32).cuda() for name, y in given.items()]


def test_the_same_bits_every_time() -> None:
    x = [y.clone().requires_grad_() for y in leaves()]

    def everything() -> list[torch.Tensor]:
        h = mlstm(*x, backend="triton")
        return [h, *torch.autograd.grad(h.float().square().sum(), x)]

    first = everything()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything(), first, strict=True))


@pytest.mark.parametrize("seq", [1, 300])
def test_auto_takes_it_compiled_under_autocast_and_in_a_graph(seq: int) -> None:
    x = leaves(seq)
    assert why("mlstm", device="cuda", dtype=torch.bfloat16, head_dims=(64, 64))[0].can
    wanted = mlstm(*x, backend="triton")
    assert torch.equal(mlstm(*x), wanted)
    assert torch.equal(torch.compile(mlstm, fullgraph=True)(*x), wanted)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(mlstm(*x), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlstm(*x)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)
