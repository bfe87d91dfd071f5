"""Whether a Triton form computes on this device what its definition says: tried once, before it is first used.

Compilers have silently been wrong on new devices. So the first call of a form with other facts (dtype, widths, order)
runs a small example through it and through the recurrence in float64, gradients too, and keeps the answer in the user's
cache folder under names of device, Triton and source. A form that fails is passed over by `auto`, and refused where it
is asked for by name. What may pass (no memory left, no compiler installed) is known until the process ends, not kept.
SEQBLOCKS_SELF_CHECK=0 takes every form as it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import shelf

VARIABLE = "SEQBLOCKS_SELF_CHECK"
# far above rounding, far below what a wrong sum gives: relative to the largest value of a result
BARS = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}

Example = Callable[..., tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]]

# op and facts -> "" if it is sound, else what was wrong
_shelf = shelf.Shelf("checked.json", "checked kernels", lambda told: _told(told))
_passing: dict[str, str] = {}  # by the same names, of this process
_known: dict[tuple[Any, ...], str] = {}  # what either says, by the facts as they come
_lock = threading.Lock()
_here = threading.local()  # .checking in the thread that does it
OFF = ("0", "off", "false", "no")


def _told(record: Any) -> str:
    if not isinstance(record, str):
        raise ValueError(f"no check says {record!r}")
    return record


class Passing(Exception):
    """The check could not be made; the reason, if it lies with the Triton form."""


def verdict(op: str, example: Example, facts: dict[str, Any]) -> str:
    """Why the form must not be used, or "". Checks if nothing is known yet and something can be run now."""
    if facts.get("device") != "cuda" or os.environ.get(VARIABLE, "").lower() in OFF:
        return ""
    if getattr(_here, "checking", False):  # the example's own call
        return ""
    index = facts.get("index")
    index = torch.cuda.current_device() if index is None else index
    short = (op, index, os.environ.get("SEQBLOCKS_CACHE"), *facts.items())  # the long name takes long to make
    known = _known.get(short)
    if known is not None:
        return known
    about = [f"{key}={value}" for key, value in sorted(facts.items()) if key not in ("asked", "index")]
    name = "|".join([op, *about, *shelf.here(op, index)])
    known = _passing.get(name, _shelf.get(name))
    if known is None:
        # nor within a backward pass, which the check's own would wait for
        if torch._C._current_graph_task_id() != -1 or torch.cuda.is_current_stream_capturing() or _tracing():
            return ""
        known = _found_out(op, name, example, facts, index)
    _known[short] = known
    return known


def forget() -> None:
    """Ask the file again, and the device where that says nothing."""
    _shelf.forget()
    _passing.clear()
    _known.clear()


def _found_out(op: str, name: str, example: Example, facts: dict[str, Any], index: int) -> str:
    with _lock:
        known = _passing.get(name, _shelf.get(name))  # another thread may have found out meanwhile
        if known is not None:
            return known
        try:
            found = _alone(lambda: fault(example, facts), index)
            _shelf.keep(name, found)
        except Passing as error:
            found = _passing[name] = str(error)
    if found:
        warnings.warn(f"the Triton form of {op} is not used here: {found}", stacklevel=3)
    return found


def _alone(work: Callable[[], str], index: int) -> str:
    """In a thread of its own: the caller's autocast, hooks, default device and transforms are none of the check's."""
    results: list[Any] = []

    def run() -> None:
        _here.checking = True
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(index)
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    found: str = results[0]
    return found


def _tracing() -> bool:
    """While a program is exported, new tensors have no values. (Dynamo asks this outside of what it traces.)"""
    return type(torch.empty(0)) is not Tensor


def fault(example: Example, facts: dict[str, Any]) -> str:
    """What the Triton form gets wrong on an example of these facts, or "". Passing if that cannot be found out."""
    dtype, device = facts.get("dtype", torch.float32), facts["device"]
    with torch.inference_mode(False), torch.enable_grad():
        _asked_for.clear()
        function, tensors, options = example(**facts)
        rounded = {name: x.to(dtype).to(device) for name, x in tensors.items()}
        try:
            wanted = _results(function, {name: x.double() for name, x in rounded.items()}, options, "reference")
        except torch.OutOfMemoryError:  # nothing is known then, and the caller may still have room for his own
            raise Passing("") from None
        for filled in (False, True):
            if filled and not _asked_for:
                break  # the same launches again
            try:
                with as_if(filled):
                    found = _results(function, rounded, options, "triton")
            except Exception as error:  # the compiler gives up, the device has too little memory, …
                about = "".join(str(error).strip().splitlines()[:1])[:200]
                raise Passing(f"it does not run ({type(error).__name__}: {about})") from None
            wrong = _difference(found, wanted, BARS[dtype])
            if wrong:
                return wrong
    return ""


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor], bar: float) -> str:
    for name, expected in wanted.items():
        scale = expected.abs().max().item() if expected.numel() else 0.0
        off = (found[name].double() - expected).abs().max().item() if expected.numel() else 0.0
        if not off <= bar * scale + 1e-30:
            return f"its {name} is off by {off:.2g} on an example whose largest value is {scale:.2g}"
    return ""


_large = False
_asked_for: set[str] = set()  # not empty if a launch of the example hangs on the size of the call


def large() -> bool:
    """Whether kernels are to be launched as for a call that fills a device, however small this one is."""
    _asked_for.add("large")
    return _large


@contextlib.contextmanager
def as_if(large: bool) -> Iterator[None]:
    """For all threads, since backward passes have their own; others meanwhile get another launch that is as right."""
    global _large
    before, _large = _large, large
    try:
        yield
    finally:
        _large = before


def _results(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], backend: str
) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves, **options, backend=backend)
    out = [out] if isinstance(out, Tensor) else [out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])]
    loss = sum((x.double() * normal(*x.shape, seed=9 + at).to(x.device)).sum() for at, x in enumerate(out))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True)
    named = {"output" if at == 0 else f"last state, part {at},": x.detach() for at, x in enumerate(out)}
    return named | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers every time, and the caller's generator, device and dtype untouched."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)
