"""The analysed bounds of each wire hold for the values that built models compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import seqblocks
from seqblocks.testing import check_shapes
from seqblocks.types import Facts

ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu", "leaky_relu", "squared_relu", "elu", "selu", "sigmoid", "tanh", "softplus",
    "positive", "one_minus_exp", "rational_exp", "elu_plus_one", "exp",
)  # fmt: skip
DECAYS = ("softplus", "rate", "logsigmoid", "bounded", "sigmoid", "exp", "rg_lru")
PAIRS = {"pattern": "(seq n) features -> seq features", "n": 2}
FIXED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (*ACTIVATIONS, "identity", "layer_norm")),
    *(("log_decay", {"kind": kind, "heads": 2}) for kind in DECAYS),
    ("log_decay", {"kind": "logsigmoid", "lower": "part"}),
    ("time_step", {"least": 0.5, "most": 2}),
    ("phase", {}),
    ("repeat_heads", {"heads": 2, "times": 1}),
    ("roll_heads", {"heads": 2, "by": 3}),
    ("softmax", {"heads": 2}),
    ("join_heads", {"with": "bounded", "heads": 2}),
    ("lerp", {"to": "bounded"}),
    ("lerp", {"to": "bounded", "by": "low"}),
    ("select", {"features": 8}),
    ("dropout", {"p": 0.25}),
    ("leaky_relu", {"slope": 0.5}),
    ("sinusoids", {}),
    ("soft_cap", {"cap": 0.5}),
    ("l2_norm", {"heads": 2}),
    ("rotary", {"heads": 2}),
    ("constant", {"features": 8, "learned": False, "value": -2}),
    ("shift", {"by": 2}),
    ("shift", {"by": 12}),
    ("rearrange", {"pattern": "seq (two n) -> seq (n two)", "two": 2}),
    ("rearrange", {"pattern": "(seq n) features -> seq (features n)", "n": 2}),
    ("reduce", {**PAIRS, "by": "max"}),
    ("reduce", {**PAIRS, "by": "sum"}),
    ("reduce", {**PAIRS, "by": "std"}),
    ("downsample", {"factor": 2}),
    ("pool", {"mode": "bilateral_mean"}),
    ("residual", {"steps": ["sigmoid"]}),
    ("parallel", {"branches": [{"a": ["sigmoid"]}, {"b": ["tanh"]}]}),
    ("scan", {"order": ["forward", "reverse"], "steps": ["relu"]}),
    ("repeat", {"times": 2, "steps": [{"scale": {"by": 2}}]}),
]
WIRES = st.sampled_from(["input", "bounded", "low"])
STEPS = st.one_of(
    st.sampled_from(FIXED),
    st.tuples(st.just("scale"), st.fixed_dictionaries({"by": st.sampled_from([-2, -0.5, 0, 0.5, 3])})),
    st.tuples(st.just("add"), st.fixed_dictionaries({"with": WIRES})),
    st.tuples(st.just("multiply"), st.fixed_dictionaries({"by": WIRES})),
    st.tuples(
        st.just("gate"), st.fixed_dictionaries({"by": WIRES, "activation": st.sampled_from((*ACTIVATIONS, "none"))})
    ),
)


def spec_of(steps: list[tuple[str, dict[str, Any]]]) -> str:
    """Return a model of these steps. They may read `part` (0 to 1), `bounded` (-1 to 1) and `low` (at most 0)."""
    named = [{verb: {**arguments, "name": f"s{at}"}} for at, (verb, arguments) in enumerate(steps)]
    first = [{"sigmoid": {"as": "part"}}, {"tanh": {"from": "input", "as": "bounded"}}, "softplus"]
    first.append({"scale": {"by": -1, "as": "low"}})
    given = {"features": 8, "length": 12}
    return json.dumps(
        {"seqblocks": 1, "model": {"input": given, "steps": [*first, {"identity": {"from": "input"}}, *named]}}
    )


@given(st.lists(STEPS, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_numbers_are_within_the_bounds_of_their_wire(steps: list[tuple[str, dict[str, Any]]]) -> None:
    try:
        model = seqblocks.build_text(spec_of(steps), dtype=torch.float64)
    except seqblocks.SpecError:  # widths or lengths that do not fit, after a step that changes them
        return
    check_shapes(model)


@pytest.mark.parametrize(
    ("steps", "facts"),
    [
        ([("softplus", {}), ("scale", {"by": -1})], Facts(high=0)),
        ([("sigmoid", {}), ("scale", {"by": 2})], Facts(0, 2)),
        ([("tanh", {}), ("add", {"with": "bounded"})], Facts(-2, 2)),
        ([("log_decay", {"kind": "softplus"})], Facts(high=0)),
        ([("log_decay", {"kind": "softplus"}), ("one_minus_exp", {})], Facts(0, 1)),
        ([("log_decay", {"kind": "sigmoid", "bound": -2})], Facts(-2, 0)),
        ([("log_decay", {"kind": "rate"})], Facts()),
        ([("time_step", {}), ("log_decay", {"kind": "rate"})], Facts(high=0)),
        ([("scale", {"by": 0}), ("silu", {}), ("multiply", {"by": "input"})], Facts(0, 0)),
        ([("multiply", {"by": "low"}), ("identity", {})], Facts()),
        ([("softplus", {}), ("multiply", {"by": "low"}), ("relu", {})], Facts(0, 0)),
        ([("l2_norm", {"heads": 2}), ("rotary", {"heads": 2})], Facts(unit=2)),
        ([("gelu", {}), ("l2_norm", {"heads": 2})], Facts(-1, 1, 2)),
        ([("sigmoid", {}), ("l2_norm", {"heads": 2})], Facts(0, 1, 2)),
        ([("sigmoid", {}), ("reduce", {**PAIRS, "by": "std", "eps": 0.25})], Facts(0.5)),
        ([("l2_norm", {"heads": 2}), ("rotary", {"heads": 1})], Facts()),
        ([("l2_norm", {"heads": 2}), ("tanh", {})], Facts(-1, 1)),
        ([("sigmoid", {}), ("linear", {"features": 8})], Facts()),
        ([("sigmoid", {}), ("residual", {"steps": ["sigmoid"]})], Facts()),
        ([("sigmoid", {}), ("scan", {"order": "reverse", "steps": ["identity"]})], Facts(0, 1)),
        ([("sigmoid", {}), ("causal_conv", {"kernel": 2})], Facts()),
    ],
)
def test_analysed_bounds(steps: list[tuple[str, dict[str, Any]]], facts: Facts) -> None:
    _, model = seqblocks.load_text(spec_of(steps))
    assert model is not None
    assert model.output is not None
    assert model.output.facts == facts


def test_a_primitive_that_declares_wrong_bounds_is_found() -> None:
    model = seqblocks.build_text(spec_of([("scale", {"by": 3})]), dtype=torch.float64)
    for step in model.modules():
        if getattr(step, "_type", None):
            step._type = step._type.with_facts(Facts(0, 1))
    with pytest.raises(AssertionError, match=r"tanh: output: -\S+ to \S+ is not 0 to 1|bounded: output"):
        check_shapes(model)
