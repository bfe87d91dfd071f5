"""The description of linear attention and its relatives for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch

from seqblocks import kernels
from seqblocks.kernels.linear_attention.reference import step
from seqblocks.kernels.resets import along
from tests.kernels.conformance import Kernel, Tensors, Variant, draw


def linear_attention_inputs(
    batch: int = 2, S: int = 9, H: int = 2, K: int = 4, V: int = 3, groups: int = 1, decay: str = "head",
    positive: bool = False, columns: int = 0,
) -> Tensors:
    """Return inputs with keys of length 1, as delta rules need them, and decays from weak to as strong as exp(-50)."""
    HV = groups * H
    q, k, v = (draw(batch, S, *shape, seed=at) for at, shape in enumerate([(H, K), (H, K), (HV, V)]))
    k = torch.nn.functional.normalize(k, dim=-1)
    shape = (batch, S, HV, K) if decay == "key" else (batch, S, HV)
    x = {"q": q.abs() + 0.1 if positive else q, "k": k.abs() if positive else k, "v": v}
    x |= {"decay": -torch.exp(2 * draw(*shape, seed=3) - 2), "beta": draw(batch, S, HV, seed=4).sigmoid()}
    erased = torch.nn.functional.normalize(draw(batch, S, HV, K, seed=5), dim=-1)
    x |= {"a": -erased, "b": erased * draw(batch, S, HV, K, seed=6).sigmoid(), "bonus": draw(H, K, seed=7)}
    state = draw(batch, HV, K, V + columns, seed=8)
    return {**x, "state": state.abs() if positive else state}


def linear_attention_errors() -> Any:
    return (
        (lambda x: {"q": x["q"][0]}, r"q, k \[B, S, H, K\]"),
        (lambda x: {"v": x["v"][:, :, :1]}, "HV a multiple of H"),
        (lambda x: {"decay": x["decay"][..., None]}, r"expects decay \[2, 9, 2\] or \[2, 9, 2, 4\]"),
        (lambda x: {"beta": x["decay"][:, :3]}, r"expects beta \[2, 9, 2\]"),
        (lambda x: {"a": x["q"]}, "a and b go together"),
        (lambda x: {"a": x["q"], "b": x["q"], "beta": x["decay"]}, "give only one of them"),
        (lambda x: {"beta": x["decay"], "normalize": True}, "for the rule add"),
        (lambda x: {"bonus": x["q"][0, 0], "normalize": True}, "not both"),
        (lambda x: {"normalize": True}, r"state \[B, HV, K, V \+ 1\]"),
        (lambda x: {"state": x["state"][:1]}, r"state \[B, HV, K, V\] = \[2, 2, 4, 3\]"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"resets \[B, S\] = \[2, 9\]"),
        (lambda x: {"chunk_size": 0}, "at least 1"),
    )


def linear_attention_roundings(backend: str, dtype: torch.dtype, length: int) -> float:
    """Return the roundings. The reference and the torch implementation compute in float32 and round only their results.

    The Triton implementation rounds the operands of its dots and what it stores between kernels. The largest counts
    (with a decay per key), each including the roundings of its inputs:

        C        2   weighted key, and when it is read
        weights  3   query and key, both weighted, and the result
        y        4   weighted query and C, or weights; and the result
        dv       4   weights, or weighted key and dC; and the result
        dq, dk   4   gradient of weights 1, other keys or queries 1, or dC and the value; and the result; and one
                     where heads are summed

    Delta rules have more: `linear_attention_cancellation`.
    """
    return 4.0 if backend == "triton" else 1.0


def linear_attention_cancellation(
    x: Tensors, expected: Tensors, given: Tensors, **options: Any
) -> dict[str, float]:
    """Return roundings times sizes for gradients that are differences of larger sums.

    Counts for a delta rule, with e = v - S'^T k and its gradient de:

        solved   3   A, which is rounded as weights are; and when it is read
        of_state 5   solved, weighted key, and the result
        e        8   of_state, C without e, and the result; or solved times v and twice stored
        y       10   e, times beta when it is read; and the result; the same for dx, and for the last state
        de      10   solved, dx times beta, and the result: with `solved` as above dx is 6
        dk      12   gradient of A: de, e; other keys; and the result

    These are relative to e and dx as large as v and dy, which beta of at most 1 and keys of length 1 allow.
    The gradient of a decay is the difference of the reads and the writes of tokens, counted as dq and dk. Contributions
    of two tokens of a chunk to each other are the same in both, so the sizes are those of <S, dS> at a token, all
    products positive, summed over channels for a decay per head.
    Normalised gradients have a part through the numerator, 6 (its cotangent is rounded, and contains the divisor), and
    one through the divisor, 8 (its cotangent contains y, the quotient of two). The parts may cancel.
    """
    count = 12.0 if "beta" in x else 4.0
    sizes = {name: count * t.abs().max().item() for name, t in expected.items() if t.numel()}
    if options.get("normalize"):
        for name, through in parts_of_the_quotient(x, given, **options).items():
            sizes[name] = max(sizes.get(name, 0.0), 6 * through[0] + 8 * through[1])
    if "decay" in x and x["v"].numel():
        sizes["gradient of decay"] = 2 * count * flow(x, given, **options)
    return sizes


def parts_of_the_quotient(x: Tensors, given: Tensors, **options: Any) -> dict[str, tuple[float, float]]:
    """Return the largest gradients through the numerator and through the divisor; all products of the latter are
    positive."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    values = torch.cat([leaves["v"], torch.ones_like(leaves["v"][..., :1])], -1)
    plain = {**options, "normalize": False, "return_state": True, "backend": "reference"}
    out: Any = kernels.linear_attention(**{**leaves, "v": values}, **plain)
    y, last = out
    num, den = y[..., :-1], y[..., -1:]
    dy = given["out"].double() / den.detach()
    numerator = (num * dy).sum()
    if "state" in given:
        numerator = numerator + (last * given["state"].double()).sum()
    divisor = (den * (dy * num / den).detach().abs().sum(-1, keepdim=True)).sum()
    found = [
        torch.autograd.grad(loss, [*leaves.values()], retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in (numerator, divisor)
    ]
    return {f"gradient of {name}": (a.abs().max().item(), b.abs().max().item())
            for name, a, b in zip(leaves, *found, strict=True)}


def flow(
    x: Tensors, given: Tensors, *, resets: torch.Tensor | None = None, reverse: bool = False, **options: Any
) -> float:
    """Return the largest <S, dS> before any token, with positive products, by the definition."""
    x = {name: t.detach().double() for name, t in x.items()}
    groups, S = x["v"].shape[2] // x["q"].shape[2], x["q"].shape[1]
    q, k = (t.repeat_interleave(groups, 2) for t in (x["q"].shape[3] ** -0.5 * x["q"], x["k"]))
    v = torch.cat([x["v"], torch.ones_like(x["v"][..., :1])], -1) if options.get("normalize") else x["v"]
    bonus = x["bonus"].repeat_interleave(groups, 0) if "bonus" in x else None
    state = x.get("state", torch.zeros(*v[:, 0].shape[:2], q.shape[3], v.shape[3], dtype=torch.float64))
    states, loss = [], torch.zeros((), dtype=torch.float64)
    for t in reversed(range(S)) if reverse else range(S):
        if resets is not None:
            state = state.masked_fill(along(resets[:, t], state), 0.0)
        state = state.detach().requires_grad_() if not states else state
        states.append(state)
        y, state = step(
            q[:, t], k[:, t], v[:, t], x["decay"][:, t], x["beta"][:, t] if "beta" in x else None, None, None, bonus,
            state,
        )
        if options.get("normalize"):
            y = y[..., :-1] / (y[..., -1:] + 1e-10)
        loss = loss + (y * given["out"][:, t].double()).sum()
    states.append(state)
    if "state" in given:
        loss = loss + (state * given["state"].double()).sum()
    grads = torch.autograd.grad(loss, states, allow_unused=True, materialize_grads=True)
    per_key = x["decay"].dim() == 4
    found = [(s * g).abs().sum(-1) if per_key else (s * g).abs().sum((-2, -1))
             for s, g in zip(states, grads, strict=True)]
    return max(f.max().item() for f in found)


ADD = ("beta", "a", "b", "bonus")
LINEAR_ATTENTION = Kernel(
    name="linear_attention",
    function=kernels.linear_attention,
    make=linear_attention_inputs,
    sequences=("q", "k", "v", "decay", "beta", "a", "b"),
    states=("state",),
    narrow=("q", "k", "v", "beta", "a", "b"),
    shapes=({"S": 1}, {"S": 2}, {"S": 15}, {"S": 17}, {"S": 64}, {"batch": 1, "S": 65}, {"batch": 1, "S": 130, "K": 9}),
    ranges={"batch": range(4), "S": range(80), "H": range(1, 4), "K": range(1, 5), "V": range(1, 5)},
    small={"batch": 1, "S": 4, "H": 1, "K": 2, "V": 2},
    variants={
        "decay": Variant(without=ADD),
        "add": Variant(without=(*ADD, "decay")),
        "key": Variant(without=ADD, sizes={"decay": "key"}),
        "bonus": Variant(without=ADD[:3], sizes={"decay": "key"}),
        "normalized": Variant({"normalize": True}, {"positive": True, "columns": 1}, ADD),
        "delta": Variant(without=("decay", "a", "b", "bonus")),
        "gated delta": Variant(without=("a", "b", "bonus"), sizes={"groups": 2}),
        "key delta": Variant(without=("a", "b", "bonus"), sizes={"decay": "key"}),
        "dplr": Variant(without=("beta", "bonus"), sizes={"decay": "key"}, on=("reference", "torch")),
    },
    device_shapes=(
        {"S": 31, "K": 32, "V": 48}, {"S": 63, "K": 32, "V": 48}, {"S": 300, "K": 32, "V": 48},
        *({"S": 100, "K": a, "V": b} for a, b in ((16, 70), (64, 64), (128, 128), (192, 192), (256, 512))),
    ),
    roundings=linear_attention_roundings,
    cancellation=linear_attention_cancellation,
    first_interpreted="slow",
    pairs_interpreted="long",
    exact_zeros=True,  # a single token, normalised, does not depend on q
    errors=linear_attention_errors(),
    facts={"dtype": torch.bfloat16, "widths": (64, 64)},
    refused=(
        ({"dtype": torch.float64}, "float64: Triton implementations compute in float32"),
        ({"rule": "dplr"}, "has only a torch implementation"),
        ({"rule": "delta", "widths": (320, 64)}, "key widths up to 256, not 320"),
    ),
    added=("state",),
)
