"""Run calls of kernels in the interpreter, and compare outputs, last states and all gradients with the definition.

The public function is called with backend="triton", so that the code that launches kernels runs too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import self_check
from tests.ptx.dtypes import Fault
from tests.ptx.execute import Settings
from tests.ptx.triton_launch import Record, simulated

Call = tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]  # a function, its tensors, other arguments
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative error of a rounding
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then Triton's interpreter runs the kernels instead
if INTERPRETED:
    importlib.import_module("tests.kernels.interpreter")  # which makes up for bfloat16 and tf32


@dataclass(frozen=True)
class Case:
    """A call and how it is checked.

    dots: whether operands of products are rounded to the inputs' dtype; otherwise all sums are in float32.
    length: how many numbers are summed, by default the tokens. sizes: selects the launches of a call of these sizes.
    accepted: parts of notes that are known to be harmless.
    """

    name: str
    make: Callable[[], Call]
    dots: bool = False
    length: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    gradients: bool = True
    context: Callable[[], Any] = contextlib.nullcontext
    slow: bool = False  # takes minutes
    accepted: tuple[str, ...] = ()


@dataclass
class Row:
    """The error of one result, relative to its largest value, and what is allowed."""

    result: str
    error: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclass
class Outcome:
    case: str
    arch: str
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    fault: str = ""
    seconds: float = 0.0
    record: Record = field(default_factory=Record)

    @property
    def verdict(self) -> str:
        if self.fault:
            return "FAULT"
        return "WRONG" if any(row.wrong for row in self.rows) else "noted" if self.notes else "ok"

    def line(self) -> str:
        worst = max(self.rows, key=lambda row: row.error / row.allowed if row.error == row.error else float("inf"),
                    default=Row("-", 0.0, 1.0))
        steps = sum(self.record.steps.values())
        return (f"{self.case:<42} {self.arch} {self.verdict:<5}  worst {worst.result:<12} {worst.error:.1e} of "
                f"{worst.allowed:.1e}  {len(self.rows)} results, {steps:>8} steps, {self.seconds:.0f} s")

    def as_dict(self) -> dict[str, Any]:
        """Return what can be written as JSON."""
        rows = [(row.result, row.error, row.allowed) for row in self.rows]
        return {
            "case": self.case, "arch": self.arch, "verdict": self.verdict, "rows": rows, "notes": self.notes,
            "fault": self.fault, "seconds": self.seconds, "launches": self.record.launches,
        }

    def details(self) -> list[str]:
        """Return what is wrong, a line each."""
        wrong = [f"{row.result}: {row.error:.1e} of {row.allowed:.1e}" for row in self.rows if row.wrong]
        notes = [f"{count} x {text}" for text, count in sorted(self.notes.items(), key=lambda x: -x[1])]
        return [*filter(None, [self.fault]), *wrong, *notes[:6]]


def tolerance(dots: bool, result: torch.dtype, operands: torch.dtype, length: int) -> float:
    """Return the error that a result may have, relative to its largest value.

    Six roundings of operands where products round them; otherwise one rounding of the result, and of each term of a sum
    in float32, with 16 further operations around it.
    """
    if dots and operands != torch.float32:
        return 6 * UNIT[operands]
    return max(1.02 * UNIT[result] if result != torch.float32 else 0.0, (16 + length) * 2.0**-23)


def results_of(out: Any) -> dict[str, Tensor]:
    """Return the output and the states of a call by name."""
    first, *rest = [out] if isinstance(out, Tensor) else out
    states = rest[0] if rest and isinstance(rest[0], tuple) else rest
    found = {"y": first, **{f"state {at}": x for at, x in enumerate(states)}}
    return {name: x for name, x in found.items() if x is not None}


def run(case: Case, arch: str, settings: Settings) -> Outcome:
    """Run one case. What goes wrong is in the outcome; nothing is raised."""
    outcome, start = Outcome(case.name, arch), time.monotonic()
    torch.manual_seed(zlib.crc32(case.name.encode()))
    call, tensors, options = case.make()
    floats = [x for x in tensors.values() if x.is_floating_point()]
    operands = max((x.dtype for x in floats), key=lambda dtype: UNIT[dtype])
    length = case.length or max(x.shape[1] if x.dim() > 2 else 1 for x in tensors.values())

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(case.gradients) if x.is_floating_point() else x

    given = {name: leaf(x) for name, x in tensors.items()}
    exact = {name: leaf(x.double().contiguous()) if x.is_floating_point() else x for name, x in tensors.items()}
    expected = results_of(call(**exact, **options, backend="reference"))
    weights = {name: torch.randn_like(x.float()).to(operands) for name, x in expected.items()}

    def gradients(found: dict[str, Tensor], leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        total = torch.stack([(x.to(dtype) * weights[name].to(dtype)).sum() for name, x in found.items()]).sum()
        return dict(zip(wanted, torch.autograd.grad(total, [*wanted.values()], allow_unused=True), strict=True))

    def compare(name: str, found: Tensor, right: Tensor) -> None:
        gap, most = (found.detach().double() - right.detach()).abs().max().item(), right.detach().abs().max().item()
        error = gap / max(most, 1e-30) if gap == gap else float("nan")
        outcome.rows.append(Row(name, error, tolerance(case.dots, found.dtype, operands, length)))

    right = gradients(expected, exact, torch.float64) if case.gradients else {}
    simulation = contextlib.nullcontext(outcome.record) if INTERPRETED else simulated(arch, settings)
    with simulation as outcome.record:
        try:
            with self_check.launched_for(**case.sizes), torch.set_grad_enabled(case.gradients), \
                    torch.autograd.set_multithreading_enabled(False), case.context():
                found = results_of(call(**given, **options, backend="triton"))
                for name, x in expected.items():
                    compare(name, found[name], x)
                for name, x in (gradients(found, given, torch.float32) if case.gradients else {}).items():
                    if right[name] is not None:
                        compare(f"d{name}", x, right[name])
        except Fault as fault:
            outcome.fault = str(fault)
        except Exception as error:
            outcome.fault = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            traceback.print_exc()
    outcome.notes = {
        text: count for text, count in outcome.record.notes.items() if not any(part in text for part in case.accepted)
    }
    outcome.seconds = time.monotonic() - start
    return outcome
