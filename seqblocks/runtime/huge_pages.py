"""Ask Linux for huge pages for the parameters of a large model.

A token reads all weights once. With huge pages the processor translates fewer addresses, and filling new memory takes
fewer page faults. It is only a request: the values, addresses and tensors of torch stay the same, and Linux ignores it
where /sys/kernel/mm/transparent_hugepage/enabled is `never`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

from torch import nn

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <sys/mman.h>, on all processors; the second since Linux 6.1
HUGE = 1 << 21  # bytes
LARGE_MODEL = 1 << 24  # bytes: smaller models stay in a cache
GAP = 1 << 14  # bytes: allocations that are this close share huge pages


def request_huge_pages(module: nn.Module) -> None:
    """Ask for huge pages for the memory of a module's parameters, which should not have been written to yet."""
    if sys.platform != "linux":
        return
    spans = sorted(
        (x.data_ptr(), x.data_ptr() + x.numel() * x.itemsize)
        for x in module.parameters()
        if type(x) is nn.Parameter and x.device.type == "cpu" and x.is_contiguous()
    )
    if sum(end - start for start, end in spans) > LARGE_MODEL:
        for start, end in _joined(spans):
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                _advise(start, end, MADV_HUGEPAGE)
                _collapse_written([first for first, _ in spans if start < first < end], end)


def _joined(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Join sorted spans (start, end) of memory that are next to each other."""
    joined: list[list[int]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= GAP:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    return joined


def _collapse_written(blocks: Iterable[int], end: int) -> None:
    """Make the pages before `end` huge to which the memory allocator has already written.

    It writes the size of each block before the block's first byte. Otherwise the pages around that address would remain
    small: 22 % of the memory of blocks of 9 MB.
    """
    for page in sorted({(first - 1) // HUGE * HUGE for first in blocks}):
        if page + HUGE <= end:
            _advise(page, page + HUGE, MADV_COLLAPSE)


def _advise(start: int, end: int, advice: int) -> None:
    """Advise Linux on the pages from `start` to `end`, without effect if the C library or the kernel cannot."""
    if madvise := getattr(ctypes.CDLL(None), "madvise", None):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(advice))
