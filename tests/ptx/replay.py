"""Run recorded launches of a device in the interpreter, from the same inputs, and print where the results differ.

    python -m tests.ptx.replay FILE [KERNEL ...] [--arch sm_90] [--all]

FILE is a pickle, or a gzipped one, of a list of launches: (name of the kernel, module, grid, arguments before, options,
arguments after; without these if the launch failed). A tensor is ("T", dtype, shape, stride, offset, bytes of its
storage), any other argument ("V", value).

For each tensor that a launch changed, or should have, a line has the largest difference, the largest value, how many
elements differ by more than the tolerance, and the first of them. Each launch starts from the recording, so that the
first one that differs is the one that is wrong. Ends with 1 if one differs.

Unpickling runs code: open your own recordings only.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ptx.dtypes import Fault
from tests.ptx.execute import Settings
from tests.ptx.triton_launch import simulated

TOLERANCE = 2e-2  # relative to the largest value: a few roundings of bfloat16, in which operands of products are held
FIRST = 3


class Recorded(NamedTuple):
    kernel: str
    module: str
    grid: Any
    before: list[Any]
    options: dict[str, Any]
    after: list[Any] | None = None  # absent if the launch failed


class Difference(NamedTuple):
    largest: float
    value: float
    beyond: int  # the tolerance
    of: int
    first: list[list[int]]


def read(path: Path) -> list[Recorded]:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return [Recorded(*launch) for launch in pickle.loads(data)]


def restored(argument: Any) -> Any:
    """Return an argument as the kernel received it, in memory of its own."""
    if argument[0] == "V":
        return argument[1]
    _, dtype, shape, stride, offset, data = argument
    kind = getattr(torch, str(dtype).removeprefix("torch."))
    return torch.empty(0, dtype=kind).set_(torch.from_numpy(data.copy()).untyped_storage(), offset, shape, stride)


def difference(found: Tensor, expected: Tensor, tolerance: float) -> Difference:
    """Compare two results. NaN and infinities are equal to themselves only."""
    x, y = found.double(), expected.double()
    gap = (x - y).abs().nan_to_num(nan=float("inf"))
    gap[(x == y) | (x.isnan() & y.isnan())] = 0.0
    finite = y[y.isfinite()]
    value = finite.abs().max().item() if finite.numel() else 0.0
    bad = gap > tolerance * value
    return Difference(gap.max().item() if gap.numel() else 0.0, value, int(bad.sum()), gap.numel(),
                      bad.nonzero()[:FIRST].tolist())


def replay(launch: Recorded, arch: str, tolerance: float, everything: bool = False) -> Iterator[tuple[str, Difference]]:
    """Run a launch. Yield a difference for each tensor that it changed here or there."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    given = [restored(x) for x in launch.before]
    with simulated(arch, Settings()) as record:
        kernel[launch.grid](*given, **launch.options)
    for text in record.notes:
        print(f"    {text}")
    if launch.after is None:
        print("    the recorded launch failed: nothing to compare with")
        return
    names = kernel.function.arg_names
    for name, x, before, after in zip(names, given, launch.before, launch.after, strict=False):
        if isinstance(x, Tensor):
            found = difference(x, restored(after), tolerance)
            changed = difference(restored(after), restored(before), 0.0).beyond
            if everything or changed or found.largest:
                yield name, found


def show(launch: Recorded, arch: str, tolerance: float, everything: bool) -> bool:
    """Print the differences of a launch. Return whether it is right."""
    start, right = time.monotonic(), True
    print(f"{launch.kernel} {launch.grid} {launch.options}", flush=True)
    try:
        for name, found in replay(launch, arch, tolerance, everything):
            wrong = f", first {found.first}" if found.beyond else ""
            print(f"    {name:<12} difference {found.largest:.1e} of {found.value:.1e}, {found.beyond} of {found.of} "
                  f"beyond the tolerance{wrong}", flush=True)
            right = right and not found.beyond
    except Fault as fault:
        print(f"    {fault}")
        right = False
    print(f"    {'agrees' if right else 'DIFFERS'}, {time.monotonic() - start:.0f} s", flush=True)
    return right


def main(words: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m tests.ptx.replay", description=__doc__.splitlines()[0])
    options.add_argument("file", type=Path)
    options.add_argument("kernels", nargs="*", metavar="KERNEL", help="only launches of these kernels")
    options.add_argument("--arch", default="sm_90", choices=["sm_80", "sm_86", "sm_89", "sm_90"])
    options.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative to the largest value")
    options.add_argument("--all", action="store_true", help="also tensors that the launch leaves as they are")
    given = options.parse_args(words)
    torch.set_num_threads(1)
    chosen = [x for x in read(given.file) if not given.kernels or x.kernel in given.kernels]
    right = [show(launch, given.arch, given.tolerance, given.all) for launch in chosen]
    print(f"{len(right)} launches, {right.count(False)} differ")
    return int(not right or not all(right))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
