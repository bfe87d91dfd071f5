"""The description of attention for the conformance tests; families.py has the other kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqblocks import kernels
from tests.kernels.conformance import Kernel, Tensors, Variant, draw, float32_bar


def attention_inputs(
    batch: int = 2, S: int = 9, H: int = 4, G: int = 2, D: int = 6, DV: int = 3, past: int = 160
) -> Tensors:
    """Return inputs. The cache holds 3 tokens for the first row and none for the last; older entries are never read."""
    x = {"q": draw(batch, S, H, D), "k": draw(batch, S, G, D, seed=1), "v": draw(batch, S, G, DV, seed=2)}
    x |= {"cached k": draw(batch, past, G, D, seed=3), "cached v": draw(batch, past, G, DV, seed=4)}
    x |= {"slopes": 0.3 + 0.1 * torch.arange(H, dtype=torch.float64), "sinks": draw(H, seed=5)}
    return {**x, "length": 3 * (torch.arange(batch) == 0)}


def attention_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """The reference computes in float32, but rounds rotated q and k, and their gradient: 2. torch's kernels round
    scores, of size 6 here, which is the relative error of the weights (6); the weights and the result: 8 for y.
    Gradients also have the roundings of the gradients of weights and scores, the weights again, and the rotation: 12.
    """
    return 12.0 if backend == "torch" else 2.0


def attention_cancellation(
    x: Tensors, expected: Tensors, given: Tensors, *, scale: float | None = None, **options: Any
) -> dict[str, float]:
    """Return roundings times sizes for the gradients of q and k, which are zero if a query reads one key only.

    The gradient of a score is its weight times dy.(v - y). The two products are rounded separately, with DV roundings
    of half a unit each, and subtracted: DV units of |dy||v|. The weights add up to 1, so that the gradient of q has
    that error times the largest key; a key collects the independent errors of S queries and H / G heads.
    """
    length, heads, width = x["q"].shape[1:]
    groups = x["k"].shape[2]

    def largest(t: Tensor) -> float:
        return t.detach().double().norm(dim=-1).max().item() if t.numel() else 0.0

    values = max(largest(x[name]) for name in ("v", "cached v") if name in x)
    keys = max(largest(x[name]) for name in ("k", "cached k") if name in x)
    score = x["v"].shape[-1] * largest(given["out"]) * values * (width**-0.5 if scale is None else scale)
    collected = (length * heads / groups) ** 0.5
    return {"gradient of q": score * keys, "gradient of k": score * largest(x["q"]) * collected}


def first_inputs(**sizes: int) -> Tensors:
    """Return inputs with 2 first tokens besides the cache, which the first row no longer has in its window."""
    x = attention_inputs(**sizes)
    batch = len(x["length"])
    for at, name in enumerate("kv"):
        x[f"first {name}"] = draw(batch, 2, *x[name].shape[2:], seed=6 + at)
    return {**x, "length": 9 * (torch.arange(batch) == 0)}


WINDOW = {"past": 6}
EXTRA = ("slopes", "sinks")
ATTENTION = Kernel(
    name="attention",
    function=kernels.attention,
    make=attention_inputs,
    sequences=("q", "k", "v"),
    states=("cached k", "cached v", "length"),
    shapes=({"S": 1}, {"S": 2}, {"S": 7}, {"S": 40}, {"S": 130}, {"H": 1, "G": 1, "DV": 8}, {"S": 13, "G": 4}),
    ranges={"batch": range(4), "S": range(25), "D": (2, 4), "DV": range(1, 5)},
    small={"batch": 1, "S": 5, "H": 2, "G": 1, "D": 2, "DV": 2},
    variants={
        "full": Variant(without=EXTRA),
        "window of 7": Variant({"window": 7}, WINDOW, without=EXTRA),
        "window of 1": Variant({"window": 1}, {"past": 0}, without=EXTRA),
        "rotary": Variant({"rotary": 100.0, "scale": 0.3}, without=EXTRA),
        "chunks of 4": Variant({"chunk": 4, "rotary": 100.0}, {"past": 3}, without=EXTRA),
        "soft cap": Variant({"soft_cap": 2.0}, without=EXTRA),
        "biases, sinks": Variant(),
        "biases, sinks, window of 7": Variant({"window": 7, "soft_cap": 5.0, "scale": 0.3}, WINDOW),
    },
    implementations=("reference", "torch", "device"),
    reverse=False,
    bar=lambda length: 8 * float32_bar(length),  # scores of size 6 in an exponential
    roundings=attention_roundings,
    cancellation=attention_cancellation,
    cancelling=("torch",),
    exact_zeros=True,
    reverse_mode_only=(),
    errors=(
        (lambda x: {"q": x["q"][:, :, :3]}, "G a divisor of H"),
        (lambda x: {"causal": False}, "needs causal=True"),
        (lambda x: {"window": 0}, "window must be at least 1"),
        (lambda x: {"chunk": 0}, "chunk must be at least 1"),
        (lambda x: {"window": 200}, "too short for a window of 200"),
        (lambda x: {"cached k": x["cached k"].sum()}, "attention expects a state of shapes"),
        (lambda x: {**{n: x[n][..., :3] for n in ("q", "k", "cached k")}, "rotary": 100.0}, "even head width"),
        (lambda x: {"resets": torch.zeros(2, 9)}, r"expects resets bool \[2, 9\]"),
        (lambda x: {"soft_cap": 0.0}, "soft_cap must be positive"),
        (lambda x: {"sinks": torch.zeros(3)}, r"expects sinks \[H\] = \[4\]; got \[3\]"),
        (lambda x: {"slopes": torch.zeros(1, 4)}, r"expects slopes \[H\] = \[4\]; got \[1, 4\]"),
        (lambda x: {"length": x["length"][:1]}, "expects a state of shapes"),
    ),
)

FIRST = replace(
    ATTENTION,
    name="attention_with_first",
    make=first_inputs,
    states=(*ATTENTION.states, "first k", "first v"),
    variants={
        "window of 3": Variant({"window": 3, "first": 2}, {"past": 2}, without=EXTRA),
        "biases, sinks, window of 7": Variant({"window": 7, "first": 2, "scale": 0.3}, WINDOW),
    },
    errors=(
        (lambda x: {"window": None}, "first must be at least 1, with a window"),
        (lambda x: {"causal": False}, "first must be at least 1, with a window and causal=True"),
        (lambda x: {"first": 3}, "expects a state of shapes"),
    ),
)
