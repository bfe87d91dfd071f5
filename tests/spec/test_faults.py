"""Each kind of error in a spec, `tests/golden/faults/NAME.yaml`, produces the message next to it, `NAME.txt`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqblocks.analysis import check
from seqblocks.errors import MAX_DIAGNOSTICS, Fault, Report, Source, Span, SpecError
from seqblocks.language.spec_files import locate

FAULTS = Path(__file__).parent.parent / "golden" / "faults"
CASES = sorted(path.stem for path in FAULTS.glob("*.yaml"))


def errors_of(name: str, monkeypatch: pytest.MonkeyPatch) -> SpecError:
    """Return the errors of a spec, or its warnings if it has no errors."""
    monkeypatch.chdir(FAULTS)
    try:
        file, _ = check.check_text(*locate(f"{name}.yaml"))
    except SpecError as error:
        return error
    assert file.warnings
    return SpecError(file.warnings, file.dropped)


@pytest.mark.parametrize("name", CASES)
def test_the_message(name: str, monkeypatch: pytest.MonkeyPatch, update_golden: bool) -> None:
    text = str(errors_of(name, monkeypatch)) + "\n"
    golden = FAULTS / f"{name}.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", CASES)
def test_the_place_is_in_the_file_and_the_record_is_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for diagnostic in errors_of(name, monkeypatch).diagnostics:
        assert re.fullmatch(r"[EW]\d\d\d", diagnostic.code)
        json.dumps(diagnostic.as_data())
        span = diagnostic.span
        if span and span.source.text:
            assert 1 <= span.line <= len(span.source.lines)
            assert 1 <= span.column <= len(span.source.line(span.line)) + 1
        for each in (span, *(note.span for note in diagnostic.notes)):
            assert each is None or (each.line, each.column) < (each.end_line, each.end_column)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("seqblocks: 1\nmodel:\n  input:\n  steps: [silu]\n", "input"),
        ("seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n    - silu\n    -", "-"),
        ("seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n    -\n    - silu\n", "-"),
        ("seqblocks: 1\nmodel: {input: {features: 8}, steps: [{repeat: {times: , steps: [silu]}}]}", "times"),
        ("seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n    - linear:\n        features:", "features"),
        ("seqblocks: 1\nlet: {? : 3}\nmodel: {input: {features: 8}, steps: [silu]}", ":"),
        ("seqblocks: 1\nlet: {n: &n }\nmodel: {input: {features: 8}, steps: [{linear: {features: *n }}]}", "&n"),
        ("seqblocks: 1\nmodel: {input: {features: 8}, steps: [silu]", "]"),
        ("seqblocks: 1\nmodel: {input: {features: 8}, steps: [silu]\n\n", "]"),
        ("seqblocks: 1\nuse: [", "["),
        ("# nothing\n", "#"),
        ("", ""),
    ],
)
def test_a_missing_value_is_placed_at_its_key_and_a_missing_bracket_in_the_last_line(text: str, marked: str) -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text(text)
    (fault,) = caught.value.diagnostics
    span = fault.span
    assert span
    assert span.line <= max(1, len(text.splitlines()))
    assert (span.line, span.column) < (span.end_line, span.end_column)
    assert span.source.line(span.line)[span.column - 1 : span.end_column - 1] == marked


@pytest.mark.parametrize(
    ("step", "marked"),
    [
        ("scan: {order: [forward, reverse], own: [silu, linear.bias, x, linear.bais], steps: [linear: 8, silu]}",
         ["silu", "x", "linear.bais"]),
        ("repeat: {times: 2, share: [linear, x, linear.bais], steps: [linear: 8]}", ["x", "linear.bais"]),
        ("scan: {order: [forward, reverse, forward], steps: [silu]}", ["forward"]),
        ("scan: {order: [forward, columns], steps: [silu]}", ["columns"]),
    ],
)  # fmt: skip
def test_a_fault_of_an_entry_is_placed_at_the_entry(step: str, marked: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text(f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{step}]}}")
    spans = [d.span for d in caught.value.diagnostics if d.span]
    assert [span.source.line(span.line)[span.column - 1 : span.end_column - 1] for span in spans] == marked


def test_a_note_has_an_end_in_its_record() -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text("seqblocks: 1\nlet: {width: 8, width: 9}\nmodel: {input: {features: 8}, steps: [silu]}")
    (note,) = caught.value.diagnostics[0].as_data()["notes"]
    place = {"file": "<text>", "line": 2, "column": 7, "end_line": 2, "end_column": 12}
    assert note == {"text": "the first one is here", **place}


def test_no_snapshot_is_orphaned() -> None:
    assert sorted(path.stem for path in FAULTS.glob("*.txt")) == CASES


def test_the_page_of_messages_is_up_to_date(root: Path) -> None:
    command = [sys.executable, "docs/messages.py", "--check"]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 0, "run `python docs/messages.py` to update docs/messages.md"


def codes(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return [d.code for d in errors_of(name, monkeypatch).diagnostics]


def test_independent_faults_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes("several_independent_faults", monkeypatch) == ["E102", "E201", "E301", "E302", "E303"]


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        ("parallel: {merge: bogus, branches: [{a: [{linearr: 3}]}, {b: [{gate: {by: nowhere}}]}]}", "E208 E301 E302"),
        ("parallel: {merge: bogus, branches: [{a: [silu]}, {a: [{linearr: 3}]}]}", "E208 E304 E301"),
        ("parallel: {merge: bogus, branches: [{a: [{gate: {by: input}}, {head_norm: {heads: 5}}]}]}", "E208"),
        ("parallel: {merge: bogus, branches: []}", "E208 E203"),
        ("parallel: {bogus: 3, branches: [{a: [{linearr: 3}]}]}", "E201 E301"),
        ("parallel: {branches: [{a b: [{linearr: 3}]}, {b: 3}, [gelu]]}", "E207 E301 E203 E203"),
        ("parallel: {merge: concat, branches: [{a: [linear: 4]}, {a: [linear: 4]}]}, gate: {by: input}", "E304"),
        ("residual: {drop_path: bogus, steps: [{linearr: 3}]}", "E303 E301"),
        ("residual: {drop_path: bogus, steps: 3}", "E303 E203"),
        ("scan: {order: bogus, steps: [{linearr: 3}]}", "E208 E301"),
        ("experts: {count: 1, steps: [{linearr: 3}]}", "E209 E301"),
        ("repeat: {times: bogus, steps: [{linearr: 3}]}", "E303 E301"),
        ("repeat: {times: -1, steps: [{linear: eight}]}", "E209 E303"),
        ("repeat: {times: 0, steps: [{linear: eight}]}", "E303"),
        ("repeat: {times: -1, index: i, steps: [{linear: i + is_}]}", "E209 E303"),
        ("repeat: {times: -1, steps: [{linear: layer + layers}]}", "E209"),
        ("repeat: {times: -1, index: [i], steps: [{linear: i}]}", "E209 E203"),
        ("repeat: {times: -1, idnex: i, steps: [{linear: i}]}", "E209 E201"),
        ("residual: {when: nope, steps: [{linearr: 3}]}", "E303 E301"),
        ("linear: {features: eight, when: nope}", "E303 E303"),
        ("linear: {features: zero, when: zero > nope}", "E303"),
        ("linear: {features: -1, when: nope}", "E209 E303"),
        ("{linear: {features: 8, as: y, when: nope}}, {linear: {features: 9, as: y, when: not nope}}", "E303 E303"),
        ("linear: {features: -1, bias: maybe}", "E209 E303"),
        ("linear: {features: 8, as: [a, b]}, residual: [{linear: eight}]", "E313 E303"),
        ("linear: {features: 8, x: input, from: input, bias: maybe}", "E210 E303"),
        ("head_norm: {heads: 5, init: {weight: zeross}, tie: nothing}", "E401 E408 E312"),
        ("repeat: {pattern: m*, m: [{linearr: 3}]}", "E601 E301"),
        ("repeat: {pattern: m, m: [silu], steps: 3}", "E210"),
    ],
)
def test_faults_in_the_steps_of_a_combinator_with_a_fault(step: str, codes: str) -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text(f"seqblocks: 1\nlet: {{zero: 0}}\nmodel: {{input: {{features: 8}}, steps: [{step}]}}")
    assert [d.code for d in caught.value.diagnostics] == codes.split()


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        ("silu: {init: {weight: 3}}", "E201"),
        ("silu: {init: {weight: default}}", "E201"),
        ("layer_norm: {gain: none, bias: false, init: {weight: default}}", ""),
        ("layer_norm: {gain: none, bias: false, init: {wieght: default}}", "E201"),
        ("layer_norm: {gain: none, bias: false, init: {weight: zeros}}", "E201"),
    ],
)
def test_init_of_a_step_without_parameters(step: str, codes: str) -> None:
    """Only `default` is allowed, for parameters that the step has with other arguments."""
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{step}]}}"
    if not codes:
        check.load_text(text)
        return
    with pytest.raises(SpecError) as caught:
        check.load_text(text)
    assert [d.code for d in caught.value.diagnostics] == codes.split()


def test_a_fault_in_a_block_of_48_layers_is_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes("one_fault_in_48_layers", monkeypatch) == ["E401"]


def test_consequences_of_a_fault_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument of a block, or a wrong value used several times, is one error. Independent errors are all
    reported."""
    found = errors_of("one_argument_of_bundled_blocks", monkeypatch).diagnostics
    assert [d.span and d.span.line for d in found] == [6, 7, 8, 9, 10]  # one for each step of the file
    assert codes("one_value_for_several_blocks", monkeypatch) == ["E401", "E404"]
    assert codes("one_expression_twice", monkeypatch) == ["E401", "E401", "E404", "E401", "E401", "E401"]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("blocs: {mine: {steps: [silu]}}\nmodel: {input: {features: 8}, steps: [mine]}", ["E201"]),
        ("uses: [vil]\nmodel: {input: {features: 8}, steps: [{vil: {dim: 8}}]}", ["E201"]),
        ("use: vil\nmodel: {input: {features: 8}, steps: [{vil: {dim: 8}}]}", ["E203"]),
        ("lets: {d: 8}\nmodel: {input: {features: d}, steps: [{linear: d}]}", ["E201"]),
        ("let: {[d]: 8}\nmodel: {input: {features: d}, steps: [{linear: d}]}", ["E112"]),
        ("let: {d: max(4, 8), e: 3}\nmodel: {input: {features: d}, steps: [{linear: d}]}", ["E110"]),
        ("let: {d: 8, d: 9}\nmodel: {input: {features: d}, steps: [{linear: e}]}", ["E102", "E303"]),
        ("blocks: {mine: 3}\nmodel: {input: {features: 8}, steps: [{mine: {d: 3}}, yours]}", ["E203", "E301"]),
        (("blocks: {mine: {args: {3d: 8}, steps: [{linear: d}]}}\n"
         "model: {input: {features: 8}, steps: [{mine: {d: 3}}, {linear: e}]}"), ["E207", "E303"]),
        ("model: {input: {features: 8}, step: [silu]}", ["E201"]),
        ("model: {input: {features: 8}, steps: [{linear: {features: 8, ass: a}}, {gate: {by: a}}]}", ["E201"]),
        ("model: {input: {features: 8}, steps: [{linear: {featurs: 8}}, {gate: {by: a}}]}", ["E201", "E302"]),
        ("model: {input: {features: 8}, steps: [{gate: {bye: input}}, {gate: {by: a, name: b}}]}", ["E201", "E302"]),
        ("model: {input: {features: 8}, steps: [{linear: 8, as: a}, {gate: {by: a}}]}", ["E204"]),
        ("model: {input: {features: 8}, steps: [{parallel: {branchs: [{left: [silu]}]}}]}", ["E201"]),
        ("blocks: {mine: {arg: {p: wire}, steps: [{gate: {by: p}}]}}\nmodel: {input: {features: 8}, steps: [mine]}",
         ["E201"]),
        ("model: {input: {features: 8}, steps: [{linear: {features: 8, as: {a: max(4, 4), b: 4}}}, {gate: {by: a}}]}",
         ["E110"]),
        ("model: {input: {features: 8}, steps: [{repeat: {pattern: m s, m: [silu], z: [silu]}}]}", ["E603"]),
        ("model: {input: {features: 8}, steps: [{linear: {features: 2 +, name: a}}, {linear: {features: 8, tie: a}}]}",
         ["E501"]),
    ],
)  # fmt: skip
def test_what_an_incomplete_mapping_lacks_is_unknown(text: str, codes: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        check.load_text(f"seqblocks: 1\n{text}")
    assert [d.code for d in caught.value.diagnostics] == codes


def test_an_override_of_an_unknown_verb_does_not_hide_it() -> None:
    with pytest.raises(SpecError, match="E301"):
        check.load_text("seqblocks: 1\nmodel: {input: {features: 8}, steps: [{foo: 3}]}", set={"model.foo.bar": 4})


def test_a_fault_is_known_by_its_code_and_cause() -> None:
    """A wrong number is one error wherever and in whatever order it is used. Two wrong lines are two errors."""
    head = "seqblocks: 1\nuse: [xlstm, transformer]\nlet: {n: 5, none: 0}\nmodel: {input: {features: 64}, steps: ["

    def lines(*steps: str) -> list[int | None]:
        with pytest.raises(SpecError) as caught:
            check.load_text(head + "\n" + ",\n".join(steps) + "]}")
        return [d.span and d.span.line for d in caught.value.diagnostics]

    bare, computed = "mlstm_block: {dim: 64, heads: n, name: a}", "slstm_block: {dim: 64, heads: n, name: b}"
    assert lines(bare, computed) == lines(computed, bare) == [5]
    assert lines("gelu_mlp: {dim: none}") == [5]
    assert lines("head_norm: {heads: n}", "head_norm: {heads: n, name: b, from: input}") == [5]
    assert lines("head_norm: {heads: n}", "head_norm: {heads: 2 * n, name: b, from: input}") == [5]
    assert lines("head_norm: {heads: n + 1}", "head_norm: {heads: n + 1, name: b, from: input}") == [5, 6]
    assert lines("head_norm: {heads: 5}", "head_norm: {heads: 5, name: b, from: input}") == [5, 6]


def test_a_fault_in_a_bundled_block_is_reported_where_the_block_is_used() -> None:
    head = "seqblocks: 1\nuse: [vil, xlstm]\nlet: {wrong: 5}\nmodel:\n  input: {features: 64}\n  steps:\n"

    def places(*steps: str, more: dict[str, int] | None = None) -> list[tuple[str, int, int]]:
        with pytest.raises(SpecError) as caught:
            check.load_text(head + "".join(f"    - {step}\n" for step in steps), "my.yaml", set=more)
        spans = [d.span for d in caught.value.diagnostics if d.span]
        assert all(any(note.span and note.span.source.bundled for note in d.notes) for d in caught.value.diagnostics)
        return [(span.source.name, span.line, span.column) for span in spans]

    # The caret is at the argument if that alone is wrong, otherwise at the block.
    assert places("vil: {dim: 64, heads: 3}") == [("my.yaml", 7, 29)]
    assert places("vil: {dim: 32}") == [("my.yaml", 7, 7)]
    assert places("vil: {dim: 64, heads: wrong}") == [("my.yaml", 7, 29)]
    # A wrong line is one error however often it is used. Two wrong lines are two errors.
    assert len(places("repeat: {times: 48, steps: [{vil: {dim: 64, heads: 3}}]}")) == 1
    two = places("vil: {dim: 64, heads: 3, name: a}", "vil: {dim: 64, heads: 7, name: b}")
    assert two == [("my.yaml", 7, 29), ("my.yaml", 8, 29)]
    # If a block of the user contains a bundled one, the caret is where it uses the bundled one.
    own = head.replace("let:", "blocks: {mine: {steps: [{vil: {dim: 64, heads: 3}}]}}\nlet:") + "    - mine\n"
    with pytest.raises(SpecError) as caught:
        check.load_text(own)
    (fault,) = caught.value.diagnostics
    assert (fault.span and fault.span.line) == 3
    assert fault.notes[-1].text == "in block mine, used"
    # A value from the command line has no line, so the caret is at the block.
    assert places("vil: {dim: 64}", more={"model.vil.heads": 3}) == [("my.yaml", 7, 7)]


@pytest.mark.parametrize("name", ["<bundled mine>", "--set dim=3", "set={'dim': 3}"])
def test_a_file_name_does_not_make_a_source_bundled(name: str) -> None:
    """A file whose name looks like a bundled file or an override is still a file of the user: notes point into it."""
    text = "seqblocks: 1\nlet: {n: 3}\nmodel: {input: {features: 8}, steps: [{head_norm: {heads: n}}]}\n"
    with pytest.raises(SpecError) as caught:
        check.load_text(text, name)
    (fault,) = caught.value.diagnostics
    assert fault.span
    assert not fault.span.source.bundled
    assert ("`n` is 3", 2) in [(note.text, note.span and note.span.line) for note in fault.notes]


def test_the_text_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors_of("more_than_twenty", monkeypatch)
    assert len(error.diagnostics) == MAX_DIAGNOSTICS
    assert error.dropped == 5
    assert "25 errors (the first 20 shown)" in str(error)
    assert max(map(len, str(errors_of("yaml_long_line", monkeypatch)).splitlines())) < 160


def test_a_removed_fault_does_not_hide_another() -> None:
    """A fault of two values gives way to a fault of one of them; another fault of the other value is then reported."""
    source = Source.of("my.yaml", "- block: {dim: 0, heads: 0}\n")
    use, dim, heads = (Span(source, 1, column, 1, column + 1) for column in (3, 16, 26))
    report = Report()
    report.fault(Fault("E209", "dim * heads is too small"), use, causes=[use, dim, heads], values=[dim, heads])
    report.fault(Fault("E502", "1 / dim"), use, causes=[use, dim], values=[dim])
    report.fault(Fault("E209", "heads is too small"), heads, causes=[heads], values=[heads])
    report.fault(Fault("E209", "the width is too small"), use)
    assert [d.message for d in report.diagnostics] == ["1 / dim", "heads is too small", "the width is too small"]


@pytest.mark.parametrize(
    ("written", "marked"),
    [
        ("dimm * 2", "dimm"),
        ("'   dimm * 2'", "dimm"),
        ("&w dimm * 2", "dimm"),
        ("&dimm  '2 * dimm'", "dimm"),
        ("8 if order != 'ééé' and dimm else 4", "dimm"),
        (r'"\t2 * dimm"', r'"\t2 * dimm"'),
        ("'8 if order != ''a'' and dimm else 4'", "'8 if order != ''a'' and dimm else 4'"),
        ("(2 +\n          dimm)", "(2 +"),
        (r'''"(order=='ééé' or\n            dimm)"''', r'''"(order=='ééé' or\n            dimm)"'''),
    ],
)
def test_an_unknown_name_in_an_expression_is_marked(written: str, marked: str) -> None:
    """If the text is written with escapes or in several lines, the whole text is marked."""
    head = "seqblocks: 1\nlet: {order: b}\nmodel: {input: {features: 8}, steps: [linear: {features: "
    with pytest.raises(SpecError) as caught:
        check.load_text(f"{head}{written}}}]}}")
    (fault,) = caught.value.diagnostics
    source, carets = str(caught.value).splitlines()[3:5]
    start = carets.index("^")
    assert (fault.code, source[start : start + carets.count("^")]) == ("E303", marked)
    assert start >= source.rindex(marked)
