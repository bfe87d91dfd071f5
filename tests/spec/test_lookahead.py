"""Lookahead of each output and the step that causes it; unused steps."""

from __future__ import annotations

import random
import re

import pytest

from seqblocks.analysis import check
from seqblocks.analysis.passes import lookahead
from seqblocks.descriptions import listing
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import Diagnostic, SpecError
from tests.sampled import slow


def ahead(steps: str, input: str = "{features: 8}") -> tuple[int | str | None, str | None]:
    text = f"seqblocks: 1\nmodel: {{input: {input}, steps: [{steps}]}}\n"
    _, model = check.load_text(text)
    assert model
    found = lookahead.find(model)
    if found is None:
        return None, None
    return lookahead.shown(found.tokens), found.first and found.first[0]


DOWN, UP = "{downsample: {factor: %d, name: down%s}}", "{upsample: {factor: %d, name: up%s}}"
CONV, TURNED = "{conv1d: {features: 8, kernel: %s}}", "{conv_transpose1d: {features: 8, kernel: %s}}"
CENTRED = "{conv1d: {features: 8, kernel: 3, causal: false, name: conv%s}}"
ATTENTION = "{attention: {q: input, k: input, v: input, heads: 2%s}}"
HOURGLASS = f"{DOWN % (4, '')}, {UP % (4, '')}"


@pytest.mark.parametrize(
    ("steps", "expected", "first"),
    [
        ("silu", 0, None),
        ("{causal_conv: {kernel: 9}}", 0, None),
        (HOURGLASS, 3, "down"),
        (DOWN % (4, ""), 3, "down"),
        ("{downsample: {factor: 4, method: last}}", 3, "downsample"),
        (f"{DOWN % (4, 1)}, {DOWN % (4, 2)}, {UP % (16, '')}", 15, "down1"),
        (f"{DOWN % (4, 1)}, {{causal_conv: {{kernel: 3}}}}, {UP % (4, '')}", 3, "down1"),
        # Windows that end at the same token add no lookahead to one another; others do.
        (f"{{repeat: {{times: 3, steps: [{{residual: {{steps: [{HOURGLASS}]}}}}]}}}}", 3, "repeat.0.residual.down"),
        (f"{HOURGLASS}, {DOWN % (8, 2)}, {UP % (8, 2)}", 7, "down"),
        (f"{HOURGLASS}, {DOWN % (6, 2)}, {UP % (6, 2)}", 8, "down"),
        # The lookahead is at most the rest of a frame that contains whole windows of all sizes.
        (f"{DOWN % (3, 1)}, {UP % (3, 1)}, {DOWN % (2, 2)}, {DOWN % (3, 3)}", 5, "down1"),
        (f"{DOWN % (3, 1)}, {UP % (3, 1)}, {DOWN % (2, 2)}", 3, "down1"),
        # A token past the end of a frame reads all of the next frame.
        (f"{CENTRED % 1}, {HOURGLASS}, {CENTRED % 2}, {DOWN % (4, 2)}, {UP % (4, 2)}", 8, "conv1"),
        # Joins, sums and merges have the lookahead of their farthest input.
        (f"{{residual: {{steps: [{HOURGLASS}]}}}}", 3, "residual.down"),
        (f"{{parallel: {{branches: [{{a: [silu]}}, {{b: [{HOURGLASS}]}}]}}}}", 3, "parallel.b.down"),
        (f"{HOURGLASS}, {{linear: {{from: input, features: 8}}}}", 0, None),
        (f"{HOURGLASS}, {{linear: {{from: [up, input], features: 8}}}}".replace("name: up", "as: up"), 3, "down"),
        # A strided convolution looks ahead within its frame, and a centred window also to the tokens after it.
        (f"{CONV % '8, stride: 4'}", 3, "conv1d"),
        (f"{CONV % '8, stride: 4'}, {TURNED % '8, stride: 4'}", 3, "conv1d"),
        (f"{CONV % '9, dilation: 3'}", 0, None),
        (f"{CONV % '9, dilation: 3, causal: false'}", 12, "conv1d"),
        (f"{CONV % '3, stride: 2, causal: false'}", 1, "conv1d"),
        (f"{CONV % '10, stride: 5, causal: false'}", 6, "conv1d"),
        (f"{DOWN % (4, '')}, {CONV % '3, stride: 2'}, {TURNED % '4, stride: 8'}", 7, "down"),
        (f"{DOWN % (4, '')}, {TURNED % '8, stride: 4, causal: false'}", 5, "down"),
        # A shift reads earlier tokens, so what looks ahead before it may look ahead less, or not at all.
        ("{shift: 2}", 0, None),
        (f"{HOURGLASS}, {{shift: 2}}", 1, "down"),
        (f"{HOURGLASS}, {{shift: 4}}", 0, None),
        (f"{DOWN % (4, '')}, {{shift: 1}}, {UP % (4, '')}", 0, None),
        (f"{{residual: [{HOURGLASS}, {{shift: 4}}]}}, {{causal_conv: {{kernel: 3}}}}", 0, None),
        (f"{{shift: 2}}, {CONV % '9, dilation: 3, causal: false'}", 10, "conv1d"),
        (f"{{shift: 20}}, {CONV % '9, dilation: 3, causal: false'}", 0, None),
        (f"{{residual: [{HOURGLASS}, {{shift: 4}}]}}, {DOWN % (4, 'more')}, {UP % (4, 'more')}", 3, "downmore"),
        (f"{DOWN % (3, 1)}, {UP % (3, 1)}, {{shift: 3}}, {DOWN % (2, 2)}, {UP % (2, 2)}", 0, None),
        # A scan in reverse turns the tokens that an op reads before its own into later ones, and the reverse.
        ("{scan: {order: reverse, steps: [{shift: 1}]}}", 1, "scan"),
        ("{scan: {order: reverse, steps: [{shift: 2}, token_shift]}}", 3, "scan"),
        ("{scan: {order: reverse, steps: [{shift: 2}]}}, {shift: {by: 2, name: back}}", 0, None),
        ("{scan: {order: [forward, reverse], steps: [{shift: 2}]}}", 2, "scan"),
        ("{residual: [{scan: {order: reverse, steps: [{residual: [{shift: 2}]}]}}, {shift: 5}]}", 0, None),
        (f"{HOURGLASS}, {{scan: {{order: reverse, steps: [{{shift: 9}}]}}}}", 12, "down"),
        (f"{DOWN % (4, '')}, {{scan: {{order: reverse, steps: [{{shift: 1}}]}}}}", 7, "down"),
        (f"{{scan: {{order: reverse, steps: [{CONV % '5, dilation: 2'}]}}}}", 8, "scan"),
        (f"{{scan: {{order: reverse, steps: [{CONV % '6, causal: false'}]}}}}", 3, "scan"),
        (f"{{scan: {{order: reverse, steps: [{CONV % '6, causal: false'}, {{shift: 1}}]}}}}", 4, "scan"),
        (f"{{scan: {{order: reverse, steps: [{HOURGLASS}]}}}}", "all", "scan"),
        (f"{{scan: {{order: reverse, steps: [{ATTENTION % ', window: 5'}]}}}}", 4, "scan"),
        (f"{{scan: {{order: reverse, steps: [{ATTENTION % ''}]}}}}", "all", "scan"),
        ("{scan: {order: reverse, steps: [{rearrange: {pattern: 't (a b) -> t (b a)', a: 2}}]}}", 0, None),
        ("{shift: {by: 1, as: s}}, {scan: {order: reverse, steps: [{shift: 3}, {add: {with: s}}]}}", 2, "scan"),
        # attention
        ("{attention: {q: input, k: input, v: input, heads: 2}}", 0, None),
        ("{attention: {q: input, k: input, v: input, heads: 2, causal: false}}", "all", "attention"),
        ("{attention: {q: input, k: input, v: input, heads: 2, causal: false, window: 5}}", 4, "attention"),
        # other orders
        ("{scan: {order: reverse, steps: [silu, {linear: {features: 8}}]}}", 0, None),
        ("{scan: {order: reverse, steps: [causal_conv]}}", 3, "scan"),
        ("{scan: {order: reverse, steps: [{position_embed: {length: 9}}]}}", "all", "scan"),
        ("{scan: {order: [forward, reverse], steps: [causal_conv]}}", 3, "scan"),
        ("{causal_conv: {}}, {scan: {order: reverse, steps: [silu]}}", 0, None),
        (f"{HOURGLASS}, {{scan: {{order: reverse, steps: [silu]}}}}", 3, "down"),
        (f"{HOURGLASS}, {{scan: {{order: reverse, steps: [causal_conv]}}}}", 6, "down"),
        ("{scan: {order: reverse, steps: [{scan: {steps: [causal_conv]}}]}}", 3, "scan"),
        ("{scan: {order: reverse, steps: [{scan: {order: reverse, steps: [causal_conv]}}]}}", 0, None),
        ("{causal_conv: {as: c}}, {scan: {order: reverse, steps: [{gate: {by: c}}]}}", 0, None),
    ],
)
def test_the_lookahead_and_the_step_that_causes_it(steps: str, expected: int | str, first: str | None) -> None:
    assert ahead(steps) == (expected, first)


def read_by_chain(chance: random.Random) -> tuple[str, int]:
    """Return random steps that change the rate or read other tokens, and the lookahead found by running them.

    A token is represented by the last token of the input that it depends on.
    """
    length, steps = 144, list[str]()
    last, beginning = list(range(length)), -length
    for at in range(chance.randint(4, 9)):
        n, by = len(last), chance.randint(2, 4)
        verb = chance.choice(["down and up", "down", "up", "shift", "ahead", "centred"])
        if "down" in verb and n % by == 0 and n // by >= 6:
            steps.append(DOWN % (by, at))
            last = [max(last[j : j + by]) for j in range(0, n, by)]
        if (verb == "up" and n * by <= 2 * length) or (verb == "down and up" and len(last) < n):
            steps.append(UP % (by, at))
            last = [each for each in last for _ in range(by)]
        if verb == "shift":
            steps.append(f"{{shift: {by}}}")
            last = [beginning] * by + last[:-by]
        if verb == "ahead":
            steps.append(f"{{scan: {{order: reverse, steps: [{{shift: {by}}}]}}}}")
            last = last[by:] + [beginning] * by
        if verb == "centred":
            steps.append(CENTRED % at)
            last = [max(last[max(j - 1, 0) : j + 2]) for j in range(n)]
    ahead = max(each - position * length // len(last) for position, each in enumerate(last))
    return ", ".join(steps), max(ahead, 0)


@pytest.mark.parametrize("part", [0, slow(1)])
def test_no_chain_of_steps_looks_further_ahead(part: int) -> None:
    """The lookahead is at least what the steps read, and mostly that."""
    found = []
    for seed in range(40 * part, 40 * (part + 1)):
        steps, read = read_by_chain(random.Random(seed))
        tokens, _ = ahead(steps or "silu", "{features: 8, length: 144}")
        assert isinstance(tokens, int)
        assert read <= tokens, steps
        found.append(read == tokens)
    assert sum(found) >= 28  # of 40: 89 % of 1,600 chains


def test_the_orders_of_a_grid() -> None:
    grid = "{features: 8, grid: [2, 3]}"
    for order, expected in (("rows", 0), ("columns", "all"), ("rows_reverse", 3), ("[rows, columns]", "all")):
        assert ahead(f"{{scan: {{order: {order}, steps: [causal_conv]}}}}", grid)[0] == expected
    assert ahead("conv2d", grid) == ("all", "conv2d")


@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")  # a choice has no gradient
def test_steps_of_choose_that_read_a_context() -> None:
    """A context is computed from no token: attention to all of it looks ahead no further inside choose."""
    attend = "{cross_attention: {q: input, k: memory, v: memory, heads: 2}}"
    score = "{linear: {from: %s, features: 1, as: score}}, {learned_tokens: {count: 3, features: 8, as: memory}}"
    choose = f"{score}, {{choose: {{from: %s, by: score, above: 0, steps: [{attend}%s]}}}}"
    assert ahead(choose % ("input", "input", "")) == (0, None)
    assert ahead(f"{HOURGLASS}, {{identity: {{as: h}}}}, {choose % ('h', 'h', '')}") == (3, "down")
    later = f", {CONV % '3, causal: false'}"  # the next chosen token may be any later one
    assert ahead(choose % ("input", "input", later)) == ("all", "choose")


def test_a_vector_and_an_image_have_none() -> None:
    assert ahead("{pool: {mode: last}}") == (None, None)
    assert ahead("{patch_embed: {patch: 2, features: 8}}", "{image: {size: 4}}") == (None, None)


def test_a_shared_body_is_counted_in_each_place() -> None:
    """The body is lowered once. It is causal in the first layer and follows a window in the second."""
    text = (
        "seqblocks: 1\nuse: [xlstm]\nmodel: {input: {features: 8}, steps: [\n"
        "{mlstm_block: {dim: 8, heads: 2, name: a}},\n"
        f"{HOURGLASS},\n"
        "{mlstm_block: {dim: 8, heads: 2, name: b}}]}\n"
    )
    _, model = check.load_text(text)
    assert model
    found = summarise(model)
    assert (found.lookahead, found.future) == (3, "down (<text>:5:2)")
    assert found.as_data()["lookahead"] == 3


def test_a_block_is_named_where_its_lookahead_enters() -> None:
    """`b` and `c` read equal inputs, because a shift undoes the lookahead before each: only that of `c` remains."""
    uses = ", {shift: {by: 1}}, ".join(f"{{look: {{name: {name}}}}}" for name in "abc")
    blocks = f"{{look: {{steps: [{CONV % '3, causal: false'}]}}}}"
    _, model = check.load_text(f"seqblocks: 1\nblocks: {blocks}\nmodel: {{input: {{features: 8}}, steps: [{uses}]}}\n")
    assert model
    found = lookahead.find(model)
    assert found
    assert found.first
    assert (found.tokens, found.first[0]) == (1, "c.conv1d")


@pytest.mark.parametrize("name", ["ttt_small", slow("centaurus_denoiser"), slow("jamba_small"), slow("nemotron_h_4b")])
def test_layers_with_equal_inputs_have_equal_lookahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result for one layer, used again for the others, is that of computing each."""
    model = check.load_model(name)
    found = lookahead.of_outputs(model)
    monkeypatch.setattr(lookahead, "_block", lookahead._run)
    assert lookahead.of_outputs(model) == found


def test_bundled_models() -> None:
    expected = {"centaurus_denoiser": 15, "mlstm_small": 0, "hybrid_small": 0, "vil_small_block": 0, "vil_tiny": None}
    for name, expected_tokens in expected.items():
        assert summarise(check.load_model(name)).lookahead == expected_tokens


def test_the_listing_shows_the_lookahead_of_each_wire() -> None:
    """It is listed where it is not 0, separately for each place of a shared body. Vectors have none."""
    steps = f"{{mlstm_block: {{dim: 8, heads: 2, name: a}}}}, {HOURGLASS}, {{mlstm_block: {{dim: 8, heads: 2}}}}"
    reverse = "{scan: {order: reverse, steps: [causal_conv]}}, {pool: {mode: mean}}"
    text = f"seqblocks: 1\nuse: [xlstm]\nmodel: {{input: {{features: 8}}, steps: [{steps}, {reverse}]}}\n"
    lines = listing.text(check.load_text(text)[1]).splitlines()
    found = [re.fullmatch(r"( +)%\d+ = (\w+).*?(?:, lookahead (\w+))?", line) for line in lines]
    outer = [(step[2], step[3]) for step in found if step and len(step[1]) == 2]
    assert outer == [("a", None), ("down", "3"), ("up", "3"), ("mlstm_block", "3"), ("scan", "6"), ("pool", None)]
    (first, second) = [step[3] for step in found if step and step[2] == "mlstm"]
    assert (first, second) == (None, "3")


def test_the_listing_of_a_model_of_images_shows_none() -> None:
    assert "lookahead" not in listing.text(check.load_model("vil_tiny"))


@pytest.mark.parametrize(
    ("steps", "expect", "found"),
    [
        (HOURGLASS, "0", "3"),
        (HOURGLASS, "all", "3"),
        ("{scan: {order: reverse, steps: [causal_conv]}}", "0", "3"),
        ("{scan: {order: reverse, steps: [{position_embed: {length: 9}}]}}", "0", "all"),
        ("{pool: {mode: last}}", "0", "none: the output is [batch, 8]"),
    ],
)
def test_an_expectation_that_is_not_met(steps: str, expect: str, found: str) -> None:
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{steps}]}}\nexpect: {{lookahead: %s}}\n"
    with pytest.raises(SpecError) as caught:
        check.load_text(text % expect)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.found) == ("E705", found)
    if not found.startswith("none"):
        check.load_text(text % found)


# --- several outputs

HEADS = """
seqblocks: 1
model:
  input: {tokens: 16}
  steps:
    - embed: {features: 8, as: h}
    - unembed: {as: logits}
    - scan: {from: h, order: reverse, steps: [{shift: 1}], as: next}
    - add: {with: h}
    - unembed: {name: second, as: mtp}
    - pool: {from: h, mode: last, as: value}
  outputs: [logits, mtp, value]
"""


def test_each_output_has_a_lookahead() -> None:
    _, model = check.load_text(HEADS + "expect: {lookahead: {logits: 0, mtp: 1}}")
    assert model
    assert {name: each.tokens for name, each in lookahead.of_outputs(model).items()} == {"logits": 0, "mtp": 1}
    found = summarise(model)
    assert (found.lookahead, found.lookaheads) == (1, {"logits": 0, "mtp": 1})
    assert found.future is not None
    assert found.future.startswith("next (")
    check.load_text(HEADS + "expect: {lookahead: 1}")  # the most of all outputs


@pytest.mark.parametrize(
    ("expect", "code", "message", "found"),
    [
        ("{logits: 1}", "E705", "lookahead of `logits` differs", "0"),
        ("{logits: 0, mtp: all}", "E705", "lookahead of `mtp` differs", "1"),
        ("{value: 0}", "E705", "lookahead of `value` differs", "none: the output is [batch, 8]"),
        ("{logit: 0}", "E201", "unknown key", None),
        ("{mtp: many}", "E303", "unknown name", None),
        ("[0, 1]", "E203", "number", "a list"),
    ],
)
def test_an_expectation_of_one_output(expect: str, code: str, message: str, found: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text(f"{HEADS}expect: {{lookahead: {expect}}}")
    first = caught.value.diagnostics[0]
    assert (first.code, first.found) == (code, found)
    assert message in first.message


def test_outputs_without_names_have_no_lookahead_each() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [silu]}\nexpect: {lookahead: {logits: 0}}"
    with pytest.raises(SpecError, match="the outputs of this model have no names") as caught:
        check.load_text(text)
    assert [each.code for each in caught.value.diagnostics] == ["E203"]


@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")
def test_a_warning_names_the_outputs_that_look_ahead() -> None:
    again = "    - unembed: {name: third, from: next, as: again}\n  outputs"
    text = HEADS.replace("  outputs", again)
    _, model = check.load_text(text.replace("value]", "value, again]"))
    assert model
    ((message, hint),) = [(each.message, each.hint) for each in model.warnings]
    assert message.endswith("from here on, `mtp`, `again` depend on 1 later token")
    assert hint is not None
    assert hint.endswith("`expect: {lookahead: {mtp: 1, again: 1}}`")
    declared = "expect: {lookahead: {again: 1}}"
    _, model = check.load_text(text.replace("value]", "value, again]") + declared)
    assert model
    (warning,) = model.warnings
    assert warning.message.endswith("from here on, `mtp` depends on 1 later token")
    _, model = check.load_text(text.replace("value]", "value, again]") + declared.replace("again", "mtp: 1, again"))
    assert model
    assert not model.warnings


# --- steps that nothing uses


def unused(text: str) -> list[str]:
    found: tuple[Diagnostic, ...] = ()
    try:
        check.load_text("seqblocks: 1\n" + text)
    except SpecError as error:
        found = error.diagnostics
    assert {d.code for d in found} <= {"E315"}
    return [d.message.removeprefix("the output of ").partition(" is unused:")[0] for d in found]


@pytest.mark.filterwarnings("ignore::seqblocks.SpecWarning")
@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("{linear: {features: 8}}, {silu: {from: input}}", ["linear"]),
        ("{silu: {as: a}}, {relu: {from: input}}", []),  # has no parameters
        ("{linear: {features: 8}}, {silu: {as: a}}, {relu: {from: input}}", ["linear"]),
        ("{linear: {features: 8, name: a}}, {linear: {features: 8, name: b}}, {relu: {from: input}}", ["linear 'b'"]),
        ("{linear: {features: 8, as: [a, b]}}, {silu: {from: b}}", []),
        ("A, {residual: {from: input, steps: [{gate: {by: a}}]}}", []),
        ("A, {residual: {from: input, steps: [{gate: {by: a, as: c}}, {silu: {from: input}}]}}",
         ["linear 'a'"]),
        ("A, {scan: {from: input, order: reverse, steps: [{gate: {by: a}}]}}", []),
        ("A, {parallel: {from: input, branches: [{x: []}, {y: [{silu: {from: a}}]}]}}", []),
        ("{repeat: {times: 3, steps: [{linear: {features: 8}}]}}, {silu: {from: input}}", ["repeat"]),
        ("A, {repeat: {times: 2, steps: [{linear: {features: 8, from: a}}]}}", ["linear"]),
        ("A, {repeat: {from: input, times: 2, steps: [{gate: {by: a}}]}}", []),
        ("A, {constant: {features: 8}}", ["linear 'a'"]),  # reads only the number of tokens
        ("A, {constant: {features: 8, as: c}}, {gate: {from: a, by: c}}", []),
        # A step that a tie names is used. Steps that only lead to that step are still unused.
        ("A, {linear: {from: input, features: 8, tie: a}}", []),
        ("A, {linear: {features: 8, as: b}}, {linear: {from: input, features: 8, tie: b}}",
         ["linear 'a'"]),
        ("A, {linear: {features: 8, tie: a, as: b}}, {silu: {from: input}}", ["linear 'a'"]),
    ],
)
def test_unused_steps(steps: str, found: list[str]) -> None:
    steps = steps.replace("A, ", "{linear: {features: 8, as: a}}, ")
    assert unused(f"model: {{input: {{features: 8}}, steps: [{steps}]}}\n") == found


BLOCK = """
blocks:
  unit:
    args: {other: wire, order: forward}
    steps: [{scan: {order: order, steps: [causal_conv]}}, %s]
model:
  input: {features: 8}
  steps:
    - linear: {features: 8, as: a}
    - unit: {from: input, other: a}
    - unit: {other: a, name: again}
"""


def test_a_port_is_used_if_the_block_reads_it() -> None:
    assert unused(BLOCK % "{gate: {by: other}}") == []
    assert unused(BLOCK % "silu") == ["linear 'a'"]
    assert unused(BLOCK % "{gate: {from: other, by: other}}") == ["scan", "unit"]


def test_an_unused_block_is_checked_too() -> None:
    text = """
blocks:
  unit:
    args: {dim: int, order: word}
    steps: [{linear: {features: dim, as: a}}, {layer_norm: {gain: none, bias: false, as: b}}, {silu: {from: input}}]
  unknown:
    args: {dim: int, order: word}
    steps: [{linear: {features: dim, as: a}}, {scan: {order: order, from: input, steps: [{gate: {by: a}}]}}]
model: {input: {features: 8}, steps: [silu]}
"""
    assert unused(text) == ["linear 'a'"]


def test_other_errors_suppress_unused_steps() -> None:
    """Other errors suppress the report of unused steps, since a misspelt name may be meant to use the step."""
    text = "model: {input: {features: 8}, steps: [{linear: {features: 8, as: wide}}, {silu: {from: wied}}]}\n"
    with pytest.raises(SpecError) as caught:
        check.load_text("seqblocks: 1\n" + text)
    assert [d.code for d in caught.value.diagnostics] == ["E302"]
