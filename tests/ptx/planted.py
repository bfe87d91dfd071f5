"""Small Triton kernels, correct and faulty, compiled and run in the interpreter. Prints what is found, as JSON.

    python -m tests.ptx.planted sm_80|sm_90

faults: by name, what is reported, and the line of this file that should be. products: by name, the largest error
relative to the largest value, and the notes. replayed: how many elements differ from a recording, with one planted.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton.language as tl

from seqblocks.kernels import triton_common as common
from tests.ptx import replay, triton_launch
from tests.ptx.dtypes import Fault
from tests.ptx.execute import Settings


@common.kernel()
def reverse(x, y, BARRIER: tl.constexpr, N: tl.constexpr):
    j = tl.arange(0, N)
    tl.store(y + j, tl.load(x + j) * 2)  # written
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + j, tl.load(y + (N - 1 - j)))  # read by others


@common.kernel()
def copy(x, y, step, N: tl.constexpr):
    j = tl.arange(0, N)
    tl.store(y + j + tl.program_id(0) * step, tl.load(x + j))  # copied


@common.kernel()
def transpose(x, y, N: tl.constexpr):
    j = tl.arange(0, N)
    tile = tl.load(x + j[:, None] * N + j[None, :])
    tl.store(y + j[:, None] * N + j[None, :], tl.trans(tile))  # through shared memory


@common.kernel()
def multiply(
    x, y, z, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, XT: tl.constexpr, YT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """z [M, N] = x [M, K] y [K, N]; XT, YT: x and y are transposed in memory."""
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + (k[None, :] * M + m if XT else m * K + k[None, :]))
        b = tl.load(y + (n * K + k[:, None] if YT else k[:, None] * N + n))
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(z + m * N + n, total)


def line(kernel: Any, words: str) -> str:
    """Return the place of the line of a kernel that ends with this comment."""
    text, first = inspect.getsourcelines(kernel.function.fn)
    return f"ptx/planted.py:{first + next(at for at, each in enumerate(text) if each.rstrip().endswith(words))}"


def said(arch: str, launch: Callable[[], Any], **settings: Any) -> list[str]:
    """Return the fault that ends a launch, or its notes without the statements, each once."""
    with triton_launch.simulated(arch, Settings(**settings)) as record:
        try:
            launch()
        except Fault as fault:
            return [str(fault)]
    return sorted({note.partition(": ")[0] for note in record.notes})


def claimed_aligned(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], arch: str) -> tuple[Any, Any]:
    """Compile as for tensors at multiples of 16 bytes, whatever is passed."""
    moved = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
    binary, _ = COMPILED(kernel, moved, options, arch)
    return binary, COMPILED(kernel, arguments, options, arch)[1]


COMPILED = triton_launch.compiled


def faults(arch: str) -> dict[str, tuple[list[str], str]]:
    """Return by name what is reported, and the line that should be in it."""
    x, y = torch.arange(512.0), torch.zeros(512)
    exact = x.flip(0) * 2
    found = {"with a barrier": (said(arch, lambda: reverse[(1,)](x, y, BARRIER=True, N=512, num_warps=4)), "")}
    assert torch.equal(x, exact)

    def add(name: str, where: str, launch: Callable[[], Any], **settings: Any) -> None:
        found[name] = said(arch, launch, **settings), where

    add("without a barrier", line(reverse, "# read by others"),
        lambda: reverse[(1,)](torch.arange(512.0), torch.zeros(512), BARRIER=False, N=512, num_warps=4))
    copied = line(copy, "# copied")
    add("two programs overlap", copied, lambda: copy[(2,)](torch.randn(128), torch.zeros(256), 120, N=128, num_warps=2))
    add("out of bounds", copied, lambda: copy[(2,)](torch.randn(128), torch.zeros(230), 120, N=128, num_warps=2))
    add("nothing wrote it", copied, lambda: copy[(1,)](torch.zeros(1).new_empty(128), torch.zeros(128), 0, N=128))
    with mock.patch.object(triton_launch, "compiled", claimed_aligned):
        add("misaligned", copied, lambda: copy[(1,)](torch.randn(129)[1:], torch.zeros(128), 0, N=128, num_warps=1))
    through = line(transpose, "# through shared memory")
    square = torch.randn(64, 64)
    add("transposed", "", lambda: transpose[(1,)](square, torch.zeros(64, 64), N=64, num_warps=4))
    add("no barriers of the compiler", through,
        lambda: transpose[(1,)](square, torch.zeros(64, 64), N=64, num_warps=4), omit="barriers")
    a, b, z = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((64, 128), (128, 64), (64, 64)))
    given = {"M": 64, "N": 64, "BK": 32, "XT": False, "YT": False, "PRECISION": "ieee", "num_stages": 3, "num_warps": 4}
    add("no wait for copies", "ptx/planted.py:", lambda: multiply[(1,)](a, b, z.float(), 128, **given), omit="waits")
    return found


PRODUCTS = (  # dtype, M, N, K, BK, x transposed, y transposed, warps, stages
    ("bf16", 64, 64, 128, 32, False, False, 4, 3), ("bf16", 64, 128, 128, 64, True, False, 4, 2),
    ("f16", 128, 32, 64, 64, False, True, 8, 1), ("f16", 64, 16, 64, 32, True, True, 4, 2),
    ("tf32", 64, 64, 64, 32, False, False, 4, 2), ("tf32", 64, 32, 64, 32, False, True, 4, 1),
    ("bf16", 16, 16, 32, 16, False, True, 1, 1),
)


def products(arch: str) -> dict[str, tuple[float, list[str]]]:
    """Return by name the error of a product, compiled as mma or wgmma, relative to its largest value."""
    found = {}
    for dtype, M, N, K, BK, x_transposed, y_transposed, warps, stages in PRODUCTS:
        held = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[dtype]
        x, y, z = torch.randn(M, K).to(held), torch.randn(K, N).to(held), torch.zeros(M, N)
        if dtype == "tf32":  # as tensor cores read them
            x, y = ((t.view(torch.int32) & -8192).view(torch.float32) for t in (x, y))
        options = {"M": M, "N": N, "BK": BK, "XT": x_transposed, "YT": y_transposed, "num_warps": warps,
                   "num_stages": stages, "PRECISION": "tf32" if dtype == "tf32" else "ieee"}
        for copies in ("late", "early"):
            given = x.t().contiguous() if x_transposed else x, y.t().contiguous() if y_transposed else y
            notes = said(arch, lambda given=given: multiply[(1,)](*given, z, K, **options), copies=copies)  # noqa: B023
            exact = x.double() @ y.double()
            error = ((z.double() - exact).abs().max() / exact.abs().max()).item()
            name = f"{dtype} {M}x{N}x{K} by {BK}{' xT' * x_transposed}{' yT' * y_transposed} {copies}"
            found[name] = error, notes
    return found


def replayed(arch: str) -> dict[str, int]:
    """Return by tensor how many elements differ from those of a recording of `copy`, of which one is wrong."""
    x, y = (torch.randn(128).numpy().view("uint8") for _ in range(2))
    after = x.copy()
    after[7] ^= 0x40  # in the exponent of the second number
    tensors = [("T", "torch.float32", (128,), (1,), 0, data) for data in (x, y, after)]
    launch = replay.Recorded("copy", "tests.ptx.planted", (1,), [*tensors[:2], ("V", 0)], {"N": 128},
                             [tensors[0], tensors[2], ("V", 0)])
    return {name: found.beyond for name, found in replay.replay(launch, arch, replay.TOLERANCE)}


if __name__ == "__main__":
    torch.manual_seed(0)
    arch = sys.argv[1]
    print(json.dumps({"faults": faults(arch), "products": products(arch), "replayed": replayed(arch)}))
