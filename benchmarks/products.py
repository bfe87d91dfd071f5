"""Compare the two calls between which `kernels/products.py` chooses: torch's `linear` (MKL) and oneDNN's.

    python benchmarks/products.py [rounds]

One thread, float32. Each row is a matrix and a number of tokens, the speed of torch's call, and how many times as fast
oneDNN is: median of interleaved runs, CPU time of the process. Few tokens read a matrix from memory or from a cache.
An asterisk marks what `linear` calls on this processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import products

MATRICES = ((256, 256), (512, 256), (512, 512), (1024, 512), (1536, 768), (3072, 768), (768, 3072))
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
BEYOND_CACHES = 1 << 27  # bytes
ROUND = 1 << 28  # multiply-accumulates of one round


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return products._multiply(x, weight, None)


def compare(x: Tensor, weights: list[Tensor], rounds: int) -> tuple[float, float]:
    """Return the seconds of one product by torch, and how many times as fast oneDNN is."""
    repeats = max(1, ROUND // (len(weights) * x.shape[0] * weights[0].numel()))
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [F.linear, onednn]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, found in zip(calls, seconds, strict=True):
            start = time.process_time()
            for _ in range(repeats):
                for weight in weights:
                    call(x, weight)
            found.append((time.process_time() - start) / (repeats * len(weights)))
    ratios = [one / other for one, other in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(ratios)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    print(f"{products.PROCESSOR}, {torch.backends.cpu.get_cpu_capability()}")
    for rows, width in MATRICES:
        for tokens in TOKENS:
            for place, copies in (("memory", BEYOND_CACHES // (4 * rows * width)), ("cache", 1)):
                if place == "memory" and tokens > 64:
                    continue
                x = torch.randn(tokens, width)
                seconds, ratio = compare(x, [torch.randn(rows, width) for _ in range(copies)], rounds)
                ours = products._is_faster_by_onednn(x.numel(), rows, width)
                speed = f"{4e-9 * rows * width / seconds:.1f} GB/s, {1e-9 * tokens * rows * width / seconds:.1f} G/s"
                print(f"{rows} x {width}, {tokens} tokens, {place}: {speed}, {ratio:.2f}{'*' * ours}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
