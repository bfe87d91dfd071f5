"""The description of linear attention and its relatives for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch

from seqblocks import kernels
from tests.kernels.conformance import Kernel, Tensors, Variant, draw


def linear_attention_inputs(
    batch: int = 2, S: int = 9, H: int = 2, K: int = 4, V: int = 3, groups: int = 1, decay: str = "head",
    positive: bool = False, columns: int = 0,
) -> Tensors:
    """Keys of length 1, as delta rules need them; decays from weak to as strong as exp(-50)."""
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
        (lambda x: {"decay": x["decay"][..., None]}, r"wants decay \[2, 9, 2\] or \[2, 9, 2, 4\]"),
        (lambda x: {"beta": x["decay"][:, :3]}, r"wants beta \[2, 9, 2\]"),
        (lambda x: {"a": x["q"]}, "a and b go together"),
        (lambda x: {"a": x["q"], "b": x["q"], "beta": x["decay"]}, "give one of the two"),
        (lambda x: {"beta": x["decay"], "normalize": True}, "for the rule add"),
        (lambda x: {"bonus": x["q"][0, 0], "normalize": True}, "not both"),
        (lambda x: {"normalize": True}, r"state \[B, HV, K, V \+ 1\]"),
        (lambda x: {"state": x["state"][:1]}, r"state \[B, HV, K, V\] = \[2, 2, 4, 3\]"),
        (lambda x: {"resets": torch.zeros(2, 3)}, r"resets \[B, S\] = \[2, 9\]"),
        (lambda x: {"chunk_size": 0}, "at least 1"),
    )


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
        "dplr": Variant(without=("beta", "bonus"), sizes={"decay": "key"}),
    },
    implementations=("reference", "torch"),
    errors=linear_attention_errors(),
)
