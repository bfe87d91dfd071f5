"""The record of a saved model: the other files and overrides of its spec, and checksums of everything."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from seqblocks._version import __version__
from seqblocks.errors import UnavailableError
from seqblocks.graph import SpecSource

FORMAT = 1
RECORD = "seqblocks.json"  # the file
EXTRA = "seqblocks.extra.pt"  # what `save` stores besides the model

# The type of each entry; a pair gives the types of the keys and values of a mapping.
ENTRIES: dict[str, type | tuple[type, type]] = {
    "format": int,
    "seqblocks": str,  # the version that wrote the folder
    "name": str,
    "overrides": (str, str),
    "files": (str, str),  # texts of the files in use, by relative path or, for bundled files, by name
    "parameters": int,
    "tied": (str, str),  # tied parameter -> the parameter that is stored instead
    "spec": int,  # checksum of the spec's text
    "checksums": (str, int),  # of the tensors
    "checksum": int,  # of this record
}


def new_record(source: SpecSource, checksums: dict[str, int], parameters: int, tied: dict[str, str]) -> dict[str, Any]:
    """Return the record of a model."""
    record = {
        "format": FORMAT,
        "seqblocks": __version__,
        "name": source.name,
        "overrides": dict(source.overrides),
        "files": dict(source.files),
        "parameters": parameters,
        "tied": tied,
        "spec": zlib.crc32(source.text.encode()),
        "checksums": checksums,
    }
    return {**record, "checksum": record_checksum(record)}


def has_entry(record: Mapping[str, Any], key: str) -> bool:
    """Return whether an entry exists and has its type."""
    value, kind = record.get(key), ENTRIES[key]
    if isinstance(kind, tuple):
        return type(value) is dict and all(type(k) is kind[0] and type(v) is kind[1] for k, v in value.items())
    return type(value) is kind


def checksum(name: str, tensor: Tensor) -> int:
    """Return the CRC-32 of a contiguous CPU tensor with its name, dtype and shape.

    It detects accidental changes, including every single flipped bit, but not forgery. It runs at about 6 GB/s on one
    core, a small part of the time to read a file.
    """
    start = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    if not tensor.nbytes:
        return start
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), start)


def record_checksum(record: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a record without its own checksum."""
    rest = {key: value for key, value in record.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def safetensors() -> Any:
    """Return the package safetensors. Raises UnavailableError if it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise UnavailableError("this file format needs an extra: pip install 'seqblocks[safetensors]'") from None
    return safetensors


@contextlib.contextmanager
def as_disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise OSError with this path where safetensors, in this context, raises its own exception for a disk error."""
    library = safetensors()
    try:
        yield
    except library.SafetensorError as error:
        if code := re.search(r"(?:os error |code: )(\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
        raise
