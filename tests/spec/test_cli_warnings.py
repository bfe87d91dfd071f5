"""Warnings on the command line and in Python: where they are reported, and the effect of `--strict`."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import seqblocks
from seqblocks import SpecError, SpecWarning
from seqblocks.analysis import check

Run = Callable[..., subprocess.CompletedProcess[str]]

SPARE = """
seqblocks: 1
let: {dim: 8, heads: 2, half: heads / 2}
model: {input: {features: dim}, steps: [{linear: {features: 4}}]}
"""
LEAKING = """seqblocks: 1
model:
  input: {features: 8}
  steps:
    - linear: {features: 24, as: {q: 8, k: 8, v: 6, g: 2}}
    - linear_attention: {q: q, k: k, v: v, decay: g, heads: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_an_override_that_repeats_the_spec_is_a_note_and_an_unused_one_a_warning(run_cli: Run, folder: Path) -> None:
    (folder / "spare.yaml").write_text(SPARE)
    done = run_cli("check", "spare.yaml", "--set", "dim=8", "--set", "let.heads=4", cwd=folder)
    assert done.returncode == 0
    assert done.stdout.startswith("spare.yaml: ok, 36 parameters")
    assert done.stderr == (
        "warning[W901]: the override let.heads=4 has no effect: no step uses it\n"
        " --> --set let.heads=4:1:17\n"
        "  |\n"
        "1 | --set let.heads=4\n"
        "  |                 ^\n"
        "  = hint: check its name: `seqblocks show SPEC --stage spec` lists the names and the arguments of the steps\n"
        "\n"
        "1 warning\n"
        "note: spare.yaml: the override dim=8 has no effect: the spec already has this value\n"
    )
    arguments = ("check", "spare.yaml", "--set", "heads=4", "--set", "dim=9")
    done = run_cli(*arguments, "--format", "json", cwd=folder)
    assert done.stderr == ""
    (warning,) = json.loads(done.stdout)["specs"][0]["warnings"]
    assert (warning["code"], warning["severity"]) == ("W901", "warning")
    assert warning["message"] == "the override heads=4 has no effect: no step uses it"
    done = run_cli(*arguments, "--format", "github", cwd=folder)
    assert done.stdout.startswith("::warning file=--set heads=4,line=1,col=13")
    assert run_cli(*arguments, "-q", cwd=folder).stderr == ""
    strict = run_cli(*arguments, "--strict", "-q", cwd=folder)
    assert strict.returncode == 1
    assert strict.stderr.startswith("error[W901]")
    assert strict.stderr.endswith("\n1 error\n")


def test_errors_come_before_warnings_and_both_are_counted(run_cli: Run, folder: Path) -> None:
    (folder / "both.yaml").write_text(LEAKING + "    - classifier: {classes: 8, baise: true}\n")
    done = run_cli("check", "both.yaml", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error[E201]")
    assert "\n\nwarning[W904]" in done.stderr
    assert done.stderr.endswith("\n\n1 error, 1 warning\n")
    strict = run_cli("check", "both.yaml", "--strict", cwd=folder)
    assert strict.stderr.endswith("\n\n2 errors\n")


@pytest.mark.parametrize("words", [("build", "--device", "meta"), ("show",), ("show", "--stage", "spec"), ("explain",)])
def test_every_verb_that_reads_a_spec_warns(words: tuple[str, ...], run_main: Run, folder: Path) -> None:
    (folder / "leaking.yaml").write_text(LEAKING)
    done = run_main(words[0], "leaking.yaml", *words[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning[W904]")
    data = json.loads(run_main(words[0], "leaking.yaml", *words[1:], "--format", "json", cwd=folder).stdout)
    assert [each["code"] for each in data["warnings"]] == ["W904"]
    strict = run_main(words[0], "leaking.yaml", *words[1:], "--strict", cwd=folder)
    assert (strict.returncode, strict.stdout) == (1, "")


def test_an_expectation_that_is_not_met_keeps_its_status(run_cli: Run, folder: Path) -> None:
    (folder / "leaking.yaml").write_text(LEAKING + "expect: {params: 1}\n")
    done = run_cli("check", "leaking.yaml", cwd=folder)
    assert done.returncode == 3
    assert done.stderr.endswith("\n\n1 error, 1 warning\n")


def test_in_python() -> None:
    with pytest.warns(SpecWarning, match=r"W904.*`decay` is a log decay") as caught:
        check.load_text(LEAKING)
    (warning,) = caught
    assert warning.filename == __file__, "the warning should name the line of the call"
    assert isinstance(warning.message, SpecWarning)
    assert warning.message.diagnostic.severity == "warning"
    assert str(pickle.loads(pickle.dumps(warning.message))) == str(warning.message)
    with pytest.raises(SpecError) as error:
        seqblocks.load_text(LEAKING, strict=True)
    assert [(each.code, each.severity) for each in error.value.diagnostics] == [("W904", "error")]


def test_warnings_of_a_file_of_blocks(run_cli: Run, folder: Path) -> None:
    steps = "[{linear: {features: d, as: [a, b]}}, {silu: {from: a}}]"
    text = f"seqblocks: 1\nblocks: {{half: {{args: {{d: 8}}, steps: {steps}}}}}\n"
    (folder / "lib.yaml").write_text(text)
    done = run_cli("check", "lib.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "lib.yaml: ok, 1 block (half)\n")
    assert done.stderr.startswith("warning[W902]: nothing uses `b`, a part of linear: ")
    assert done.stderr.endswith("\n\n1 warning\n")
    record = json.loads(run_cli("check", "lib.yaml", "--format", "json", cwd=folder).stdout)
    assert [each["code"] for each in record["specs"][0]["warnings"]] == ["W902"]
    assert run_cli("check", "lib.yaml", "--strict", cwd=folder).returncode == 1
