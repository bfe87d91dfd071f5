"""Compare the calls between which `kernels/products.py` chooses: torch's `linear` (MKL), oneDNN's, and rows in batches.

    python benchmarks/products.py [rounds]

One thread, float32. Each row is a matrix and a number of tokens, the speed of torch's call, and how many times as fast
the others are: medians of interleaved runs, CPU time of the process. Few tokens read a matrix from memory or from a
cache. An asterisk marks what `linear` calls on this processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import numerics, products

MATRICES = ((512, 512), (1024, 512), (2048, 512), (1536, 768), (3072, 768), (768, 1536), (768, 3072))
TOKENS = (1, 2, 4, 8, 16, 64, 512, 2048)
BEYOND_CACHES = 1 << 27  # bytes
ROUND = 1 << 28  # multiply-accumulates of one round


CALLS: dict[str, Callable[..., Tensor]] = {
    "torch": F.linear, "oneDNN": products._by_onednn,
    "rows": lambda x, weight, bias: products._prepare_rows(weight, bias)(x),
}  # fmt: skip


def compare(x: Tensor, weights: list[Tensor], names: list[str], rounds: int) -> tuple[float, list[float]]:
    """Return the seconds of one product by the first call, and how many times as fast the others are."""
    repeats = max(1, ROUND // (len(weights) * x.shape[0] * weights[0].numel()))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, found in seconds.items():
            call = CALLS[name]
            start = time.process_time()
            for _ in range(repeats):
                for weight in weights:
                    call(x, weight, None)
            found.append((time.process_time() - start) / (repeats * len(weights)))
    first, *others = seconds.values()
    ratios = [statistics.median(a / b for a, b in zip(first, other, strict=True)) for other in others]
    return statistics.median(first), ratios


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    print(f"{numerics.PROCESSOR_NAME}, {torch.backends.cpu.get_cpu_capability()}")
    for rows, width in MATRICES:
        for tokens in TOKENS:
            for place, copies in (("memory", BEYOND_CACHES // (4 * rows * width)), ("cache", 1)):
                if place == "memory" and tokens > 64:
                    continue
                x = torch.randn(tokens, width)
                names = [*CALLS][: 3 if tokens <= products.READING_MAX_TOKENS else 2]
                seconds, ratios = compare(x, [torch.randn(rows, width) for _ in range(copies)], names, rounds)
                ours = products.chosen(x.numel(), rows, width)
                speed = f"{4e-9 * rows * width / seconds:.1f} GB/s, {1e-9 * tokens * rows * width / seconds:.1f} G/s"
                others = zip(names[1:], ratios, strict=True)
                told = [f"{name} {ratio:.2f}{'*' * (name == ours)}" for name, ratio in others]
                print(f"{rows} x {width}, {tokens} tokens, {place}: {speed}; {', '.join(told)}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
