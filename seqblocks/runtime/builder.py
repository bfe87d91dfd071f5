"""Building: from a spec, or the analysis of one, to a module with weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.cost import dtype_named, params_bytes
from seqblocks.errors import UnavailableError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.runtime.arguments import checked_device
from seqblocks.runtime.model import SequenceModel


def build(
    spec: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str = torch.float32,
    seed: int | None = 0,
    allow_use: check.Folders = (),
    strict: bool = False,
) -> SequenceModel:
    """Build the model of a spec given by path or bundled name; see `build_model`. `set` overrides values by name.

    allow_use: folders whose files the spec's `use:` may read, besides its own. strict: warnings are errors
    (both as in `load_text`).
    Raises SpecError where the spec is at fault, UnavailableError where the device is, UsageError for other arguments.
    """
    return build_model(check.load_model(spec, set, allow_use, strict), device=device, dtype=dtype, seed=seed)


def build_text(
    text: str,
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str = torch.float32,
    seed: int | None = 0,
    allow_use: check.Folders = (),
    strict: bool = False,
) -> SequenceModel:
    """Build the model of a spec given as text; relative `use:` entries start from the working directory."""
    file, spec = check.load_text(text, set=set, allow_use=allow_use, strict=strict)
    return build_model(check.require_model(file, spec), device=device, dtype=dtype, seed=seed)


def build_model(
    model: ModelSpec, *, device: Any = "cpu", dtype: torch.dtype | str = torch.float32, seed: int | None = 0
) -> SequenceModel:
    """Allocate and initialise the model of an analysed spec (`load_model`).

    dtype: torch's, or its name ("bf16", "float32"). seed: the same one gives the same weights on every device, whatever
    torch's own generator has drawn; None takes one from that generator, so that torch.manual_seed governs.
    On the "meta" device nothing is allocated; `to_empty(device=…)` and `reset_parameters(seed)` do so later.
    """
    if not isinstance(model, ModelSpec):
        raise UsageError(
            f"build_model takes what load_model returns, not {type(model).__name__}; build(…) takes a spec"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UsageError(f"a seed is an integer or None, not {seed!r}")
    kind: torch.dtype = getattr(torch, dtype_named(str(dtype), "dtype"))
    device = checked_device(device)
    with torch.device("meta"):
        module = SequenceModel(model)
    _allocate(module, kind, device)
    module.reset_parameters(seed)
    return module


def _allocate(module: SequenceModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module on the meta device tensors on another. UnavailableError where it has no room."""
    full = {item.name for item in graph.parameters(module.graph) if item.parameter.full_precision}
    for name, parameter in list(module.named_parameters()):
        own = torch.float32 if name in full and dtype.itemsize < 4 else dtype
        try:
            fresh = torch.empty(parameter.shape, device=device, dtype=own)
        except RuntimeError as error:
            size = params_bytes(module.graph, str(dtype).removeprefix("torch."))
            raise UnavailableError(
                f"{device} has no room for the model's parameters, {size:,} bytes; device='meta' allocates nothing"
            ) from error
        holder, _, leaf = name.rpartition(".")
        module.get_submodule(holder).register_parameter(leaf, torch.nn.Parameter(fresh))
    for name, buffer in list(module.named_buffers(recurse=False)):
        module.register_buffer(name, torch.empty_like(buffer, device=device, dtype=dtype), persistent=False)
