"""The state of a stream: nested dicts of tensors, keyed by step names, batch first. It is a pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.graph import Graph
from seqblocks.state_layout import State

States = dict[str, Any]
HALF = (torch.float16, torch.bfloat16)  # not precise enough for sums over a sequence


def declared(body: Graph) -> States:
    """Return the declarations of a body's states, nested like the states."""
    out: States = {}
    for node in body.nodes:
        inside: States = dict(node.state)
        for label, inner in node.bodies.items():
            nested = declared(inner)
            inside |= nested if label == "" else ({label: nested} if nested else {})
        if inside:
            out[node.name] = inside
    return out | ({"input": dict(body.kept)} if body.kept else {})


def smallest_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the smallest float dtype, which a model was built in: some parameters of one in 16 bits are float32."""
    smallest: torch.dtype | None = None
    for p in parameters:  # torch.compile does not always trace min with a key
        if p.is_floating_point() and (smallest is None or p.dtype.itemsize < smallest.itemsize):
            smallest = p.dtype
    return smallest


def new_state(
    declarations: States, batch: int, device: Any, dtype: torch.dtype, context: States | None = None
) -> States:
    """Return the state before the first token. Float states are at least float32, and float64 in float64 models.

    context: the part that depends on the context. Raises RunError if the device has not enough memory.
    """

    def fresh(state: State) -> Tensor:
        kind = dtype_of(state, dtype)
        return torch.full((batch, *state.shape), state.fill, dtype=kind, device=device)

    try:
        return _filled(declarations, context, fresh) if context else _mapped(declarations, fresh)
    except (RuntimeError, OverflowError, TypeError) as error:  # torch raises these for sizes that it cannot allocate
        numbers = batch * _numbers(declarations)
        raise RunError(
            f"{device} has not enough memory for the state of {batch:,} sequences, {numbers:,} elements"
        ) from error


def dtype_of(state: State, model: torch.dtype) -> torch.dtype:
    """Return the dtype of a part of the state in a model with dtype `model`."""
    if state.dtype == "int64":
        return torch.int64
    if state.dtype == "model":
        return model
    return torch.float64 if model == torch.float64 else torch.float32


def reset(declared: States, state: States, resets: Tensor) -> States:
    """Return the state with the initial values for sequences where `resets` [batch] is True."""

    def fresh(item: Any, given: Any) -> Any:
        if isinstance(item, State):
            return given if item.context else given.masked_fill(resets.view(-1, *[1] * (given.dim() - 1)), item.fill)
        return {key: fresh(inner, given[key]) for key, inner in item.items()}

    return {key: fresh(item, state[key]) for key, item in declared.items()}


def _numbers(tree: States) -> int:
    return sum(_numbers(item) if isinstance(item, dict) else item.numel for item in tree.values())


def _mapped(tree: States, function: Callable[[Any], Any]) -> States:
    return {key: _mapped(item, function) if isinstance(item, dict) else function(item) for key, item in tree.items()}


def _filled(tree: States, known: States, function: Callable[[State], Any]) -> States:
    """Apply a function to each leaf of a tree, except known ones."""
    return {
        key: _filled(item, known.get(key, {}), function) if isinstance(item, dict)
        else known[key] if key in known else function(item)
        for key, item in tree.items()
    }  # fmt: skip


def check_state(declarations: States, state: Any, batch: int, device: torch.device, path: str = "state") -> None:
    """Raise RunError unless `state` matches the declarations, the batch and the device."""
    if not isinstance(state, dict) or state.keys() != declarations.keys():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise RunError(f"{path} does not belong to this model: expected the keys {sorted(declarations)}, found {found}")
    for key, item in declarations.items():
        if isinstance(item, dict):
            check_state(item, state[key], batch, device, f"{path}.{key}")
        else:
            _check_tensor(item, state[key], batch, device, f"{path}.{key}")


def _check_tensor(declared: State, tensor: Any, batch: int, device: torch.device, path: str) -> None:
    free = bool(declared.length)  # the first axis
    if not isinstance(tensor, Tensor) or tuple(tensor.shape[1 + free :]) != declared.shape[free:]:
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        sizes = [declared.length, *declared.shape[1:]] if free else declared.shape
        raise RunError(f"{path} must be [batch, {', '.join(map(str, sizes))}], and is {shape}")
    wrong = tensor.is_floating_point() != (declared.dtype != "int64")
    if wrong or (declared.dtype == "float32" and tensor.dtype in HALF):
        kind = {"int64": "int64", "model": "of the model's dtype"}.get(declared.dtype, "float32")
        raise RunError(f"{path} must be {kind}, and is {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.shape[0] != batch:
        raise RunError(f"{path} holds {tensor.shape[0]} sequences and the input {batch}")
    if tensor.device != device:
        raise RunError(f"{path} is on {tensor.device} and the input on {device}; move it with seqblocks.state.to")


def compact(x: Any) -> Any:
    """Return a tensor of a state in memory of exactly its size, with the strides of `init_state`.

    A view of the last token would keep the memory of the whole prefill alive, and torch.save would write all of it.
    Different strides, even of an axis of size one, would cause a recompilation of a compiled step.
    """
    if not isinstance(x, Tensor):
        return x
    alone = x.is_contiguous() and (1 not in x.shape or _has_plain_strides(x))
    if alone and not torch.compiler.is_compiling():  # a compiler determines the memory of its outputs
        alone = x._base is None
        if alone and x.is_inference():  # such a tensor does not record its base
            alone = x.untyped_storage().nbytes() <= x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _has_plain_strides(x: Tensor) -> bool:
    """Return whether each stride is the product of the later sizes."""
    product = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != product:
            return False
        product *= size
    return True


def map_state(function: Callable[[Tensor], Tensor], state: States) -> States:
    """Apply a function to each tensor of a state. Raises RunError for anything that is not a state."""
    if not isinstance(state, dict):
        raise RunError(f"a state is a dict of tensors, as returned by a call, not {type(state).__name__}")
    return _mapped(state, function)


def detach(state: States) -> States:
    """Detach the state from the autograd graph, for truncated backpropagation through time."""
    return map_state(Tensor.detach, state)


def to(state: States, device: Any) -> States:
    """Move the state to another device. Dtypes do not change: counters are integers and sums are float32."""
    if isinstance(device, torch.dtype):
        raise RunError("a state can only be moved to a device; its dtypes must stay, because sums need their precision")
    return map_state(lambda x: x.to(device), state)


def index_select(state: States, index: Tensor) -> States:
    """Select the sequences `index` [n] of a state, in that order, for beam search or to drop finished sequences.

    index: integers below the number of sequences. Raises RunError.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.ndim != 1:
        found = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise RunError(f"index must be a tensor [n] of integers, not {found}")
    try:
        return map_state(lambda x: x.index_select(0, index.to(x.device)), state)
    except IndexError as error:  # torch raises this on a CPU
        raise RunError(f"the state has no such sequences: {index.tolist()}") from error
