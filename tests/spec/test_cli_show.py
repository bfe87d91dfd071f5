"""`seqblocks show`: the stages of a spec, and the source of bundled ones."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from seqblocks.language.spec_files import bundled

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("name", bundled())
def test_show_prints_the_source_of_a_bundled_spec(name: str, run_main: Run) -> None:
    done = run_main("show", name, "--source")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == bundled()[name].read_text(encoding="utf-8")


def test_a_bundled_spec_can_be_forked(run_main: Run, folder: Path) -> None:
    (folder / "mine.yaml").write_text(run_main("show", "mamba", "--source").stdout)
    (folder / "model.yaml").write_text(
        "seqblocks: 1\nuse: [./mine.yaml]\nmodel: {input: {features: 8}, steps: [{mamba_block: {dim: 8}}]}\n"
    )
    assert run_main("check", "model.yaml", cwd=folder).returncode == 0
    data = json.loads(run_main("show", "mamba", "--source", "--format", "json").stdout)
    assert data["source"] == bundled()["mamba"].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mamab --source", "there is no bundled spec 'mamab': did you mean 'mamba'?"),
        ("good.yaml --source", "--source prints bundled specs, and 'good.yaml' is a file"),
        ("- --source", "--source prints bundled specs, and '-' is a file"),
        ("mamba --source --stage graph", "cannot be combined with --stage"),
        ("mamba --source --set dim=4", "cannot be combined with --set"),
    ],
)
def test_a_source_that_cannot_be_shown(words: str, message: str, run_main: Run, folder: Path) -> None:
    done = run_main("show", *words.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


OUTLINED = """seqblocks: 1
about: one of each
use: [mamba]
let: {dim: 8}
blocks:
  mine:
    about: a block
    args: {dim: int, act: silu, rate: 0.5}
    let: {inner: 2 * dim}
    steps:
      - residual: {steps: [{linear: {features: inner}}, silu, {linear: {features: dim, name: out}}]}
      - parallel: {merge: sum, branches: [{a: [silu]}, {b: []}]}
model:
  input: {features: dim}
  steps: [{repeat: {pattern: m, m: [{mine: {dim: dim}}]}}]
expect: {output: [batch, seq, 8]}
"""


def test_the_stage_spec(run_main: Run, folder: Path) -> None:
    (folder / "one.yaml").write_text(OUTLINED)
    assert run_main("show", "one.yaml", "--stage", "spec", cwd=folder).stdout.splitlines() == [
        "one.yaml: one of each",
        "uses [mamba]",
        "let",
        "  dim: 8",
        "",
        "block mine: a block",
        "  arguments",
        "    dim   int, required",
        "    act   word, default silu",
        "    rate  float, default 0.5",
        "  let",
        "    inner: 2 * dim",
        "  steps",
        "    residual",
        "      steps",
        "        linear  features: inner",
        "        silu",
        "        linear  features: dim, name: out",
        "    parallel  merge: sum",
        "      branches",
        "        a: [silu]",
        "        b: []",
        "",
        "model",
        "  input: {features: dim}",
        "  steps",
        "    repeat  pattern: m",
        "      m",
        "        mine  dim: dim",
        "expect",
        "  output: [batch, seq, 8]",
    ]
    data = json.loads(run_main("show", "one.yaml", "--stage", "spec", "--format", "json", cwd=folder).stdout)
    assert data["spec"]["blocks"]["mine"]["arguments"] == {
        "dim": {"type": "int"}, "act": {"type": "word", "default": "silu"}, "rate": {"type": "float", "default": 0.5}
    }  # fmt: skip
    assert data["spec"]["model"]["steps"] == [{"repeat": {"pattern": "m", "m": [{"mine": {"dim": "dim"}}]}}]


def test_a_library_of_blocks_is_shown_as_one(run_main: Run) -> None:
    shown = run_main("show", "mamba")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run_main("show", "mamba", "--stage", "spec").stdout
    assert "block mamba_mixer: input projection, convolution" in shown.stdout
    assert "    dim        int, required: features of the input and the output; at least 1\n" in shown.stdout
    for stage in ("graph", "plan"):  # the file has none
        done = run_main("show", "mamba", "--stage", stage)
        assert done.returncode == 1
        assert "the file defines blocks but no model" in done.stderr


def test_every_stage_is_data_too(run_main: Run) -> None:
    for stage in ("document", "spec", "graph"):
        data = json.loads(run_main("show", "vil_small_block", "--stage", stage, "--format", "json").stdout)
        assert (data["ok"], data["stage"]) == (True, stage)
        assert data[stage]
