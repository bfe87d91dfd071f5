"""Check that several ranks have the same weights, seeds and inputs."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.errors import RunError, UsageError
from seqblocks.kernels.dispatch.compiled import transformed
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.runtime.shards import Groups, is_sharded

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the number of bytes
CHUNK = {"cpu": 1 << 16}  # elements of a checksum computed at once: on a CPU, as many as fit its cache
CHUNK_ELSEWHERE = 1 << 24  # on other devices


def check_weights(model: nn.Module, groups: Groups) -> None:
    """Raise UsageError unless a model has the same parameters on all ranks of some groups. All ranks must call this.

    The values of sharded parameters are not compared.
    """
    matrices = [(path, each) for path, each in model.named_modules() if isinstance(each, Int8Matrix)]
    stored = [*model.named_parameters(), *(pair for path, each in matrices for pair in each.named_buffers(path))]
    own = {name: (_described(x), _value(x)) for name, x in stored}
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(_gathered(digest, groups))) == 1:
        return
    found = _gathered(own, groups)
    for name in dict.fromkeys(name for each in found for name in each):
        kinds = list(dict.fromkeys(each.get(name, ("missing", 0))[0] for each in found))
        if len(kinds) > 1:
            raise UsageError(f"the models of the ranks differ: {name} is {kinds[0]} on one and {kinds[1]} on another")
    differing = [name for name in own if len({each[name] for each in found}) > 1]
    raise UsageError(
        f"the weights of the ranks differ, in {len(differing)} of {len(own)} parameters, such as {differing[0]}: "
        "build the model with the same seed, or load the same weights, on all ranks"
    )


def check_seed(seed: int, groups: Groups) -> None:
    """Raise UsageError unless all ranks of some groups have the same seed. All ranks must call this."""
    if len(set(_gathered(seed, groups))) > 1:
        raise UsageError("the ranks draw the weights with different seeds: pass the same seed on all ranks")


def check_inputs(group: Any, inputs: dict[str, Any]) -> None:
    """Raise RunError unless all ranks of a group pass the same inputs, by name. All ranks must call this.

    Inside a compiled or transformed function, and while a CUDA graph is captured, values cannot be compared.
    """
    if torch.compiler.is_compiling() or transformed() or _is_captured():
        return
    sums = [zlib.crc32(name.encode()) * checksum(x) for name, x in inputs.items() if _has_values(x)]
    if not sums:
        return
    total = torch.stack(sums).sum()
    both = torch.stack([total, ~total])  # the complement of the largest is the smallest
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN, group=group)
    smallest, complement = both.tolist()
    if smallest != ~complement:
        names = ", ".join(name for name, x in inputs.items() if x is not None)
        raise RunError(f"the inputs of the ranks differ ({names}): pass the same ones on all ranks")


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of the values, shape and dtype of a tensor, int64 [] on its device."""
    bits = x.detach().contiguous().view(INTEGERS[x.dtype.itemsize]).flatten()
    chunk = CHUNK.get(x.device.type, CHUNK_ELSEWHERE)
    weights = torch.arange(1, 2 * min(chunk, bits.numel()) + 1, 2, device=x.device)
    kind = zlib.crc32(_described(x).encode())
    sums = [(part * weights[: part.numel()]).sum() * (2 * at + 1) for at, part in enumerate(bits.split(chunk))]
    return torch.stack(sums).sum() * kind + kind


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _has_values(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_meta


def _described(x: Tensor) -> str:
    shape = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    marks = {" on meta": x.is_meta, " without gradients": isinstance(x, nn.Parameter) and not x.requires_grad}
    return shape + "".join(mark for mark, is_so in marks.items() if is_so)


def _value(x: Tensor) -> int:
    return 0 if x.is_meta or is_sharded(x) else int(checksum(x))


def _gathered(value: Any, groups: Groups) -> list[Any]:
    """Return the values of all ranks of some groups, the axes of a mesh."""
    found = [value]
    for group in groups:
        parts: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, found, group=group)
        found = [each for part in parts for each in part]
    return found
