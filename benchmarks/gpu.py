"""Check every Triton kernel on a CUDA device, time it beside its peers, and write a dated table.

    python benchmarks/gpu.py                      # check and time all, within --minutes (9); the table goes to --out
    python benchmarks/gpu.py --case mlstm --tune  # one family, after searching for the fastest launches

Checks come first: outputs, states and every gradient against the recurrent definition in float64, in float32 (1e-4 of
the largest value) and bfloat16 (2e-2). Times are medians of what the device does: calls are queued behind a pause, with
a cold second-level cache, so that neither Python nor the call before counts. A floor is what the least traffic takes at
this card's measured copy bandwidth, or what its arithmetic takes if that is more. Peers that are installed take part
(mlstm_kernels, flash-linear-attention, mamba-ssm, causal-conv1d, flashrnn), after all of ours are timed, since one that
breaks the device takes the rest with it; others are named. Only torch and triton are needed, so a checkout will do:

    PYTHONPATH=. python benchmarks/gpu.py --out FOLDER

`--rehearse` runs small shapes on the CPU in Triton's interpreter: no figure of it means anything.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import versions, write
from torch import Tensor

from seqblocks import kernels
from seqblocks.kernels.tuning import use_autotune

PEERS = ("mlstm_kernels", "flash-linear-attention", "mamba-ssm", "causal-conv1d", "flashrnn")
OURS, AS_TORCH = "seqblocks", "its torch form"
BARS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
EXPS = 16 * 1.98e9  # special functions a second of a multiprocessor of an H100 or H200: 16 a clock
PAUSE = 4_000_000  # clocks, some 2 ms: longer than Python takes to queue a forward and a backward pass
Shape = dict[str, int]
Leaves = dict[str, Tensor]
Call = Callable[[Leaves], Any]  # the leaves -> what is computed: a tensor or several


class Case(NamedTuple):
    """One computation at some shapes.

    draw(shape) makes the leaves, those in `narrow` in the dtype at hand; ours(leaves, backend) computes. peers: name ->
    (change of the leaves into theirs, call). moved(shape) -> bytes that forward and backward cannot but read and write,
    with two bytes a number; exps, products(shape) -> special functions and multiply-accumulates of the same.
    """

    about: str
    shapes: list[Shape]
    small: Shape
    draw: Callable[[Shape], Leaves]
    narrow: tuple[str, ...]
    ours: Callable[[Leaves, str | None], Any]
    moved: Callable[[Shape], tuple[float, float]]
    peers: dict[str, tuple[Callable[[Leaves], Leaves], Call]] = {}  # noqa: RUF012  # read only
    exps: Callable[[Shape], tuple[float, float]] | None = None
    products: Callable[[Shape], tuple[float, float]] | None = None
    torch_form: bool = False
    forward_only: bool = False


_seeds = itertools.count()


def normal(*shape: int, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    """No two alike, or a kernel that confuses two inputs would pass; the same again in the next run."""
    generator = torch.Generator().manual_seed(next(_seeds))
    return torch.randn(shape, generator=generator) * scale + shift


def drawn(case: Case, shape: Shape) -> Leaves:
    global _seeds
    _seeds = itertools.count()
    return case.draw(shape)


# --- mLSTM ----------------------------------------------------------------------------------------------------------


def draw_mlstm(s: Shape) -> Leaves:
    B, S, H, DK, DV = s["B"], s["S"], s["H"], s["DK"], s["DV"]
    out = {"q": normal(B, S, H, DK), "k": normal(B, S, H, DK), "v": normal(B, S, H, DV)}
    return out | {"i": normal(B, S, H), "f": normal(B, S, H, shift=3.0)}


def ours_mlstm(x: Leaves, backend: str | None) -> Any:
    return kernels.mlstm(**x, backend=backend)  # type: ignore[arg-type]


def heads_first(x: Leaves) -> Leaves:
    return {name: y.transpose(1, 2).contiguous() for name, y in x.items()}


def mlstm_xl_chunk(x: Leaves) -> Any:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    return mlstm_chunkwise__xl_chunk(**x, chunk_size=128, autocast_kernel_dtype=x["q"].dtype)


def simple_gla(x: Leaves) -> Any:
    """No mLSTM: no stabiliser, no normaliser. A landmark for what chunks cost."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(x["q"], x["k"], x["v"], F.logsigmoid(x["f"]))[0]


def attend(x: Leaves) -> Any:
    """Causal attention with as many features: a landmark."""
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)


def as_heads_of_128(x: Leaves) -> Leaves:
    B, S, H, D = x["v"].shape
    return {name: x["v"].reshape(B, S, H * D // 128, 128).transpose(1, 2).contiguous() for name in "qkv"}


def moved_mlstm(s: Shape) -> tuple[float, float]:
    tokens = s["B"] * s["S"] * s["H"]
    return tokens * (4 * s["DK"] + 4 * s["DV"] + 8), tokens * (8 * s["DK"] + 6 * s["DV"] + 16)


def products_mlstm(s: Shape) -> tuple[float, float]:
    """In chunks of 64: within them, and through the states."""
    tokens, DK, DV = s["B"] * s["S"] * s["H"], s["DK"], s["DV"]
    return tokens * (32 * (DK + DV) + 2 * DK * DV), tokens * (32 * (3 * DK + 2 * DV) + 5 * DK * DV)


def step_mlstm(s: Shape) -> Leaves:
    B, H, DK, DV = s["B"], s["H"], s["DK"], s["DV"]
    state = {"C": normal(B, H, DK, DV), "n": normal(B, H, DK), "m": normal(B, H)}
    return draw_mlstm({**s, "S": 1}) | state


def ours_step(x: Leaves, backend: str | None) -> Any:
    tensors = {name: x[name][:, 0] for name in "qkvif"}
    h, state = kernels.mlstm_step(**tensors, state=(x["C"], x["n"], x["m"]), backend=backend)  # type: ignore[arg-type]
    return h, *state


# --- sLSTM ----------------------------------------------------------------------------------------------------------


def draw_slstm(s: Shape) -> Leaves:
    B, S, H, D = s["B"], s["S"], s["H"], s["D"]
    gates = {name: normal(B, S, H * D, shift=float(at)) for at, name in enumerate("zoif")}
    return gates | {"recurrent": normal(H, D, 4, D, scale=D**-0.5), "bias": normal(4, H, D)}


def ours_slstm(x: Leaves, backend: str | None) -> Any:
    return kernels.slstm(**x, backend=backend)  # type: ignore[arg-type]


def for_flashrnn(x: Leaves) -> Leaves:
    H, D = x["recurrent"].shape[:2]
    wide = torch.stack([x[name] for name in "ifzo"], 2).unflatten(-1, (H, D)).bfloat16()
    return {"Wx": wide, "R": x["recurrent"].permute(2, 0, 1, 3).contiguous().bfloat16(), "b": x["bias"].bfloat16()}


def flashrnn_fused(x: Leaves) -> Any:
    from flashrnn import flashrnn

    return flashrnn(**x, function="slstm", backend="cuda_fused", dtype="bfloat16")[0]


def moved_slstm(s: Shape) -> tuple[float, float]:
    wide = s["B"] * s["S"] * s["H"] * s["D"]
    return 10.0 * wide, 18.0 * wide  # gates in and y out; gates, dy in and gradients of the gates out


# --- selective scan -------------------------------------------------------------------------------------------------


def draw_scan(s: Shape) -> Leaves:
    B, S, E, N = s["B"], s["S"], s["E"], s["N"]
    out = {"u": normal(B, S, E), "dt": normal(B, S, E), "B": normal(B, S, N), "C": normal(B, S, N)}
    out |= {"D": normal(E), "z": normal(B, S, E), "dt_bias": normal(E, shift=-4.0)}
    return out | {"A": -torch.arange(1, N + 1.0).repeat(E, 1)}


def ours_scan(x: Leaves, backend: str | None) -> Any:
    return kernels.selective_scan(**x, backend=backend)  # type: ignore[arg-type]


def ours_both_ways(x: Leaves, backend: str | None) -> Any:
    """As a bidirectional block calls it: each direction a launch, no copy of the sequence, the results added."""
    there = kernels.selective_scan(**x, backend=backend)  # type: ignore[arg-type]
    back = kernels.selective_scan(**x, reverse=True, backend=backend)  # type: ignore[arg-type]
    return there + back  # type: ignore[operator]


def features_first(x: Leaves) -> Leaves:
    turned = {name: x[name].transpose(1, 2).contiguous() for name in ("u", "dt", "z", "B", "C")}
    return {**x, **turned}


def mamba_ssm(x: Leaves) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(x["u"], x["dt"], x["A"], x["B"], x["C"], x["D"], x["z"], x["dt_bias"], True)


def moved_scan(s: Shape) -> tuple[float, float]:
    wide = s["B"] * s["S"] * s["E"]
    return 8.0 * wide, 14.0 * wide  # u, dt, z, y; u, dt, z, dy, du, ddt, dz


def exps_scan(s: Shape) -> tuple[float, float]:
    states = s["B"] * s["S"] * s["E"] * s["N"]
    return states, 2.0 * states


# --- convolution, products by blocks, norm --------------------------------------------------------------------------


def draw_conv(s: Shape) -> Leaves:
    return {"x": normal(s["B"], s["S"], s["D"]), "weight": normal(s["D"], 1, s["K"]), "bias": normal(s["D"])}


def ours_conv(x: Leaves, backend: str | None) -> Any:
    return kernels.causal_conv(**x, activation="silu", backend=backend)  # type: ignore[arg-type]


def for_causal_conv1d(x: Leaves) -> Leaves:
    out = {"x": x["x"].transpose(1, 2), "weight": x["weight"][:, 0], "bias": x["bias"]}
    return {name: y.to(x["x"].dtype) for name, y in out.items()}


def causal_conv1d(x: Leaves) -> Any:
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(**x, activation="silu")


def moved_rows(s: Shape) -> tuple[float, float]:
    """x, y; x, dy, dx."""
    wide = s["B"] * s["S"] * s["D"]
    return 4.0 * wide, 6.0 * wide


def draw_linear(s: Shape) -> Leaves:
    return {"x": normal(s["B"], s["S"], s["D"]), "weight": normal(s["D"] // 4, 4, 4)}


def ours_linear(x: Leaves, backend: str | None) -> Any:
    return kernels.headwise_linear(**x, backend=backend)


def draw_norm(s: Shape) -> Leaves:
    return {"x": normal(s["B"], s["S"], s["D"]), "weight": normal(s["D"], shift=1.0), "bias": normal(s["D"])}


def ours_norm(x: Leaves, backend: str | None) -> Any:
    return kernels.head_norm(x["x"], 4, x["weight"], x["bias"], backend=backend)


def draw_tail(s: Shape) -> Leaves:
    shape = (s["B"], s["S"], s["D"])
    return draw_norm(s) | {"skip": normal(*shape), "skip_weight": normal(s["D"]), "gate": normal(*shape)}


def ours_tail(x: Leaves, backend: str | None) -> Any:
    given = {name: x[name] for name in ("skip", "skip_weight", "gate")}
    return kernels.head_norm(x["x"], 4, x["weight"], x["bias"], **given, backend=backend)


# --- Centaurus ------------------------------------------------------------------------------------------------------


def draw_centaurus(s: Shape) -> Leaves:
    B, S, H, N, M = (s[name] for name in "BSHNM")
    out = {"x": normal(B, S, H), "A_real": -normal(N, M).abs() - 0.1, "A_imag": normal(N, M, scale=3.0)}
    out |= {"dt": torch.logspace(-3, -1, N), "B": normal(N, H, scale=H**-0.5), "C": normal(H, N, scale=N**-0.5)}
    return out | {"E": normal(N, M)}


def draw_dws(s: Shape) -> Leaves:
    return {**draw_centaurus(s), "B": normal(s["N"]), "C": normal(s["N"])}


def ours_neck(x: Leaves, backend: str | None) -> Any:
    return kernels.centaurus(**x, mode="neck", backend=backend)  # type: ignore[arg-type]


def ours_dws(x: Leaves, backend: str | None) -> Any:
    return kernels.centaurus(**x, mode="dws", backend=backend)  # type: ignore[arg-type]


def moved_centaurus(s: Shape) -> tuple[float, float]:
    return moved_rows({**s, "D": s["H"]})


LENGTHS = (2048, 8192, 32768)
MLSTM_PEERS: dict[str, Any] = {
    "mlstm_kernels xl_chunk": (heads_first, mlstm_xl_chunk),
    "simple_gla (landmark)": (dict, simple_gla),
    "attention (landmark)": (as_heads_of_128, attend),
}
CASES = {
    "mlstm": Case(
        "mLSTM of a 1.3B model: 4 heads, 256 by 512, 65,536 tokens in all",
        [{"B": 65536 // S, "S": S, "H": 4, "DK": 256, "DV": 512} for S in LENGTHS],
        {"B": 2, "S": 150, "H": 2, "DK": 256, "DV": 512},
        draw_mlstm, ("q", "k", "v"), ours_mlstm, moved_mlstm, MLSTM_PEERS, products=products_mlstm,
    ),
    "mlstm_heads_of_128": Case(
        "mLSTM, 8 heads of 128, and the patches of a small vision model",
        [{"B": 8, "S": 2048, "H": 8, "DK": 128, "DV": 128}, {"B": 64, "S": 196, "H": 4, "DK": 192, "DV": 192}],
        {"B": 2, "S": 196, "H": 2, "DK": 192, "DV": 192},
        draw_mlstm, ("q", "k", "v"), ours_mlstm, moved_mlstm, MLSTM_PEERS, products=products_mlstm,
    ),
    "mlstm_step": Case(
        "mLSTM, one token of 32 sequences, 8 heads, 256 by 512 (forward alone)",
        [{"B": 32, "H": 8, "DK": 256, "DV": 512}], {"B": 2, "H": 2, "DK": 64, "DV": 100},
        step_mlstm, ("q", "k", "v"), ours_step, lambda s: (8.0 * s["B"] * s["H"] * s["DK"] * s["DV"], 0.0),
        torch_form=True, forward_only=True,
    ),
    "scan": Case(
        "selective scan of a 1.3B model: 4,096 channels of 16 states, 32,768 tokens in all",
        [{"B": 32768 // S, "S": S, "E": 4096, "N": 16} for S in LENGTHS], {"B": 2, "S": 150, "E": 96, "N": 16},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_scan, moved_scan,
        {"mamba-ssm": (features_first, mamba_ssm)}, exps=exps_scan,
    ),
    "scan_once": Case(
        "selective scan of a small vision model, left to right",
        [{"B": 64, "S": 197, "E": 768, "N": 16}], {"B": 2, "S": 100, "E": 48, "N": 16},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_scan, moved_scan,
        {"mamba-ssm": (features_first, mamba_ssm)}, exps=exps_scan,
    ),
    "scan_both_ways": Case(
        "the same in both directions, added",
        [{"B": 64, "S": 197, "E": 768, "N": 16}], {"B": 2, "S": 100, "E": 48, "N": 16},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_both_ways,
        lambda s: (2 * moved_scan(s)[0], 2 * moved_scan(s)[1]),
        exps=lambda s: (2 * exps_scan(s)[0], 2 * exps_scan(s)[1]),
    ),
    "slstm": Case(
        "sLSTM, 16 sequences of 2,048 tokens, 4 heads",
        [{"B": 16, "S": 2048, "H": 4, "D": D} for D in (64, 128, 256)], {"B": 3, "S": 40, "H": 2, "D": 64},
        draw_slstm, ("i", "f", "z", "o"), ours_slstm, moved_slstm, {"flashrnn": (for_flashrnn, flashrnn_fused)},
    ),
    "conv": Case(
        "causal convolution of 4 taps with SiLU, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096, "K": 4}], {"B": 2, "S": 100, "D": 96, "K": 4},
        draw_conv, ("x", "weight", "bias"), ours_conv, moved_rows,
        {"causal-conv1d": (for_causal_conv1d, causal_conv1d)},
    ),
    "linear": Case(
        "product by blocks of 4, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 100, "D": 96},
        draw_linear, ("x", "weight"), ours_linear, moved_rows, torch_form=True,
    ),
    "norm": Case(
        "norm of 4 heads, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 100, "D": 96},
        draw_norm, ("x", "weight", "bias"), ours_norm, moved_rows, torch_form=True,
    ),
    "tail": Case(
        "norm of 4 heads, learnable skip and gate, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 100, "D": 96},
        draw_tail, ("x", "weight", "bias", "skip", "skip_weight", "gate"), ours_tail,
        lambda s: (8.0 * s["B"] * s["S"] * s["D"], 14.0 * s["B"] * s["S"] * s["D"]), torch_form=True,
    ),
    "centaurus_neck": Case(
        "Centaurus, mode neck, 512 features, 512 channels of 4",
        [{"B": 8, "S": S, "H": 512, "N": 512, "M": 4} for S in (2048, 8192)],
        {"B": 2, "S": 100, "H": 24, "N": 24, "M": 4},
        draw_centaurus, ("x",), ours_neck, moved_centaurus, torch_form=True,
    ),
    "centaurus_dws": Case(
        "Centaurus, mode dws, 512 features and channels of 4",
        [{"B": 8, "S": S, "H": 512, "N": 512, "M": 4} for S in (2048, 8192)],
        {"B": 2, "S": 100, "H": 24, "N": 24, "M": 4},
        draw_dws, ("x",), ours_dws, moved_centaurus, torch_form=True,
    ),
}


# --- checking -------------------------------------------------------------------------------------------------------


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def results(call: Call, leaves: Leaves) -> dict[str, Tensor]:
    """Outputs, and the gradient of each leaf under random cotangents that bfloat16 can hold."""
    out = tensors(call(leaves))
    named = {f"output {at}": x.detach() for at, x in enumerate(out)}
    if not out[0].requires_grad:
        return named
    loss = sum((x.double() * cotangent(x, at).double()).sum() for at, x in enumerate(out))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return named | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def cotangent(x: Tensor, at: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + at)
    return torch.randn(x.shape, generator=generator).bfloat16().to(x.device)


def check(case: Case, dtype: torch.dtype, device: str, shape: Shape) -> dict[str, float]:
    """Errors of the Triton form relative to each result's largest value; what is no number counts as infinite."""
    rounded = {name: x.to(dtype if name in case.narrow else torch.float32) for name, x in drawn(case, shape).items()}
    grad = not case.forward_only
    exact = {name: x.double().to(device).requires_grad_(grad) for name, x in rounded.items()}
    given = {name: x.to(device).requires_grad_(grad) for name, x in rounded.items()}
    wanted = results(lambda x: case.ours(x, "reference"), exact)
    found = results(lambda x: case.ours(x, "triton"), given)
    errors = {
        name: ((found[name].double() - x).abs().max() / x.abs().max().clamp(min=1e-30)).item()
        for name, x in wanted.items()
    }
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


# --- timing ---------------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of a call on the device, or of one call on the clock of a CPU (to rehearse)."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.other = torch.randn(1 << 26, device=device) if self.cuda else torch.empty(0)  # 256 MB, to be read between

    def __call__(self, call: Callable[[], Any]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        for _ in range(3):
            call()
        first = self._events(call, 3)
        return statistics.median(self._events(call, max(5, min(50, int(60 / max(statistics.median(first), 1e-3))))))

    def _events(self, call: Callable[[], Any], times: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for start, end in pairs:
            self.other.sum()  # reading leaves nothing to be written back while the call is timed
            torch.cuda._sleep(PAUSE)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def ceilings(clock: Clock, device: str) -> dict[str, float]:
    """Bytes a second of a large copy, and multiply-accumulates a second of a large product in bfloat16."""
    numbers = 1 << (29 if clock.cuda else 16)
    a = torch.randn(numbers, dtype=torch.bfloat16, device=device)  # zeros would be faster: they take less power
    b = torch.empty_like(a)
    copy = 4 * numbers / (clock(lambda: b.copy_(a)) / 1e3)
    size = 8192 if clock.cuda else 64
    a = torch.randn(size, size, device=device).bfloat16()
    product = size**3 / (clock(lambda: a @ a) / 1e3)
    processors = torch.cuda.get_device_properties(0).multi_processor_count if clock.cuda else 1
    return {"copy_bytes_per_s": copy, "bf16_products_per_s": product, "special_functions_per_s": EXPS * processors}


def floor(case: Case, shape: Shape, most: dict[str, float]) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward, that nothing can undercut here."""
    out = []
    for at in (0, 1):
        each = [case.moved(shape)[at] / most["copy_bytes_per_s"]]
        if case.exps:
            each.append(case.exps(shape)[at] / most["special_functions_per_s"])
        if case.products:
            each.append(case.products(shape)[at] / most["bf16_products_per_s"])
        out.append(1e3 * max(each))
    return out[0], out[0] + out[1]


def both_passes(call: Call, leaves: Leaves, cotangents: list[Tensor]) -> None:
    torch.autograd.grad(tensors(call(leaves)), [*leaves.values()], cotangents, allow_unused=True)


def timed(
    case: Case, shape: Shape, device: str, clock: Clock, candidates: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One record a candidate: medians of three turns. What fails is a record too."""
    given = {n: x.to(device, torch.bfloat16 if n in case.narrow else None) for n, x in drawn(case, shape).items()}
    ready: dict[str, tuple[Callable[[], Any], ...]] = {}
    runs: dict[str, list[list[float]]] = {}
    for turn in range(4):
        for name, (change, call) in candidates.items():
            try:
                if turn == 0:
                    ready[name] = _passes(case, {key: x.detach().clone() for key, x in change(given).items()}, call)
                    runs[name] = [[] for _ in ready[name]]
                elif name in ready:
                    for at, run in enumerate(ready[name]):
                        runs[name][at].append(clock(run))
            except Exception as error:  # a peer that is absent or fails is a line in the table, not the end of it
                ready.pop(name, None)
                absent = isinstance(error, ModuleNotFoundError)
                yield {"candidate": name, "left_out": "not installed" if absent else said(error)}
    for name, passes in ready.items():
        record: dict[str, Any] = {"candidate": name, "left_out": None, "peak_mb": None}
        record |= dict(zip(("forward_ms", "both_ms"), map(statistics.median, runs[name]), strict=False))
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes[-1]()
            record["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        yield record


def own(case: Case) -> dict[str, Any]:
    out: dict[str, Any] = {OURS: (dict, lambda x: case.ours(x, "triton"))}
    return out | ({AS_TORCH: (dict, lambda x: case.ours(x, "torch"))} if case.torch_form else {})


def _passes(case: Case, leaves: Leaves, call: Call) -> tuple[Callable[[], Any], ...]:
    """Forward, and forward with backward; both have run once."""
    leaves = {key: x.requires_grad_() for key, x in leaves.items()}
    cotangents = [torch.randn_like(x) for x in tensors(call(leaves))]
    ahead = torch.no_grad()(lambda: call(leaves))
    ahead()
    if case.forward_only:
        return (ahead,)
    both_passes(call, leaves, cotangents)
    return ahead, lambda: both_passes(call, leaves, cotangents)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])[:200]}".rstrip(": ")


# --- telling --------------------------------------------------------------------------------------------------------


def table(told: dict[str, Any]) -> str:
    most = told["ceilings"]
    lines = [
        f"# {told['device']}, {told['date']}",
        "",
        f"{', '.join(told['versions'])}; bfloat16. `benchmarks/gpu.py` made this page."
        + (" A rehearsal on a CPU: no figure means anything." if told["rehearsed"] else ""),
        "",
        f"Measured ceilings: {most['copy_bytes_per_s'] / 1e12:.2f} TB/s copied (what is read and what is written), and",
        f"{2 * most['bf16_products_per_s'] / 1e12:.0f} TFLOP/s in a bfloat16 product of 8,192.",
        "",
        "## Checks",
        "",
        "Largest error relative to the largest value, against the recurrence in float64.",
        "",
        "| | dtype | outputs | gradients | |",
        "|---|---|---|---|---|",
    ]
    for r in told["checks"]:
        if r.get("failed"):
            lines.append(f"| {r['case']} | {r['dtype']} | | | **{r['failed']}** |")
            continue
        lines.append(f"| {r['case']} | {r['dtype']} | {r['outputs']:.1e} | {r['gradients']:.1e} | "
                     f"{'ok' if r['ok'] else '**wrong**: ' + r['worst']} |")
    lines += ["", "## Times", "", "Milliseconds; in brackets, ours: times the floor; others: times ours."]
    for key in dict.fromkeys(r["case"] for r in told["times"]):
        found = [r for r in told["times"] if r["case"] == key]
        order = [json.dumps(r["shape"]) for r in found]
        mine = sorted(found, key=lambda r: order.index(json.dumps(r["shape"])))  # ours of a shape, then its peers
        lines += ["", f"### {CASES[key].about}", ""]
        lines += ["| | | forward | forward + backward | peak MB |", "|---|---|---|---|---|"]
        for r in mine:
            shape = ", ".join(f"{name} {n:,}" for name, n in r["shape"].items())
            if r["left_out"]:
                lines.append(f"| {shape} | {r['candidate']} | {r['left_out']} | | |")
                continue
            ours: dict[str, Any] = next((o for o in mine if o["shape"] == r["shape"] and o["candidate"] == OURS), {})
            cells = []
            for field, least in (("forward_ms", r["floor_ms"][0]), ("both_ms", r["floor_ms"][1])):
                if field not in r:
                    cells.append("")
                    continue
                beside = r[field] / (least if r is ours else ours.get(field, math.nan))
                cells.append(f"{r[field]:.3f} ({beside:.2f} x)")
            peak = "" if r["peak_mb"] is None else f"{r['peak_mb']:,.0f}"
            lines.append(f"| {shape} | {r['candidate']} | {' | '.join(cells)} | {peak} |")
    if told["left_out"]:
        lines += ["", f"Out of time before: {', '.join(told['left_out'])}."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on a CUDA device.")
    parser.add_argument("--case", action="append", help="only cases whose names begin so; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no cell after that")
    parser.add_argument("--tune", action="store_true", help="search for the fastest launches first")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the table")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device here; --rehearse runs small shapes on the CPU", file=sys.stderr)
        return 2
    if options.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        print("--rehearse needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
        return 2
    chosen = [key for key in CASES if not options.case or any(key.startswith(word) for word in options.case)]
    if not chosen:
        print(f"no case is called that; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    device = "cpu" if options.rehearse else "cuda"
    os.environ["SEQBLOCKS_SELF_CHECK"] = "0"  # what it would find, the checks here find
    os.environ.setdefault("SEQBLOCKS_AUTOTUNE_SECONDS", "4")
    told = run(chosen, device, options)
    wrong = [f"{r['case']} in {r['dtype']}" for r in told["checks"] if not r["ok"]]
    wrong += [f"{r['case']} {r['shape']}" for r in told["times"] if r["candidate"] == OURS and r["left_out"]]
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def checks(key: str, device: str) -> Iterator[dict[str, Any]]:
    """One record a dtype; the CPU's interpreter cannot do bfloat16."""
    case = CASES[key]
    for dtype in BARS if device == "cuda" else (torch.float32,):
        record: dict[str, Any] = {"case": key, "dtype": str(dtype).removeprefix("torch.")}
        try:
            errors = check(case, dtype, device, case.small if device == "cuda" else rehearsed(case.small))
        except Exception as error:  # the table says so, and the others are still checked
            record |= {"ok": False, "failed": said(error)}
        else:
            worst = max(errors, key=errors.__getitem__)
            record |= {"ok": errors[worst] <= BARS[dtype], "worst": worst} | {
                what: max((e for n, e in errors.items() if n.startswith(what[:-1])), default=0.0)
                for what in ("outputs", "gradients")
            }
        print(json.dumps(record), file=sys.stderr)
        yield record


def rehearsed(shape: Shape) -> Shape:
    return {name: min(size, {"B": 2, "D": 16}.get(name, 8)) for name, size in shape.items()}


def cells(chosen: list[str], rehearse: bool) -> list[tuple[str, Shape]]:
    """What is timed; rehearsed, one shape a case is enough."""
    if rehearse:
        return [(key, rehearsed(CASES[key].shapes[0])) for key in chosen]
    return [(key, shape) for key in chosen for shape in CASES[key].shapes]


def run(chosen: list[str], device: str, options: argparse.Namespace) -> dict[str, Any]:
    end, clock = time.monotonic() + 60 * options.minutes, Clock(device)
    name = torch.cuda.get_device_name() if clock.cuda else "CPU"
    told: dict[str, Any] = {
        "device": name, "date": str(datetime.date.today()), "versions": versions(PEERS), "rehearsed": options.rehearse,
        "ceilings": ceilings(clock, device), "checks": [], "times": [], "left_out": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / f"{told['date']}-{name.lower().replace(' ', '-')}.md"

    def keep() -> None:  # at once: whoever is cut off has what there was
        write(page.with_suffix(".json"), json.dumps(told, indent=1))
        write(page, table(told))

    for key in chosen:
        told["checks"] += checks(key, device)
        keep()
    for peers in (False, True):
        for key, shape in cells(chosen, options.rehearse):
            candidates = CASES[key].peers if peers else own(CASES[key])
            if candidates and time.monotonic() > end:
                told["left_out"].append(f"{key} {shape}" + (" of peers" if peers else ""))
            elif candidates:
                with use_autotune("on" if options.tune and not peers else "off"):
                    for record in timed(CASES[key], shape, device, clock, candidates):
                        record |= {"case": key, "shape": shape, "floor_ms": floor(CASES[key], shape, told["ceilings"])}
                        print(json.dumps(record), file=sys.stderr)
                        told["times"].append(record)
                keep()
    print(page)
    return told


if __name__ == "__main__":
    sys.exit(main())
