"""The editor schema: no diagnostics for correct files, the right one for a typo, useful completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from seqblocks.analysis import check
from seqblocks.descriptions.schema import schema
from seqblocks.errors import Report, Source
from seqblocks.language.document import parse, plain
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled
from tests.spec import language_server

NAMES = sorted(bundled())
MINE = """seqblocks: 1
use: [vil]
let: {dim: 16, act: silu}
blocks:
  bare: {steps: [silu]}
  short: {args: {width: int}, steps: [{linear: width}]}
  around: {args: {inner: steps, after: [silu]}, steps: [{inner: {name: first}}, after]}
  mine:
    args: {width: int, order: forward, other: wire, on_or_off: true}
    let: {twice: 2 * width}
    steps:
      - scan:
          order: order
          steps:
            - linear: {features: twice, bias: on_or_off, as: [u, z], init: {weight: zeros}}
            - gate: {from: u, by: z, activation: act}
            - proj_down: {features: width}
model:
  input: {features: dim, grid: [2, 4]}
  steps:
    - bare
    - dropout: 0.2
    - linear: {features: "round_up(dim, 8)", as: a}
    - calc: {halved: "x * s / 2", tuned: "max(halved, 0)", learned: {s: 1}}
    - calc: tanh(x) * 2
    - aside: [{tanh: {as: side}}]
    - aside: {from: side, when: true, steps: [{softmax: {as: shares}}]}
    - aside: [{constant: {features: dim, learned: false, formula: 1 / (1 + feature), as: rates}}]
    - mine: {width: dim, other: a, order: [forward, reverse]}
    - repeat:
        name: blocks
        as: deep
        pattern: m*2 s
        times: 2
        m: [{vil: {dim: dim}}]
        s:
          - conv2d
          - parallel: {merge: concat, branches: [{x: [silu]}, {y: [gelu]}]}
          - proj_down: {features: dim}
    - linear: {from: [a, deep], features: 8, name: first}
    - linear: {from: [a, deep], features: 8, tie: first}
    - linear: {features: 8, name: owner}
    - linear: {features: 8, share: owner, name: user}
    - repeat: {times: 2, share: all, name: same, steps: [{vil: {dim: 8, name: x}}, {vil: {dim: 8, share: x}}]}
    - repeat: {times: 2, share: [linear.bias], name: partly, steps: [{linear: 8}]}
    - repeat: {times: 2, share: partly, name: likewise, steps: [{linear: 8}]}
    - residual: [layer_norm, {linear: 8}]
    - parallel: [{one: [silu]}, {two: [{proj_down: 2 * 4}]}]
    - repeat: [{short: dim}]
    - experts: {count: 4, top: 1, normalize: false, init: {router.weight: zeros}, steps: [{linear: dim}, gelu]}
    - around: [{linear: {features: dim, bias: false}}]
    - around: {inner: [layer_norm, gelu], name: again}
    - proj_down: {features: 8, name: back}
    - pool: {mode: mean}
expect: {tolerance: 0.1}
"""
SEVERAL = """seqblocks: 1
use: [transformer]
model:
  inputs:
    text: {tokens: 16}
    image: {image: {size: [4, 6], channels: 3}}
    notes: {features: 8, length: 5}
    style: {vector: 8}
  steps:
    - patch_embed: {from: image, patch: 2, features: 8, as: seen}
    - embed: {from: text, features: 8}
    - decoder_block: {dim: 8, memory: seen, heads: 2}
    - cross_attention_layer: {dim: 8, memory: notes, heads: 2}
    - multiply: {by: style}
    - linear: {features: 16, as: [h, g]}
    - cross_attention: {q: h, k: notes, v: notes, heads: 4, kv_heads: 4, scale: 0.1}
    - gate: {by: g, as: last}
    - unembed: {from: last, as: logits}
  outputs: [logits, last]
expect: {output: {logits: [batch, text, 16], last: [batch, text, 8]}}
"""


@pytest.fixture(scope="module")
def general_schema() -> dict[str, Any]:
    return schema()


def validator(made: dict[str, Any]) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="in the test extra")
    return jsonschema.Draft7Validator(made)


@pytest.mark.slow
def test_it_is_a_schema(general_schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="in the test extra")
    jsonschema.Draft7Validator.check_schema(general_schema)


def test_it_describes_arguments_of_blocks(general_schema: dict[str, Any]) -> None:
    assert "rank of dt (0: dim / 16, rounded up)" in str(general_schema)


@pytest.mark.parametrize("name", sampled(NAMES, ci=4, first=1))
def test_bundled_specs_satisfy_both_schemas(name: str, general_schema: dict[str, Any]) -> None:
    file, _ = check.load_spec(name)
    for made in (general_schema, schema(file)):
        assert not list(validator(made).iter_errors(plain(file.root)))


def test_limits_are_exact(general_schema: dict[str, Any]) -> None:
    factor = general_schema["definitions"]["verbs"]["downsample"]["properties"]["factor"]
    assert (factor["minimum"], factor["maximum"]) == (1, 2**20)


@pytest.mark.parametrize("text", [MINE, SEVERAL])
def test_a_file_with_everything_satisfies_both_schemas(text: str, general_schema: dict[str, Any]) -> None:
    file, _ = check.load_text(text)
    for made in (general_schema, schema(file)):
        assert not list(validator(made).iter_errors(plain(file.root)))


TYPOS = {  # text with a typo, the typo, whether only the schema of the file can detect it
    "share: owner": ("share: [owner]", False),
    "share: [linear.bias]": ("share: {linear: bias}", False),
    "features: twice": ("featurs: twice", False),
    "bias: on_or_off": ("bias: yes", False),
    "merge: concat": ("merge: concatt", True),
    "- conv2d": ("- conv3d", True),
    "- gate: {": ("- gaet: {", True),
    "activation: act": ("activation: sillu", True),
    "mine: {width": ("mine: {widht", True),
    "expect: {tolerance": ("expect: {tolerence", False),
    "pool: {mode: mean}": ("pool: {mode: mean, moed: 1}", False),
    "[layer_norm, {linear": ("[layer_nrom, {linear", True),
    "{linear: 8}]": ("{linear: 0}]", False),
    "count: 4, top": ("cuont: 4, top", False),
    "{count: 4": ("{count: 0", False),
    "normalize: false, init": ("normalize: no, init", False),
    "around: [{linear": ("around: [{liner", True),
    "around: {inner": ("around: {iner", True),
    "inner: [layer_norm, gelu]": ("inner: layer_norm", True),
    "steps: [{inner": ("steps: [{innr", True),
}


@pytest.mark.parametrize("right", sampled(TYPOS, every=4, ci=1))
def test_typos_are_flagged(right: str, general_schema: dict[str, Any]) -> None:
    wrong, needs_file = TYPOS[right]
    file, _ = check.load_text(MINE)
    broken = parse(Source.of("typo", MINE.replace(right, wrong)), Report())
    assert broken is not None
    assert list(validator(schema(file)).iter_errors(plain(broken)))
    assert bool(list(validator(general_schema).iter_errors(plain(broken)))) is not needs_file


@pytest.mark.parametrize("word", ["no", "No", "yes", "OFF", "tRUE", "notes", "n", "on_or_off", "no > 2", True])
def test_truth_values_of_yaml_1_1_are_flagged(word: str | bool, general_schema: dict[str, Any]) -> None:
    step = {"linear": {"features": 8, "bias": word, "when": word}}
    found = validator(general_schema).iter_errors(
        {"seqblocks": 1, "model": {"input": {"features": 8}, "steps": [step]}}
    )
    assert len(list(found)) == (2 if word in ("no", "No", "yes", "OFF", "tRUE") else 0)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("inputs:", "inpts:"), ("style: {vector", "style: {vectr"), ("outputs: [logits, last]", "outputs: logits"),
        ("outputs: [logits, last]", "outputs: []"), ("outputs:", "output:"), ("notes: {features", "notes: {width"),
        ("  inputs:", "  input: {features: 8}\n  inputs:"), ("k: notes, v", "k: [notes], v"),
        ("logits: [batch, text, 16]", "logits: 16"),
    ],
)  # fmt: skip
def test_mistakes_about_inputs_and_outputs_are_flagged(
    right: str, wrong: str, general_schema: dict[str, Any]
) -> None:
    file, _ = check.load_text(SEVERAL)
    assert right in SEVERAL
    broken = parse(Source.of("mistake", SEVERAL.replace(right, wrong)), Report())
    assert broken is not None
    for made in (general_schema, schema(file)):
        assert list(validator(made).iter_errors(plain(broken)))


# --- with the real server -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[language_server.Client]:
    path = tmp_path_factory.mktemp("schema") / "schema.json"
    file, _ = check.load_text(MINE)
    path.write_text(json.dumps(schema(file)))
    client = language_server.yaml_client(path)
    yield client
    client.close()


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Iterator[language_server.Client]:
    path = tmp_path_factory.mktemp("schema") / "schema.json"
    path.write_text(json.dumps(schema()))
    client = language_server.yaml_client(path)
    yield client
    client.close()


@pytest.mark.yaml_server
@pytest.mark.parametrize("name", NAMES)
def test_the_server_reports_nothing_for_bundled_specs(name: str, general: language_server.Client) -> None:
    assert general.open(f"file:///specs/{name}.yaml", bundled()[name].read_text(encoding="utf-8")) == []


@pytest.mark.yaml_server
@pytest.mark.parametrize("word", ["no", "No", "yes", "OFF", "tRUE", "'false'"])
def test_the_server_says_what_to_write_for_a_truth_value(word: str, general: language_server.Client) -> None:
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{{linear: {{features: 8, bias: {word}}}}}]}}\n"
    (alarm,) = general.open(f"file:///truth_{word.strip(chr(39))}.yaml", text)
    assert alarm["message"] == "YAML 1.2 has only true and false: write true or false"


@pytest.mark.yaml_server
def test_the_server_reports_nothing_for_a_file_with_everything(
    client: language_server.Client, general: language_server.Client
) -> None:
    assert client.open("file:///mine.yaml", MINE) == []
    assert general.open("file:///mine.yaml", MINE) == []
    assert general.open("file:///several.yaml", SEVERAL) == []


@pytest.mark.yaml_server
@pytest.mark.parametrize("right", TYPOS)
def test_the_server_flags_typos_at_their_position(right: str, client: language_server.Client) -> None:
    wrong = TYPOS[right][0]
    text = MINE.replace(right, wrong)
    alarms = client.open(f"file:///typo{list(TYPOS).index(right)}.yaml", text)
    assert alarms
    line = text[: text.index(wrong)].count("\n")
    assert line in {alarm["range"]["start"]["line"] for alarm in alarms}
    column = text.splitlines()[line].index(wrong)
    assert min(abs(alarm["range"]["start"]["character"] - column) for alarm in alarms) <= len(wrong)


@pytest.mark.yaml_server
@pytest.mark.parametrize(
    ("ending", "offered"),
    [
        ("    - ", {"linear", "residual", "vil", "mine", "bare"}),
        ("    - linear:\n        ", {"features", "bias", "from", "as", "init"}),
        ("    - gate:\n        activation: ", {"silu", "gelu", "sigmoid"}),
        ("    - scan:\n        order: ", {"forward", "reverse", "columns"}),
        ("    - vil:\n        ", {"dim", "order", "heads", "drop_path"}),
    ],
)
def test_the_server_completes(ending: str, offered: set[str], client: language_server.Client) -> None:
    text = "seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n    - silu\n" + ending
    uri = f"file:///complete{abs(hash(ending))}.yaml"
    client.open(uri, text)
    lines = text.split("\n")
    found = client.complete(uri, len(lines) - 1, len(lines[-1]))
    assert offered <= {label.split(" ")[0].rstrip(":") for label in found}, found
