"""Ops of `torch.library` that run as plain functions where nothing would see them.

An op is one node for compilers, exporters and modes. It costs 60 us a call, 130 more with gradients: as much as the
arithmetic of a short sequence, and longer than most kernels run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.kernels.dispatch.compiled import watched


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """Decorate a function of tensors that changes none of its arguments and returns no view of them."""
    return lambda function: CustomOp(name, function)


class CustomOp:
    """An op where something sees it, else its function, with gradients through one `autograd.Function`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.traced = torch.library.custom_op(name, mutates_args=())(function)
        self._function = function
        self._apply: Callable[..., Any] = self.traced

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the function that returns empty tensors of the op's shapes."""
        self.traced.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        """Set the derivative. Without setup_context it is that of the op alone: it refuses.

        forward(ctx, *args): computes and saves where nothing sees the op; by default the function and setup_context.
        """
        self.traced.register_autograd(backward, setup_context=setup_context)
        if setup_context is None:
            return
        function, save = self._function, setup_context

        def plain(ctx: Any, *args: Any) -> Any:  # a Function with a setup_context of its own takes longer
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
    """Whether anything watches ops, or an argument has no numbers or is a subclass."""
    return (
        watched()
        or torch._C._is_torch_function_mode_enabled()
        or any(isinstance(x, Tensor) and (type(x) not in (Tensor, nn.Parameter) or x.is_meta) for x in args)
    )
