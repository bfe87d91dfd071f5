"""Build a module with initialised weights from a spec."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.cost import dtype_named, params_bytes
from seqblocks.errors import UnavailableError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.arguments import checked_device


@check.names_overrides
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

    allow_use: further folders whose files `use:` may read. strict: treat warnings as errors (both as in `load_text`).
    Raises SpecError for an invalid spec, UnavailableError for an unavailable device, UsageError for other arguments.
    """
    return build_model(check.load_model(spec, set, allow_use, strict), device=device, dtype=dtype, seed=seed)


@check.names_overrides
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
    """Build the model of a spec given as text. Paths in `use:` are relative to the working directory."""
    file, spec = check.load_text(text, set=set, allow_use=allow_use, strict=strict)
    return build_model(check.require_model(file, spec), device=device, dtype=dtype, seed=seed)


@check.names_overrides
def build_model(
    model: ModelSpec, *, device: Any = "cpu", dtype: torch.dtype | str = torch.float32, seed: int | None = 0
) -> SequenceModel:
    """Allocate and initialise the model of an analysed spec (`load_model`).

    dtype: a torch dtype or its name ("bf16", "float32"). seed: equal seeds give equal weights on every device,
    independent of the state of torch's generator; None draws a seed from that generator (see torch.manual_seed).
    On the "meta" device nothing is allocated; call `to_empty(device=…)` and `reset_parameters(seed)` later.
    """
    if not isinstance(model, ModelSpec):
        raise UsageError(
            f"build_model takes the result of load_model, not {type(model).__name__}; use build(…) for a spec"
        )
    return made(lambda: SequenceModel(model), device, dtype, seed)


def made(make: Callable[[], SequenceModel], device: Any, dtype: torch.dtype | str, seed: int | None) -> SequenceModel:
    """Return the module that `make` returns, allocated and initialised; the other arguments as in `build_model`."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UsageError(f"a seed must be an integer or None, not {seed!r}")
    kind: torch.dtype = getattr(torch, dtype_named(str(dtype), "dtype"))
    device = checked_device(device)
    with torch.inference_mode(False):  # Tensors made in inference mode cannot be trained, nor checked for changes.
        with torch.device("meta"):
            module = make()
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
                f"{device} has not enough memory for the parameters, {size:,} bytes; device='meta' allocates nothing"
            ) from error
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_parameter(leaf, torch.nn.Parameter(fresh, parameter.requires_grad))
    for name, buffer in list(module.named_buffers()):
        path, _, leaf = name.rpartition(".")
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        holder = module.get_submodule(path)
        is_saved = leaf not in holder._non_persistent_buffers_set
        holder.register_buffer(leaf, torch.empty_like(buffer, device=device, dtype=kind), persistent=is_saved)
