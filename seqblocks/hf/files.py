"""Read and write weights in folders of transformers, in the format of `seqblocks.save`.

In memory, the names of parameters begin with `model.`; in files, they are the names of the spec.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from seqblocks import graph
from seqblocks.checkpoint import folder
from seqblocks.checkpoint.record import EXTRA, RECORD, checksum, safetensors
from seqblocks.checkpoint.weight_files import INDEX, weights_in
from seqblocks.checkpoint.weights import are_equal, check_fit, unusable
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec
from seqblocks.runtime.shards import is_sharded

PREFIX = "model."
ADAPTER = "adapter_config.json"  # of PEFT: the weights are elsewhere


def own_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the spec's names, tied ones once. Raises RunError for sharded weights or broken ties."""
    if any(is_sharded(tensor) for tensor in tensors.values()):
        what = "the weights are sharded over ranks, but save_pretrained needs whole ones"
        how = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        raise RunError(f"{what}: pass state_dict={how}, or call seqblocks.save(model.model, DIR) on all ranks")
    ties = model._tied_weights_keys
    for name, source in ties.items():
        a, b = tensors.get(name), tensors.get(source)
        if a is not None and b is not None and not (a.is_meta or b.is_meta or are_equal(a, b)):
            what = f"the spec ties {name} to {source}, but their values differ"
            raise RunError(f"{what}: call model.tie_weights()")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name not in ties}


def adapt_names(model: Any, tensors: dict[str, Tensor], prefix: str, *others: Any) -> None:
    """Rename weights from their names in files to those in memory, and add tied ones, before torch loads them."""
    own = model.state_dict().keys()
    for name in [name for name in tensors if name.startswith(prefix)]:
        bare = name.removeprefix(prefix)
        if bare not in own and PREFIX + bare in own:
            tensors[f"{prefix}{PREFIX}{bare}"] = tensors.pop(name)
    for name, source in model._tied_weights_keys.items():
        if prefix + source in tensors:
            tensors.setdefault(prefix + name, tensors[prefix + source])


def as_folder(path: Any) -> Path:
    """Return a folder to write to. Raises UsageError if the path is not a folder."""
    place = folder.as_path(path)
    if place.exists() and not place.is_dir():
        raise UsageError(f"{place} is not a folder; save_pretrained needs one")
    return place


def weight_files(place: Path) -> dict[str, int]:
    """Return the modification times of the single weights file and of the index of shards, if they exist."""
    files = (place / name for name in (folder.WHOLE, f"{folder.WHOLE}{INDEX}"))
    return {file.name: file.stat().st_mtime_ns for file in files if file.is_file()}


def remove_stale(place: Path, before: Mapping[str, int]) -> None:
    """Remove the single file, or the index, of an earlier save if the current save wrote the other."""
    after = weight_files(place)
    stale = [name for name, time in after.items() if before.get(name) == time]
    if len(stale) < len(after):
        for name in stale:
            (place / name).unlink()


def check_folder(path: Any, options: Mapping[str, Any], part: Callable[[Any], tuple[ModelSpec, set[str]]]) -> None:
    """Compare names and shapes in the files of a local folder with a spec, before anything is allocated.

    part: returns the part of a config's spec to load, and the names of weights that stay unread. Raises RunError if the
    weights do not fit, UsageError for damaged files.
    """
    place = _local(path, options)
    if place is None:
        return
    spec, spare = part(options.get("config") or place)
    declared, headers = {item.name for item in graph.parameters(spec.graph)}, weights_in(place).headers
    folder.check_not_quantized(path, headers)
    found = {_bare(name, declared | spare): header for name, header in headers.items()}
    found = {name: header for name, header in found.items() if name not in spare}
    for name, header in found.items():
        if reason := unusable(header, on_meta=True, counts_too=True):
            raise UsageError(f"{path} does not contain weights: {name} {reason}")
    tied = {item.name: item.tied for item in graph.parameters(spec.graph) if item.tied}
    for name, source in tied.items():  # other software may have written both
        if name in found and source in found:
            del found[name]
    if options.get("ignore_mismatched_sizes"):
        _check_names(path, declared - tied.keys() - found.keys(), found.keys() - declared)
    else:
        check_fit(spec, found)


def _local(path: Any, options: Mapping[str, Any]) -> Path | None:
    if not isinstance(path, str | os.PathLike) or options.get("state_dict") is not None:
        return None
    place = Path(path) / (options.get("subfolder") or "")
    special = options.get("variant") or options.get("gguf_file") or (place / ADAPTER).exists()
    return None if special or not (place / folder.CONFIG).is_file() else place


def _bare(name: str, declared: set[str]) -> str:
    return name.removeprefix(PREFIX) if name not in declared else name


def check_loaded(path: Any, info: Mapping[str, Any]) -> None:
    """Raise RunError for missing or unused weights; transformers initialises missing ones and only warns."""
    _check_names(path, info.get("missing_keys", ()), info.get("unexpected_keys", ()))


def _check_names(path: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    what = [
        f"{len(names)} {'is' if len(names) == 1 else 'are'} {kind} ({listing(names, 4)})"
        for kind, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))) if names
    ]  # fmt: skip
    if what:
        raise RunError(f"the weights of {path} do not fit this model: {'; '.join(what)}")


def explained(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that raises UsageError for a damaged safetensors file."""

    @functools.wraps(load)
    def loader(path: Any, *args: Any, **kwargs: Any) -> Any:
        damage = safetensors().SafetensorError
        try:
            return load(path, *args, **kwargs)
        except damage as error:
            raise UsageError(f"{path} cannot be read: {error}") from None

    return loader


def write_record(place: Path, spec: ModelSpec) -> None:
    """Write the files that `seqblocks.load` needs besides the weights, or remove them if weights are missing.

    What `seqblocks.save` stored with earlier weights is removed.
    """
    (place / EXTRA).unlink(missing_ok=True)
    try:
        weights = weights_in(place)
        check_fit(spec, weights.headers)
    except (RunError, UsageError):
        for name in (RECORD, folder.SPEC):
            (place / name).unlink(missing_ok=True)
        return
    sums = {name: checksum(name, weights.read(name)) for name in weights.headers}
    tied = {item.name: item.tied for item in graph.parameters(spec.graph) if item.tied}
    assert spec.source
    folder.write_record(place, spec.source, weights.headers, sums, tied)


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by its identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}
