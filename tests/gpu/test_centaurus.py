"""The Triton form of Centaurus on a device, against its recurrence in float64: whole and in segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqblocks.kernels import centaurus, triton_common, why
from tests.triton import compare
from tests.triton.test_centaurus import MODES, NARROW, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]
BARS = {torch.float32: 1e-4, **NARROW}


def check(x: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    compare.check(centaurus, x, BARS[dtype], narrow=("x",), dtype=dtype, device=compare.DEVICE, **options)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seq", [1, 5, 127, 300])
def test_modes_and_lengths(seq: int, mode: str, dtype: torch.dtype) -> None:
    check(inputs(mode, S=seq, H=20, G=3, N=40, M=4, state=True), dtype, mode=mode, return_state=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("M", [1, 3, 8, 64])
@pytest.mark.parametrize("batch", [1, 700])
def test_whole_and_in_segments(batch: int, M: int, reverse: bool) -> None:
    x = inputs("dws", batch=batch, S=280, H=6, M=M, state=True)
    check(x, mode="dws", reverse=reverse, return_state=True, resets=compare.resets(batch, 280, 90))


def test_the_same_bits_compiled_and_in_a_graph() -> None:
    x = {name: t.float().cuda().requires_grad_() for name, t in inputs("neck", batch=3, S=400, H=64, N=128).items()}
    assert why("centaurus", device="cuda", mode="neck", channels=128, substates=3)[0].can

    def everything() -> list[torch.Tensor]:
        y = centaurus(**x)
        return [y, *torch.autograd.grad(y.square().sum(), [*x.values()])]

    first = everything()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything(), first, strict=True))
    with torch.no_grad():
        compiled = torch.compile(lambda **x: centaurus(**x), fullgraph=True)
        torch.testing.assert_close(compiled(**x), first[0], rtol=1e-5, atol=1e-5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = centaurus(**x)
        captured.zero_()
        graph.replay()
    assert torch.equal(captured, first[0])
