"""Fill, gather and read parameters that are sharded over several devices (DTensors)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from seqblocks.errors import RunError, UsageError

if TYPE_CHECKING:
    from seqblocks.graph import ModelSpec

Result = TypeVar("Result")
ORDINARY = (nn.Parameter, Tensor)


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Return whether a tensor is a DTensor, of which each rank has a shard or a copy."""
    if type(tensor) in ORDINARY or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # imported here because it takes a second and few models need it

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself unless it is a DTensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Sharding(NamedTuple):
    """How a parameter is sharded over ranks: each of its consecutive sections along an axis is sharded separately."""

    axis: int
    sections: tuple[int, ...]

    def ranges(self, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield start and length in the whole parameter of each range of a rank."""
        start = 0
        for size in self.sections:
            yield start + rank * (size // ranks), size // ranks
            start += size

    def shard(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a rank's shard of a tensor."""
        return torch.cat([whole.narrow(self.axis, *each) for each in self.ranges(rank, ranks)], self.axis)

    def join(self, shards: list[Tensor]) -> Tensor:
        """Return the whole tensor, joined from the shards of all ranks."""
        sizes = [size // len(shards) for size in self.sections]
        by_section = zip(*(shard.split(sizes, self.axis) for shard in shards), strict=True)
        return torch.cat([each for section in by_section for each in section], self.axis)


class TensorShards(NamedTuple):
    """A rank's shards in a tensor-parallel model: the rank, how each parameter is sharded, and the whole spec."""

    group: Any
    rank: int
    ranks: int
    shardings: dict[str, Sharding]
    spec: ModelSpec

    def __deepcopy__(self, memo: object) -> TensorShards:
        return self  # a copied model is on the same ranks: a process group cannot be copied

    def __reduce__(self) -> Any:
        raise UsageError("the model is split over several ranks and cannot be pickled: save it by `seqblocks.save`")

    def are_in(self, group: Any) -> bool:
        """Return whether the ranks of a group hold different parts of the model."""
        ranks = torch.distributed.get_process_group_ranks
        return len({*ranks(self.group)}.intersection(ranks(group or torch.distributed.group.WORLD))) > 1

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return the rank's shard of a parameter, or all of it if it is not sharded."""
        sharding = self.shardings.get(name)
        return sharding.shard(whole, self.rank, self.ranks) if sharding else whole

    def join(self, name: str, shard: Tensor) -> Tensor:
        """Return a whole parameter. All ranks must call this."""
        sharding = self.shardings.get(name)
        if sharding is None:
            return shard
        shards = [torch.empty_like(shard) for _ in range(self.ranks)]
        torch.distributed.all_gather(shards, shard.contiguous(), group=self.group)
        return sharding.join(shards)


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter. For a DTensor, each rank copies its own shard, without communication."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(shard.to_local())


@torch.no_grad()
def gathered(tensors: dict[str, Tensor], groups: Groups, shards: TensorShards | None) -> dict[str, Tensor]:
    """Return whole parameters on the first rank's CPU, and an empty dict on others. All ranks must call this."""
    first = _is_first(groups)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if shards:
            whole = shards.join(name, whole)
        if first:
            found[name] = whole.cpu()
    return found


Groups = list[Any]
"""Process groups, one for each axis of a mesh that a model is spread over; none for a model on one device."""


def groups_of(tensors: Iterable[Tensor], shards: TensorShards | None) -> Groups:
    """Return the process groups over which a model's tensors are sharded."""
    mesh = next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)
    return [*(mesh.get_all_groups() if mesh else ()), *([shards.group] if shards else ())]


def _is_first(groups: Groups) -> bool:
    return not any(torch.distributed.get_rank(group) for group in groups)


def on_first_rank(groups: Groups, work: Callable[[], None]) -> None:
    """Call `work` on the first rank while the others wait. If it fails, the other ranks raise RunError."""
    if _is_first(groups):
        failed: list[str | None] = [None]
        try:
            work()
        except BaseException as error:
            failed = [f"{type(error).__name__}: {error}"]
            raise
        finally:
            _broadcast(groups, failed)
    else:
        failed = [None]
        _broadcast(groups, failed)
        if failed[0]:
            raise RunError(f"the first rank failed: {failed[0]}")


def on_all_ranks(groups: Groups, work: Callable[[], Result]) -> Result:
    """Return the result of `work` once it is done on all ranks. If it fails on one, the others raise RunError."""
    failed: str | None = None
    try:
        return work()
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        other = _any_of(groups, failed)
        if other and not failed:
            raise RunError(f"another rank failed: {other}")


def _any_of(groups: Groups, text: str | None) -> str | None:
    """Return the text of a rank that has one, preferably of this rank."""
    for group in groups:
        found: list[str | None] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, text, group=group)
        text = text or next(filter(None, found), None)
    return text


def _broadcast(groups: Groups, values: list[Any]) -> None:
    for group in groups:
        source = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(values, source, group=group)


class _Replicated(torch.autograd.Function):
    """Local copy of a replicated DTensor, whose gradient is reduced over all ranks of the mesh."""

    # `redistribute` and then `to_local` of torch have the same result, but take twice as long in the forward pass of
    # each parameter: 130 to 154 µs compared with 63 to 85 on one CPU core.

    @staticmethod
    def forward(ctx: Any, parameter: Any, op: str) -> Tensor:
        ctx.mesh, ctx.placements, ctx.op = parameter.device_mesh, parameter.placements, op
        return parameter.to_local().view_as(parameter.to_local())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        partial = DTensor.from_local(gradient, ctx.mesh, [Partial(ctx.op)] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(ctx.mesh, [Replicate()] * ctx.mesh.ndim), None


def replicated(parameter: Any, op: str) -> Tensor:
    """Return the local copy of a replicated parameter; `op` (avg or sum) reduces its gradient over the ranks."""
    return _Replicated.apply(parameter, op) if is_sharded(parameter) else parameter
