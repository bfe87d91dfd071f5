"""The state of a stream: a dict of dicts of tensors, keyed by step names, batch first. Any pytree tool works on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.graph import Graph, ModelSpec, walk
from seqblocks.parameters import State

States = dict[str, Any]
LOW = (torch.float16, torch.bfloat16)  # not for what is summed over a sequence


def declared(body: Graph) -> States:
    """The declarations in the form of the state."""
    out: States = {}
    for node in body.nodes:
        inside: States = dict(node.state)
        for label, inner in node.bodies.items():
            nested = declared(inner)
            inside |= nested if label == "" else ({label: nested} if nested else {})
        if inside:
            out[node.name] = inside
    return out


def new_state(body: Graph, batch: int, device: Any, dtype: torch.dtype) -> States:
    """The state before the first token. Float states are at least float32; float64 models carry float64.

    Raises RunError where the device has no room for it.
    """

    def fresh(state: State) -> Tensor:
        if state.dtype == "int64":
            kind = torch.int64
        elif state.dtype == "model":
            kind = dtype
        else:
            kind = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.full((batch, *state.shape), state.fill, dtype=kind, device=device)

    try:
        return _filled(declared(body), fresh)
    except (RuntimeError, OverflowError, TypeError) as error:  # what torch raises of sizes that it cannot allocate
        numbers = batch * sum(state.numel for node in walk(body) for state in node.state.values())
        raise RunError(f"{device} has no room for the state of {batch:,} sequences, {numbers:,} numbers") from error


def _filled(tree: States, make: Callable[[Any], Any]) -> States:
    return {k: _filled(v, make) if isinstance(v, dict) else make(v) for k, v in tree.items()}


def check_state(model: ModelSpec, state: States, batch: int, device: torch.device) -> None:
    """RunError unless `state` is one of this model, for this batch and device."""
    _check(declared(model.graph), state, batch, device, "state")


def _check(tree: States, state: Any, batch: int, device: torch.device, path: str) -> None:
    if not isinstance(state, dict) or set(state) != set(tree):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise RunError(f"{path} is not of this model: it must have {sorted(tree)}, and has {found}")
    for key, wanted in tree.items():
        here = f"{path}.{key}"
        if isinstance(wanted, dict):
            _check(wanted, state[key], batch, device, here)
            continue
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[1:]) != wanted.shape:
            shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RunError(f"{here} must be [batch, {', '.join(map(str, wanted.shape))}], and is {shape}")
        wrong = tensor.is_floating_point() != (wanted.dtype != "int64")
        if wrong or (wanted.dtype == "float32" and tensor.dtype in LOW):
            kind = {"int64": "int64", "model": "of the model's dtype"}.get(wanted.dtype, "float32")
            raise RunError(f"{here} must be {kind}, and is {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.shape[0] != batch:
            raise RunError(f"{here} holds {tensor.shape[0]} sequences and the input {batch}")
        if tensor.device != device:
            raise RunError(f"{here} is on {tensor.device} and the input on {device}; move it with seqblocks.state.to")


def owned(x: Any) -> Any:
    """A tensor of a state without what it is cut from: in memory of its own size, strides as `init_state` gives them.

    A view of the last token would keep the whole prefill, and torch.save would write it; other strides, be it of an
    axis one long, would have a step compiled again.
    """
    if not isinstance(x, Tensor):
        return x
    alone = x.is_contiguous() and (1 not in x.shape or _plain(x))
    if alone and not torch.compiler.is_compiling():  # what a compiler returns is its own affair
        alone = x._base is None
        if alone and x.is_inference():  # such a tensor does not know what it is a view of
            alone = x.untyped_storage().nbytes() <= x.numel() * x.element_size()
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _plain(x: Tensor) -> bool:
    """Whether every stride is the product of the sizes behind it."""
    wanted = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != wanted:
            return False
        wanted *= size
    return True


def map_state(function: Callable[[Tensor], Tensor], state: States) -> States:
    """Apply a function to every tensor. Raises RunError for what is no state."""
    if not isinstance(state, dict):
        raise RunError(f"a state is a dict of tensors, as a call gives it, not {type(state).__name__}")
    return _filled(state, function)


def detach(state: States) -> States:
    """The state cut from the graph of gradients: what truncated backpropagation through time carries on."""
    return map_state(Tensor.detach, state)


def to(state: States, device: Any) -> States:
    """The state on another device, in the dtypes that it has: counters are whole numbers, and sums stay float32."""
    if isinstance(device, torch.dtype):
        raise RunError("a state is moved to a device and keeps its dtypes: what it sums would not survive fewer digits")
    return map_state(lambda x: x.to(device), state)


def index_select(state: States, index: Tensor) -> States:
    """The states of the sequences `index` [n], in that order: beam search, or dropping finished sequences.

    index: whole numbers below the number of sequences. Raises RunError.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.ndim != 1:
        found = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise RunError(f"sequences are selected by a tensor [n] of whole numbers, not {found}")
    try:
        return map_state(lambda x: x.index_select(0, index.to(x.device)), state)
    except IndexError as error:  # as the CPU tells it
        raise RunError(f"the state holds no such sequences: {index.tolist()}") from error
