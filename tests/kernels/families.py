"""Descriptions of the kernels. Add a new one here and to `KERNELS` at the end; nothing else is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks import kernels
from tests.kernels.conformance import Kernel, Tensors, Variant, draw, float32_bar
from tests.kernels.family_of_attention import ATTENTION, FIRST
from tests.kernels.gated_recurrence import GATED_RECURRENCE
from tests.kernels.linear_attention import LINEAR_ATTENTION
from tests.kernels.mlstm import MLSTM, MLSTM_INPUTS, mlstm_bar

# ------------------------------------------------------------------------------------------------ sLSTM


def slstm_inputs(batch: int = 2, S: int = 9, H: int = 2, D: int = 3) -> Tensors:
    x = {name: draw(batch, S, H * D, seed=at) for at, name in enumerate("ifzo")}
    x |= {"recurrent": draw(H, D, 4, D, seed=4) * D**-0.5, "bias": draw(4, H, D, seed=5)}
    x |= {name: draw(batch, H, D, seed=6 + at) for at, name in enumerate("ycnm")}
    return {**x, "n": x["n"].abs() + 0.5}  # a sum of weights


def slstm_call(**given: Any) -> Any:
    return kernels.slstm(**given)


def slstm_bar(length: int) -> float:
    """Each token rounds about forty times, the state is divided by n, and the next token reads it."""
    return 8 * float32_bar(length)


def slstm_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Return the roundings. The torch implementation and the reference round the results: 1.

    Triton, bfloat16: a dot rounds y and the matrices at each token. The errors of its D products are independent, so
    they count once, for the gates; the next token reads them: S. Another 4: stored z and o; the gates' gradients and y,
    for the products of the backward pass; the result.

    Triton, float16: gates are stored in float32, and tf32, to which dots round, has as many digits as float16. 4: y and
    the matrices together; the gates' gradients; y in the matrices' gradient; the result. Errors of y do not accumulate
    over the tokens, because forget gates and the division by n reduce them.
    """
    return (length + 4.0 if dtype == torch.bfloat16 else 4.0) if backend == "triton" else 1.0


SLSTM = Kernel(
    name="slstm",
    pairs_interpreted="long",
    function=slstm_call,
    make=slstm_inputs,
    sequences=("i", "f", "z", "o"),
    states=("y", "c", "n", "m"),
    shapes=(
        {"S": 1}, {"S": 2}, {"batch": 3, "S": 13, "D": 4}, {"batch": 1, "S": 5, "H": 1, "D": 1},
        {"batch": 17, "S": 5, "H": 1, "D": 16}, {"S": 5, "D": 20},
    ),
    device_shapes=(
        {"batch": 5, "S": 130, "D": 32},
        *({"batch": 5, "S": 40, "D": D} for D in (4, 32, 64, 100, 128, 200, 256, 512)),
        *({"batch": batch, "S": 2, "D": 32} for batch in (1, 16, 17, 40)),
    ),
    ranges={"batch": range(4), "S": range(21), "H": range(1, 4), "D": range(1, 6)},
    small={"batch": 1, "S": 4, "H": 1, "D": 2},
    bar=slstm_bar,
    roundings=slstm_roundings,
    errors=(
        (lambda x: {"i": x["i"][..., :5]}, r"slstm expects gates \[B, S, 6\]"),
        (lambda x: {"recurrent": x["recurrent"][:, :, :3]}, "slstm expects recurrent"),
        (lambda x: {"recurrent": x["recurrent"].sum()}, r"slstm expects recurrent .* got \[\]"),
        (lambda x: {"bias": x["bias"][:3]}, "slstm expects bias"),
        (lambda x: {"m": x["m"][:1]}, "slstm expects a state"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"slstm expects resets \[B, S\] = \[2, 9\]"),
    ),
    facts={"heads": 1, "head_dim": 1024},
    refused=(({"head_dim": 1025}, "at most 1024"), ({"dtype": torch.float64}, "float64")),
    kinked=("c", "n", "m"),  # m is the larger of two gates, which y enters; c and n are relative to exp(m)
    added=("y", "c", "n", "m"),
)


# ------------------------------------------------------------------------------------------------ selective scan


def scan_inputs(
    batch: int = 2, S: int = 9, E: int = 4, N: int = 3, groups: int = 0, groups_of_C: int = 0, constant: str = ""
) -> Tensors:
    x = {"u": draw(batch, S, E), "dt": draw(batch, S, E, seed=1), "A": -draw(E, N, seed=2).exp()}
    for at, (name, G) in enumerate((("B", groups), ("C", groups_of_C or groups))):
        shape = (E, N) if name in constant else (batch, S, G, N) if G else (batch, S, N)
        x[name] = draw(*shape, seed=3 + at)
    x |= {"D": draw(E, seed=5), "z": draw(batch, S, E, seed=6), "dt_bias": draw(E, seed=7)}
    return {**x, "state": draw(batch, E, N, seed=8)}


def positive_steps(**sizes: Any) -> Tensors:
    x = scan_inputs(**sizes)
    return {**x, "dt": x["dt"].abs()}


def scan_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Triton computes in float32, and rounds the results: 1. The others use u twice, for the scan and for the skip: two
    gradients that are rounded, and their sum, 3 for u; 1 for the rest."""
    return 1.0 if backend == "triton" else 3.0


BARE = ("D", "z", "dt_bias")
SELECTIVE_SCAN = Kernel(
    name="selective_scan",
    pairs_interpreted="long",
    function=kernels.selective_scan,
    make=scan_inputs,
    sequences=("u", "dt", "z", "B", "C"),
    states=("state",),
    shapes=(
        {"S": 1}, {"S": 2}, {"S": 31}, {"batch": 1, "S": 32}, {"batch": 1, "S": 33}, {"batch": 1, "S": 65},
        {"S": 6, "E": 12, "N": 1}, {"S": 4, "E": 38, "N": 17}, {"S": 3, "E": 70}, {"batch": 1, "S": 7, "E": 16, "N": 4},
        {"batch": 1, "S": 5, "E": 40, "N": 32}, {"batch": 1, "S": 5, "E": 20, "N": 16},
    ),
    device_shapes=(
        *({"S": S, "E": 70, "N": 16} for S in (31, 64, 130, 1000)),
        *({"S": 40, "E": 48, "N": N} for N in (1, 3, 8, 16, 17, 32, 64, 128, 256)),
    ),
    ranges={"batch": range(4), "S": range(61), "E": (2, 4), "N": range(1, 6)},
    small={"batch": 1, "S": 4, "E": 2, "N": 2},
    variants={
        "all": Variant(),
        "bare": Variant(without=BARE),
        "grouped": Variant(sizes={"groups": 2}),
        "fewer groups of C": Variant(sizes={"groups": 2, "groups_of_C": 1}),
        "constant B": Variant(sizes={"constant": "B"}, fixed=("B",)),
        "constant B C": Variant(sizes={"constant": "BC"}, fixed=("B", "C"), without=BARE),
    },
    roundings=scan_roundings,
    errors=(
        (lambda x: {"dt": x["dt"][:, :3]}, "selective_scan expects u, dt"),
        (lambda x: {"B": x["B"][..., :2]}, "selective_scan expects B"),
        (lambda x: {"D": x["D"][:1]}, r"selective_scan expects D \[4\]; got \[1\]"),
        (lambda x: {"z": x["z"][:, :1]}, r"selective_scan expects z \[2, 9, 4\]; got \[2, 1, 4\]"),
        (lambda x: {"dt_bias": x["dt_bias"][:1]}, "selective_scan expects dt_bias"),
        (lambda x: {"state": x["state"][:1]}, "selective_scan expects a state"),
        (lambda x: {"B": x["B"].cfloat(), "C": x["C"].cfloat()}, "real numbers; got complex B, C"),
        (lambda x: {"A": x["A"].cfloat(), "z": x["z"].cfloat()}, "real numbers; got complex z"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"selective_scan expects resets \[B, S\] = \[2, 9\]"),
        (
            lambda x: {
                **{name: torch.cat([x[name]] * 3, -1) for name in ("u", "dt")}, "A": x["A"].repeat(3, 1),
                "B": x["B"].unsqueeze(2).expand(-1, -1, 4, -1), "C": x["C"].unsqueeze(2).expand(-1, -1, 3, -1),
            },
            "groups of B or C to divide the other; got 4 and 3",
        ),
    ),
    facts={"states": 16, "width": 8},
    refused=(
        ({"states": 257}, "at most 256"), ({"complex": True}, "complex"), ({"dtype": torch.float64}, "float64"),
        ({"device": "mps"}, "needs a CUDA or ROCm device, not mps"),
    ),
    added=("D", "z", "dt_bias", "state"),
)


# ------------------------------------------------------------------------------------------------ convolution


def conv_inputs(batch: int = 2, S: int = 9, D: int = 3, K: int = 4, D_out: int = 0) -> Tensors:
    """Return inputs. With D_out the weight mixes channels."""
    weight = draw(D_out, D, K, seed=1) if D_out else draw(D, 1, K, seed=1)
    return {
        "x": draw(batch, S, D), "weight": weight, "bias": draw(D_out or D, seed=3),
        "state": draw(batch, K - 1, D, seed=2),
    }


def conv_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Triton rounds the results: 1. The reference rounds the sum, and then the activation: 2 for y. Gradients round the
    sum at which the activation's slope is evaluated, the gradient of that sum, and the result: 3. torch rounds each of
    K products and each of their sums, 8 with the bias where K = 4; with more taps the rounded parts are smaller."""
    return {"triton": 1.0, "reference": 3.0}.get(backend, 8.0)


def conv_cancellation(x: Tensors, expected: Tensors, given: Tensors, **options: Any) -> dict[str, float]:
    """The last state is a copy of inputs, so their gradients are sums of two: the gradient through y, rounded when it
    leaves the kernel, and the state's. The sum is rounded again. The gradient through y is the sum minus the state's.
    """
    if "state" not in given:
        return {}
    copied = given["state"].abs().max().item() if given["state"].numel() else 0.0
    sums = {name: expected[name] for name in ("gradient of x", "gradient of state") if name in expected}
    return {name: 2 * sum_.abs().max().item() + copied for name, sum_ in sums.items() if sum_.numel()}


CAUSAL_CONV = Kernel(
    name="causal_conv",
    first_interpreted="slow",
    pairs_interpreted="long",
    function=kernels.causal_conv,
    make=conv_inputs,
    sequences=("x",),
    states=("state",),
    narrow=("x", "state"),
    shapes=(
        {"S": 1}, {"S": 2}, {"S": 3}, {"S": 63}, {"S": 64}, {"S": 65}, {"S": 130}, {"S": 31, "D": 70},
        {"S": 37, "D": 70}, {"K": 1}, {"K": 2}, {"K": 3}, {"K": 8},
    ),
    device_shapes=(
        *({"batch": 3, "S": S, "D": 70} for S in (1, 2, 31, 32, 33, 130, 1000)),
        *({"S": 50, "D": 96, "K": K} for K in range(1, 9)),
    ),
    ranges={"batch": range(4), "S": range(21), "D": range(1, 5), "K": range(1, 7)},
    small={"batch": 1, "S": 5},
    variants={
        "silu": Variant({"activation": "silu"}),
        "plain": Variant(),
        "no bias": Variant({"activation": "silu"}, without=("bias",)),
    },
    roundings=conv_roundings,
    cancellation=conv_cancellation,
    double_backward=("reference",),
    errors=(
        (lambda x: {"x": x["x"][0]}, r"expects x \[B, S, D\]"),
        (lambda x: {"weight": x["weight"][..., :0]}, "K >= 1"),
        (lambda x: {"weight": x["weight"][:2]},
         r"3 channels expects weight \[3, 1, K\] or \[D_out, 3, K\]; got \[2, 1, 4\]"),
        (lambda x: {"bias": x["bias"][:2]}, r"bias \[3\]"),
        (lambda x: {"state": x["state"][:, 1:]}, r"state \[B, K-1, D\] = \[2, 3, 3\]; got \[2, 2, 3\]"),
        (lambda x: {"resets": torch.zeros(2)}, r"resets \[B, S\]"),
        (lambda x: {"activation": "gelu"}, "choose None or 'silu'"),
    ),
    facts={"taps": 4, "mixing": False, "width": 8},
    refused=(
        ({"taps": 9}, "9 taps; at most 8"), ({"mixing": True}, "mixes channels"), ({"dtype": torch.float64}, "float64"),
    ),
    added=("bias", "state"),
)
MIXING_CONV = Kernel(
    name="mixing_conv",
    function=kernels.causal_conv,
    make=lambda D_out=5, **sizes: conv_inputs(D_out=D_out, **sizes),
    sequences=("x",),
    states=("state",),
    narrow=("x", "state", "weight", "bias"),
    shapes=({"S": 1}, {"S": 2}, {"S": 30}, {"K": 1}, {"K": 6}),
    ranges={"batch": range(4), "S": range(21), "D": range(2, 5), "K": range(1, 7)},
    small={"batch": 1, "S": 5},
    implementations=("reference", "torch", "device"),
    roundings=conv_roundings,
    double_backward=("reference", "torch"),
)


# ------------------------------------------------------------------------------------------------ Centaurus


def centaurus_inputs(
    batch: int = 2, S: int = 9, H: int = 3, G: int = 2, N: int = 5, M: int = 3, mode: str = "neck"
) -> Tensors:
    rows = {"dws": H, "full": G * H}.get(mode, N)
    channels = rows * M if mode == "pointwise" else rows
    x = {"x": draw(batch, S, H), "A_real": -draw(rows, M, seed=1).exp(), "A_imag": 3 * draw(rows, M, seed=2)}
    x["dt"] = (draw(rows, seed=3) - 2).exp()
    dense = mode in ("neck", "pointwise")
    x["B"] = draw(channels, H, seed=4) if dense else draw(rows, seed=4)
    x["C"] = draw(G, channels, seed=5) if dense else draw(rows, seed=5)
    if mode != "pointwise":
        x["E"] = draw(rows, M, seed=6)
    return {**x, "state": draw(batch, *((rows * M, 1) if mode == "pointwise" else (rows, M)), 2, seed=7)}


def centaurus_bar(length: int) -> float:
    """Return the tolerance of sums over tokens, and over at most 64 channels in the projections."""
    return 4 * float32_bar(length + 64)


def centaurus_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """The torch implementation and the reference compute in float32, and round the results: 1.

    Triton's projections are products in the dtype of the inputs. B and C are rounded for them, and these errors count
    once for a sum over channels; so are u, v and y: 4. For a gradient they are dv, du and dx: 4. Where torch lets
    cuBLAS accumulate float16 products in float16, each of the four counts twice.
    """
    return 1.0 if backend != "triton" else 8.0 if dtype == torch.float16 else 4.0


def centaurus_cancellation(x: Tensors, expected: Tensors, given: Tensors, **options: Any) -> dict[str, float]:
    """Triton rounds u and B before the recurrence: 2. In mode dws, y and the gradient of C are those errors' sums over
    the substates of one channel, which may cancel. Their sizes are the results for absolute values, with decays that do
    not turn. The dense modes also sum over channels, whose errors are independent.
    """
    if options["mode"] != "dws":
        return {}
    sizes = {name: t.detach().abs() for name, t in x.items()}
    sizes |= {"A_real": x["A_real"].detach(), "A_imag": torch.zeros_like(sizes["A_imag"])}
    if "state" in x:
        moduli = x["state"].detach().norm(dim=-1)
        sizes["state"] = torch.stack([moduli, torch.zeros_like(moduli)], -1)
    y = kernels.centaurus(**sizes | {"C": sizes["C"].requires_grad_()}, **options, backend="reference")
    (of_C,) = torch.autograd.grad((y * given["out"].double().abs()).sum(), sizes["C"])
    return {"out": 2 * y.max().item(), "gradient of C": 2 * of_C.max().item()} if y.numel() else {}


CENTAURUS = Kernel(
    name="centaurus",
    pairs_interpreted="long",
    function=kernels.centaurus,
    make=centaurus_inputs,
    sequences=("x",),
    states=("state",),
    shapes=(
        {"S": 1}, {"S": 2}, {"S": 3}, {"S": 5, "G": 3, "H": 11, "M": 1}, {"S": 4, "H": 5, "M": 8}, {"S": 17}, {"S": 40},
        {"batch": 9, "S": 13}, {"S": 13, "G": 40, "H": 2}, {"S": 13, "G": 3, "H": 33},
    ),
    device_shapes=(
        *({"S": S, "H": 20, "G": 3, "N": 40, "M": 4} for S in (1, 5, 127, 300)),
        *({"S": 280, "H": 6, "M": M} for M in (1, 3, 8, 64)), {"batch": 700, "S": 280, "H": 6},
    ),
    ranges={"batch": range(4), "S": range(41), "H": range(1, 5), "G": range(1, 4), "N": range(1, 6), "M": range(1, 5)},
    small={"batch": 1, "S": 4, "H": 2, "G": 2, "N": 2, "M": 2},
    variants={
        **{mode: Variant({"mode": mode}, {"mode": mode}) for mode in ("neck", "pointwise", "dws", "full")},
        "held input": Variant({"mode": "neck", "hold": "zoh"}),
    },
    bar=centaurus_bar,
    roundings=centaurus_roundings,
    cancellation=centaurus_cancellation,
    double_backward=("reference", "torch"),
    errors=(
        (lambda x: {"mode": "depthwise"}, "mode is one of neck"),
        (lambda x: {"hold": "bilinear"}, "hold is euler or zoh"),
        (lambda x: {"mode": "dws"}, r"mode dws, expects B and C \[3\]"),
        (lambda x: {"mode": "pointwise"}, "expects no E"),
        (lambda x: {"state": torch.zeros(2, 4, 3)}, "expects a state"),
        (lambda x: {"B": x["B"].cfloat()}, "real numbers; got complex B"),
        (
            lambda x: {"x": x["x"][..., :0], **dict.fromkeys("BC", x["B"][:, 0]), "mode": "full"},
            r"mode full, expects B and C \[G 0\]",
        ),
        (lambda x: {"resets": torch.zeros(2, 8, dtype=torch.bool)}, "expects resets"),
        (lambda x: {"plan": "project"}, "supports neither states nor resets"),
        (lambda x: {"plan": "fft"}, "no plan 'fft'"),
    ),
    facts={"mode": "dws", "channels": 4, "substates": 64},
    refused=(({"substates": 65}, "at most 64"), ({"dtype": torch.float64}, "float64")),
    added=("state",),
)


# ------------------------------------------------------------------------------------------------ norm, linear map


def norm_inputs(batch: int = 2, S: int = 7, D: int = 24) -> Tensors:
    x = {"x": draw(batch, S, D), "weight": draw(D, seed=1), "bias": draw(D, seed=2), "skip": draw(batch, S, D, seed=3)}
    return {**x, "skip_weight": draw(D, seed=4), "gate": draw(batch, S, D, seed=5)}


def norm_bar(length: int) -> float:
    """Statistics are sums over a head, the gain's gradient is a sum over all tokens of a batch of two or three."""
    return float32_bar(3 * length + 300)


def norm_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Triton computes in float32, and rounds the results: 1. The others round the norm, the product and the sum of the
    skip, the activation and its product: 5 for y. The gradient of the gate has the roundings of its factor (3), the
    product with dy, the activation's slope, and the result: 6; others have fewer."""
    return 1.0 if backend == "triton" else 6.0


OF_TORCH = ("reference", "torch")
PLAIN = ("skip", "skip_weight", "gate")
HEAD_NORM = Kernel(
    name="head_norm",
    function=kernels.head_norm,
    make=norm_inputs,
    sequences=("x", "skip", "gate"),
    shapes=(
        {"S": 1}, {"S": 2}, {"S": 37}, {"batch": 1, "S": 130}, {"S": 0}, {"S": 5, "D": 18}, {"S": 4, "D": 600},
    ),
    device_shapes=tuple({"batch": 3, "S": 130, "D": D} for D in (24, 48, 192, 576, 1536, 4092)),
    ranges={"batch": range(4), "S": range(10)},
    small={"batch": 1, "S": 2, "D": 6},
    variants={
        "all": Variant({"heads": 3}),
        "norm": Variant({"heads": 3}, without=PLAIN),
        "no gain": Variant({"heads": 3}, without=("weight", "bias", *PLAIN)),
        "no bias": Variant({"heads": 3, "one_plus": True}, without=("bias", "gate")),
        "no skip": Variant({"heads": 3}, without=("weight", "skip", "skip_weight")),
        "one head": Variant({"heads": 1}),
        **{f"{name} gate": Variant({"heads": 3, "activation": name}, without=("skip", "skip_weight"))
           for name in ("none", "sigmoid")},
        **{f"{name} gate": Variant({"heads": 3, "activation": name}, without=("skip", "skip_weight"), on=OF_TORCH)
           for name in ("gelu", "relu", "tanh", "softplus")},
    },
    resets=False,
    reverse=False,
    bar=norm_bar,
    roundings=norm_roundings,
    double_backward=("reference", "torch"),
    reverse_mode_only=(),
    errors=(
        (lambda x: {"heads": 5}, r"x \[..., H \* D\] with H = 5; got \[2, 7, 24\]"),
        (lambda x: {"weight": x["weight"][:3]}, r"weight \[24\]; got \[3\]"),
        (lambda x: {"bias": x["bias"][:3]}, r"bias \[24\]; got \[3\]"),
        (lambda x: {"skip_weight": None}, "skip and skip_weight together"),
        (lambda x: {"gate": x["gate"][:1]}, "expects gate with the shape of x"),
        (lambda x: {"activation": "swish"}, "unknown activation 'swish'; choose from none, silu"),
    ),
    facts={"heads": 2, "width": 64},
    refused=(
        ({"width": 20_000}, "at most 8192"), ({"gate": "gelu"}, "gate activation gelu"),
        ({"dtype": torch.float64}, "float64"),
    ),
)


def normed_residual(x: Tensor, residual: Tensor | None = None, **rest: Any) -> Tensor:
    """Return both results of residual_norm side by side."""
    return torch.cat(kernels.residual_norm(x, residual, **rest), -1)


def residual_inputs(batch: int = 2, S: int = 7, D: int = 24) -> Tensors:
    x, residual = draw(batch, S, D), draw(batch, S, D, seed=3)
    return {"x": x, "residual": residual, "weight": draw(D, seed=1), "bias": draw(D, seed=2)}


def residual_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """The total is rounded before its norm: 1, which the gain multiplies. Triton rounds the result: 2. The others also
    round the norm, its product with the gain and the sum with the bias: 4, and one more in the backward pass, where the
    two gradients of the total are added."""
    return 2.0 if backend == "triton" else 5.0


RESIDUAL_NORM = Kernel(
    name="residual_norm",
    function=normed_residual,
    implementations=("reference", "triton", "gpu"),  # torch uses the same function as the reference
    make=residual_inputs,
    sequences=("x", "residual"),
    shapes=({"S": 1}, {"S": 37}, {"S": 0}, {"S": 5, "D": 18}, {"S": 3, "D": 600}),
    device_shapes=tuple({"batch": 3, "S": 130, "D": D} for D in (24, 192, 1536, 8192)),
    ranges={"batch": range(4), "S": range(10)},
    small={"batch": 1, "S": 2, "D": 6},
    variants={
        "all": Variant({"centred": True, "one_plus": True}),
        "rms": Variant({"one_plus": True}, without=("bias",)),
        "alone": Variant({"centred": True}, without=("residual",)),
        "no gain": Variant(without=("weight", "bias")),
    },
    resets=False,
    reverse=False,
    bar=norm_bar,
    roundings=residual_roundings,
    reverse_mode_only=(),
    errors=(
        (lambda x: {"weight": x["weight"][:3]}, r"weight \[24\]; got \[3\]"),
        (lambda x: {"bias": x["bias"][:3]}, r"bias \[24\]; got \[3\]"),
        (lambda x: {"residual": x["residual"][:1]}, r"expects residual \["),
    ),
    facts={"width": 64},
    refused=(({"width": 20_000}, "at most 8192"), ({"dtype": torch.float64}, "float64")),
)


def linear_inputs(batch: int = 2, S: int = 7, G: int = 3, O: int = 4, I: int = 4) -> Tensors:
    return {"x": draw(batch, S, G * I), "weight": draw(G, O, I, seed=1), "bias": draw(G * O, seed=2)}


def linear_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """The product is rounded, and its sum with the bias: 2. Gradients are one product: 1."""
    return 2.0


HEADWISE_LINEAR = Kernel(
    name="headwise_linear",
    function=kernels.headwise_linear,
    make=linear_inputs,
    sequences=("x",),
    narrow=("x", "weight", "bias"),
    shapes=(
        *({"S": S} for S in (0, 1, 2, 31, 32, 33, 130)),
        *({"S": 5, "G": G, "O": O, "I": I} for G, O, I in (
            (1, 1, 1), (5, 2, 3), (2, 3, 2), (9, 4, 4), (17, 4, 8), (2, 16, 16), (40, 4, 4), (7, 13, 5),
        )),
    ),
    device_shapes=tuple(
        {"batch": 3, "S": 130, "G": G, "O": O, "I": I} for G, O, I in ((192, 4, 4), (7, 3, 5), (33, 16, 16), (5, 1, 2))
    ),
    ranges={"batch": range(4), "S": range(4), "G": range(1, 41), "O": range(1, 41), "I": range(1, 41)},
    small={"batch": 1, "S": 2, "G": 4, "O": 3, "I": 2},
    variants={"with bias": Variant(), "no bias": Variant(without=("bias",))},
    resets=False,
    reverse=False,
    bar=lambda length: float32_bar(2 * length + 40),  # the weight's gradient is a sum over both rows of a batch
    roundings=linear_roundings,
    double_backward=("reference", "torch"),
    reverse_mode_only=(),
    errors=(
        (lambda x: {"x": x["x"][..., :9]}, r"weight \[G, O, I\]; got x \[2, 7, 9\], weight \[3, 4, 4\]"),
        (lambda x: {"bias": x["bias"][:5]}, r"bias \[G \* O\] = \[12\]; got \[5\]"),
    ),
    facts={"block": (4, 16, 16)},
    refused=(({"block": (4, 17, 16)}, "torch's own"), ({"dtype": torch.float64}, "float64")),
    added=("bias",),
)


# ------------------------------------------------------------------------------------------------ associative scans


class Pair(NamedTuple):
    decay: Tensor
    value: Tensor


def linear(a: Pair, b: Pair) -> Pair:
    """Combine a diagonal linear recurrence: h' = decay h + value."""
    return Pair(a.decay * b.decay, b.decay * a.value + b.value)


def logarithmic(a: Pair, b: Pair) -> Pair:
    """Combine the same recurrence for positive values in logarithms (min-GRU): its carry may be -inf."""
    return Pair(a.decay + b.decay, torch.logaddexp(b.decay + a.value, b.value))


def associative_inputs(batch: int = 2, S: int = 9, D: int = 3) -> Tensors:
    x = {"decay": draw(batch, S, D).sigmoid(), "value": draw(batch, S, D, seed=1)}
    return {**x, "carried decay": draw(batch, D, seed=2), "carried value": draw(batch, D, seed=3)}


def associative_call(
    decay: Tensor, value: Tensor, *, combine: Any, state: Any = None, return_state: bool = False, **options: Any
) -> Any:
    decays = decay if combine is linear else -decay
    initial = None if state is None else Pair(*state)
    states, last = kernels.associative_scan(combine, Pair(decays, value), initial=initial, **options)
    return (states.value, last) if return_state else states.value


ASSOCIATIVE_SCAN = Kernel(
    name="associative_scan",
    function=associative_call,
    make=associative_inputs,
    sequences=("decay", "value"),
    states=("carried decay", "carried value"),
    narrow=("decay", "value", "carried decay", "carried value"),
    shapes=({"S": 1}, {"S": 2}, {"S": 3}, {"S": 31}, {"S": 64}, {"S": 130}),
    ranges={"batch": range(1, 4), "S": range(1, 61), "D": range(1, 5)},
    small={"batch": 1, "S": 5, "D": 2},
    variants={"linear": Variant({"combine": linear}), "logarithmic": Variant({"combine": logarithmic})},
    implementations=("reference", "torch", "device"),
    min_length=1,
    # The elements stay in their dtype: a chain of S combinations of a few roundings each, forward and backward.
    roundings=lambda backend, dtype, length: 2.0 * length + 8,
    double_backward=("reference", "torch"),
    reverse_mode_only=(),
    errors=(
        (lambda x: {"decay": x["decay"][:, :0], "value": x["value"][:, :0]}, "at least one element"),
        (lambda x: {"value": x["value"][:, :4]}, "of one B and S"),
        (lambda x: {"carried value": x["carried value"][:, :1]}, "an initial carry like one element"),
        (lambda x: {"resets": torch.zeros(2, 4)}, r"resets \[B, S\] = \[2, 9\]"),
    ),
)
MLSTM_MEMOROID = Kernel(
    name="mlstm_memoroid",
    function=kernels.mlstm_memoroid,
    **MLSTM_INPUTS,
    shapes=({"S": 1}, {"S": 2}, {"S": 31}, {"S": 64}, {"S": 130}),
    ranges={"batch": range(1, 4), "S": range(21), "H": range(1, 4), "DK": range(1, 6), "DV": range(1, 6)},
    small={"batch": 1, "S": 4, "H": 1, "DK": 2, "DV": 2},
    variants={"paper": Variant(), "unit floor": Variant({"readout": "unit_floor"})},
    implementations=("reference", "torch", "device"),
    bar=mlstm_bar,
    double_backward=("reference", "torch"),
    reverse_mode_only=(),
    errors=(
        (lambda x: {"readout": "max"}, "readout must be one of paper, unit_floor"),
        (lambda x: {"k": x["k"][:, :3]}, "mlstm_memoroid expects q, k"),
        (lambda x: {"v": x["v"][..., 0]}, r"mlstm_memoroid expects .* v \[B, S, H, DV\]"),
        (lambda x: {"C": x["C"][:1]}, "mlstm expects a state C, n, m"),
        (lambda x: {"resets": torch.zeros(2, 3, dtype=torch.bool)}, "mlstm_memoroid expects resets"),
        (lambda x: {"i": x["i"].cfloat()}, "real numbers; got complex i"),
    ),
)

KERNELS = (
    MLSTM, SLSTM, SELECTIVE_SCAN, CAUSAL_CONV, MIXING_CONV, CENTAURUS, HEAD_NORM, HEADWISE_LINEAR, ATTENTION,
    ASSOCIATIVE_SCAN, MLSTM_MEMOROID, LINEAR_ATTENTION, FIRST,
    GATED_RECURRENCE, RESIDUAL_NORM,
)
