"""State dicts of split models for torch.distributed.checkpoint, and gradient clipping over all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from seqblocks.checkpoint.folder import as_path, read_model
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.checkpoint.weights import check_fit, fill
from seqblocks.errors import UsageError
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.shards import Sharding, TensorShards, groups_of, is_sharded, local, on_all_ranks


class Shard(NamedTuple):
    """A shard of a tensor, and its offset in the whole tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]


class ShardedTensor(Tensor):
    """A tensor of which each rank has some shards. torch.distributed.checkpoint saves and loads it by these methods."""

    _shards: list[Shard]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor, shards: list[Shard]) -> ShardedTensor:
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        tensor._shards = shards
        return tensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), each.size()) for each, at in self._shards]

    def __create_write_items__(self, name: str, whole: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(each for each, at in self._shards if torch.Size(at) == index.offset)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a tensor that is sharded over several ranks")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedTensor({list(self.shape)}, at {[at for _, at in self._shards]})"


def pieces(model: SequenceModel, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for `torch.distributed.checkpoint` to save, or to load in place.

    state: the result of `get_model_state_dict` or `get_optimizer_state_dict`. Tensors are not copied or moved. The
    state of a model that is not split over ranks is returned unchanged.
    """
    _check(model)
    if not isinstance(state, Mapping):
        raise UsageError(f"pieces takes a state dict, not {type(state).__name__}")
    return dict(state) if model.tensor_shards is None else _sharded(model.tensor_shards, state, _shapes(model), "")


def load_weights(model: SequenceModel, path: str | os.PathLike[str]) -> None:
    """Fill a model from a folder that `seqblocks.save` wrote, each rank with its shard. All ranks must call it.

    Tensors are read one at a time. Raises UsageError if the folder is invalid, and RunError if the weights do not fit
    this model, in both cases without filling anything; RunError also if another rank fails.
    """
    _check(model)
    groups = groups_of(model.state_dict(keep_vars=True).values(), model.tensor_shards)

    def opened() -> Weights:
        _, weights = read_model(Path(os.path.realpath(as_path(path))), path)
        check_fit(model.whole_spec, weights.headers)
        return weights

    weights = on_all_ranks(groups, opened)
    on_all_ranks(groups, lambda: fill(model, weights.headers, weights.read))


def _check(model: Any) -> None:
    if not isinstance(model, SequenceModel):
        raise UsageError(f"expected a model from seqblocks.build or a rank's part of one, not {type(model).__name__}")


def _shapes(model: SequenceModel) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}


def _sharded(shards: TensorShards, state: Any, shapes: Mapping[str, torch.Size], name: str) -> Any:
    """Return a state in which each tensor with the shape of its parameter is replaced by a ShardedTensor."""
    if isinstance(state, Mapping):
        names = {key: key if key in shapes else name for key in state}
        return {key: _sharded(shards, value, shapes, names[key]) for key, value in state.items()}
    sharding = shards.shardings.get(name)
    if sharding is None or not isinstance(state, Tensor) or state.shape != shapes[name]:
        return state
    shape = list(state.shape)
    shape[sharding.axis] *= shards.ranks
    return ShardedTensor(torch.Size(shape), local(state), list(_shards_of(state, sharding, shards)))


def _shards_of(tensor: Tensor, sharding: Sharding, shards: TensorShards) -> Iterator[Shard]:
    """Yield a rank's shards of a whole tensor, or some rows of them if FSDP shards them further."""
    own, first = local(tensor), _first_row(tensor)
    start = 0
    for offset, length in sharding.ranges(shards.rank, shards.ranks):
        low, high = (first, first + own.shape[0]) if sharding.axis == 0 else (0, own.shape[sharding.axis])
        begin, end = max(start, low), min(start + length, high)
        if begin < end:
            offsets = [0] * own.dim()
            offsets[0] = first
            offsets[sharding.axis] = offset + begin - start
            yield Shard(own.narrow(sharding.axis, begin - low, end - begin), tuple(offsets))
        start += length


def _first_row(tensor: Any) -> int:
    if not is_sharded(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0] if offsets else 0


def _check_norm(norm: Any) -> None:
    is_number = norm.numel() == 1 if isinstance(norm, Tensor) else isinstance(norm, Real)
    if not (is_number and norm >= 0):
        raise UsageError(f"max_norm must be a number of at least 0, not {norm!r}")


@torch.no_grad()
def clip_gradients(model: SequenceModel, max_norm: float) -> float:
    """Clip the gradients of a model on several ranks to a total norm of at most `max_norm`.

    Returns the norm before clipping, equal on all ranks. All ranks must call it.
    """
    _check(model)
    _check_norm(max_norm)
    squares = {True: 0.0, False: 0.0}
    found = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    for name, gradient in found:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        is_shard = model.tensor_shards is not None and name in model.tensor_shards.shardings
        squares[is_shard] += float(norm.full_tensor() if is_sharded(norm) else norm) ** 2
    if model.tensor_shards:
        device = model.some_tensor().device
        sharded = torch.tensor(squares[True], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sharded, group=model.tensor_shards.group)
        squares[True] = float(sharded)
    total = math.sqrt(sum(squares.values()))
    factor = min(max_norm / (total + 1e-6), 1.0)  # in this order, NaN if the norm is, as torch's function has it
    for _, gradient in found:
        gradient.mul_(factor)
    return total
