"""What an editor offers at a place of a spec."""

from __future__ import annotations

import random
import re

import pytest

from seqblocks.editor.completion import Item, complete
from seqblocks.editor.edits import Edit, applied
from seqblocks.editor.positions import Lines, Spot
from seqblocks.language.spec_files import bundled
from tests.spec.opened import HEAD, SOME, ends, opened, starts


def items(tail: str, head: str = HEAD) -> list[Item]:
    """Return the completions at the bar in a text."""
    text = head + tail
    at = text.index("|")
    text = text[:at] + text[at + 1 :]
    now = opened(text, before=opened(head))
    found = complete(now, now.lines.spot_at(at))
    return found.items if found else []


def labels(tail: str, head: str = HEAD) -> list[str]:
    return [item.label for item in items(tail, head)]


TIED = """seqblocks: 1
model:
  input: {tokens: 20}
  steps:
    - embed: 8
    - repeat:
        name: layers
        times: 2
        steps:
          - residual:
              name: mix
              steps: [layer_norm, {linear: {features: 8, name: proj}}, {linear: 4}, {linear: {features: 8, name: up}}]
    - linear: {name: own, features: 8}
"""


@pytest.mark.parametrize(
    ("tie", "expected"),
    [
        ("|", ["own"]),
        ("layers.|", ["own", "layers.0.mix.proj", "layers.1.mix.proj"]),
        ("layers.1.mix.p|", ["own", "layers.0.mix.proj", "layers.1.mix.proj"]),
        ("{weight: |}", ["own.weight"]),
        ("{weight: layers.|}", ["own.weight", "layers.0.mix.proj.weight", "layers.1.mix.proj.weight"]),
    ],
)
def test_what_a_parameter_can_be_tied_to(tie: str, expected: list[str]) -> None:
    """Steps inside others are written with a path, which replaces the whole word. Their shapes fit."""
    assert labels(f"    - linear: {{features: 8, tie: {tie}}}\n", TIED) == expected


@pytest.mark.parametrize(
    ("tail", "first", "never"),
    [
        ("    - |", ["prenorm", "mine"], ["inner", "dim"]),
        ("    - lin|", ["prenorm"], ["dim"]),
        ("    - residual: [|", ["prenorm"], ["x"]),
        ("    - residual:\n        steps:\n          - |", ["prenorm"], ["x"]),
        ("    - linear: {|", ["features", "bias"], ["silu"]),
        ("    - linear: {features: 3, |}\n    - silu\n", ["bias"], ["features"]),
        ("    - linear:\n        features: 3\n        |", ["bias"], ["features"]),
        ("    - linear:\n        |", ["features"], ["silu"]),
        ("    - linear: {features: |", ["dim", "wide"], ["act", "x"]),
        ("    - linear: {features: 2 * |}\n", ["dim", "wide"], ["act"]),
        ('    - linear: {features: "round_up(|', ["dim", "wide"], ["act"]),
        ("    - linear: |", ["dim", "wide"], ["features"]),
        ("    - linear: {from: |", ["x", "input"], ["dim"]),
        ("    - linear: {from: [x, |]}", ["x", "input"], ["dim"]),
        ("    - gate: {by: x, activation: |", ["silu"], ["dim"]),
        ("    - linear: {features: 3, bias: |", ["true", "false"], ["dim"]),
        ("    - linear: {from: input, features: wide, share: |", ["first"], ["x"]),
        ("    - linear: {features: 3, share: |", [], ["first"]),
        ("    - linear: {features: 3, init: {|", ["weight", "bias"], ["features"]),
        ("    - linear: {features: 3, init: {weight: |", ["zeros"], ["weight"]),
        ("    - linear: {features: 3, as: {a: |", ["dim", "wide"], ["x"]),
        ("    - mine: {|", ["width", "other", "inner"], ["features", "init"]),
        ("    - mine: {other: |", ["x", "input"], ["dim"]),
        ("    - mine: {width: 3, other: x, inner: [{linear: {from: |", ["input"], ["x", "m"]),
        ("    - mine: {width: 3, other: x, inner: [|", ["prenorm"], ["inner"]),
        ("    - repeat: {times: 2, steps: [{linear: {features: |", ["dim", "act", "wide", "layer"], ["x"]),
        ("    - repeat: {times: |", ["dim"], ["layer"]),
        ("    - silu\nexpect: {|", ["params"], ["model"]),
        ("    - silu\nexpect:\n  |", ["params"], ["model"]),
        ("    - silu\n|", ["about", "needs"], ["model", "use"]),
        ("    - silu\n  outputs: [|", ["x"], ["dim", "input"]),
        ("    - silu\n  outputs: {a: |", [], ["x"]),
        ("    - dropout: |", [], ["dim", "wide"]),
        ("    - mine: {width: 8, |}", ["other", "inner"], ["share"]),
        ("    - # |", [], ["linear"]),
    ],
)
def test_completion_knows_what_may_be_written(tail: str, first: list[str], never: list[str]) -> None:
    found = labels(tail)
    assert [label for label in found if label in first] == [label for label in first if label != "act"]
    assert found[:1] == first[:1] or not first
    assert not {*found} & {*never}


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("seqblocks: 1\nuse: [|", "attention"),
        ("seqblocks: 1\nmodel:\n  input: {|", "tokens"),
        ("seqblocks: 1\nmodel: {|", "about"),
        ("seqblocks: 1\nblocks:\n  a:\n    |", "about"),
        ("seqblocks: 1\nblocks: {a: {args: {b: |", "int"),
        ("seqblocks: 1\nblocks: {a: {args: {b: {|", "type"),
        ("seqblocks: 1\nblocks: {a: {args: {b: {type: |", "int"),
        ("seqblocks: 1\nlet: {a: 1, b: |", "a"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: int, c: wire}\n    steps:\n      - linear: {features: |", "b"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: int, c: wire}\n    steps:\n      - linear: {from: |", "c"),
        ("seqblocks: 1\nblocks:\n  a:\n    args: {b: steps}\n    steps:\n      - |", "b"),
    ],
)
def test_completion_outside_of_the_steps_of_a_model(text: str, first: str) -> None:
    assert labels(text, "")[:1] == [first]


LAYERS = """\
seqblocks: 1
let: {dim: 8, depth: 3}
blocks:
  mixer:
    args: {wide: int}
    outputs: [inside]
    steps: [{linear: {features: wide, as: inside}}, silu]
model:
  input: {features: dim}
  steps:
    - repeat:
        name: towers
        times: depth
        steps:
          - residual:
              as: out
              steps:
                - linear: {features: dim, as: v}
                - each: {axis: features, steps: [{silu: {as: hidden}}]}
                - calc: {twice: a * v, learned: {a: 2}}
          - add: {with: HERE}
    - aside: [{silu: {from: towers.0.out, as: early}}]
    - mixer: {wide: dim, name: mixed}
    - add: {with: THERE}
"""


@pytest.mark.parametrize(
    ("here", "word", "expected", "never"),
    [
        (True, "layers.|", "0.out or input", "0.hidden"),
        (True, '"layers[|"', "-1].v or input", "-1].hidden"),
        (True, "layers[|", '-1].v or input"', "-1].v"),  # quotes are added
        (True, '"layers[-1].|"', "twice or input", "hidden"),
        (True, '"layers[-1].v| or input"', "v", "v or input"),
        (True, "layers.0.v| or out", "v", "v or input"),
        (True, '"layers[max(depth, |"', "layer", "v"),
        (True, "towers.|", "out", "0.out"),  # the repeat is not finished
        (False, "towers.|", "0.v", "0.v or input"),
        (False, '"towers[-1].|"', "out", "out or input"),
        (False, "|", "mixed.inside", "inside"),
        (False, "|", "early", "v"),
    ],
)
def test_wires_of_layers(here: bool, word: str, expected: str, never: str) -> None:
    """What is offered may be written: it gives no fault, but where the reference is not finished."""
    good = re.sub(r"\bTHERE\b" if here else r"\bHERE\b", "input", LAYERS)
    at = good.index("HERE" if here else "THERE") + word.index("|")
    text = re.sub("T?HERE", word.replace("|", ""), good)
    now = opened(text, before=opened(re.sub("T?HERE", "input", good)))
    found = complete(now, now.lines.spot_at(at))
    assert found
    texts = [each.text for each in found.items]
    assert expected in texts
    assert never not in texts
    for each in found.items if "(" not in word else ():
        if each.kind == "wire":
            edits = [Edit(found.span, each.text), *([Edit(*each.more)] if each.more else [])]
            assert opened(applied(text, edits)).analysis.ok, applied(text, edits)


@pytest.mark.parametrize(
    ("step", "expected", "never"),
    [
        ("calc: {y: sigmoid(x), z: |, learned: {lam: 1}}", ["y", "lam", "first", "x", "tanh"], ["z", "silu"]),
        ("calc: |", ["x", "first"], ["input"]),
        ("calc: {y: x, learned: {lam: |}}", ["zeros", "dim"], ["first"]),
        ("cell: {state: {s: |}, steps: [identity]}", ["dim"], ["s"]),
        ("cell: {state: {s: 8}, steps: [{calc: {s: |}}]}", ["s", "x"], []),
        ("each: {axis: features, steps: [{silu: {from: |}}]}", ["input", "first"], ["a"]),
        ("parallel: {branches: [{a: [silu]}, {b: [{silu: {from: |}}]}]}", ["first", "input"], ["a"]),
    ],
)
def test_what_steps_with_steps_and_formulas_can_read(step: str, expected: list[str], never: list[str]) -> None:
    head = "seqblocks: 1\nlet: {dim: 8}\nmodel:\n  input: {features: dim}\n  steps:\n    - silu: {as: first}\n"
    found = labels(f"    - {step}\n", head)
    assert {*expected} <= {*found}
    assert not {*never} & {*found}


def test_a_verb_brings_its_required_arguments_and_its_braces() -> None:
    by_label = {item.label: item for item in items("    - |")}
    assert by_label["linear"].text == "linear: {features: $1}"
    assert by_label["silu"].text == "silu"
    assert by_label["mine"].text == "mine: {width: $1, other: $2, inner: [$3]}"
    assert by_label["residual"].text == "residual: {steps: [$1]}"
    in_list = {item.label: item for item in items("    - residual: [|")}
    assert in_list["linear"].text == "{linear: {features: $1}}"
    before_colon = {item.label: item for item in items("    - lin|: {features: 3}")}
    assert before_colon["linear"].text == "linear"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("use: [prenorm]\n", "use: [prenorm, mamba]\n"),
        ("use:\n  - prenorm\n", "use:\n  - prenorm\n  - mamba\n"),
        ("", "use: [mamba]\n"),
    ],
)
def test_a_bundled_block_is_added_to_the_used_files(use: str, expected: str) -> None:
    head = f"seqblocks: 1\n{use}model:\n  input: {{features: 8}}\n  steps:\n"
    item = next(each for each in items("    - |", head) if each.label == "mamba_mixer")
    assert item.more is not None
    span, text = item.more
    lines = Lines(head)
    at = lines.offset_of(Spot(*starts(span)))
    done = head[:at] + text + head[at:]
    assert done == head.replace(f"seqblocks: 1\n{use}", f"seqblocks: 1\n{expected}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("cut", ["whole", "half", "line"])
def test_every_word_of_bundled_files_is_offered_again(name: str, cut: str) -> None:
    """Delete a word, half of it, or half of it with the rest of its line: it is among the completions."""
    path = bundled()[name]
    good = opened(path.read_text("utf-8"), path)
    references = [*good.own_references.items()]
    for span, reference in random.Random(name + cut).sample(references, min(5, len(references))):
        start = good.lines.offset_of(Spot(*starts(span)))
        end = good.lines.offset_of(Spot(*ends(span)))
        at = start if cut == "whole" else start + max((end - start) // 2, 1)
        rest = good.text.index("\n", end) if cut == "line" else end
        now = opened(good.text[:at] + good.text[rest:], path, good)
        found = complete(now, now.lines.spot_at(at))
        assert found is not None, (span, reference)
        assert reference.name in [item.label for item in found.items], (span, reference)


def test_a_second_step_of_a_verb_gets_a_name() -> None:
    head = f"{HEAD}    - linear: 8\n    - rms_norm\n    - silu\n    - mine: {{width: 8, other: x, inner: [silu]}}\n"
    found = {item.label: item.text for item in items("    - |", head)}
    assert found["linear"] == "linear: {name: linear_2, features: $1}"
    assert found["rms_norm"] == "rms_norm: {name: rms_norm_2}"
    assert found["mine"] == "mine: {name: mine_2, width: $1, other: $2, inner: [$3]}"
    assert found["silu"] == "silu"  # it has no parameters


def test_an_infinite_number_is_offered_for_no_whole_one() -> None:
    """It has no int: the request failed."""
    head = "seqblocks: 1\nlet: {most: .inf, none: .nan, dim: 4}\nmodel:\n  input: {features: dim}\n  steps:\n"
    found = labels("    - linear: {features: |", head + "    - silu\n")
    assert [name for name in found if name in ("most", "none", "dim")] == ["dim"]
