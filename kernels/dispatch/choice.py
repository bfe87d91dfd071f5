"""Choose which implementation of a kernel runs, and report why.

An op ("mlstm") has up to three implementations with one signature: "triton", "torch" and "reference". Each reports
whether it supports given facts (device, dtype, widths, options), and why. The backend is taken from the first of these
that is set: `backend=` in the call, an enclosing `use_backend`, the environment variable SEQBLOCKS_BACKEND, "auto".
"auto" runs the first implementation that supports the call. An implementation requested by name either runs or raises
BackendError; another is never substituted.

To add an implementation, add a file: `load_implementations("mlstm")` imports `mlstm/triton.py`, `mlstm/torch.py` and
`mlstm/reference.py` (or packages with these names), which call `register`. They must be importable without a GPU.

A backward pass uses the implementation that its forward pass chose. Activation checkpointing repeats the forward pass,
on a GPU in another thread, where `use_backend` has no effect: pass `same_backend` to `torch.utils.checkpoint` as
`context_fn`. Compiled code follows a `use_backend` around its call; the environment variable is read at compile time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.errors import BackendError, BackendNameError, RunError
from seqblocks.kernels.dispatch import registry, self_check
from seqblocks.kernels.dispatch.compiled import constant, transformed
from seqblocks.kernels.dispatch.registry import IMPLEMENTATIONS, implementation

BACKENDS = ("auto", *IMPLEMENTATIONS)
VARIABLE = "SEQBLOCKS_BACKEND"

# The dictionary inside os.environ. If a variable is absent, `os.environ.get` takes longer than a small matrix product.
_environment: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_key = os.environ.encodekey(VARIABLE)

_local = threading.local()  # .backend: set by the innermost `use_backend`. Compilers guard on it in each thread.
_fallbacks: dict[str, dict[str, str]] = {}


def choose(
    op: str, backend: str | None = None, inputs: Mapping[str, Tensor | None] | None = None,
    sizes: Mapping[str, int] | None = None, *, may_be_complex: Collection[str] = (), **facts: Any,
) -> Callable[..., Any]:
    """Return the function to run for a call.

    inputs: the op's tensors by name, in the order of its arguments.
    sizes: those of "batch", "length" and "rows" that launches depend on. may_be_complex: names of inputs.
    facts: the keyword arguments of `can`, `tiles` and `example`; device and index are taken from the inputs.

    Raises RunError if the inputs are on several devices or others are complex, BackendError if the requested
    implementation cannot run.
    """
    name, dtypes = requested(backend), None
    facts["requested_backend"] = name
    if inputs is not None:
        check_real(op, inputs, may_be_complex)
        device = _common_device(op, inputs)
        facts["device"], facts["index"] = device.type, device.index
        if device.type == self_check.DEVICE:
            dtypes = {key: None if x is None else x.dtype for key, x in inputs.items()}
    reasons: dict[str, str] = {}
    for candidate in IMPLEMENTATIONS if name == "auto" else (name,):
        reason = _obstacle(op, candidate, facts, dtypes, sizes)
        if not reason:
            if name == "auto":
                _remember(op, reasons)
            return implementation(op, candidate).run
        reasons[candidate] = reason
    if name != "auto":
        raise BackendError(f"backend {name!r} cannot run {op}: {reasons[name]}")
    raise BackendError(f"no implementation of {op} can run: " + "; ".join(f"{key}: {x}" for key, x in reasons.items()))


def check_real(op: str, inputs: Mapping[str, Tensor | None], but: Collection[str] = ()) -> None:
    """Raise RunError for complex inputs other than `but`: conversions to float32 would drop their imaginary parts."""
    if found := [name for name, x in inputs.items() if x is not None and x.dtype.is_complex and name not in but]:
        raise RunError(f"{op} computes with real numbers; got complex {', '.join(found)}")


def _common_device(op: str, inputs: Mapping[str, Tensor | None]) -> torch.device:
    """Return the device that all inputs share.

    Kernels are launched on one device and would misinterpret pointers into the memory of another.
    """
    first, *others = [x.device for x in inputs.values() if x is not None]
    for device in others:
        if device != first:
            raise _device_error(op, {name: x.device for name, x in inputs.items() if x is not None})
    return first


def _device_error(op: str, devices: dict[str, torch.device]) -> RunError:
    names = {device: [name for name, other in devices.items() if other == device] for device in devices.values()}
    found = "; ".join(f"{', '.join(names[device])} on {device}" for device in names)
    return RunError(f"{op} needs its inputs on one device; got {found}. Move them with `.to(...)`.")


def _obstacle(
    op: str, name: str, facts: dict[str, Any], dtypes: dict[str, torch.dtype | None] | None,
    sizes: Mapping[str, int] | None,
) -> str:
    """Return why an implementation cannot run on these facts, or "".

    dtypes: of each input, on devices where kernels are checked before use, else None.
    """
    can, reason = _can(op, name, facts)
    if not can:
        return reason
    found = implementation(op, name)
    if found.by_hand and transformed():
        return "its derivative supports reverse mode only, not forward mode or torch.func transforms"
    if found.example is None or dtypes is None:
        return ""
    # Sizes may be symbolic during compilation.
    return _failed_check(op, facts, dtypes, None if torch.compiler.is_compiling() else dict(sizes or {}))


def _can(op: str, name: str, facts: dict[str, Any]) -> tuple[bool, str]:
    """Return whether an implementation can run on these facts, and the reason."""
    found = registry.OPS.get(op, {}).get(name)
    return found.can(**facts) if found else (False, f"{op} has no {name} implementation")


@constant
def _failed_check(
    op: str, facts: dict[str, Any], dtypes: dict[str, torch.dtype | None], sizes: dict[str, int] | None
) -> str:
    fault = self_check.fault_of(self_check.KernelCall(op, facts, dtypes, sizes))
    return fault and f"it failed its check on this device: {fault}"


@constant
def _remember(op: str, reasons: dict[str, str]) -> bool:
    _fallbacks[op] = reasons
    return True


# ------------------------------------------------------------------------------
# The requested backend


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Use this backend for kernels called without `backend=` within the context.

    Contexts nest. Other threads are not affected. Raises BackendNameError for an unknown name.
    """
    before = getattr(_local, "backend", None)
    try:  # A signal may interrupt the next line.
        _local.backend = _check_name(backend, "use_backend")
        yield
    finally:
        _local.backend = before


def same_backend() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return contexts that make a recomputed forward pass use the backend of the original one.

    Pass this function to `torch.utils.checkpoint.checkpoint` as `context_fn`.
    """
    return contextlib.nullcontext(), use_backend(requested())


def requested(backend: str | None = None) -> str:
    """Return the requested backend: the argument, else `use_backend`, else the environment variable, else "auto".

    Raises BackendNameError for a name that is not in BACKENDS.
    """
    if backend is not None:
        return _check_name(backend, "backend=")
    name: str = getattr(_local, "backend", None) or _from_environment()
    return name if name == "auto" else _check_name(name, VARIABLE)


@constant
def _from_environment() -> str:
    return os.environ[VARIABLE] if _environment.get(_key) else "auto"


def _check_name(backend: str, where: str) -> str:
    if backend not in BACKENDS:
        raise BackendNameError(f"{where}: unknown backend {backend!r}; choose from {', '.join(BACKENDS)}")
    return backend


def saves_launches(x: Tensor) -> bool:
    """Return whether to replace several torch operations by fewer kernel launches.

    True if x is on a GPU, or if Triton is requested by name (for tests). False during compilation, because a compiler
    fuses operations itself.
    """
    if torch.compiler.is_compiling():
        return False
    name = requested()
    return x.is_cuda if name == "auto" else name == "triton" and x.dtype != torch.float64


# ------------------------------------------------------------------------------
# Reports


class Verdict(NamedTuple):
    """Whether an implementation can run, and the reason."""

    implementation: str
    can: bool
    reason: str


def why(op: str, **facts: Any) -> list[Verdict]:
    """Return for each implementation, in the order of "auto", whether it can run on these facts.

    Runs no self-check of kernels.
    """
    return [Verdict(name, *_can(op, name, facts)) for name in IMPLEMENTATIONS]


def fallbacks() -> dict[str, dict[str, str]]:
    """Return the reasons why faster implementations did not run, by op and implementation.

    They refer to the last call of each op with backend "auto".
    """
    return {op: dict(reasons) for op, reasons in _fallbacks.items()}
