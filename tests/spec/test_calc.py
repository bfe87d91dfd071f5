"""Test the types, counts and names of `calc` (values: tests/torch/test_calc.py)."""

from __future__ import annotations

import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.graph import ModelSpec
from seqblocks.types import Facts

HEAD = """
seqblocks: 1
let: {dim: 8}
model:
  inputs: {main: {features: dim}, style: {vector: dim}, other: {features: 1}}
  steps:
    - pool: {from: other, mode: mean, as: level}
    - linear: {from: input, features: 1, as: narrow}
    - linear: {from: input, features: dim, as: wide}
"""




def analysed(*steps: str, used: str = "narrow", blocks: str = "") -> ModelSpec:
    """Return a model with these steps. used: wires that the last step reads besides the inputs."""
    last = f"linear: {{from: [wide, style, level, {used}], features: 2, name: last}}"
    _, model = check.load_text(HEAD + "".join(f"    - {step}\n" for step in (*steps, last)) + blocks)
    assert model
    return model


def node(model: ModelSpec, name: str) -> graph.Node:
    (found,) = [each for each in graph.walk(model.graph) if each.name == name]
    return found


@pytest.mark.parametrize(
    ("formula", "axes", "macs"),
    [
        ("wide - 1", "[batch, main, 8]", 0),
        ("wide * narrow", "[batch, main, 8]", 8),
        ("narrow * narrow / 2", "[batch, main, 1]", 2),
        ("narrow * style", "[batch, main, 8]", 8),
        ("2 * style", "[batch, 8]", 8),
        ("max(style, 0, x)", "[batch, main, 8]", 0),
        ("exp(-0.5) * x ** (dim / 4)", "[batch, main, 8]", 16),
        ("dim * dim - narrow", "[batch, main, 1]", 0),
        ("-other", "[batch, other, 1]", 0),
    ],
)
def test_types_and_costs(formula: str, axes: str, macs: int) -> None:
    found = node(analysed(f'calc: {{y: "{formula}"}}'), "y")
    assert str(found.type) == axes
    assert found.macs == macs, "one for each number of a product, a quotient or a power"


def test_numbers_are_computed_once() -> None:
    found = node(analysed("calc: {y: wide * (dim / 2 + 1) - sqrt(dim / 2)}"), "y")
    assert found.op
    assert found.op.model_dump()["formula"] == "wide * 5 - 2.0"


@pytest.mark.parametrize(
    ("formula", "facts"),
    [
        ("sigmoid(wide)", Facts(0, 1)),
        ("-softplus(wide)", Facts(high=0)),
        ("2 - exp(min(wide, 0))", Facts(1, 2)),
        ("abs(wide) + 1", Facts(1)),
        ("max(wide ** 2, -3)", Facts(0)),
        ("tanh(wide) * sin(wide)", Facts(-1, 1)),
        ("wide / 2", Facts()),
        ("max(lam, 1) + 0 * wide", Facts(1)),
    ],
)
def test_bounds_of_values(formula: str, facts: Facts) -> None:
    learned = ", learned: {lam: 1}" if "lam" in formula else ""
    wire = node(analysed(f'calc: {{y: "{formula}"{learned}}}', used="narrow, y"), "y").type
    assert wire
    assert wire.facts == facts


def test_learned_scalars_belong_to_the_first_formula() -> None:
    model = analysed(
        "calc: {a: wide * p, b: a - q, c: p * q * b, learned: {p: 0.5, q: 'normal(0, 0.1)'}}",
        "calc: {k: p * c, name: mine, learned: {p: 2 * dim}}",
        "calc: {formula: p * x, learned: {p: zeros}, init: {p: ones}}",
        "identity: {as: used}",
        used="narrow, used",
    )
    owned = {each.name: each.tied for each in graph.parameters(model.graph) if each.name[0] in "abcm"}
    assert owned == {"a.p": None, "a.q": None, "mine.p": None, "calc.p": None}
    assert node(model, "c").shared == {"p": (2, "a.p"), "q": (2, "a.q")}
    inits = {each.name: str(each.parameter.init) for each in graph.parameters(model.graph) if not each.tied}
    assert [inits[name] for name in ("a.p", "a.q", "mine.p", "calc.p")] == [
        "constant(0.5)", "normal(0, 0.1)", "constant(16)", "ones",
    ]  # fmt: skip


def test_the_owner_of_a_scalar_may_be_unused() -> None:
    model = analysed("calc: {a: wide * p, b: wide / (1 + p ** 2), learned: {p: 0.5}}", used="narrow, b")
    assert node(model, "b").owner is node(model, "a")


def test_x_is_the_same_for_all_formulas() -> None:
    model = analysed("calc: {a: 2 * x, b: 3 * x}", "calc: {c: 2 * x, d: c + x, from: narrow}", "calc: {e: x + d}")
    wide, narrow, b = (node(model, name).outputs for name in ("wide", "narrow", "b"))
    assert node(model, "a").inputs == node(model, "b").inputs == {"x": wide}
    assert node(model, "c").inputs == {"x": narrow}
    assert node(model, "d").inputs["x"] == narrow
    assert node(model, "e").inputs["x"] != b


def test_a_step_may_be_repeated_by_an_alias() -> None:
    """Each use reads the wire above it, and owns its scalars."""
    scaled = "residual: {steps: [&same {calc: {formula: p * x, learned: {p: 1}}}], name: a}"
    steps = ("&twice {calc: 2 * x}", "*twice", scaled, "residual: {steps: [*same], name: b}", "identity: {as: used}")
    model = analysed(*steps, used="narrow, used")
    doubled = [each for each in graph.walk(model.graph) if each.op and "2 * x" in each.op.model_dump().values()]
    first, second = doubled
    assert second.inputs["x"] == first.outputs
    assert sum(item.name.endswith("calc.p") for item in graph.parameters(model.graph)) == 2


def test_a_wire_called_x_is_that_wire() -> None:
    model = analysed(
        "identity: {from: narrow, as: x}", "silu", "calc: {a: 2 * x, b: x + a}", "calc: {c: x, from: wide}"
    )  # fmt: skip
    narrow = node(model, "x").outputs
    assert node(model, "a").inputs["x"] == node(model, "b").inputs["x"] == narrow
    assert node(model, "c").inputs["x"] == node(model, "wide").outputs


def test_without_its_condition_each_name_is_the_input() -> None:
    without = "calc: {a: wide * p, b: a + 1, when: false, learned: {p: 0}}"
    model = analysed("silu: {from: wide}", without, "linear: {from: b, features: 3, as: seen}", used="narrow, seen")
    assert node(model, "seen").inputs == {"x": node(model, "silu").outputs}
    assert not [each for each in graph.parameters(model.graph) if "a." in each.name]


def test_names_of_blocks_and_layers_are_numbers() -> None:
    model = analysed(
        "repeat: {times: 2, steps: [{calc: {y: x * (layer + 1) / depth + shift, learned: {shift: layer}}}]}",
        "inner: {gain: 3, side: narrow, as: used}",
        used="narrow, used",
        blocks="blocks: {inner: {args: {gain: int, side: wire}, steps: [{calc: {y: gain * side - input}}]}}\n",
    )
    formulas = [each.op.model_dump()["formula"] for each in graph.walk(model.graph) if each.verb == "calc" and each.op]
    assert formulas == ["x * 1 / 2 + shift", "x * 2 / 2 + shift", "3 * side - input"]
    starts = [str(each.parameter.init) for each in graph.parameters(model.graph) if each.name.endswith("shift")]
    assert starts == ["constant(0)", "constant(1)"]
