"""Shard the parameters of a model over ranks with torch's FSDP2: one group per layer, the rest with the model.

docs/decisions/0039-tensor-parallelism-is-a-rewritten-graph.md
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqblocks import graph
from seqblocks.cost import dtype_named
from seqblocks.distributed.pipeline import Stage
from seqblocks.errors import UnavailableError, UsageError
from seqblocks.graph import Graph, Named
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.agreement import check_weights
from seqblocks.runtime.owner import reduce_gradients
from seqblocks.runtime.primitive import is_primitive
from seqblocks.runtime.torch_modules import as_primitive

Reduction = Literal["mean", "sum"]
M = TypeVar("M", SequenceModel, Stage)


def shard(
    model: M,
    mesh: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    checkpointing: bool = False,
    reduce: Reduction = "mean",
    reshard_after_forward: bool | int | None = None,
) -> M:
    """Shard the parameters of a model over the ranks of a mesh, in place, and return it.

    Each layer of a `repeat` is a group, whose parameters are gathered while it runs; all others are one group with the
    model. A layer whose parameters are tied to, or shared with, those of steps outside it belongs to the group of the
    layer or model around both. Parameters that are float32 in a half-precision model are not sharded: each rank has a
    copy, and their gradients are reduced like the others.

    mesh: a DeviceMesh of one axis, or of two (copies, shards); by default all ranks. dtype: what layers compute in,
    with float32 master weights ("bf16" for a model built in float32); float32 parameters stay so. checkpointing: layers
    recompute their activations in the backward pass. reduce: whether gradients are averaged over ranks or added.
    reshard_after_forward: as in FSDP2. A model on "meta" is materialised after it is sharded, by
    `model.to_empty(device=…)` and `model.reset_parameters(seed)`, with the same values as on one device.
    Raises UsageError for invalid arguments, or if the weights differ between ranks; UnavailableError without a process
    group.
    """
    _check(model, reduce)
    mesh = checked_mesh(mesh)
    _check_apart(model, mesh)
    check_weights(model, mesh.get_all_groups())
    paths = list(layer_paths(model.graph))
    if dtype is not None:
        model.register_forward_pre_hook(partial(_cast_inputs, _dtype(dtype)), with_kwargs=True)
    whole = _keep_whole(model, mesh, "avg" if reduce == "mean" else "sum")
    if checkpointing:
        for path in outermost(paths):
            _recompute(model.get_submodule(path))
    policy = _policy(model, dtype)
    parameters = list(graph.parameters(model.graph, shared=True))
    modules: list[nn.Module] = [model.get_submodule(path) for path in paths if _is_alone(path, parameters)]
    for module in (*modules, model):
        if any(p not in whole for p in module.parameters()):
            _fully_shard(module, mesh, whole, reshard_after_forward, reduce, policy)
    return model


def layer_paths(body: Graph, prefix: str = "") -> Iterator[str]:
    """Yield the path of each layer of each repeat, inner ones before those around them."""
    for node in body.nodes:
        name = graph.join(prefix, node.name)
        separate = node.directions if isinstance(node, graph.ScanNode) and node.owned == _names_inside(node) else ()
        for direction in separate or ("",):
            for label, inner in node.bodies.items():
                path = graph.join(name, direction, label)
                yield from layer_paths(inner, path)
                if isinstance(node, graph.RepeatNode):
                    yield path


def _names_inside(node: graph.Node) -> set[str]:
    return {item.name for item in graph.parameters(node.bodies[""])}


def _check(model: Any, reduce: str) -> None:
    if not isinstance(model, SequenceModel | Stage):
        raise UsageError(f"shard needs a model from seqblocks.build or a stage of one, not {type(model).__name__}")
    if reduce not in ("mean", "sum"):
        raise UsageError(f"reduce must be mean or sum, not {reduce!r}")
    check_group("shard over")
    if any(hasattr(module, "unshard") for module in model.modules()):
        raise UsageError("the model is sharded already")


def _check_apart(model: SequenceModel | Stage, mesh: Any) -> None:
    """Raise UsageError if ranks of the mesh hold different parts of the model. On "meta", no weights would show it."""
    shards = getattr(model, "tensor_shards", None)
    if shards and any(shards.are_in(group) for group in mesh.get_all_groups()):
        raise UsageError(
            "ranks of the mesh hold different parts of the model (tensor_parallel), which cannot be shards of one: "
            'pass an axis of the mesh with other ranks, such as mesh["data"]'
        )


def check_group(what: str) -> None:
    """Raise UnavailableError unless there is a process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        how = "start the script with torchrun and call torch.distributed.init_process_group()"
        raise UnavailableError(f"there is no process group to {what}: {how}")


def checked_mesh(mesh: Any, axes: int = 2) -> Any:
    """Return a mesh with at most `axes` axes, by default of all ranks. Raises UsageError."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(f"the mesh must be a DeviceMesh (from init_device_mesh), not {type(mesh).__name__}")
    if mesh is not None and mesh.ndim > axes:
        raise UsageError(f'the mesh has {mesh.ndim} axes, but at most {axes} can be used: select some, mesh["data"]')
    if mesh is not None:
        return mesh
    kind = torch.accelerator.current_accelerator()
    name = "cpu" if kind is None or torch.distributed.get_backend() == "gloo" else kind.type
    return init_device_mesh(name, (torch.distributed.get_world_size(),), mesh_dim_names=("data",))


def _keep_whole(model: SequenceModel | Stage, mesh: Any, op: str) -> set[nn.Parameter]:
    """Replicate parameters with a fixed precision, since FSDP2 needs one dtype per group."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    replicated: dict[int, nn.Parameter] = {}
    if mesh.ndim > 1:
        mesh._flatten()  # torch then reduces over all ranks at once, with the same rounding on each rank
    for item in graph.parameters(model.graph):
        if item.parameter.full_precision:
            path, _, leaf = item.name.rpartition(".")
            own = model.get_parameter(item.name)
            if id(own) not in replicated:
                copies = distribute_tensor(own.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
                replicated[id(own)] = nn.Parameter(copies, own.requires_grad)
            model.get_submodule(path).register_parameter(leaf, replicated[id(own)])
    if replicated:
        for module in model.modules():
            if is_primitive(module):
                reduce_gradients(as_primitive(module), op)
    return set(replicated.values())


def outermost(paths: list[str]) -> list[str]:
    """Return the paths of modules that are not inside other modules in the list."""
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _recompute(layer: nn.Module) -> None:
    """Make a layer recompute its activations in the backward pass, without a wrapper, which would rename parameters."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _is_alone(path: str, parameters: list[Named]) -> bool:
    """Return whether a layer shares no parameters with steps outside it."""
    prefix = f"{path}."
    for item in parameters:
        if item.tied:
            reader, owner = item.name.startswith(prefix), item.tied.startswith(prefix)
            if reader != owner and (owner or not item.shared):
                return False
    return True


def _dtype(name: torch.dtype | str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype_named(str(name), "dtype"))
    return found


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Cast floating-point inputs. FSDP2 itself would also cast the tensors of a state, which must stay float32."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _policy(model: nn.Module, dtype: torch.dtype | str | None) -> Any:
    """Return FSDP2's policy. Gradients in 16 bits are reduced in float32, others in their own dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kind = None if dtype is None else _dtype(dtype)
    is_short = any((kind or p.dtype).itemsize < 4 for p in model.parameters())
    reduced = torch.float32 if is_short else None
    return MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=reduced, cast_forward_inputs=False)


def _fully_shard(
    module: nn.Module, mesh: Any, whole: set[nn.Parameter], reshard: Any, reduce: str, policy: Any
) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    fully_shard(module, mesh=mesh, ignored_params=whole, reshard_after_forward=reshard, mp_policy=policy)
    if reduce == "sum":
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
