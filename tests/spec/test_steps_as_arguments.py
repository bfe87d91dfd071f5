"""Arguments that are steps: each equals the spec with the steps written in their place."""

import pytest

from seqblocks import SpecError, graph
from seqblocks.analysis.check import load_text
from seqblocks.graph import ModelSpec, count
from tests.spec.invariants import verify

PRE = "prenorm: {args: {mixer: steps}, steps: [residual: [layer_norm, mixer]]}"


def spec(steps: str, blocks: str = PRE, let: str = "{}", more: str = "", **overrides: object) -> ModelSpec:
    text = f"seqblocks: 1\nlet: {let}\nblocks:\n  {blocks}\nmodel:\n  input: {{features: 8}}\n  steps: {steps}\n{more}"
    _, model = load_text(text, set=overrides)
    assert model
    verify(model)
    return model


def names(model: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.name, item.parameter.shape) for item in graph.parameters(model.graph)]


def codes(steps: str, blocks: str = PRE) -> list[tuple[str, int]]:
    with pytest.raises(SpecError) as caught:
        spec(steps, blocks)
    return [(each.code, each.span.line if each.span else 0) for each in caught.value.diagnostics]


def test_the_names_of_parameters() -> None:
    model = spec("[prenorm: [{linear: 8}, silu, {linear: {features: 8, bias: false, name: out}}]]")
    assert names(model)[2:] == [
        ("prenorm.residual.mixer.linear.weight", (8, 8)),
        ("prenorm.residual.mixer.linear.bias", (8,)),
        ("prenorm.residual.mixer.out.weight", (8, 8)),
    ]


def test_names_are_resolved_where_the_steps_are_written() -> None:
    blocks = (
        "run: {args: {m: steps, d: 3}, let: {e: 5}, steps: [m]}\n"
        "  outer: {args: {d: int, m: steps}, let: {e: d + 1}, steps: [{run: {m: [{linear: d}, {linear: {features: e, "
        "name: b}}, m]}}]}"
    )
    model = spec("[{outer: {d: 16, m: [{linear: {features: d, name: c}}]}}]", blocks, "{d: 4}")
    assert [shape for name, shape in names(model) if name.endswith("weight")] == [(16, 8), (17, 16), (4, 17)]


def test_the_layer_of_a_repeat_is_seen_through_blocks() -> None:
    mixer = "{prenorm: [{linear: 2 ** layer}, {linear: {features: 8, name: b}}]}"
    steps = f"[{{repeat: {{times: 3, steps: [{{prenorm: [{mixer}]}}]}}}}]"
    assert [shape for name, shape in names(spec(steps)) if name.endswith("r.linear.weight")] == [(1, 8), (2, 8), (4, 8)]


def test_identical_layers_are_lowered_once() -> None:
    model = spec("[{repeat: {times: 4, steps: [{prenorm: [{linear: layer // 2 + 8 - layer // 2}]}]}}]", let="{a: 1}")
    (repeat,) = model.graph.nodes
    bodies = {id(body.nodes[0].bodies[""]) for body in repeat.bodies.values()}
    assert len(bodies) == 4  # the text has the name `layer`
    (repeat,) = spec("[{repeat: {times: 4, steps: [{prenorm: [{linear: 8 * a}]}]}}]", let="{a: 1}").graph.nodes
    assert len({id(body.nodes[0].bodies[""]) for body in repeat.bodies.values()}) == 1


def test_the_same_steps_with_other_names_are_separate_bodies() -> None:
    inner = "[{linear: d}, {linear: {features: 8, name: o}}]"
    blocks = f"{PRE}\n  b: {{args: {{d: int}}, steps: [prenorm: {inner}]}}"
    model = spec("[{b: {d: 3, name: x}}, {b: {d: 5, name: y}}, {b: {d: 3, name: z}}]", blocks)
    assert [shape for name, shape in names(model) if name.endswith("mixer.linear.weight")] == [(3, 8), (5, 8), (3, 8)]


def test_defaults_see_the_names_of_their_block() -> None:
    blocks = "b: {args: {d: 3, m: [{linear: 2 * e}]}, let: {e: d + 1}, steps: [m, {m: {name: again}}]}"
    assert names(spec("[b]", blocks))[0] == ("b.m.linear.weight", (8, 8))
    assert names(spec("[{b: {d: 1}}]", blocks, "{e: 100}"))[0] == ("b.m.linear.weight", (4, 8))
    assert names(spec("[{b: {m: [{linear: e}]}}]", blocks, "{e: 100}"))[0] == ("b.m.linear.weight", (100, 8))


def test_each_use_is_a_namespace() -> None:
    blocks = "b: {args: {m: steps}, steps: [m, {repeat: {times: 2, steps: [m]}}, {parallel: [l: [m], r: []]}]}"
    model = spec("[b: [{linear: {features: 8, bias: false}}]]", blocks)
    places = ["m", "repeat.0.m", "repeat.1.m", "parallel.l.m"]
    assert [name for name, _ in names(model)] == [f"b.{place}.linear.weight" for place in places]
    with pytest.raises(SpecError, match="two steps here have the name 'm'"):
        spec("[b: [{linear: 4}]]", "b: {args: {m: steps}, steps: [m, m]}")


def test_an_empty_list_returns_the_input() -> None:
    model = spec("[prenorm: [], {linear: 4}]")
    assert model.output
    assert model.output.features == 4
    assert count(model.graph) == 16 + 36
    with pytest.raises(SpecError, match="needs 'mixer'"):
        spec("[prenorm]")


def test_any_kind_of_wire_is_passed_in() -> None:
    blocks = "seqblocks: 1\nblocks: {b: {args: {m: steps}, steps: [m]}}\n"
    assert load_text(f"{blocks}model: {{input: {{tokens: 5}}, steps: [b: [{{embed: 4}}]]}}")[1]


def test_a_condition_inside_a_block_leaves_them_out() -> None:
    blocks = "b: {args: {m: steps, on: bool}, steps: [{m: {when: on}}, silu]}"
    assert count(spec("[{b: {m: [{linear: 8}], on: false}}]", blocks).graph) == 0
    assert codes("[{b: {m: [{linear: x}], on: false}}]", blocks) == [("E303", 7)]  # they are still checked


def test_the_steps_of_an_argument_may_hold_the_block_that_runs_them() -> None:
    assert count(spec("[prenorm: [prenorm: [prenorm: [silu]]]]").graph) == 3 * 16
    assert codes("[silu]", f"{PRE}\n  a: {{args: {{m: steps}}, steps: [m, prenorm: [a: [silu]]]}}") == [("E308", 5)]
    assert codes("[silu]", "a: {args: {m: [a]}, steps: [m]}") == [("E308", 4)]


def test_steps_see_no_wires_but_their_input() -> None:
    assert codes("[{linear: {features: 8, as: u}}, prenorm: [{gate: {by: u}}]]") == [("E302", 7)]
    inner = "b: {args: {m: steps}, steps: [{silu: {as: s}}, m]}"
    assert codes("[b: [{gate: {by: s}}]]", inner) == [("E302", 7)]
    assert count(spec("[prenorm: [{linear: {features: 8, as: u}}, {gate: {from: input, by: u}}]]").graph) == 16 + 72


def test_overrides_reach_into_them() -> None:
    steps = "[prenorm: [{linear: {features: 8}}], {prenorm: {mixer: [{linear: 8}], name: b}}]"
    assert count(spec(steps).graph) == 2 * 88
    assert count(spec(steps, **{"model.prenorm.linear.bias": False}).graph) == 2 * 88 - 8
    assert count(spec(steps, **{"model.b.mixer.linear.bias": False}).graph) == 2 * 88 - 8
    blocks = "b: {args: {m: [{linear: 8}]}, steps: [m]}"
    assert count(spec("[b]", blocks, **{"blocks.b.m.linear.bias": False}).graph) == 64


@pytest.mark.parametrize("declared", ["steps", "[{linear: 8}]"])
@pytest.mark.parametrize("value", [5, "silu", {"linear": 8}, True])
def test_an_override_of_another_type_is_named(declared: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        spec("[b: {m: [{linear: 8}]}]", f"b: {{args: {{m: {declared}}}, steps: [m]}}", **{"blocks.b.m": value})
    (fault,) = caught.value.diagnostics
    assert fault.message == "'m' of block b is steps, and only steps can replace them"
    assert fault.span
    assert (fault.code, fault.hint) == ("E203", "blocks.b.m=[layer_norm, silu]")
    assert "blocks.b.m" in fault.span.source.text


def test_overrides_of_default_steps() -> None:
    blocks = "b: {args: {m: [{linear: 8}]}, steps: [m]}"
    assert count(spec("[b]", blocks, **{"blocks.b.m": ["layer_norm"]}).graph) == 16


def test_checkpoint_maps_reach_into_them() -> None:
    block = "b: {args: {m: steps}, steps: [{residual: [{m: {name: mix}}]}], checkpoint: {residual.mix: mixer}}"
    inner = "inner: {steps: [{linear: 8}], checkpoint: {linear: fc}}"
    spec("[b: [inner]]", f"{block}\n  {inner}", more="checkpoint: {b: layer}")
    spec("[b: [{linear: 8}]]", block, more="checkpoint: {b.residual.mix.linear.weight: w}")
    with pytest.raises(SpecError, match="E312"):
        spec("[b: [{linear: 8}]]", block, more="checkpoint: {b.residual.mix.linr: w}")


def test_a_misspelt_use_is_one_fault() -> None:
    assert codes("[b: [silu]]", "b: {args: {mixer: steps}, steps: [mixr]}") == [("E301", 4)]
    assert codes("[silu]", "b: {args: {mixer: steps}, steps: [tanh]}") == [("E323", 4)]
    assert codes("[silu]", "b: {args: {mixer: steps}}") == [("E202", 4)]


def test_a_second_use_may_share_the_parameters_of_the_first() -> None:
    blocks = "b: {args: {m: steps}, steps: [m, {m: {name: again, share: m}}]}"
    model = spec("[b: [{linear: 8}]]", blocks)
    assert count(model.graph) == 72
    assert [name for name, _ in names(model)] == ["b.m.linear.weight", "b.m.linear.bias"]


def test_unused_steps_inside_them_are_reported() -> None:
    assert codes("[prenorm: [{linear: {features: 8, as: u}}, {silu: {from: input}}]]") == [("E315", 7)]
