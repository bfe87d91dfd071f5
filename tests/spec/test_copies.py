"""Blocks whose arguments differ only in initial values are copied instead of lowered; the result must be the same."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import pytest

from seqblocks import cost, graph
from seqblocks.analysis import check
from seqblocks.analysis.steps import copies, primitives, steps
from seqblocks.errors import SpecError
from seqblocks.graph import Entry, Graph, Node

pytestmark = pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")  # a random spec may produce warnings


def described(body: Graph) -> list[Any]:
    """Return everything about a body, with values numbered in the order of their steps."""
    numbers = {value: at for at, value in enumerate(dict.fromkeys([body.input, *body.ports.values(), *body.captures]))}

    def entries(table: tuple[Entry, ...]) -> list[Any]:
        return [(each.ours, each.layout, [theirs.as_data() for theirs in each.theirs]) for each in table]

    def node(each: Node) -> list[Any]:
        for value in each.outputs:
            numbers.setdefault(value, len(numbers))
        inputs = {port: [numbers[value] for value in values] for port, values in each.inputs.items()}
        same = {"kind", "name", "verb", "span", "type", "split", "op", "parameters", "state", "wires"}
        same |= {"macs", "ties", "shared", "owner_name", "owned", "starts"}
        values = {key: getattr(each, key, None) for key in sorted(same)}
        bodies = {label: described(inner) for label, inner in each.bodies.items()}
        return [inputs, values, entries(getattr(each, "checkpoint", ())), bodies]

    return [[node(each) for each in body.nodes], numbers[body.result], entries(body.checkpoint), body.absent]


def outcome(text: str) -> Any:
    """Return all that a check of a text finds: diagnostics, or the graph and the warnings."""
    try:
        _, model = check.load_text(text)
    except SpecError as error:
        return [each.as_data() for each in error.diagnostics]
    assert model
    found = [(item.name, item.parameter, item.tied) for item in graph.parameters(model.graph, shared=True)]
    counts = graph.count(model.graph), graph.count(model.graph, active=True), cost.macs(model.graph, 8)
    return found, counts, described(model.graph), [each.as_data() for each in model.warnings]


def with_and_without(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(copies, "find", lambda *_: None)
        patch.setattr(copies, "find_faulty", lambda *_: None)
        without = outcome(text)
    return outcome(text), without


def count_declared(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often the declarations of an op are evaluated while a text is checked."""
    count = 0
    declare = primitives._declare

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return declare(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(primitives, "_declare", counted)
        with contextlib.suppress(SpecError):
            check.load_text(text)
    return count


# --- bundled models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rwkv7_0_4b", "xlstm_125m_7_1", "zamba2_small", "qwen3_next_small"])
def test_bundled_models_are_the_same_without_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = check.locate(name)[0]
    copied, lowered = with_and_without(text, monkeypatch)
    assert copied == lowered


def test_layers_that_differ_in_initial_values_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of RWKV-7 has other steps; the 22 after the second one are copies of it."""
    text = check.locate("rwkv7_0_4b")[0]
    shorter = text.replace("depth: 24", "depth: 2").partition("expect:")[0]
    outside_blocks = 4  # ops of a layer that are in no block
    assert count_declared(text, monkeypatch) == count_declared(shorter, monkeypatch) + 22 * outside_blocks


# --- single cases -----------------------------------------------------------------------------------------------------

LAYERS = """
seqblocks: 1
blocks:
  inner:
    args: {size: 4, gain: 1}
    steps: [{linear: {features: size, init: {weight: "normal(0, gain)"}}}]
  outer:
    args: {layer: 0, dim: 4}
    let: {part: 1 / (3 - layer), unused: 1 / (4 - layer)}
    steps:
      - linear: {features: dim, bias: BIAS, init: INIT, name: first}
      - silu: {when: "layer > 0"}
      - inner: {size: dim, gain: layer + 1}
model:
  input: {features: 4}
  steps: [{repeat: {times: TIMES, steps: [{outer: {layer: layer}}]}}]
"""


def layers(times: int, init: str, bias: str = "true") -> str:
    return LAYERS.replace("TIMES", str(times)).replace("INIT", init).replace("BIAS", bias)


@pytest.mark.parametrize(
    ("times", "init"),
    [
        (3, "{weight: 'normal(0, part)'}"),
        (3, "{weight: 'zeros if layer == 1 else default'}"),
        (3, "{weight: 'zeros if layer > 1 else normal(0, 2)', bias: 'constant(layer)'}"),
        (4, "{weight: 'normal(0, part)'}"),  # divides by zero in layer 3
        (5, "{weight: zeros}"),  # as does an unused name in layer 4
        (3, "{weight: 'normal(0, 1 - layer)'}"),  # negative in layer 2
        (3, "{wieght: 'zeros if layer == 2 else default'}"),  # a fault in layer 2 only
    ],
)
def test_values_and_faults_of_a_copy(times: int, init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, lowered = with_and_without(layers(times, init), monkeypatch)
    assert copied == lowered


@pytest.mark.parametrize(
    ("good", "bad", "init", "count"),
    [
        ("- silu:", "- head_norm: {heads: 3}\n      - silu:", "{weight: zeros}", 1),  # divides the width of no layer
        ("- silu:", "- slu\n      - silu:", "{weight: zeros}", 1),
        ("- linear: {features: dim, ", "- slu\n      - linear: {features: dim, ", "{weight: 'normal(0, layer)'}", 1),
        ("- silu:", "- slu\n      - silu:", "{weight: 'normal(0, 1 / (3 - layer))'}", 3),  # others in layers 3, 4
        ("gain: layer + 1}", "gain: layer + 1, gian: 2}", "{weight: zeros}", 1),
        ("normal(0, gain)", "normal(0, gian)", "{weight: zeros}", 1),
        ("normal(0, gain)", "normal(0, 3 - gain)", "{weight: zeros}", 1),  # negative in some layers
        ("[{linear: {features: size", "[slu, {linear: {features: size", "{weight: zeros}", 1),
        ("[{linear: {features: size", "[slu, {linear: {features: size / 3", "{weight: zeros}", 2),
    ],
)
def test_bodies_with_faults_are_shared(
    good: str, bad: str, init: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults are those of an analysis that lowers each layer, and the steps are lowered once."""
    text = layers(6, init).replace("1 / (3 - layer), unused: 1 / (4 - layer)", "1")
    assert good in text
    copied, lowered = with_and_without(text.replace(good, bad, 1), monkeypatch)
    assert copied == lowered
    assert len(copied) == count


def test_an_incomplete_step_in_layers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    text = check.locate("rwkv4_169m")[0]
    copied, lowered = with_and_without(text.replace(")\"}, name: mix_k}", ")\"}, nme: mix_k}"), monkeypatch)
    assert copied == lowered
    assert {each["code"] for each in copied} >= {"E201"}


def test_faults_of_many_layers_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = layers(64, "{weight: zeros}").replace("let: {part: 1 / (3 - layer), unused: 1 / (4 - layer)}", "let: {}")
    bad = text.replace("- silu:", "- residual: [{head_norm: {heads: 3}}]\n      - silu:")
    found = count_declared(bad, monkeypatch)
    monkeypatch.setattr(copies, "find_faulty", lambda *_: None)
    assert found < 10 < 64 < count_declared(bad, monkeypatch)


def test_a_step_without_parameters_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    init = "init: {weight: 'zeros if layer == 2 else default'}"
    text = layers(3, "{weight: zeros}").replace("silu: {when", f"silu: {{{init}, when")
    copied, lowered = with_and_without(text, monkeypatch)
    assert copied == lowered
    assert copied[0]["code"] == "E201"


def test_an_argument_that_a_width_depends_on_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    text = layers(3, "{weight: zeros}").replace("features: dim,", "features: dim + 0 * layer,")
    copied, lowered = with_and_without(text, monkeypatch)
    assert copied == lowered
    assert count_declared(text, monkeypatch) == 2 + 3 + 2  # `inner` is copied in the third layer


def test_steps_that_share_or_tie_are_lowered_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for added in ("share: first", "tie: first"):
        text = layers(3, "{weight: 'constant(layer)'}")
        text = text.replace("- silu:", f"- linear: {{features: dim, {added}, name: second}}\n      - silu:")
        copied, lowered = with_and_without(text, monkeypatch)
        assert copied == lowered
        assert count_declared(text, monkeypatch) == 3 + 4 + 3  # only `inner` is copied


def test_a_step_may_share_the_parameters_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    text = layers(3, "{weight: 'constant(layer)'}").replace("index", "layer")
    text = text.rstrip().removesuffix("]") + ", {linear: {features: 4, share: repeat.2.outer.first, as: y}}]"
    copied, lowered = with_and_without(text, monkeypatch)
    assert copied == lowered
    assert isinstance(copied, tuple), copied


def test_overrides_that_only_copies_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that only initial values depend on is in use."""
    text = layers(3, "{weight: 'zeros if layer < 2 else constant(part)'}")
    file, _ = check.load_text(text, set={"blocks.outer.let.part": 2, "blocks.outer.let.unused": 2})
    assert [each.message.split()[2] for each in file.warnings] == ["blocks.outer.let.unused=2"]


def test_copies_count_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the number of steps holds for copies too, and is the same as without them."""
    monkeypatch.setattr(steps, "MAX_STEPS", 2000)
    body = "\n".join(
        f"      - linear: {{features: dim, init: {{weight: 'constant(layer)'}}, name: s{at}}}" for at in range(100)
    )
    text = LAYERS.replace("      - silu", f"{body}\n      - silu").replace("INIT", "{}").replace("BIAS", "true")
    text = re.sub("let: .*", "let: {}", text)
    each = 100 + 5  # with `first`, `silu`, `inner`, the step inside it, and `outer` itself
    times = steps.MAX_STEPS // each
    check.load_text(text.replace("TIMES", str(times)))
    with pytest.raises(SpecError, match="too many steps"):
        check.load_text(text.replace("TIMES", str(times + 2)))


NESTED = """
seqblocks: 1
blocks:
  inner:
    args: {gain: 1}
    let: {twice: 2 * gain}
    steps: STEPS
  outer:
    args: {layer: 0}
    steps: [{inner: {gain: layer}}, {linear: 4}]
model:
  input: {features: 4}
  steps: [{outer: {layer: 0}}, {outer: {layer: 2, name: second}}, {outer: {layer: 3, name: third}}, {linear: 3}]
"""


@pytest.mark.parametrize(
    "steps",
    [
        "[{linear: {features: 4}}, {linear: {features: 4, when: gain > 1, name: b}}]",  # another number of parameters
        "[{linear: {features: 4}}, {linear: {features: 8, when: twice > 2, name: b}}]",  # and another width
        "[silu, {downsample: {factor: 2, when: gain > 1}}]",  # and another rate
        "[{linear: {features: 4, init: {weight: constant(gain)}}}, {tanh: {when: gain == 2}}]",
        "[{linear: {features: '4 + \uff47ain', init: {weight: constant(gain)}}}]",  # the same name
    ],
)
def test_an_argument_that_decides_a_condition_inside(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, lowered = with_and_without(NESTED.replace("STEPS", steps), monkeypatch)
    assert copied == lowered
    assert isinstance(copied, tuple), copied


# --- random blocks ----------------------------------------------------------------------------------------------------

ARGUMENTS = ("a", "b", "c", "depth")
INITIAL = ("normal(0, abs({}))", "constant({})", "zeros if {} > 1 else default", "constant({}) if a > 1 else ones")


def random_spec(seed: int) -> str:
    """Return a spec whose layers use a block with arguments that depend on the number of the layer."""
    rng = random.Random(seed)

    def number(names: tuple[str, ...]) -> str:
        one, other = rng.choice(names), rng.choice(names)
        return rng.choice(("1", one, f"{one} + 1", f"{one} - {other}", f"{one} / ({other} + 9)", f"2 * {one}"))

    def step(names: tuple[str, ...], at: int) -> str:
        initial = rng.choice(INITIAL).format(number(names))
        least = rng.randint(0, 2)
        init = f', init: {{{rng.choice(("weight", "weight", "weight", "bias"))}: "{initial}"}}' * (rng.random() < 0.8)
        when = f', when: "{number(names)} > {least}"' * (rng.random() < 0.3)
        extra = rng.choice(("",) * 40 + (", share: s0", ", tie: s0", f", bias: {number(names)} > 1", ", bais: true"))
        width = "4" if rng.random() < 0.8 else f"4 + 0 * ({number(names)})"
        linear = f"linear: {{features: {width}, name: s{at}{init}{when}{extra}}}"
        return f"residual: [{{{linear}}}]" if rng.random() < 0.15 else linear

    def block(name: str, inner: str | None) -> str:
        let = {word: number(ARGUMENTS) for word in rng.sample(("p", "q"), rng.randint(0, 2))}
        names = (*ARGUMENTS, *let)
        made = [step(names, at) for at in range(rng.randint(1, 4))]
        if inner:
            made.append(f"{inner}: {{a: {number(names)}, c: {number(names)}, name: inside}}")
        rows = "".join(f"      - {each}\n" if "residual" not in each else f"      - {{{each}}}\n" for each in made)
        default = rng.choice(("3", "depth"))
        entries = ", ".join(f"{word}: {value}" for word, value in let.items())
        return f"  {name}:\n    args: {{a: 1, b: 2, c: {default}}}\n    let: {{{entries}}}\n    steps:\n{rows}"

    call = f"{{outer: {{a: {number(('layer', 'layers'))}, b: {number(('layer', 'layers'))}}}}}"
    blocks = block("inner", None) + block("outer", "inner")
    repeats = ", ".join(f"{{repeat: {{times: {times}, name: r{times}, steps: [{call}]}}}}" for times in (4, 2))
    model = f"  input: {{features: 4}}\n  steps: [{repeats}]\n"
    return f"seqblocks: 1\nblocks:\n{blocks}model:\n{model}"


@pytest.mark.slow
def test_random_blocks_are_the_same_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    valid = copied_once = 0
    for seed in range(120):
        text = random_spec(seed)
        copied, lowered = with_and_without(text, monkeypatch)
        assert copied == lowered, text
        if isinstance(copied, tuple):
            valid += 1
            with monkeypatch.context() as patch:
                patch.setattr(copies, "find", lambda *_: None)
                most = count_declared(text, monkeypatch)
            copied_once += count_declared(text, monkeypatch) < most
    assert valid > 30
    assert copied_once > 15
