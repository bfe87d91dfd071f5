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

VARIABLE = "SEQBLOCKS_SELF_CHECK"
OFF = ("0", "off", "false", "no")
DEVICE = "cuda"  # the interpreter, on the CPU, has no compiler to check
SECONDS = 300  # for one check: it compiles its kernels, which takes seconds, and runs them, which does not
MOST = 10_000  # calls of different sizes that are remembered at a time
MARK = "seqblocks check: "  # begins the lines that a check prints; others are of libraries
# Relative to the largest value of a result: far above rounding, far below what a wrong sum gives.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Sizes for which launches are checked where those of the call are unknown, as in compiled code: the example's own,
# one long sequence, many sequences.
TYPICAL_SIZES: tuple[dict[str, int], ...] = (
    {}, {"batch": 1, "length": 1 << 20, "rows": 1 << 20}, {"batch": 1 << 14, "length": 1 << 12, "rows": 1 << 26}
)

Example = Callable[..., tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]]


class Call(NamedTuple):
    """What launches depend on besides the facts of the op: the dtype of each input (None: absent), and the sizes."""

    dtypes: tuple[tuple[str, torch.dtype | None], ...] = ()
    sizes: tuple[tuple[str, int], ...] | None = ()  # None: unknown

    def all_sizes(self) -> tuple[dict[str, int], ...]:
        return TYPICAL_SIZES if self.sizes is None else (dict(self.sizes),)


class Request(NamedTuple):
    """A check, as it is passed to its process. The module registers the op."""

    op: str
    module: str
    facts: dict[str, Any]
    call: Call


class Stopped(Exception):
    """A check that ended before its results could be compared: (why, whether it would end so again)."""


NO_CALL = Call()
_known: dict[Any, str] = {}  # by op, call and facts: "" if the implementation may be used, else why not
_found: dict[str, str] = {}  # the same by key
_lock = threading.Lock()


# ------------------------------------------------------------------------------
# In the process of the caller


def verdict(op: str, implementation: Any, facts: dict[str, Any], call: Call) -> str:
    """Why the implementation must not be used for this call, or "". Makes the check if there is no record of it."""
    if facts.get("device") != DEVICE or os.environ.get(VARIABLE, "").lower() in OFF:
        return ""
    about = (op, call, *facts.values())
    known = _known.get(about)
    if known is None:
        if type(torch.empty(0)) is not Tensor:
            return ""  # a program is exported, which runs later, on whatever device
        if len(_known) > MOST:
            _known.clear()
        known = _known[about] = _find_out(op, implementation, facts, call)
    return known


def forget() -> None:
    """Forget what this process knows; the cache folder stays as it is."""
    _known.clear()
    _found.clear()


def _find_out(op: str, implementation: Any, facts: dict[str, Any], call: Call) -> str:
    facts = {key: value for key, value in facts.items() if key != "asked"}
    facts["index"] = torch.cuda.current_device() if facts.get("index") is None else facts["index"]
    key = key_of(op, implementation, facts, call, *device_and_source(op, facts["index"]))
    text = json.dumps(key, sort_keys=True)
    with _lock:  # another thread may have the answer by then
        if text in _found:
            return _found[text]
        fault = records.read("checks", key)
        if not isinstance(fault, str):
            fault, lasting = run_in_subprocess(Request(op, implementation.run.__module__, facts, call))
            if lasting:
                records.write("checks", key, fault)
        _found[text] = fault
    if fault:
        warnings.warn(f"the Triton form of {op} is not used here: {fault}", stacklevel=3)
    return fault


def key_of(
    op: str, implementation: Any, facts: dict[str, Any], call: Call, device: str, arch: str, triton: str, source: str
) -> records.Key:
    """What a check holds for: calls with the same key launch the same kernels in the same way."""
    dtypes = dict(call.dtypes)
    launches = [implementation.tiles(arch, **{**facts, **sizes, "dtypes": dtypes}) for sizes in call.all_sizes()]
    values = {key: str(value) for key, value in facts.items() if key not in ("asked", "index")}
    return {
        "op": op, "facts": values, "dtypes": {key: str(value) for key, value in dtypes.items()}, "launches": launches,
        "device": device, "triton": triton, "source": source,
    }


@cache
def device_and_source(op: str, index: int) -> tuple[str, str, str, str]:
    """Device, architecture, Triton, and a digest of the files of the op's kernels. A record holds for these only."""
    from seqblocks.kernels import triton_common

    kernels = Path(__file__).parents[1]
    files = [kernels / "triton_common.py", *sorted((kernels / op).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    triton: Any = importlib.import_module("triton")
    return torch.cuda.get_device_name(index), triton_common.arch_of(index), triton.__version__, digest


def run_in_subprocess(request: Request) -> tuple[str, bool]:
    """What the check finds, "" if nothing is wrong, and whether later runs would find the same."""
    program = "from seqblocks.kernels.dispatch.self_check import main; main()"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], input=pickle.dumps(request), capture_output=True, timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": path, VARIABLE: "0"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its check did not end within {SECONDS} s", True
    except (OSError, ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
        return f"its check cannot be started ({_in_short(error)})", False
    said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(MARK)]
    if len(said) == 2:
        fault, lasting = json.loads(said[1].removeprefix(MARK))
        return fault, lasting
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    about = ": ".join([f"exit status {done.returncode}", *last])[:200]
    if not said:
        return f"its check cannot be started ({about})", False
    # SIGINT, SIGKILL and SIGTERM come from outside: from the user, or from a system without memory
    return f"its check crashes ({about})", done.returncode not in (-2, -9, -15)


# ------------------------------------------------------------------------------
# In the process of the check


def main() -> None:
    """Make the check that standard input asks for. Prints null when it starts, and [fault, lasting] when it ends."""
    request: Request = pickle.loads(sys.stdin.buffer.read())
    importlib.import_module(request.module)
    from seqblocks.kernels.dispatch import implementation

    if request.facts["device"] == "cuda":  # tests have others
        torch.cuda.set_device(request.facts["index"])
        torch.zeros(1, device="cuda")
    _say(None)  # a crash from here on is a fault of the kernels
    example: Any = implementation(request.op, "triton").example
    try:
        _say([fault(example, request.facts, request.call), True])
    except Stopped as error:
        _say(error.args)


def _say(what: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


def fault(example: Example, facts: dict[str, Any], call: Call = NO_CALL) -> str:
    """What the Triton implementation gets wrong on an example, or "". Raises Stopped if it cannot be compared."""
    function, tensors, options = example_for(example, facts, call)
    tolerance = max(TOLERANCES.get(x.dtype, 0.0) for x in tensors.values())
    try:
        wanted = _results(function, {name: x.double() for name, x in tensors.items()}, options, "reference")
    except Exception as error:
        raise Stopped(f"its definition cannot be computed here ({_in_short(error)})", False) from None
    try:
        for found in results(function, tensors, options, call):
            wrong = _difference(found, wanted, tolerance)
            if wrong:
                return wrong
    except Exception as error:
        if _device_is_lost():
            raise Stopped(f"it crashes ({_in_short(error)})", True) from None
        raise Stopped(f"it does not run ({_in_short(error)})", False) from None
    return ""


def example_for(
    example: Example, facts: dict[str, Any], call: Call
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]:
    """The example with the dtypes of the call, on its device. Inputs that the call leaves out are left out."""
    function, tensors, options = example(**facts)
    dtypes = dict(call.dtypes)
    general = facts.get("dtype", torch.float32)
    kept = {name: x for name, x in tensors.items() if dtypes.get(name, general) is not None}
    return function, {name: x.to(dtypes.get(name, general)).to(facts["device"]) for name, x in kept.items()}, options


def results(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], call: Call
) -> Iterator[dict[str, Tensor]]:
    """Results of the Triton implementation, with and without gradients, launched for each size the call may have."""
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


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> str:
    for name, x in found.items():
        expected = wanted[name]
        scale, off = (t.abs().max().item() if t.numel() else 0.0 for t in (expected, x.double() - expected))
        if not off <= tolerance * scale + 1e-30:
            return f"its {name} is off by {off:.2g} on an example whose largest value is {scale:.2g}"
    return ""


def _device_is_lost() -> bool:
    """After an illegal access, for example, the device is of no use to this process any more."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _in_short(error: Exception) -> str:
    about = "".join(str(error).strip().splitlines()[:1])[:200]
    return f"{type(error).__name__}: {about}" if about else type(error).__name__


# ------------------------------------------------------------------------------
# For the files of kernels, and their examples

_sizes: dict[str, int] = {}


def launch_size(name: str, size: int) -> int:
    """The size ("batch", "length", …) that launches are chosen for: the call's own, but that of another in a check,
    whose example is small and must be launched as the call that it stands for."""
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
    """The same normal numbers every time, without the caller's generator, device and dtype."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)


def few_of(width: int, tile: int) -> int:
    """A width like this one for kernels that take `tile` channels (a power of two) at a time: a few tiles at most, and
    as many channels in the last one."""
    return width if width <= 3 * tile else 2 * tile + (width - 1) % tile + 1
