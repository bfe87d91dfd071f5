"""Rules for initial values: which of them applies to a parameter, in which scope, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import seqblocks
from seqblocks.graph import Graph, count, join, parameters

MODEL = "model: {input: {features: 8}, steps: "


def inits(text: str) -> dict[str, str]:
    """Return the initialiser of each parameter of a spec without warnings."""
    _, spec = seqblocks.load_text(f"seqblocks: 1\n{text}", strict=True)
    assert spec
    return {item.name: str(item.parameter.init) for item in parameters(spec.graph) if item.tied is None}


def warnings(text: str) -> list[tuple[str, str]]:
    found = seqblocks.analyse(f"seqblocks: 1\n{text}").diagnostics
    return [(each.code, each.message) for each in found]


def test_the_last_rule_that_matches() -> None:
    rules = '"*.weight": ones, linear.weight: "constant(2)", "*.bias": zeros, "b.w?ight": "constant(3)"'
    steps = "[{linear: {features: 8, name: a}}, {linear: {features: 8, name: b}}, rms_norm]"
    assert inits(f"init: {{{rules}}}\n{MODEL}{steps}}}\n") == {
        "a.weight": "constant(2)", "a.bias": "zeros", "b.weight": "constant(3)", "b.bias": "zeros",
        "rms_norm.weight": "ones",
    }  # fmt: skip


def test_a_step_of_its_own_comes_first_and_default_keeps_the_declared_values() -> None:
    plain = inits(MODEL + "[{linear: 8}]}\n")
    text = 'init: {"*.weight": ones, "*.bias": ones}\n' + MODEL
    found = inits(text + "[{linear: {features: 8, init: {weight: default}}}, rms_norm]}\n")
    assert found == {"linear.weight": plain["linear.weight"], "linear.bias": "ones", "rms_norm.weight": "ones"}


BLOCKS = """
init: {"*.weight": ones}
blocks:
  inner:
    args: {size: 2}
    init: {"*.bias": "constant(size)"}
    steps: [{linear: 8}]
  outer:
    init: {"*.bias": "constant(7)", "linear.weight": zeros}
    steps: [inner, {linear: {features: 8, name: own}}]
"""


def test_the_innermost_block_comes_first() -> None:
    assert inits(BLOCKS + MODEL + "[outer, inner, {linear: 8}]}\n") == {
        "outer.inner.linear.weight": "zeros", "outer.inner.linear.bias": "constant(2)",
        "outer.own.weight": "zeros", "outer.own.bias": "constant(7)",
        "inner.linear.weight": "ones", "inner.linear.bias": "constant(2)",
        "linear.weight": "ones", "linear.bias": "fan_in_uniform",
    }  # fmt: skip


def test_layers_that_differ_in_what_a_rule_reads() -> None:
    steps = "[outer, {repeat: {times: 4, steps: [{inner: {size: layer + 1}}]}}]"
    found = inits(BLOCKS + MODEL + steps + "}\n")
    for layer in range(4):
        assert found[f"repeat.{layer}.inner.linear.bias"] == f"constant({layer + 1})"


def test_depth_is_that_of_each_step_and_fan_in_that_of_each_matrix() -> None:
    rules = 'init: {"*.weight": "normal(0, fan_in / depth)"}\n'
    block = "blocks: {b: {steps: [{linear: 4}, {linear: {features: 8, name: up}}]}}\n"
    steps = "[b, {repeat: {times: 2, steps: [b, {repeat: {times: 4, name: r, steps: [b]}}]}}]"
    found = inits(f"{rules}{block}{MODEL}{steps}}}\n")
    places = {"b": 1, "repeat.0.b": 2, "repeat.1.b": 2, "repeat.0.r.3.b": 8}
    for place, depth in places.items():
        assert found[f"{place}.linear.weight"] == f"normal(0, {8 / depth:g})"
        assert found[f"{place}.up.weight"] == f"normal(0, {4 / depth:g})"


def test_names_of_ones_own_hide_depth_and_fan_in() -> None:
    text = 'let: {depth: 3, fan_in: 5}\ninit: {"*.weight": "normal(depth, fan_in)", "*.bias": ones}\n'
    found = inits(text + MODEL + "[{repeat: {times: 2, steps: [{linear: 8}]}}]}\n")
    assert found["repeat.0.linear.weight"] == "normal(3, 5)"


def test_orders_of_a_scan_experts_and_ties() -> None:
    steps = """
    - scan:
        order: [forward, reverse]
        own: all
        init: {rev.linear.weight: zeros}
        steps: [{linear: {features: 8, bias: false}}]
    - experts: {count: 3, steps: [{linear: {features: 8, bias: false, name: each}}]}
    - linear: {features: 8, name: last, tie: {weight: experts.0.each.weight}}
"""
    head = 'init: {"*.weight": "constant(4)"}\nmodel:\n  input: {features: 8}\n  steps:'
    assert inits(head + steps) == {
        "scan.fwd.linear.weight": "constant(4)", "scan.rev.linear.weight": "zeros",
        "experts.router.weight": "constant(4)", **{f"experts.{n}.each.weight": "constant(4)" for n in range(3)},
        "last.bias": "fan_in_uniform",
    }  # fmt: skip


def test_blocks_of_other_files_bring_their_rules_but_no_rules_of_the_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.yaml").write_text("seqblocks: 1\n" + BLOCKS)
    (tmp_path / "a.yaml").write_text(f"seqblocks: 1\nuse: [./mine.yaml]\n{MODEL}[inner]}}\n")
    spec = seqblocks.load_model(tmp_path / "a.yaml")
    found = {item.name: str(item.parameter.init) for item in parameters(spec.graph)}
    assert found == {"inner.linear.weight": "fan_in_uniform", "inner.linear.bias": "constant(2)"}


def bodies(graph: Graph, path: str = "") -> Iterator[tuple[str, int]]:
    for node in graph.nodes:
        for name, body in node.bodies.items():
            yield join(path, node.name, name), id(body)
            yield from bodies(body, join(path, node.name, name))


def test_layers_with_equal_values_share_one_body() -> None:
    head = 'init: {"*.bias": ones}' + BLOCKS.replace('init: {"*.weight": ones}', "", 1)
    steps = "[{repeat: {times: 64, steps: [outer, {linear: 8}]}}]"
    _, spec = seqblocks.load_text(f"seqblocks: 1\n{head}{MODEL}{steps}}}\n")
    assert spec
    found = {number for name, number in bodies(spec.graph) if name.endswith(".outer")}
    assert len(found) == 1
    assert count(spec.graph) == 64 * 3 * 72


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("linear.wieght: zeros", "no parameter matches 'linear.wieght'"),
        ("linear.weight: zeros", "all parameters that match 'linear.weight' have an `init:` or another rule"),
    ],
)
def test_a_rule_without_effect(rule: str, message: str) -> None:
    text = f"init: {{{rule}}}\n{MODEL}[{{linear: {{features: 8, init: {{weight: ones}}}}}}]}}\n"
    ((code, found),) = warnings(text)
    assert code == "W907"
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ('"*.bias": "normal(0, m)"', "E303"), ("bias: zeros", "E408"), ('"*.bias": "nromal(0, 1)"', "E408"),
        ('"*.bias": 0', "E408"), ('"*.bias": "uniform(n, n - 1)"', "E209"),
    ],
)  # fmt: skip
def test_rules_are_checked_also_in_blocks_that_no_step_uses(rule: str, code: str) -> None:
    text = f"blocks: {{b: {{args: {{n: 1}}, init: {{{rule}}}, steps: [{{linear: 8}}]}}}}\n{MODEL}[silu]}}\n"
    assert [found for found, _ in warnings(text)] == [code]


def test_bundled_blocks_keep_what_they_state() -> None:
    """Rules at the top reach into blocks of other files, where the steps have no `init:`."""
    text = f"use: [deltanet]\n{MODEL}[gated_deltanet_mixer: {{dim: 8, heads: 2}}]}}\n"
    plain, ruled = inits(text), inits(f'init: {{"*.weight": zeros}}\n{text}')
    assert {name for name in plain if plain[name] != ruled[name]} <= {name for name in plain if name.endswith("weight")}
    assert any(plain[name] != ruled[name] for name in plain)


def test_a_rule_is_only_evaluated_where_it_applies() -> None:
    """It need not make sense at depth 1, or for a matrix with one input."""
    text = 'init: {"*.weight": "normal(0, 1 / (log2(depth) * (fan_in - 1)))"}\n' + MODEL
    found = inits(text + "[{repeat: {times: 4, steps: [{linear: 8}]}}]}\n")
    assert found["repeat.0.linear.weight"] == "normal(0, 0.0714286)"
    ((code, _),) = {(code, message) for code, message in warnings(text + "[{linear: 8}]}\n")}
    assert code == "E502"
