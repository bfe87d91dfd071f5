"""Check tensors that are to become a model's weights, and copy them into the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.errors import RunError, listing
from seqblocks.graph import ModelSpec, Named
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.shards import TensorShards, assign, local

PARTS = (".values", ".scale")  # of a matrix in 8 bits
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


def unusable(tensor: Any, complex_too: bool = False, on_meta: bool = False, counts_too: bool = False) -> str | None:
    """Return why a value is not a plain floating-point tensor ("is sparse: …"), or None if it is one.

    complex_too: allow complex tensors. on_meta: allow tensors on meta, such as the headers of a file.
    counts_too: allow single int64 numbers, which buffers may be.
    """
    if not isinstance(tensor, Tensor):
        return f"is not a tensor, but {type(tensor).__name__}"
    if type(tensor.detach()) is not Tensor:
        return f"is a {type(tensor).__name__}, which may be distributed: gather the weights first"
    if tensor.is_meta and not on_meta:
        return "is on the meta device, which holds no data"
    if tensor.is_nested:
        return "is nested: pad it"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}): dequantize() it first"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}): to_dense() it first"
    if counts_too and tensor.dtype == torch.int64 and not tensor.dim():
        return None
    if tensor.dtype not in (*FLOATS, *(COMPLEX if complex_too else ())):
        what = "is complex" if tensor.is_complex() else f"is of {tensor.dtype}"
        return f"{what}, but weights must be float64, float32, float16 or bfloat16"
    if tensor.is_meta or _has_storage(tensor):
        return None
    return "has no storage, probably because it was sharded: gather the weights first"


def _has_storage(tensor: Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return not tensor.numel() or end <= tensor.untyped_storage().nbytes()


def has_values(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor with this name has the values of a matrix in 8 bits."""
    return tensor.dtype is torch.int8 and name.endswith(PARTS[0])


def own_tensors(model: SequenceModel, in_8_bits: Collection[str]) -> dict[str, Tensor]:
    """Return a model's tensors by name, or a rank's shards of them. in_8_bits: the names of quantized parameters.

    Raises RunError unless they match the spec and hold data.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    shapes = {item.name: item.parameter.shape for item in graph.parameters(model.graph)}
    for name in in_8_bits:
        if (shape := shapes.pop(name, None)) is not None:
            shapes |= dict(zip((f"{name}{part}" for part in PARTS), (shape, shape[:1]), strict=True))
    _check_own(tensors, shapes | {name: buffer.shape for name, buffer in graph.buffers(model.graph)})
    return tensors


def check_writable(model: SequenceModel) -> None:
    """Raise RunError unless the spec's parameters exist and can be filled. Other tensors are allowed."""
    shapes = {item.name: item.parameter.shape for item in graph.parameters(model.graph)}
    found: dict[str, Tensor] = model.state_dict(keep_vars=True)
    tensors = {name: found[name] for name in shapes if name in found}
    _check_own(tensors, shapes)
    for name, tensor in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RunError(f"{name} is an expanded tensor, so it cannot be filled: clone it first")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RunError(f"{name} was created in inference mode, so fill it under torch.inference_mode()")


def _check_own(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RunError unless these are the spec's own parameters."""
    differences = _differences(tensors, shapes)
    if differences:
        how = "merge or remove parametrizations, pruning masks and adapters, and restore its original steps"
        raise RunError(f"the model no longer matches its spec: {differences}. First {how}")
    for name, tensor in tensors.items():
        if not has_values(name, tensor) and (reason := unusable(local(tensor), counts_too=True)):
            how = ": allocate it with model.to_empty(device='cpu')" if tensor.is_meta else ""
            raise RunError(f"{name} {reason}{how}")
        if tuple(tensor.shape) != tuple(shapes[name]):
            what = f"{name} is {list(tensor.shape)}, but {list(shapes[name])} in the spec"
            raise RunError(f"the model no longer matches its spec: {what}")


def _differences(names: Iterable[str], expected: Iterable[str]) -> str:
    """List the names that are missing and those that are unexpected."""
    names, expected = dict.fromkeys(names), dict.fromkeys(expected)
    missing = [name for name in expected if name not in names]
    spare = [name for name in names if name not in expected]
    return "; ".join(
        f"{len(found)} {'is' if len(found) == 1 else 'are'} {what} ({listing(found, 4)})"
        for what, found in (("missing", missing), ("unexpected", spare)) if found
    )


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tied tensors have the same values; nan equals nan."""
    if a is b:
        return True
    a, b = a.detach().to(b.device), b.detach()
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def check_fit(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raise RunError unless tensors have the names and shapes that a spec declares. Nothing is allocated."""
    declared = {item.name: item for item in graph.parameters(spec.graph) if not item.tied}
    buffers = dict(graph.buffers(spec.graph))
    differences = _differences(tensors, [*declared, *buffers])
    if differences:
        raise RunError(f"the weights do not fit this model: {differences}")
    for name, buffer in buffers.items():
        if tuple(tensors[name].shape) != buffer.shape:
            sizes = f"{name} is {list(tensors[name].shape)}, but {list(buffer.shape)} in the model"
            raise RunError(f"the weights do not fit this model: {sizes}")
    for name, item in declared.items():
        if reason := misfit(item, tensors[name]):
            raise RunError(reason)


def misfit(item: Named, found: Tensor) -> str | None:
    """Return why a tensor cannot be a parameter (another shape, or complex), or None if it can."""
    shape = item.parameter.shape
    if tuple(found.shape) != tuple(shape):
        sizes = f"{item.name} is {list(found.shape)}, but {list(shape)} in the model"
        return f"the weights do not fit this model: {sizes}{_origin_of_shape(item, tuple(found.shape))}"
    if found.is_complex():
        return f"the weights for {item.name} are complex, but it is real: read one part with {{real: …}} or {{imag: …}}"
    return None


def _origin_of_shape(item: Named, found: tuple[int, ...]) -> str:
    """Return the step of a parameter whose shape differs, and the change to the spec that makes it fit."""
    step = f" ({item.node.verb}, {item.node.span})"
    if item.node.verb != "position_embed" or len(found) != len(item.parameter.shape):
        return step
    if len(found) == 4:
        grid = f"{{rows: {found[1]}, columns: {found[2]}}}"
        return f"{step}. Use `position_embed: {grid}` to read them and interpolate them to the image"
    return f"{step}. The weights have {found[1]} positions: the image's size, patch or stride, or the length, differs"


def copy_weights(model: SequenceModel, weights: Weights) -> None:
    """Copy weights into a model. Raises RunError, before copying any, if one cannot be read or overflows its dtype."""
    own = model.state_dict(keep_vars=True)  # wrappers do not change these names
    for name in weights.headers:
        _check_range(name, weights.read(name), own[name].dtype)
    fill(model, weights.headers, weights.read)


@torch.no_grad()
def fill(model: SequenceModel, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Copy weights that fit into a model, one at a time. Raises RunError if they overflow its dtype."""
    own = model.state_dict(keep_vars=True)
    for name in names:
        _copy(name, own[name], read(name), model.tensor_shards)
    if any(item.tied and own.get(item.name) is not own.get(item.tied) for item in graph.parameters(model.graph)):
        model.tie()  # to_empty of a single step unties its parameters


def _copy(name: str, target: Tensor, tensor: Tensor, shards: TensorShards | None) -> None:
    _check_range(name, tensor, target.dtype)
    assign(target, shards.take(name, tensor) if shards else tensor)


def _check_range(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if _overflows(tensor, dtype):
        dtype_name = str(dtype).removeprefix("torch.")
        raise RunError(f"the weights for {name} overflow {dtype_name}; use another dtype")


def _overflows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether finite values would become infinite in another dtype."""
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return False
    return bool((tensor.to(dtype).isinf() & tensor.isfinite()).any())
