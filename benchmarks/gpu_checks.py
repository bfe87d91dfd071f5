"""Results of a case of `gpu.py` compared with the definition, or with torch in float32: how far off, and where."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from differences import differences
from gpu_cases import Call, Case, Leaves, Shape, draw_leaves, shortened
from launches import Launch, chunks, launches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch.self_check import launched_for

ALONE = " alone"  # outputs without gradients, for which kernels are launched differently
BARS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def results(call: Call, leaves: Leaves) -> dict[str, Tensor]:
    """Return outputs, and the gradient of each leaf for random cotangents that bfloat16 can represent."""
    out = tensors(call(leaves))
    named = {f"output {at}": x.detach() for at, x in enumerate(out)}
    if not out[0].requires_grad:
        return named
    loss = sum((x.double() * cotangent(x, at).double()).sum() for at, x in enumerate(out))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return named | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def cotangent(x: Tensor, at: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(1000 + at)
    return torch.randn(x.shape, generator=generator, device=x.device).bfloat16()


class Comparison:
    """Errors of results, and where those above the bar differ.

    launched: the launches that computed them, whose chunks are looked for in the positions of wrong numbers.
    """

    def __init__(self, bar: float, launched: Iterable[Launch] = ()) -> None:
        self.bar, self.launched = bar, launched
        self.errors: dict[str, float] = {}
        self.where: dict[str, str] = {}

    def add(self, name: str, found: Tensor, expected: Tensor) -> None:
        error = self.errors[name] = relative_error(found, expected)
        if not error <= self.bar:
            allowed = self.bar * expected.abs().max().item()
            text = differences(found, expected, allowed, chunks(self.launched))
            self.where[name] = text or f"no number differs by more than {allowed:.3g}, but the norm does"

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.errors.__getitem__)

    @property
    def error(self) -> float:
        return self.errors[self.worst]


def check(case: Case, dtype: torch.dtype, device: str, shape: Shape, launched: Iterable[Launch] = ()) -> Comparison:
    """Compare the Triton kernels with the definition, relative to each result's largest value; nan counts as infinite.

    The example is short, but uses the launch parameters of this shape.
    """
    exact = {name: x.double().requires_grad_(not case.forward_only)
             for name, x in example(case, dtype, device, shape).items()}
    expected = results(lambda x: case.ours(x, "reference"), exact)
    out = Comparison(BARS[dtype], launched)
    found = of_triton(case, dtype, device, shape)
    for name, x in expected.items():
        out.add(name, found[name], x)
    for name in (name for name in found if name not in expected):
        out.add(name, found[name], expected[name.removesuffix(ALONE)])
    return out


def example(case: Case, dtype: torch.dtype, device: str, shape: Shape) -> Leaves:
    return draw_leaves(case, shortened(case, shape), device, dtype)


def of_triton(case: Case, dtype: torch.dtype, device: str, shape: Shape) -> dict[str, Tensor]:
    """Return outputs and gradients of the example, launched as this shape is, and outputs without gradients."""
    given = {name: x.requires_grad_(not case.forward_only) for name, x in example(case, dtype, device, shape).items()}
    with launched_for(**launch_sizes(case, shape)):
        found = results(lambda x: case.ours(x, "triton"), given)
        return found | {f"output {at}{ALONE}": y for at, y in enumerate(without_gradients(case, given))}


class LaunchSizes(Exception):
    """Carries the sizes of a call out of it."""


def launch_sizes(case: Case, shape: Shape) -> dict[str, int]:
    """Return the sizes from which launch parameters of a call of this shape are chosen, without computing."""

    def note(op: str, backend: str | None, inputs: Any, sizes: dict[str, int] | None = None, **facts: Any) -> None:
        raise LaunchSizes(sizes or {})

    choose, dispatch.choose = dispatch.choose, note
    try:
        with FakeTensorMode():
            case.ours(draw_leaves(case, shape, "cpu", torch.float32), "reference")
    except LaunchSizes as error:
        sizes: dict[str, int] = error.args[0]
        return sizes
    finally:
        dispatch.choose = choose
    raise AssertionError(f"{case.about} calls no kernel")


def without_gradients(case: Case, leaves: Leaves) -> list[Tensor]:
    with torch.no_grad():
        return tensors(case.ours(leaves, "triton"))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the larger of the largest error relative to the largest value and the relative error of the norm."""
    off, expected = found.double() - expected.double(), expected.double()
    error = max((off.abs().max() / expected.abs().max().clamp(min=1e-30)).item(),
                (off.norm() / expected.norm().clamp(min=1e-30)).item())
    return error if math.isfinite(error) and torch.isfinite(off).all() else math.inf


def compare(case: Case, leaves: Leaves) -> Comparison:
    """Compare a timed Triton call with torch in float32.

    torch computes the first and the last sequence only. Cotangents of the other sequences are zero in the Triton call,
    so that gradients of shared leaves agree, and their own gradients must be zero.
    """
    batch = next(x.shape[0] for name, x in leaves.items() if name not in case.shared)
    rows = sorted({0, batch - 1})
    given = {name: x.detach().requires_grad_(not case.forward_only) for name, x in leaves.items()}
    part = {name: (x if name in case.shared else x[rows]).detach().float().requires_grad_(not case.forward_only)
            for name, x in leaves.items()}
    with launches() as launched:
        found, alone = tensors(case.ours(given, "triton")), without_gradients(case, given)
    expected = tensors(case.ours(part, "torch"))
    out = Comparison(BARS[found[0].dtype], launched)
    for at, y in enumerate(expected):
        out.add(f"output {at}", found[at][rows], y)
        out.add(f"output {at}{ALONE}", alone[at][rows], y)
    if not case.forward_only:
        narrow = [cotangent(y, at).to(x.dtype) for at, (x, y) in enumerate(zip(found, expected, strict=True))]
        wide = [torch.zeros_like(x) for x in found]
        for x, y in zip(wide, narrow, strict=True):
            x[rows] = y
        of_all = torch.autograd.grad(found, [*given.values()], wide)
        of_part = torch.autograd.grad(expected, [*part.values()], [y.float() for y in narrow])
        for name, x, y in zip(given, of_all, of_part, strict=True):
            out.add(f"gradient of {name}", x if name in case.shared else x[rows], y)
            if name not in case.shared and batch > 2 and x[1:-1].any():
                out.add(f"gradient of {name}, between", x[1:-1], torch.zeros_like(x[1:-1]))
    return out
