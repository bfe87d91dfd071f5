"""The Triton sLSTM on a device, against its recurrence in float64: heads that stay on chip, heads that several
multiprocessors share, and heads of which neither is true."""

from __future__ import annotations

import pytest
import torch

from seqblocks.kernels import slstm, triton_common, why
from seqblocks.kernels.slstm import triton as slstm_triton
from tests.triton import compare
from tests.triton.test_slstm import GATES, STATE, inputs, run

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
        run, x, BARS[dtype], narrow=GATES, dtype=dtype, device=compare.DEVICE, reverse=reverse,
        resets=compare.resets(5, 40, 17),
    )


@pytest.mark.parametrize("batch", [1, 16, 17, 40])
@pytest.mark.parametrize("seq", [1, 2, 130])
def test_any_length(batch: int, seq: int) -> None:
    compare.check(run, inputs(batch, seq, 2, 32), 1e-4, narrow=GATES, device=compare.DEVICE)


def team(x: torch.Tensor, width: int, heads: int, backward: bool) -> bool:
    """Whether several programs share a head of the bfloat16 gates x."""
    size = heads, x.shape[0], triton_common.processors(x)
    return "BU" in slstm_triton.tiles(width, "bf16", backward, triton_common.arch(x), *size)


# one team, teams side by side, more than a device holds at once, and slices that do not come out even
@pytest.mark.parametrize(
    ("batch", "heads", "width"), [(1, 1, 256), (16, 4, 512), (40, 4, 512), (70, 8, 256), (3, 2, 1024), (5, 3, 200)]
)
def test_teams(batch: int, heads: int, width: int) -> None:
    x = inputs(batch, 40, heads, width, state=True)
    on_device = x["i"].bfloat16().to(compare.DEVICE)
    if triton_common.arch(on_device) in ("sm_80", "sm_90"):
        assert team(on_device, width, heads, False)
        assert team(on_device, width, heads, True) or (width == 1024 and triton_common.arch(on_device) == "sm_80")
    compare.check(
        run, x, BARS[torch.bfloat16], narrow=GATES, dtype=torch.bfloat16, device=compare.DEVICE,
        resets=compare.resets(batch, 40, 17),
    )


def test_a_long_walk_of_teams_is_that_of_pieces() -> None:
    """Thousands of barriers, and launches that begin where others ended."""
    x = {name: y.cuda() for name, y in inputs(16, 4096, 4, 256, state=True).items()}
    x = {name: y.bfloat16() if name in GATES else y.float() for name, y in x.items()}
    whole = run(**x, backend="triton")
    outs, state = [], {name: x[name] for name in STATE}
    for a, b in ((0, 1000), (1000, 1001), (1001, 4096)):
        y, *last = run(**x | {name: x[name][:, a:b] for name in GATES} | state, backend="triton")
        outs.append(y)
        state = dict(zip(STATE, last, strict=True))
    assert torch.equal(torch.cat(outs, 1), whole[0])
    assert all(torch.equal(a, b) for a, b in zip(state.values(), whole[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 256, 512])
def test_the_same_bits_every_time(width: int, dtype: torch.dtype) -> None:
    x = [y.to(dtype).cuda().requires_grad_() for y in inputs(17, 200, 2, width).values()]

    def everything() -> list[torch.Tensor]:
        y = slstm(*x, backend="triton")
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    first = everything()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything(), first, strict=True))


@pytest.mark.parametrize("width", [64, 256, 512])
def test_forward_and_backward_in_a_graph(width: int) -> None:
    """Counters of teams are zeroed within it, or a second replay would not wait."""
    x = [y.bfloat16().cuda().requires_grad_() for y in inputs(20, 50, 2, width).values()]

    def everything() -> list[torch.Tensor]:
        y = slstm(*x, backend="triton")
        return [y, *torch.autograd.grad(y, x, torch.ones_like(y))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = everything()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for _ in range(3):
        for y in captured:
            y.detach().zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))


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
