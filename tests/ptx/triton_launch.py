"""Send the launches of Triton kernels to the interpreter, on CPU tensors.

`simulated(...)` is a context in which `kernel[grid](...)`, that is, `Kernel.__getitem__` of kernels/triton_common.py,
compiles the kernel to PTX as Triton's own launcher would for these arguments, and runs the PTX. Needs a process without
TRITON_INTERPRET. No ptxas runs; the kernels have a cache of their own, whose entries end as PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from seqblocks.kernels import triton_common
from tests.ptx.dtypes import Array
from tests.ptx.execute import Launch, Settings
from tests.ptx.memory import Memory

ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90}
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}
KERNELS = (
    "causal_conv", "centaurus", "head_norm", "headwise_linear", "linear_attention", "mlstm", "residual_norm",
    "selective_scan", "slstm",
)
CACHE = Path(tempfile.gettempdir(), f"seqblocks-ptx-triton-{triton.__version__}")
WORD = (1 << 64) - 1
Passed = list[tuple[str, Any]]  # the arguments that are passed to a compiled kernel, by name

for _name in KERNELS:  # They look up Triton when they are imported.
    importlib.import_module(f"seqblocks.kernels.{_name}.triton")


@dataclass
class Record:
    """What the launches of a case left: notes, and per kernel the number of launches and of instructions."""

    notes: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)


def specialised(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any], Passed]:
    """Return the source that Triton would compile for these arguments, its options, and the arguments that are passed.

    As in Triton's launcher, a 1 is a constant, and what a multiple of 16 (bytes, for a pointer) is known to be one.
    """
    constants = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    rest = {name: values.pop(name) for name in list(values) if name not in kernel.arg_names}
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    passed: Passed = []
    for at, name in enumerate(kernel.arg_names):
        x = values[name]
        if name in constants or x is None or (type(x) is int and x == 1 and name not in general):
            signature[name], fixed[(at,)] = "constexpr", x
            continue
        passed.append((name, x))
        if isinstance(x, Tensor):
            signature[name], multiple = "*" + TYPES[x.dtype], x.storage_offset() * x.element_size() % 16 == 0
        elif isinstance(x, float):
            signature[name], multiple = "fp32", False
        else:
            signature[name] = "i32" if -(1 << 31) <= x < 1 << 31 else "i64"
            multiple = x % 16 == 0 and name not in general
        if multiple:
            attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, fixed, attributes), rest, passed


def compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], arch: str) -> tuple[Any, Passed]:
    """Return the kernel, compiled to PTX, and the arguments that are passed to it as (name, value)."""
    source, rest, passed = specialised(kernel, arguments, options)
    target = GPUTarget("cuda", ARCHITECTURES[arch], 32)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=os.environ.get("TRITON_CACHE_DIR", str(CACHE))), \
            mock.patch.object(nvidia.CUDABackend, "make_cubin", return_value=b"none"):
        return triton.compile(source, target=target, options=rest), passed


class Fresh:
    """The memory that an op requested without values, and which of its bytes nothing has written.

    It is filled with 0xFF (NaN, -1), as far as the op uses the functions of torch below.
    """

    FUNCTIONS = ((torch.Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty"))

    def __init__(self) -> None:
        self.held: dict[int, tuple[Any, Array]] = {}  # the storages, which have to stay alive

    def of(self, storage: Any) -> Array | None:
        held = self.held.get(storage.data_ptr())
        return held[1] if held is not None and held[1].size == storage.nbytes() else None

    def patches(self) -> Iterator[Any]:
        for place, name in self.FUNCTIONS:
            yield mock.patch.object(place, name, self._noting(getattr(place, name)))

    def _noting(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.device.type == "cpu" and type(x) is Tensor and x.untyped_storage().nbytes():
                storage = x.untyped_storage()
                bytes_of(storage)[:] = 0xFF
                self.held[storage.data_ptr()] = storage, np.ones(storage.nbytes(), bool)
            return x

        return made


def bytes_of(storage: Any) -> Array:
    """Return the memory of a storage as bytes."""
    if not storage.nbytes():
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))


def run(
    kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any], *, arch: str, settings: Settings,
    record: Record, fresh: Fresh,
) -> None:
    """Run one launch."""
    binary, passed = compiled(kernel, arguments, options, arch)
    memory, parameters = Memory(), []
    for name, x in passed:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            key = storage.data_ptr() if storage.nbytes() else name
            base = memory.add(key, bytes_of(storage), f"{kernel.__name__}({name})", fresh.of(storage))
            parameters.append(base + int(x.storage_offset()) * x.element_size())
        elif isinstance(x, float):
            parameters.append(int(np.float32(x).view(np.uint32)))
        else:
            parameters.append(int(x) & WORD)
    parameters += [0, 0]  # Triton's own scratch memory, which these kernels do not use
    launch = Launch(binary.asm["ptx"], grid if isinstance(grid, tuple) else (grid,), parameters, memory,
                    binary.metadata.shared, settings, record.notes)
    record.launches[kernel.__name__] += 1
    record.steps[kernel.__name__] += launch.run()


@contextlib.contextmanager
def simulated(arch: str = "sm_80", settings: Settings | None = None) -> Iterator[Record]:
    """Run all launches in this context in the interpreter, as compiled for an architecture."""
    record, fresh, chosen = Record(), Fresh(), settings or Settings()

    def getitem(kernel: triton_common.Kernel, grid: Any) -> Callable[..., None]:
        shared = triton_common.launch_options()

        def launch(*arguments: Any, **options: Any) -> None:
            options.pop("launch_cooperative_grid", None)
            run(kernel.function, grid, arguments, {**options, **shared}, arch=arch, settings=chosen, record=record,
                fresh=fresh)

        return launch

    patches = [
        mock.patch.object(triton_common.Kernel, "__getitem__", getitem),
        mock.patch.object(triton_common, "arch", return_value=arch),
        mock.patch.object(triton_common, "INTERPRETED", True),  # allows Triton on the CPU
        *fresh.patches(),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield record
