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
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from children import Late, records
from common import versions, write
from gpu_cases import CASES, FIRST, PEERS, Case, Leaves, Peer, Shape, draw_leaves
from gpu_checks import BARS, check, compare, of_triton, relative_error, results, tensors
from gpu_clock import Candidate, Clock, machine, own_candidates, timed, yardstick
from gpu_page import OURS, as_text, first_line, page
from launches import ARCHIVE, launches, save

AT_ONCE = 12  # checks; the definition of the mLSTM needs 10 GB, of the others up to 3
# Shares of the time. A stage that ends sooner leaves its time to the next one.
STAGES = {"checks": 0.4, "ours": 0.25, "peers": 0.25, "float32": 0.1}


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
