"""Check the arguments of a model's call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from seqblocks.errors import RunError, UnavailableError, UsageError, quote
from seqblocks.suggestions import did_you_mean
from seqblocks.types import Wire


def check_input(wire: Wire, x: Any, reader: str, axes: list[str]) -> None:
    """Raise RunError unless x is an input of this type; `axes` are the axes of its tokens."""
    if not isinstance(x, Tensor):
        raise RunError(f"{reader} reads a tensor, not {type(x).__name__}")
    if wire.kind == "image":
        if x.ndim != 4 or x.shape[1] != wire.features:
            raise RunError(f"{reader} reads images [batch, {wire.features}, height, width], not {list(x.shape)}")
    elif wire.kind == "vector":
        if x.ndim != 2 or x.shape[1] != wire.features:
            raise RunError(f"{reader} reads vectors [batch, {wire.features}], not {list(x.shape)}")
    elif wire.kind == "tokens":
        if x.ndim != len(axes) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise RunError(f"{reader} reads token ids [{', '.join(axes)}], not {x.dtype} {list(x.shape)}")
    elif x.ndim != len(axes) + 1 or x.shape[-1] != wire.features:
        raise RunError(f"{reader} reads [{', '.join(axes)}, {wire.features}], not {list(x.shape)}")
    if wire.kind != "tokens" and not x.is_floating_point():
        how = "its parts are torch.view_as_real(x)" if x.is_complex() else "convert with x.float()"
        raise RunError(f"{reader} reads floating-point numbers, not {x.dtype}: {how}")


def check_grid(wire: Wire, x: Tensor, grid: Any) -> None:
    """Raise RunError unless `grid` is the rows and columns of the tokens x. Images have their own grid."""
    sizes = grid if isinstance(grid, list | tuple) else ()
    whole = [size for size in sizes if isinstance(size, Integral | torch.SymInt)]
    if len(sizes) != 2 or len(whole) != 2 or min(sizes) < 1:
        raise RunError(f"grid is a pair of whole numbers, rows and columns, not {grid!r}")
    if wire.kind == "sequence" and grid[0] * grid[1] != x.shape[1]:
        raise RunError(f"grid={tuple(grid)} does not fit the {x.shape[1]} tokens: pass rows and columns of the input")


def named_input(inputs: dict[str, Wire], x: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the streaming input, given by position or by name, and the other inputs.

    inputs: the types of all inputs, the first of which streams; empty for a single unnamed input. Raises RunError.
    """
    call = f"model({', '.join(f'{name}=…' for name in inputs) or 'x'})"
    first = next(iter(inputs), None)
    _check_names(inputs, given, call)
    if x is not None and first in given:
        raise RunError(f"the input {first} is given twice, by position and by name: call {call}")
    others = {name: given[name] for name in given if name != first}
    x = given[first] if first is not None and first in given else x
    if x is None:
        raise RunError(f"the model needs its input{f' {first}' if first else ''}: call {call}")
    return x, others


_STARTS = "pass resets, which is True at the first token of each sequence (done is True at the last one)"
_MASKED = "pass resets or cu_seqlens for sequences in a row; padding at the end needs no mask in a causal model"
_INSTEAD = {
    **dict.fromkeys(("done", "dones", "terminated", "reset", "start", "starts", "is_first", "episode_starts"), _STARTS),
    **dict.fromkeys(
        ("attention_mask", "attn_mask", "mask", "padding_mask", "key_padding_mask", "seq_idx", "segment_ids",
         "position_ids", "document_ids"), _MASKED,
    ),
}  # fmt: skip


def _check_names(inputs: dict[str, Wire], given: dict[str, Any], call: str) -> None:
    if unknown := [name for name in given if name not in inputs]:
        hint = _INSTEAD.get(unknown[0]) or did_you_mean(unknown[0], inputs) or f"call {call}"
        raise RunError(f"the model has no input {quote(unknown[0])}: {hint}")


def check_names_of_context(inputs: dict[str, Wire], given: dict[str, Any], batch: int) -> None:
    """Raise RunError unless all names are inputs that do not stream."""
    first, *others = inputs or ("",)
    _check_names(inputs, given, f"model.init_state({', '.join([str(batch), *(f'{name}=…' for name in others)])})")
    if first in given:
        raise RunError(f"the input {first} streams, and a state begins before it: pass it to the model, or to a step")


def check_context(inputs: dict[str, Wire], given: dict[str, Any], batch: int, whose: str) -> None:
    """Raise RunError unless these are all inputs except the first, for `batch` sequences of `whose`."""
    others = [*inputs][1:]
    for name in others:
        if name not in given:
            raise RunError(f"the input {name} is missing: pass {', '.join(f'{other}=…' for other in others)}")
        check_input(inputs[name], given[name], f"the input {name}", ["batch", name])
        if given[name].shape[0] != batch:
            raise RunError(f"the batches differ: {name} has {given[name].shape[0]} and {whose} {batch}")


def check_same_lengths(inputs: dict[str, Wire], given: dict[str, Tensor]) -> None:
    """Raise RunError if inputs that share an open length have different numbers of tokens."""
    first: dict[str, str] = {}  # the first input with each length
    for name, x in given.items():
        length = inputs[name].length
        if not isinstance(length, str):
            continue
        other = first.setdefault(length, name)
        if x.shape[1] != given[other].shape[1]:
            counts = f"{given[other].shape[1]} tokens and {name} {x.shape[1]}"
            raise RunError(f"{other} has {counts}, but the spec gives them the same length, {length}")


def check_no_context(given: dict[str, Any]) -> None:
    """Raise RunError if inputs that do not stream are passed with a state, which contains what depends on them."""
    if given:
        raise RunError(f"the state already depends on {next(iter(given))}: pass either that input or the state")


def report_extra(inputs: dict[str, Wire], given: dict[str, Any]) -> None:
    """Raise RunError for named arguments that a step does not take; there must be at least one."""
    _check_names(inputs, given, "model.step(x, state)")
    first, *others = inputs
    if first in given:
        raise RunError(f"pass the input {first} by position: model.step(x, state)")
    begin = f"model.init_state(batch, {', '.join(f'{name}=…' for name in others)})"
    raise RunError(f"a step does not take {next(iter(given))}, which belongs to the state: state = {begin}")


def check_marks(x: Tensor, resets: Any, cu_seqlens: Any, axes: list[str]) -> None:
    """Raise RunError unless resets or cu_seqlens are valid for x."""
    for name, given in (("resets", resets), ("cu_seqlens", cu_seqlens)):
        if given is not None and not isinstance(given, Tensor):
            raise RunError(f"{name} is a tensor, not {type(given).__name__}")
    if resets is not None:
        _check_resets(x, resets, axes)
    if cu_seqlens is not None:
        _check_bounds(x, cu_seqlens, resets)


def _check_resets(x: Tensor, resets: Tensor, axes: list[str]) -> None:
    if resets.dtype != torch.bool or resets.shape != x.shape[: len(axes)]:
        shape = list(x.shape[: len(axes)])
        raise RunError(f"resets must be bool of shape {shape}, not {resets.dtype} {list(resets.shape)}")
    if resets.device != x.device:
        raise RunError(f"resets is on {resets.device} and the input on {x.device}: move it with .to(x.device)")


def _check_bounds(x: Tensor, cu_seqlens: Tensor, resets: Tensor | None) -> None:
    if cu_seqlens.is_meta and not x.is_meta:
        raise RunError(f"cu_seqlens is on the meta device, which has no values, and the input on {x.device}")
    if resets is not None:
        raise RunError("pass either resets or cu_seqlens, not both")
    if x.shape[0] != 1:
        raise RunError(f"cu_seqlens requires a batch of one, not {x.shape[0]}")


def dtype_fault(
    inputs: Iterable[Tensor], dtypes: dict[str, torch.dtype], own: torch.dtype, error: RuntimeError
) -> str | None:
    """Return a hint for a torch error caused by an input or a parameter with another dtype than the model's, or None.

    dtypes: of the parameters that were built in the dtype of the model, by name. own: its dtype if it has none.
    """
    if not re.search("dtype|scalar type|input type", str(error), re.IGNORECASE):
        return None
    kinds = [*dtypes.values()]
    own = max(dict.fromkeys(kinds), key=kinds.count, default=own)
    if (x := next((x for x in inputs if x.is_floating_point() and x.dtype != own), None)) is not None:
        return _of_another_dtype(x, own)
    other = next((name for name, kind in dtypes.items() if kind != own), None)
    if other is None:
        return None
    step, expected = other.rpartition(".")[0], str(own).removeprefix("torch.")
    return (
        f"{other} is {str(dtypes[other]).removeprefix('torch.')} and the model {expected}: convert the step with "
        f"model.get_submodule('{step}').to(torch.{expected}), or its inputs and output in hooks"
    )


def too_wide(x: Tensor, own: torch.dtype) -> str | None:
    """Return a hint for an input with more bits than a 16-bit model, unless torch.autocast is enabled, or None."""
    if own.itemsize > 2 or x.dtype.itemsize <= own.itemsize or torch.is_autocast_enabled(x.device.type):
        return None
    return _of_another_dtype(x, own)


def _of_another_dtype(x: Tensor, own: torch.dtype) -> str:
    found, expected = str(x.dtype).removeprefix("torch."), str(own).removeprefix("torch.")
    what = f"the model is {expected} and its input {found}"
    if torch.is_autocast_enabled(x.device.type):
        what += ", which torch.autocast does not convert for every step"
    return f"{what}: convert it with x.to(torch.{expected}), or build the model with dtype='{found}'"


def checked_device(device: Any) -> torch.device:
    """Return the device. Raises UsageError for an invalid name, UnavailableError if it cannot be used."""
    try:
        made = torch.device(device)
    except TypeError:
        expected = "a name such as 'cpu' or 'cuda:0', a number of a GPU, or a torch.device"
        raise UsageError(f"a device is {expected}, not {device!r}") from None
    except RuntimeError as error:
        raise UsageError(f"'{device}' is not a device: {str(error).splitlines()[0]}") from None
    if made.type in ("cpu", "meta"):
        return made
    try:
        torch.empty(0, device=made)
    except Exception as error:
        raise UnavailableError(f"device '{device}' cannot be used here: {reason(error)}") from None
    return made


def reason(error: Exception) -> str:
    """Return the first sentence of an error of torch: lists of backends may follow it."""
    return (str(error).splitlines() or ["it cannot be used"])[0].split(". ")[0]
