"""How a Triton kernel is launched: by a static choice, or by what was found fastest on this device.

Off unless asked for. SEQBLOCKS_AUTOTUNE, or `use_autotune` around a call, takes a mode:

    off      the static choice of the architecture (the default: nothing is ever timed)
    cached   what an earlier run found on such a device, else the static choice
    on       that, and what is not known yet is searched for once, within SEQBLOCKS_AUTOTUNE_SECONDS (20) a kernel and
             shape; never while a CUDA graph is captured

The search starts at the static choice and goes along one number at a time as long as that helps. A launch whose results
differ from the static one's is not taken, however fast. Finds are kept in $SEQBLOCKS_CACHE/tiles.json (by default in
the user's cache folder), under names of kernel, shapes, device, Triton and the kernel's source, so that none outlives
what it was found for.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import shelf
from seqblocks.kernels.standing import Standing

MODES = ("off", "cached", "on")
VARIABLE = "SEQBLOCKS_AUTOTUNE"
SECONDS = 20.0
GAIN = 0.97  # of the time so far: less is noise

Tile = dict[str, int]
Axes = Mapping[str, Sequence[int]]
Go = Callable[[Tile], Sequence[Tensor]]

_shelf = shelf.Shelf("tiles.json", "tuned kernels", lambda tile: _tile(tile))
_modes: Standing[str] = Standing()  # of the process: backward passes run in threads of their own


@contextlib.contextmanager
def use_autotune(mode: str) -> Iterator[None]:
    """Within this context kernels are launched as `mode` says: "off", "cached" or "on". Nests; holds for all threads.

    Raises BackendError for another mode.
    """
    with _modes.hold(_checked(mode)):
        yield


def _tile(found: Any) -> Tile:
    """Of a record. ValueError unless it names positive numbers."""
    tile = {str(key): int(n) for key, n in found.items()}
    if not all(n > 0 for n in tile.values()):
        raise ValueError(f"no launch has {found}")
    return tile


def _seconds() -> float:
    """BackendError if the environment gives no number."""
    given = os.environ.get(f"{VARIABLE}_SECONDS") or SECONDS
    try:
        return float(given)
    except ValueError:
        from seqblocks.errors import BackendError

        raise BackendError(f"{VARIABLE}_SECONDS: {given!r} is no number of seconds") from None


def autotune_mode() -> str:
    """The mode that holds here. BackendError if the environment names none."""
    return _modes.newest() or _checked(os.environ.get(VARIABLE) or "off")


def _checked(mode: str) -> str:
    if mode not in MODES:
        from seqblocks.errors import BackendError

        raise BackendError(f"{VARIABLE}: unknown mode {mode!r}; choose from {', '.join(MODES)}")
    return mode


def launch(kernel: str, about: tuple[Any, ...], x: Tensor, static: Tile, axes: Axes, go: Go) -> Sequence[Tensor]:
    """Run `go(tile)`, which launches `kernel` ("mlstm.states") and returns what it wrote; again is no harm.

    about: what else the best launch hangs on; lengths belong in it by their power of two. axes: for each number of the
    static tile that may change, the values it may take.
    """
    mode = autotune_mode()
    if mode == "off" or not x.is_cuda:
        return go(static)
    name = "|".join([kernel, *map(str, about), *shelf.here(kernel.partition(".")[0], x.device.index)])
    tile = _shelf.get(name)
    if tile is None:
        if mode == "cached" or torch.cuda.is_current_stream_capturing():
            return go(static)
        tile = search(static, axes, go, _milliseconds)
        _shelf.keep(name, tile)
    return go({key: tile.get(key, n) for key, n in static.items()})


def search(
    static: Tile, axes: Axes, go: Go, milliseconds: Callable[[Callable[[], Any]], float], seconds: float | None = None
) -> Tile:
    """The fastest tile found on a walk from the static one, along one axis after the other, within so many seconds."""
    if seconds is None:
        seconds = _seconds()
    end = time.monotonic() + seconds
    try:
        wanted = [x.clone() for x in go(static)]
    except torch.OutOfMemoryError:  # there is no room to compare in
        return static

    def cost(tile: Tile) -> float:
        try:
            if not all(map(_agree, go(tile), wanted)):
                return math.inf
            return milliseconds(lambda: go(tile))
        except Exception:  # too much shared memory, or the compiler gives up: then it is none to take
            return math.inf

    best, least = static, milliseconds(lambda: go(static))
    for key, values in axes.items():
        row = sorted({*values, static[key]})
        for step in (1, -1):
            at = row.index(best[key]) + step
            while 0 <= at < len(row) and time.monotonic() < end:
                found = cost({**best, key: row[at]})
                if found >= GAIN * least:
                    break
                best, least, at = {**best, key: row[at]}, found, at + step
    return best


def _agree(found: Tensor, wanted: Tensor) -> bool:
    """To a rounding or two: another order of sums, not another sum."""
    bar = 2.0**-6 if wanted.dtype in (torch.bfloat16, torch.float16) else 2.0**-12
    found, wanted = found.float(), wanted.float()
    if found.shape != wanted.shape:  # parts of sums, as many as there are tiles
        return bool((found.sum() - wanted.sum()).abs() <= bar * wanted.abs().sum())
    scale = wanted.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0.0, atol=bar * scale, equal_nan=True)


def _milliseconds(call: Callable[[], Any]) -> float:
    bench: Any = importlib.import_module("triton.testing").do_bench
    return float(bench(call, warmup=5, rep=20, return_mode="median"))
