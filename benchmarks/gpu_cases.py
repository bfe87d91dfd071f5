"""The cases of `gpu.py`: shapes, calls of seqblocks and of other packages, and lower bounds of their cost.

A peer is a call of another package: the same computation, or a different one that serves as a landmark. All peers are
optional.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks import kernels

Shape = dict[str, int]
Leaves = dict[str, Tensor]
Call = Callable[[Leaves], Any]  # leaves -> outputs: one tensor or several
PEERS = ("mlstm_kernels", "flash-linear-attention", "mamba-ssm", "causal-conv1d", "flashrnn")  # distributions


class Peer(NamedTuple):
    """A call of another package.

    module: the module to import ("" if torch has the call). change(leaves) converts our leaves to its arguments.
    back(output) converts its output to the layout of ours; None for a landmark.
    """

    module: str
    change: Callable[[Leaves], Leaves]
    call: Call
    back: Callable[[Any], Tensor] | None = None


class Case(NamedTuple):
    """One computation at several shapes.

    short: upper limits of sizes in a check, whose launches are still chosen for the whole shape. draw(shape) returns
    the leaves; those named in `narrow` take the dtype under test, those in `shared` have no batch axis.
    ours(leaves, backend) computes the outputs. Each of the following returns a pair, for forward and backward:
    traffic(shape): the bytes that must be read and written, at two bytes per number; exps(shape): evaluations of
    special functions; products(shape): multiply-accumulates.
    """

    about: str
    shapes: list[Shape]
    short: Shape
    draw: Callable[[Shape], Leaves]
    narrow: tuple[str, ...]
    ours: Callable[[Leaves, str | None], Any]
    traffic: Callable[[Shape], tuple[float, float]]
    shared: tuple[str, ...] = ()
    peers: dict[str, Peer] = {}  # noqa: RUF012  # read only
    exps: Callable[[Shape], tuple[float, float]] | None = None
    products: Callable[[Shape], tuple[float, float]] | None = None
    has_torch: bool = False
    forward_only: bool = False


_seeds = itertools.count()


def normal(*shape: int, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    """Return normal values that differ between calls, to expose swapped inputs, and agree between runs."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(next(_seeds))
    return torch.randn(shape, generator=generator) * scale + shift


def draw_leaves(case: Case, shape: Shape, device: str, dtype: torch.dtype) -> Leaves:
    """Return the leaves of a case, drawn on the device, which is faster than copying them there."""
    global _seeds
    _seeds = itertools.count()
    with torch.device(device):
        return {name: x.to(dtype if name in case.narrow else torch.float32) for name, x in case.draw(shape).items()}


@cache
def packed(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the resets of sequences of 300 tokens, packed into rows."""
    return (torch.arange(length, device=device) % 300 == 0).repeat(batch, 1)


def shortened(case: Case, shape: Shape) -> Shape:
    return {name: min(size, case.short.get(name, size)) for name, size in shape.items()}


# --- mLSTM ----------------------------------------------------------------------------------------------------------


def draw_mlstm(s: Shape) -> Leaves:
    B, S, H, DK, DV = s["B"], s["S"], s["H"], s["DK"], s["DV"]
    out = {"q": normal(B, S, H, DK), "k": normal(B, S, H, DK), "v": normal(B, S, H, DV)}
    return out | {"i": normal(B, S, H), "f": normal(B, S, H, shift=3.0)}


def ours_mlstm(x: Leaves, backend: str | None) -> Any:
    return kernels.mlstm(**x, backend=backend)  # type: ignore[arg-type]


def ours_mlstm_packed(x: Leaves, backend: str | None) -> Any:
    return kernels.mlstm(**x, resets=packed(*x["q"].shape[:2], x["q"].device), backend=backend)  # type: ignore[arg-type]


def heads_first(x: Leaves) -> Leaves:
    return {name: y.transpose(1, 2).contiguous() for name, y in x.items()}


def mlstm_xl_chunk(x: Leaves) -> Any:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

    return mlstm_chunkwise__xl_chunk(**x, chunk_size=128, autocast_kernel_dtype=x["q"].dtype)


def simple_gla(x: Leaves) -> Any:
    """Run simple GLA, which has no stabiliser and no normaliser: a landmark for the cost of chunks."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(x["q"], x["k"], x["v"], F.logsigmoid(x["f"]))[0]


def attend(x: Leaves) -> Any:
    """Run causal attention with the same number of features: a landmark."""
    return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)


def as_heads_of_128(x: Leaves) -> Leaves:
    B, S, H, D = x["v"].shape
    return {name: x["v"].reshape(B, S, -1, min(128, H * D)).transpose(1, 2).contiguous() for name in "qkv"}


def traffic_mlstm(s: Shape) -> tuple[float, float]:
    tokens = s["B"] * s["S"] * s["H"]
    return tokens * (4 * s["DK"] + 4 * s["DV"] + 8), tokens * (8 * s["DK"] + 6 * s["DV"] + 16)


def products_mlstm(s: Shape) -> tuple[float, float]:
    """Count products within chunks of 64 tokens, and those with the states between chunks.

    Shorter chunks need fewer products and more memory for states.
    """
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


# --- linear attention and delta rules ---------------------------------------------------------------------------------


def draw_linear_attention(s: Shape) -> Leaves:
    """Return leaves with one decay per key feature if `per_key` is 1, and with beta if `delta` is 1."""
    B, S, H, K, V = s["B"], s["S"], s["H"], s["K"], s["V"]
    out = {"q": normal(B, S, H, K), "k": F.normalize(normal(B, S, H, K), dim=-1), "v": normal(B, S, H, V)}
    out["decay"] = F.logsigmoid(normal(B, S, H, *((K,) if s["per_key"] else ()), shift=3.0))
    return out | ({"beta": normal(B, S, H).sigmoid()} if s["delta"] else {})


def ours_linear_attention(x: Leaves, backend: str | None) -> Any:
    return kernels.linear_attention(**x, backend=backend)  # type: ignore[arg-type]


def ours_linear_attention_packed(x: Leaves, backend: str | None) -> Any:
    resets = packed(*x["q"].shape[:2], x["q"].device)
    return kernels.linear_attention(**x, resets=resets, backend=backend)  # type: ignore[arg-type]


def fla_chunks(x: Leaves) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g, per_key = x["q"], x["k"], x["v"], x["decay"], x["decay"].dim() == 4
    if "beta" in x:
        run = chunk_kda if per_key else chunk_gated_delta_rule
        return run(q, k, v, g, x["beta"])[0]
    return (chunk_gla if per_key else chunk_simple_gla)(q, k, v, g)[0]


def traffic_linear_attention(s: Shape) -> tuple[float, float]:
    tokens, of_decay = s["B"] * s["S"] * s["H"], 4 * (s["K"] if s["per_key"] else 1) + 4 * s["delta"]
    return (
        tokens * (4.0 * s["K"] + 4 * s["V"] + of_decay), tokens * (8.0 * s["K"] + 6 * s["V"] + 2 * of_decay)
    )


def products_linear_attention(s: Shape) -> tuple[float, float]:
    """Count products within chunks of 64 tokens and with the states between chunks.

    A delta rule adds a triangular system per chunk, solved for keys and values.
    """
    tokens, K, V = s["B"] * s["S"] * s["H"], s["K"], s["V"]
    forward, backward = 32 * (K + V) + 2 * K * V, 32 * (3 * K + 2 * V) + 5 * K * V
    if s["delta"]:
        forward, backward = forward + 32 * (2 * K + V) + K * V, backward + 32 * (5 * K + 3 * V) + 3 * K * V
    return tokens * float(forward), tokens * float(backward)


def linear_attention_case(about: str, per_key: bool, delta: bool, widths: tuple[int, int], heads: int) -> Case:
    K, V = widths
    fixed = {"H": heads, "K": K, "V": V, "per_key": int(per_key), "delta": int(delta)}
    return Case(
        about, [{"B": 65536 // S, "S": S, **fixed} for S in (2048, 16384)], {"B": 1, "S": 400, "H": 2},
        draw_linear_attention, ("q", "k", "v"), ours_linear_attention, traffic_linear_attention,
        peers={"fla, chunks": Peer("fla", dict, fla_chunks, lambda y: y)}, products=products_linear_attention,
    )


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


def traffic_slstm(s: Shape) -> tuple[float, float]:
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
    """Return the sum of both directions, each one launch without a copy of the sequence."""
    there = kernels.selective_scan(**x, backend=backend)  # type: ignore[arg-type]
    back = kernels.selective_scan(**x, reverse=True, backend=backend)  # type: ignore[arg-type]
    return there + back  # type: ignore[operator]


def features_first(x: Leaves) -> Leaves:
    turned = {name: x[name].transpose(1, 2).contiguous() for name in ("u", "dt", "z", "B", "C")}
    return {**x, **turned}


def mamba_ssm(x: Leaves) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(x["u"], x["dt"], x["A"], x["B"], x["C"], x["D"], x["z"], x["dt_bias"], True)


def traffic_scan(s: Shape) -> tuple[float, float]:
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


def traffic_rows(s: Shape) -> tuple[float, float]:
    """Return the bytes of x and y in the forward pass, and of x, dy and dx in the backward pass."""
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


def draw_residual_norm(s: Shape) -> Leaves:
    return draw_norm(s) | {"residual": normal(s["B"], s["S"], s["D"])}


def ours_residual_norm(x: Leaves, backend: str | None) -> Any:
    return kernels.residual_norm(**x, backend=backend)


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


def traffic_centaurus(s: Shape) -> tuple[float, float]:
    return traffic_rows({**s, "D": s["H"]})


def turned(y: Tensor) -> Tensor:
    return y.transpose(1, 2)


LENGTHS = (2048, 8192, 32768)
FIRST = ("mlstm", "scan", "gated_delta", "kda", "conv")  # the cases that most models need
MLSTM_PEERS = {
    "mlstm_kernels xl_chunk": Peer("mlstm_kernels", heads_first, mlstm_xl_chunk, turned),
    "simple_gla (landmark)": Peer("fla", dict, simple_gla),
    "attention (landmark)": Peer("", as_heads_of_128, attend),
}
SCAN_PEERS = {"mamba-ssm": Peer("mamba_ssm", features_first, mamba_ssm, turned)}
SCAN_SHARED = ("A", "D", "dt_bias")
CENTAURUS_SHARED = ("A_real", "A_imag", "dt", "B", "C", "E")
# The most important cases come first, since a run may be cut off. Lengths of checks are multiples of 16, as the timed
# lengths are, and cover more mLSTM chunks than one program processes, three segments of the scan with a remainder, and
# four of Centaurus.
CASES = {
    "mlstm": Case(
        "mLSTM of a 1.3B model: 4 heads, 256 by 512, 65,536 tokens in all",
        [{"B": 65536 // S, "S": S, "H": 4, "DK": 256, "DV": 512} for S in LENGTHS], {"B": 1, "S": 1040, "H": 2},
        draw_mlstm, ("q", "k", "v"), ours_mlstm, traffic_mlstm, peers=MLSTM_PEERS, products=products_mlstm,
    ),
    "scan": Case(
        "selective scan of a 1.3B model: 4,096 channels of 16 states, 32,768 tokens in all",
        [{"B": 32768 // S, "S": S, "E": 4096, "N": 16} for S in LENGTHS], {"B": 2, "S": 400},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_scan, traffic_scan, SCAN_SHARED, SCAN_PEERS, exps=exps_scan,
    ),
    "slstm": Case(
        "sLSTM, 16 sequences of 2,048 tokens, 4 heads; of 512 in a 1.3B model",
        [{"B": 16, "S": 2048, "H": 4, "D": D} for D in (64, 128, 256, 512)], {"S": 48},
        draw_slstm, ("i", "f", "z", "o"), ours_slstm, traffic_slstm, ("recurrent", "bias"),
        {"flashrnn": Peer("flashrnn", for_flashrnn, flashrnn_fused, lambda y: y[0])},
    ),
    "conv": Case(
        "causal convolution of 4 taps with SiLU, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096, "K": 4}], {"B": 2, "S": 208},
        draw_conv, ("x", "weight", "bias"), ours_conv, traffic_rows, ("weight", "bias"),
        {"causal-conv1d": Peer("causal_conv1d", for_causal_conv1d, causal_conv1d, turned)},
    ),
    "norm": Case(
        "norm of 4 heads, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 208},
        draw_norm, ("x", "weight", "bias"), ours_norm, traffic_rows, ("weight", "bias"), has_torch=True,
    ),
    "gated_delta": linear_attention_case(
        "Gated DeltaNet, 16 heads of 128, 65,536 tokens in all", False, True, (128, 128), 16),
    "kda": linear_attention_case("KDA, 16 heads of 128, 65,536 tokens in all", True, True, (128, 128), 16),
    "simple_gla": linear_attention_case(
        "simple GLA, the recurrence of Mamba-2: 16 heads of 128, 65,536 tokens in all", False, False, (128, 128), 16),
    "gla": linear_attention_case("GLA, 4 heads of 128 by 256, 65,536 tokens in all", True, False, (128, 256), 4),
    "mlstm_heads_of_128": Case(
        "mLSTM, 8 heads of 128, and the patches of a small vision model",
        [{"B": 8, "S": 2048, "H": 8, "DK": 128, "DV": 128}, {"B": 64, "S": 196, "H": 4, "DK": 192, "DV": 192}],
        {"B": 2, "S": 1040, "H": 2},
        draw_mlstm, ("q", "k", "v"), ours_mlstm, traffic_mlstm, peers=MLSTM_PEERS, products=products_mlstm,
    ),
    "mlstm_packed": Case(
        "the mLSTM of a 1.3B model, packed sequences of 300 tokens (resets)",
        [{"B": 8, "S": 8192, "H": 4, "DK": 256, "DV": 512}], {"B": 1, "S": 1040, "H": 2},
        draw_mlstm, ("q", "k", "v"), ours_mlstm_packed, traffic_mlstm, products=products_mlstm,
    ),
    "gated_delta_packed": linear_attention_case(
        "Gated DeltaNet, 16 heads of 128, packed sequences of 300 tokens (resets)", False, True, (128, 128), 16
    )._replace(ours=ours_linear_attention_packed, peers={}),
    "scan_once": Case(
        "selective scan of a small vision model, left to right",
        [{"B": 64, "S": 197, "E": 768, "N": 16}], {"B": 2},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_scan, traffic_scan, SCAN_SHARED, SCAN_PEERS, exps=exps_scan,
    ),
    "scan_both_ways": Case(
        "the same in both directions, added",
        [{"B": 64, "S": 197, "E": 768, "N": 16}], {"B": 2},
        draw_scan, ("u", "dt", "z", "B", "C"), ours_both_ways,
        lambda s: (2 * traffic_scan(s)[0], 2 * traffic_scan(s)[1]), SCAN_SHARED,
        exps=lambda s: (2 * exps_scan(s)[0], 2 * exps_scan(s)[1]),
    ),
    "mlstm_step": Case(
        "mLSTM, one token of 32 sequences, 8 heads, 256 by 512 (forward alone)",
        [{"B": 32, "H": 8, "DK": 256, "DV": 512}], {"B": 2},
        step_mlstm, ("q", "k", "v"), ours_step, lambda s: (8.0 * s["B"] * s["H"] * s["DK"] * s["DV"], 0.0),
        has_torch=True, forward_only=True,
    ),
    "tail": Case(
        "norm of 4 heads, learnable skip and gate, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 208},
        draw_tail, ("x", "weight", "bias", "skip", "skip_weight", "gate"), ours_tail,
        lambda s: (8.0 * s["B"] * s["S"] * s["D"], 14.0 * s["B"] * s["S"] * s["D"]),
        ("weight", "bias", "skip_weight"), has_torch=True,
    ),
    "residual_norm": Case(
        "RMS norm with the residual before it, 4,096 features",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 208},
        draw_residual_norm, ("x", "weight", "bias", "residual"), ours_residual_norm,
        lambda s: (8.0 * s["B"] * s["S"] * s["D"], 8.0 * s["B"] * s["S"] * s["D"]), ("weight", "bias"), has_torch=True,
    ),
    "linear": Case(
        "product by blocks of 4, 4,096 channels",
        [{"B": 8, "S": 2048, "D": 4096}], {"B": 2, "S": 208},
        draw_linear, ("x", "weight"), ours_linear, traffic_rows, ("weight",), has_torch=True,
    ),
    "centaurus_neck": Case(
        "Centaurus, mode neck, 512 features, 512 channels of 4",
        [{"B": 8, "S": S, "H": 512, "N": 512, "M": 4} for S in (2048, 8192)], {"B": 2, "S": 400},
        draw_centaurus, ("x",), ours_neck, traffic_centaurus, CENTAURUS_SHARED, has_torch=True,
    ),
    "centaurus_dws": Case(
        "Centaurus, mode dws, 512 features and channels of 4",
        [{"B": 8, "S": S, "H": 512, "N": 512, "M": 4} for S in (2048, 8192)], {"B": 2, "S": 400},
        draw_dws, ("x",), ours_dws, traffic_centaurus, CENTAURUS_SHARED, has_torch=True,
    ),
}
