"""Custom ops are plain function calls where nothing can observe them, and ops otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from seqblocks.kernels import gated_recurrence, linear_attention, mlstm, selective_scan, slstm


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def an_mlstm() -> tuple[Callable[..., Tensor], list[Tensor]]:
    return mlstm, [*(drawn(2, 70, 2, 8, seed=at) for at in range(3)), drawn(2, 70, 2), drawn(2, 70, 2, seed=1)]


def a_scan() -> tuple[Callable[..., Tensor], list[Tensor]]:
    x = [drawn(2, 20, 6), drawn(2, 20, 6, seed=1), drawn(6, 4), drawn(2, 20, 4), drawn(2, 20, 4, seed=1)]
    return lambda u, dt, A, B, C, **options: selective_scan(u, dt, -A.exp(), B, C, **options), x


def an_slstm() -> tuple[Callable[..., Tensor], list[Tensor]]:
    return slstm, [*(drawn(2, 9, 8, seed=at) for at in range(4)), drawn(2, 4, 4, 4), drawn(4, 2, 4)]


def a_delta_rule() -> tuple[Callable[..., Tensor], list[Tensor]]:
    x = [*(drawn(2, 9, 2, 4, seed=at) for at in range(3)), drawn(2, 9, 2), drawn(2, 9, 2, seed=1)]
    return lambda q, k, v, g, beta, **options: linear_attention(q, k, v, decay=-g.abs(), beta=beta, **options), x


def a_gated_recurrence() -> tuple[Callable[..., Tensor], list[Tensor]]:
    x = [drawn(2, 9, 4), drawn(2, 9, 4, seed=1)]
    return lambda x, decay, **options: gated_recurrence(x, -decay.abs(), **options), x


KERNELS = {
    "mlstm": an_mlstm, "selective_scan": a_scan, "slstm": an_slstm, "gated_recurrence": a_gated_recurrence,
    "linear_attention": a_delta_rule,
}


class Seen(TorchDispatchMode):
    """Record the ops of this package that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "seqblocks":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KERNELS)
def test_an_op_runs_directly_unless_a_mode_watches(name: str) -> None:
    run, x = KERNELS[name]()
    y = run(*x)
    assert not any("seqblocks" in node for node in _functions(y))  # of torch.library
    grads = torch.autograd.grad(y.sum(), x)
    with Seen() as seen:
        other = run(*x)
        others = torch.autograd.grad(other.sum(), x)
    assert seen.names == [name, f"{name}_backward"]
    assert any("seqblocks" in node for node in _functions(other))
    torch.testing.assert_close([y, *grads], [other, *others], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(run(*x), y)


def _functions(y: Tensor) -> set[str]:
    """Return the names of the nodes of a tensor's graph."""
    found, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            found.add(type(node).__name__.removesuffix("Backward"))
            ahead += [other for other, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_a_second_derivative_is_still_refused(name: str) -> None:
    run, x = KERNELS[name]()
    (grad,) = torch.autograd.grad(run(*x).square().sum(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("name", KERNELS)
def test_a_graph_may_be_kept_and_checkpointed(name: str) -> None:
    run, x = KERNELS[name]()
    y = run(*x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y.sum(), x), strict=True))
    again = torch.autograd.grad(checkpoint(run, *x, use_reentrant=False).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("make", KERNELS.values())
def test_tensors_without_numbers_have_shapes_and_gradients(make: Callable[[], Any]) -> None:
    run, tensors = make()
    x = [each.detach().to("meta").requires_grad_() for each in tensors]
    y = run(*x, resets=torch.zeros(x[0].shape[:2], dtype=torch.bool, device="meta"))
    assert [g.shape for g in torch.autograd.grad(y.sum(), x)] == [each.shape for each in x]
