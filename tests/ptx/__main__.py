"""Run the kernels' compiled code on the CPU, and print a table. Ends with 1 if a case is not ok.

    python -m tests.ptx                          every case that takes less than some minutes, for sm_80
    python -m tests.ptx PREFIX [PREFIX ...]      the cases whose names start with one of these
    python -m tests.ptx --names                  list the names

docs/kernels/compiled_code.md explains the options and what is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.ptx import cases
from tests.ptx.compare import Case, Outcome, run
from tests.ptx.execute import Settings


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.ptx", description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", metavar="PREFIX", help="only cases whose names start with one of these")
    options.add_argument("--op", action="append", choices=cases.OPS, help="only cases of this family; may be repeated")
    options.add_argument("--arch", action="append", choices=["sm_80", "sm_90"], help="may be repeated")
    options.add_argument("--order", default="up", choices=["up", "down", "random"], help="of warps and programs")
    options.add_argument("--copies", default="late", choices=["late", "early"], help="when cp.async takes effect")
    options.add_argument("--omit", default="",
                         help="leave out 'barriers', 'waits', or barriers of folder/file.py:line; separated by commas")
    options.add_argument("--slow", action="store_true", help="also the cases that take minutes")
    options.add_argument("--part", default="0/1", metavar="K/N", help="of N parts of the cases, the part K")
    options.add_argument("--json", type=Path, help="append the results to this file; skip the cases that it has")
    options.add_argument("--names", dest="list", action="store_true", help="list the names")
    options.add_argument("--kernels", action="store_true", help="also print which kernels ran, and their launches")
    return options


def selected(options: argparse.Namespace) -> list[Case]:
    found = [
        case for name, case in cases.load().items()
        if (any(name.startswith(start) for start in options.names) or not options.names)
        and (not options.op or cases.op_of(name) in options.op)
        and (options.slow or not case.slow or name in options.names)
    ]
    part, of = map(int, options.part.split("/"))
    return found[part::of]


def show(outcome: Outcome) -> None:
    print(outcome.line(), flush=True)
    for text in outcome.details() if outcome.verdict != "ok" else ():
        print(f"      {text}", flush=True)


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    chosen = selected(options)
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    torch.set_num_threads(1)
    settings = Settings(options.order, options.copies, options.omit)
    way = [options.order, options.copies, options.omit]
    done = [json.loads(line) for line in options.json.read_text().splitlines()] if (
        options.json and options.json.exists()) else []
    skipped = {(x["case"], x["arch"], *x["way"]) for x in done}
    start, bad, count = time.monotonic(), 0, 0
    kernels: Counter[str] = Counter()
    for arch in options.arch or ["sm_80"]:
        for case in chosen:
            if (case.name, arch, *way) in skipped:
                continue
            outcome = run(case, arch, settings)
            show(outcome)
            count, bad = count + 1, bad + (outcome.verdict != "ok")
            kernels += outcome.record.launches
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(outcome.as_dict() | {"way": way}) + "\n")
    if options.kernels:
        print("kernels:", ", ".join(f"{name} {n}" for name, n in sorted(kernels.items())))
    print(f"{count} cases, {bad} not ok, {time.monotonic() - start:.0f} s")
    return int(bad > 0 or not count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
