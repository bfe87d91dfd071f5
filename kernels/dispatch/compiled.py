"""Marks for compilers that trace the kernels, and queries of what is tracing them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function so that compilers call it instead of tracing it.

    Equivalent to `torch.compiler.assume_constant_result`, which imports the compiler and thereby doubles the time of
    `import torch`. A test compares this mark with torch's.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def unknown(size: int | torch.SymInt) -> bool:
    """Return whether a size must not be used because the program being exported has to work for any size.

    `torch.compile` may use a size, because it recompiles for another one. An export with strict=True does not report
    which sizes are static, so all sizes count as unknown there.
    """
    if not torch.compiler.is_compiling():
        return False
    return isinstance(size, torch.SymInt) or (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting())


@constant
def forward_mode() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


@constant
def transformed() -> bool:
    """Return whether forward-mode differentiation or a torch.func transform is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def batched(x: Tensor) -> bool:
    """Return whether torch.func.vmap is active for x, whose values cannot be read then."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def watched() -> bool:
    """Return whether a compiler, tracer, dispatch mode or transform intercepts operations."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or transformed()
    )


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within this context autograd records operations, also in the function of an op, which runs without it."""
    keys = torch._C.DispatchKey
    within = (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView)
    with contextlib.ExitStack() as guards:
        for key in within:
            guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        guards.enter_context(torch.enable_grad())
        yield
