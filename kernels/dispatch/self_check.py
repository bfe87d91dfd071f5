"""Check a Triton implementation on this device before its first use there.

Compilers have made wrong kernels on new devices without an error (docs/decisions/0014). So before the first call that
launches kernels in a new way (tiles, warps, dtypes, options), a small example launches the same kernels in the same
way, with gradients, and is compared with the recurrence in float64.

The example runs in a process of its own. An illegal access or a hang there cannot harm the caller's CUDA context, and
the caller may be within a backward pass, a CUDA graph or a compiler. The result is kept in the cache folder for this
device, Triton and source; what may change until the next run (no memory left, no compiler) is kept by this process
only. SEQBLOCKS_SELF_CHECK=0 turns the check off.
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

from seqblocks.kernels.dispatch import cache as records
from seqblocks.kernels.dispatch.registry import implementation

VARIABLE = "SEQBLOCKS_SELF_CHECK"
DEVICE = "cuda"  # the interpreter, on the CPU, has no compiler to check
SECONDS = 300  # for one check: it compiles its kernels, which takes seconds, and runs them, which does not
MOST = 10_000  # calls of different sizes that are remembered at a time
# Relative to the largest value of a result: far above rounding, far below what a wrong sum gives.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Sizes for which launches are checked where those of the call are unknown, as in compiled code: the example's own,
# one long sequence, many sequences.
TYPICAL_SIZES: tuple[dict[str, int], ...] = (
    {}, {"batch": 1, "length": 1 << 20, "rows": 1 << 20}, {"batch": 1 << 14, "length": 1 << 12, "rows": 1 << 26}
)


class Call(NamedTuple):
    """What the launches of a call depend on.

    facts: those of the op; dtypes: of each input, None if it is absent; sizes: None if they are unknown.
    """

    op: str
    facts: dict[str, Any]
    dtypes: dict[str, torch.dtype | None] = {}  # noqa: RUF012  # never changed
    sizes: dict[str, int] | None = {}  # noqa: RUF012

    def all_sizes(self) -> tuple[dict[str, int], ...]:
        return TYPICAL_SIZES if self.sizes is None else (self.sizes,)


Finding = tuple[str, bool]  # what is wrong, "" for nothing; and whether another run would find the same

_faults: dict[Any, str] = {}  # by call: why the implementation must not be used, or ""
_faults_of_launches: dict[str, str] = {}  # by the key of a record
_lock = threading.Lock()


# ------------------------------------------------------------------------------
# In the process of the caller


def fault_of(call: Call) -> str:
    """Return why Triton must not be used for this call, or "". Makes the check if there is no record of it."""
    if os.environ.get(VARIABLE) == "0":
        return ""
    op, facts, dtypes, sizes = call
    known = (op, *facts.values(), *dtypes.values(), sizes is None, *(sizes or {}).values())
    if known not in _faults:
        if type(torch.empty(0)) is not Tensor:
            return ""  # a program is exported, which runs later, on whatever device
        if len(_faults) > MOST:
            _faults.clear()
        _faults[known] = _find_out(call)
    return _faults[known]


def forget() -> None:
    """Forget what this process knows; the cache folder stays as it is."""
    _faults.clear()
    _faults_of_launches.clear()


def _find_out(call: Call) -> str:
    key = key_of(call, *device_and_source(call.facts["index"]))
    with _lock:  # another thread may have the answer by then
        if key not in _faults_of_launches:
            fault = records.read(key)
            if fault is None:
                fault, lasting = run_in_subprocess(call)
                if lasting:
                    records.write(key, fault)
            _faults_of_launches[key] = fault
            if fault:
                warnings.warn(f"the Triton implementation of {call.op} is not used here: {fault}", stacklevel=3)
        return _faults_of_launches[key]


def key_of(call: Call, device: str, arch: str, triton: str, source: str) -> str:
    """Return what a check holds for, as JSON: calls with the same key launch the same kernels in the same way."""
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
    """Return device, architecture, version of Triton, and a digest of the files of all kernels."""
    import triton

    from seqblocks.kernels import triton_common

    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return torch.cuda.get_device_name(index), triton_common.arch_of(index), triton.__version__, digest


def run_in_subprocess(call: Call) -> Finding:
    """Make the check in a process of its own."""
    module = implementation(call.op, "triton").run.__module__  # which registers the op
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()"], input=pickle.dumps((module, call)),
            capture_output=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": path, VARIABLE: "0"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its check did not end within {SECONDS} s", True
    except Exception as error:
        return f"its check cannot be started ({_summary(error)})", False
    if done.returncode == 0:
        fault, lasting = json.loads(done.stdout)
        return fault, lasting
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    status = ": ".join([f"exit status {done.returncode}", *last])[:200]
    if not done.stdout:  # it did not come to the example
        return f"its check cannot be started ({status})", False
    # SIGINT, SIGKILL and SIGTERM come from outside: from the user, or from a system without memory
    return f"its check crashes ({status})", done.returncode not in (-2, -9, -15)


# ------------------------------------------------------------------------------
# In the process of the check


def main() -> None:
    """Make the check that standard input describes, and print its finding."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no finding
    module, call = pickle.loads(sys.stdin.buffer.read())
    importlib.import_module(module)
    if call.facts["device"] == "cuda":  # tests have others
        torch.cuda.set_device(call.facts["index"])
    print(file=output, flush=True)  # a crash from here on is a fault of the kernels
    json.dump(check(call), output)
    output.flush()


def check(call: Call) -> Finding:
    """Compare the Triton implementation with the definition, on the example of the op."""
    function, tensors, options = example_for(call)
    tolerance = max(TOLERANCES.get(x.dtype, 0.0) for x in tensors.values())
    try:
        expected = _results(function, {name: x.double() for name, x in tensors.items()}, options, "reference")
    except Exception as error:
        return f"its definition cannot be computed here ({_summary(error)})", False
    try:
        differences = (_difference(found, expected, tolerance) for found in results(call, function, tensors, options))
        return next(filter(None, differences), ""), True
    except Exception as error:
        lost = _device_is_lost()
        return f"it {'crashes' if lost else 'does not run'} ({_summary(error)})", lost


def example_for(call: Call) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]:
    """Return the example with the dtypes of the call, on its device, without the inputs that the call leaves out."""
    example: Any = implementation(call.op, "triton").example
    function, tensors, options = example(**call.facts)
    general, device = call.facts.get("dtype", torch.float32), call.facts["device"]
    dtypes = {name: call.dtypes.get(name, general) for name in tensors}
    present = {name: x.to(device, dtypes[name]) for name, x in tensors.items() if dtypes[name] is not None}
    return function, present, options


def results(
    call: Call, function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any]
) -> Iterator[dict[str, Tensor]]:
    """Yield results of the Triton implementation, with and without gradients, for each size the call may have."""
    for sizes in call.all_sizes():
        for grad in (True, False):
            with launched_for(**sizes), torch.set_grad_enabled(grad):
                found = _results(function, tensors, options, "triton")
            yield found


def _results(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], backend: str
) -> dict[str, Tensor]:
    """Outputs by name, and gradients where they are enabled."""
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
        scale, off = (t.abs().max().item() if t.numel() else 0.0 for t in (expected[name], x.double() - expected[name]))
        if not off <= tolerance * scale + 1e-30:
            return f"its {name} is off by {off:.2g} on an example whose largest value is {scale:.2g}"
    return ""


def _device_is_lost() -> bool:
    """Whether the device is of no use to this process any more, as after an illegal access."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return False
    except Exception:
        return True


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


# ------------------------------------------------------------------------------
# For the files of kernels, and their examples

_sizes: dict[str, int] = {}


def launch_size(name: str, size: int) -> int:
    """Return the size ("batch", "length", …) that launches are chosen for.

    It is the call's own, except in a check, whose small example is launched like the call that it represents.
    """
    return _sizes.get(name, size)


@contextlib.contextmanager
def launched_for(**sizes: int) -> Iterator[None]:
    """Choose launches as for a call of these sizes. For all threads: backward passes have their own."""
    global _sizes
    before, _sizes = _sizes, sizes
    try:
        yield
    finally:
        _sizes = before


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers at each call, whatever the caller's generator, device and dtype."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)


def few_of(width: int, tile: int) -> int:
    """Return a small width with the remainder of this one, for kernels that take `tile` channels at a time."""
    return width if width <= 3 * tile else 2 * tile + (width - 1) % tile + 1
