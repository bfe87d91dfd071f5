"""Read safetensors and torch files one tensor at a time, single files or shards with an index."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.checkpoint.record import safetensors
from seqblocks.errors import UnavailableError, UsageError, listing

INDEX = ".index.json"
ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # in any case
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")  # with the suffix INDEX, they list shards
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


class Weights(NamedTuple):
    """Tensors by name; `read(name)` returns one.

    `headers` gives their shapes and dtypes: tensors on meta if `lazy`, otherwise the tensors themselves.
    """

    headers: Mapping[str, Any]
    read: Callable[[str], Tensor]
    lazy: bool = False
    source: str = ""  # a path, for messages


def weights_in(path: Path) -> Weights:
    """Return the weights of a file, or of a folder from the Hub. Raises UsageError if they are invalid."""
    if not path.is_dir():
        return _file(path)
    for name in WHOLE_FILES:
        if (path / name).exists():
            return _file(path / name)
        if (path / f"{name}{INDEX}").exists():
            return _shards(path / f"{name}{INDEX}")
    names = " or ".join(f"{name} or {name}{INDEX}" for name in WHOLE_FILES)
    raise UsageError(f"{path} has no weights: there is no {names}")


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file. Raises UsageError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"it is not valid JSON, or it is truncated ({error})"
        raise UsageError(f"{path} cannot be read: {reason}") from None


def _shards(path: Path) -> Weights:
    """Return the weights of all files in an index."""
    index = read_json(path)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UsageError(f"{path} has no valid `weight_map` from tensors to files")
    files = dict.fromkeys(table.values())
    if odd := [name for name in files if os.path.basename(name) != name or name in ("", ".", "..")]:
        raise UsageError(f"{path} names files outside its folder: {listing(odd, 4)}")
    if missing := [name for name in files if not (path.parent / name).is_file()]:
        raise UsageError(f"{path.parent} lacks {listing(missing, 4)}, of the {len(files)} files listed in {path.name}")
    found = {name: _file(path.parent / name) for name in files}
    absent = [name for name, file in table.items() if name not in found[file].headers]
    more = [name for file, weights in found.items() for name in weights.headers if table.get(name) != file]
    for names, what in ((absent, "not in the listed file"), (more, "in a file but not in the index")):
        if names:
            raise UsageError(f"{path} does not describe its files: {what}: {listing(names, 4)}")
    headers = {name: found[file].headers[name] for name, file in table.items()}
    lazy = any(weights.lazy for weights in found.values())
    return Weights(headers, lambda name: found[table[name]].read(name), lazy, str(path.parent))


def _file(path: Path) -> Weights:
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        name = path.as_posix()
        is_repository = name.count("/") == 1 and not path.parent.exists() and path.suffix.lower() not in ENDINGS
        hint = f". To load a release of the Hub, download it first: hf download {name} --local-dir DIR"
        raise UsageError(f"there is no file {path}{hint if is_repository else ''}") from None
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file")
    try:
        return _safetensors(path) if path.suffix.lower() == ".safetensors" else _torch(path, size)
    except (UnavailableError, UsageError):
        raise
    except pickle.UnpicklingError:
        what = f"{path} contains pickled objects other than tensors, which could run code"
        raise UsageError(f"{what}. Where you trust the file, write its state dict to a new one") from None
    except Exception as error:  # the libraries' own messages describe format internals
        raise UsageError(f"{path} is not a file of weights, or it is truncated ({type(error).__name__})") from None


def _safetensors(path: Path) -> Weights:
    headers = {}
    with safetensors().safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise UsageError(f"{path} contains {name} with dtype {part.get_dtype()}, which is not supported")
            headers[name] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")

    def read(name: str) -> Tensor:
        """Return a tensor. The file is opened for each tensor, since pages of an open file would stay in memory."""
        try:
            with safetensors().safe_open(str(path), framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, safetensors().SafetensorError) as error:
            raise UsageError(f"{path} has changed while it was read ({error})") from None

    return Weights(headers, read, True, str(path))


def _torch(path: Path, size: int) -> Weights:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:  # torch compresses no entries; others could expand to any size
            entries = archive.infolist()
        plain = all(each.compress_type == zipfile.ZIP_STORED for each in entries)
        if not plain or sum(each.file_size for each in entries) > size:
            raise UsageError(f"{path} was not written by torch: its contents are compressed")
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    else:
        data = torch.load(path, map_location="cpu", weights_only=True)
    tensors = _unwrapped(data)
    if tensors is None:
        raise UsageError(f"{path} contains no mapping from names to tensors")
    return Weights(tensors, tensors.__getitem__, False, str(path))


def _unwrapped(data: Any) -> Mapping[str, Tensor] | None:
    """Return the mapping from names to tensors: `data`, or the only such mapping in it, as saved by training loops."""
    if not isinstance(data, Mapping):
        return None
    if any(isinstance(value, Tensor) for value in data.values()):
        return data
    inner = [each for each in map(_unwrapped, data.values()) if each is not None]
    return inner[0] if len(inner) == 1 else None
