"""A model in one file: the weights, and the spec that they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.checkpoint import writing
from seqblocks.checkpoint.reading import read
from seqblocks.checkpoint.record import FORMAT, checksum, record_checksum, safetensors
from seqblocks.checkpoint.weights import are_equal, check_fit, copy_weights, own_tensors
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.runtime.arguments import checked_device
from seqblocks.runtime.builder import build_model
from seqblocks.runtime.model import SequenceModel


def save(model: SequenceModel, path: str | os.PathLike[str]) -> None:
    """Write weights and spec to one file, so that `restore(path)` needs nothing else.

    `.safetensors` writes that format (needs the `safetensors` extra); any other ending what torch.save makes. A tied
    parameter is written once. The file holds a checksum of each tensor and of the spec. It appears only when it is
    complete: until then an existing file stays as it was. Links are followed; an existing file keeps its mode.

    RunError where the weights are no longer what the spec says (replaced or parametrized steps, broken ties), are
    spread over devices, or are on meta; UsageError where the arguments are at fault. OSError where the disk is.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"save writes what build made, not {type(model).__name__}")
    source = model.spec.source
    if source is None:
        raise UsageError("the model does not know the text it was made from, so it cannot be saved with it")
    target = writing.target_of(_path(path))
    tensors = _tensors(model)
    record = _record(source, tensors)
    if target.suffix == ".safetensors":
        data = safetensors().torch.save(tensors, {"seqblocks": json.dumps(record)})
        writing.write(target, lambda file: file.write(data))
    else:
        writing.write(target, lambda file: torch.save({"seqblocks": record, "tensors": tensors}, file))


def _tensors(model: SequenceModel) -> dict[str, Tensor]:
    """Return copies of a model's parameters on the CPU, tied ones once. Raise RunError where a tie is broken."""
    tensors = own_tensors(model)
    for item in graph.parameters(model.graph):
        if item.tied and not are_equal(tensors[item.name], tensors[item.tied]):
            what = f"{item.name} is tied to {item.tied} in the spec, and they are two parameters with other values"
            raise RunError(f"{what}: model.tie() ties them again, to the values of {item.tied}")
    tied = {item.name for item in graph.parameters(model.graph) if item.tied}
    return {name: _compact(tensor) for name, tensor in tensors.items() if name not in tied}


def _compact(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU whose storage holds nothing else."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _record(source: SpecSource, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    record = {
        "format": FORMAT,
        "name": source.name,
        "text": source.text,
        "overrides": dict(source.overrides),
        "files": dict(source.files),
        "checksums": {name: checksum(name, tensor) for name, tensor in tensors.items()},
    }
    return {**record, "checksum": record_checksum(record)}


def restore(
    path: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str | None = None,
) -> SequenceModel:
    """Return the model that `save` wrote: each parameter in the dtype it had, or all in `dtype`.

    `set` overrides values of its spec, over those it was built with: anything without parameters, such as dropout,
    drop_path or the window of attention. RunError where the weights do not fit the spec, UsageError where the file is
    at fault: not written by `save`, cut short, or changed since (checksums are compared). Nothing of the model is
    allocated before names and shapes are compared. The file's pickles hold no code that could run.
    """
    device = checked_device(device)
    record, tensors = read(_path(path))
    spec = _analysed(record, set)
    check_fit(spec, tensors)
    model = build_model(spec, device="meta", dtype=dtype or torch.float32)
    if dtype is None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in tensors:  # or it is tied
                parameter.data = parameter.data.to(tensors[name].dtype)
    model = model.to_empty(device=device)
    copy_weights(model, tensors)
    return model


def _analysed(record: Mapping[str, Any], set: Mapping[str, Any] | None) -> ModelSpec:
    """Return the spec of a file with further overrides. They come last, as they may repeat one by another name."""
    check.checked_overrides(set)
    given = set or {}
    overrides = {key: check.yaml(text) for key, text in record["overrides"].items() if key not in given}
    file, spec = check.check_text(record["text"], record["name"], set={**overrides, **given}, files=record["files"])
    if spec is not None:  # other warnings were reported when the model was built
        known = {f"--set {path}={text}" for path, text in overrides.items()}
        check.warn(each for each in spec.warnings if each.code == "W901" and each.span.source.name not in known)
    return check.require_model(file, spec)


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"a path is a str or a Path, not {type(path).__name__}") from None
