"""Save and load a model as a folder: weights in safetensors, the spec, and a record of the files that it uses."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.checkpoint import writing
from seqblocks.checkpoint.hf_config import MODEL_TYPE, ORIGIN, config_text, hub_config, original, with_origin
from seqblocks.checkpoint.record import (
    ENTRIES,
    EXTRA,
    FORMAT,
    RECORD,
    as_disk_errors,
    checksum,
    has_entry,
    new_record,
    record_checksum,
    safetensors,
)
from seqblocks.checkpoint.weight_files import INDEX, Weights, read_json, weights_in
from seqblocks.checkpoint.weights import PARTS, are_equal, check_fit, fill, has_values, own_tensors, unusable
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.model.builder import build_model
from seqblocks.model.quantize import put, quantized
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.arguments import checked_device
from seqblocks.runtime.shards import gathered, groups_of, on_first_rank

SPEC = "spec.yaml"
CONFIG = "config.json"  # for transformers
WHOLE = "model.safetensors"
FILE_MAX_BYTES = 2.0**63  # more than any file has
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def save(
    model: SequenceModel,
    path: str | os.PathLike[str],
    *,
    shard_size: int | str = "5GB",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save a model to a self-contained folder for `load(path)`.

    The folder contains `spec.yaml` verbatim, `model.safetensors` (or shards of at most `shard_size` bytes with an index
    as on the Hub; a larger tensor gets its own shard), `seqblocks.json` (overrides, used files, ties and checksums) and
    `config.json`, so that transformers can read the folder after `import seqblocks.hf`. A tied parameter is written
    once. The folder replaces an earlier one only when it is complete. Folders above it are created. Symbolic links are
    followed. The mode of an earlier folder is preserved, and so are all files and folders in it that save did not
    write. For a sharded model (`seqblocks.distributed`), all ranks must call it: weights are gathered one by one, and
    the first rank writes them.

    extra: what belongs to the model at this moment, such as {"optimizer": optimizer.state_dict(), "step": 1000}. It is
    written with the model, as `seqblocks.extra.pt`, for `load_extra` or `torch.load`; a later save replaces or removes
    it. For a sharded model, the `extra` of the first rank is written.

    Raises RunError if the parameters no longer match the spec (replaced or parametrized steps, broken ties) or are on
    the meta device; UsageError for invalid arguments; UnavailableError without safetensors; OSError for disk errors.
    """
    _check_model(model)
    if model.spec.source is None:
        what = "the model was built without the text of its spec, so it cannot be saved as a folder"
        raise UsageError(f"{what}; torch.save(model.state_dict(), …) saves any module, such as a block as a layer")
    limit = checked_size(shard_size)
    if not isinstance(extra, Mapping | None):
        raise UsageError(f'extra must be a mapping, such as {{"step": 1000}}, not {type(extra).__name__}')
    safetensors()
    groups = groups_of(model.state_dict(keep_vars=True).values(), model.tensor_shards)
    target = None if groups else _target(path, model.spec.source.text)
    tensors, tied = _tensors(model)
    if groups:
        tensors = gathered(tensors, groups, model.tensor_shards)

    def work(folder: Path) -> None:
        write_model(folder, model.whole_spec, Weights(tensors, tensors.__getitem__), tied, limit)
        if extra is not None:
            _write_extra(folder / EXTRA, dict(extra))

    text = model.spec.source.text
    on_first_rank(groups, lambda: writing.write(target or _target(path, text), work))


def _target(path: Any, text: str) -> Path:
    """Return the folder to write. Raises UsageError if it has a model that save did not write, and would replace."""
    target = writing.target_of(as_path(path))
    names = writing.own_files(target)
    others = [] if RECORD in names else [name for name in names if not _is_same(target / name, text)]
    if others:
        what = f"{path} was not written by save: it has no {RECORD}, but {listing(others, 4)}, which would be replaced"
        raise UsageError(f"{what}. Save to another folder")
    return target


def _is_same(file: Path, text: str) -> bool:
    """Return whether a file without a record may be replaced: the same spec, or a config.json of ours."""
    if file.name == CONFIG:
        config = read_json(file)
        return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE
    return file.name == SPEC and file.read_bytes() == text.encode()


def _write_extra(file: Path, extra: dict[str, Any]) -> None:
    """Write a torch file. Raises UsageError for objects that cannot be stored, OSError for disk errors."""
    try:
        with file.open("wb") as stream:
            torch.save(extra, stream)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"extra cannot be stored: {error}") from None
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None  # as torch hides it


def _check_model(model: Any) -> None:
    """Raise UsageError unless this is a built model; a wrapper, such as a compiled model, is named."""
    if isinstance(model, SequenceModel):
        return
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    inside = next((name for name, part in parts if isinstance(part, SequenceModel)), None)
    hint = "" if inside is None else f': save the model in it, model.get_submodule("{inside}")'
    raise UsageError(f"save needs a model from seqblocks.build, not {type(model).__name__}{hint}")


def write_model(folder: Path, spec: ModelSpec, weights: Weights, tied: dict[str, str], limit: int) -> None:
    """Write weights and spec into a folder that `load` and transformers can read."""
    sums = write_weights(folder, weights, limit)
    config = hub_config(spec) | {"dtype": dtype_of(weights)}
    (folder / CONFIG).write_text(config_text(config), encoding="utf-8")
    assert spec.source
    write_record(folder, spec.source, weights.headers, sums, tied)


def dtype_of(weights: Weights) -> str:
    """Return the dtype that a config.json gives for weights: the smallest, since some parameters stay in float32."""
    kinds = [header.dtype for header in weights.headers.values() if header.is_floating_point()]
    return str(min(kinds, key=lambda kind: kind.itemsize, default=torch.float32)).removeprefix("torch.")


def write_record(
    folder: Path, source: SpecSource, headers: Mapping[str, Any], sums: dict[str, int], tied: dict[str, str]
) -> None:
    """Write the files that `load` reads besides the weights: the spec, and the record with all checksums."""
    record = new_record(source, sums, sum(header.numel() for header in headers.values()), tied)
    (folder / SPEC).write_bytes(source.text.encode())
    (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _tensors(model: SequenceModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model's tensors without those of tied parameters, and the ties. Raises RunError if a tie is broken."""
    in_8_bits = quantized(model)
    tensors = own_tensors(model, in_8_bits)
    tied = {item.name: item.tied for item in graph.parameters(model.graph) if item.tied}
    skipped: set[str] = set()
    for name, source in tied.items():
        parts = PARTS if name in in_8_bits else ("",)
        skipped.update(f"{name}{part}" for part in parts)
        pairs = [(tensors[f"{name}{part}"], tensors.get(f"{source}{part}")) for part in parts]
        if not all(other is not None and are_equal(x, other) for x, other in pairs):
            what = f"the spec ties {name} to {source}, but their values differ"
            raise RunError(f"{what}: call model.tie() to use the values of {source} for both")
    own = {name: tensor.detach() for name, tensor in tensors.items() if name not in skipped}
    _check_separate(own)
    return own, tied


def _check_separate(tensors: Mapping[str, Tensor]) -> None:
    """Raise RunError if two tensors are the same memory, which a saved folder would turn into two."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if type(tensor) is not Tensor or tensor.is_meta or not tensor.numel() or not _is_whole(tensor):
            continue
        other = names.setdefault(tensor.data_ptr(), name)
        if other != name and tensor.shape == tensors[other].shape:
            what = f"{name} and {other} are one tensor, but the spec does not tie them"
            raise RunError(f"{what}: write `tie:` at the step of {name}, or give it a tensor of its own")


def checked_size(size: int | str) -> int:
    """Return a shard size such as "5GB" in bytes. Raises UsageError if it is invalid."""
    if type(size) is int:
        found = size
    else:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(|KB|MB|GB)", str(size))
        found = int(min(float(match[1]) * UNITS[match[2]], FILE_MAX_BYTES)) if match else 0
    if found < 1:
        given = "one below 1" if type(size) is int else f"{size!r:.80}"  # an int may have too many digits for text
        raise UsageError(f'the shard size must be a number of bytes, such as 500_000_000 or "5GB", not {given}')
    return found


def write_weights(folder: Path, weights: Weights, limit: int) -> dict[str, int]:
    """Write tensors in shards of at most `limit` bytes. Return their checksums. Only one shard is read at a time."""
    shards = list(_shards(weights.headers, limit))
    sums: dict[str, int] = {}
    places: dict[str, str] = {}
    for at, names in enumerate(shards, 1):
        file = WHOLE if len(shards) == 1 else f"model-{at:05}-of-{len(shards):05}.safetensors"
        part = {name: _compact(weights.read(name)) for name in names}
        _save_file(part, folder / file)
        sums |= {name: checksum(name, tensor) for name, tensor in part.items()}
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(header.nbytes for header in weights.headers.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{WHOLE}{INDEX}").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return sums


def _shards(headers: Mapping[str, Any], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, header in headers.items():
        if names and size + header.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += header.nbytes
    yield names


def _compact(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, unless the tensor already is one that fills its storage."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if _is_whole(tensor) else tensor.clone()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError for disk errors."""
    with as_disk_errors(path):
        safetensors().torch.save_file(tensors, path, {"format": "pt"})



@check.names_overrides
def load(
    path: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str | None = None,
) -> SequenceModel:
    """Load a model saved by `save`, with each parameter in its saved dtype, or all in `dtype`.

    `set` overrides values of the spec that do not affect parameters, such as dropout, drop_path or the window of
    attention. Names and shapes are compared before the model is allocated, and tensors are read one at a time, so that
    only the model and one tensor are in memory. Raises RunError if the weights do not fit the spec, and UsageError if
    the folder was not written by `save`, is truncated, or has changed (checksums are compared).
    """
    device = checked_device(device)
    target = Path(os.path.realpath(as_path(path)))
    while True:
        place = writing.current(target)
        found = _identity(place)
        try:
            with torch.inference_mode(False):  # as in `made`
                return _load(place, path, set, device, dtype)
        except UsageError:
            if _identity(writing.current(target)) == found:
                raise  # otherwise, another process replaced the folder while it was read


def load_extra(path: str | os.PathLike[str], *, device: Any = "cpu") -> dict[str, Any] | None:
    """Return what `save` stored as `extra`, with its tensors on a device, or None if nothing is saved there.

    A model that was saved without it has an empty one. Raises UsageError if the file cannot be read.
    """
    place = writing.current(Path(os.path.realpath(as_path(path))))
    if not (place / EXTRA).exists():
        return {} if (place / RECORD).exists() else None
    try:
        found: dict[str, Any] = torch.load(place / EXTRA, map_location=checked_device(device), weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason, *_ = str(error).splitlines() or ["it is empty"]
        raise UsageError(f"{Path(path) / EXTRA} cannot be read: {reason}") from None
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _load(place: Path, path: Any, set: Mapping[str, Any] | None, device: Any, dtype: Any) -> SequenceModel:
    spec, weights = read_model(place, path, set, in_8_bits=True)
    model = build_model(spec, device="meta", dtype=torch.float32 if dtype is None else dtype)
    for name in _quantized_names(weights.headers):
        kind = model.get_parameter(name).dtype if dtype else weights.headers[f"{name}.scale"].dtype
        matrix = Int8Matrix.empty(model.get_parameter(name).shape, kind)
        for each in (name, *(item.name for item in graph.parameters(spec.graph) if item.tied == name)):
            put(model, each, matrix)
    if dtype is None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in weights.headers:  # tied parameters are not in the file
                parameter.data = parameter.data.to(weights.headers[name].dtype)
        for name, buffer in model.named_buffers():
            if name in weights.headers:
                buffer.data = buffer.data.to(weights.headers[name].dtype)
    model = model.to_empty(device=device)
    fill(model, weights.headers, weights.read)
    return model.eval().requires_grad_(False) if quantized(model) else model


def read_model(
    place: Path, path: Any, set: Mapping[str, Any] | None = None, in_8_bits: bool = False
) -> tuple[ModelSpec, Weights]:
    """Return the spec and the weights of a folder that `save` wrote; checksums are compared as tensors are read.

    in_8_bits: whether the caller takes a quantized model, whose tensors have other names. Raises UsageError otherwise.
    """
    record, text = _read_record(place, path)
    weights = weights_in(place)
    _check_tensors(path, record, weights)
    spec = with_origin(_analysed(record, text, set), _origin(place))
    headers = {name: weights.headers[name] for name in record["checksums"]}
    if not in_8_bits:
        check_not_quantized(path, headers)
    quantized_names = _quantized_names(headers)
    whole = {name: header for name, header in headers.items() if name.rpartition(".")[0] not in quantized_names}
    check_fit(spec, whole | {name: headers[f"{name}.values"] for name in quantized_names})
    return spec, weights._replace(headers=headers, read=lambda name: _read_tensor(path, record, weights, name))


def check_not_quantized(path: Any, headers: Mapping[str, Any]) -> None:
    """Raise UsageError for the tensors of a quantized model, whose names are not those of parameters."""
    if _quantized_names(headers):
        what = f"{path} has a model with weights in 8 bits, which only seqblocks.load reads"
        raise UsageError(f"{what}: use the original model")


def _quantized_names(headers: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that are stored in 8 bits."""
    return [
        name for key in headers if (name := key.removesuffix(PARTS[0])) != key and f"{name}{PARTS[1]}" in headers
    ]  # fmt: skip


def _origin(place: Path) -> dict[str, Any] | None:
    """Return the config.json that came with the weights of a saved folder; None if the folder's own one is damaged."""
    try:
        return original(read_json(place / CONFIG))
    except UsageError:
        return None


def _read_tensor(path: Any, record: Mapping[str, Any], weights: Weights, name: str) -> Tensor:
    tensor = weights.read(name)
    if record["checksums"][name] != checksum(name, tensor):
        raise UsageError(_changed(path, name))
    return tensor


def _changed(path: Any, what: str) -> str:
    return f"{path} has changed since it was written: the checksum of {what} differs. Use an intact copy"


def _read_record(place: Path, path: Any) -> tuple[dict[str, Any], str]:
    """Return the record and the spec's text. Raises UsageError unless `save` wrote them and they are unchanged."""
    if not place.is_dir():
        what = "is not a folder" if place.exists() else "does not exist"
        raise UsageError(f"{path} {what}; load needs a folder written by save")
    if not (place / RECORD).exists():
        hint = "; use seqblocks.from_pretrained for weights from other sources" if any(place.iterdir()) else ""
        raise UsageError(f"{path} was not written by seqblocks.save: it has no {RECORD}{hint}")
    record = read_json(place / RECORD)
    if not isinstance(record, dict):
        raise UsageError(f"{path} was not written by seqblocks.save: its {RECORD} is not a mapping")
    if type(record.get("format")) is int and record["format"] != FORMAT:
        versions = f"its format is {record['format']}, and this version reads {FORMAT}"
        raise UsageError(f"{path} was written by another version of seqblocks: {versions}")
    for key in ENTRIES:
        if not has_entry(record, key):
            raise UsageError(f"{path} was not written by seqblocks.save: its {RECORD} has no valid {key!r}")
    if record["checksum"] != record_checksum(record):
        raise UsageError(_changed(path, RECORD))
    return record, _read_text(place, path, record)


def _read_text(place: Path, path: Any, record: Mapping[str, Any]) -> str:
    try:
        data = (place / SPEC).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {SPEC}: {error.strerror}") from None
    if zlib.crc32(data) != record["spec"]:
        what = _changed(path, SPEC).removesuffix(". Use an intact copy")
        raise UsageError(f"{what}. Use an intact copy, or build the changed spec and load the weights into that model")
    return data.decode("utf-8")


def _check_tensors(path: Any, record: Mapping[str, Any], weights: Weights) -> None:
    expected, headers = record["checksums"], weights.headers
    missing = [name for name in expected if name not in headers]
    extra = [name for name in headers if name not in expected]
    if missing or extra:
        kinds = (("missing", missing), ("extra", extra))
        what = "; ".join(f"{kind} weights: {listing(names, 4)}" for kind, names in kinds if names)
        raise UsageError(f"{path} has changed since it was written: {what}. Use an intact copy")
    for name, header in headers.items():
        if not has_values(name, header) and (reason := unusable(header, on_meta=True, counts_too=True)):
            raise UsageError(f"{path} was not written by seqblocks.save: {name} {reason}")


def config_spec(config: Mapping[str, Any], set: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the spec in a config.json of ours, with further overrides. Raises UsageError or SpecError."""
    spec = config.get("spec")
    if not isinstance(spec, str):
        what = "the config has no spec" if spec is None else f"`spec` of the config must be a string, not {spec!r}"
        raise UsageError(f"{what}: use SeqblocksConfig.of('mamba_small'), with a bundled spec or a path")
    files, overrides = (config.get(key) or {} for key in ("files", "overrides"))
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise UsageError(f"`files` of the config must be a mapping from names to texts, not {files!r:.80}")
    if not isinstance(overrides, dict):
        raise UsageError(f"`overrides` of the config must be a mapping from names to values, not {overrides!r:.80}")
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in overrides.items()}
    name = str(config.get("spec_name") or "config")
    found = _analysed({"name": name, "overrides": values, "files": files}, spec, set)
    return with_origin(found, original({"model_type": MODEL_TYPE, ORIGIN: config.get(ORIGIN)}))


def _analysed(record: Mapping[str, Any], text: str, set: Mapping[str, Any] | None) -> ModelSpec:
    """Return the spec of a folder. New overrides come last: they may set an overridden value by another name."""
    check.check_overrides(set)
    given = set or {}
    overrides = {key: check.yaml(value) for key, value in record["overrides"].items() if key not in given}
    file, spec = check.check_text(text, record["name"], set={**overrides, **given}, files=record["files"])
    if spec is not None:  # skip warnings that were reported when the model was built
        known = {f"--set {path}={value}" for path, value in overrides.items()}
        unused = [each for each in spec.warnings if each.code == "W901" and each.span]
        check.warn(each for each in unused if each.span and each.span.source.name not in known)
    return check.require_model(file, spec)


def as_path(path: Any) -> Path:
    """Return a path. Raises UsageError for other types, and for a name that no file can have."""
    try:
        found = Path(path)
        os.fsencode(found)
    except TypeError:
        raise UsageError(f"a path must be a str or a Path, not {type(path).__name__}") from None
    except ValueError as error:
        raise UsageError(f"{path!r} is not a path: {error}") from None
    if "\0" in str(found):
        raise UsageError(f"{path!r} is not a path: it has a null byte")
    try:
        found.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{path!r} is not a path: {error.strerror}") from None
    return found
