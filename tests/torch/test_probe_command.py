"""`seqblocks probe` as a command: what it prints, also when it is interrupted, and its plot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from seqblocks.probes import training
from seqblocks.probes.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, plot
from seqblocks.probes.training import Result

TEXT = "seqblocks: 1\nlet: {vocabulary: 4}\nmodel: {input: {%s}, steps: [%s]}\n"


def test_an_interrupt_leaves_what_is_done(
    run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("seqblocks.probes.training._schedule", interrupted)
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: 64", "{embed: 8}, unembed"))
    done = run_main("probe", "a.yaml", "parity", "recall", "--format", "json", cwd=tmp_path)
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 130
    assert {(row["task"], row["steps"], row["cut"]) for row in rows} == {("parity", 0, True)}


@pytest.mark.parametrize(("last", "lengths"), [(2, [40]), (4, [40, 80, 256]), (1, [])])
def test_an_interrupt_while_a_model_is_read_leaves_what_is_done(
    last: int, lengths: list[int], run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Three lengths of parity are read, then those of recall."""
    before, calls = training.read, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == last:
            raise KeyboardInterrupt
        return before(*arguments)

    monkeypatch.setattr(training, "read", interrupted)
    monkeypatch.setattr(training, "READ", 32)
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: 64", "{embed: 8}, unembed"))
    done = run_main("probe", "a.yaml", "parity", "recall", "--steps", "1", "--format", "json", cwd=tmp_path)
    assert done.returncode == 130
    assert [row["length"] for row in json.loads(done.stdout or '{"rows": []}')["rows"]] == lengths


def test_each_rate_has_a_line_in_the_plot() -> None:
    results = [
        Result("a", length, accuracy, 0.5, seed, accuracy, 10, 1, 1.0, False, 1, rate=rate)
        for rate, accuracy in ((0.01, 1.0), (0.001, 0.5)) for seed in (0, 1) for length in (10, 40)
    ]
    found = plot(results, "m")
    assert found.count("<polyline") == 2
    for rate in ("0.01", "0.001"):
        assert f"a, rate {rate}, trained at 10, mean of 2 seeds" in found


def test_the_plot_has_the_means_the_range_and_chance() -> None:
    """Places are computed from the figures again: 0 to 1 is from the bottom to the top of the frame."""
    values = {(10, 0): 1.0, (10, 1): 0.8, (40, 0): 0.6, (40, 1): 0.6}
    results = [
        Result("a<b", length, accuracy, 0.5, seed, accuracy, 10, 1, 1.0, False, 1)
        for (length, seed), accuracy in values.items()
    ]
    root = ElementTree.fromstring(plot(results, "m&m"))
    space = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{space}polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert (x0, x1) == (LEFT, WIDTH - RIGHT)
    frame = HEIGHT - TOP - BOTTOM
    assert (y0, y1) == (pytest.approx(TOP + 0.1 * frame, abs=0.05), pytest.approx(TOP + 0.4 * frame, abs=0.05))
    trained, other = root.findall(f"{space}circle")
    assert trained.attrib["fill"] != other.attrib["fill"] == "#fff"
    (chance,) = (each for each in root.findall(f"{space}line") if "stroke-dasharray" in each.attrib)
    assert float(chance.attrib["y1"]) == pytest.approx(TOP + 0.5 * frame, abs=0.05)
    said = [each.text or "" for each in root.findall(f"{space}text")]
    assert said[0].startswith("m&m")
    assert "a<b, trained at 10, mean of 2 seeds (dotted: a guess)" in said


def test_a_plot_of_one_length() -> None:
    ElementTree.fromstring(plot([Result("a", 10, 0.5, 0.5, 0, 0.5, 10, 1, 1.0, False, 1)], "m"))


def test_a_plot_that_cannot_be_written_is_reported_before_training(
    run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: vocabulary", "{embed: 8}, unembed"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write to any folder
    done = run_main("probe", "a.yaml", "parity", "--plot", "a.svg", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--plot a.svg cannot be written: Permission denied" in done.stderr


def test_the_command(run_main: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: vocabulary", "{embed: 8}, unembed"))
    words = ("probe", "a.yaml", "--steps", "2", "--seeds", "2", "parity")
    done = run_main(*words, "--format", "json", cwd=tmp_path)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["task"], row["length"], row["seed"]) for row in rows] == [
        ("parity", length, seed) for seed in range(2) for length in (40, 80, 256)
    ]
    assert {"accuracy", "chance", "scaled", "steps", "seconds", "cut"} <= rows[0].keys()
    shown = run_main(*words, "--plot", "a.svg", cwd=tmp_path).stdout
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert shown.count("parity  ") == 6
    assert "stopped" not in shown
    late = run_main("probe", "a.yaml", "parity", "--seconds", "0.01", cwd=tmp_path).stdout
    assert re.search(r" \d+\*  ", late)
    assert "* training stopped before its last step" in late
    assert "no folder none" in run_main(*words, "--plot", "none/a.svg", cwd=tmp_path).stderr
    assert "--plot .: it is a folder" in run_main(*words, "--plot", ".", cwd=tmp_path).stderr
    for name in ("a.png", "-"):
        assert f"a file that ends in .svg, not {name}" in run_main(*words, "--plot", name, cwd=tmp_path).stderr
    assert "meta computes nothing" in run_main(*words, "--device", "meta", cwd=tmp_path).stderr
    rates = json.loads(run_main(*words, "--lr", "1e-3,1e-2", "--format", "json", cwd=tmp_path).stdout)["rows"]
    assert [(row["rate"], row["seed"]) for row in rows + rates if row["length"] == 40] == [
        (0.01, 0), (0.01, 1), (0.001, 0), (0.001, 1), (0.01, 0), (0.01, 1)
    ]  # fmt: skip
    two = [row["accuracy"] for row in rows if row["length"] == 80]
    assert f"parity at 80, rate 0.01, 2 seeds: median {sum(two) / 2:.3f}, lowest {min(two):.3f}" in shown
    named = run_main("probe", "a.yaml", "mqar", "recall", "--steps", "1", "--set", "vocabulary=64", cwd=tmp_path).stdout
    assert named.count("recall  ") == 2
    failed = run_main("probe", "a.yaml", "partiy", cwd=tmp_path)
    assert failed.returncode == 2
    assert "did you mean 'parity'?" in failed.stderr


def test_the_command_checks_resets(run_main: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: vocabulary", "{embed: 8}, {causal_conv: {kernel: 2}}, unembed"))
    words = ("probe", "a.yaml", "t-maze", "--steps", "1")
    shown = run_main(*words, cwd=tmp_path).stdout
    assert "t-maze: a row with resets equals its episodes alone: yes" in shown
    checks = json.loads(run_main(*words, "--format", "json", cwd=tmp_path).stdout)["checks"]
    assert [(check["task"], check["holds"]) for check in checks] == [("t-maze", True)] * 3
