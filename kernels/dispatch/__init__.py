"""Choose which implementation of a kernel runs, and say why.

An op ("mlstm") has up to three implementations (forms) with one signature: "triton", "torch" and "reference". Each says
whether it can run on given facts (device, dtype, widths, options), and why not. The backend is the first of: `backend=`
in the call, `use_backend` around it, the environment variable SEQBLOCKS_BACKEND, "auto". `auto` runs the first form
that can. A form asked for by name runs or raises BackendError; nothing is substituted.

Add a form by adding a file: `load_forms("mlstm")` imports every `mlstm/<form>.py`, which calls `register`. The file
must be importable without a GPU.

A backward pass runs what its forward pass has chosen. Activation checkpointing runs the forward pass again, on a GPU in
another thread, where `use_backend` does not hold: give `torch.utils.checkpoint` the `context_fn` called `same_backend`.
Compiled code follows `use_backend` around its call; the environment variable is read when it is compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqblocks.errors import BackendError, RunError
from seqblocks.kernels.dispatch import self_check
from seqblocks.kernels.dispatch.compiled import constant

FORMS = ("triton", "torch", "reference")  # in the order of `auto`
BACKENDS = ("auto", *FORMS)
VARIABLE = "SEQBLOCKS_BACKEND"

Can = Callable[..., tuple[bool, str]]
Tiles = Callable[..., dict[str, dict[str, int]]]


class Form(NamedTuple):
    """One implementation of an op. run has the op's signature; can(**facts) returns (whether it can run, the reason).

    tiles(arch, **facts): how its own kernels are launched, {"forward": {"num_warps": 4, ...}, ...}.
    example(**facts): what is checked before its first use (self_check.py): the op's function, small tensors, options.
    by_hand: its derivative is written out, for autograd's reverse mode only.
    """

    run: Callable[..., Any]
    can: Can
    tiles: Tiles | None = None
    example: self_check.Example | None = None
    by_hand: bool = False


class Verdict(NamedTuple):
    """Whether a form can run, and the reason."""

    form: str
    can: bool
    reason: str


_ops: dict[str, dict[str, Form]] = {}
_fallbacks: dict[str, dict[str, str]] = {}
_local = threading.local()  # .backend: that of the innermost `use_backend`. Compilers watch it for each thread


def register(
    op: str, form: str, run: Callable[..., Any], can: Can, tiles: Tiles | None = None,
    example: self_check.Example | None = None, by_hand: bool = False,
) -> None:
    """Add (or replace) a form of an op. Raises ValueError for a form that is not in FORMS."""
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; choose from {', '.join(FORMS)}")
    _ops.setdefault(op, {})[form] = Form(run, can, tiles, example, by_hand or form == "triton")


def load_forms(op: str) -> None:
    """Import `<op>/<form>.py` of the kernels, for each form that has such a file."""
    for form in FORMS:
        name = f"seqblocks.kernels.{op}.{form}"
        if find_spec(name) is not None:
            importlib.import_module(name)


def ops() -> tuple[str, ...]:
    """Names of the registered ops, sorted."""
    return tuple(sorted(_ops))


def implementation(op: str, form: str) -> Form:
    """A registered form. Raises KeyError if there is none."""
    return _ops[op][form]


def form(op: str, name: str) -> Callable[..., Any]:
    """The function of a form, for forms that leave a case to another: Triton's leave empty tensors to torch's."""
    return _ops[op][name].run


def always(reason: str) -> Can:
    """A `can` for forms that run wherever torch does."""
    return lambda **facts: (True, reason)


def tiles(op: str, form: str, arch: str, **facts: Any) -> dict[str, dict[str, int]]:
    """How a form launches its kernels on an architecture ("sm_90"), by pass; empty where torch launches them."""
    of = _ops[op][form].tiles
    return of(arch, **facts) if of else {}


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within this context, kernels called without `backend=` use this one. Nests. Other threads are not affected."""
    before = getattr(_local, "backend", None)
    _local.backend = _check_name(backend, "use_backend")
    try:
        yield
    finally:
        _local.backend = before


def same_backend() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` that makes the recomputed forward pass use the backend of
    the original one."""
    return contextlib.nullcontext(), use_backend(requested())


def requested(backend: str | None = None) -> str:
    """The backend asked for: argument, else `use_backend`, else environment, else "auto".

    Raises BackendError for a name that is not in BACKENDS.
    """
    if backend is not None:
        return _check_name(backend, "backend=")
    return getattr(_local, "backend", None) or _check_name(_from_environment(), VARIABLE)


@constant
def _from_environment() -> str:
    return os.environ.get(VARIABLE) or "auto"


def _check_name(backend: str, where: str) -> str:
    if backend not in BACKENDS:
        raise BackendError(f"{where}: unknown backend {backend!r}; choose from {', '.join(BACKENDS)}")
    return backend


def why(op: str, **facts: Any) -> list[Verdict]:
    """For each form, in the order of `auto`: whether it can run on these facts, and the reason. Checks nothing."""
    return [Verdict(form, *_verdict(op, form, facts)) for form in FORMS]


def choose(
    op: str, backend: str | None = None, inputs: Mapping[str, Tensor | None] | None = None,
    sizes: Mapping[str, int] | None = None, **facts: Any,
) -> Callable[..., Any]:
    """The function to run for a call with these inputs (by name, in the order of the op's arguments).

    sizes: "batch", "length", "rows", as far as launches depend on them. facts: what `can`, `tiles` and `example` take;
    device and index come from the inputs, and dtype from the first unless it is given.

    Raises RunError if the inputs are on several devices, BackendError if the form asked for by name cannot run.
    """
    name = requested(backend)
    call: tuple[Any, ...] = ()  # a Call: compilers do not trace named tuples everywhere
    if inputs is not None:
        device = _common_device(op, inputs)
        facts["device"], facts["index"] = device.type, device.index
        if device.type == self_check.DEVICE:
            dtypes = tuple((key, None if x is None else x.dtype) for key, x in inputs.items())
            # while code is compiled, sizes may be symbols
            call = (dtypes, None if torch.compiler.is_compiling() else tuple((sizes or {}).items()))
    facts["asked"] = name
    reasons: dict[str, str] = {}
    for form in FORMS if name == "auto" else (name,):
        can, reason = _verdict(op, form, facts, call)
        if can:
            if name == "auto":
                _remember(op, reasons)
            return _ops[op][form].run
        reasons[form] = reason
    if name != "auto":
        raise BackendError(f"backend {name!r} cannot run {op}: {reasons[name]}")
    raise BackendError(f"no form of {op} can run: " + "; ".join(f"{form}: {why}" for form, why in reasons.items()))


def _common_device(op: str, inputs: Mapping[str, Tensor | None]) -> torch.device:
    """The device of all inputs: kernels are launched there, and would read another's memory as if it were there."""
    device: Any = None
    for x in inputs.values():
        if x is not None and x.device != device:
            if device is not None:
                raise _device_error(op, inputs)
            device = x.device
    return device


def _device_error(op: str, inputs: Mapping[str, Tensor | None]) -> RunError:
    devices: dict[torch.device, list[str]] = {}
    for name, x in inputs.items():
        if x is not None:
            devices.setdefault(x.device, []).append(name)
    found = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
    return RunError(f"{op} needs its inputs on one device; got {found}. Move them with `.to(...)`.")


def _verdict(op: str, form: str, facts: dict[str, Any], call: tuple[Any, ...] | None = None) -> tuple[bool, str]:
    """Whether a form can run, and the reason; without a call, nothing is probed or checked."""
    made = _ops[op].get(form) if op in _ops else None
    if made is None:
        return False, f"{op} has no {form} form" if op in _ops else f"there is no op called {op}"
    can, reason = made.can(**facts)
    if can and call is not None:
        if made.by_hand and _transformed():
            return False, "its derivative is for reverse mode alone, not for forward mode or transforms of torch.func"
        wrong = _fault(op, form, facts, call) if made.example else ""
        if wrong:
            return False, f"it failed its check on this device: {wrong}"
    return can, reason


@constant
def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@constant
def _fault(op: str, form: str, facts: dict[str, Any], call: tuple[Any, ...]) -> str:
    return self_check.verdict(op, _ops[op][form], facts, self_check.Call(*call))


@constant
def _remember(op: str, reasons: dict[str, str]) -> bool:
    _fallbacks[op] = reasons
    return True


def fallbacks() -> dict[str, dict[str, str]]:
    """By op, for the last call that left the choice to `auto`: the faster forms that did not run, and why."""
    return {op: dict(reasons) for op, reasons in _fallbacks.items()}


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """No autocast inside: gates, stabilisers and states keep their dtype, whatever the caller's context says."""
    if _autocast_available(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast narrows matrix products to here, if it does."""
    if _autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


@constant  # older compilers cannot look into it
def _autocast_available(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def computed_in(*inputs: Tensor | None) -> torch.dtype:
    """The dtype that forms are asked about: the first input's, but float64 if any is."""
    dtypes = [x.dtype for x in inputs if x is not None]
    return torch.float64 if torch.float64 in dtypes else dtypes[0]


def nothing(like: Tensor, *inputs: Tensor | None) -> Tensor:
    """`like`, which is empty, as a result of all inputs: then each has a gradient, of zeros."""
    return like * sum((x.sum() for x in inputs if x is not None), like.new_zeros(()))


def no_second_derivative(op: str, form: str) -> Callable[..., Any]:
    """A backward for the backward of a form whose first derivative is written by hand."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"the {form} form of {op} has no second derivative; use backend='reference' for it")

    return refuse
