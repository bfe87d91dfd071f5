"""`seqblocks sweep`: rows against `compare`, resuming, fronts and ladders against slow definitions."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import seqblocks
from seqblocks.architect.sweep import Row, ladder, pareto, sweep
from tests.spec.texts import GOOD

Run = Callable[..., subprocess.CompletedProcess[str]]
GRID = {"dim": "64..192:64", "heads": "2,6"}  # 64 and 128 have no 6 heads


def test_every_row_is_what_compare_finds() -> None:
    rows = list(sweep("transformer_small", GRID, lengths=256))
    assert [tuple(row.values.values()) for row in rows] == [(d, h) for d in (64, 128, 192) for h in (2, 6)]
    for row in rows:
        if row.fault:
            assert row.values["dim"] % row.values["heads"] != 0
            assert row.fault.startswith("E4")
            continue
        (facts,) = seqblocks.compare("transformer_small", set=row.values, lengths=256).facts
        for name in ("params", "non_embedding_params", "state_bytes", "macs_per_token", "macs_per_token@256"):
            assert row.figures[name] == facts[name]
        assert row.figures["train_flops_per_token"] == 3 * 2 * facts["macs_per_token@256"]
        assert row.figures["tokens"] == 20 * facts["params"]
        assert row.figures["train_flops"] == row.figures["tokens"] * row.figures["train_flops_per_token"]
        assert row.figures["exact_to_six_nd"] == pytest.approx(facts["macs_per_token@256"] / facts["params"])
        assert row.command == f"--set dim={row.values['dim']} --set heads={row.values['heads']}"
    assert sum(bool(row.fault) for row in rows) == 2


def test_the_difference_from_6nd_of_gpt2_is_the_sum_of_its_terms() -> None:
    """The terms of docs/designing.md."""
    (row,) = sweep("transformer_125m", {"depth": 12}, lengths=1024)
    products, unembedding, norms = 12 * 12 * 768**2, 50257 * 768, 25 * 2 * 768
    attention = 12 * 2 * 768 * (1024 + 1) // 2
    assert row.figures["macs_per_token@1024"] == products + unembedding + norms + attention
    assert f"{row.figures['exact_to_six_nd']:.3f}" == "1.069"


def test_where_leaves_designs_out() -> None:
    rows = list(sweep("mlstm_small", {"dim": "16..64:16"}, where=["params<120000", "state_bytes>=10000"]))
    for row in rows:
        assert row.figures["params"] < 120_000
        assert row.figures["state_bytes"] >= 10_000
    everything = list(sweep("mlstm_small", {"dim": "16..64:16"}))
    kept = [row for row in everything if row.figures["params"] < 120_000 and row.figures["state_bytes"] >= 10_000]
    assert [row.values for row in rows] == [row.values for row in kept]
    assert 0 < len(rows) < len(everything)


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_nothing_beats(seed: int) -> None:
    chance = random.Random(seed)
    rows = [Row({}, {"a": chance.randint(0, 5), "b": chance.randint(0, 5)}) for _ in range(30)]
    rows.append(Row({}, {"a": 0, "b": None}))
    marks = pareto(rows, ["a", "b"], largest=["b"])
    for row, mark in zip(rows[:-1], marks[:-1], strict=True):
        a, b = row.figures["a"], row.figures["b"]
        beaten = [r for r in rows[:-1] if r.figures["a"] <= a and r.figures["b"] >= b and r.figures != row.figures]
        assert mark == (not beaten)
    assert marks[-1] is False


def test_larger_budgets_have_larger_designs() -> None:
    rows = list(sweep("transformer_small", {"dim": "64..512:64", "depth": "2..8:2"}, lengths=256))
    budgets = [3e15, 1e12, 1e13, 1e14, 1e15]
    found = ladder(rows, budgets)
    assert [row.figures["budget"] for row in found] == sorted(budgets)
    sizes = [row.figures["train_flops_per_token"] * row.figures["params"] for row in found]
    assert sizes == sorted(sizes)
    for row in found:
        spent = row.figures["tokens"] * row.figures["train_flops_per_token"]
        assert spent == pytest.approx(row.figures["budget"])
    costs = [row.figures["train_flops"] for row in rows]
    nearest = min(costs, key=lambda cost: max(cost / 1e14, 1e14 / cost))
    (chosen,) = [row for row in rows if row.values == found[2].values]
    assert chosen.figures["train_flops"] == nearest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


COMMAND = ("sweep", "good.yaml", "--set", "dim=4,8,16", "--set", "model.linear.features=2..6:2")


def test_an_interrupted_sweep_continues(run_main: Run, folder: Path) -> None:
    whole = run_main(*COMMAND, "--format", "csv", cwd=folder).stdout
    first = run_main(*COMMAND, "--out", "rows.jsonl", "--format", "csv", cwd=folder).stdout
    assert first == whole
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 9
    # killed in the middle of a line; a row that is kept is not computed again
    changed = json.loads(lines[0])
    changed["row"]["figures"]["params"] = 1
    (folder / "rows.jsonl").write_text(json.dumps(changed) + "\n" + "".join(lines[1:4]) + lines[4][:20])
    again = run_main(*COMMAND, "--out", "rows.jsonl", "--format", "csv", cwd=folder).stdout
    assert again.splitlines()[1].startswith("4,2,1,")
    assert [again.splitlines()[0], *again.splitlines()[2:]] == [whole.splitlines()[0], *whole.splitlines()[2:]]
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 9
    # another spec has other rows
    (folder / "good.yaml").write_text(GOOD + "# changed\n")
    run_main(*COMMAND, "--out", "rows.jsonl", cwd=folder)
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 18
    # other conditions leave other points out
    run_main(*COMMAND, "--where", "params>1", "--out", "rows.jsonl", cwd=folder)
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 27
    run_main(*COMMAND, "--where", "params > 1", "--out", "rows.jsonl", cwd=folder)
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 27


def test_kept_rows_have_their_values_in_the_order_of_the_options(run_main: Run, folder: Path) -> None:
    one, other = ("--set", "dim=4,8"), ("--set", "model.linear.features=2,6")
    kept = ("--out", "rows.jsonl", "--format", "csv")
    run_main("sweep", "good.yaml", *one, *other, *kept, cwd=folder)
    again = run_main("sweep", "good.yaml", *other, *one, *kept, cwd=folder).stdout
    assert again == run_main("sweep", "good.yaml", *other, *one, *kept[2:], cwd=folder).stdout
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 4


def test_other_files_are_left_as_they_are(run_main: Run, folder: Path) -> None:
    """A file of one line without an end too, as a killed sweep leaves its last line."""
    (folder / "notes.txt").write_text("to be kept")
    for path, why in (("-", "takes the name of a file, not -"), (os.devnull, "is not a file")):
        done = run_main(*COMMAND, "--out", path, cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
    done = run_main(*COMMAND, "--out", "notes.txt", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "was not written by seqblocks sweep" in done.stderr
    assert (folder / "notes.txt").read_text() == "to be kept"


def test_a_lookahead_of_all_tokens_is_above_any_limit(tmp_path: Path) -> None:
    steps = "[{scan: {order: reverse, steps: [{identity: {as: x}}, {gated_recurrence: {decay: x}}]}}]"
    text = f"seqblocks: 1\nlet: {{dim: 4}}\nmodel:\n  input: {{features: dim}}\n  steps: {steps}\n"
    (tmp_path / "spec.yaml").write_text(text)
    spec, grid = tmp_path / "spec.yaml", {"dim": "4,8"}
    assert seqblocks.compare(spec).facts[0]["lookahead"] == "all"
    assert len(list(sweep(spec, grid, where="lookahead>=1"))) == 2
    assert not list(sweep(spec, grid, where="lookahead<=1000000"))


def test_a_figure_that_is_unknown_meets_no_limit_silently() -> None:
    rows = list(sweep("transformer_small", {"dim": "64,128"}, where="input_macs<1G"))
    assert [row.fault for row in rows] == ["input_macs is unknown: give the length of a sequence"] * 2
    assert len(list(sweep("transformer_small", {"dim": "64,128"}, where="input_macs<1G", lengths=256))) == 2


def test_rows_are_printed_if_they_cannot_be_kept(run_main: Run, folder: Path, limited_files: Any) -> None:
    command = (*COMMAND[:4], "--out", "rows.jsonl", "--format", "csv", "--pareto", "params")
    whole = run_main(*command, cwd=folder).stdout.splitlines()
    lines = (folder / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rows.jsonl").unlink()
    with limited_files(len(lines[0]) + 9):
        done = run_main(*command, cwd=folder)
    assert done.returncode == 4
    assert done.stderr.startswith("error: --out rows.jsonl cannot be written: File too large. Free some space")
    assert len(done.stdout.splitlines()) == 2  # the header, and a row
    assert len(whole) == 4
    assert run_main(*command, cwd=folder).stdout.splitlines() == whole


def test_a_changed_used_file_has_other_rows(run_main: Run, tmp_path: Path) -> None:
    used = "seqblocks: 1\nblocks:\n  b:\n    args: {dim: int}\n    steps: [{linear: %s}, {proj_down: dim}]\n"
    (tmp_path / "blocks.yaml").write_text(used % "2 * dim")
    head = "seqblocks: 1\nuse: [blocks.yaml]\nlet: {dim: 4}\n"
    (tmp_path / "main.yaml").write_text(head + "model:\n  input: {features: dim}\n  steps: [{b: {dim: dim}}]\n")
    command = ("sweep", "main.yaml", "--set", "dim=4,8", "--out", "rows.jsonl", "--format", "json")

    def params() -> list[int]:
        done = run_main(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        return [row["params"] for row in json.loads(done.stdout)["rows"]]

    first = params()
    (tmp_path / "blocks.yaml").write_text(used % "3 * dim")
    second = params()
    assert second == [6 * dim * dim + 3 * dim for dim in (4, 8)]
    assert second != first


@pytest.mark.parametrize(("option", "needed"), [("--seeds", "probe"), ("--steps", "probe"), ("--seconds", "bench")])
def test_options_of_what_is_not_measured_are_refused(option: str, needed: str, run_main: Run, folder: Path) -> None:
    done = run_main(*COMMAND, option, "1", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option} needs --{needed}" in done.stderr


def test_formats(run_main: Run, folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run_main(*COMMAND, "--format", "csv", cwd=folder).stdout)))
    values = [(row["dim"], row["model.linear.features"]) for row in rows]
    assert values[:4] == [("4", "2"), ("4", "4"), ("4", "6"), ("8", "2")]
    assert [int(row["params"]) for row in rows[:2]] == [4 * 2 + 2, 4 * 4 + 4]
    data = json.loads(run_main(*COMMAND, "--pareto", "params,macs_per_token", "--format", "json", cwd=folder).stdout)
    assert data["points"] == 9
    assert [row["front"] for row in data["rows"]] == [True] + [False] * 8
    table = run_main(*COMMAND, "--format", "markdown", cwd=folder).stdout.splitlines()
    assert table[0].startswith("| dim | model.linear.features | parameters |")
    assert len(table) == 2 + 9
    page = run_main(*COMMAND, "--format", "html", cwd=folder).stdout
    assert page.startswith("<!doctype html>")
    assert page.count("<tr>") == 10
    assert "http" not in page.replace("http-equiv", "")
    text = run_main(*COMMAND, cwd=folder).stdout
    assert "9 points\n" in text
    assert "(Chinchilla)" in text


def test_invalid_points_have_a_row(run_main: Run) -> None:
    done = run_main("sweep", "transformer_small", "--set", "dim=64..192:64", "--set", "heads=6")
    assert done.returncode == 0
    assert "3 points, 2 of them invalid" in done.stdout
    assert "E4" in done.stdout


@pytest.mark.parametrize("kind", ["text", "csv", "json"])
def test_a_fault_of_all_points_is_reported_once(kind: str, run_main: Run, folder: Path) -> None:
    (folder / "bad.yaml").write_text((folder / "good.yaml").read_text().replace("linear", "linaer"))
    done = run_main("sweep", "bad.yaml", "--set", "dim=4,8,12", "--format", kind, cwd=folder)
    assert done.returncode == 1
    if kind == "json":
        assert ["E301" in row["fault"] for row in json.loads(done.stdout)["rows"]] == [True] * 3
    else:
        assert done.stderr.count("error[E301]") == 1
        assert "bad.yaml" in done.stderr


@pytest.mark.parametrize("kind", ["text", "csv", "json"])
def test_the_status_is_1_if_no_point_is_valid(kind: str, run_main: Run) -> None:
    done = run_main("sweep", "transformer_small", "--set", "heads=5,7", "--format", kind)
    assert (done.returncode, done.stderr) == (1, "")
    assert "E401: heads (7) must divide" in done.stdout
    assert kind != "json" or json.loads(done.stdout)["ok"] is False


def test_points_that_where_leaves_out_are_counted(run_main: Run) -> None:
    words = ("sweep", "transformer_small", "--set", "heads=2,4,5", "--where", "params<1")
    assert run_main(*words, "--format", "csv").returncode == 0
    done = run_main(*words)
    assert done.returncode == 0
    assert "3 points, 1 of them invalid, 2 of them left out by --where" in done.stdout
    done = run_main("sweep", "transformer_small", "--set", "heads=2,4,5", "--length", "9", "--ladder", "1e12")
    assert "3 points, 1 of them invalid\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--set", "dim"], 2, "written PATH=VALUES"),
        (["--set", "dim=4..2"], 2, "FIRST..LAST:STEP"),
        (["--set", "dim=4", "--set", "dim=8"], 2, "values twice"),
        (["--set", "dmi=4"], 1, "did you mean 'dim'?"),
        (["--set", "dim=4", "--where", "parms<3"], 2, "did you mean 'params'?"),
        (["--set", "dim=4", "--pareto", "parms"], 2, "did you mean 'params'?"),
        (["--set", "dim=4", "--ladder", "1e12,x"], 2, "is not a positive number"),
        (["--set", "dim=4", "--tokens-per-parameter", "0"], 2, "is not a positive number"),
        (["--set", "dim=4", "--out", "."], 2, "cannot be read"),
        (["--set", "dim=4", "--out", "good.yaml"], 2, "was not written by seqblocks sweep"),
        (["--set", "dim=4", "--out", "no/such/file"], 2, "cannot be written"),
        ([], 2, "required: --set"),
    ],
)
def test_faults(words: list[str], status: int, message: str, run_main: Run, folder: Path) -> None:
    done = run_main("sweep", "good.yaml", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert (folder / "good.yaml").read_text() == GOOD


@pytest.mark.parametrize(
    "call",
    [
        lambda: sweep("mlstm_small", {}),
        lambda: sweep("mlstm_small", {"dim": []}),
        lambda: sweep("mlstm_small", {"dim": 8}, lengths=(0,)),
        lambda: sweep("mlstm_small", {"dim": 8}, set={"dim": 4}),
        lambda: sweep("mlstm_small", {"dim": 8}, tokens_per_parameter=float("nan")),
    ],
)
def test_wrong_calls(call: Callable[[], Any]) -> None:
    with pytest.raises(seqblocks.UsageError):
        call()
