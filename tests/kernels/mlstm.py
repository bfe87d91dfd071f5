"""The description of the mLSTM for the conformance suite, with the count of its roundings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from seqblocks import kernels
from seqblocks.kernels.mlstm.reference import MLSTMState, cell, log_input_gate
from seqblocks.kernels.resets import along
from tests.kernels.conformance import Kernel, Tensors, Variant, draw


def mlstm_inputs(
    batch: int = 2, S: int = 9, H: int = 2, DK: int = 4, DV: int = 3, scale: float = 2.0
) -> Tensors:
    x = {"q": draw(batch, S, H, DK, seed=1), "k": draw(batch, S, H, DK, seed=2), "v": draw(batch, S, H, DV, seed=3)}
    x |= {"i": scale * draw(batch, S, H, seed=4), "f": scale * draw(batch, S, H, seed=5) + 1}
    return {**x, "C": draw(batch, H, DK, DV, seed=6), "n": draw(batch, H, DK, seed=7), "m": draw(batch, H, seed=8)}


def mlstm_bar(length: int) -> float:
    """Return the tolerance of sums over the tokens and a few products, each rounded at 2^-24. The division by |q.n|
    multiplies that by the cancellation in q.n, which in these draws is at least a tenth of its terms: a factor of ten
    in h, and of ten more in gradients, which contain both h and the divisor."""
    return 20 * (16 + length) * 2**-24


def mlstm_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Return the roundings. The reference and the torch implementation compute in float32 and round only their results.

    The Triton implementation also rounds the operands of its dots, each once: keys and queries times their weights, the
    states C and dC when they are read, and the weights between tokens. Sums over tokens, n and q . n are float32.
    The counts, each including the roundings of its inputs:

        C       1   weighted key
        num     2   C, and C when it is read; or the weights between tokens
        h       3   num, and the result
        dC      2   weighted query, and the result
        dv      3   dC, and dC when it is read; or the weights; and the result

    `mlstm_cancellation` has the other gradients.
    """
    return 3.0 if backend == "triton" else 1.0


def mlstm_cancellation(x: Tensors, expected: Tensors, given: Tensors, **options: Any) -> dict[str, float]:
    """Return roundings times sizes for gradients that are differences of larger sums.

    Counts in addition to those of `mlstm_roundings`:

        dq, dk   through the numerator of h 2: C or dC, and when it is read; or the weights
                 through its divisor 4: h, in dh . h, and the weights; the parts may cancel; the result 1
        dn       through the divisor 3, and the result
        k . dk   as dk without the result
        <C, dC>  4: both, and when they are read; of the first state 2, of the last 2; <n, dn> 3, of the last 0

    The gradient of log f at t is <C, dC> + <n, dn> there. It is computed as the reads of the chunk's tokens minus their
    writes, plus the terms of the states that enter and leave the chunk. Contributions of two of these tokens to each
    other are the same in both, so the sizes are those of <C, dC> + <n, dn>, all products taken positive, of the first
    state, of the last, and the largest at tokens between. The gradient of log i is k . dk; that of m is that of the
    first state. With the exponential gate m is a maximum, and both lose the last state's (1) and what
    eps leaves of dh . h (3).
    """
    counts = {"q": (2, 4), "k": (2, 4), "n": (0, 3)}
    leaves = {name: x[name].detach().requires_grad_() for name in counts if name in x}
    parts = mlstm_parts({name: leaves.get(name, t.detach()) for name, t in x.items()}, given, **options)
    gradients = [
        torch.autograd.grad(loss, [*leaves.values()], retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in (parts.numerator, parts.divisor)
    ]
    results, products = {}, {}
    for (name, leaf), *of_leaf in zip(leaves.items(), *gradients, strict=True):
        counted = [*zip(counts[name], of_leaf, strict=True)]
        results[name] = sum((count + 1) * part.abs().max().item() for count, part in counted)
        products[name] = sum(count * (leaf * part).abs().sum(-1).max().item() for count, part in counted)
    through_m = 0.0 if options.get("input_gate") == "sigmoid" else parts.flows[-1] + 3 * parts.of_eps
    first, *between, last = parts.flows
    results |= {"i": products["k"] + through_m, "m": 3 * first + through_m}
    results["f"] = 3 * first + 4 * max(between, default=0.0) + 2 * last
    return {f"gradient of {name}": size for name, size in results.items()}


class Parts(NamedTuple):
    """numerator, divisor: the loss as a function of the numerator of h and the last C, and of the divisor and the last
    n; in the second all products of dh . h are positive, because they may cancel. flows: <C, dC> + <n, dn> before each
    token and after the last, all products positive. of_eps: the contribution of eps to dh . h, over all tokens."""

    numerator: Tensor
    divisor: Tensor
    flows: list[float]
    of_eps: float


def mlstm_parts(
    x: Tensors, given: Tensors, *, resets: Tensor | None = None, reverse: bool = False, eps: float = 1e-6,
    input_gate: str = "exp", normalize: bool = True, **options: Any,
) -> Parts:
    """Compute the parts by the definition in float64, with the cotangents `given`."""
    B, S, H, DK = x["q"].shape
    log_i, log_f = log_input_gate(x["i"], input_gate), logsigmoid(x["f"])
    shapes = {"C": (DK, x["v"].shape[-1]), "n": (DK,), "m": ()}
    state = MLSTMState(*(x.get(name, log_f.new_zeros(B, H, *shape)) for name, shape in shapes.items()))
    largest = MLSTMState(state.C.abs(), state.n.abs(), state.m)  # the state, all products positive
    numerator = divisor = torch.zeros(())
    of_eps = torch.zeros(B, H, dtype=torch.float64)
    tokens = []
    for t in reversed(range(S)) if reverse else range(S):
        if resets is not None:
            state, largest = (MLSTMState(*(along(~resets[:, t], y) * y for y in part)) for part in (state, largest))
        kept, gates = torch.exp(log_f[:, t] + state.m), (log_i[:, t], log_f[:, t])
        if resets is not None:
            kept = along(~resets[:, t], kept) * kept
        q, k, v = x["q"][:, t] * DK**-0.5, x["k"][:, t], x["v"][:, t]
        before = largest
        _, largest = cell(q, k.abs(), v.abs(), *gates, largest, eps=eps, input_gate=input_gate, normalize=False)
        num, state = cell(q, k, v, *gates, state, eps=eps, input_gate=input_gate, normalize=False)
        den, floor = (q * state.n).sum(-1), torch.exp(-state.m)
        inverse = (1 / (den.abs().clamp(min=floor) + eps) if normalize else torch.ones_like(den)).detach()
        dh = given["out"][:, t].double()
        r = (dh * num).detach().abs().sum(-1) * inverse
        dden = r * inverse * (normalize & (den.abs() >= floor))
        numerator = numerator + ((dh * num).sum(-1) * inverse).sum()
        divisor = divisor + (dden * den).sum()
        of_eps += eps * r * inverse * normalize
        read = q.detach().abs()
        dnum = dh.abs() * inverse[..., None]
        tokens.append((before, kept / torch.exp(state.m), read[..., None] * dnum[..., None, :], read * dden[..., None]))
    dC, dn = torch.zeros_like(state.C), torch.zeros_like(state.n)
    if "C" in given:
        numerator, divisor = numerator + (state.C * given["C"]).sum(), divisor + (state.n * given["n"]).sum()
        dC, dn = given["C"].double().abs(), given["n"].double().abs()

    def flow(part: MLSTMState) -> float:
        return ((part.C * dC).sum((-2, -1)) + (part.n * dn).sum(-1)).max().item()

    flows = [flow(largest)]
    for before, kept, read_C, read_n in reversed(tokens):
        dC, dn = kept[..., None, None] * (dC + read_C), kept[..., None] * (dn + read_n)
        flows.append(flow(before))
    return Parts(numerator, divisor, flows[::-1], of_eps.max().item())


def mlstm_errors() -> Any:
    return (
        (lambda x: {"q": x["q"][0]}, r"q, k \[B, S, H, DK\]"),
        (lambda x: {"k": x["k"][..., :1]}, "got q"),
        (lambda x: {"v": x["v"][:, :3]}, "got q"),
        (lambda x: {"i": x["i"][..., None]}, r"gates i, f \[B, S, H\]"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"resets \[B, S\] = \[2, 9\]"),
        (lambda x: {"m": x["m"][..., None]}, r"state C, n, m of shapes \[2, 2, 4, 3\], \[2, 2, 4\], \[2, 2\]"),
        (lambda x: {"input_gate": "tanh"}, "unknown input_gate 'tanh'; choose from exp, sigmoid"),
        (lambda x: {"normalize": False}, "needs input_gate='sigmoid'"),
        (lambda x: {"chunk_size": 0}, "at least 1"),
    )


MLSTM_INPUTS: dict[str, Any] = {
    "make": mlstm_inputs, "sequences": ("q", "k", "v", "i", "f"), "states": ("C", "n", "m"), "narrow": ("q", "k", "v"),
}
MLSTM = Kernel(
    name="mlstm",
    pairs_interpreted="long",
    function=kernels.mlstm,
    **MLSTM_INPUTS,
    shapes=(
        {"S": 1}, {"S": 2}, {"S": 15}, {"S": 64}, {"batch": 1, "S": 65}, {"batch": 1, "S": 130, "DK": 16, "DV": 16},
        {"batch": 1, "S": 37, "H": 1, "DK": 24, "DV": 16}, {"batch": 1, "S": 37, "H": 1, "DK": 40, "DV": 4},
        {"batch": 1, "S": 37, "H": 1, "DK": 4, "DV": 70},
    ),
    device_shapes=(
        {"S": 31, "DK": 32, "DV": 48}, {"S": 63, "DK": 32, "DV": 48}, {"S": 300, "DK": 32, "DV": 48},
        *({"S": 100, "DK": a, "DV": b}
          for a, b in ((16, 70), (64, 64), (128, 128), (192, 192), (256, 512), (512, 512))),
    ),
    ranges={"batch": range(4), "S": range(21), "H": range(1, 4), "DK": range(1, 6), "DV": range(1, 6)},
    small={"batch": 1, "S": 6, "H": 1, "DK": 2, "DV": 2},
    variants={
        "exp": Variant(),
        "sigmoid": Variant({"input_gate": "sigmoid"}),
        "undivided": Variant({"input_gate": "sigmoid", "normalize": False}),
        "chunks of 5": Variant({"chunk_size": 5}, on=("reference", "torch")),
        "large eps": Variant({"eps": 0.3}),
    },
    bar=mlstm_bar,
    roundings=mlstm_roundings,
    cancellation=mlstm_cancellation,
    exact_zeros=True,  # the gradient of f, for a token that no state precedes
    errors=mlstm_errors(),
    facts={"dtype": torch.bfloat16, "head_dims": (64, 64)},
    refused=(({"dtype": torch.float64}, "float64: Triton implementations compute in float32"),),
    added=("C", "n", "m"),
)
