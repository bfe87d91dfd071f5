"""Check a Triton implementation on a device before its first use there.

Compilers have silently generated wrong kernels for new devices (docs/decisions/0014). Before the first call that
launches kernels in a new way (tiles, warps, dtypes, options), a small example therefore launches the same kernels in
the same way, with gradients, and its results are compared with the recurrence in float64.

The example runs in a subprocess, so that an illegal access or a hang does not harm the caller's CUDA context; the
caller may also be within a backward pass, a CUDA graph or a compiler. The result is stored in Triton's cache, next to
the compiled kernels, for this device, Triton version and source. Results that may differ in the next run (out of
memory, no compiler) are stored in this process only, except that a check that takes too long is not repeated.
SEQBLOCKS_SELF_CHECK=0 turns the check off.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.errors import user_stacklevel
from seqblocks.kernels.dispatch.registry import implementation

VARIABLE = "SEQBLOCKS_SELF_CHECK"
DEVICE = "cuda"  # Triton's interpreter, on the CPU, has no compiler to check.
RECORD = "self_check.json"  # name of the file that stores a result
SECONDS = 300  # time limit of one check, most of which is compiling the kernels
MAX_CALLS = 10_000  # calls of different sizes whose results this process stores
# Relative to the largest value of a result: far above rounding errors, far below the error of a wrong sum.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Sizes for which launches are checked if those of the call are unknown, as in compiled code: the sizes of the example,
# one long sequence, many sequences.
TYPICAL_SIZES: tuple[dict[str, int], ...] = (
    {}, {"batch": 1, "length": 1 << 20, "rows": 1 << 20}, {"batch": 1 << 14, "length": 1 << 12, "rows": 1 << 26}
)


class KernelCall(NamedTuple):
    """Everything on which the launches of a call depend.

    facts: as for `choose`; dtypes: of each input, None if it is absent; sizes: None if they are unknown.
    """

    op: str
    facts: dict[str, Any]
    dtypes: dict[str, torch.dtype | None] = {}  # noqa: RUF012  # never mutated
    sizes: dict[str, int] | None = {}  # noqa: RUF012

    def all_sizes(self) -> tuple[dict[str, int], ...]:
        return TYPICAL_SIZES if self.sizes is None else (self.sizes,)


Finding = tuple[str, bool]  # the fault, or ""; and whether another run would give the same result

_faults: dict[Any, str] = {}  # by call: why the implementation must not be used, or ""
_faults_of_launches: dict[str, str] = {}  # the same by cache key (`key_of`)
_lock = threading.Lock()


# ------------------------------------------------------------------------------
# In the calling process


def fault_of(call: KernelCall) -> str:
    """Return why Triton must not be used for this call, or "". Runs the check if no result is stored."""
    if os.environ.get(VARIABLE) == "0":
        return ""
    op, facts, dtypes, sizes = call
    known = (op, *facts.values(), *dtypes.values(), sizes is None, *(sizes or {}).values())
    fault = _faults.get(known)
    if fault is None:
        if type(torch.empty(0)) is not Tensor:
            return ""  # An exported program runs later, possibly on another device.
        if len(_faults) > MAX_CALLS:
            _faults.clear()
        fault = _faults[known] = _find_out(call)
    return fault


def forget() -> None:
    """Clear the results stored in this process. Triton's cache is not changed."""
    _faults.clear()
    _faults_of_launches.clear()


def _find_out(call: KernelCall) -> str:
    key = key_of(call, *device_and_source(call.facts["index"]))
    with _lock:  # Another thread may have stored the result in the meantime.
        if key not in _faults_of_launches:
            fault = read_record(key)
            if fault is None:
                fault, lasting = run_in_subprocess(call)
                if lasting:
                    write_record(key, fault)
            _faults_of_launches[key] = fault
            if fault:
                message = f"the Triton implementation of {call.op} is not used here: {fault}"
                warnings.warn(message, stacklevel=user_stacklevel())
        return _faults_of_launches[key]


def key_of(call: KernelCall, device: str, arch: str, triton: str, source: str) -> str:
    """Return the cache key of a check, as JSON: calls with the same key launch the same kernels in the same way."""
    tiles = implementation(call.op, "triton").tiles
    key = {
        "op": call.op, "device": device, "triton": triton, "source": source,
        "facts": {key: str(x) for key, x in call.facts.items() if key not in ("requested_backend", "index")},
        "dtypes": {key: str(x) for key, x in call.dtypes.items()},
        "launches": [tiles(arch, **{**call.facts, **sizes, "dtypes": call.dtypes}) for sizes in call.all_sizes()],
    }
    return json.dumps(key, sort_keys=True)


@cache
def device_and_source(index: int) -> tuple[str, str, str, str]:
    """Return device name, architecture, Triton version, and a digest of the source files of all kernels."""
    import triton

    from seqblocks.kernels import triton_common

    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return torch.cuda.get_device_name(index), triton_common.arch_of(index), triton.__version__, digest


def read_record(key: str) -> str | None:
    """Return the fault that an earlier process stored, or None. An unreadable record counts as absent."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        file = _records_of(key).get_file(RECORD)
        return None if file is None else str(json.loads(Path(file).read_text("utf-8"))["fault"])
    return None


def write_record(key: str, fault: str) -> None:
    """Store a fault for later processes. Warns if that is not possible."""
    try:
        _records_of(key).put(json.dumps({"key": key, "fault": fault}), RECORD, binary=False)
    except (OSError, RuntimeError) as error:
        message = f"the result of a check cannot be stored in Triton's cache: {error}"
        warnings.warn(message, stacklevel=user_stacklevel())


def _records_of(key: str) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


def run_in_subprocess(call: KernelCall) -> Finding:
    """Run the check in a subprocess."""
    module = implementation(call.op, "triton").run.__module__  # Importing this module registers the op.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()"], input=pickle.dumps((module, call)),
            capture_output=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": path, VARIABLE: "0"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its check did not finish within {SECONDS} s", True
    except Exception as error:
        return f"its check cannot be started ({_summary(error)})", False
    if done.returncode == 0:
        fault, lasting = json.loads(done.stdout)
        return fault, lasting
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    status = ": ".join([f"exit status {done.returncode}", *last])[:200]
    if not done.stdout:  # The subprocess ended before it reached the example.
        return f"its check cannot be started ({status})", False
    # SIGINT, SIGKILL and SIGTERM come from outside: from the user, or from the system when it is out of memory.
    return f"its check crashed ({status})", done.returncode not in (-2, -9, -15)


# ------------------------------------------------------------------------------
# In the subprocess


def main() -> None:
    """Run the check described on standard input, and print its finding as JSON."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output that libraries print must not mix with the finding.
    module, call = pickle.loads(sys.stdin.buffer.read())
    importlib.import_module(module)
    if call.facts["device"] == "cuda":  # Tests use other devices.
        torch.cuda.set_device(call.facts["index"])
    print(file=output, flush=True)  # From here on, a crash is a fault of the kernels.
    json.dump(check(call), output)
    output.flush()


def check(call: KernelCall) -> Finding:
    """Compare the Triton implementation with the reference in float64, on the example of the op."""
    function, tensors, options = example_for(call)
    tolerance = max(TOLERANCES.get(x.dtype, 0.0) for x in tensors.values())
    try:
        expected = _results(function, {name: x.double() for name, x in tensors.items()}, options, "reference")
    except Exception as error:
        return f"its reference cannot be computed here ({_summary(error)})", False
    try:
        differences = (_difference(found, expected, tolerance) for found in results(call))
        return next(filter(None, differences), ""), True
    except Exception as error:
        device_lost = _device_is_lost()
        return f"it {'crashes' if device_lost else 'does not run'} ({_summary(error)})", device_lost


def example_for(call: KernelCall) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]:
    """Return the example with the dtypes and device of the call, without the inputs that are absent in the call."""
    example: Any = implementation(call.op, "triton").example
    function, tensors, options = example(**call.facts)
    general, device = call.facts.get("dtype", torch.float32), call.facts["device"]
    dtypes = {name: call.dtypes.get(name, general) for name in tensors}
    present = {name: x.to(device, dtypes[name]) for name, x in tensors.items() if dtypes[name] is not None}
    return function, present, options


def results(call: KernelCall) -> Iterator[dict[str, Tensor]]:
    """Yield the results of the Triton implementation for each size the call may have, with and without gradients."""
    function, tensors, options = example_for(call)
    for sizes in call.all_sizes():
        for grad in (True, False):
            with launched_for(**sizes), torch.set_grad_enabled(grad):
                found = _results(function, tensors, options, "triton")
            yield found


def _results(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], backend: str
) -> dict[str, Tensor]:
    """Return outputs by name, and gradients if they are enabled."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves, **options, backend=backend)
    out = [out] if isinstance(out, Tensor) else [out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])]
    named = {"output" if at == 0 else f"last state, part {at},": x.detach() for at, x in enumerate(out)}
    if not torch.is_grad_enabled():
        return named
    loss = sum((x.double() * normal(*x.shape, seed=9 + at).to(x.device)).sum() for at, x in enumerate(out))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return named | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str:
    for name, x in found.items():
        scale, gap = (t.abs().max().item() if t.numel() else 0.0 for t in (expected[name], x.double() - expected[name]))
        if not gap <= tolerance * scale + 1e-30:
            return f"its {name} is off by {gap:.2g} on an example whose largest value is {scale:.2g}"
    return ""


def _device_is_lost() -> bool:
    """Return whether this process can no longer use the device, as after an illegal access."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return False
    except Exception:
        return True


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


# ------------------------------------------------------------------------------
# Helpers for kernels and their examples

_sizes: dict[str, int] = {}


def launch_size(name: str, size: int) -> int:
    """Return the size ("batch", "length", …) for which launches are chosen.

    This is the size passed in, except in a check, whose small example is launched like the call that it represents.
    """
    return _sizes.get(name, size)


@contextlib.contextmanager
def launched_for(**sizes: int) -> Iterator[None]:
    """Choose launches as for a call of these sizes.

    Applies to all threads, because backward passes run in threads of their own.
    """
    global _sizes
    before = _sizes
    try:  # A signal may interrupt the next line.
        _sizes = sizes
        yield
    finally:
        _sizes = before


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers, float32 on the CPU.

    They depend on shape and seed only, not on the caller's generator, default device or default dtype.
    """
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)


def few_heads(heads: int) -> int:
    """Return a small number of heads for which Triton compiles kernels like for this one.

    It compiles anew for an argument that is 1, and for a multiple of 16, as strides over heads may be.
    """
    return 1 if heads == 1 else 3 if heads % 2 else next(n for n in (16, 8, 4, 2) if heads % n == 0)


def few_of(width: int, tile: int) -> int:
    """Return a small width with the same remainder, for kernels that process `tile` channels at a time."""
    return width if width <= 3 * tile else 2 * tile + (width - 1) % tile + 1
