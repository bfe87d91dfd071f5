"""The Triton sLSTM on a device, against its recurrence in float64: heads that stay on chip and heads that do not."""

from __future__ import annotations

import pytest
import torch

from seqblocks.kernels import slstm, triton_common, why
from tests.triton import compare
from tests.triton.test_slstm import GATES, inputs, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]
# y is fed back in what dots take: float32 is exact; bfloat16 rounds by 2^-9 and tf32, for float16, by 2^-11 a token, of
# which the forget gates leave some ten
BARS = {torch.float32: 1e-4, torch.float16: 40 * 2**-11, torch.bfloat16: 20 * 2**-9}


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [4, 32, 64, 100, 128, 200, 256, 512])
def test_any_width(width: int, reverse: bool, dtype: torch.dtype) -> None:
    x = inputs(5, 40, 2, width, state=True)
    compare.check(
        run, x, BARS[dtype], narrow=GATES, dtype=dtype, device="cuda", reverse=reverse, resets=compare.resets(5, 40, 17)
    )


@pytest.mark.parametrize("batch", [1, 16, 17, 40])
@pytest.mark.parametrize("seq", [1, 2, 130])
def test_any_length(batch: int, seq: int) -> None:
    compare.check(run, inputs(batch, seq, 2, 32), 1e-4, narrow=GATES, device="cuda")


@pytest.mark.parametrize("width", [64, 256])
def test_the_same_bits_every_time(width: int) -> None:
    x = [y.float().cuda().requires_grad_() for y in inputs(17, 200, 2, width).values()]

    def everything() -> list[torch.Tensor]:
        y = slstm(*x, backend="triton")
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    first = everything()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything(), first, strict=True))


@pytest.mark.parametrize("width", [64, 256])
def test_auto_takes_it_compiled_under_autocast_and_in_a_graph(width: int) -> None:
    x = [y.float().cuda() for y in inputs(4, 50, 2, width).values()]
    assert why("slstm", device="cuda", head_dim=width)[0].can
    wanted = slstm(*x, backend="triton")
    assert torch.equal(slstm(*x), wanted)
    assert torch.equal(torch.compile(slstm, fullgraph=True)(*x), wanted)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(slstm(*x), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = slstm(*x)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)
