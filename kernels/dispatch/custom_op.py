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

is_batch = torch._C._functorch.is_legacy_batchedtensor


def custom_op(name: str, outputs: int | None = None) -> Callable[[Callable[..., Any]], CustomOp]:
    """Return a decorator that makes a CustomOp of a function.

    The function must neither change its arguments nor return views of them. outputs: the length of the list of tensors
    that it returns; None if it returns a tensor or a tuple.
    """
    return lambda function: CustomOp(name, function, outputs)


class CustomOp:
    """An op of `torch.library` where calls are intercepted, else a plain function with one `autograd.Function`."""

    def __init__(self, name: str, function: Callable[..., Any], outputs: int | None = None) -> None:
        self._as_op = _returning_a_tuple if outputs else _unchanged
        schema = _schema(function, outputs) if outputs else None
        self.traced = torch.library.custom_op(name, self._as_op(function), mutates_args=(), schema=schema)
        self._function = function
        self._apply: Callable[..., Any] = self.traced

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register, as a decorator, the function that returns empty tensors with the shapes of the op's outputs."""
        self.traced.register_fake(self._as_op(fake))
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


def _schema(function: Callable[..., Any], outputs: int) -> str:
    """Return the schema of a function that returns a list, with its tensors as separate outputs.

    torch runs no op that returns a list on a batch of gradients (`is_grads_batched`).
    """
    arguments, _, _ = torch.library.infer_schema(function, mutates_args=()).rpartition(" -> ")
    return f"{arguments} -> ({', '.join(['Tensor'] * outputs)})"


def _returning_a_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tuple(function(*args))


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def is_seen(args: tuple[Any, ...]) -> bool:
    """Return whether anything intercepts ops, or an argument is not a plain tensor.

    Other tensors are a meta tensor, a nested one, an instance of a Tensor subclass, or a batch of gradients
    (`is_grads_batched`).
    """
    return (
        watched()
        or torch._C._is_torch_function_mode_enabled()
        or any(
            isinstance(x, Tensor)
            and (type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.is_nested or is_batch(x))
            for x in args
        )
    )
