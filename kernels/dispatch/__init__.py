"""Which form of a kernel runs, and why.

An *op* ("mlstm") has up to three *forms* of one signature: "triton", "torch" and "reference". Each form says
whether it can run on given *facts* (device, dtype, ...) and why not. The choice is made by, in this order: the
`backend=` argument, the context manager `use_backend`, the environment variable SEQBLOCKS_BACKEND, "auto".

`auto` never fails: it takes the first form that can run. A form asked for by name either runs or raises
BackendError; nothing is substituted silently.

A form is added by adding a file: `load_forms("mlstm")` imports every `mlstm/<form>.py` there is, and the file calls
`register`. Such a file must be importable without a GPU: it imports triton where it launches.

Compiled code takes the choice that holds while it is traced; `use_backend` goes around the call of a compiled
function, not inside it, and a change of the environment variable is not seen by what is compiled already.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from seqblocks.kernels.dispatch import self_check
from seqblocks.kernels.dispatch.compiled import constant
from seqblocks.kernels.dispatch.standing import Standing

FORMS = ("triton", "torch", "reference")  # the order in which `auto` asks
BACKENDS = ("auto", *FORMS)
VARIABLE = "SEQBLOCKS_BACKEND"

Can = Callable[..., tuple[bool, str]]


class Form(NamedTuple):
    """One way to compute an op: `can(**facts) -> (bool, reason)`, and `run`, which has the op's own signature.

    `tiles(arch, **facts)`, where kernels of our own are launched, says how: {"forward": {"num_warps": 4, ...}, ...}.
    `example(**facts)`, for those, is what is tried before they are used (see self_check.py): the op's function, small
    tensors, and options. `by_hand`: the derivative is written out, for autograd's reverse mode and nothing else.
    """

    run: Callable[..., Any]
    can: Can
    tiles: Callable[..., dict[str, dict[str, int]]] | None = None
    example: self_check.Example | None = None
    by_hand: bool = False


class Verdict(NamedTuple):
    """What `why` says of one form."""

    form: str
    can: bool
    reason: str


_ops: dict[str, dict[str, Form]] = {}
_asked: contextvars.ContextVar[str | None] = contextvars.ContextVar("seqblocks_backend", default=None)
_passed_over: dict[str, dict[str, str]] = {}
_open: Standing[str] = Standing()
_last_asked: str | None = None  # torch.compile cannot watch a context variable; it watches this and compiles again


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


def always(reason: str) -> Can:
    """A `can` for forms that run wherever torch does."""

    def can(**facts: Any) -> tuple[bool, str]:
        return True, reason

    return can


def register(
    op: str, form: str, run: Callable[..., Any], can: Can,
    tiles: Callable[..., dict[str, dict[str, int]]] | None = None, example: self_check.Example | None = None,
    by_hand: bool = False,
) -> None:
    """Add (or replace) a form of an op. ValueError for a form name that is not in FORMS."""
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; forms are {', '.join(FORMS)}")
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


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within this context, kernels called without `backend=` use this one. Nests; per thread and per task."""
    global _last_asked
    token = _asked.set(_check_name(backend, "use_backend"))
    try:
        with _open.hold(backend):
            _last_asked = _open.newest()
            yield
    finally:
        _asked.reset(token)
        _last_asked = _open.newest()


def requested(backend: str | None = None) -> str:
    """The backend asked for: argument, else context, else environment, else "auto".

    BackendError for a name that is none of BACKENDS.
    """
    if backend is not None:
        return _check_name(backend, "backend=")
    return _check_name(_surroundings(_last_asked), VARIABLE)


@constant
def _surroundings(watched: str | None) -> str:
    # threads of a backward pass, which may compute something again, have contexts of their own
    inherited = watched if torch._C._current_graph_task_id() != -1 else None
    return _asked.get() or inherited or os.environ.get(VARIABLE) or "auto"


def form(op: str, name: str) -> Callable[..., Any]:
    """The function of one form, for another that leaves it a case: the kernels leave empty tensors to torch."""
    return _ops[op][name].run


def computed_in(*inputs: torch.Tensor | None) -> torch.dtype:
    """The dtype that forms are asked about: the first input's, but float64 if any is."""
    dtypes = [x.dtype for x in inputs if x is not None]
    return torch.float64 if torch.float64 in dtypes else dtypes[0]


def nothing(like: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    """`like`, which is empty, as a result of all inputs: then each has a gradient, of zeros."""
    return like * sum((x.sum() for x in inputs if x is not None), like.new_zeros(()))


def no_second_derivative(op: str, form: str) -> Callable[..., Any]:
    """A backward for the backward of a form whose first derivative is written by hand."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"the {form} form of {op} has no second derivative; use backend='reference' for it")

    return refuse


def why(op: str, **facts: Any) -> list[Verdict]:
    """For each form, in the order `auto` asks: whether it can run on these facts, and the reason."""
    return [Verdict(form, *_verdict(op, form, facts)) for form in FORMS]


def tiles(op: str, form: str, arch: str, **facts: Any) -> dict[str, dict[str, int]]:
    """How a form launches its kernels on an architecture ("sm_90"), by pass; empty where torch launches them."""
    of = _ops[op][form].tiles
    return of(arch, **facts) if of else {}


def choose(op: str, backend: str | None = None, **facts: Any) -> Callable[..., Any]:
    """The function to run. BackendError if the form asked for by name cannot run; it says what is missing.

    A form's `can` is told the backend as the fact `asked`, so that it may probe the machine, or refuse `auto`. A device
    with an index is told as its kind, and the index apart.
    """
    name = requested(backend)
    facts = {**facts, "asked": name}
    if isinstance(facts.get("device"), torch.device):
        facts |= {"device": facts["device"].type, "index": facts["device"].index}
    if name != "auto":
        can, reason = _verdict(op, name, facts)
        if not can:
            raise _backend_error(f"backend {name!r} cannot run {op}: {reason}")
        return _ops[op][name].run
    passed_over: dict[str, str] = {}
    for form in FORMS:
        can, passed_over[form] = _verdict(op, form, facts)
        if can:
            del passed_over[form]
            _remember(op, passed_over)
            return _ops[op][form].run
    raise _backend_error(f"no form of {op} can run: " + "; ".join(f"{v.form}: {v.reason}" for v in why(op, **facts)))


def _verdict(op: str, form: str, facts: dict[str, Any]) -> tuple[bool, str]:
    if op not in _ops:
        return False, f"there is no op called {op}"
    if form not in _ops[op]:
        return False, f"{op} has no {form} form yet"
    can, reason = _ops[op][form].can(**facts)
    if can and facts.get("asked") and _ops[op][form].by_hand and _transformed():
        return False, "its derivative is for reverse mode alone, not for forward mode or transforms of torch.func"
    if can and facts.get("asked") and _ops[op][form].example:
        wrong = _fault(op, form, facts)
        if wrong:
            return False, f"it failed its check on this device: {wrong}"
    return can, reason


@constant
def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@constant
def _fault(op: str, form: str, facts: dict[str, Any]) -> str:
    example = _ops[op][form].example
    return self_check.verdict(op, example, facts) if example else ""


@constant
def _remember(op: str, passed_over: dict[str, str]) -> bool:
    _passed_over[op] = passed_over
    return True


def fallbacks() -> dict[str, dict[str, str]]:
    """By op, for the last call that left the choice to `auto`: the faster forms that it passed over, and why."""
    return {op: dict(reasons) for op, reasons in _passed_over.items()}


def _check_name(backend: str, where: str) -> str:
    if backend not in BACKENDS:
        raise _backend_error(f"{where}: unknown backend {backend!r}; choose from {', '.join(BACKENDS)}")
    return backend


def _backend_error(message: str) -> Exception:
    from seqblocks.errors import BackendError  # only when needed: kernels stand on nothing else of seqblocks

    return BackendError(message)
