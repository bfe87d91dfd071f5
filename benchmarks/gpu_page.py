"""The page that `gpu.py` writes: what was checked, what it took and where, and what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from gpu_cases import CASES, Shape

OURS = "seqblocks"


def as_text(shape: Shape) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in shape.items())


def page(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    lines = [*_head(results), *checks(results["checks"]), *_times(results["times"]), *kernels(results["times"])]
    if results["unchecked"]:
        lines += ["", "Timed, but in no check that passed:", "", *(f"- {text}" for text in results["unchecked"])]
    if results["left_out"]:
        lines += ["", f"Left out for lack of time: {'; '.join(results['left_out'])}."]
    return "\n".join(lines)


def _head(results: dict[str, Any]) -> list[str]:
    limits = results["ceilings"]
    return [
        f"# {results['device']}, {results['date']}",
        "",
        f"{', '.join(results['versions'])}; bfloat16. Written by `benchmarks/gpu.py`."
        + (" A rehearsal on a CPU: no figure means anything." if results["rehearsed"] else ""),
        "",
        f"Measured limits: {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s copied (bytes read plus bytes written), and",
        f"{2 * limits['bf16_products_per_s'] / 1e12:.0f} TFLOP/s in a bfloat16 product of 8,192.",
    ]


def checks(found: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "",
        "## Checks",
        "",
        "Largest error relative to the largest value, or of the norm, against the recurrence in float64: short calls,",
        "launched as these shapes are.",
        "",
        "| | shape | dtype | outputs | gradients | |",
        "|---|---|---|---|---|---|",
    )
    for r in found:
        line = f"| {r['case']} | {as_text(r['shape'])} | {r['dtype']} | "
        if r.get("failed"):
            yield f"{line} | | **{r['failed']}** |"
        else:
            verdict = "ok" if r["ok"] else f"**wrong**: {r['worst']}"
            yield f"{line}{r['outputs']:.1e} | {r['gradients']:.1e} | {verdict} |"
    for r in found:
        for name, text in r.get("where", {}).items():
            yield from ("", f"{r['case']}, {as_text(r['shape'])}, {r['dtype']}, {name}:", "", "```", text, "```")


def _times(times: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "", "## Times", "",
        "Milliseconds; in brackets, ours: times the yardstick, which is the least traffic or the arithmetic, whichever",
        "takes longer (of the mLSTM: in chunks of 64 tokens; others may need less); others: times ours. A star: Python",
        "may be in the figure. `off by`: ours against the torch implementation in float32 at that shape, peers against",
        "ours.",
    )  # fmt: skip
    for key in dict.fromkeys(r["case"] for r in times):
        found = [r for r in times if r["case"] == key]
        order = [json.dumps(r["shape"]) for r in found]
        yield from ("", f"### {CASES[key].about}", "")
        yield from ("| | | forward | forward + backward | peak MB | off by |", "|---|---|---|---|---|---|")
        for r in sorted(found, key=lambda r: order.index(json.dumps(r["shape"]))):  # of a shape, ours is first
            ours = next((o for o in found if o["shape"] == r["shape"] and o["candidate"] == OURS), {})
            yield _row(r, ours)


def _row(r: dict[str, Any], ours: dict[str, Any]) -> str:
    line = f"| {as_text(r['shape'])} | {r['candidate']} |"
    if r["left_out"]:
        return f"{line} {r['left_out']} | | | |"
    cells = [_cell(r, ours, field, least) for field, least in zip(("forward", "both"), r["yardstick_ms"], strict=True)]
    peak = "" if r["peak_mb"] is None else f"{r['peak_mb']:,.0f}"
    off = "" if r.get("compared") is None else f"{r['compared']:.1e}"
    off = off if r.get("ok", True) else f"**{off} {r['worst']}**"
    return f"{line} {' | '.join(cells)} | {peak} | {off} |"


def _cell(r: dict[str, Any], ours: dict[str, Any], field: str, least: float) -> str:
    if f"{field}_ms" not in r:
        return ""
    times = r[f"{field}_ms"] / (least if r is ours else ours.get(f"{field}_ms", math.nan))
    return f"{r[f'{field}_ms']:.3f}{'*' * r[f'{field}_late']} ({times:.2f} x)"


def kernels(times: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the kernels that take at least a fiftieth of a call."""
    found = [r for r in times if r.get("kernels")]
    if not found:
        return
    yield from (
        "", "## Kernels", "",
        "Milliseconds of each kernel in a call forward and backward (forward alone where there is no other), in a",
        "profile with a warm cache; kernels below a fiftieth of the call are summed.", "",
        "| | | kernel | launches | ms |", "|---|---|---|---|---|",
    )  # fmt: skip
    for r in found:
        least = sum(ms for _, ms in r["kernels"].values()) / 50
        shown = {name: (count, ms) for name, (count, ms) in r["kernels"].items() if ms >= least}
        rest = [each for name, each in r["kernels"].items() if name not in shown]
        if rest:
            shown["others"] = (sum(count for count, _ in rest), sum(ms for _, ms in rest))
        for name, (count, ms) in shown.items():
            label = name if len(name) <= 60 else f"{name[:57]}..."
            yield f"| {r['case']}, {as_text(r['shape'])} | {r['candidate']} | `{label}` | {count:g} | {ms:.3f} |"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])[:200]}".rstrip(": ")
