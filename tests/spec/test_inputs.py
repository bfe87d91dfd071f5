"""Several inputs and outputs, without torch: types, costs, state, listings, overrides and expectations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seqblocks import cost
from seqblocks.analysis.check import load_text
from seqblocks.descriptions import listing
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import ExpectationError, SpecError, SpecWarning
from seqblocks.graph import ModelSpec, walk

TEXT = """seqblocks: 1
model:
  inputs:
    words: {tokens: 10}
    image: {image: {size: [4, 6], channels: 3}}
    style: {vector: 5}
  steps:
    - patch_embed: {from: image, patch: 2, features: 8, as: seen}
    - linear: {features: 8, bias: false, as: [k, v]}
    - linear: {from: style, features: 4, as: gain}
    - embed: {from: words, features: 4, as: h}
    - cross_attention: {q: h, k: k, v: v, heads: 2}
    - multiply: {by: gain}
    - linear: {features: 10, as: logits}
    - linear: {from: gain, features: 1, as: value}
  outputs: [logits, value]
"""


def load(text: str = TEXT) -> ModelSpec:
    model = load_text(text)[1]
    assert model
    return model


def test_types_mark_context() -> None:
    model = load()
    assert model.input_text == "words [batch, words], image [batch, 3, 4, 6], style [batch, 5]"
    assert model.output_text == "logits [batch, words, 10], value [batch, 1]"
    once = {node.name: node.kept for node in walk(model.graph) if node.type and node.type.context}
    assert once == {"seen": False, "linear": True, "gain": True, "value": True}


def test_costs_of_a_token_and_of_the_context() -> None:
    found = summarise(load())
    cross, multiply, head = 6 * (4 + 4), 4, 4 * 10
    assert found.macs_per_token == cross + multiply + head
    patches, keys, gain, value = 6 * 12 * 8, 6 * 8 * 8, 5 * 4, 4
    assert found.context_macs == patches + keys + gain + value
    assert summarise(load(), length=7).input_macs == 7 * (cross + multiply + head) + found.context_macs


def test_the_state_counts_what_is_kept() -> None:
    model = load()
    assert cost.count_state(model.graph) == 6 * 8 + 4 + 1
    assert cost.state_bytes(model.graph, "float32") == 4 * (6 * 8 + 4 + 1)
    load(TEXT + "expect: {state_bytes: 212, output: {logits: [batch, words, 10], value: [batch, 1]}, lookahead: 0}")


def test_what_is_shown() -> None:
    lines = listing.text(load()).splitlines()
    inputs = "words %0 tokens [batch, words], image %1 image [batch, 3, 4, 6], style %2 vector [batch, 5]"
    assert lines[0].endswith(f": {inputs}")
    assert any(line.endswith("[batch, 6, 8], once") for line in lines)
    assert any(line.endswith("[batch, 4], once, kept") for line in lines)
    assert lines[-1] == "  return logits=%10, value=%11"


def test_a_context_of_open_length_is_reported_and_not_counted() -> None:
    steps = "[{linear: {from: notes, features: 4, as: k}}, {cross_attention: {q: x, k: k, v: k, heads: 1}}]"
    text = f"seqblocks: 1\nmodel:\n  inputs: {{x: {{features: 4}}, notes: {{features: 3}}}}\n  steps: {steps}\n"
    found = summarise(load(text))
    assert found.macs_per_token is None
    assert found.context_macs is None
    assert found.open_memories == ["notes"]
    assert "length of notes" in found.notes[0]
    with pytest.raises(ExpectationError, match="the length of notes is open"):
        load(text + "expect: {state_bytes: 12}")
    fixed = load(text.replace("{features: 3}", "{features: 3, length: 5}"))
    assert summarise(fixed).macs_per_token == 5 * 8
    assert cost.count_state(fixed.graph) == 20


def test_a_block_is_analysed_separately_for_stream_and_context() -> None:
    text = """seqblocks: 1
blocks: {half: {steps: [{causal_conv: {kernel: 3}}, {linear: 4}]}}
model:
  inputs: {x: {features: 4, length: 6}, m: {features: 4, length: 6}}
  steps:
    - half: {from: m, as: seen}
    - half: {from: x, as: h}
    - cross_attention: {q: h, k: seen, v: seen, heads: 1}
"""
    nodes = [node for node in walk(load(text).graph) if node.verb == "causal_conv"]
    assert [bool(node.state) for node in nodes] == [False, True]


def test_the_last_step_may_have_several_outputs_where_they_have_names() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{linear: {features: 4, as: [a, b]}}], outputs: [b, a]}"
    assert load(text).output_text == "b [batch, seq, 2], a [batch, seq, 2]"
    with pytest.raises(SpecError, match="E313"):
        load(text.replace(", outputs: [b, a]", ""))


def test_wrong_expectations_of_outputs() -> None:
    with pytest.raises(ExpectationError, match="E704"):
        load(TEXT + "expect: {output: {value: [batch, 2]}}")
    with pytest.raises(SpecError, match="unknown key 'vlaue' in output"):
        load(TEXT + "expect: {output: {vlaue: [batch, 1]}}")


def test_language_model_logits_among_several_outputs_produce_a_warning() -> None:
    text = """seqblocks: 1
model:
  input: {tokens: 10}
  steps:
    - embed: {features: 4, as: e}
    - pool: {mode: last, as: p}
    - add: {from: e, with: p}
    - unembed: {as: logits}
    - linear: {from: p, features: 1, as: value}
  outputs: [value, logits]
"""
    with pytest.warns(SpecWarning, match="W903"):
        load(text)


def test_check_as_data(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "seqblocks", "check", "--format", "json", str(path)], capture_output=True, text=True
    )
    (record,) = json.loads(done.stdout)["specs"]
    assert record["output"] == "logits [batch, words, 10], value [batch, 1]"


def test_a_vector_as_the_only_input_is_counted_by_inputs() -> None:
    found = summarise(load("seqblocks: 1\nmodel: {input: {vector: 4}, steps: [{linear: 3}]}"))
    assert (found.input, found.counted_per, found.input_macs) == ("[batch, 4]", "input", 12)
    assert found.streams is not None
    assert "one vector" in found.streams
