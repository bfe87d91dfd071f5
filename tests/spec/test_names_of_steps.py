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


def test_words_that_torch_or_python_use_are_names_of_wires_numbers_and_blocks() -> None:
    text = """
    seqblocks: 1
    let: {lambda: 8, is: 3}
    blocks:
      type:
        args: {dim: int, global: wire, del: steps}
        let: {in: "dim if not dim == 3 else is", from: "lambda - in + 4 * (is != 'as')"}
        steps: [{linear: {features: in, as: rows}}, del, {calc: "rows * with + global / lambda", }]
    model:
      input: {features: lambda}
      steps:
        - silu: {as: step}
        - type: {dim: lambda, global: step, del: [{linear: "2 * lambda"}], as: global}
        - cell: {state: {train: 8}, steps: [{calc: {train: "train / 2 + x"}}]}
    """
    text = text.replace("with + global / lambda", "x + global / from").replace("2 * lambda", "lambda")
    _, model = load_text(text)
    assert model
    assert [node.name for node in model.graph.nodes] == ["step_", "global_", "cell"]
    names = ["global_.rows_.weight", "global_.rows_.bias", "global_.del_.linear.weight", "global_.del_.linear.bias"]
    assert [item.name for item in parameters(model.graph)] == names


@pytest.mark.parametrize("word", ["and", "or", "not", "if", "else", "await", "yield", "None"])
def test_words_of_expressions_are_no_names(word: str) -> None:
    with pytest.raises(SpecError, match="E311"):
        load_text(f"seqblocks: 1\nlet: {{{word}: 4}}\nmodel: {{input: {{features: 4}}, steps: [silu]}}\n")


@pytest.mark.parametrize("word", ["step", "type", "lambda", "rows"])
def test_a_chosen_namespace_is_an_attribute_that_code_can_read(word: str) -> None:
    for step in (f"linear: {{features: 4, name: {word}}}", f"parallel: {{branches: [{{{word}: [silu]}}]}}"):
        with pytest.raises(SpecError, match=f"E311.*'{word}' is reserved"):
            spec(step)


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
