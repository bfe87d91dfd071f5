"""Steps without parameters are numbered instead of clashing; steps with parameters keep their names."""

from __future__ import annotations

import pytest

from seqblocks.analysis.check import load_text
from seqblocks.errors import SpecError
from seqblocks.graph import ModelSpec, parameters


def spec(steps: str, blocks: str = "") -> ModelSpec:
    defined = f"blocks: {{{blocks}}}\n" if blocks else ""
    _, model = load_text(f"seqblocks: 1\n{defined}model: {{input: {{features: 4}}, steps: [{steps}]}}\n")
    assert model
    return model


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ("silu, silu, silu", "silu silu_2 silu_3"),
        ("silu, silu, {scale: {by: 2, name: silu_2}}", "silu silu_3 silu_2"),
        ("{shift: 1}, {residual: [silu]}, {residual: [{shift: 1}]}, {shift: 2}", "shift residual residual_2 shift_2"),
        ("{residual: [silu]}, {residual: [{linear: 4}]}, {residual: [tanh]}", "residual_2 residual residual_3"),
        ("silu, {linear: {features: 4, name: silu}}, silu", "silu_2 silu silu_3"),
        ("b, {b: {own: true}}, b", "b_2 b b_3"),
        ("{repeat: {times: 2, steps: [tanh, tanh]}}, {repeat: {times: 2, steps: [{linear: 4}]}}", "repeat_2 repeat"),
        ("{linear: {features: 4, as: a}}, {silu: {as: b, name: a_2}}, {tanh: {from: a, name: x}}, x", "a a_2 x x_2"),
    ],
)
def test_names(steps: str, names: str) -> None:
    blocks = "b: {args: {own: false}, steps: [silu, {linear: {features: 4, when: own}}]}, x: {steps: [silu]}"
    model = spec(steps, blocks)
    assert [node.name for node in model.graph.nodes] == names.split()
    assert {item.name.split(".")[0] for item in parameters(model.graph)} <= set(names.split())
    assert all("_" not in item.name.split(".")[0] for item in parameters(model.graph))  # those keep their names


@pytest.mark.parametrize(
    "steps",
    [
        "{linear: 4}, {linear: 4}",
        "{residual: [{linear: 4}]}, {residual: [rms_norm]}",
        "{silu: {name: a}}, {tanh: {name: a}}",  # both names were chosen
        "{silu: {name: linear}}, {linear: 4}",
        "{linear: {features: 4, name: a}}, {linear: {features: 4, share: a}}, {linear: {features: 4, share: a}}",
    ],
)
def test_what_owns_parameters_or_has_a_chosen_name_clashes(steps: str) -> None:
    with pytest.raises(SpecError, match="E304"):
        spec(steps)


def test_an_unused_block_reports_its_clashes() -> None:
    with pytest.raises(SpecError, match="E304"):
        spec("silu", "b: {args: {d: int}, steps: [{linear: d}, {linear: d}, silu, silu]}")
    assert spec("silu", "b: {args: {d: int}, steps: [{linear: d}, silu, silu]}")


def test_states_of_numbered_steps_stream() -> None:
    import torch

    import seqblocks

    model = seqblocks.build_text(
        "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{shift: 1}, silu, {shift: 2}, silu, {shift: 1}]}\n"
    ).double()
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    expected = torch.nn.functional.pad(torch.nn.functional.silu(torch.nn.functional.silu(x)), (0, 0, 4, 0))[:, :9]
    torch.testing.assert_close(model(x), expected)
    y, state = model(x[:, :5], return_state=True)
    ys = [y]
    for token in x[:, 5:].unbind(1):
        y, state = model.step(token, state)
        ys.append(y[:, None])
    torch.testing.assert_close(torch.cat(ys, 1), expected)


def test_overrides_reach_a_numbered_step() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{shift: 1}, {shift: 2}, {shift: 3}]}\n"
    _, model = load_text(text, set={"model.shift_2.by": 7})
    assert model
    assert [node.op and node.op.model_dump()["by"] for node in model.graph.nodes] == [1, 7, 3]
