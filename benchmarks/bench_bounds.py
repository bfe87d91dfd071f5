"""Compare what `seqblocks bench` measures with itself: its steps with the whole, with hooks and without them.

    python benchmarks/bench_bounds.py [MODEL …] [--seconds 10]

One thread, so that processor time is measured. Bounds: the rows add up to the whole within 10 %; a pass whose steps are
timed takes within 5 % of one without; no floor is above a time; the times spread by at most 10 %, so that ratios are
stated. The exit code is 1 if a bound is exceeded. On a busy machine caches and memory are shared too: run it on a quiet
one.
"""

from __future__ import annotations

import argparse
import sys

import torch

import seqblocks
from seqblocks.bench import Bench, bench
from seqblocks.bench.measure import MAX_SPREAD, MODES

MODELS = ("hybrid_small", "mamba_small", "mlstm_small", "transformer_small")
SUM, HOOKS = 0.1, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=MODELS)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':20}{'mode':9}{'ms':>9}{'spread':>8}{'sum':>7}{'hooks':>7}{'above':>7}{'stated':>8}  exceeded")
    exceeded = False
    for name in options.model:
        for mode in MODES:
            found = bench(seqblocks.build(name), mode, seconds=options.seconds)
            faults = _faults(found)
            exceeded |= bool(faults)
            above, stated = _above(found), sum(row.ratio is not None for row in found.steps)
            figures = f"{1e3 * found.seconds:9.3f}{found.spread:8.1%}{_sum(found):7.3f}{_hooks(found):7.3f}"
            print(f"{name:20}{mode:9}{figures}{above:7}{stated:5}/{len(found.steps)}  {', '.join(faults)}", flush=True)
    return int(exceeded)


def _sum(found: Bench) -> float:
    return sum(row.seconds for row in found.steps) / found.seconds


def _hooks(found: Bench) -> float:
    return found.seconds_with_hooks / found.seconds


def _above(found: Bench) -> int:
    """Return the number of rows whose floor is above the time."""
    return sum(row.floor_seconds > row.seconds for row in found.steps) + (found.floor_seconds > found.seconds)


def _faults(found: Bench) -> list[str]:
    bounds = {
        "sum": abs(_sum(found) - 1) <= SUM, "hooks": abs(_hooks(found) - 1) <= HOOKS, "floor": not _above(found),
        "spread": found.spread <= MAX_SPREAD,
    }  # fmt: skip
    return [name for name, is_kept in bounds.items() if not is_kept]


if __name__ == "__main__":
    sys.exit(main())
