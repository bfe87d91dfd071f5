"""Measure time and memory of the mixers on a CPU, against other packages that compute the same.

    pip install 'seqblocks[peers]'        # missing packages are listed as not installed
    python benchmarks/cpu.py

Candidates take turns, round after round, and medians are reported: CPU timings are noisy, and ratios of adjacent runs
are more reliable than milliseconds. Memory is measured in a separate process: the highest resident size during one
forward and backward pass, minus the size before it with inputs and weights. Writes a table and the numbers to --out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import versions, write
from torch import Tensor

OURS = "seqblocks"
PEERS = ("mlstm_kernels", "xlstm", "transformers", "mambapy")
LENGTHS = (256, 2048, 8192)
ROUNDS = 11
Run = Callable[[], Tensor]
Maker = Callable[[int], tuple[Run, list[Tensor]]]  # length -> the forward pass, and the tensors that get gradients


class Case(NamedTuple):
    """One computation and its candidates."""

    about: str
    candidates: dict[str, Maker]


def drawn(*shape: int, shift: float = 0.0) -> Tensor:
    """Return float32 numbers that require gradients, the same for every candidate of a shape."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.randn(*shape, generator=generator) + shift).requires_grad_()


# --- mLSTM ----------------------------------------------------------------------------------------------------------


def mlstm_inputs(length: int, heads_first: bool) -> list[Tensor]:
    q, k, v = (drawn(1, length, 4, 192) for _ in range(3))
    i, f = drawn(1, length, 4), drawn(1, length, 4, shift=3)
    if not heads_first:
        return [q, k, v, i, f]
    return [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v, i, f)]


def mlstm_ours(length: int) -> tuple[Run, list[Tensor]]:
    from seqblocks.kernels import mlstm

    x = mlstm_inputs(length, False)
    return lambda: mlstm(*x), x  # type: ignore[return-value]


def mlstm_native(length: int) -> tuple[Run, list[Tensor]]:
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

    x = mlstm_inputs(length, True)
    return lambda: mlstm_chunkwise__native_autograd(*x, chunk_size=64, autocast_kernel_dtype=torch.float32), x


def mlstm_parallel(length: int) -> tuple[Run, list[Tensor]]:
    from xlstm.blocks.mlstm.backends import parallel_stabilized_simple

    q, k, v, i, f = mlstm_inputs(length, True)
    i, f = (t.detach().unsqueeze(-1).requires_grad_() for t in (i, f))
    return lambda: parallel_stabilized_simple(q, k, v, i, f), [q, k, v, i, f]


# --- sLSTM ----------------------------------------------------------------------------------------------------------


def slstm_ours(length: int) -> tuple[Run, list[Tensor]]:
    from seqblocks.kernels import slstm

    x = [*(drawn(4, length, 384) for _ in range(4)), drawn(4, 96, 4, 96), drawn(4, 4, 96)]
    with torch.no_grad():
        x[4].mul_(96**-0.5)
    return lambda: slstm(*x), x  # type: ignore[return-value]


def slstm_vanilla(length: int) -> tuple[Run, list[Tensor]]:
    from xlstm.blocks.slstm.cell import sLSTMCell, sLSTMCellConfig

    options = {"backend": "vanilla", "dtype": "float32", "enable_automatic_mixed_precision": False}
    layer, x = sLSTMCell(sLSTMCellConfig(hidden_size=384, num_heads=4, **options)), drawn(4, length, 4 * 384)
    return lambda: layer(x)[0], [x, *layer.parameters()]


# --- selective state space: the mixer of mamba-130m ------------------------------------------------------------------


def mamba_ours(length: int) -> tuple[Run, list[Tensor]]:
    import seqblocks

    text = "seqblocks: 1\nuse: [mamba]\nmodel: {input: {features: 768}, steps: [{mamba_mixer: {dim: 768}}]}"
    model, x = seqblocks.build_text(text), drawn(1, length, 768)
    return lambda: model(x), [x, *model.parameters()]


def mamba_transformers(length: int) -> tuple[Run, list[Tensor]]:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    mixer, x = MambaMixer(MambaConfig(hidden_size=768, state_size=16), layer_idx=0), drawn(1, length, 768)
    return lambda: mixer(x), [x, *mixer.parameters()]


def mamba_py(length: int) -> tuple[Run, list[Tensor]]:
    from mambapy.mamba import MambaBlock, MambaConfig

    block, x = MambaBlock(MambaConfig(d_model=768, n_layers=1)), drawn(1, length, 768)
    return lambda: block(x), [x, *block.parameters()]


# --- Centaurus ------------------------------------------------------------------------------------------------------


def centaurus_inputs(mode: str, length: int) -> list[Tensor]:
    """x, A_real, A_imag, dt, B, C and, but for pointwise, E."""
    H, N, M = {"neck": (64, 64, 8), "pointwise": (64, 64, 8), "dws": (256, 256, 8), "full": (16, 256, 8)}[mode]
    channels = N * M if mode == "pointwise" else N
    B, C = (drawn(channels, H), drawn(H, channels)) if mode in ("neck", "pointwise") else (drawn(N), drawn(N))
    A = [(-torch.rand(N, M) - 0.1).requires_grad_(), drawn(N, M)]
    x = [drawn(2, length, H), *A, torch.logspace(-3, -1, N).requires_grad_(), B, C]
    return x if mode == "pointwise" else [*x, drawn(N, M)]


def centaurus_ours(mode: str) -> Maker:
    def make(length: int) -> tuple[Run, list[Tensor]]:
        from seqblocks.kernels import centaurus

        x = centaurus_inputs(mode, length)
        return lambda: centaurus(*x, mode=mode), x  # type: ignore[return-value]

    return make


def centaurus_fft(mode: str) -> Maker:
    """The plain way: the whole kernel [N, M, S] at once, complex FFTs of everything, dense B and C, one product."""

    def make(length: int) -> tuple[Run, list[Tensor]]:
        leaves = centaurus_inputs(mode, length)
        x, A_real, A_imag, dt, B, C = leaves[:6]

        def run() -> Tensor:
            steps = dt.unsqueeze(-1) * torch.complex(A_real, A_imag)
            powers = torch.exp(steps.unsqueeze(-1) * torch.arange(length)).real
            into, out_of, rate = B, C, dt
            if mode == "pointwise":
                kernel, rate = powers.flatten(0, 1), dt.repeat_interleave(steps.shape[1])
            else:
                kernel = torch.einsum("nm,nml->nl", leaves[6], powers)
            if mode == "dws":
                into, out_of = torch.diag(B), torch.diag(C)
            elif mode == "full":
                H, at = x.shape[2], torch.arange(B.shape[0])
                into = torch.zeros(len(at), H).index_put((at, at % H), B)
                out_of = torch.zeros(H, len(at)).index_put((at // H, at), C)
            into = into * rate.unsqueeze(-1)
            xs, ks = torch.fft.fft(x, 2 * length, dim=1), torch.fft.fft(kernel, 2 * length)
            ys = torch.einsum("blh,nl,nh,on->blo", xs, ks, into.cfloat(), out_of.cfloat())
            return torch.fft.ifft(ys, dim=1).real[:, :length]

        return run, leaves

    return make


CASES = {
    "mlstm": Case(
        "mLSTM cell, batch 1, 4 heads of width 192",
        {OURS: mlstm_ours, "mlstm_kernels": mlstm_native, "xlstm": mlstm_parallel},
    ),
    "slstm": Case("sLSTM cell, batch 4, 4 heads of width 96", {OURS: slstm_ours, "xlstm": slstm_vanilla}),
    "mamba": Case(
        "the mixer of mamba-130m, batch 1, width 768",
        {OURS: mamba_ours, "transformers": mamba_transformers, "mambapy": mamba_py},
    ),
    **{
        f"centaurus_{mode}": Case(
            f"Centaurus, mode {mode}, batch 2, {sizes}", {OURS: centaurus_ours(mode), "plain FFT": centaurus_fft(mode)}
        )
        for mode, sizes in {
            "neck": "64 features, 64 channels of 8",
            "pointwise": "64 features, 64 times 8 channels",
            "dws": "256 features and channels of 8",
            "full": "16 features, 256 channels of 8",
        }.items()
    },
}


# --- measuring ------------------------------------------------------------------------------------------------------


def forward(candidate: tuple[Run, list[Tensor]]) -> None:
    with torch.no_grad():
        candidate[0]()


def both(candidate: tuple[Run, list[Tensor]]) -> None:
    torch.autograd.grad(candidate[0]().sum(), candidate[1], allow_unused=True)


def seconds(work: Callable[[Any], None], candidate: Any) -> float:
    start = time.perf_counter()
    work(candidate)
    return time.perf_counter() - start


def timed(candidates: dict[str, Any], work: Callable[[Any], None], budget: float) -> dict[str, float]:
    """Return medians of interleaved runs.

    A candidate runs until it has used its budget of seconds, at least three times unless the first run exceeds it.
    """
    runs: dict[str, list[float]] = {name: [] for name in candidates}
    first = {name: seconds(work, each) for name, each in candidates.items()}
    for _ in range(ROUNDS):
        for name, each in candidates.items():
            if first[name] < budget and (len(runs[name]) < 3 or sum(runs[name]) < budget):
                runs[name].append(seconds(work, each))
    return {name: statistics.median(runs[name] or [first[name]]) for name in candidates}


def peak(case: str, name: str, length: int, threads: int) -> float | None:
    """Return the MB of one forward and backward pass, in a separate process; None if the process failed."""
    command = [sys.executable, __file__, "--worker", case, name, str(length), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def worker(case: str, name: str, length: int) -> None:
    """Print the highest resident size during the passes, minus that at their start, in MB (Linux)."""
    maker = CASES[case].candidates[name]
    both(maker(64))
    made = maker(length)
    Path("/proc/self/clear_refs").write_text("5")  # reset the highest size
    before = resident("VmRSS")
    both(made)
    print((resident("VmHWM") - before) / 1024)


def resident(what: str) -> int:
    """Return a size of /proc/self/status in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def present(case: Case) -> tuple[dict[str, Maker], list[str]]:
    """Return the installed candidates, and the names of the others."""
    found, missing = {}, []
    for name, maker in case.candidates.items():
        try:
            maker(8)
            found[name] = maker
        except ImportError:
            missing.append(name)
    return found, missing


def measure(options: argparse.Namespace, known: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a list of records for each case and length that is not known, with one record per candidate."""
    for key in options.case or CASES:
        found, missing = present(CASES[key])
        why = dict.fromkeys(missing, "not installed")
        for length in options.length or LENGTHS:
            records = [r for r in known if (r["case"], r["length"]) == (key, length)]
            if not records:
                fit = {name: maker for name, maker in found.items() if name not in why}
                made = {name: maker(length) for name, maker in fit.items()}
                forwards, passes = timed(made, forward, options.budget), timed(made, both, options.budget)
                del made
                for name in CASES[key].candidates:
                    record: dict[str, Any] = {"case": key, "length": length, "candidate": name}
                    record["left_out"] = why.get(name)
                    if name in fit:
                        memory = peak(key, name, length, options.threads)
                        record |= {"forward_ms": 1e3 * forwards[name], "both_ms": 1e3 * passes[name], "peak_mb": memory}
                    print(json.dumps(record), file=sys.stderr)
                    records.append(record)
                yield records
            for r in records:  # four times the length takes at least four times as long, and as much memory
                if not r["left_out"] and r["both_ms"] > 1e3 * options.budget:
                    why[r["candidate"]] = f"left out: {r['both_ms'] / 1e3:,.0f} s at {length:,}"


# --- the page -------------------------------------------------------------------------------------------------------


def table(records: list[dict[str, Any]], threads: int) -> str:
    """Return the records as a page."""
    where = f"{platform.machine()}, {threads} threads of {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        f"# CPU, {datetime.date.today()}",
        "",
        f"{where}, {', '.join(versions(PEERS))}; float32. Written by `benchmarks/cpu.py`.",
        "",
        f"Medians of up to {ROUNDS} interleaved runs in ms, peak memory of both passes in MB; ratios to ours.",
    ]
    ratios: list[float] = []
    for key in dict.fromkeys(r["case"] for r in records):
        of_case = [r for r in records if r["case"] == key]
        lines += ["", f"## {CASES[key].about}", ""]
        lines += ["| tokens | | forward | forward + backward | peak memory |", "|---|---|---|---|---|"]
        for length in dict.fromkeys(r["length"] for r in of_case):
            found = [r for r in of_case if r["length"] == length]
            ours = next(r for r in found if r["candidate"] == OURS)
            lines += [row(r, ours) for r in found]
            peers = [r for r in found if r is not ours and not r["left_out"]]
            ratios += [min(r[f] for r in peers) / ours[f] for f in FIELDS[:2] if peers]
    if ratios:
        middle, slower = statistics.median(ratios), sum(r < 1 for r in ratios)
        speed = f"{middle:.1f} times as fast in the median of {len(ratios)} cells, at worst {min(ratios):.2f} times"
        lines += ["", f"Compared with the fastest other package in each cell: {speed}; slower in {slower}."]
    return "\n".join([*lines, "", *growth(records)])


FIELDS = ("forward_ms", "both_ms", "peak_mb")


def row(r: dict[str, Any], ours: dict[str, Any]) -> str:
    if r["left_out"]:
        return f"| {r['length']:,} | {r['candidate']} | {r['left_out']} | | |"
    cells = [cell(r, ours, field, "d" if field == "peak_mb" else ".1f") for field in FIELDS]
    return f"| {r['length']:,} | {r['candidate']} | {' | '.join(cells)} |"


def cell(r: dict[str, Any], ours: dict[str, Any], field: str, how: str) -> str:
    if r[field] is None:
        return "failed"
    value = f"{round(r[field]):,}" if how == "d" else f"{r[field]:,.1f}"
    if r is ours or not ours[field] or ours[field] <= 0:
        return value
    return f"{value} ({r[field] / ours[field]:.1f} x)"


def growth(records: list[dict[str, Any]]) -> list[str]:
    """Return lines on the growth of our time per token with length, and on the distance to the lower bounds."""
    lines = []
    ours = {(r["case"], r["length"]): r for r in records if r["candidate"] == OURS}
    lengths = sorted({length for _, length in ours})
    if len(lengths) > 1:
        a, b = lengths[-2:]
        lines += [f"Time per token at {b:,} tokens relative to {a:,} (forward, forward + backward):", ""]
        for key in dict.fromkeys(case for case, _ in ours):
            change = [ours[key, b][f] / b / (ours[key, a][f] / a) for f in FIELDS[:2]]
            lines.append(f"- {key}: {change[0]:.2f}, {change[1]:.2f}")
        lines.append("")
    lines += [distance_from_floor(key, ours[key, 2048]["forward_ms"]) for key in FLOORS if (key, 2048) in ours]
    if ("mlstm", 2048) in ours:
        products = 2048 * 4 * (2 * 64 * 192 + 2 * 192 * 192)  # within chunks of 64, and through the states
        floor = products / rate()
        times = ours["mlstm", 2048]["forward_ms"] / 1e3 / floor
        lines.append(
            f"The matrix products of the mLSTM at 2,048 tokens in chunks of 64 would take {1e3 * floor:.1f} ms "
            f"at the speed of one large product in this run; forward takes {times:.1f} times that."
        )
    return lines


# For 2,048 tokens: multiply-accumulates, and the numbers in inputs, weights and outputs, each moved once.
FLOORS = {
    "slstm": (2048 * 4 * 4 * 96 * 4 * 96, 2048 * 4 * 5 * 384 + 4 * 4 * 96 * 96),
    "mamba": (
        2048 * (768 * 3072 + 1536 * 80 + 48 * 1536 + 1536 * 768 + (4 + 4 * 16) * 1536),
        2 * 2048 * 768 + 768 * 3072 + 1536 * (80 + 48 + 768 + 4 + 16),
    ),
}


def distance_from_floor(key: str, forward_ms: float) -> str:
    """Return a line that compares the forward pass at 2,048 tokens with its arithmetic and its memory traffic."""
    products, numbers = FLOORS[key]
    arithmetic, memory = 1e3 * products / rate(), 1e3 * 4 * numbers / reading_rate()
    return (
        f"{key} at 2,048 tokens: {arithmetic:.1f} ms of multiply-accumulates at the speed of a large matrix product, "
        f"{memory:.1f} ms to read as many bytes as it must move; forward takes {forward_ms / arithmetic:.1f} and "
        f"{forward_ms / memory:.1f} times that."
    )


def reading_rate() -> float:
    """Return the bytes per second at which a sum reads memory once."""
    x = torch.ones(1 << 26)
    return x.numel() * 4 / min(seconds(torch.sum, x) for _ in range(9))


def rate() -> float:
    """Return the multiply-accumulates per second of a large matrix product."""
    a = torch.randn(1024, 1024)
    a @ a
    return 1024**3 / statistics.median(seconds(lambda m: m @ m, a) for _ in range(21))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the mixers on a CPU, against other packages.")
    parser.add_argument("--case", action="append", choices=CASES, help="measure only this case; may be repeated")
    parser.add_argument("--length", action="append", type=int, help="tokens; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for one candidate in one cell")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--keep", action="store_true", help="keep the cases that today's file in --out contains")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "CANDIDATE", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        case, name, length = options.worker
        worker(case, name, int(length))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / f"{datetime.date.today()}-cpu.md"
    numbers = page.with_suffix(".json")
    records = json.loads(numbers.read_text(encoding="utf-8")) if options.keep and numbers.exists() else []
    for more in measure(options, records):
        records += more
        write(numbers, json.dumps(records, indent=1))  # after each cell, so that an interrupt loses only one
    order = list(CASES)
    records.sort(key=lambda r: (order.index(r["case"]), r["length"]))
    write(page, table(records, options.threads))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
