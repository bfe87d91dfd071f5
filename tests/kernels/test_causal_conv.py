"""Properties specific to the causal convolution: official numbers, the fast gradient, memory, addresses.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import causal_conv, use_backend
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    Subject,
    assert_close,
    check,
    draw,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import CAUSAL_CONV
from tests.torch import golden

CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("conv1d_*.npz"))
TORCH, TRITON = (Subject(CAUSAL_CONV, "plain", IMPLEMENTATIONS[name]) for name in ("torch", "triton"))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_official_numbers(case: str, dtype: torch.dtype, backend: str) -> None:
    data, meta = golden.read(f"xlstm/{case}")
    x = {name: torch.tensor(data[name], dtype=dtype, requires_grad=True)
         for name in ("in/x", "w/conv.weight", "w/conv.bias") if name in data}
    y, state = causal_conv(*x.values(), return_state=True, backend=backend)  # type: ignore[misc]
    grads = torch.autograd.grad((y * torch.tensor(data["ct"], dtype=dtype)).sum(), [*x.values()])
    found = {"out": y.detach(), **{f"grad_{name}": g for name, g in zip(x, grads, strict=True)}}
    golden.compare(data, meta, found)
    if "state/last_inputs" in data:
        assert torch.equal(state.detach().double(), torch.tensor(data["state/last_inputs"]))


def test_the_fast_gradient_is_right_on_a_long_sequence() -> None:
    """The sequence is longer than the rows that are summed side by side, and no multiple of them. float32 uses the fast
    path."""
    check(TORCH, TORCH.inputs(batch=3, S=203, D=7), bar=CAUSAL_CONV.bar(3 * 203))


def test_the_fast_gradient_can_be_differentiated() -> None:
    x = {name: t.float().requires_grad_() for name, t in TORCH.inputs(batch=1, S=15, state=False).items()}
    second = []
    for backend in ("reference", "torch"):
        y = TORCH(x, backend=backend)["out"]
        (g,) = torch.autograd.grad(y.square().sum(), x["weight"], create_graph=True)
        second.append(with_gradients({"gradient": g.square().sum()}, x))
    assert_close(*second, CAUSAL_CONV.bar(3 * 15))


def test_the_last_state_does_not_hold_on_to_the_sequence() -> None:
    _, last = causal_conv(draw(2, 1000, 3), draw(3, 1, 4), return_state=True)  # type: ignore[misc]
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_one_channel_is_depthwise_or_mixing() -> None:
    x, weight = draw(1, 5, 1), draw(3, 1, 2, seed=1)
    assert_close({"out": causal_conv(x, weight)[..., 1:2]}, {"out": causal_conv(x, weight[1:2])}, 2**-50)


@INTERPRETED
def test_offsets_beyond_31_bits() -> None:
    """Tokens are 2^30 elements apart, in memory that is reserved and never touched."""
    try:
        memory = torch.empty(3 * 2**30 + 3, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not provide 6 GB of address space")
    far = memory.as_strided((1, 4, 3), (0, 2**30, 1))
    x = {name: t.float() for name, t in TRITON.inputs(batch=1, S=4).items()}
    far.copy_(x["x"])
    found = causal_conv(**{**x, "x": far}, backend="triton")
    assert torch.equal(found, causal_conv(**{**x, "x": far.contiguous()}, backend="triton"))


def test_the_reference_is_compiled_and_exported_for_any_length() -> None:
    class Caller(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
            return causal_conv(x, weight, state=state)

    x = {name: t.float() for name, t in TORCH.inputs(S=11).items() if name != "bias"}
    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    torch._dynamo.reset()
    with use_backend("reference"):
        compiled = torch.compile(Caller(), fullgraph=True, backend="aot_eager")
        assert_close({"out": compiled(*x.values())}, {"out": Caller()(*x.values())}, CAUSAL_CONV.bar(11))
        program = torch.export.export(Caller(), (*x.values(),), dynamic_shapes=(length, None, None))
        longer = (F.pad(x["x"], (0, 0, 0, 9)), x["weight"], x["state"])
        assert_close({"out": program.module()(*longer)}, {"out": Caller()(*longer)}, CAUSAL_CONV.bar(20))
