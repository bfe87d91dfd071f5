"""Measure linear attention, delta rules and gated recurrences on a CPU, against other packages and a recurrent loop.

    pip install 'seqblocks[peers]'        # missing packages are listed as not installed
    python benchmarks/linear_attention.py [--case delta] [--length 2048] [--out benchmarks/results]

A candidate is measured only if its outputs equal ours. Candidates take turns, and medians of the ratios of adjacent
runs are reported. Times are CPU times of the process on one thread, which do not include other programs. Other packages
run their CPU code: fla's naive functions (in chunks if it has them), and the torch implementations of transformers.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import versions, write
from torch import Tensor
from torch.nn.functional import normalize

OURS, LOOP = "seqblocks", "recurrent loop"
PEERS = ("fla-core", "flash-linear-attention", "transformers")
LENGTHS = (2048, 8192)
ROUNDS = 9
LIMIT = 1.5  # seconds that a candidate may take for one run
BUDGET = 4.0  # seconds that all runs of a candidate may take for one kind of work
TOLERANCE = 1e-4  # of outputs in float32, relative to the largest
Leaves = dict[str, Tensor]
Run = Callable[[Leaves], Tensor]  # of inputs to outputs [B, S, HV, V] or [B, S, E]


class Case(NamedTuple):
    """One computation: a function that draws inputs of a length, and the candidates, which import their package."""

    about: str
    draw: Callable[[int], Leaves]
    candidates: dict[str, Callable[[], Run]]


# --- inputs -----------------------------------------------------------------------------------------------------------


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaves(rule: str, length: int) -> Leaves:
    """4 heads of 64 by 64, keys of length 1, decays of -0.01 to -0.3 mostly; "delta, key, strong": 100 times those."""
    name, *words = rule.split(", ")
    shape = (1, length, 4, 64)
    x = {port: drawn(at, *shape) for at, port in enumerate("qkv")}
    x["k"] = normalize(x["k"], dim=-1)
    if words:
        strength = 100.0 if "strong" in words else 1.0
        x["decay"] = -strength * torch.exp(drawn(3, *(shape if "key" in words else shape[:3])) - 3)
    if name == "delta":
        x["beta"] = drawn(4, *shape[:3]).sigmoid()
    if name == "dplr":
        a = normalize(drawn(5, *shape), dim=-1)
        x |= {"a": -a, "b": 0.5 * a}
    if name == "bonus":
        x["bonus"] = drawn(6, *shape[2:])
    return x


def heads_of_mamba2(length: int) -> Leaves:
    """Of mamba2-130m: 24 heads of 64 values, one of 128 keys for all."""
    x = {"q": drawn(0, 1, length, 1, 128), "k": drawn(1, 1, length, 1, 128), "v": drawn(2, 1, length, 24, 64)}
    return x | {"decay": -torch.exp(drawn(3, 1, length, 24) - 3)}


def channels(width: int) -> Callable[[int], Leaves]:
    def draw(length: int) -> Leaves:
        return {"x": drawn(0, 1, length, width), "decay": -torch.exp(drawn(1, 1, length, width) - 1)}

    return draw


# --- candidates -------------------------------------------------------------------------------------------------------


def ours(backend: str | None) -> Callable[[], Run]:
    def make() -> Run:
        from seqblocks.kernels import linear_attention

        return lambda x: linear_attention(**x, backend=backend)  # type: ignore[arg-type, return-value]

    return make


def recurrence(backend: str | None) -> Callable[[], Run]:
    def make() -> Run:
        from seqblocks.kernels import gated_recurrence

        return lambda x: gated_recurrence(**x, backend=backend)  # type: ignore[return-value]

    return make


def fla_add() -> Run:
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    return lambda x: naive_chunk_linear_attn(x["q"], x["k"], x["v"])


def fla_head() -> Run:
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    return lambda x: first(naive_chunk_simple_gla(x["q"], x["k"], x["v"], x["decay"]))


def fla_key() -> Run:
    from fla.ops.gla.naive import naive_recurrent_gla

    return lambda x: first(naive_recurrent_gla(x["q"], x["k"], x["v"], x["decay"]))


def fla_bonus() -> Run:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def run(x: Leaves) -> Tensor:
        q, k, v, w = (z.transpose(1, 2) for z in (x["q"], x["k"], x["v"], x["decay"]))
        return first(naive_recurrent_rwkv6(q, k, v, w, x["bonus"])).transpose(1, 2)

    return run


def fla_delta() -> Run:
    from fla.ops.delta_rule.naive import delta_rule_chunkwise

    names = ("q", "k", "v", "beta")
    return lambda x: first(delta_rule_chunkwise(*(x[n].transpose(1, 2) for n in names))).transpose(1, 2)


def fla_delta_head() -> Run:
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    return lambda x: first(naive_chunk_gated_delta_rule(x["q"], x["k"], x["v"], g=x["decay"], beta=x["beta"]))


def fla_delta_key() -> Run:
    from fla.ops.kda.naive import naive_chunk_kda

    return lambda x: first(naive_chunk_kda(x["q"], x["k"], x["v"], x["decay"], x["beta"]))


def fla_dplr() -> Run:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise

    names = ("q", "k", "v", "a", "b", "decay")
    return lambda x: first(dplr_chunkwise(*(x[n].transpose(1, 2) for n in names))).transpose(1, 2)


def fla_recurrence() -> Run:
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    return lambda x: first(naive_recurrent_hgrn(x["x"], x["decay"]))


def qwen() -> Run:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    run = inspect.unwrap(torch_chunk_gated_delta_rule)  # the wrapper in transformers would call fla's kernels
    return lambda x: first(run(x["q"], x["k"], x["v"], x["decay"], x["beta"]))


def olmo() -> Run:
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_chunk_gated_delta_rule

    run = inspect.unwrap(torch_chunk_gated_delta_rule)  # the wrapper in transformers would call fla's kernels
    return lambda x: first(run(x["q"], x["k"], x["v"], x["decay"], x["beta"]))


def kimi() -> Run:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    run = inspect.unwrap(chunk_kimi_delta_attention)  # the wrapper in transformers would call fla's kernels
    return lambda x: first(run(x["q"], x["k"], x["v"], x["decay"], x["beta"]))


def mamba2() -> Run:
    """With steps of 1: the decay of a token is then that of its head's A times the step that makes it."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    scan = inspect.unwrap(mamba2_chunk_scan)

    def run(x: Leaves) -> Tensor:
        dt, scale = -x["decay"], x["k"].shape[-1] ** -0.5
        values = x["v"] / dt.unsqueeze(-1)  # it multiplies them by the steps
        A = torch.full((dt.shape[2],), -1.0)
        y: Tensor = scan(values, dt, A, x["k"], scale * x["q"], chunk_size=256)
        return y.unflatten(-1, (dt.shape[2], -1)) if y.dim() == 3 else y

    return run


def rg_lru() -> Run:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    def run(x: Leaves) -> Tensor:
        begins = torch.zeros(*x["x"].shape[:2], 1, dtype=torch.bool)
        return first(RecurrentGemmaRglru._rnn_scan(None, x["x"], x["decay"].exp(), begins, None))

    return run


def first(found: Any) -> Tensor:
    y: Tensor = found[0] if isinstance(found, tuple) else found
    return y


def linear(rule: str, **peers: Callable[[], Run]) -> Case:
    named = {name.replace("_", " "): maker for name, maker in peers.items()}
    return Case(
        f"rule {rule}; 4 heads of 64 by 64", lambda length: leaves(rule, length),
        {OURS: ours(None), LOOP: ours("reference"), **named},
    )  # fmt: skip


def of_channels(width: int) -> Case:
    peers = {"fla": fla_recurrence, "transformers, RecurrentGemma": rg_lru}
    about = f"gated recurrence of {width:,} channels"
    return Case(about, channels(width), {OURS: recurrence(None), LOOP: recurrence("reference"), **peers})


CASES = {
    "add": linear("add", fla=fla_add),
    "add_head": linear("add, head", fla=fla_head),
    "add_key": linear("add, key", fla=fla_key),
    "bonus_key": linear("bonus, key", fla=fla_bonus),
    "delta": linear("delta", fla=fla_delta),
    "delta_head": linear("delta, head", fla=fla_delta_head, Qwen3_Next=qwen, OLMo_hybrid=olmo),
    "delta_key": linear("delta, key", fla=fla_delta_key, Kimi_Linear=kimi),
    "dplr_key": linear("dplr, key", fla=fla_dplr),
    "add_key_strong": linear("add, key, strong", fla=fla_key),
    "delta_key_strong": linear("delta, key, strong", fla=fla_delta_key, Kimi_Linear=kimi),
    "dplr_key_strong": linear("dplr, key, strong", fla=fla_dplr),
    "mamba2": Case(
        "rule add, per head; 24 heads of 64 values, which share 128 keys (mamba2-130m)", heads_of_mamba2,
        {OURS: ours(None), LOOP: ours("reference"), "transformers": mamba2},
    ),
    "channels_64": of_channels(64),
    "channels_1024": of_channels(1024),
}  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def forward(run: Run, x: Leaves) -> None:
    with torch.no_grad():
        run(x)


def both(run: Run, x: Leaves) -> None:
    with_gradients = [z.requires_grad_() for z in x.values()]
    torch.autograd.grad(run(x).sum(), with_gradients, allow_unused=True)


def seconds(work: Callable[[Run, Leaves], None], run: Run, x: Leaves) -> float:
    start = time.process_time()
    work(run, x)
    return time.process_time() - start


def timed(runs: dict[str, Run], x: Leaves, work: Callable[[Run, Leaves], None]) -> dict[str, Any]:
    """Return milliseconds and the ratio to ours: medians of interleaved runs, of which slow candidates have fewer."""
    first_runs = {name: seconds(work, run, x) for name, run in runs.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    for _ in range(ROUNDS):
        now = seconds(work, runs[OURS], x)
        found[OURS].append((now, 1.0))
        for name, run in runs.items():
            if name != OURS and first_runs[name] < LIMIT and spent[name] < BUDGET:
                took = seconds(work, run, x)
                spent[name] += took
                found[name].append((took, took / now))
    alone = {name: [(t, t / statistics.median(z for z, _ in found[OURS]))] for name, t in first_runs.items()}
    pairs = {name: found[name] or alone[name] for name in runs}
    return {
        name: {"ms": 1e3 * statistics.median(t for t, _ in each), "ratio": statistics.median(r for _, r in each)}
        for name, each in pairs.items()
    }


def compared(case: Case, x: Leaves) -> tuple[dict[str, Run], dict[str, str]]:
    """Return the candidates whose outputs equal ours, and the reasons why the others are left out."""
    runs, missing = {}, {}
    with torch.no_grad():
        expected = case.candidates[LOOP]()(x)
        for name, maker in case.candidates.items():
            try:
                runs[name] = maker()
            except ImportError:
                missing[name] = "not installed"
                continue
            error = (runs[name](x) - expected).abs().max() / expected.abs().max()
            if not error <= TOLERANCE:
                missing[name] = f"other outputs: {error:.0e} of the largest"
                del runs[name]
    return runs, missing


def measure(key: str, lengths: list[int]) -> list[dict[str, Any]]:
    records = []
    for length in lengths:
        x = CASES[key].draw(length)
        runs, absent = compared(CASES[key], CASES[key].draw(256))
        if length != lengths[0]:  # for the growth of time per token
            runs = {OURS: runs[OURS]}
        forward_times, both_times = timed(runs, x, forward), timed(runs, x, both)
        for name in [*runs, *(absent if length == lengths[0] else ())]:
            record = {"case": key, "length": length, "candidate": name, "left_out": absent.get(name)}
            if name in runs:
                record |= {"forward": forward_times[name], "both": both_times[name]}
            print(json.dumps(record), file=sys.stderr)
            records.append(record)
    return records


# --- the page ---------------------------------------------------------------------------------------------------------


def page(records: list[dict[str, Any]]) -> str:
    where = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, {', '.join(versions(PEERS))}"
    lines = [
        f"# Linear attention on a CPU, {datetime.date.today()}", "",
        f"{where}; float32, one sequence. Written by `benchmarks/linear_attention.py`.", "",
        f"CPU time, medians of up to {ROUNDS} interleaved runs in ms; in parentheses the median ratio to ours.", "",
        "| case | tokens | | forward | forward + backward |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in records:
        about = CASES[r["case"]].about if r["candidate"] == OURS else ""
        cells = [r["left_out"], ""] if r["left_out"] else [cell(r[f]) for f in ("forward", "both")]
        lines.append(f"| {about} | {r['length']:,} | {r['candidate']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *growth(records)])


def cell(x: dict[str, float]) -> str:
    return f"{x['ms']:,.1f}" if x["ratio"] == 1.0 else f"{x['ms']:,.1f} ({x['ratio']:.1f} x)"


def growth(records: list[dict[str, Any]]) -> list[str]:
    """Return lines on how our time per token changes from the first length to the last."""
    of_ours = {(r["case"], r["length"]): r for r in records if r["candidate"] == OURS}
    lengths = sorted({length for _, length in of_ours})
    if len(lengths) < 2:
        return []
    a, b = lengths[0], lengths[-1]
    lines = [f"Time per token at {b:,} tokens relative to {a:,} (forward, forward + backward):", ""]
    for key in dict.fromkeys(case for case, _ in of_ours):
        change = [of_ours[key, b][f]["ms"] / b / (of_ours[key, a][f]["ms"] / a) for f in ("forward", "both")]
        lines.append(f"- {key}: {change[0]:.2f}, {change[1]:.2f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure linear attention on a CPU, against other packages.")
    parser.add_argument("--case", action="append", choices=CASES, help="measure only this case; may be repeated")
    parser.add_argument("--length", action="append", type=int, help="tokens; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today()}-cpu-linear-attention.md"
    records: list[dict[str, Any]] = []
    for key in options.case or CASES:
        records += measure(key, options.length or list(LENGTHS))
        write(options.out / name, page(records))  # after each case, so that an interrupt loses only one
    print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
