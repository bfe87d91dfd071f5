"""`when:`, patterns by name, repeats of no layers: each equals the spec with the step written out or removed."""

import pytest

from seqblocks import SpecError
from seqblocks.analysis.check import load_text
from seqblocks.graph import ModelSpec, count


def spec(steps: str, let: str = "{}", more: str = "") -> ModelSpec:
    _, model = load_text(f"seqblocks: 1\nlet: {let}\nmodel:\n  input: {{features: 8}}\n  steps: {steps}\n{more}")
    assert model
    return model


def shape(model: ModelSpec) -> list[tuple[str, str, object]]:
    """Return the steps, and the inputs that they read by label."""
    return [
        (node.name, node.verb, [[model.labels[v] for v in values] for values in node.inputs.values()])
        for node in model.graph.nodes
    ]


@pytest.mark.parametrize(
    ("conditional", "written"),
    [
        ("[layer_norm, {silu: {when: true}}, tanh]", "[layer_norm, silu, tanh]"),
        ("[layer_norm, {silu: {when: false}}, tanh]", "[layer_norm, tanh]"),
        ("[{silu: {when: false}}]", "[]"),
        ("[{layer_norm: {as: a}}, tanh, {silu: {from: a, when: false}}, gelu]",
         "[{layer_norm: {as: a}}, tanh, {gelu: {from: a}}]"),
        ("[{layer_norm: {as: a}}, tanh, {linear: {x: a, features: 8, as: b, when: 1 > 2}}, {gate: {from: a, by: b}}]",
         "[{layer_norm: {as: a}}, tanh, {gate: {from: a, by: a}}]"),
        ("[{layer_norm: {as: [a, b]}}, {silu: {when: false}}, {gate: {from: a, by: b}}]",
         "[{layer_norm: {as: [a, b]}}, {gate: {from: a, by: b}}]"),
        ("[{residual: {steps: [silu], when: false}}, {repeat: {times: 3, steps: [tanh], when: n == 2}}]",
         "[{repeat: {times: 3, steps: [tanh]}}]"),
        ("[{linear: {features: m, when: false}}, silu]", "[silu]"),
    ],
)  # fmt: skip
def test_a_step_is_written_or_left_out(conditional: str, written: str) -> None:
    found, expected = spec(conditional, "{n: 2}"), spec(written, "{n: 2}")
    assert shape(found) == shape(expected)
    assert count(found.graph) == count(expected.graph)


def test_conditions_differ_from_layer_to_layer() -> None:
    model = spec("[{repeat: {times: 4, steps: [silu, {linear: {features: 8, when: layer % 2 == 1}}]}}]")
    verbs = [[node.verb for node in body.nodes] for body in model.graph.nodes[0].bodies.values()]
    assert verbs == [["silu"], ["silu", "linear"]] * 2


def test_a_map_may_name_a_step_that_is_absent() -> None:
    blocks = "blocks: {b: {steps: [{linear: {features: 8, when: false}}], checkpoint: {linear.weight: w}}}\n"
    assert spec("[{b: {}}]", more=blocks)
    with pytest.raises(SpecError, match="there is no step 'liner' to map"):
        spec("[{b: {}}]", more=blocks.replace("{linear.weight", "{liner.weight"))


def test_the_name_of_a_step_that_is_absent_is_free() -> None:
    model = spec("[{linear: {features: 4, when: false}}, {linear: 8}]")
    assert [node.name for node in model.graph.nodes] == ["linear"]


@pytest.mark.parametrize("times", [0, 1, 3])
def test_repeats_of_any_number(times: int) -> None:
    model = spec(f"[{{repeat: {{times: {times}, steps: [{{linear: 8}}]}}}}, tanh]")
    assert count(model.graph) == 72 * times
    assert model.output
    assert model.output.features == 8


def test_a_pattern_by_name_has_several_words_and_need_not_use_all() -> None:
    words = "m: [silu], s: [{linear: 8}]"
    for let, expected in (("{p: m*2 s m s}", 144), ("{p: m m}", 0), ("{q: m s, p: q}", 72), ("{p: s*3}", 216)):
        assert count(spec(f"[{{repeat: {{pattern: p, {words}}}}}]", let).graph) == expected
    with pytest.raises(SpecError, match="E603"):
        spec("[{repeat: {pattern: m m, " + words + "}}]")


def test_a_word_with_a_count_is_a_pattern_unless_the_word_is_a_name() -> None:
    assert count(spec("[{linear: p}]", "{p: s*2, s: 8}").graph) == 144
    for steps in ("[{linear: wide}]", "[silu]"):  # a word like a name is a misspelt name, used or not
        with pytest.raises(SpecError) as caught:
            spec(steps, "{dim: 4, wide: dmi*2}")
        assert [(d.code, d.hint) for d in caught.value.diagnostics] == [("E303", "did you mean 'dim'?")]
