"""Measure time and memory of whole language models on a CPU, against other packages with the same weights.

    pip install 'seqblocks[peers]'        # missing packages are listed as not installed
    pip install llama-cpp-python gguf     # for llama.cpp, which it compiles for ten minutes
    python benchmarks/models.py [--case mamba_128] [--threads 1] [--out benchmarks/results]

A candidate is measured only if its logits are right: their error against the same model in float64 is at most MARGIN
times that of ours in float32. The page states the error of those that round weights to 16 or 8 bits. llama.cpp reads a
GGUF file of the same weights, whose f32 form is checked. Candidates take turns, and medians of the ratios of adjacent
runs are reported. On one thread, times are CPU times of the process, which do not include other programs. On several
threads, times are elapsed ones, and each candidate runs in processes of its own: threads that have nothing to do wait
in loops for a while, which takes time from the next candidate.

Lower bounds are measured in the same run: the multiply-accumulates of the model at the speed of a large matrix product
(three times as many for a training step); reading the weights once at the speed of memory, or of torch's fastest
product of one token if that reads faster; and, if benchmarks/steps.py has the model, a token written by hand in torch.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from candidates import CASES, Candidate, Case
from common import versions, write
from cpu import OURS, resident
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import seqblocks
from seqblocks.bench.measure import processor

PEERS = ("transformers", "xlstm", "mlstm_kernels", "mambapy", "llama_cpp_python")
LIMIT = 8.0  # seconds that a candidate may take for one run of one kind of work
BUDGET = 5.0  # seconds that all runs of a candidate may take for one kind of work
ROUNDS = 15
PROCESSES = 3  # for each candidate on several threads
MARGIN = 4  # rounding errors of float32 in different orders of summation: those of mamba-130m differ by a factor of 3
BATCHES = (8, 64)  # prompts for which tokens are generated together


# --- measuring ------------------------------------------------------------------------------------------------------


def train(candidate: Candidate, ids: Tensor) -> None:
    """Run one training step without the optimiser, which is the same for all."""
    loss = cross_entropy(candidate.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    candidate.model.zero_grad()


def seconds(work: Callable[[], Any]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def drawn(vocabulary: int, batch: int, seq: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, seq), generator=torch.Generator().manual_seed(seq))


def works(candidate: Candidate, case: Case, vocabulary: int) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Return for each kind of work a function of a number of tokens, and the number that is measured."""
    eval_only, training = candidate.model.eval, candidate.model.train

    def run(call: Callable[..., Any], *arguments: Any) -> Any:
        eval_only()
        with torch.inference_mode():
            return call(*arguments)

    def trained(seq: int) -> None:
        training()
        train(candidate, drawn(vocabulary, case.training[0], seq + 1))

    found: dict[str, tuple[Callable[[int], Any], int]] = {}
    if not candidate.streams_only:
        found["forward"] = (lambda seq: run(candidate.logits, drawn(vocabulary, 1, seq)), 512)
        if candidate.trains:
            found["training"] = (trained, case.training[1])
    if prefill := candidate.prefill:
        found["prefill"] = (lambda seq: run(prefill, drawn(vocabulary, 1, seq)), 512)
    if generate := candidate.generate:
        for batch in (1, *BATCHES) if candidate.batches else (1,):
            prompts = drawn(vocabulary, batch, 8)
            count = new_tokens(batch, case)
            found[of_batch(batch)] = (lambda count, prompts=prompts: run(generate, prompts, count), count)
    return found


def of_batch(batch: int) -> str:
    return "generate" if batch == 1 else f"generate {batch}"


def generated(kind: str, case: Case) -> int:
    """Return how many tokens a run of this kind of work generates, 0 if none."""
    batch = next((each for each in (1, *BATCHES) if of_batch(each) == kind), 0)
    return batch * new_tokens(batch, case)


def new_tokens(batch: int, case: Case) -> int:
    """Return how many tokens are generated for each of several prompts."""
    return case.tokens if batch == 1 else max(case.tokens // 4, 4)


def measured(candidates: dict[str, Candidate], case: Case, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Return for each candidate and kind of work {"ms", "ratio" to ours}, or {"left_out": reason}."""
    all_works = {name: works(candidate, case, vocabulary) for name, candidate in candidates.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in candidates}
    for kind in all_works[OURS]:
        able = {name: of[kind] for name, of in all_works.items() if kind in of}
        for name, (work, size) in [*able.items()]:
            few = 4 if generated(kind, case) else max(size // 8, min(size, 64))  # xLSTM computes 64 at a time
            work(few)  # the first run includes preparations
            expected = size / few * seconds(lambda work=work, few=few: work(few))  # type: ignore[misc]
            if expected > LIMIT:
                found[name][kind] = {"left_out": f"about {expected:.0f} s"}
                del able[name]
        found_here = compared({name: (lambda w=w, n=n: w(n)) for name, (w, n) in able.items()})  # type: ignore[misc]
        for name, record in found_here.items():
            found[name][kind] = record
    return found


def alone(key: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the same for candidates in processes of their own, which take turns."""
    turns = [{name: in_child("--timed", key, name) or {} for name in names} for _ in range(PROCESSES)]
    found: dict[str, dict[str, Any]] = {name: {} for name in turns[0]}
    for name, kind in [(name, kind) for name, of in turns[0].items() for kind in of]:
        of_all = [turn[each].get(kind, {"left_out": "failed"}) for turn in turns for each in (name, OURS)]
        if missing := [record for record in of_all if "left_out" in record]:
            found[name][kind] = missing[0]
            continue
        times = [record["ms"] for record in of_all]
        ratio = statistics.median(a / b for a, b in zip(times[::2], times[1::2], strict=True))
        found[name][kind] = {"ms": statistics.median(times[::2]), "ratio": ratio}
    return found


def in_child(*arguments: str) -> Any:
    """Return what another process of this script prints as JSON in its last line, None if it failed."""
    command = [sys.executable, __file__, "--threads", str(torch.get_num_threads()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout.strip() else None


def compared(runs: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Return medians of times, and of ratios to our run in the same round."""
    times: dict[str, list[float]] = {name: [seconds(run)] for name, run in runs.items()}
    for _ in range(ROUNDS):
        if max(sum(each) for each in times.values()) > BUDGET and len(times[OURS]) > 2:
            break
        for name, run in runs.items():
            times[name].append(seconds(run))
    later = {name: each[1:] for name, each in times.items()}
    return {
        name: {
            "ms": 1e3 * statistics.median(each),
            "ratio": statistics.median(a / b for a, b in zip(each, later[OURS], strict=True)),
        }
        for name, each in later.items()
    }


def own_error(model: seqblocks.SequenceModel, expected: Tensor, ids: Tensor) -> float:
    """Return the smaller of the errors of our forward pass and of our steps in float32."""
    with torch.inference_mode():
        state, found = model.init_state(1), []
        for token in ids.unbind(1):
            y, state = model.step(token, state)
            found.append(y)
        return min(relative_error(model(ids), expected), relative_error(torch.stack(found, 1), expected))


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def checked(candidate: Candidate, expected: Tensor, allowed: float, tokens: Tensor, ids: Tensor) -> str:
    """Return "" if a candidate's logits and tokens are right, otherwise the difference."""
    with torch.inference_mode():
        off = relative_error(candidate.logits(ids), expected)
        if not off <= allowed:
            return f"other logits: {off:.0e}"
        if candidate.generate and not torch.equal(candidate.generate(ids[:, :8], len(tokens)), tokens):
            return "other tokens"
    return ""


def measure(key: str) -> list[dict[str, Any]]:
    """Return one record per candidate of a case, and per lower bound."""
    case = CASES[key]
    try:
        model, makers = case.make()
    except ImportError as error:
        return [{"case": key, "candidate": OURS, "left_out": f"needs {error.name}"}]
    vocabulary = model.spec.input.features
    ids = drawn(vocabulary, 1, 64)
    with torch.inference_mode():
        expected = copy.deepcopy(model).double()(ids)
        tokens = seqblocks.generate(model, ids[:, :8], max_new_tokens=8)[0]
    allowed = MARGIN * own_error(model, expected, ids)
    candidates, errors, records = {}, {}, []
    for name, make in makers.items():
        try:
            candidate = make()
            if candidate.rounds:
                with torch.inference_mode():
                    errors[name] = relative_error(candidate.logits(ids), expected)
            problem = "" if candidate.rounds else checked(candidate, expected, allowed, tokens, ids)
        except ImportError as error:
            problem = f"{error.name} is not installed"
        if problem:
            records.append({"case": key, "candidate": name, "left_out": problem})
        else:
            candidates[name] = candidate
    is_alone = torch.get_num_threads() > 1
    for name, found in (alone(key, candidates) if is_alone else measured(candidates, case, vocabulary)).items():
        records.append({"case": key, "candidate": name, "work": found, "peak_mb": peak(key, name)})
        records[-1] |= {"error": errors[name]} if name in errors else {}
    return records + floors(key, model, case)


def floors(key: str, model: seqblocks.SequenceModel, case: Case) -> list[dict[str, Any]]:
    """Return the lower bounds: the arithmetic of a pass, and reading the weights for one token."""
    flops = seqblocks.summarise(model).flops_per_token or 0
    bytes_of_weights = sum(x.numel() * x.element_size() for x in model.parameters())
    passes, batch = 1e3 * flops / (2 * product_rate()), case.training[0] * case.training[1]
    arithmetic = {"forward": passes * 512, "prefill": passes * 512, "training": 3 * passes * batch}
    reading = {"generate": 1e3 * case.tokens * bytes_of_weights / reading_rate()}
    return [
        {"case": key, "candidate": name, "floor": {kind: {"ms": ms} for kind, ms in found.items()}}
        for name, found in (("floor: arithmetic", arithmetic), ("floor: weights read once", reading))
    ]


def product_rate() -> float:
    """Return the multiply-accumulates per second of a large matrix product."""
    a = torch.randn(1024, 1024)
    return 1024**3 / min(seconds(lambda: a @ a) for _ in range(9))


def reading_rate() -> float:
    """Return the bytes per second at which memory is read once: by a sum, or by one of torch's products of a token."""
    weight, x = torch.ones(1 << 14, 1 << 12), torch.ones(1, 1 << 12)
    reads = [weight.sum, lambda: nn.functional.linear(x, weight)]
    if torch.backends.mkldnn.is_available():
        reads.append(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    with torch.inference_mode():
        return max(weight.numel() * 4 / min(seconds(read) for _ in range(9)) for read in reads)


def peak(key: str, name: str) -> float | None:
    """Return the MB of a training step, in a separate process; None if there is no step or the process failed."""
    found: float | None = in_child("--worker", key, name)
    return found


def timed(key: str, name: str) -> None:
    """Print the times of a candidate that no other disturbs."""
    case = CASES[key]
    model, makers = case.make()
    print(json.dumps(measured({OURS: makers[name]()}, case, model.spec.input.features)[OURS]))


def worker(key: str, name: str) -> None:
    """Print the highest resident size during a step, minus that at its start, in MB (Linux)."""
    case = CASES[key]
    model, makers = case.make()
    candidate = makers[name]()
    found = works(candidate, case, model.spec.input.features)
    if "training" not in found:
        return
    work, size = found["training"]
    work(min(size, 64))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work(size)
    print((resident("VmHWM") - before) / 1024)


# --- the page -------------------------------------------------------------------------------------------------------

KINDS = ("forward", "training", "prefill", *(of_batch(batch) for batch in (1, *BATCHES)))


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as a page."""
    where = f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} thread(s)"
    where += f", Python {platform.python_version()}"
    lines = [
        f"# Whole models on a CPU, {datetime.date.today()}",
        "",
        f"{where}, {', '.join(versions(PEERS))}; float32, the same weights. Written by `benchmarks/models.py`.",
        f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "Times in ms, medians of interleaved runs, and in parentheses the median ratio to ours: forward and prefill of",
        "512 tokens, a training step without the optimiser, tokens generated per second after prompts of 8, one or",
        "several at once, and the memory of the training step in addition to the weights.",
    ]
    for key in dict.fromkeys(r["case"] for r in records):
        case, of_case = CASES[key], [r for r in records if r["case"] == key]
        batch, seq = case.training
        lines += ["", f"## {case.about}", ""]
        several = " | ".join(f"of {each} prompts" for each in BATCHES)
        lines += [f"| | forward | training, {batch} x {seq} | prefill | tokens per second | {several} | peak MB |"]
        lines += ["|---" * (6 + len(BATCHES)) + "|", *(row(r, case) for r in of_case)]
    return "\n".join(lines)


def row(r: dict[str, Any], case: Case) -> str:
    if "left_out" in r:
        return f"| {r['candidate']} | {r['left_out']} {'| ' * (4 + len(BATCHES))}|"
    found = r.get("work") or r["floor"]
    memory = r.get("peak_mb")
    cells = [cell(found.get(kind), kind, case) for kind in KINDS]
    name = f"{r['candidate']}, logits off by {r['error']:.0e}" if "error" in r else r["candidate"]
    return f"| {name} | {' | '.join(cells)} | {'' if memory is None else f'{memory:,.0f}'} |"


def cell(found: dict[str, Any] | None, kind: str, case: Case) -> str:
    if not found or "left_out" in found:
        return found["left_out"] if found else ""
    tokens = generated(kind, case)
    value = f"{1e3 * tokens / found['ms']:,.1f}" if tokens else f"{found['ms']:,.1f}"
    ratio = found.get("ratio", 1.0)
    return value if abs(ratio - 1.0) < 1e-9 else f"{value} ({1 / ratio if tokens else ratio:.2f} x)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure whole language models on a CPU, against other packages.")
    parser.add_argument("--case", action="append", choices=CASES, help="measure only this case; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--keep", action="store_true", help="keep the cases that today's file in --out contains")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0: as many as torch takes by itself")
    for name in ("--worker", "--timed"):
        parser.add_argument(name, nargs=2, metavar=("CASE", "CANDIDATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # transformers warns about kernels that are not installed
    if options.threads:
        torch.set_num_threads(options.threads)
    for run, given in ((worker, options.worker), (timed, options.timed)):
        if given:
            run(*given)
            return 0
    options.out.mkdir(parents=True, exist_ok=True)
    threads = "" if torch.get_num_threads() == 1 else f"-{torch.get_num_threads()}-threads"
    page = options.out / f"{datetime.date.today()}-models{threads}.md"
    numbers = page.with_suffix(".json")
    records = json.loads(numbers.read_text(encoding="utf-8")) if options.keep and numbers.exists() else []
    for key in options.case or CASES:
        if not any(r["case"] == key for r in records):
            records += measure(key)
            write(numbers, json.dumps(records, indent=1))
            write(page, table(records))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
