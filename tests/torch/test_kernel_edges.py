"""What every form of every kernel owes its caller at the edges: empty tensors, mixed dtypes, degenerate options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks import kernels
from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch
from tests.triton.compare import interpreted

Leaves = dict[str, Tensor]


def leaves(**shapes: tuple[int, ...]) -> Leaves:
    return {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}


def mlstm(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    return kernels.mlstm, leaves(q=(B, S, 2, 4), k=(B, S, 2, 4), v=(B, S, 2, 4), i=(B, S, 2), f=(B, S, 2))


def slstm(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    gates = dict.fromkeys("ifzo", (B, S, 8))
    return kernels.slstm, leaves(**gates, recurrent=(2, 4, 4, 4), bias=(4, 2, 4))


def scan(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    return kernels.selective_scan, leaves(u=(B, S, 4), dt=(B, S, 4), A=(4, 2), B=(B, S, 2), C=(B, S, 2), D=(4,))


def conv(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    return kernels.causal_conv, leaves(x=(B, S, 4), weight=(4, 1, 3), bias=(4,))


def norm(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    found = leaves(x=(B, S, 4), weight=(4,), bias=(4,), skip=(B, S, 4), skip_weight=(4,), gate=(B, S, 4))
    return lambda x, **more: kernels.head_norm(x, 2, **more), found


def linear(B: int, S: int) -> tuple[Callable[..., Any], Leaves]:
    return kernels.headwise_linear, leaves(x=(B, S, 4), weight=(2, 2, 2))


CASES = {
    "mlstm": mlstm, "slstm": slstm, "selective_scan": scan, "causal_conv": conv, "head_norm": norm,
    "headwise_linear": linear,
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("backend", dispatch.FORMS)
@pytest.mark.parametrize("size", [(0, 3), (2, 0)])
@pytest.mark.parametrize("op", CASES)
def test_of_nothing_there_are_gradients(op: str, size: tuple[int, int], backend: str) -> None:
    """An empty share of a batch trains along: its outputs hang on the inputs, and the gradients are zeros."""
    function, given = CASES[op](*size)
    y = function(**given, backend=backend)
    assert y.shape[:2] == size
    assert y.requires_grad
    y.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in given.values())
    first = next(iter(given.values()))
    assert first.grad is not None


@interpreted
@pytest.mark.parametrize("op", CASES)
def test_one_input_of_float64_is_enough(op: str) -> None:
    """No Triton form computes in float64, so none may be chosen, whichever input has it."""
    function, given = CASES[op](2, 3)
    for name in given:
        if op == "causal_conv" and name == "bias":
            continue  # the result has the dtype of x and weight
        if op == "selective_scan" and name == "D":
            continue  # it is added behind the scan
        with pytest.raises(BackendError, match="float64"):
            function(**{**given, name: given[name].detach().double()}, backend="triton")


@interpreted
@pytest.mark.parametrize("rows", [1, 5])
def test_a_norm_without_eps(rows: int) -> None:
    """Rows of a tile that are not there have no variance, and no say in a weight's gradient."""
    x, weight = torch.randn(rows, 8), torch.ones(8, requires_grad=True)
    grads = []
    for backend in ("triton", "reference"):
        y = kernels.head_norm(x, 2, weight, eps=0.0, backend=backend)
        grads.append(torch.autograd.grad(y.square().sum(), weight)[0])
    torch.testing.assert_close(*grads)


@interpreted
@pytest.mark.parametrize("width", [16, 48])
def test_small_gradients_survive_float16(width: int) -> None:
    """Whole heads and heads by tiles: what goes back through the matrices does not pass through float16."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gates = {name: drawn(2, 4, width).half() for name in "ifzo"}
    recurrent, bias = drawn(1, width, 4, width) * width**-0.5, torch.zeros(4, 1, width)
    found = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        own = {name: x.to(dtype) for name, x in gates.items()}
        matrices = recurrent.half().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        state = [torch.full((2, 1, width), 0.1, dtype=matrices.dtype, requires_grad=True) for _ in range(4)]
        y, _ = kernels.slstm(  # type: ignore[misc]
            **own, recurrent=matrices, bias=bias.to(matrices.dtype), state=state, return_state=True, backend=backend
        )
        found.append([g.double() for g in torch.autograd.grad(3e-7 * y.double().sum(), [state[0], matrices])])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


@interpreted
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_a_forget_gate_that_lets_nothing_through(backend: str, gate: str) -> None:
    """f of -inf or far below: what was before is gone, and nothing else is lost with it."""
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(1, 40, 1, 4, generator=generator) for name in "qkv"}
    x |= {name: torch.randn(1, 40, 1, generator=generator) for name in "if"}
    x["f"][0, 7], x["f"][0, 20], x["f"][0, 33] = -torch.inf, -1e6, -300.0
    found = [
        kernels.mlstm(**{n: t.to(dtype) for n, t in x.items()}, input_gate=gate, backend=form).double()  # type: ignore[arg-type,union-attr]
        for form, dtype in ((backend, torch.float32), ("reference", torch.float64))
    ]
    torch.testing.assert_close(*found, rtol=0.0, atol=5e-4 * found[1].abs().max().item())
