"""Test `aside`: steps that belong to the list around them, and do not move its current wire."""

from __future__ import annotations

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.descriptions import listing
from seqblocks.graph import ModelSpec

HEAD = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - linear: {features: 8, as: a}
"""


def analysed(*steps: str) -> ModelSpec:
    _, model = check.load_text(HEAD + "".join(f"    - {step}\n" for step in steps))
    assert model
    return model


def same(*pairs: tuple[list[str], list[str]]) -> None:
    for steps, others in pairs:
        assert listing.text(analysed(*steps)) == listing.text(analysed(*others))


def test_it_is_its_steps_and_the_wire_before_them() -> None:
    end = ["gate: {by: g}", "linear: 3"]
    inside = "linear: {features: 4, name: down}", "silu", "linear: {features: 8, as: g}"
    written = ", ".join(f"{{{step}}}" if ":" in step else step for step in inside)
    plain = [*inside, "gate: {from: a, by: g}", "linear: 3"]
    same(
        ([f"aside: [{written}]", *end], plain),
        ([f"aside: {{from: a, steps: [{written}]}}", *end], plain),
        ([f"aside: [{{aside: [{written}]}}]", *end], plain),
    )


def test_it_may_end_a_list() -> None:
    model = analysed("residual: {steps: [{linear: {features: 8, as: b}}, {aside: [{silu: {as: c}}]}], as: out}")
    (residual,) = [node for node in model.graph.nodes if node.verb == "residual"]
    body = residual.bodies[""]
    assert body.result == body.nodes[0].outputs[0]


def test_its_input_may_have_several_outputs() -> None:
    steps = "linear: {features: 8, as: [u, v]}", "aside: [{silu: {from: u, as: s}}]", "multiply: {from: v, by: s}"
    assert str(analysed(*steps).output) == "[batch, seq, 4]"


@pytest.mark.parametrize(("condition", "present"), [("true", True), ("1 > 2", False)])
def test_a_condition_leaves_all_its_steps_out(condition: str, present: bool) -> None:
    aside = f"aside: {{when: {condition}, steps: [{{tanh: {{as: t}}}}, {{silu: {{as: s}}}}]}}"
    model = analysed("gelu", aside, "calc: {y: x + t * s}")
    found = {node.verb: node for node in graph.walk(model.graph)}
    assert ("tanh" in found) == ("silu" in found) == present
    gelu = found["gelu"].outputs
    outputs = (found["tanh"].outputs, found["silu"].outputs) if present else (gelu, gelu)
    assert found["calc"].inputs == {"x": gelu, "t": outputs[0], "s": outputs[1]}


def test_its_steps_have_the_names_of_the_list() -> None:
    model = analysed("aside: [{linear: {features: 8, as: b}}]", "linear: {from: [a, b], features: 2}")
    assert [item.name for item in graph.parameters(model.graph)] == [
        "a.weight", "a.bias", "b.weight", "b.bias", "linear.weight", "linear.bias",
    ]  # fmt: skip
    shared = analysed("aside: [{linear: {features: 8, as: b}}]", "linear: {features: 8, share: b}", "add: b")
    assert shared.graph.nodes[2].owner is shared.graph.nodes[1]
