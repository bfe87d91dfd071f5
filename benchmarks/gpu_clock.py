"""Milliseconds of calls on a device, and the lower bounds that `gpu.py` compares them with."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_cases import Call, Case, Leaves, Shape
from gpu_checks import tensors
from gpu_page import OURS, first_line
from launches import launches
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

AS_TORCH = "its torch implementation"
EXPS = 16 * 1.98e9  # special functions per second and multiprocessor of an H100 or H200: 16 per clock
LONGEST = 250.0  # milliseconds of a pause


class Timing(NamedTuple):
    ms: float
    late: bool  # the pause ended before all calls were queued, so the figure may include time in Python


class Clock:
    """Measures the milliseconds of a call on the device, or on a CPU (for rehearsals)."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.other = torch.randn(1 << 26, device=device) if self.cuda else torch.empty(0)  # 256 MB
        self.cycles = max(self._cycles() for _ in range(3)) if self.cuda else 0.0

    def _cycles(self) -> float:
        """Return the cycles of a millisecond. The caller takes the maximum, since clock rates rise under load."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            self.other.sum()
        start.record()
        torch.cuda._sleep(4_000_000)
        end.record()
        torch.cuda.synchronize()
        return 4e6 / start.elapsed_time(end)

    def __call__(self, call: Callable[[], Any]) -> Timing:
        if not self.cuda:
            start = time.perf_counter()
            call()
            return Timing(1e3 * (time.perf_counter() - start), False)
        queueing = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            queueing.append(1e3 * (time.perf_counter() - start))
        pause = min(LONGEST, 2 * max(queueing[1:]) + 0.1)
        first = self._events(call, 3, pause).ms
        return self._events(call, max(5, min(50, int(60 / max(first, 1e-3)))), pause)

    def _events(self, call: Callable[[], Any], times: int, pause: float) -> Timing:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        late = 0
        for start, end in pairs:
            self.other.sum()  # reading leaves nothing to be written back while the call is timed
            torch.cuda._sleep(int(pause * self.cycles))
            start.record()
            call()
            end.record()
            late += start.query()
        torch.cuda.synchronize()
        return Timing(statistics.median(start.elapsed_time(end) for start, end in pairs), 2 * late > times)


def machine(device: str) -> Iterator[dict[str, Any]]:
    """Return the device's name, its copy bandwidth, and its bfloat16 multiply-accumulates per second."""
    clock = Clock(device)
    numbers = 1 << (29 if clock.cuda else 16)
    a = torch.randn(numbers, dtype=torch.bfloat16, device=device)  # zeros would be faster: they take less power
    b = torch.empty_like(a)
    copy = 4 * numbers / (clock(lambda: b.copy_(a)).ms / 1e3)
    size = 8192 if clock.cuda else 64
    a = torch.randn(size, size, device=device).bfloat16()
    product = size**3 / (clock(lambda: a @ a).ms / 1e3)
    processors = torch.cuda.get_device_properties(0).multi_processor_count if clock.cuda else 1
    limits = {"copy_bytes_per_s": copy, "bf16_products_per_s": product, "special_functions_per_s": EXPS * processors}
    yield {"device": torch.cuda.get_device_name() if clock.cuda else "CPU", "ceilings": limits}


def yardstick(case: Case, shape: Shape, limits: dict[str, float]) -> tuple[float, float]:
    """Return lower bounds of forward and of both passes, in ms: the time of the traffic or of the arithmetic."""
    out = []
    for at in (0, 1):
        each = [case.traffic(shape)[at] / limits["copy_bytes_per_s"]]
        if case.exps:
            each.append(case.exps(shape)[at] / limits["special_functions_per_s"])
        if case.products:
            each.append(case.products(shape)[at] / limits["bf16_products_per_s"])
        out.append(1e3 * max(each))
    return out[0], out[0] + out[1]


def both_passes(call: Call, leaves: Leaves, cotangents: list[Tensor]) -> None:
    torch.autograd.grad(tensors(call(leaves)), [*leaves.values()], cotangents, allow_unused=True)


class Candidate(NamedTuple):
    change: Callable[[Leaves], Leaves]
    call: Call


def timed(case: Case, given: Leaves, clock: Clock, candidates: dict[str, Candidate]) -> Iterator[dict[str, Any]]:
    """Yield one record per candidate, with medians of three turns (one in a rehearsal), or with its error."""
    ready: dict[str, tuple[Callable[[], Any], ...]] = {}
    runs: dict[str, list[list[Timing]]] = {}
    launched: dict[str, list[str]] = {}
    for turn in range(4 if clock.cuda else 2):
        for name, candidate in candidates.items():
            try:
                if turn == 0:
                    ready[name], launched[name] = _prepared(case, given, candidate)
                    runs[name] = [[] for _ in ready[name]]
                for at, run in enumerate(ready.get(name, ()) if turn else ()):
                    runs[name][at].append(clock(run))
            except Exception as error:  # reported in the table
                ready.pop(name, None)
                yield {"candidate": name, "left_out": first_line(error)}
    for name, passes in ready.items():
        record: dict[str, Any] = {"candidate": name, "left_out": None, "peak_mb": None}
        for field, turns in zip(("forward", "both"), runs[name], strict=False):
            record[f"{field}_ms"] = statistics.median(took.ms for took in turns)
            record[f"{field}_turns_ms"] = [took.ms for took in turns]
            record[f"{field}_late"] = any(took.late for took in turns)
        if name == OURS:
            record["launches"] = launched[name]
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes[-1]()
            record["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            with contextlib.suppress(RuntimeError):  # a profiler that does not work on this machine
                record["kernels"] = by_kernel(passes[-1])
        yield record


def by_kernel(run: Callable[[], Any], calls: int = 3) -> dict[str, list[float]]:
    """Return the launches and the milliseconds of each kernel per call, the most expensive first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    spent = [(e.self_device_time_total, e.key, e.count) for e in found.key_averages() if e.self_device_time_total]
    return {name: [count / calls, us / calls / 1e3] for us, name, count in sorted(spent, reverse=True)}


def _prepared(
    case: Case, given: Leaves, candidate: Candidate
) -> tuple[tuple[Callable[[], Any], ...], list[str]]:
    """Return the passes, which have run once, and the kernels that they launch."""
    leaves = {key: x.detach().clone() for key, x in candidate.change(given).items()}
    with launches() as found:
        passes = _passes(case, leaves, candidate.call)
    return passes, sorted({*map(str, found)})


def own_candidates(case: Case) -> dict[str, Candidate]:
    ours: Call = lambda x: case.ours(x, "triton")  # noqa: E731
    out = {OURS: Candidate(dict, ours)}
    return out | ({AS_TORCH: Candidate(dict, lambda x: case.ours(x, "torch"))} if case.has_torch else {})


def _passes(case: Case, leaves: Leaves, call: Call) -> tuple[Callable[[], Any], ...]:
    """Return the forward pass, and both passes together; each has run once."""
    leaves = {key: x.requires_grad_() for key, x in leaves.items()}
    cotangents = [torch.randn_like(x) for x in tensors(call(leaves))]
    alone = torch.no_grad()(lambda: call(leaves))
    alone()
    if case.forward_only:
        return (alone,)
    both_passes(call, leaves, cotangents)
    return alone, lambda: both_passes(call, leaves, cotangents)
