"""Helpers of several kernels for dtypes, autocast and derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqblocks.kernels.dispatch.compiled import constant, watched

PROCESSOR: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.9 has no such function
PROCESSOR_NAME = str(PROCESSOR.get("cpu_name", "unknown"))
ON_AMD, ON_INTEL = PROCESSOR_NAME.startswith("AMD"), PROCESSOR_NAME.startswith("Intel")


def slow_kinds(processor: dict[str, Any]) -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes for whose products an x86 processor has no instructions."""
    if processor.get("architecture") != "x86_64":
        return frozenset()
    able = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    return frozenset(kind for kind, names in able.items() if not any(processor.get(name) for name in names))


SLOW_KINDS = slow_kinds(PROCESSOR)
# On an x86 processor without VNNI, `torch._int_mm` takes 4 to 10 times as long as a product in float32 (AMD, Zen 3).
SLOW_INT8 = PROCESSOR.get("architecture") == "x86_64" and not PROCESSOR.get("avx512_vnni")
CONVERTED_MIN_ELEMENTS = 1 << 12  # of an operand with gradients: fewer are computed before they could be converted
EXACT_TERMS = 1040  # so many products of integers from -127 to 127 add up to less than 2^24, exactly in float32


def in_float32(run: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """Return run(x, *others), computed in float32 if the processor is slow in their dtype.

    The backward pass converts the operands again, so that no copies of them are kept.
    """
    operands, dtype = (x, *others), x.dtype
    if x.dtype not in SLOW_KINDS or not x.is_cpu or any(y is not None and y.dtype != x.dtype for y in others):
        return run(*operands)
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return run(*operands)

    def wide(*given: Tensor | None) -> Tensor:  # without a reference to x, which a checkpointed layer computes again
        return run(*(None if y is None else y.float() for y in given)).to(dtype)

    if not torch.is_grad_enabled() or not any(y is not None and y.requires_grad for y in operands) or watched():
        return wide(*operands)
    if x.numel() < CONVERTED_MIN_ELEMENTS:
        return run(*operands)
    y: Tensor = checkpoint(wide, *operands, use_reentrant=False, preserve_rng_state=False)
    return y


SAVED_MAX_BYTES = 1 << 22  # bytes; larger tensors, saved in each layer, determine the peak memory of a training step


def added_exactly(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of integers in float32, rounded once."""
    first, *others = parts
    if not others:
        return first
    total = first.double()
    for part in others:
        total.add_(part)
    return total.float()


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that turns autocast off, so that gates, stabilisers and states keep their dtype."""
    if _autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype to which autocast currently casts matrix products, or None."""
    if _autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


@constant  # The compilers of older torch versions cannot trace it.
def _autocast_available(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def computed_in(*inputs: Tensor | None) -> torch.dtype:
    """Return the dtype by which an implementation is chosen: float64 if any input has it, else the first input's."""
    dtypes = [x.dtype for x in inputs if x is not None]
    return torch.float64 if torch.float64 in dtypes else dtypes[0]


def empty_with_gradients(like: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return the empty tensor `like` as a function of all inputs, so that the gradient of each is zeros."""
    return like * sum((x.sum() for x in inputs if x is not None), like.new_zeros(()))


def filled(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of an output, or zeros if the loss does not depend on that output.

    With `ctx.set_materialize_grads(False)`, autograd itself creates no zeros, which it would do for every output, also
    for those that are only saved for the backward pass.
    """
    return torch.zeros_like(like) if grad is None else grad


def is_worth_saving(like: Tensor) -> bool:
    """Return whether an intermediate value of this size is saved for the backward pass, and not computed there again.

    For short sequences, computing it again takes several percent of a training step, and the memory is small.
    """
    return like.numel() * like.element_size() <= SAVED_MAX_BYTES


def no_second_derivative(op: str, name: str) -> Callable[..., Any]:
    """Return a backward that raises RuntimeError, for implementations whose first derivative is written by hand."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"the {name} implementation of {op} has no second derivative: compute its outputs in a block "
            '`with seqblocks.kernels.use_backend("reference"):`'
        )

    return refuse
