"""Reading a saved file, and all checks of it that need no spec."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqblocks.checkpoint.record import ENTRIES, FORMAT, checksum, has_entry, record_checksum, safetensors
from seqblocks.checkpoint.weights import unusable
from seqblocks.errors import UnavailableError, UsageError, listing

SAVE = "seqblocks.checkpoint.save"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the record and the tensors of a file. Raise UsageError unless `save` wrote it and it is unchanged."""
    size = _size(path)
    try:
        record, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path, size)
    except (UnavailableError, UsageError):
        raise
    except Exception as error:
        # torch's message is about its own format; what matters is that the file is not ours, or incomplete
        raise UsageError(f"{path} was not written by {SAVE}, or not to its end ({type(error).__name__})") from None
    _check_record(path, record)
    _check_tensors(path, tensors, size)
    _check_sums(path, record, tensors)
    return record, tensors


def _size(path: Path) -> int:
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        raise UsageError(f"there is no file {path}") from None
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file")
    return size


def _read_safetensors(path: Path) -> tuple[Any, Any]:
    with safetensors().safe_open(str(path), framework="pt") as file:
        record = json.loads((file.metadata() or {})["seqblocks"])
        return record, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict


def _read_pickle(path: Path, size: int) -> tuple[Any, Any]:
    with zipfile.ZipFile(path) as archive:  # compressed entries could grow to any size; torch.save compresses nothing
        entries = archive.infolist()
        plain = all(each.compress_type == zipfile.ZIP_STORED for each in entries)
        if not plain or sum(each.file_size for each in entries) > size:
            raise UsageError(f"{path} was not written by {SAVE}: its contents are compressed")
    data = torch.load(path, map_location="cpu", weights_only=True)
    return data["seqblocks"], data["tensors"]


def _check_record(path: Path, record: Any) -> None:
    if not isinstance(record, dict):
        raise UsageError(f"{path} was not written by {SAVE}: its record is not a mapping")
    if type(record.get("format")) is int and record["format"] != FORMAT:
        versions = f"its format is {record['format']}, and this version reads {FORMAT}"
        raise UsageError(f"{path} was written by another version of seqblocks: {versions}")
    for key in ENTRIES:
        if not has_entry(record, key):
            raise UsageError(f"{path} was not written by {SAVE}: its record lacks a sound {key!r}")


def _check_tensors(path: Path, tensors: Any, size: int) -> None:
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise UsageError(f"{path} holds no tensors by name")
    for name, tensor in tensors.items():
        reason = unusable(tensor)
        if not reason and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
            reason = "is not laid out as save writes it"
        if reason:
            raise UsageError(f"{path} was not written by {SAVE}: {name} {reason}")
    if sum(tensor.nbytes for tensor in tensors.values()) > size:
        raise UsageError(f"{path} was not written by {SAVE}: its tensors are larger than the file")


def _check_sums(path: Path, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    sums = record["checksums"]
    wrong = [name for name in tensors if sums.get(name) != checksum(name, tensors[name])]
    wrong += [name for name in sums if name not in tensors]
    if wrong or record["checksum"] != record_checksum(record):
        what = listing(wrong, 4) if wrong else "the spec"
        raise UsageError(f"{path} has changed since it was written: the checksum of {what} differs. Take another copy")
