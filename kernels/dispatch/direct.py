"""Calls of an op's own function, without `torch.library`, where nothing would see the op.

An op of `torch.library` is one node for compilers, exporters and modes. It costs 60 us a call, 130 more with gradients:
as much as the arithmetic of a short sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = (Tensor, nn.Parameter)


class Derivative(NamedTuple):
    """An op's derivative.

    save(ctx, inputs, output), differentiate(ctx, *grads): as they were registered with the op.
    forward: computes the op and returns its output and tensors that `save` gets as its fourth argument; or None.
    """

    save: Callable[..., None]
    differentiate: Callable[..., Any]
    forward: Callable[..., Any] | None = None


def call(op: Any, *args: Any, derivative: Derivative) -> Any:
    """Return op(*args), by the op's own function where nothing sees the op. op: made by `torch.library.custom_op`."""
    if is_seen(args):
        return op(*args)
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return op._init_fn(*args)
    return _Direct.apply(op._init_fn, derivative, *args)


def call_backward(op: Any, *args: Any) -> Any:
    """Return op(*args), an op of a backward pass, likewise. It is an op where it will be differentiated in turn."""
    return op(*args) if torch.is_grad_enabled() or is_seen(args) else op._init_fn(*args)


def is_seen(args: tuple[Any, ...]) -> bool:
    """Whether anything traces, transforms or watches ops, or an argument has no numbers or is a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or any(isinstance(x, Tensor) and (type(x) not in PLAIN or x.is_meta) for x in args)
    )


class _Direct(torch.autograd.Function):
    """An op's function with the op's own derivative."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], derivative: Derivative, *args: Any) -> Any:
        if derivative.forward is None:
            output = function(*args)
            derivative.save(ctx, args, output)
        else:
            output, kept = derivative.forward(*args)
            derivative.save(ctx, args, output, kept)
        ctx.differentiate = derivative.differentiate
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.differentiate(ctx, *grads)
