"""Check every Triton kernel on a CUDA device, time it with other packages, and write a dated table.

    python benchmarks/gpu.py                      # check and time all, within --minutes (9); the table goes to --out
    python benchmarks/gpu.py --case mlstm         # one family
    python benchmarks/gpu.py --shapes 1           # only the first shape of each case: compiling takes most of the time

A table is never overwritten: its name contains the chosen cases, and a number if the file exists already.

Checks come first: outputs and every gradient against the recurrent definition in float64, at the widths of each timed
shape, on short sequences with the same launches, within 2e-2 of the largest value in bfloat16 (float32, 1e-4, comes
last). The timed calls are compared once more at their own shape, with the torch implementation in float32, in the first
and the last sequence.

For a wrong result the table says which numbers are wrong, and what their positions have in common. The folder
`--failures` then gets the compiled code of the case, and the memory before and after each of its launches
(launches.py), from which the launches can be repeated elsewhere.

Times are medians of the time on the device. Calls are queued after a pause twice as long as queueing takes, with a cold
second-level cache, so that neither Python nor the previous call counts; a star marks figures for which the pause was
too short. A profile of both passes, or of the forward pass where there is no other, says which kernels take the
time. They are compared with a lower bound, the larger of two times: that of the least traffic at this card's
measured copy bandwidth, and that of the arithmetic at its measured rates. The bound of the mLSTM is counted for chunks
of 64 tokens; an implementation with other chunks can be faster.

Other packages that can be imported are timed after ours (mlstm_kernels, flash-linear-attention, mamba-ssm,
causal-conv1d, flashrnn). Every check and every cell runs in a separate process, and several checks run at once, so that
kernels compile in parallel and one that breaks the device or hangs does not affect the others. Only torch and triton
are needed, so a checkout is sufficient. Checks, our times, the times of others and the checks in float32 have fixed
shares of the time (STAGES; `--stage` selects some), so that none is always cut off. `gpu.sh` in this folder calls this
script and the tests in the best order, and unpacks other packages:

    PYTHONPATH=. python benchmarks/gpu.py --out FOLDER

`--rehearse` runs small shapes on the CPU in Triton's interpreter: its figures have no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from children import Late, records
from common import versions, write
from differences import differences
from gpu_cases import CASES, FIRST, PEERS, Call, Case, Leaves, Peer, Shape, draw_leaves, shortened
from gpu_page import OURS, as_text, page
from launches import ARCHIVE, Launch, chunks, launches, save
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch.self_check import launched_for

AS_TORCH = "its torch implementation"
ALONE = " alone"  # outputs without gradients, for which kernels are launched differently
BARS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
EXPS = 16 * 1.98e9  # special functions per second and multiprocessor of an H100 or H200: 16 per clock
LONGEST = 250.0  # milliseconds of a pause
AT_ONCE = 12  # checks; the definition of the mLSTM needs 10 GB, of the others up to 3
# Shares of the time. A stage that ends sooner leaves its time to the next one.
STAGES = {"checks": 0.4, "ours": 0.25, "peers": 0.25, "float32": 0.1}


# --- checking -------------------------------------------------------------------------------------------------------


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


# --- timing ---------------------------------------------------------------------------------------------------------


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


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])[:200]}".rstrip(": ")


# --- jobs: each in a separate process --------------------------------------------------------------------------------


def check_job(key: str, shape: Shape, dtype: torch.dtype, device: str, failures: Path | None) -> Iterator[Any]:
    """Check a case. If it is wrong, the compiled code and the memory around its launches go to the folder `failures`.
    """
    case = CASES[key]
    name = f"{key} {as_text(shape)} {str(dtype).removeprefix('torch.')}"
    with launches() as launched:
        try:
            found = check(case, dtype, device, shape, launched)
        except Exception as error:  # reported in the table; other cases continue
            if failures:
                save(launched, failures, name)
            yield {"ok": False, "failed": first_line(error)}
            return
    ok = found.error <= BARS[dtype]
    yield {"ok": ok, "worst": found.worst, "where": found.where, "launches": sorted({*map(str, launched)})} | {
        what: max((e for n, e in found.errors.items() if n.startswith(what[:-1])), default=0.0)
        for what in ("outputs", "gradients")
    }
    for short in ({}, {"S": 528, "H": 1}, {"S": 272, "H": 1}) if failures and not ok else ():
        shorter = case._replace(short={**case.short, **(short if "H" in case.short else {})})
        with launches(memory=True) as launched, contextlib.suppress(Exception):
            of_triton(shorter, dtype, device, shape)
        if save(launched, failures, name) <= ARCHIVE:  # or the packed failures would not contain it
            break


def cell_job(key: str, shape: Shape, peer: str, device: str) -> Iterator[dict[str, Any]]:
    """Time one peer, or seqblocks (peer ""), whose results are also compared at this shape."""
    case, clock = CASES[key], Clock(device)
    dtype = torch.bfloat16 if clock.cuda else torch.float32
    given = draw_leaves(case, shape, device, dtype)
    if peer:
        of = case.peers[peer]
        for record in timed(case, given, clock, {peer: Candidate(of.change, of.call)}):
            yield record | ({} if record["left_out"] else distance_from_ours(case, of, given))
        return
    for record in timed(case, given, clock, own_candidates(case)):
        if record["candidate"] == OURS and not record["left_out"]:
            try:
                found = compare(case, given)
                ok = found.error <= BARS[dtype]
                record |= {"compared": found.error, "worst": found.worst, "ok": ok, "where": found.where}
            except torch.OutOfMemoryError:
                record["compared"] = None  # not enough memory to compare; the checks are sufficient
            except Exception as error:
                record |= {"compared": None, "ok": False, "worst": first_line(error)}
        yield record


def distance_from_ours(case: Case, peer: Peer, given: Leaves) -> dict[str, Any]:
    """Return how far a peer's output is from ours: a large distance means that it computes something else."""
    if peer.back is None:
        return {}
    try:
        with torch.no_grad():
            output = peer.back(peer.call(peer.change(given)))
            return {"compared": relative_error(output, tensors(case.ours(given, "triton"))[0])}
    except Exception as error:
        return {"compared": None, "worst": first_line(error)}


# --- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on a CUDA device.")
    parser.add_argument("--case", action="append", help="only cases whose names begin with this; may be repeated")
    parser.add_argument("--part", choices=["first", "rest"], help=f"only {', '.join(FIRST)}, or only the others")
    parser.add_argument("--stage", action="append", choices=[*STAGES], help="only these stages; may be repeated")
    parser.add_argument("--shapes", type=int, default=99, help="only the first shapes of each case")
    parser.add_argument("--failures", type=Path, help="folder for the code and launches of wrong checks (OUT/failures)")
    parser.add_argument("--tiny", action="store_true", help="only run each case once, at a tiny shape, in this process")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="number of checks at once")
    options = parser.parse_args()
    if not options.rehearse and not found_cuda():
        print("no CUDA device; --rehearse runs small shapes on the CPU", file=sys.stderr)
        return 2
    if options.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        print("--rehearse needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
        return 2
    chosen = [key for key in CASES if not options.case or any(key.startswith(word) for word in options.case)]
    if not chosen:
        print(f"unknown case; the cases are {', '.join(CASES)}", file=sys.stderr)
        return 2
    chosen = [key for key in chosen if not options.part or (key in FIRST) == (options.part == "first")]
    if not chosen:
        print(f"none of these cases is in --part {options.part}", file=sys.stderr)
        return 0
    device = "cpu" if options.rehearse else "cuda"
    os.environ["SEQBLOCKS_SELF_CHECK"] = "0"  # the checks here do the same
    if options.tiny:
        return tiny(chosen, device)
    results = run(chosen, device, options)
    if results["wrong"]:
        print(f"wrong: {', '.join(results['wrong'])}", file=sys.stderr)
    return 1 if results["wrong"] else 0


def tiny(chosen: list[str], device: str) -> int:
    """Run cases forward and backward at shapes so small that a tool can follow every access to memory."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for key in chosen:
        case = CASES[key]
        given = draw_leaves(case, rehearsed(case.shapes[0]), device, dtype)
        results(lambda x, case=case: case.ours(x, "triton"), {name: x.requires_grad_() for name, x in given.items()})
        print(f"ran {key}", flush=True)
    return 0


def found_cuda() -> bool:
    """Look for CUDA in a separate process: a process that has used CUDA cannot fork others that use it."""
    return any(found is True for _, found in records(lambda: [torch.cuda.is_available()], [()], 1, math.inf, 120.0))


def rehearsed(shape: Shape) -> Shape:
    limits = {"B": 2, "H": 4 if "M" in shape else 1, "N": 4, "M": 2, "D": 16}  # H: of Centaurus, features
    return {name: min(size, limits.get(name, 8)) for name, size in shape.items()}


def cells(chosen: list[str], device: str, most: int) -> list[tuple[str, Shape]]:
    """Return the cases and at most so many shapes of each: first the first shape of every case, then the second.

    A rehearsal uses one shape per case.
    """
    if device == "cpu":
        return [(key, rehearsed(CASES[key].shapes[0])) for key in chosen]
    found = [(at, key, shape) for key in chosen for at, shape in enumerate(CASES[key].shapes[:most])]
    return [(key, shape) for _, key, shape in sorted(found, key=lambda each: each[0])]


def is_missing(peer: Peer) -> bool:
    return bool(peer.module) and importlib.util.find_spec(peer.module) is None


class Run:
    """The results, written to files after each job, so that an interrupted run loses only one job."""

    def __init__(self, chosen: list[str], device: str, options: argparse.Namespace) -> None:
        self.chosen, self.device, self.options = chosen, device, options
        self.began = time.monotonic()
        self.end = self.began + 60 * options.minutes
        self.results: dict[str, Any] = {
            "device": "no device", "date": str(datetime.date.today()), "versions": versions(PEERS),
            "rehearsed": options.rehearse, "ceilings": None, "checks": [], "times": [],
            "left_out": [], "unchecked": [], "wrong": [],
        }

    def file(self) -> Path:
        self.options.out.mkdir(parents=True, exist_ok=True)
        words = [self.results["date"], self.results["device"], *(self.options.case or ())]
        words += [self.options.part or ""]
        stem = "-".join("".join(c if c.isalnum() or c == "_" else "-" for c in word.lower()) for word in words if word)
        numbered = (self.options.out / f"{stem}{f'-{n}' if n > 1 else ''}.md" for n in range(1, 10000))
        return next(path for path in numbered if not path.exists())

    def save(self) -> None:
        self.sum_up()
        write(self.path.with_suffix(".json"), json.dumps(self.results, indent=1))
        write(self.path, page(self.results))

    def add(self, to: str, record: dict[str, Any]) -> None:
        print(json.dumps({key: x for key, x in record.items() if key not in ("launches", "kernels")}), file=sys.stderr)
        self.results[to].append(record)
        self.save()

    def sum_up(self) -> None:
        results = self.results
        results["wrong"] = [f"{r['case']} in {r['dtype']}" for r in results["checks"] if not r["ok"]]
        mine = [r for r in results["times"] if r["candidate"] == OURS]
        bad = [r for r in mine if r["left_out"] or not r.get("ok", True)]
        results["wrong"] += [f"{r['case']} ({as_text(r['shape'])})" for r in bad]
        verified = {text for r in results["checks"] if r["ok"] for text in r["launches"]}
        verified |= {text for r in mine if r.get("ok") for text in r["launches"]}
        results["unchecked"] = sorted({text for r in mine for text in r.get("launches", ()) if text not in verified})

    def measure(self) -> None:
        for _, found in records(machine, [(self.device,)], 1, self.end, 120.0):
            if isinstance(found, Exception):
                raise found
            self.results |= found
        self.path = self.file()
        self.save()

    def check(self, dtype: torch.dtype, end: float) -> None:
        keep = self.options.failures or self.options.out / "failures"
        jobs = [(*cell, dtype, self.device, keep) for cell in cells(self.chosen, self.device, self.options.shapes)]
        for (key, shape, dtype, *_), found in records(check_job, jobs, self.options.jobs, end, 120.0):
            about = {"case": key, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
            if isinstance(found, Late):  # not a failure
                self.results["left_out"].append(f"the check of {key} in {about['dtype']} ({as_text(shape)})")
            elif isinstance(found, Exception):
                self.add("checks", {**about, "ok": False, "failed": first_line(found)})
            else:
                self.add("checks", about | found)
        self.save()

    def time(self, peers: bool, end: float) -> None:
        jobs = []
        for key, shape in cells(self.chosen, self.device, self.options.shapes):
            for name in CASES[key].peers if peers else ("",):
                if name and is_missing(CASES[key].peers[name]):
                    self.add("times", {"candidate": name, "left_out": "not installed", "case": key, "shape": shape})
                else:
                    jobs.append((key, shape, name, self.device))
        jobs.sort(key=lambda job: bool(job[2]) and CASES[job[0]].peers[job[2]].back is None)  # landmarks come last
        for (key, shape, name, *_), found in records(cell_job, jobs, 1, end, 75.0):
            about = {"case": key, "shape": shape}
            if isinstance(found, Late):
                self.results["left_out"].append(f"{name or OURS} in {key} ({as_text(shape)})")
            elif isinstance(found, Exception):
                self.add("times", {"candidate": name or OURS, "left_out": first_line(found), **about})
            else:
                least = yardstick(CASES[key], shape, self.results["ceilings"])
                self.add("times", found | about | {"yardstick_ms": least})
        self.save()


def run(chosen: list[str], device: str, options: argparse.Namespace) -> dict[str, Any]:
    of = Run(chosen, device, options)
    of.measure()
    narrow = torch.bfloat16 if device == "cuda" else torch.float32  # the CPU's interpreter cannot do bfloat16
    work: dict[str, Callable[[float], None]] = {
        "checks": lambda end: of.check(narrow, end),
        "ours": lambda end: of.time(False, end),
        "peers": lambda end: of.time(True, end),
        "float32": lambda end: of.check(torch.float32, end),
    }
    stages = [name for name in STAGES if name in (options.stage or STAGES) and (name != "float32" or device == "cuda")]
    for at, name in enumerate(stages):
        share = sum(STAGES[each] for each in stages[: at + 1]) / sum(STAGES[each] for each in stages)
        work[name](of.began + share * 60 * options.minutes)
    print(of.path)
    return of.results


if __name__ == "__main__":
    sys.exit(main())
