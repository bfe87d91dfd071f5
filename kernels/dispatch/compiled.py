"""What a compiler that traces these kernels must know, and what they must know of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function as one that compilers run instead of tracing it.

    This is `torch.compiler.assume_constant_result` without its import of the compiler, which takes as long as torch's;
    a test compares the mark with torch's own.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def unknown(size: int | torch.SymInt) -> bool:
    """Return whether a program is being exported that serves any size, so that nothing may depend on this one.

    (`torch.compile` may use a size, and compiles again where it differs. An export with strict=True does not report
    which sizes it knows, so none count as known.)
    """
    if not torch.compiler.is_compiling():
        return False
    return isinstance(size, torch.SymInt) or (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting())


@constant
def transformed() -> bool:
    """Return whether forward-mode derivatives are taken, or a transform of torch.func is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def watched() -> bool:
    """Return whether a compiler, tracer, dispatch mode or transform sees each operation."""
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
