"""Parameters that are spread over several devices (DTensors): filling them, gathering them, reading replicated ones."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

ORDINARY = (nn.Parameter, Tensor)


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Return whether a tensor is a DTensor: one part of it, or a copy, is on each rank."""
    if type(tensor) in ORDINARY or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # takes a second to import, and few models need it

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: the tensor itself unless it is a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter; of a DTensor each rank copies its own part, without communication."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(part.to_local())


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor. Of a DTensor all ranks must ask for it, in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


class _Replicated(torch.autograd.Function):
    """The local copy of a replicated DTensor. Its gradient is reduced over all ranks of the mesh."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, op: str) -> Tensor:
        ctx.mesh, ctx.placements, ctx.op = parameter.device_mesh, parameter.placements, op
        return parameter.to_local().view_as(parameter.to_local())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        partial = DTensor.from_local(gradient, ctx.mesh, [Partial(ctx.op)] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(ctx.mesh, [Replicate()] * ctx.mesh.ndim), None


def replicated(parameter: Any, op: str) -> Tensor:
    """Return the local copy of a parameter that each rank has; `op` (avg or sum) reduces its gradient over them."""
    return _Replicated.apply(parameter, op) if is_sharded(parameter) else parameter  # type: ignore[no-any-return]
