"""Semantics of the language: the graph built from a spec. Nothing here needs torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.descriptions import listing
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import ExpectationError, SpecError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.language.arguments import ARGUMENT_TYPES
from seqblocks.language.spec_files import bundled
from tests.spec.invariants import verify


def model(steps: str, head: str = "", input: str = "{features: 8}", **options: Any) -> ModelSpec:
    """Return the model of some steps, each written as a line of flow YAML."""
    lines = "".join(f"    - {line.strip()}\n" for line in steps.strip().splitlines())
    text = f"seqblocks: 1\n{head}\nmodel:\n  input: {input}\n  steps:\n{lines}"
    file, found = check.load_text(text, **options)
    made = check.require_model(file, found)
    verify(made)
    return made


def names(made: ModelSpec) -> list[str]:
    return [item.name for item in graph.parameters(made.graph)]


def shapes(made: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {item.name: item.parameter.shape for item in graph.parameters(made.graph)}


@pytest.mark.parametrize("name", sorted(bundled()))
def test_every_bundled_spec_is_valid_and_meets_its_expectations(name: str) -> None:
    file, made = check.load_spec(name)
    assert file.about, "a bundled spec needs a description"
    for block in file.blocks.values():
        for each in block.args.values():
            assert each.about, f"{block.name}.{each.name} needs a description"
    if made:
        verify(made)
        if not name.endswith("digits"):
            assert made.expect is not None
            assert made.expect.get("params") is not None


OFFICIAL = {
    "vil_tiny": 6_088_360,
    "vil_small": 22_792_360,
    "vil_base": 88_050_856,
    "vil2_tiny": 6_391_528,
    "vil2_small": 23_398_696,
    "vil2_base": 89_263_528,
    "vil_small_block": 918_152,
    "vil2_small_block": 927_368,
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_counts(name: str) -> None:
    assert graph.count(check.load_model(name).graph) == OFFICIAL[name]


def test_headwise_projections_of_vil_small() -> None:
    found = shapes(check.load_model("vil_small_block"))
    for letter in "qkv":
        rows, out, width = found[f"vil.residual.scan.{letter}.weight"]
        assert rows * out * width == 3072


def test_other_counts_of_the_official_table() -> None:
    counts = {
        ("vil_tiny", 28): 6_088_360 + 4 * 237_896,  # depth must stay even; 29 layers are not a whole number of pairs
        ("vil_small", 26): 24_628_664,
    }
    for (name, depth), expected in counts.items():
        assert graph.count(check.load_model(name, {"depth": depth}).graph) == expected


def test_a_step_reads_the_one_before_unless_it_says_from() -> None:
    made = model(
        """
        {linear: {features: 4, as: a}}
        {linear: {features: 6, as: b}}
        {linear: {from: a, features: 2, as: c}}
        {linear: {from: [a, b, c], features: 3}}
        """
    )
    assert shapes(made)["b.weight"] == (6, 4)
    assert shapes(made)["c.weight"] == (2, 4)
    assert shapes(made)["linear.weight"] == (3, 4 + 6 + 2)


def test_as_splits_in_equal_parts_or_given_widths() -> None:
    made = model(
        """
        {linear: {features: 12, as: [u, v, w], name: thirds}}
        {linear: {from: v, features: 10, as: {p: 2 * 3, q: 4}, name: split}}
        {linear: {from: [u, w, p, q], features: 1}}
        """
    )
    assert made.graph.nodes[0].split == (4, 4, 4)
    assert made.graph.nodes[1].split == (6, 4)
    assert shapes(made)["split.weight"] == (10, 4)


def test_input_is_the_input_of_the_body() -> None:
    made = model(
        """
        {linear: {features: 5}}
        {residual: {steps: [{downsample: {factor: 2}}, {linear: {name: back, from: input, features: 5}}]}}
        """
    )
    assert shapes(made)["residual.back.weight"] == (5, 5)


def test_outer_wires_are_seen_inside_and_inner_ones_do_not_leak() -> None:
    made = model(
        """
        {linear: {features: 4, as: a}}
        {residual: {steps: [{linear: {features: 4, as: inner}}, {gate: {by: a}}]}}
        """
    )
    a = made.graph.nodes[0].outputs[0]
    assert made.graph.nodes[1].inputs == {"x": (a,)}
    with pytest.raises(SpecError, match=r"E302.*inner"):
        model(
            """
            {residual: {steps: [{linear: {features: 8, as: inner}}]}}
            {linear: {from: inner, features: 2}}
            """
        )


def test_names_of_parameters_follow_the_yaml() -> None:
    made = model(
        """
        {linear: {features: 8}}
        {linear: {features: 8, as: x}}
        {linear: {features: 8, as: y, name: called}}
        {linear: {features: 4, as: [a, b], name: both}}
        {parallel: {from: a, branches: [{left: [{linear: {features: 2}}]}, {right: [silu, {linear: {features: 2}}]}]}}
        {repeat: {name: layers, times: 2, steps: [{residual: {steps: [layer_norm]}}]}}
        {gate: {by: b}}
        """
    )
    assert [n for n in names(made) if n.endswith("weight")] == [
        "linear.weight",
        "x.weight",
        "called.weight",
        "both.weight",
        "parallel.left.linear.weight",
        "parallel.right.linear.weight",
        "layers.0.residual.layer_norm.weight",
        "layers.1.residual.layer_norm.weight",
    ]


def test_let_is_computed_in_any_order_and_blocks_see_their_own_file() -> None:
    head = """
let: {inner: expand * dim, expand: 2, dim: 4 + 4, act: silu, wide: inner > 8}
blocks:
  up:
    args: {width: int, act: gelu, bias: true}
    let: {twice: 2 * width, more: twice + dim}
    steps:
      - linear: {features: more, bias: bias, as: u}
      - gate: {by: u, activation: act}
"""
    made = model("{up: {width: inner, act: act, bias: wide}}", head)
    assert shapes(made)["up.u.weight"] == (2 * 16 + 8, 8)
    assert made.graph.nodes[0].bodies[""].nodes[1].op.activation == "silu"


def test_a_block_scalar_is_a_word_a_pattern_or_an_expression() -> None:
    """It ends with a newline, and a pattern may have several lines."""
    text = """
seqblocks: 1
let:
  layers: |
    m*2
    s m
  order: >
    reverse
  width: |
    4 * 2
model:
  input: {features: 8}
  steps:
    - repeat: {pattern: layers, m: [silu], s: [gelu]}
    - scan: {order: order, steps: [{causal_conv: {kernel: 2}}]}
    - scan:
        name: again
        order: |
          reverse
        steps: [{causal_conv: {kernel: 2}}]
    - linear: {features: width}
"""
    _, model = check.load_text(text)
    assert model is not None
    layers, first, again, linear = model.graph.nodes
    assert [body.nodes[0].verb for body in layers.bodies.values()] == ["silu", "silu", "gelu", "silu"]
    assert first.arguments.orders == again.arguments.orders == ("reverse",)
    assert linear.type is not None
    assert linear.type.features == 8


def test_blocks_take_wires() -> None:
    head = """
blocks:
  mix:
    args: {other: wire, features: 3}
    steps:
      - linear: {from: [input, other], features: features}
"""
    made = model("{linear: {features: 5, as: a}}\n{linear: {features: 2}}\n{mix: {other: a}}", head)
    assert shapes(made)["mix.linear.weight"] == (3, 2 + 5)


def test_repeat_patterns_and_layer_values() -> None:
    made = model(
        "{repeat: {name: l, pattern: m*2 s, times: 2, m: [{residual: {drop_path: 0.1 * layer / (layers - 1), "
        "steps: [{linear: {features: 8}}]}}], s: [{linear: {features: 8 + 0 * layer}}]}}"
    )
    (repeat,) = made.graph.nodes
    assert list(repeat.bodies) == ["0", "1", "2", "3", "4", "5"]
    verbs = [body.nodes[0].verb for body in repeat.bodies.values()]
    assert verbs == ["residual", "residual", "linear"] * 2
    rates = [b.nodes[0].arguments.drop_path for b in repeat.bodies.values() if b.nodes[0].verb == "residual"]
    assert rates == pytest.approx([0.0, 0.02, 0.06, 0.08])


@pytest.mark.parametrize("words", [["step"], ["patterns"], [f"w{i}" for i in range(21)]], ids=["step", "near", "many"])
def test_any_word_of_a_pattern_is_repeated(words: list[str]) -> None:
    steps = ", ".join(f"{word}: [{{linear: 8}}]" for word in words)
    made = model(f"{{repeat: {{name: l, pattern: {' '.join(words)}, {steps}}}}}")
    assert len(shapes(made)) == 2 * len(words)


@pytest.mark.parametrize("times", [0, 1])
def test_a_map_may_name_layers_of_an_empty_repeat(times: int) -> None:
    repeat = f"repeat: {{name: l, times: {times}, steps: [{{linear: 8}}]}}"
    head = f"seqblocks: 1\nmodel:\n  input: {{features: 8}}\n  steps: [{{{repeat}}}]\n"
    _, made = check.load_text(head + 'checkpoint: {"l.{layer}.linear": "layers.{layer}"}\n')
    assert made is not None
    assert len(shapes(made)) == 2 * times


def test_nested_repeats_may_name_their_index() -> None:
    made = model(
        "{repeat: {name: o, times: 2, index: outer, steps: [{repeat: {name: i, times: 2, "
        "steps: [{linear: {features: 8 + 0 * (outer + layer)}}]}}]}}"
    )
    assert [n for n in names(made) if n.endswith("weight")] == [
        f"o.{a}.i.{b}.linear.weight" for a in (0, 1) for b in (0, 1)
    ]


def test_layers_may_change_the_width() -> None:
    made = model("{repeat: {times: 3, steps: [{linear: {features: 2 ** (layer + 1)}}]}}")
    assert str(made.output) == "[batch, seq, 8]"


@pytest.mark.parametrize(("merge", "width"), [("sum", 6), ("mean", 6), ("product", 6), ("concat", 12)])
def test_parallel_merges(merge: str, width: int) -> None:
    made = model(
        f"{{parallel: {{merge: {merge}, branches: [{{a: [{{linear: {{features: 6}}}}]}}, "
        "{b: [{linear: {features: 6}}]}]}}"
    )
    assert str(made.output) == f"[batch, seq, {width}]"


def test_ties_count_once() -> None:
    made = model(
        """
        {embed: {features: 4}}
        {unembed: {tie: {weight: embed.weight}}}
        """,
        input="{tokens: 10}",
    )
    assert graph.count(made.graph) == 10 * 4 + 10
    assert summarise(made).rows[1].tied == {"weight": "embed.weight"}
    inside = model(
        """
        {linear: {features: 8, name: a}}
        {repeat: {name: r, times: 2, steps: [{linear: {features: 8, tie: a}}]}}
        """
    )
    assert graph.count(inside.graph) == 8 * 8 + 8


@pytest.mark.parametrize(
    ("around", "path"),
    [
        ("residual: {name: s, steps: STEPS}", "s"),
        ("scan: {name: s, order: [forward, reverse], steps: STEPS}", "s"),
        ("parallel: {name: s, branches: [{left: STEPS}]}", "s.left"),
        ("repeat: {name: s, times: 2, steps: STEPS}", "s.1"),
        ("residual: {name: s, steps: [repeat: {times: 2, steps: [mine: {name: m}]}]}", "s.repeat.1.m"),
    ],
)
def test_a_tie_names_the_whole_way_to_its_target(around: str, path: str) -> None:
    steps = "[linear: {name: a, features: 8}, linear: {name: b, features: 8, tie: a}]"
    made = model(around.replace("STEPS", steps), f"blocks: {{mine: {{steps: {steps}}}}}")
    found = {item.name: item.tied for item in graph.parameters(made.graph)}
    assert found[f"{path}.b.weight"] == f"{path}.a.weight"
    assert set(found.values()) - {None} <= found.keys()


@pytest.mark.parametrize(
    ("input", "steps", "output"),
    [
        ("{tokens: 10}", "{embed: {features: 4}}", "[batch, seq, 4]"),
        ("{tokens: 10, length: 7}", "{embed: {features: 4}}", "[batch, 7, 4]"),
        ("{image: {size: 8}}", "{patch_embed: {patch: 2, features: 5}}", "[batch, 16, 5]"),
        ("{image: {size: [8, 4], channels: 1}}", "{patch_embed: {patch: 2, features: 5}}", "[batch, 8, 5]"),
        ("{image: {size: 8}}", "{patch_embed: {patch: 4, stride: 2, features: 5}}\nto_image", "[batch, 5, 3, 3]"),
        ("{features: 6, grid: [2, 3]}", "{conv2d: {kernel: 3}}\npool", "[batch, 6]"),
        ("{features: 6}", "{pool: {mode: bilateral_concat}}\n{classifier: {classes: 3}}", "[batch, 3]"),
        ("{features: 6, length: 4}", "class_token", "[batch, 5, 6]"),
    ],
)
def test_kinds_of_input(input: str, steps: str, output: str) -> None:
    assert str(model(steps, input=input).output) == output


def test_an_invalid_expectation_is_an_error_of_the_spec_with_unmet_ones() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [silu]}\nexpect: {tolerance: 2, lookahead: 7}"
    with pytest.raises(SpecError) as caught:
        check.load_text(text)
    assert [each.code for each in caught.value.diagnostics] == ["E209", "E705"]
    assert caught.value.exit_status == 1


def test_expectations_have_a_tolerance_and_are_skipped_for_a_changed_spec() -> None:
    text = "seqblocks: 1\nlet: {d: 4}\nmodel: {input: {features: d, length: 8}, steps: [{linear: {features: d}}]}\n"
    check.load_text(text + "expect: {params: 20, state_bytes: 0, flops_per_token: 32, output: [batch, 8, d]}")
    check.load_text(text + "expect: {params: 22, tolerance: 0.1}")
    with pytest.raises(ExpectationError, match="E701"):
        check.load_text(text + "expect: {params: 22}")
    _, changed = check.load_text(text + "expect: {params: 20}", set={"d": 6})
    assert changed is not None
    assert "not checked" in summarise(changed).notes[0]


SHORT = """seqblocks: 1
let: {dim: 8}
blocks:
  wide: {args: {width: int, expand: 2}, steps: [{linear: {features: expand * width}}, {proj_down: width}]}
  gated: {args: {other: wire}, steps: [{gate: other}]}
  mixed: {args: {mode: word}, steps: [silu]}
model:
  input: {tokens: 32}
  steps:
    - embed: dim
    - residual: [layer_norm, {wide: dim}]
    - linear: {features: dim, as: z}
    - gated: z
    - mixed: quick
    - repeat: [{residual: [{wide: dim * 1}]}]
    - scan: [{causal_conv: {kernel: 3}}]
    - parallel: [{a: [silu]}, {b: [{linear: dim + 0}]}]
    - dropout: {p: 0.1}
"""
LONG = """seqblocks: 1
let: {dim: 8}
blocks:
  wide: {args: {width: int, expand: 2}, steps: [{linear: {features: expand * width}}, {proj_down: {features: width}}]}
  gated: {args: {other: wire}, steps: [{gate: {by: other}}]}
  mixed: {args: {mode: word}, steps: [silu]}
model:
  input: {tokens: 32}
  steps:
    - embed: {features: dim}
    - residual: {steps: [layer_norm, {wide: {width: dim}}]}
    - linear: {features: dim, as: z}
    - gated: {other: z}
    - mixed: {mode: quick}
    - repeat: {steps: [{residual: {steps: [{wide: {width: dim * 1}}]}}]}
    - scan: {steps: [{causal_conv: {kernel: 3}}]}
    - parallel: {branches: [{a: [silu]}, {b: [{linear: {features: dim + 0}}]}]}
    - dropout: {p: 0.1}
"""


def test_a_scalar_is_the_only_argument_and_a_list_the_steps() -> None:
    short, long = check.load_text(SHORT)[1], check.load_text(LONG)[1]
    assert short is not None
    assert long is not None
    assert listing.text(short) == listing.text(long)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.embed", 16), ("model.embed.features", 16), ("model.embed.init", {"weight": "zeros"}),
        ("model.residual.wide", 12), ("model.residual.wide.expand", 3), ("model.residual.drop_path", 0.5),
        ("model.repeat.times", 3), ("model.repeat.residual.wide.expand", 1), ("model.parallel.b.linear.bias", False),
        ("model.scan.causal_conv.kernel", 2), ("model.mixed.mode", "slow"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::seqblocks.OverrideWarning")
def test_overrides_reach_shorthands(path: str, value: object) -> None:
    more = {path: value}
    long = {path + {"model.embed": ".features", "model.residual.wide": ".width"}.get(path, ""): value}
    if path in ("model.embed", "model.embed.features"):
        more["dim"] = long["dim"] = 16
    if path == "model.residual.wide":
        for text, given in ((SHORT, more), (LONG, long)):
            with pytest.raises(SpecError, match=r"\[batch, seq, 12\]"):
                check.load_text(text, set=given)
        return
    short, other = check.load_text(SHORT, set=more)[1], check.load_text(LONG, set=long)[1]
    assert short is not None
    assert other is not None
    assert listing.text(short) == listing.text(other)
    assert len(short.overridden) == len(other.overridden)


def test_use_brings_in_relative_files(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.yaml").write_text("seqblocks: 1\nuse: [./b.yaml]\nblocks:\n  a: {steps: [b]}\n")
    (tmp_path / "lib" / "b.yaml").write_text("seqblocks: 1\nblocks:\n  b: {steps: [{linear: {features: 3}}]}\n")
    top = tmp_path / "top.yaml"
    top.write_text("seqblocks: 1\nuse: [lib/a.yaml]\nmodel: {input: {features: 2}, steps: [a]}\n")
    made = check.load_model(top)
    assert names(made) == ["a.b.linear.weight", "a.b.linear.bias"]
    top.write_text("seqblocks: 1\nuse: [lib/a.yaml]\nmodel: {input: {features: 2}, steps: [b]}\n")
    with pytest.raises(SpecError, match="E301"):  # names inside a used file do not matter here
        check.load_model(top)


def test_costs() -> None:
    made = model("{linear: {features: 16, bias: false}}\n{causal_conv: {kernel: 4}}", input="{features: 8}")
    found = summarise(made)
    assert found.macs_per_token == 8 * 16 + 16 * 4
    assert found.flops_per_token == 2 * found.macs_per_token
    assert found.state_bytes == 3 * 16 * 4
    assert summarise(made, "bfloat16").state_bytes == 3 * 16 * 2
    assert summarise(made, "bfloat16").params_bytes == 2 * found.params
    pooled = model("{linear: {features: 16}}\npool\n{classifier: {classes: 10}}", input="{features: 8, length: 20}")
    assert summarise(pooled).macs_per_token == 8 * 16 + 16 * 10 / 20


@pytest.mark.parametrize(
    ("options", "length", "seen"),
    [
        ("", 100, 50.5),  # (1 + … + 100) / 100
        ("window: 10", 100, 9.55),  # 1 + … + 10, then 10 each
        ("window: 200", 100, 50.5),
        ("causal: false", 100, 100),
        ("causal: false, window: 3", 5, (3 + 4 + 5 + 4 + 3) / 5),
        ("cache: 64", None, 32),
        ("window: 10", None, 10),
        ("causal: false, window: 10", None, 19),
        ("causal: false, cache: 64", None, 64),
    ],
)
def test_attention_costs_depend_on_visible_tokens(options: str, length: int | None, seen: float) -> None:
    step = f"{{attention: {{q: input, k: input, v: input, heads: 4, {options}}}}}"
    given = summarise(model(step, input="{features: 8}"), length=length)
    assert given.macs_per_token == int(seen * 16)
    if length:
        fixed = summarise(model(step, input=f"{{features: 8, length: {length}}}"))
        assert (fixed.macs_per_token, fixed.input_macs) == (given.macs_per_token, given.input_macs)
    assert bool(given.state) == ("false" not in options)


def test_invalid_lengths() -> None:
    with pytest.raises(UsageError, match="the spec fixes the input at 20 tokens"):
        summarise(model("silu", input="{features: 8, length: 20}"), length=30)
    with pytest.raises(UsageError, match="the model takes a multiple of 4 tokens, not 30"):
        summarise(model("{downsample: {factor: 4}}", input="{features: 8}"), length=30)


def test_streaming_is_known_before_anything_is_built() -> None:
    assert summarise(model("{causal_conv: {kernel: 2}}")).streams is None
    blocked = summarise(model("{scan: {order: [forward, reverse], steps: [{causal_conv: {kernel: 2}}]}}"))
    assert "forward and reverse" in (blocked.streams or "")


def test_the_graph_as_text_is_stable(root: Path, update_golden: bool) -> None:
    golden = root / "tests" / "golden" / "vil_small_block.graph.txt"
    text = listing.text(check.load_model("vil_small_block")) + "\n"
    if update_golden:
        golden.write_text(text)
    assert golden.read_text() == text


def test_the_words_that_hints_lead_to_exist() -> None:
    """Replacements for words of other libraries are verbs, arguments or words of this language."""
    from seqblocks.descriptions import reference
    from seqblocks.language.expressions import FUNCTIONS
    from seqblocks.parameters import INITIALISERS
    from seqblocks.suggestions import vocabulary

    verbs = {name: reference.facts(verb) for name, verb in reference.verbs().items()}
    arguments = [argument for facts in verbs.values() for argument in facts["arguments"]]
    words = {*ARGUMENT_TYPES, *FUNCTIONS, "tokens", "lookahead", "depth"}
    words = words.union(*({a["name"], *a["words"]} for a in arguments))
    known = {*verbs, *INITIALISERS, *words, *graph.DIRECTION_NAMES.values()}
    assert {ours for names in vocabulary().elsewhere.values() for ours in names} <= known
    instead = vocabulary().instead
    suggested = {word for text in instead.values() if text.startswith("the ") for word in re.findall(r"\w+", text)}
    (gate,) = (a["words"] for a in verbs["gate"]["arguments"] if a["name"] == "activation")
    norms = {verb for verb in verbs if verb.endswith("_norm")}
    assert suggested - {"the", "are", "and", "activations", "norms"} == norms | set(gate) - {"none"}
    assert {word for text in instead.values() for word in re.findall(r"`(\w+)", text)} <= verbs.keys()
    assert not set(instead) & verbs.keys()


@pytest.mark.parametrize("text", ["normal(0, 0.1)", "normal(std=0.1)", "normal(0, std=d)", "normal(std=d, mean=0)"])
def test_the_numbers_of_an_initialiser_are_given_in_order_or_by_name(text: str) -> None:
    made = model(f'{{linear: {{features: 4, init: {{weight: "{text}"}}}}}}', "let: {d: 0.1}")
    assert made.graph.nodes[0].parameters["weight"].init == ("normal", (0.0, 0.1))


@pytest.mark.parametrize(
    ("flag", "expected"), [("true", {"weight": ("normal", (0.0, 0.1)), "bias": ("zeros", ())}), ("false", None)]
)
def test_a_condition_chooses_an_initialiser_and_default_changes_nothing(flag: str, expected: Any) -> None:
    drawn = '{weight: "normal(0, d) if d > 0 else default", bias: "zeros if bias else default"}'
    let = f"let: {{d: 0.1 if bias else 0, bias: {flag}}}"
    made = model(f"{{linear: {{features: 4, bias: bias, init: {drawn}}}}}", let)
    usual = {"weight": ("fan_in_uniform", ())}
    assert {name: each.init for name, each in made.graph.nodes[0].parameters.items()} == (expected or usual)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("zeros if d > 0 else zeroes", "E408.* no initialiser 'zeroes'"),
        ("linspace(1) if d < 0 else ones", "E408.* linspace does not take 1 number"),
        ("(ones if d < 0 else glorot) if d < 0 else ones", "E408.* no initialiser 'glorot'"),
        ("zeros if e else ones", "E30.*'e'"),
        ("zeros if 'x' else ones", "E501.*not support"),
        ("normal(0, -1) if d > 0 else ones", "E209"),
        ("normal(0, e) if d < 0 else ones", "E303.*'e'"),
        ("(ones if e else zeros) if d < 0 else ones", "E303.*'e'"),
        ("normal(0, [1]) if d < 0 else ones", "E501.*not support"),
        ("default(1)", "E408.* default does not take 1 number"),
    ],
)
def test_each_choice_of_an_initialiser_is_checked(text: str, code: str) -> None:
    with pytest.raises(SpecError, match=f"(?s){code}"):
        model(f'{{linear: {{features: 4, init: {{weight: "{text}"}}}}}}', "let: {d: 0.1}")


def test_default_is_allowed_where_an_argument_leaves_out_all_parameters() -> None:
    norm = 'rms_norm: {gain: kind, init: {weight: "zeros if kind != \'none\' else default"}}'
    assert not model(f"{{{norm}}}", "let: {kind: none}").graph.nodes[0].parameters
    for wrong in (norm.replace("default", "ones"), norm.replace("default", "one"), "relu: {init: {}}"):
        with pytest.raises(SpecError, match=r"E201.* has no parameters of its own to init"):
            model(f"{{{wrong}}}", "let: {kind: none}")


def test_an_initialiser_of_a_block_that_no_step_uses_is_checked_without_its_arguments() -> None:
    linear = '{linear: {features: 4, bias: b, init: {bias: "zeros if b else default"}}}'
    model("{linear: 4}", f"blocks: {{a: {{args: {{b: bool}}, steps: [{linear}]}}}}")


def _doubled(levels: int, each: str) -> str:
    """Return blocks that each contain the previous one as `each` specifies, and a model of the last."""
    blocks = "".join(f"  b{i + 1}: {{steps: {each.replace('b', f'b{i}')}}}\n" for i in range(levels))
    return f"blocks:\n  b0: {{steps: [{{linear: {{features: 8}}}}]}}\n{blocks}"


TWICE = "[{b: {name: one}}, {b: {name: two}}]"


@pytest.mark.parametrize(
    ("head", "steps", "code"),
    [
        (_doubled(14, TWICE), "b14", None),  # 2^14 linears in as many blocks
        (_doubled(16, TWICE), "b16", "E104.* too many steps"),
        (_doubled(60, TWICE), "b60", "E104.* too many steps"),
        (_doubled(62, "[b]"), "b62", None),
        (_doubled(99, "[b]"), "b99", "E104.* nested too deeply"),
        (_doubled(99, "[b]"), "silu", "E104.* nested too deeply"),  # by the blocks below, each lowered once
        ("let: {" + "".join(f"a{i + 1}: a{i} + 1, " for i in range(400)) + "a0: 8}", "linear: {features: a400}", None),
    ],
    ids=["many", "too_many", "far_too_many", "deep", "too_deep", "too_deep_from_below", "long_let"],
)
def test_the_size_of_a_graph_is_bounded(head: str, steps: str, code: str | None) -> None:
    """Nested blocks can make a graph much larger than its text, so its size has a limit of its own."""
    if code is None:
        assert model(f"{{{steps}}}" if ":" in steps else steps, head).output is not None
        return
    with pytest.raises(SpecError, match=code) as caught:
        model(steps, head)
    assert len(caught.value.diagnostics) == 1



@pytest.mark.parametrize(
    ("steps", "head", "code", "hint"),
    [
        ("{linear: {features: d * k}}", "let: {d: 8, k 2}", "E207", "a colon is missing after `k`"),
        ("{b: {d: 8, k: 2}}", "blocks: {b: {args: {d: int, k 2}, steps: [linear: {features: d * k}]}}", "E207",
         "a colon is missing after `k`"),
        ("{linear: {features: 8, asz: a}}\n{gate: {by: a}}", "", "E201", "did you mean 'as'?"),
        ("{linear: {features: 8, as a}}\n{gate: {by: a}}", "", "E201", "a colon is missing after `as`"),
        ("{b: {asz: a}}\n{residual: {steps: [gate: {by: a}]}}", "blocks: {b: {steps: [silu]}}", "E201",
         "did you mean 'as'?"),
        ("{gate: {byz: input}}", "", "E201", "did you mean 'by'?"),
        ("{b: {byz: input}}", "blocks: {b: {args: {by: wire}, steps: [gate: {by: by}]}}", "E201", "did you mean 'by'?"),
        ("{repeat: {times: 2, setps: [silu]}}", "", "E201", "did you mean 'steps'?"),
        ("{linear: {features: 8}}", "checkpoint: {linear.weight: {split: qkv, parts: 3, prat: 0}}", "E201",
         "did you mean 'part'?"),
        ("{linear: {features: 8, init: {weight zeros}}}", "", "E201", "a colon is missing after `weight`"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_reported_once(steps: str, head: str, code: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        model(steps, head)
    assert [(fault.code, fault.hint) for fault in caught.value.diagnostics] == [(code, hint)]


def test_a_misspelt_size_is_reported_once() -> None:
    with pytest.raises(SpecError) as caught:
        model("silu", input="{image: {sizes: 8}}")
    assert [fault.hint for fault in caught.value.diagnostics] == ["did you mean 'size'?"]


@pytest.mark.parametrize(
    ("verb", "hint"),
    [("mlstm", "normalize: true, or input_gate: sigmoid"), ("mlstm_memoroid", "normalize: true")],
)
def test_a_hint_offers_a_gate_that_the_verb_has(verb: str, hint: str) -> None:
    ports = "q: input, k: input, v: input, i: g, f: g"
    with pytest.raises(SpecError) as caught:
        model(f"{{linear: {{features: 2, as: g}}}}\n{{{verb}: {{{ports}, heads: 2, normalize: false}}}}")
    assert [(fault.code, fault.hint) for fault in caught.value.diagnostics] == [("E209", hint)]


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        ("[forward, reverse]", "set `own: all`, or use `init` of the step inside"),
        ("reverse", "use `init` of the step inside"),
    ],
)
def test_a_hint_offers_several_parameters_of_orders(order: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        model(f"{{scan: {{order: {order}, init: {{linear.bias: ones}}, steps: [linear: {{features: 8}}]}}}}")
    assert [(fault.code, fault.hint) for fault in caught.value.diagnostics] == [("E201", hint)]


def test_a_let_that_two_blocks_share_loses_no_entry_to_an_argument_of_one() -> None:
    text = """
seqblocks: 1
blocks:
  f: {args: {n: 8}, let: &shared {n: 4}, steps: [{linear: {features: n}}]}
  g: {let: *shared, steps: [{linear: {features: n}}]}
model: {input: {features: 8}, steps: [{f: {}}, {g: {}}]}
"""
    with pytest.raises(SpecError) as caught:
        check.load_text(text)
    assert [each.code for each in caught.value.diagnostics] == ["E309"]
