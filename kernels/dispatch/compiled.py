"""What a compiler that traces these kernels is told, and asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result` without its import of the compiler, which takes as long as torch's.

    All that it does is to leave this mark; a test holds that against torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def unknown(size: int | torch.SymInt) -> bool:
    """Whether a program is being exported that serves this size whatever it will be: nothing may hang on it.

    (`torch.compile` may ask about a size, and compiles again where the answer is another. An export with strict=True
    does not tell which sizes it knows, so none count as known.)
    """
    if not torch.compiler.is_compiling():
        return False
    exporting = getattr(torch.compiler, "is_exporting", None)  # not in older versions
    return isinstance(size, torch.SymInt) or (torch.compiler.is_dynamo_compiling() and bool(exporting and exporting()))
