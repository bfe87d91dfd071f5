"""The least time of a computation on this machine: from measured rates of arithmetic and of memory."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = tuple(1 << power for power in range(14, 29, 2))  # bytes: from a first-level cache to memory
MEMORY_BYTES = SIZES[-1]
TRIALS = 25
SECONDS = 0.004  # of a trial: short, so that some are not interrupted by other processes
SIDES = {"cuda": (8192,), "cpu": (256, 512, 1024)}  # of matrices: a product of the smaller ones is a short trial too


@dataclass(frozen=True)
class Limits:
    """Measured rates: the best of several trials, so that no floor is above a time.

    flops: per second, in products of large matrices. traffic: bytes read and written per second, by the size of the
    operand in bytes: small operands stay in a cache.
    """

    flops: float
    traffic: dict[int, float]

    @property
    def memory(self) -> float:
        """Bytes per second from memory."""
        return self.traffic[MEMORY_BYTES]

    def seconds(self, flops: float, sizes: Sequence[int], from_memory: int = 0) -> float:
        """Return the least time of so many operations, and of reading or writing operands of these sizes once.

        from_memory: further bytes that no cache holds.
        """
        moved = sum(size / self._rate(size) for size in sizes) + from_memory / self.memory
        return max(flops / self.flops, moved)

    def _rate(self, size: int) -> float:
        """Return the highest rate that was measured from the nearest size below on: larger operands are slower."""
        below = max((measured for measured in self.traffic if measured <= size), default=0)
        return max(rate for measured, rate in self.traffic.items() if measured >= below)


def measured(device: torch.device, dtype: torch.dtype) -> Limits:
    """Return the rates of a device with as many threads as torch uses, measured once per process: it takes 2 s."""
    return _measured(device, dtype, torch.get_num_threads())


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> Limits:
    flops = max(_flops(side, device, dtype) for side in SIDES.get(device.type, SIDES["cuda"]))
    return Limits(flops, {size: _traffic(size, device) for size in SIZES})


def _flops(side: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _best(lambda: a @ b, device)


def _traffic(size: int, device: torch.device) -> float:
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    return max(size / _best(x.sum, device), 2 * size / _best(lambda: y.copy_(x), device))


def _best(run: Callable[[], Any], device: torch.device) -> float:
    """Return the least seconds of a call in several trials, each of many calls."""
    run()
    calls = max(1, int(SECONDS / max(_seconds(run, 1, device), 1e-7)))
    return min(_seconds(run, min(calls, 10_000), device) for _ in range(TRIALS))


def _seconds(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    now = clock_of(device)
    wait(device)
    start = now()
    for _ in range(calls):
        run()
    wait(device)
    return (now() - start) / calls


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock for what runs on a device. On one thread of a CPU, other processes do not count."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moved(inputs: Sequence[Tensor], parameters: Sequence[Tensor], y: Tensor) -> tuple[list[int], int]:
    """Return the bytes of each activation that a step must read or write, and those of its parameters.

    A view is nothing to compute. Of a table of rows, such as an embedding, only those that make up the output count.
    """
    if any(_storage(x) == _storage(y) for x in inputs):
        return [], 0
    own = [_bytes(x) for x in (*inputs, y)]
    looked_up = bool(inputs) and not inputs[0].is_floating_point()
    weights = sum(p.nbytes for p in parameters)
    return own, min(weights, y.nbytes) if looked_up else weights


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor, once each where it is expanded."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sizes)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
