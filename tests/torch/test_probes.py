"""Tasks of `seqblocks probe`: labels recomputed by slow programs, what training does, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import seqblocks
from seqblocks.errors import UsageError
from seqblocks.probes import TASKS, probe
from seqblocks.probes.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, plot
from seqblocks.probes.tasks import NOTHING, group
from seqblocks.probes.training import Result

LENGTHS = {name: (task.shortest or 16, task.length) for name, task in TASKS.items()}


def parity(x: list[int]) -> list[int]:
    return [sum(x[: at + 1]) % 2 for at in range(len(x))]


def modular(x: list[int]) -> list[int]:
    text = "".join(str(token) if token < 5 else "+-*"[token - 5] for token in x)
    return [eval(text[: at + 1]) % 5 if at % 2 == 0 else NOTHING for at in range(len(x))]


def word(elements: list[tuple[int, ...]]) -> Callable[[list[int]], list[int]]:
    """Return the labels of words: the product x1 x2 … xt, which applies xt first."""

    def labels(x: list[int]) -> list[int]:
        found, product = [], tuple(range(len(elements[0])))
        for token in x:
            product = tuple(product[i] for i in elements[token])
            found.append(elements.index(product))
        return found

    return labels


def recall(x: list[int]) -> list[int]:
    pairs = max(1, len(x) // 12)
    known = dict(zip(x[0 : 2 * pairs : 2], x[1 : 2 * pairs : 2], strict=True))
    assert len(known) == pairs
    return [NOTHING] * 2 * pairs + [known[token] if token else NOTHING for token in x[2 * pairs :]]


def induction(x: list[int]) -> list[int]:
    assert x.count(0) == 2
    assert x[-1] == 0
    return [NOTHING] * (len(x) - 1) + [x[x.index(0) + 1]]


def copying(x: list[int]) -> list[int]:
    data = [token for token in x if token > 1]
    assert x[-4:] == [1, 1, 1, 1]
    assert len(data) == 4
    return [NOTHING] * (len(x) - 4) + data


def sign(p: tuple[int, ...]) -> int:
    """Return the sign of a permutation by its cycles."""
    seen: set[int] = set()
    cycles = 0
    for start in range(len(p)):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = p[start]
    return (-1) ** (len(p) - cycles)


THREE, FIVE = list(permutations(range(3))), list(permutations(range(5)))
PROGRAMS = {
    "parity": parity, "modular": modular, "s3": word(THREE), "a5": word([p for p in FIVE if sign(p) == 1]),
    "s5": word(FIVE), "recall": recall, "induction": induction, "copying": copying,
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_labels(name: str) -> None:
    task, generator = TASKS[name], torch.Generator().manual_seed(0)
    for length in (*LENGTHS[name], *task.lengths[1:2]):
        x, y = task.draw(generator, 5, length)
        assert x.shape == y.shape == (5, length)
        assert 0 <= x.min() <= x.max() < task.vocabulary
        assert y.max() < task.labels
        for row, labels in zip(x.tolist(), y.tolist(), strict=True):
            assert PROGRAMS[name](row) == labels


@pytest.mark.parametrize("name", TASKS)
def test_draws(name: str) -> None:
    """The same for a seed, others for another; labels are about uniform, so that guessing gives the stated chance."""
    task = TASKS[name]
    draws = [task.draw(torch.Generator().manual_seed(seed), 400, task.length) for seed in (0, 0, 1)]
    assert torch.equal(draws[0].x, draws[1].x)
    assert not torch.equal(draws[0].x, draws[2].x)
    labels = draws[0].y[draws[0].y != NOTHING]
    share = labels.bincount(minlength=task.labels).max().item() / len(labels)
    # a label more often than a quarter over its share would be a shortcut; products mod 5 are 0 more often
    assert share < (0.5 if name == "modular" else 1.25 * task.chance + 4 * (task.chance / len(labels)) ** 0.5)


def test_groups() -> None:
    """A swap and a cycle of three do not commute, and the first element is the identity."""
    elements, table = group("S3")
    names = [tuple(p) for p in elements.tolist()]
    swap, cycle = names.index((1, 0, 2)), names.index((1, 2, 0))
    assert names[table[swap, cycle]] == (0, 2, 1)  # the cycle first: 0 -> 1 -> 0, 1 -> 2 -> 2, 2 -> 0 -> 1
    assert names[table[cycle, swap]] == (2, 1, 0)
    for name, size in (("S3", 6), ("A5", 60), ("S5", 120)):
        elements, table = group(name)
        assert len(elements) == size
        assert torch.equal(table[0], torch.arange(size))
        assert torch.equal(table[:, 0], torch.arange(size))


TEXT = "seqblocks: 1\nlet: {vocabulary: 4}\nmodel: {input: {%s}, steps: [%s]}\n"


def spec(kind: str, steps: str) -> Any:
    _, found = seqblocks.load_text(TEXT % (kind, steps))
    return found


TOKENS = spec("tokens: vocabulary", "{embed: 8}, silu, unembed")


def test_a_model_without_memory_stays_at_chance_where_it_needs_one() -> None:
    results = probe(TOKENS, TASKS["parity"], steps=30)
    assert [result.length for result in results] == [40, 80, 256]
    assert all(abs(result.last_eighth - 0.5) < 0.05 for result in results)
    assert not results[0].cut


def test_the_same_seed_gives_the_same_result() -> None:
    first, again, other = ([r.accuracy for r in probe(TOKENS, TASKS["parity"], seed, steps=5)] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_model_of_features_gets_an_embedding_and_a_head() -> None:
    """A short convolution knows the sum of two bits, which is the parity of two bits, and no more."""
    model = spec("features: 16", "{causal_conv: {kernel: 2, mixing: true}}, silu, {linear: 16}, gelu")
    task = TASKS["parity"]
    pair = type(task)(**{**vars(task), "length": 2, "lengths": (2,), "shortest": 0, "steps": 150})
    (result,) = probe(model, pair)
    assert result.accuracy == 1


def test_time_ends_a_training() -> None:
    (result, *_) = probe(TOKENS, TASKS["parity"], steps=10_000, seconds=0.2)
    assert result.cut
    assert 0 < result.steps < 10_000


@pytest.mark.parametrize(
    ("kind", "steps", "message"),
    [
        ("tokens: vocabulary", "{embed: 8}", "--set vocabulary=64"),
        ("image: {size: 8}", "{patch_embed: {patch: 4, features: 8}}", "maps each token"),
        ("features: 8, length: 9", "{linear: 8}", "any length"),
        ("features: 8", "silu", "no parameters"),
    ],
)
def test_models_that_do_not_fit(kind: str, steps: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(spec(kind, steps), TASKS["recall"])


def test_an_interrupt_leaves_what_is_done(run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(step: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("seqblocks.probes.training._schedule", interrupted)
    done = run_main("probe", "mlstm_small", "parity", "recall", "--format", "json")
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 130
    assert {(row["task"], row["steps"], row["cut"]) for row in rows} == {("parity", 0, True)}


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
    assert "no folder none" in run_main(*words, "--plot", "none/a.svg", cwd=tmp_path).stderr
    failed = run_main("probe", "a.yaml", "partiy", cwd=tmp_path)
    assert failed.returncode == 2
    assert "did you mean 'parity'?" in failed.stderr
