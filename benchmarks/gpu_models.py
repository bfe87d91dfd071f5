"""Time whole language models on a GPU: forward passes, training steps, single tokens, and captured generation.

    python benchmarks/gpu_models.py [--model mamba_130m] [--out benchmarks/results] [--minutes 7]

Each time is a median of the repetitions of `seqblocks bench`, in bfloat16 with random weights, and stands beside its
lower bound: for each step the arithmetic at the speed of a large matrix product, or the bytes at the speed of memory,
whichever takes longer. Tables are written after each model, so an interrupted run keeps what is done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
from common import versions, write

import seqblocks
from seqblocks.bench import bench

MODELS = (
    "transformer_125m", "mamba_130m", "mamba2_130m", "xlstm_125m", "rwkv7_0_4b", "gated_deltanet_1_3b", "kda_1_3b",
    "mamba2_1_3b", "xlstm_1_3b", "gla_1_3b", "mamba_1_4b", "retnet_1_3b",
)  # fmt: skip
LENGTH = 2048
LENGTHS = {"transformer_125m": 1024}  # its position embedding has no more
CASES = (("forward", 8), ("train", 4), ("step", 1), ("step", 64))
GENERATED = 64  # tokens


def measured(name: str, mode: str, batch: int, seconds: float) -> dict[str, Any]:
    """Return the row of one case; of a case that failed, the reason."""
    torch.cuda.reset_peak_memory_stats()
    try:
        model = seqblocks.build(name, device="cuda", dtype=torch.bfloat16, seed=0).eval()
        found = bench(model, mode, batch, None if mode == "step" else LENGTHS.get(name, LENGTH), seconds)
        row = found.as_data() | {"model": name, "peak_bytes": torch.cuda.max_memory_allocated()}
        if mode == "step":
            row["generated_seconds"] = generated(model, batch)
        return row
    except Exception as error:  # one failing model must not end the run
        return {"model": name, "mode": mode, "batch": batch, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        model = None  # type: ignore[assignment]
        torch.cuda.empty_cache()


def generated(model: seqblocks.SequenceModel, batch: int) -> float:
    """Return the seconds that one token of `generate` takes, after a first call that records the graphs."""
    prompt = torch.randint(0, 256, (batch, 16), device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        seqblocks.generate(model, prompt, GENERATED)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / GENERATED)
    return best


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| model | | ms | least | ratio | peak GB | tokens/s | ms a token of `generate` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = f"| {row['model']} | {row['mode']}, batch {row['batch']} |"
        if "error" in row:
            lines.append(f"{case} {row['error'].splitlines()[0]} | | | | | |")
            continue
        tokens = row["batch"] * (row["length"] or 1) / row["seconds"]
        whole = f"{row['generated_seconds'] * 1e3:.2f}" if "generated_seconds" in row else ""
        lines.append(
            f"{case} {row['seconds'] * 1e3:,.2f} | {row['floor_seconds'] * 1e3:,.2f} "
            f"| {row['seconds'] / row['floor_seconds']:.1f} | {row['peak_bytes'] / 1e9:.1f} | {tokens:,.0f} | {whole} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time whole models on a GPU.")
    parser.add_argument("--model", action="append", help="only this model; may be repeated")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no further case after this time")
    parser.add_argument("--seconds", type=float, default=1.0, help="to measure each case")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    start, rows = time.perf_counter(), []
    device = torch.cuda.get_device_name()
    stem = f"{datetime.date.today()}-{device.lower().replace(' ', '-')}-models"
    head = (
        f"# Whole models on {device}, {datetime.date.today()}\n\n"
        + ", ".join(versions(()))
        + f"; bfloat16, {LENGTH:,} tokens in a pass. Written by `benchmarks/gpu_models.py`.\n\n"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.model or MODELS:
        for mode, batch in CASES:
            if time.perf_counter() - start > 60 * options.minutes:
                break
            began = time.perf_counter()
            rows.append(measured(name, mode, batch, options.seconds))
            print(name, mode, batch, f"{time.perf_counter() - began:.1f} s", rows[-1].get("error", ""), flush=True)
        write(options.out / f"{stem}.md", head + table(rows))
        write(options.out / f"{stem}.json", json.dumps(rows, indent=1) + "\n")
    print(head + table(rows))


if __name__ == "__main__":
    main()
