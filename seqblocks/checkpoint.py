"""Saving and restoring models, and reading official checkpoints through a spec's own `checkpoint:` map."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import math
import os
import secrets
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph, recipes
from seqblocks.analysis import check
from seqblocks.analysis.maps import Translator
from seqblocks.analysis.maps import official_name as official_name
from seqblocks.errors import RunError, UnavailableError, UsageError, listing
from seqblocks.recipes import Recipe
from seqblocks.runtime.arguments import checked_device
from seqblocks.runtime.builder import build_model
from seqblocks.runtime.model import SequenceModel

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
FORMAT = 2
STALE = 24 * 3600  # seconds without a write, after which an unfinished file is removed where locks are unknown
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex128, torch.complex64, torch.complex32)

# --- our own files --------------------------------------------------------------------------------------------------


def save(model: SequenceModel, path: str | os.PathLike[str]) -> None:
    """Write weights and spec to one file, so that `restore(path)` needs nothing else.

    `.safetensors` writes that format (needs the `safetensors` extra); any other ending what torch.save makes. A tied
    parameter is written once. The file holds a checksum of each tensor and of the spec. It appears only when it is
    complete: until then an existing file stays as it was. Links are followed; an existing file keeps its mode.

    RunError where the weights are no longer what the spec says (replaced or parametrized steps, ties that are broken),
    are shared out over devices, or are on meta; UsageError where the arguments are at fault. OSError where the disk is.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"save writes what build made, not {type(model).__name__}")
    source = model.spec.source
    if source is None:
        raise UsageError("the model does not know the text it was made from, so it cannot be saved with it")
    target = _target(_path(path))
    held = _held(model)
    for item in graph.parameters(model.graph):
        if item.tied and not _same(held[item.name], held[item.tied]):
            what = f"{item.name} is tied to {item.tied} in the spec, and they are two parameters with other values"
            raise RunError(f"{what}: model.tie() ties them again, to the values of {item.tied}")
    tied = {item.name for item in graph.parameters(model.graph) if item.tied}
    tensors = {name: _own(t) for name, t in held.items() if name not in tied}
    about = {
        "format": FORMAT,
        "name": source.name,
        "text": source.text,
        "overrides": dict(source.overrides),
        "files": dict(source.files),
        "checksums": {name: checksum(name, tensor) for name, tensor in tensors.items()},
    }
    about["checksum"] = _checksum_of_record(about)
    if target.suffix == ".safetensors":
        data = _safetensors().torch.save(tensors, {"seqblocks": json.dumps(about)})
        _write(target, lambda file: file.write(data))
    else:
        _write(target, lambda file: torch.save({"seqblocks": about, "tensors": tensors}, file))


def restore(
    path: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str | None = None,
) -> SequenceModel:
    """The model that `save` wrote: each parameter in the dtype it had, or the model in the one that is asked for.

    `set` overrides values of its spec, over those it was built with: what owns no weights, such as dropout, drop_path
    or the window of attention. RunError where the weights do not fit the spec, UsageError where the file is at fault:
    not written by `save`, cut short, or changed since (checksums are compared). Nothing of the model is allocated
    before names and shapes are compared. The file's pickles hold no code that could run.
    """
    device = checked_device(device)
    about, tensors = _read(_path(path))
    check.checked_overrides(set)
    given = set or {}  # applied last: what the model was built with may say the same by another name
    overrides = {key: check.yaml(text) for key, text in about["overrides"].items() if key not in given}
    file, found = check.prove(about["text"], about["name"], set={**overrides, **given}, files=about["files"])
    if found is not None:
        check.warn_of_idle(found, given)  # the others were reported when the model was built
    proven = check.require_model(file, found)
    _fit(proven, tensors)
    model = build_model(proven, device="meta", dtype=dtype or torch.float32)
    if dtype is None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in tensors:  # or it is tied
                parameter.data = parameter.data.to(tensors[name].dtype)
    model = model.to_empty(device=device)
    _copy(model, tensors)
    return model


def _own(tensor: Tensor) -> Tensor:
    """A tensor's numbers on the CPU, side by side, in a storage that holds no others."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def checksum(name: str, tensor: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor with its name, dtype and shape: finds any flipped bit, guards from no forger.

    About 6 GB/s on one core: a small part of what reading the file takes.
    """
    start = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    if not tensor.nbytes:
        return start
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), start)


def _checksum_of_record(about: Mapping[str, Any]) -> int:
    """CRC-32 of what a file says beside its tensors."""
    rest = {key: value for key, value in about.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# --- writing --------------------------------------------------------------------------------------------------------


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"a path is a str or a Path, not {type(path).__name__}") from None


def _target(path: Path) -> Path:
    """The regular file, present or not, that a path leads to through links. UsageError if it is anything else."""
    mode = 0
    try:
        target = Path(os.path.realpath(path))
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder, and save writes one file")
    if mode and not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a link in a ring of links", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UsageError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, and save writes regular files")
    if not target.parent.is_dir():
        parent = target.parent if path.is_symlink() else path.parent
        raise UsageError(f"there is no folder {parent}")
    return target


def _write(target: Path, write: Callable[[Any], Any]) -> None:
    """Write beside the target, then rename: a full disk, an interrupt or a kill leaves the old file as it was."""
    name = target.name if len(os.fsencode(target.name)) < 200 else hashlib.sha1(os.fsencode(target.name)).hexdigest()
    prefix = f".{name}."
    _remove_stale(target.parent, prefix)
    try:
        old = os.stat(target)
    except FileNotFoundError:
        old = None
    try:
        handle, unfinished = _create(target.parent, prefix, 0o600 if old else 0o666)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    file = _Remembering(handle)
    try:
        with file:
            if old and fcntl:
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    with contextlib.suppress(OSError):  # only root gives files away
                        os.fchown(handle, old.st_uid, old.st_gid)
                os.fchmod(handle, stat.S_IMODE(old.st_mode))
            try:
                write(file)
            except RuntimeError:
                if file.error is None:
                    raise
                raise file.error from None  # what torch's writer made of it says nothing of the disk
            os.fsync(handle)
            if fcntl is None:  # Windows renames closed files alone; elsewhere the lock is kept to the end
                file.close()
            os.replace(unfinished, target)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


class _Remembering:
    """A file for writing that remembers why it failed."""

    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "wb", buffering=0)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += self._file.write(view[done:]) or 0
        except OSError as error:
            self.error = error
            raise
        return done

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Remembering:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(folder: Path, prefix: str, mode: int) -> tuple[int, str]:
    """A new file of ours, locked as long as it is open: a lock that is free says that its writer is gone."""
    while True:
        name = str(folder / f"{prefix}{secrets.token_hex(4)}.saving")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            handle = os.open(name, flags, mode)
        except FileExistsError:
            continue
        if _lock(handle) is not False:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(name), os.fstat(handle)):
                    return handle, name
        os.close(handle)  # another save took it for stale in the moment before it was locked


def _lock(handle: int) -> bool | None:
    """Lock an open file. False where another process has it; None where locks are unknown."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove what killed saves of the same target left. A save that is running keeps its file locked."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if not (entry.name.startswith(prefix) and entry.name.endswith(".saving")):
                continue
            if len(entry.name) != len(prefix) + len("01234567.saving") or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                handle = os.open(entry.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    free = _lock(handle)
                    if free or (free is None and time.time() - os.fstat(handle).st_mtime > STALE):
                        os.unlink(entry.path)
                finally:
                    os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- reading --------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a file, after all checks that need no spec. UsageError."""
    try:
        size = os.stat(path).st_size
    except (OSError, ValueError):
        raise UsageError(f"there is no file {path}") from None
    if not path.is_file():
        raise UsageError(f"{path} is no regular file")
    try:
        about, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path, size)
    except (UnavailableError, UsageError):
        raise
    except Exception as error:
        # torch's own words are of its file format; what counts is that this is none of ours, or not all of it
        what = f"{path} was not written by seqblocks.checkpoint.save, or not to its end"
        raise UsageError(f"{what} ({type(error).__name__})") from None
    _check_record(path, about)
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise UsageError(f"{path} holds no tensors by name")
    for name, tensor in tensors.items():
        odd = unusable(tensor)
        if not odd and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
            odd = "is not laid out as save writes it"
        if odd:
            raise UsageError(f"{path} was not written by seqblocks.checkpoint.save: {name} {odd}")
    if sum(tensor.nbytes for tensor in tensors.values()) > size:
        raise UsageError(f"{path} was not written by seqblocks.checkpoint.save: its tensors are larger than the file")
    sums = about["checksums"]
    bad = [name for name in (*tensors, *sums) if name not in tensors or sums.get(name) != checksum(name, tensors[name])]
    if bad or about["checksum"] != _checksum_of_record(about):
        what = listing(dict.fromkeys(bad), 4) if bad else "the spec"
        raise UsageError(f"{path} has changed since it was written: the checksum of {what} differs. Take another copy")
    return about, tensors


def _read_safetensors(path: Path) -> tuple[Any, Any]:
    with _safetensors().safe_open(str(path), framework="pt") as file:
        about = json.loads((file.metadata() or {})["seqblocks"])
        return about, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict


def _read_pickle(path: Path, size: int) -> tuple[Any, Any]:
    with zipfile.ZipFile(path) as archive:  # compressed ones could grow to any size; torch.save compresses nothing
        entries = archive.infolist()
        plain = all(each.compress_type == zipfile.ZIP_STORED for each in entries)
        if not plain or sum(each.file_size for each in entries) > size:
            raise UsageError(f"{path} was not written by seqblocks.checkpoint.save: its contents are compressed")
    data = torch.load(path, map_location="cpu", weights_only=True)
    return data["seqblocks"], data["tensors"]


def _check_record(path: Path, about: Any) -> None:
    """UsageError unless this is what `save` writes beside the tensors."""
    if not isinstance(about, dict):
        raise UsageError(f"{path} was not written by seqblocks.checkpoint.save: its record is no mapping")
    if type(about.get("format")) is int and about["format"] != FORMAT:
        how = "save the model again with this version" if about["format"] < FORMAT else "install that version"
        raise UsageError(f"{path} was written by another version of seqblocks (format {about['format']}): {how}")
    kinds: dict[str, type | tuple[type, type]] = {
        "format": int, "name": str, "text": str, "overrides": (str, str), "files": (str, str), "checksums": (str, int),
        "checksum": int,
    }  # fmt: skip
    for key, kind in kinds.items():
        value = about.get(key)
        if isinstance(kind, tuple):
            sound = type(value) is dict and all(type(k) is kind[0] and type(v) is kind[1] for k, v in value.items())
        else:
            sound = type(value) is kind
        if not sound:
            raise UsageError(f"{path} was not written by seqblocks.checkpoint.save: its record lacks a sound {key!r}")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise UnavailableError("this file format needs an extra: pip install 'seqblocks[safetensors]'") from None
    return safetensors


# --- what may be copied into a model --------------------------------------------------------------------------------


def unusable(tensor: Any, complex_too: bool = False) -> str | None:
    """Why something is not a plain tensor of floating numbers ("is sparse: …"); None if it is one."""
    if not isinstance(tensor, Tensor):
        return f"is no tensor, but {type(tensor).__name__}"
    if type(tensor.detach()) is not Tensor:
        return f"is a {type(tensor).__name__}, and its numbers may be elsewhere too: gather the weights first"
    if tensor.is_meta:
        return "is on meta, where no numbers are"
    if tensor.is_nested:
        return "is nested: pad it"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}): dequantize() it first"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}): to_dense() it first"
    if tensor.dtype not in (*_FLOATS, *(_COMPLEX if complex_too else ())):
        what = "is complex" if tensor.is_complex() else f"is of {tensor.dtype}"
        return f"{what}, and weights are float64, float32, float16 or bfloat16"
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (tensor.storage_offset() + last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "has lost its storage, as sharding leaves it: gather the weights first"
    return None


def _held(model: SequenceModel, more: bool = False) -> dict[str, Tensor]:
    """A model's own tensors by the names of its spec: RunError unless they are these, plain and with numbers.

    `more`: it may have others beside them.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    wanted = {item.name: item.parameter.shape for item in graph.parameters(model.graph)}
    if more:
        tensors = {name: tensors[name] for name in wanted if name in tensors}
    unlike = _unlike(tensors, wanted)
    if unlike:
        how = "merge or remove parametrizations, pruning masks and adapters, and put its own steps back"
        raise RunError(f"the model is no longer what its spec says: {unlike}. First {how}")
    for name, tensor in tensors.items():
        if odd := unusable(tensor):
            how = ": model.to_empty(device='cpu') makes room" if tensor.is_meta else ""
            raise RunError(f"{name} {odd}{how}")
        if tuple(tensor.shape) != tuple(wanted[name]):
            what = f"{name} is {list(tensor.shape)}, and {list(wanted[name])} there"
            raise RunError(f"the model is no longer what its spec says: {what}")
        if more and any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RunError(f"{name} repeats one number in memory (expand), so it cannot be filled: clone it first")
        if more and tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RunError(f"{name} was made in inference mode and can be filled there alone: torch.inference_mode()")
    return tensors


def _unlike(names: Iterable[str], wanted: Iterable[str]) -> str:
    """What is missing among names, and what is too much."""
    names, wanted = dict.fromkeys(names), dict.fromkeys(wanted)
    missing = [name for name in wanted if name not in names]
    spare = [name for name in names if name not in wanted]
    return "; ".join(
        f"{len(found)} {'is' if len(found) == 1 else 'are'} {what} ({listing(found, 4)})"
        for what, found in (("missing", missing), ("not known here", spare)) if found
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tied names hold the same: one parameter, or one that is equal (nan equals nan)."""
    if a is b:
        return True
    a, b = a.detach().to(b.device), b.detach()
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _fit(model: graph.ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    """RunError unless tensors are those that a spec declares, by name and shape. Nothing is allocated."""
    declared = {item.name: item for item in graph.parameters(model.graph) if not item.tied}
    unlike = _unlike(tensors, declared)
    if unlike:
        raise RunError(f"the weights are not this model's: {unlike}")
    for name, item in declared.items():
        found, shape = tensors[name], item.parameter.shape
        if tuple(found.shape) != tuple(shape):
            sizes = f"{name} is {list(found.shape)}, and {list(shape)} here"
            raise RunError(f"the weights are not this model's: {sizes}{_what_sets(item, tuple(found.shape))}")
        if found.is_complex():
            raise RunError(f"the weights for {name} are complex, and it is real: {{real: …}} or {{imag: …}} is a part")


def _what_sets(item: graph.Named, found: tuple[int, ...]) -> str:
    """Which step has a parameter of another shape, and what to say in the spec so that it fits."""
    step = f" ({item.node.verb}, {item.node.span})"
    if item.node.verb != "position_embed" or len(found) != len(item.parameter.shape):
        return step
    if len(found) == 4:
        grid = f"{{rows: {found[1]}, columns: {found[2]}}}"
        return f"{step}. `position_embed: {grid}` takes these and fits them to the image"
    return f"{step}. There are {found[1]} positions: another size, patch or stride of the image, or another length"


@torch.no_grad()
def _copy(model: SequenceModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy all weights into a model, or, with a RunError, none."""
    _fit(model.spec, tensors)
    held = model.state_dict(keep_vars=True)  # whose names are the spec's also where a wrapper stands between
    for name, tensor in tensors.items():
        held[name].copy_(tensor)
    if any(item.tied and held[item.name] is not held[item.tied] for item in graph.parameters(model.graph)):
        model.tie()  # to_empty and load_state_dict part them


# --- official checkpoints -------------------------------------------------------------------------------------------


def load_official(model: SequenceModel, tensors: Any) -> None:
    """Load an official state dict through the spec's `checkpoint:` maps. Every tensor must find its place.

    Raises RunError naming what is missing, left over, of another shape or of another kind (integers, 8-bit floats,
    sparse, quantised), and then nothing is loaded; also where the model is on meta, in pieces, or no longer what its
    spec says. UsageError where the arguments are at fault.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"load_official fills what build made, not {type(model).__name__}")
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise UsageError(f"load_official wants the official state dict (torch.load or safetensors read it), not {kind}")
    if not any(isinstance(value, Tensor) for value in tensors.values()):
        for key, value in tensors.items():
            if isinstance(value, Mapping) and any(isinstance(inner, Tensor) for inner in value.values()):
                raise UsageError(f"the weights are one level down: load_official(model, tensors[{key!r}])")
    _held(model, more=True)
    _copy(model, _collected(model.spec, tensors))


def _collected(model: graph.ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, made of official tensors as the maps say. RunError unless all of both have their place."""
    out: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, items in _sources(model, tensors).items():
        for item, source in items:  # a file may hold what is tied once, by any of its names, or several times
            made = _assembled(item.name, source, item.parameter.shape, tensors)
            used.update(source.names)
            if not _same(made, out.setdefault(name, made)):
                raise RunError(f"{item.name} is tied to {name}, and the official weights have another for it")
    spare = [name for name in tensors if name not in used]
    if spare:
        raise RunError(f"the official weights hold more than the spec maps: {listing(spare)}")
    return out


def _sources(model: graph.ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[graph.Named, Recipe]]]:
    """What each parameter is made from: the first of its alternatives that the file holds. RunError if there is none.

    By the name of the parameter; those tied to it come with it, as far as the file has them.
    """
    translator = Translator()
    found: dict[str, list[tuple[graph.Named, Recipe]]] = {}
    missing: list[tuple[graph.Named, list[Recipe]]] = []
    ties: dict[str, list[graph.Named]] = {}
    for item in graph.parameters(model.graph):
        ties.setdefault(item.tied or item.name, []).append(item)
    for name, items in ties.items():
        sources = [(item, translator.official(model, item.name)) for item in items]
        there = [(item, next(filter(partial(_holds, tensors), each), None)) for item, each in sources]
        found[name] = [(item, source) for item, source in there if source is not None]
        if not found[name]:
            missing.append(sources[0])
    if missing:
        item, sources_of_one = missing[0]
        used = {official for pairs in found.values() for _, source in pairs for official in source.names}
        raise RunError(_missing(item, sources_of_one, tensors, used, len(missing) - 1))
    return found


def _holds(tensors: Mapping[str, Tensor], source: Recipe) -> bool:
    return all(official in tensors for official in source.names)


def _missing(item: graph.Named, sources: list[Recipe], tensors: Mapping[str, Tensor], used: set[str], more: int) -> str:
    """What to say of a parameter whose official tensors are absent; a hint names those that are likely meant."""
    absent = [next(name for name in source.names if name not in tensors) for source in sources]
    text = f"the official weights have no {' or '.join(dict.fromkeys(absent))}, which {item.name} is made from"
    if more:
        text += f" ({more} more {'parameter misses its' if more == 1 else 'parameters miss their'} tensors)"
    names = [name for name in tensors if isinstance(name, str)]
    hint = next(filter(None, (_prefixed(official, names) for official in absent)), None)
    if hint is None:
        shape = item.parameter.shape if isinstance(sources[0], recipes.Name) else None
        free = {name: None if unusable(tensors[name]) else tensors[name].shape for name in names if name not in used}
        meant = next(filter(None, (_meant(official, shape, free) for official in absent)), None)
        hint = f"Did you mean {meant}?{_entry(item.name, meant)}" if meant else ""
    return f"{text}. {hint}".strip()


def _meant(official: str, shape: tuple[int, ...] | None, free: Mapping[str, Any]) -> str | None:
    """The unused tensor that is most likely what an absent name means: of the same layer, and alike."""
    from difflib import SequenceMatcher

    def numbers(name: str) -> list[str]:
        return [part for part in name.split(".") if part.isdecimal()]

    best: tuple[tuple[bool, int, float], str | None] = ((False, 0, 0.0), None)
    parts = official.split(".")[::-1]
    free = {name: size for name, size in free.items() if numbers(name) == numbers(official)}
    alone = sum(shape is not None and size is not None and tuple(size) == shape for size in free.values()) == 1
    for name, size in free.items():
        alike = SequenceMatcher(None, official, name).ratio()
        ends = next((at for at, (a, b) in enumerate(zip(parts, name.split(".")[::-1], strict=False)) if a != b), 1)
        fits = shape is not None and size is not None and tuple(size) == shape
        if (fits and (ends or alike > 0.4 or alone)) or ends > 1 or alike >= 0.65:
            best = max(best, ((fits, ends, alike), name), key=lambda pair: pair[0])
    return best[1]


def _entry(ours: str, official: str) -> str:
    """The entry of a map that reads an official tensor, as a hint; none for layers, which have a pattern."""
    if any(part.isdecimal() for part in ours.split(".")):
        return ""
    while "." in ours and "." in official and ours.rpartition(".")[2] == official.rpartition(".")[2]:
        ours, official = ours.rpartition(".")[0], official.rpartition(".")[0]
    return f" In `checkpoint:` that is `{ours}: {official}`"


def _prefixed(official: str, names: list[str]) -> str | None:
    """What to do where all names have something before them, as wrappers of models leave it."""
    for prefix in dict.fromkeys(name.removesuffix(official) for name in names if name.endswith(f".{official}")):
        if all(name.startswith(prefix) for name in names):
            return f"All names there begin with '{prefix}': take it off, name.removeprefix('{prefix}')"
    return None


def _assembled(name: str, source: Recipe, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [tensors[official] for official in source.names]
    for official, part in zip(source.names, parts, strict=True):
        if odd := unusable(part, complex_too=True):
            raise RunError(f"{official} of the official weights {odd}")
    try:
        return _made(source, name, shape, *parts)
    except (RuntimeError, IndexError) as error:
        sizes = listing(list(part.shape) for part in parts)
        raise RunError(f"{name} {list(shape)} cannot be the {source.kind} of {sizes}: {error}") from error


# What a recipe makes of official tensors for our parameter `name` of a shape. RunError where they do not fit.


@singledispatch
def _made(recipe: Recipe, name: str, shape: tuple[int, ...], *parts: Tensor) -> Tensor:
    raise NotImplementedError(type(recipe))


@_made.register
def _name(recipe: recipes.Name, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    return whole


@_made.register
def _concat(recipe: recipes.Concat, name: str, shape: tuple[int, ...], *parts: Tensor) -> Tensor:
    return torch.cat(parts, recipe.axis or 0)


@_made.register
def _stack(recipe: recipes.Stack, name: str, shape: tuple[int, ...], *parts: Tensor) -> Tensor:
    return torch.stack(parts, recipe.axis or 0)


@_made.register
def _split(recipe: recipes.Split, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    axis, count = recipe.axis or 0, recipe.parts
    stacked = (*shape[:axis], count, *shape[axis:])
    joined = tuple(size * count if at == axis else size for at, size in enumerate(shape))
    flat = (math.prod(stacked),)
    _shaped(name, recipe.official, whole, [joined, stacked, flat] if axis < len(shape) else [stacked, flat])
    return whole.reshape(stacked).select(axis, recipe.part)


@_made.register
def _slice(recipe: recipes.Slice, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    axis, start = recipe.axis or 0, recipe.start or 0
    length = shape[axis]
    _must(start + length <= whole.shape[axis], name, recipe.official, whole, f"to have {length} from {start}")
    return whole.narrow(axis, start, length)


@_made.register
def _transpose(recipe: recipes.Transpose, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    swapped = whole.transpose(-1, -2)
    _must(len(shape) > 1, name, recipe.official, whole, "to have one axis, which needs no transpose")
    last = min(swapped.ndim, len(shape)) - 1  # from there on the axes of ours may be one in the release
    *before, a, b = (*shape[:last], math.prod(shape[last:]))
    _shaped(name, recipe.official, whole, [(*before, b, a)])
    return swapped.reshape(shape)


@_made.register
def _reshape(recipe: recipes.Reshape, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    wanted = f"to hold {' x '.join(map(str, shape))} numbers"
    _must(whole.numel() == math.prod(shape), name, recipe.official, whole, wanted)
    return whole.reshape(shape)


@_made.register(recipes.Real)
@_made.register(recipes.Imag)
def _complex_part(recipe: recipes.FromOne, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    _must(whole.is_complex(), name, recipe.official, whole, "to be complex")
    return torch.view_as_real(whole).select(-1, int(isinstance(recipe, recipes.Imag)))


@_made.register
def _rearrange(recipe: recipes.Rearrange, name: str, shape: tuple[int, ...], whole: Tensor) -> Tensor:
    from einops import rearrange

    wanted, sizes = recipes.rearranged(recipe.pattern, recipe.sizes, shape)
    _shaped(name, recipe.official, whole, [wanted])
    return rearrange(whole, recipe.pattern, **sizes)


def _must(holds: bool, name: str, official: str, tensor: Tensor, wanted: str) -> None:
    if not holds:
        found = f"is {list(tensor.shape)} of {tensor.dtype}"
        raise RunError(f"for {name} the official {official} ought {wanted}, and {found}")


def _shaped(name: str, official: str, tensor: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """One of these shapes: another of as many numbers would be read in a wrong order. Only `reshape` reshapes."""
    wanted = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
    _must(tuple(tensor.shape) in shapes, name, official, tensor, f"to be {wanted}")
