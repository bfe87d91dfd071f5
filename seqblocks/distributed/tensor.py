"""Tensor parallelism: each rank computes a part of the heads, channels and hidden features of a model.

docs/decisions/0039-tensor-parallelism-is-a-rewritten-graph.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqblocks.distributed.fsdp import check_group, checked_mesh
from seqblocks.distributed.plan import Exchange, Plan, tensor_plan
from seqblocks.errors import UsageError
from seqblocks.model.quantize import check_not_quantized
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.agreement import check_weights
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import take_buffers, take_modes
from seqblocks.runtime.primitive import Primitive, is_primitive
from seqblocks.runtime.residual_sums import added_up
from seqblocks.runtime.shards import TensorShards, assign, is_sharded
from seqblocks.state import States


def tensor_parallel(model: SequenceModel, mesh: Any = None) -> SequenceModel:
    """Return this rank's part of a model, with its part of the weights.

    All ranks call the result with the same inputs, which each call compares, and each gets the whole output. The split
    follows from the graph (`tensor_plan`). Parameters that are not split, and their gradients, are equal on all ranks.
    Random steps such as dropout need the same seed on all ranks. `shard` may shard the result over other ranks.

    mesh: a DeviceMesh with one axis, by default all ranks. Raises UsageError if the model cannot be split over this
    number of ranks or its weights differ between them, UnavailableError without a process group.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"tensor_parallel needs a model from seqblocks.build, not {type(model).__name__}")
    check_not_quantized(model, "tensor_parallel")
    check_group("split over")
    if model.tensor_shards or any(is_sharded(p) for p in model.parameters()):
        raise UsageError("the model is split or sharded already; split it first, then shard it")
    mesh = checked_mesh(mesh, axes=1)
    check_weights(model, [mesh.get_group()])
    plan = tensor_plan(model.spec, mesh.size())
    with torch.device("meta"):
        local = SequenceModel(plan.part)
    local.tensor_shards = TensorShards(mesh.get_group(), mesh.get_local_rank(), plan.ranks, plan.shardings, plan.whole)
    _exchange(local, plan)
    _take_weights(local, model)
    take_modes(local, model)
    return local


def _exchange(model: SequenceModel, plan: Plan) -> None:
    assert model.tensor_shards
    for module in model.modules():
        if is_primitive(module) and (exchange := plan.exchanges.get(id(module.op))):
            module.__class__ = Exchanging
            assert isinstance(module, Exchanging)
            module._exchange, module._shards = exchange, model.tensor_shards


def _take_weights(local: SequenceModel, model: SequenceModel) -> None:
    assert local.tensor_shards
    for name, parameter in list(local.named_parameters()):
        whole = model.get_parameter(name)
        path, _, leaf = name.rpartition(".")
        own = nn.Parameter(torch.empty(parameter.shape, dtype=whole.dtype, device=whole.device), whole.requires_grad)
        local.get_submodule(path).register_parameter(leaf, own)
        if not whole.is_meta:
            assign(own, local.tensor_shards.take(name, whole.detach()))
    take_buffers(local, model, shared=False)
    local.tie()


class Exchanging(Primitive):
    """A step split over ranks, with the communication before and after it."""

    _exchange: Exchange
    _shards: TensorShards
    _takes_wires = True  # each is exchanged by itself

    @property
    def _group(self) -> Any:
        return self._shards.group

    def _compute(self, *tensors: Any, call: Call) -> tuple[Tensor, States]:
        exchange = self._exchange
        entered = []
        for tensor, what in zip(tensors, exchange.enter, strict=True):
            for each in what if tensor is not None else ():  # before the first token of a stream, there is none yet
                tensor = ENTER[each](tensor, self._group, exchange.axis if tensor.dim() == 4 else -1)
            entered.append(tensor)
        y, states = super()._compute(*entered, call=call)
        if exchange.leave:
            y = LEAVE[exchange.leave](y, self._group, exchange.axis)
        return y, states

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Tensor, States]:
        return self._compute(added_up(inputs[0]), *inputs[1:], call=call)

    def parameters_by_name(self, call: Call) -> dict[str, Any]:
        found = super().parameters_by_name(call)
        for name in self._exchange.copied:
            if name in found:
                found[name] = _Copy.apply(found[name], self._group)
        for name in self._exchange.added:
            if name in found:
                found[name] = found[name] / dist.get_world_size(self._group)
        return found


# The collectives of torch that have gradients suit other models. They sum gradients over the ranks where the forward
# pass sums or gathers. Here every rank computes the same loss from the result, and so has the whole gradient already.
class _Copy(torch.autograd.Function):
    """Identity in the forward pass; sums gradients over the ranks in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _added(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Concatenate the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        return _joined(x, group, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own(gradient, ctx.group, ctx.axis), None, None


class _Slice(torch.autograd.Function):
    """Take the rank's part of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        return _own(x, group, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradient, ctx.group, ctx.axis), None, None


def _added(x: Tensor, group: Any) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _joined(x: Tensor, group: Any, axis: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, axis)


def _own(x: Tensor, group: Any, axis: int) -> Tensor:
    return x.chunk(dist.get_world_size(group), axis)[dist.get_rank(group)].contiguous()


ENTER: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "slice": lambda x, group, axis: _Slice.apply(x, group, axis),
    "gather": lambda x, group, axis: _Gather.apply(x, group, axis),
    "copy": lambda x, group, axis: _Copy.apply(x, group) if x.is_floating_point() else x,
}
LEAVE: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "sum": lambda y, group, axis: _Sum.apply(y, group),
    "gather": lambda y, group, axis: _Gather.apply(y, group, axis),
}
