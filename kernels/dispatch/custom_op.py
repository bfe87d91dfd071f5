"""Ops of `torch.library` that run as plain functions where nothing intercepts them.

An op is one node for compilers, exporters and modes. It costs 60 us a call and 130 us more with gradients: as much as
the arithmetic of a short sequence, and longer than most kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.kernels.dispatch.compiled import watched

_is_batch = torch._C._functorch.is_legacy_batchedtensor


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """Return a decorator that makes a CustomOp of a function.

    The function must neither change its arguments nor return views of them.
    """
    return lambda function: CustomOp(name, function)


class CustomOp:
    """An op of `torch.library` where calls are intercepted, else a plain function with one `autograd.Function`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.traced = torch.library.custom_op(name, mutates_args=())(function)
        self._function = function
        self._apply: Callable[..., Any] = self.traced

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register, as a decorator, the function that returns empty tensors with the shapes of the op's outputs."""
        self.traced.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        """Set the derivative.

        Without setup_context, only the op of `torch.library` has it: for derivatives that raise an error.
        forward(ctx, *args): computes the outputs and saves tensors where nothing intercepts the op; defaults to the
        function followed by setup_context.
        """
        self.traced.register_autograd(backward, setup_context=setup_context)
        if setup_context is None:
            return
        function, save = self._function, setup_context

        def plain(ctx: Any, *args: Any) -> Any:  # A Function that defines setup_context is slower.
            output = function(*args)
            save(ctx, args, output)
            return output

        body = {"forward": staticmethod(forward or plain), "backward": staticmethod(backward)}
        made: Any = type(function.__name__, (torch.autograd.Function,), body)
        self._apply = made.apply

    def __call__(self, *args: Any) -> Any:
        if is_seen(args):
            return self.traced(*args)
        if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return self._function(*args)
        return self._apply(*args)


def is_seen(args: tuple[Any, ...]) -> bool:
    """Return whether anything intercepts ops, or an argument is more or less than a plain tensor with numbers.

    That is a meta tensor, an instance of a Tensor subclass, or a batch of gradients (`is_grads_batched`).
    """
    return (
        watched()
        or torch._C._is_torch_function_mode_enabled()
        or any(
            isinstance(x, Tensor) and (type(x) not in (Tensor, nn.Parameter) or x.is_meta or _is_batch(x)) for x in args
        )
    )
