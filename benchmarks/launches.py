"""Record the launches of Triton kernels: what was launched and how, the compiled code, and the memory around it.

    with launches() as found: ...                    names, compile-time arguments and dtypes
    with launches(memory=True) as found: ...         also all arguments before and after each launch
    save_memory(found, path)                         these, as one file
    save_code(found, folder)                         the compiled code of each kernel
    python benchmarks/launches.py FOLDER ARCHIVE     packs what was saved into one file of limited size

A file of `save_memory` is a gzip pickle of a list of (name, module, grid, arguments before, options, arguments after),
one for each launch; without the last if the launch failed. Tensors are ("T", dtype, shape, strides, offset,
bytes of the whole storage as uint8), other arguments ("V", value). From it a launch can be repeated elsewhere, on
another device or in an interpreter of PTX, and compared with what it wrote here.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import importlib
import json
import pickle
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

RECORDED_MAX_BYTES = 1 << 30  # bytes of different storages that are recorded
MODES = ("ttgir", "ptx", "cubin")  # the compiled code that is kept
LENGTHS = ("L", "BT", "CHUNK", "STEPS")  # compile-time arguments that are numbers of tokens
ARCHIVE = 12 << 20


class Launch(NamedTuple):
    name: str
    module: str
    grid: Any
    options: dict[str, Any]  # compile-time arguments and launch options
    dtypes: tuple[str, ...]  # of the tensors, and "-" for absent ones
    compiled: Any = None  # None in Triton's interpreter
    before: tuple[Any, ...] | None = None
    after: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        of = ", ".join(f"{key}={value}" for key, value in sorted(self.options.items()) if key != "enable_fp_fusion")
        return f"{self.name}({of}; {' '.join(self.dtypes)})"


class Memory:
    """Copies of arguments. Equal storages are kept once, since most arguments are the same before and after."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Any] = {}
        self.size = 0

    def copy(self, argument: Any) -> tuple[Any, ...]:
        if not isinstance(argument, Tensor):
            return ("V", argument)
        storage = argument.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=argument.device).set_(storage).cpu().numpy().copy()
        key = hashlib.sha1(flat.tobytes()).digest()
        if key not in self.kept:
            self.kept[key] = flat
            self.size += flat.nbytes
        return (
            "T", str(argument.dtype), tuple(argument.shape), tuple(argument.stride()), argument.storage_offset(),
            self.kept[key],
        )


@contextlib.contextmanager
def launches(run: bool = True, memory: bool = False) -> Iterator[list[Launch]]:
    """Record the launches inside the context, of all packages. Without `run` nothing is launched.

    memory: also record the arguments, up to `RECORDED_MAX_BYTES` of different storages; later launches are recorded
    without.
    """
    kernel_type: Any = importlib.import_module("triton.runtime.jit").KernelInterface
    before, found, copies = kernel_type.__getitem__, [], Memory()

    def recording(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **fixed: Any) -> Any:
            function = getattr(kernel, "fn", kernel)  # a peer's may be wrapped
            dtypes = tuple(
                str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else "-"
                for x in args if x is None or isinstance(x, Tensor)
            )
            new = Launch(getattr(function, "__name__", str(kernel)), getattr(function, "__module__", ""), grid, fixed,
                         dtypes)
            if memory and copies.size < RECORDED_MAX_BYTES:
                new = new._replace(before=tuple(map(copies.copy, args)))
            at = len(found)
            found.append(new)  # now, because a launch may not return
            compiled = before(kernel, grid)(*args, **fixed) if run else None
            found[at] = new = new._replace(compiled=compiled)
            if new.before is not None:
                found[at] = new._replace(after=tuple(map(copies.copy, args)))  # copying waits for the device
            return compiled

        return launch

    kernel_type.__getitem__ = recording
    try:
        yield found
    finally:
        kernel_type.__getitem__ = before


def chunks(found: Iterable[Launch]) -> set[int]:
    """Return the tokens per chunk and tile of the launches."""
    values = {launch.options.get(name) for launch in found for name in LENGTHS}
    return {value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 1}


def save_memory(found: Iterable[Launch], path: Path) -> None:
    records = []
    for each in found:
        if each.before is not None:
            after = [] if each.after is None else [[*each.after]]
            records.append((each.name, each.module, each.grid, [*each.before], each.options, *after))
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        pickle.dump(records, file, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[arg-type]


def load_memory(path: Path) -> list[tuple[Any, ...]]:
    """Read a file of `save_memory`. It is a pickle: read only files that you made."""
    with gzip.open(path, "rb") as file:
        return [*pickle.load(file)]  # type: ignore[arg-type]


def tensor_of(copy: tuple[Any, ...]) -> Any:
    """Return the argument of which this is a copy, on the CPU."""
    if copy[0] == "V":
        return copy[1]
    _, dtype, shape, stride, offset, flat = copy
    storage = torch.from_numpy(np.array(flat)).untyped_storage()
    return torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch."))).set_(storage, offset, shape, stride)


def save_code(found: Iterable[Launch], folder: Path) -> None:
    """Write the compiled code of each kernel, and how it was compiled. Interpreted kernels have none."""
    for launch in found:
        code = getattr(launch.compiled, "asm", None)
        if not code:
            continue
        stem = f"{launch.name}-{hashlib.sha1(str(launch).encode()).hexdigest()[:8]}"
        if (folder / f"{stem}.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for mode in MODES:
            if mode in code:
                text = code[mode]
                (folder / f"{stem}.{mode}").write_bytes(text if isinstance(text, bytes) else text.encode())
        about = {"launch": str(launch), "metadata": getattr(launch.compiled, "metadata", None)}
        (folder / f"{stem}.json").write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")


def save(found: list[Launch], folder: Path, name: str) -> int:
    """Write the code, and the memory if it was recorded, to a subfolder with this name. Return the bytes of the memory.
    """
    inside = folder / re.sub(r"[^\w.]+", "-", name).strip("-")[-120:]
    save_code(found, inside)
    if all(each.before is None for each in found):
        return 0
    save_memory(found, inside / "launches.pkl.gz")
    return (inside / "launches.pkl.gz").stat().st_size


def pack(folder: Path, archive: Path, most: int = ARCHIVE) -> list[str]:
    """Write the files of a folder to a tar archive, code first and small files before large ones, up to `most` bytes.

    Returns the names of the files that did not fit.
    """
    files = sorted((path for path in folder.rglob("*") if path.is_file()),
                   key=lambda path: (path.name.endswith(".pkl.gz"), path.stat().st_size))
    left = []
    with archive.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz") as out:
        for path in files:
            if file.tell() + path.stat().st_size > most:
                left.append(str(path.relative_to(folder)))
            else:
                out.add(path, str(path.relative_to(folder)))
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack what was saved of failing launches into one file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    if options.folder.is_dir() and any(options.folder.iterdir()):
        left = pack(options.folder, options.archive)
        print(f"{options.archive}" + (f"; too large: {', '.join(left)}" if left else ""))


if __name__ == "__main__":
    main()
