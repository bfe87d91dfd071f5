"""`seqblocks.analyse`: what is known of a spec, valid or not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import seqblocks
from seqblocks import graph
from seqblocks.analysis import analyse as module
from seqblocks.analysis import check
from seqblocks.analysis.scope.references import linked
from seqblocks.editor.edits import applied
from seqblocks.editor.fixes import fixes
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.errors import MAX_DIAGNOSTICS, Diagnostic, Span, SpecError
from seqblocks.language.document import Mapping
from seqblocks.language.spec_files import bundled, locate
from tests.sampled import sampled

FAULTS = Path(__file__).parent.parent / "golden" / "faults"
CASES = sorted(path.stem for path in FAULTS.glob("*.yaml") if path.stem != "yaml_not_utf8")  # has no text
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in bundled().items()}
SCHEMA = Path(module.__file__).with_name("graph.schema.json")

SPEC = """\
seqblocks: 1
let: {dim: 8}
model:
  input: {features: dim}
  steps:
    - rms_norm
    - linear: {features: 3 * dim, as: [q, k, v]}
    - linear: {from: q, features: dim, name: back}
    - repeat:
        times: 3
        steps: [{residual: [{linear: dim}, silu]}]
"""


def analysed(path: str) -> seqblocks.Analysis:
    text, name, base = locate(path)
    return seqblocks.analyse(text, name, base)


def inside(span: Span) -> bool:
    """Return whether a span is not empty, begins in its text, and ends there or before the line after it."""
    last = max(1, len(span.source.lines))
    ends = span.end_line <= last or (span.end_line, span.end_column) == (last + 1, 1)
    in_text = 1 <= span.line <= last and span.column >= 1 and ends
    return in_text and (span.line, span.column) < (span.end_line, span.end_column)


@pytest.mark.parametrize("name", sampled(CASES))
def test_the_diagnostics_are_those_of_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FAULTS)
    found = analysed(f"{name}.yaml")
    expected: tuple[Diagnostic, ...]
    try:
        expected = check.check_text(*locate(f"{name}.yaml"))[0].warnings
    except SpecError as error:
        expected = error.diagnostics
    records = [each.as_data() for each in found.diagnostics]
    if len(expected) < MAX_DIAGNOSTICS:
        assert records == [each.as_data() for each in expected]
    else:
        assert all(each.as_data() in records for each in expected)
    assert found.dropped == 0
    assert all(each.type is None or each.type for each in found.steps)


@pytest.mark.parametrize("name", sampled(CASES))
def test_a_suggested_word_has_an_edit_that_removes_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FAULTS)
    text, shown, base = locate(f"{name}.yaml")
    found = seqblocks.analyse(text, shown, base)
    for each in found.diagnostics:
        if each.fix is None or each.fix.span is None or each.fix.span.source.text != text:
            continue
        after = seqblocks.analyse(edited(text, [(each.fix.span, each.fix.text), *each.fix.more]), shown, base)
        assert (each.code, each.message) not in [(other.code, other.message) for other in after.diagnostics]


def test_suggested_words_have_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FAULTS)
    found = [each for name in CASES for each in analysed(f"{name}.yaml").diagnostics if each.span]
    hints = [each for each in found if each.hint and "did you mean '" in each.hint]
    assert len(hints) > 170
    assert [each for each in hints if each.fix is None] == []


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("seqblocks: 1  # of the format\n", "seqblocks: 1  # of the format\nuse: [mamba]\n"),
        ("seqblocks: 1\nuse: []\n", "seqblocks: 1\nuse: [mamba]\n"),
        ("seqblocks: 1\nuse: [prenorm]\n", "seqblocks: 1\nuse: [prenorm, mamba]\n"),
        ("seqblocks: 1\nuse:\n- prenorm\n", "seqblocks: 1\nuse:\n- prenorm\n- mamba\n"),
        ("{seqblocks: 1, ", "{seqblocks: 1, use: [mamba], "),
    ],
)
@pytest.mark.parametrize("verb", ["MambaMixer", "mamba_mixer"])
def test_a_block_of_an_unused_file_has_a_fix_of_two_edits(head: str, expected: str, verb: str) -> None:
    rest = "model: {input: {features: 8}, steps: [{VERB: {dim: 8}}]}" + ("}" if head.startswith("{") else "")
    text = head + rest.replace("VERB", verb)
    (fault,) = seqblocks.analyse(text).diagnostics
    assert fault.fix
    assert fault.fix.span
    changed = edited(text, [(fault.fix.span, fault.fix.text), *fault.fix.more])
    assert changed == expected + rest.replace("VERB", "mamba_mixer")
    assert seqblocks.analyse(changed).ok
    ((span, more),) = fault.fix.more
    assert fault.as_data()["fix"]["more"] == [{"text": more, **span.as_data()}]
    now = Opened(text, None)
    (fix,) = fixes(now, Spot(1, 1), Spot(99, 1))
    assert applied(text, fix.edits) == changed
    assert fix.title == ("Add `use: [mamba]`" if verb == "mamba_mixer" else "Change 'MambaMixer' to 'mamba_mixer'")


def edited(text: str, edits: list[tuple[Span, str]]) -> str:
    lines = text.splitlines(keepends=True)
    for span, word in sorted(edits, key=lambda edit: (edit[0].line, edit[0].column), reverse=True):
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column - 1] + word + line[span.end_column - 1 :]
    return "".join(lines)


@pytest.mark.parametrize("name", sampled(TEXTS, ci=4))
def test_bundled_specs(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="in the test extra")
    found = analysed(name)
    assert found.ok
    assert not found.diagnostics
    jsonschema.validate(json.loads(json.dumps(found.as_data())), json.loads(SCHEMA.read_text(encoding="utf-8")))
    for each in found.references:
        assert each.definition or each.kind == "verb" or each.name == "input"
        assert each.span.text == each.name
        if each.definition and each.kind != "block":  # the router of `experts` has no place of its own
            assert each.definition.text == each.name or (each.name == "router" and each.definition.text == "experts")
    if found.model:
        nodes = sum(1 for _ in graph.walk(found.model.graph))
        assert sum(step.times for step in found.steps) == nodes


@pytest.mark.parametrize("name", sampled(TEXTS, ci=4, first=1))
def test_all_names_are_renamed_by_references_alone(name: str) -> None:
    """All wires, names, blocks and arguments: the spec is valid, and its model has the same parts.

    Wires and blocks may also name steps, so that maps of checkpoints, and names in the state_dict, have to follow.
    Without those, nothing else differs.
    """
    found = analysed(name)
    stored = {part.removeprefix("start_") for each in _parameters(found) for part in each[0].split(".")}
    mapped = {word for line in TEXTS[name].partition("checkpoint:")[2].split("\n") for word in re.findall(r"\w+", line)}
    changed, words = renamed(name, found, set())
    assert {each.code for each in changed.diagnostics} <= {"E312"}  # a key of a map
    assert _types(found, words) == _types(changed, {})
    assert [shape for _, shape in _parameters(found)] == [shape for _, shape in _parameters(changed)]
    changed, words = renamed(name, found, stored | mapped)
    assert not changed.diagnostics
    assert _types(found, words) == _types(changed, {})
    assert _parameters(found) == _parameters(changed)


def renamed(name: str, found: seqblocks.Analysis, kept: set[str]) -> tuple[seqblocks.Analysis, dict[str, str]]:
    """Return the analysis with new names, and the new names of inputs. kept: wires and blocks with these names stay."""
    steps = {each.definition for each in found.references if each.kind in ("wire", "block") and each.name in kept}
    own = {each.definition for each in found.references if each.kind != "step" and each.definition not in steps}
    places = [place for place in own if place and place.source.text == TEXTS[name]]
    new: dict[Span, str] = {}
    for place in places:
        together = linked(found.references, place)
        new |= dict.fromkeys(together, f"w17_{min(span.line * 1000 + span.column for span in together)}")
    edits = {each.span: new[each.definition] for each in found.references if each.definition in new}
    changed = seqblocks.analyse(edited(TEXTS[name], [*{**edits, **new}.items()]), name)
    inputs = found.model.inputs if found.model else {}
    return changed, {span.text: word for span, word in new.items() if span.text in inputs}


def _types(found: seqblocks.Analysis, words: dict[str, str]) -> list[str]:
    """Return the kinds of all nodes with their types, in which inputs name lengths."""
    nodes = graph.walk(found.lowered.body) if found.lowered.body else ()
    return [re.sub(r"\w+", lambda word: words.get(word[0], word[0]), f"{node.type} {node.kind}") for node in nodes]


def _parameters(found: seqblocks.Analysis) -> list[tuple[str, tuple[int, ...]]]:
    body = found.lowered.body
    return [(each.name, each.parameter.shape) for each in graph.parameters(body)] if body else []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 10**6), st.booleans())
def test_a_damaged_spec_is_analysed(name: str, at: int, cut: bool) -> None:
    text = TEXTS[name]
    at %= len(text)
    found = seqblocks.analyse(text[:at] + ("" if cut else text[at + 1 :]), name)
    spans = [each.span for each in (*found.diagnostics, *found.steps, *found.references) if each.span]
    spans += [each.definition for each in found.references if each.definition]
    if text[:at].strip():
        assert [span for span in spans if not inside(span)] == []


def test_steps_are_known_in_spite_of_a_fault() -> None:
    good, bad = seqblocks.analyse(SPEC), seqblocks.analyse(SPEC.replace("- rms_norm", "- rms_nrm"))
    assert [d.code for d in bad.diagnostics] == ["E301"]
    known = {step.path: step.type for step in good.steps}
    assert not bad.ok
    assert {step.path for step in bad.steps} == {path.replace("rms_norm", "rms_nrm") for path in known}
    bad = seqblocks.analyse(SPEC.replace("times: 3", "times: 3, tims: 4").replace("from: q", "from: qq"))
    assert bad.model is None or [step.type for step in bad.steps if step.path == "rms_norm"] == [known["rms_norm"]]


def test_a_step_of_a_repeat_is_listed_once() -> None:
    (step,) = [each for each in seqblocks.analyse(SPEC).steps if each.verb == "silu"]
    assert (step.times, step.varies, step.span.line) == (3, False, 11)


def test_the_references_of_a_spec() -> None:
    found = seqblocks.analyse(SPEC).references
    wires = [each for each in found if each.kind == "wire"]
    assert [(each.name, each.span.line, each.definition and each.definition.line) for each in wires] == [("q", 8, 7)]
    names = [each for each in found if each.kind == "name"]
    assert {each.definition and each.definition.line for each in names} == {2}
    assert sorted(each.span.line for each in names) == [4, 7, 8, 11]


def test_names_and_arguments_are_renamed_by_references_alone() -> None:
    """Also the keys of calls, and what `expect:` reads: numbers, sizes, and the names of outputs."""
    text = """\
seqblocks: 1
let: {dim: 8, most: 100}
blocks:
  mine:
    args: {width: int, other: wire, "body": steps}
    steps: [{linear: width}, body, {add: {with: other}}]
model:
  input: {features: dim}
  steps:
    - linear: {features: dim, as: q}
    - mine: {width: dim, other: q, body: [silu], as: r}
  outputs: [q, r]
expect: {params: "<= most * 2", state_bytes: 0 B, output: {q: [batch, seq, dim], r: [batch, seq, 2 * dim / 2]}}
"""
    found = seqblocks.analyse(text)
    assert found.ok
    keys = [(each.name, each.span.line) for each in found.references if each.kind == "argument"]
    assert keys == [("width", 11), ("other", 11), ("body", 11)]
    definitions = {each.definition for each in found.references if each.definition}
    names = {span: f"w17_{at}" for at, span in enumerate(sorted(definitions, key=lambda span: span[1:]))}
    edits = {each.span: names[each.definition] for each in found.references if each.definition in names}
    changed = seqblocks.analyse(edited(text, [*{**edits, **names}.items()]))
    assert changed.ok, changed.diagnostics
    assert len(names) == 8
    assert {each.name for each in changed.references} == {*names.values(), "add", "linear", "silu"}
    assert found.model
    assert changed.model
    assert changed.model.output_text == "w17_6 [batch, seq, 8], w17_7 [batch, seq, 8]"


def test_the_references_of_what_no_step_of_the_model_reads() -> None:
    """Steps that are left out, in a block that no step uses too; defaults; an alias in two blocks; layers; states."""
    text = """\
seqblocks: 1
let: {dim: 8, layers: 2, never: false}
blocks:
  one:
    args: {width: int, more: {default: width}, bias: {default: false}, bias_out: {default: bias}}
    steps:
      - &shared {linear: {features: width, bias: bias_out, when: more > width}}
      - silu
  two:
    args: {width: int, more: {default: 1}, bias: {default: false}, bias_out: {default: bias}}
    steps: [*shared, {one: {width: width, bias: bias}}]
model:
  input: {features: dim}
  steps:
    - linear: {features: dim, as: q}
    - gate: {by: q, when: never}
    - repeat: {times: layers, when: never, steps: [{linear: {features: dim * layers}}, {add: {with: q}}]}
    - cell: {state: {s: dim}, steps: [{calc: {s: s + q}}, {silu: {from: s}}]}
    - one: {width: dim}
"""
    found = seqblocks.analyse(text)
    assert found.ok, found.diagnostics
    reads = sorted((*each.span[1:3], each.name, each.definition.line) for each in found.references if each.definition)
    at = {line: [(name, definition) for each, _, name, definition in reads if each == line] for line in range(1, 21)}
    assert at[5] == [("width", 5), ("bias", 5)]
    both = [(name, line) for name in ("width", "bias_out", "more", "width") for line in (5, 10)]
    assert sorted(at[7]) == sorted(both)
    assert at[10] == [("bias", 10)]
    assert at[11] == [("one", 4), ("width", 5), ("width", 10), ("bias", 5), ("bias", 10)]
    assert at[16] == [("q", 15), ("never", 2)]
    assert at[17] == [("layers", 2), ("never", 2), ("dim", 2), ("q", 15)]  # `layers` in there is the number of layers
    assert at[18] == [("dim", 2), ("s", 18), ("s", 18), ("q", 15), ("s", 18)]
    width = next(each.definition for each in found.references if each.name == "width" and each.definition)
    assert {place.line for place in linked(found.references, width)} == {5, 10}


def test_a_cell_with_a_step_of_an_unknown_type() -> None:
    steps = "[{linear: {from: nothing, features: 8}}, {rearrange: '(a b) -> b a'}, {calc: {s: s + x}}]"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{{cell: {{state: {{s: 8}}, steps: {steps}}}}}]}}\n"
    assert [each.code for each in seqblocks.analyse(text).diagnostics] == ["E302"]


def test_more_than_twenty_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FAULTS)
    assert len(analysed("more_than_twenty.yaml").diagnostics) == 25


def test_the_command_line(run_main: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(SPEC.replace("from: q,", "from: qq,"))
    done = run_main("check", "--format", "json", "--graph", "bad.yaml", cwd=tmp_path)
    (record,) = json.loads(done.stdout)["specs"]
    assert done.returncode == 1
    (fault,) = record["diagnostics"]
    place = {"file": "bad.yaml", "line": 8, "column": 22, "end_line": 8, "end_column": 24}
    assert fault["fix"] is None or fault["fix"] == {"text": "q", **place}
    assert record["graph"]["steps"][0]["type"] is not None
    done = run_main("check", "--graph", "bad.yaml", cwd=tmp_path)
    assert (done.returncode, "--format json" in done.stderr) == (2, True)
    (tmp_path / "good.yaml").write_text(SPEC)
    shown = json.loads(run_main("show", "--format", "json", "--stage", "graph", "good.yaml", cwd=tmp_path).stdout)
    assert shown["graph"]["steps"][0]["path"] == "rms_norm"


def test_it_imports_no_torch() -> None:
    code = "import sys, seqblocks; seqblocks.analyse('seqblocks: 1').steps; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_references_of_steps() -> None:
    """In ties, shares, rules, maps, wires of layers and outputs of blocks: the name, a single `as:`, or the verb."""
    text = """\
seqblocks: 1
blocks:
  inner:
    outputs: [v]
    steps: [{linear: {features: 8, as: v}}, {linear: {name: up, features: 8}}]
model:
  input: {tokens: 32}
  steps:
    - embed: {features: 8}
    - inner: {name: first}
    - inner: {share: first, name: again}
    - linear: {from: first.v, features: 8, name: out}
    - repeat:
        name: stack
        times: 2
        share: [inner.up]
        steps: [{inner: {}}, {add: {with: "layers[-1].inner.v or input", as: s}}]
    - add: {with: stack.0.inner.v}
    - unembed: {vocabulary: 32, tie: {weight: embed.weight}}
init: {"out.weight": zeros, "linear.bias": zeros}
checkpoint:
  stack.{layer}.inner.up: "blocks.{layer}.up"
  "out": head
"""
    found = seqblocks.analyse(text)
    assert found.ok, found.diagnostics
    reads = [(each, each.definition) for each in found.references if each.kind in ("step", "wire") and each.definition]
    assert all(each.span.text == each.name == place.text for each, place in reads if each.name != "layers")
    steps = sorted((*each.span[1:3], each.name, place.line) for each, place in reads if each.kind == "step")
    assert [(line, name, definition) for line, _, name, definition in steps] == [
        (11, "first", 10), (12, "first", 10), (16, "inner", 17), (16, "up", 5), (17, "layers", 14), (17, "inner", 17),
        (18, "stack", 14), (18, "inner", 17), (19, "embed", 9), (20, "out", 12), (22, "stack", 14), (22, "inner", 17),
        (22, "up", 5), (23, "out", 12),
    ]  # fmt: skip
    wires = {(each.span.line, place.line) for each, place in reads if each.name == "v"}
    assert wires == {(4, 5), (12, 5), (17, 5), (18, 5)}


@pytest.mark.parametrize("name", sampled(TEXTS, ci=4, first=2))
def test_steps_in_keys_of_maps_are_references(name: str) -> None:
    """The first part of each key of the model's map."""
    found = analysed(name)
    table = found.file.root.get("checkpoint") if found.file else None
    steps = {node.name for node in found.model.graph.nodes} if found.model else set()
    spans = {each.span[1:3]: each for each in found.references if each.kind == "step" and each.definition}
    for key, span, _ in table if isinstance(table, Mapping) else ():
        if key.partition(".")[0] in steps:
            quoted = span.text[0] in "\"'"
            assert spans[span.line, span.column + quoted].name == key.partition(".")[0]


@pytest.mark.parametrize("name", sampled(TEXTS, ci=4, first=3))
def test_each_name_of_a_step_is_a_reference(name: str) -> None:
    """Names before the dot of wires of layers and outputs of blocks, and those in `tie:`, `share:` and `own:`."""
    found = analysed(name)
    spans = {each.span[1:3] for each in found.references if each.kind == "step" and each.definition}
    names = r"\b(?:tie|share|own): (?:\{\w+: |\[)?([a-z_]\w*)|\bfrom: [\[\"]*([a-z_]\w*)[.\[]"
    for number, line in enumerate(TEXTS[name].partition("\ncheckpoint:")[0].split("\n"), 1):
        code = line.partition(" #")[0]
        for written in re.finditer(names, code):
            group = 1 if written[1] else 2
            if written[group] not in ("none", "pattern", "all"):
                assert (number, written.start(group) + 1) in spans, (number, line)
