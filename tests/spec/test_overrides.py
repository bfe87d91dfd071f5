"""Overrides: values of a spec replaced from outside, by path."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.descriptions import listing
from seqblocks.errors import OverrideWarning, SpecError, UsageError
from seqblocks.language import overrides
from tests.spec.test_language import OFFICIAL, model


def test_overrides_replace_values_by_name() -> None:
    base = check.load_model("vil_tiny")
    wide = check.load_model("vil_tiny", {"dim": 384})
    assert graph.count(wide.graph) == OFFICIAL["vil_small"]
    assert wide.overridden == ("dim=384",)
    assert check.load_model("vil_tiny", {"let.dim": 192}).overridden == (), "the same value should be no change"
    deep = check.load_model("vil_tiny", {"input.image.size": [32, 64], "model.blocks.down.vil.heads": 2})
    assert deep.input.grid == (32, 64)
    heads = [n.op.heads for n in graph.walk(deep.graph) if n.verb == "mlstm"]
    assert heads == [2, 4] * 12
    assert base.overridden == ()


def test_overrides_do_not_reach_into_other_files() -> None:
    text = "seqblocks: 1\nuse: [xlstm]\nmodel: {input: {features: 8}, steps: [{mlstm_block: {dim: 8}}]}\n"
    with pytest.raises(SpecError, match="defaults in a file imported with `use:` cannot be overridden"):
        check.load_text(text, set={"blocks.mlstm_block.kernel": 7})
    assert check.load_text(text, set={"model.mlstm_block.kernel": 7})[1] is not None
    with pytest.raises(SpecError, match="an override cannot be null"):
        check.load_text(text, set={"model.mlstm_block.kernel": None})


@pytest.mark.parametrize("name", ["dim", "double"])
def test_an_override_that_closes_a_cycle_is_the_place_of_the_error(name: str) -> None:
    body = "model: {input: {features: 8}, steps: [linear: {features: double}]}"
    text = f"seqblocks: 1\nlet: {{dim: 8, double: 2 * dim}}\n{body}"
    with pytest.raises(SpecError) as caught:
        check.load_text(text, set={"dim": name})
    (error,) = caught.value.diagnostics
    assert error.code == "E505"
    assert error.span
    assert error.span.source.is_override
    assert name in error.span.source.text


def test_overrides_reach_a_blocks_defaults_and_a_steps_words() -> None:
    head = "blocks:\n  b:\n    args: {k: 2, act: none}\n    steps: [{causal_conv: {kernel: k, activation: act}}]"
    made = model("b", head, set={"blocks.b.k": 5, "blocks.b.act": "silu"})
    (conv,) = made.graph.nodes[0].bodies[""].nodes
    assert (conv.op.kernel, conv.op.activation) == (5, "silu")


def test_overrides_give_a_bare_step_an_argument() -> None:
    head = "blocks:\n  b: {steps: [silu, layer_norm]}\n"
    steps = "layer_norm\ncausal_conv:\nb\nresidual: {steps: [dropout]}"
    changes = {
        "model.layer_norm.bias": False,
        "model.causal_conv.kernel": 3,
        "blocks.b.layer_norm.eps": 0.1,
        "model.residual.dropout.p": 0.5,
    }
    made = model(steps, head, set=changes)
    ops = {node.verb + str(len(node.parameters)): node.op for node in graph.walk(made.graph) if node.op}
    assert set(ops) == {"layer_norm1", "layer_norm2", "causal_conv2", "silu0", "dropout0"}
    assert (ops["causal_conv2"].kernel, ops["layer_norm2"].eps, ops["dropout0"].p) == (3, 0.1, 0.5)
    with pytest.raises(SpecError, match="unknown key 'kernal' in causal_conv"):
        model(steps, head, set={"model.causal_conv.kernal": 3})


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("repeat.times", "did you mean 'model.repeat.times'?"),
        ("blocks.repeat.times", "did you mean 'model.repeat.times'?"),
        ("b.k", "did you mean 'blocks.b.k'?"),
        ("b.from", "did you mean 'model.repeat.b.from'?"),  # the spec uses the default
        ("model.repeat.1.b.k", "did you mean 'model.repeat.b.k'?"),
        ("model.named.1.causal_conv.kernel", "in a path through a pattern, use the word instead of the layer number"),
        ("features", "did you mean 'model.input.features'?"),
        ("dmi", "did you mean 'dim'?"),
        ("model.blocks.0.b.k", "did you mean 'model.blocks.b.k'?"),
        ("blocks.b.kk", "did you mean 'k'?"),  # not an argument that steps leave at its default
        ("model.repeat.b.causal_conv.bias", "did you mean 'blocks.b.causal_conv.bias'?"),
        ("model.layer_norm.eps", "the layer_norm step is now named normed, by `as:` or `name:`"),
        ("nothing.like.it", "an override replaces a value of the spec or sets an argument of a step"),
        ("model.nothing.like.it", "an override replaces a value of the spec or sets an argument of a step"),
    ],
)
def test_an_override_without_a_match_reports_its_path(path: str, hint: str) -> None:
    head = "let: {dim: 3}\nblocks: {b: {args: {k: 2}, steps: [{causal_conv: {kernel: k}}]}}"
    steps = "repeat: {times: 2, steps: [b]}\nrepeat: {name: named, pattern: m*2, m: [causal_conv]}"
    steps += "\nrepeat: {name: blocks, times: 2, steps: [b]}"
    steps += "\nscan: {order: [forward, reverse], own: [linear], steps: [linear: {features: 8}]}"
    steps += "\nlayer_norm: {as: normed}"
    with pytest.raises(SpecError) as caught:
        model(steps, head, set={path: 5})
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.hint) == ("E310", hint)


def test_an_error_in_an_override_is_shown_at_its_position_there() -> None:
    with pytest.raises(SpecError) as caught:
        model("{linear: {features: 3}}", "let: {dim: 3}", set={"model.linear.features": check.yaml("2 * dmi")})
    (fault,) = caught.value.diagnostics
    assert str(fault.span) == "--set model.linear.features=2 * dmi:1:33"
    assert (fault.code, fault.span.end_column - fault.span.column) == ("E303", 3)


@pytest.mark.parametrize(
    ("given", "place", "line"),
    [
        ({"dmi": 3}, "the call:1:1", "set={'dmi': 3}"),
        ({"dmi": check.yaml("3")}, "command line:1:1", "--set dmi=3"),
        ({"dim": "2 *"}, "set={'dim': \"2 *\"}:1:13", "set={'dim': \"2 *\"}"),
    ],
)
def test_an_override_is_shown_as_it_was_given(given: dict[str, Any], place: str, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        model("{linear: {features: dim}}", "let: {dim: 3}", set=given)
    (fault,) = caught.value.diagnostics
    assert (str(fault.span), fault.span.source.lines) == (place, (line,))


IDLE = """
seqblocks: 1
let: {dim: 8, wide: 2 * dim, spare: 3, sparer: spare + 1}
blocks:
  a: {args: {k: 3, used: 2}, let: {t: 2 * used, lost: 5}, steps: [{linear: {features: k + t}}]}
  never: {args: {k: 3}, steps: [{causal_conv: {kernel: k}}]}
model: {input: {features: wide}, steps: [{a: {k: 4}}, silu, {a: {k: 5, name: b}}]}
"""


@pytest.mark.parametrize(
    ("path", "idle"),
    [
        ("dim", False),
        ("let.wide", False),
        ("spare", True),
        ("sparer", True),
        ("blocks.a.k", True),
        ("blocks.a.used", False),
        ("blocks.a.t", False),
        ("blocks.a.lost", True),
        ("blocks.never.k", True),
        ("model.a.k", False),
    ],
)
def test_an_override_that_no_step_uses_is_a_warning(path: str, idle: bool) -> None:
    if not idle:
        assert check.load_text(IDLE, set={path: 6}, strict=True)[1].warnings == ()  # a warning would be an error here
        return
    with pytest.warns(OverrideWarning, match=rf"the override {path}=6 has no effect: no step uses it") as caught:
        _, made = check.load_text(IDLE, set={path: 6})
    assert caught[0].filename == __file__, "the warning should name the line of the call"
    assert [each.code for each in made.warnings] == ["W901"]
    assert caught[0].message.diagnostic is made.warnings[0]
    assert listing.text(made) == listing.text(check.load_text(IDLE)[1])


def test_overriding_with_the_same_value_is_no_warning() -> None:
    _, made = check.load_text(IDLE, set={"dim": 8, "spare": 3}, strict=True)
    assert [*made.notes] == [
        "the override dim=8 has no effect: the spec already has this value",
        "the override spare=3 has no effect: the spec already has this value",
    ]


class Scalar:
    """A number of a library for arrays, as numpy and torch have them."""

    def __init__(self, value: object) -> None:
        self.value = value

    def item(self) -> object:
        return self.value


class Width(enum.IntEnum):
    SMALL = 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(0.5), "0.5"), (np.float32(0.5), "0.5"), (np.bool_(True), "true"), (np.int64(3), "3"),
        (np.array(3), "3"), (np.array([1, 2]), "[1, 2]"), ({"a": [np.int8(1)]}, "{a: [1]}"), (Scalar(7), "7"),
        (Scalar(False), "false"), (Width.SMALL, "5"), (np.str_("x"), '"x"'),
        (math.inf, ".inf"), (-math.inf, "-.inf"), (math.nan, ".nan"),
        ("a\nb", '"a\\nb"'), ({"*.bias": 0}, '{"*.bias": 0}'),
        (np.longdouble(0.5), "0.5"),  # whose `item` returns a longdouble
    ],
)  # fmt: skip
def test_numbers_of_other_libraries(value: object, text: str) -> None:
    assert overrides.as_text(value) == text


class Unknown:
    """Like a tensor on "meta": it has no value."""

    def tolist(self) -> Any:
        raise NotImplementedError("no data")


@pytest.mark.parametrize("value", [Unknown(), np.float32])
def test_values_that_an_override_cannot_have(value: object) -> None:
    with pytest.raises((UsageError, SpecError), match=r"a value of `set` cannot be read: no data|is not a valid expr"):
        check.load_model("mamba_small", {"depth": value})


@pytest.mark.parametrize(
    ("function", "keywords", "message"),
    [
        (check.load_model, {"dim": 64}, 'load_model has no argument \'dim\': to change a value .* set={"dim": 64}$'),
        (check.load_spec, {"dim": "a" * 99}, 'to change a value of the spec, pass set={"dim": …}'),
        (check.load_text, {"strct": True}, "load_text has no argument 'strct': did you mean 'strict'?"),
    ],
)
def test_a_value_of_a_spec_is_no_argument(function: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        function("mamba_small", **keywords)


def test_a_mapping_from_python_may_have_patterns_as_keys() -> None:
    text = 'seqblocks: 1\ninit: {"*.bias": zeros}\nmodel: {input: {features: 4}, steps: [{linear: 4}]}\n'
    _, found = check.load_text(text, set={"init": {"*.weight": "normal(0, 0.02)", "linear.bias": "ones"}})
    assert found
    inits = {each.name: str(each.parameter.init) for each in graph.parameters(found.graph)}
    assert inits == {"linear.weight": "normal(0, 0.02)", "linear.bias": "ones"}
