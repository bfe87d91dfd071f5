"""Tasks of `seqblocks probe`: labels recomputed by slow programs, what training does, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.errors import UsageError
from seqblocks.probes import PAPER, TASKS, probe, training
from seqblocks.probes.batches import NOTHING
from seqblocks.probes.checks import reset_checks
from seqblocks.probes.model import Probed, _places
from seqblocks.probes.tasks import group
from seqblocks.probes.training import IN_A_ROW

LENGTHS = {name: (task.shortest or 24, task.length) for name, task in TASKS.items()}


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


def in_context_recall(x: list[int]) -> list[int]:
    known: dict[int, int] = {}
    labels = [NOTHING] * len(x)
    for at in range(0, len(x), 2):
        if x[at] < 8:  # not noise
            labels[at] = known.get(x[at], NOTHING)
            value = x[at + 1] if at + 1 < len(x) else known[x[at]]
            assert 8 <= value < 16
            assert known.setdefault(x[at], value) == value
    assert labels[(len(x) - 1) // 2 * 2] != NOTHING
    return labels


def noisy_recall(x: list[int]) -> list[int]:
    assert all((a >= 16) == (b >= 16) for a, b in zip(x[::2], x[1::2], strict=False))
    return in_context_recall(x)


def fuzzy_recall(x: list[int]) -> list[int]:
    text = "".join("p" if token == 15 else "kv"[token >= 7] for token in x)
    assert re.fullmatch("p*(k{1,3}v{1,3})+", text)
    known: dict[tuple[int, ...], list[int]] = {}
    labels, found = [NOTHING] * len(x), ""
    for match in re.finditer("(k+)(v+)", text):
        key, value = tuple(x[slice(*match.span(1))]), x[slice(*match.span(2))]
        assert len(set(key)) == len(key)
        assert len(set(value)) == len(value)
        if found := "known" * (key in known):
            labels[match.start(2) - 1 : match.end(2) - 1] = known[key]
        assert known.setdefault(key, value) == value
    assert found, "the last key must have been seen"
    return labels


def selective_copying(x: list[int]) -> list[int]:
    ask = x.index(15)
    data = [token for token in x[:ask] if token != 14]
    assert x[ask + 1 :] == [14] * len(data)
    return [NOTHING] * (ask + 1) + data


def compression(x: list[int]) -> list[int]:
    assert x[-1] == 15
    return [*x[:-1], NOTHING]


@cache
def remembered() -> dict[int, int]:
    """Return the map of `memorization`, which is the same for all rows and seeds."""
    x, y, _ = TASKS["memorization"].draw(torch.Generator().manual_seed(9), 200, 64)
    found = dict(zip(x[:, ::2].flatten().tolist(), y[:, 1::2].flatten().tolist(), strict=True))
    assert len(set(found.values())) == len(found) == 127
    return found


def memorization(x: list[int]) -> list[int]:
    assert all(token == 255 for token in x[1::2])
    assert all(token < 127 for token in x[::2])
    return [NOTHING if at % 2 == 0 else remembered()[x[at - 1]] for at in range(len(x))]


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


def long_copying(x: list[int]) -> list[int]:
    ask = x.index(9)
    assert x[10:ask] == [8] * (ask - 10)
    assert x[ask + 1 :] == [8] * 9
    assert max(x[:10]) < 8
    return [NOTHING] * ask + x[:10]


PROGRAMS = {
    "parity": parity, "modular": modular, "s3": word(THREE), "a5": word([p for p in FIVE if sign(p) == 1]),
    "s5": word(FIVE), "recall": recall, "induction": induction, "copying": copying,
    "in-context-recall": in_context_recall, "noisy-recall": noisy_recall, "fuzzy-recall": fuzzy_recall,
    "selective-copying": selective_copying, "compression": compression, "memorization": memorization,
    "long-copying": long_copying,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_labels(name: str) -> None:
    task, generator = TASKS[name], torch.Generator().manual_seed(0)
    for length in (*LENGTHS[name], *task.lengths[1:2]):
        x, y, _ = task.draw(generator, 5, length)
        assert x.shape == y.shape == (5, length)
        assert 0 <= x.min() <= x.max() < task.vocabulary
        assert y.max() < task.labels
        for row, labels in zip(x.tolist(), y.tolist(), strict=True):
            assert PROGRAMS[name](row) == labels


def test_every_task_has_a_slow_program() -> None:
    assert {*TASKS} == {*PROGRAMS, *EPISODES, "adding", "image-rows", "image-columns"}


def repeat_first(x: list[int]) -> list[int]:
    return [NOTHING, *[x[0]] * (len(x) - 1)]


def repeat_previous(x: list[int]) -> list[int]:
    assert all(x.count(suit) <= 13 for suit in x)  # a deck has 13 cards of a suit
    return [NOTHING] * min(3, len(x)) + x[:-3]


def maze(x: list[int]) -> list[int]:
    assert x[0] in (0, 1)
    assert x[1:] == [2] * (len(x) - 2) + [3]
    return [NOTHING] * (len(x) - 1) + [x[0]]


EPISODES = {"repeat-first": repeat_first, "repeat-previous": repeat_previous, "t-maze": maze}


@pytest.mark.parametrize("name", EPISODES)
def test_labels_of_episodes(name: str) -> None:
    """Each episode is labelled by a program that sees nothing else."""
    task, generator = TASKS[name], torch.Generator().manual_seed(0)
    for length in task.lengths:
        x, y, resets = task.draw(generator, 20, length)
        assert resets is not None
        assert resets.shape == x.shape == y.shape == (20, length)
        assert 0 <= x.min() <= x.max() < task.vocabulary
        counts = set()
        for row, labels, marks in zip(x.tolist(), y.tolist(), resets.tolist(), strict=True):
            starts = [at for at in range(length) if marks[at]]
            episodes = [row[a:b] for a, b in pairwise([*starts, length])]
            assert [label for episode in episodes for label in EPISODES[name](episode)] == labels
            assert min(map(len, episodes)) >= 4
            counts.add(len(episodes))
        assert counts == ({length // 52} if name == "repeat-previous" else {3})


def test_adding() -> None:
    """Two numbers are marked, one in each half, at each place about as often; their sum is asked at the end."""
    x, y, _ = TASKS["adding"].draw(torch.Generator().manual_seed(0), 5000, 11)
    for row, answers in zip(x.tolist(), y.tolist(), strict=True):
        first, second = (at for at in range(11) if row[at][1])
        assert first < 5 <= second
        assert answers == [NOTHING] * 10 + [pytest.approx(row[first][0] + row[second][0], abs=1e-6)]
    for place, share in enumerate([1 / 5] * 5 + [1 / 6] * 6):
        found = x[:, place, 1].mean().item()
        assert found == pytest.approx(share, abs=5 * (share / 5000) ** 0.5)
    sums = y[:, -1]
    assert sums.var().item() == pytest.approx(1 / 6, rel=0.1)  # the error of always 1
    guess = ((sums - 1).abs() < 0.1).double().mean().item()
    assert guess == pytest.approx(TASKS["adding"].chance, abs=5 * (0.19 / 5000) ** 0.5)


@pytest.mark.parametrize(("name", "is_vertical"), [("image-rows", False), ("image-columns", True)])
def test_textures(name: str, is_vertical: bool) -> None:
    """Neighbours in one direction alone are alike in class 1; counted by loops over the cells of each image."""
    x, y, _ = TASKS[name].draw(torch.Generator().manual_seed(0), 1000, 36)
    alike = {(label, down): [0, 0] for label in (0, 1) for down in (True, False)}
    for row, labels in zip(x.tolist(), y.tolist(), strict=True):
        assert labels[:-1] == [NOTHING] * 35
        for at in range(36):
            if at >= 6:
                alike[labels[-1], True][row[at] == row[at - 6]] += 1
            if at % 6:
                alike[labels[-1], False][row[at] == row[at - 1]] += 1
    for (label, down), (other, same) in alike.items():
        share = 0.85 if label == 1 and down == is_vertical else 0.5
        assert same / (other + same) == pytest.approx(share, abs=5 * (0.25 / (other + same)) ** 0.5)
    assert x.double().mean().item() == pytest.approx(0.5, abs=5 * (0.25 * 6 / x.numel()) ** 0.5)  # chains of 6 cells


@pytest.mark.parametrize("name", TASKS)
def test_draws(name: str) -> None:
    """The same for a seed, others for another; labels are about uniform, so that guessing gives the stated chance."""
    task = TASKS[name]
    draws = [task.draw(torch.Generator().manual_seed(seed), 400, task.length) for seed in (0, 0, 1)]
    assert torch.equal(draws[0].x, draws[1].x)
    assert not torch.equal(draws[0].x, draws[2].x)
    labels = draws[0].y[draws[0].y != NOTHING]
    if task.tolerance:
        return  # numbers; see test_adding
    share = labels.bincount(minlength=task.labels).max().item() / len(labels)
    # a label more often than a quarter over its share would be a shortcut; products mod 5 are 0 more often
    assert share < (0.5 if name == "modular" else 1.25 * task.chance + 4 * (task.chance / len(labels)) ** 0.5)


LOOKED_UP = {"modular", "compression", "memorization", "adding"}  # where one token does tell, or answers are numbers


@pytest.mark.parametrize("back", [0, 1], ids=["the token", "the token before"])
@pytest.mark.parametrize("name", sorted({*TASKS} - LOOKED_UP))
def test_one_token_does_not_tell_the_answer(name: str, back: int) -> None:
    """The best answer for each token, counted in some rows, is no better than a guess in others.

    The first answer of a row is left out, since the product of one element is that element. Allowed are a quarter more
    than chance (the tokens of a value differ in fuzzy recall, and cards are dealt without replacement) and five
    standard deviations, as if one answer of each row were independent. In two tasks of MAD, one key in eight is that
    of the pair before, whose value is the token before.
    """
    task = TASKS[name]
    length, rows = task.length, 200 if name == "fuzzy-recall" else 800  # which draws slowly
    chance = 1 / 8 + 7 / 64 if back and name in ("in-context-recall", "noisy-recall") else task.chance
    counts = torch.zeros(task.vocabulary, task.labels)
    for seed in (0, 1):
        x, y, _ = task.draw(torch.Generator().manual_seed(seed), rows, length)
        seen, asked = x[:, 1 - back : length - back][y[:, 1:] != NOTHING], y[:, 1:][y[:, 1:] != NOTHING]
        if not seed:
            counts.index_put_((seen, asked), torch.ones(len(seen)), accumulate=True)
    right = (counts.argmax(1)[seen] == asked).double().mean().item()
    assert right < 1.25 * chance + 5 * (chance / rows) ** 0.5


def paper_parity(x: list[int]) -> list[int]:
    bits = [token for token in x if token]
    assert x == bits + [0] * (len(x) - len(bits))
    return [NOTHING] * (len(bits) - 1) + [bits.count(2) % 2] + [NOTHING] * (len(x) - len(bits))


def paper_modular(x: list[int]) -> list[int]:
    end = x.index(4)
    assert not any(x[end + 1 :])
    value = eval("".join(str(token - 5) if token > 4 else " +-*"[token] for token in x[:end])) % 5
    return [value if at == end else NOTHING for at in range(len(x))]


def paper_recall(x: list[int]) -> list[int]:
    known = dict(zip(x[0:32:2], x[1:32:2], strict=True))
    assert len(known) == len(set(known.values())) == 16
    assert sorted(token for token in x[32::2] if token) == sorted(known)
    assert not any(x[33::2])
    return [NOTHING] * 32 + [known.get(token, NOTHING) for token in x[32:]]


def paper_copying(x: list[int]) -> list[int]:
    data = [token for token in x if token > 1]
    assert len(data) == x[-16:].count(1) == x.count(1) == 16
    return [NOTHING] * (len(x) - 16) + data


PUBLISHED = {
    "parity": paper_parity, "modular": paper_modular, "recall": paper_recall, "copying": paper_copying,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*PAPER} - {"adding"}))
def test_labels_of_published_settings(name: str) -> None:
    task, generator = PAPER[name], torch.Generator().manual_seed(1)
    program = PUBLISHED.get(name, PROGRAMS[name])
    for length in task.lengths:
        x, y, _ = task.draw(generator, 5, length)
        assert 0 <= x.min() <= x.max() < task.vocabulary
        assert y.max() < task.labels
        for row, labels in zip(x.tolist(), y.tolist(), strict=True):
            assert program(row) == labels


def test_sizes_of_published_settings() -> None:
    """In training rows have 3 to 40 places, the last of which is that of the answer; read are 40 to 256."""
    for name, fewest in (("parity", 0), ("modular", 1)):
        for length, shortest in ((40, 3), (256, 40)):
            x, y, _ = PAPER[name].draw(torch.Generator().manual_seed(0), 20_000, length)
            sizes = (y != NOTHING).long().argmax(1) + 2
            assert sizes.min() == shortest - (name == "modular" and shortest % 2 == 0)
            assert sizes.max() == length - (name == "modular" and length % 2 == 0)
            assert ((y != NOTHING).sum(1) == 1).all()
            assert (x == 0).any() == (length > fewest)


def test_queries_of_recall_come_soon() -> None:
    """The first of the 112 places of a query has 1 / sum(j ** -0.99) of the weight, where a single one is drawn."""
    from seqblocks.probes.paper import zoology

    _, y, _ = zoology(1, 64)(torch.Generator().manual_seed(0), 20_000, 226)
    first = (y[:, 2] != NOTHING).double().mean().item()
    share = 1 / sum(j**-0.99 for j in range(1, 113))
    assert first == pytest.approx(share, abs=5 * (share / 20_000) ** 0.5)


def test_places_of_a_decoder_are_sines_and_cosines() -> None:
    found = _places(7, 6)
    for at in range(7):
        for k in range(3):
            angle = at / 10_000 ** (2 * k / 6)
            assert found[at, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert found[at, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_compression_reads_the_last_output_alone() -> None:
    """A model without memory has only the last token there, which is the same in each row; a wide window has all."""
    (nothing,) = probe(TOKENS16, TASKS["compression"], steps=60)
    assert nothing.accuracy < 0.1
    short = replace(TASKS["compression"], length=3, lengths=(3,), steps=300, rate=1e-2)
    wide = spec("features: 32", "{causal_conv: {kernel: 3, mixing: true}}")
    (all_of_it,) = probe(wide, short)
    assert all_of_it.accuracy > 0.9


def test_what_papers_report_is_beside_its_setting(run_main: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text(TEXT % ("tokens: vocabulary", "{embed: 8}, unembed"))
    words = ("probe", "a.yaml", "noisy-recall", "--preset", "paper", "--steps", "1", "--set", "vocabulary=32")
    shown = run_main(*words, cwd=tmp_path).stdout
    assert "arXiv:2406.06484: Transformer 86.8" in shown
    assert "dim 128" in shown
    data = json.loads(run_main(*words, "--format", "json", cwd=tmp_path).stdout)
    assert data["preset"] == "paper"
    assert data["published"]["noisy-recall"][0]["figures"]["DeltaNet"] == 100
    assert [(row["task"], row["length"]) for row in data["rows"]] == [("noisy-recall", 128)]
    quick = run_main("probe", "a.yaml", "parity", "t-maze", "--steps", "1", cwd=tmp_path).stdout
    assert "published in another setting (--preset paper), arXiv:2411.12537: Transformer 0.022" in quick
    assert quick.count("published") == 1
    failed = run_main("probe", "a.yaml", "t-maze", "--preset", "paper", cwd=tmp_path)
    assert failed.returncode == 2
    assert "t-maze has no published setting here" in failed.stderr


def test_settings_that_are_ours_say_so() -> None:
    chosen = {"s3", "a5", "s5", "induction", "long-copying", "adding"}
    assert {name for name, task in PAPER.items() if "batch, steps and rate are our choice" in task.about} == chosen
    assert {*TASKS} - {*PAPER} == {*EPISODES, "image-rows", "image-columns"}


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
TOKENS16 = spec("tokens: 16", "{embed: 8}, silu, unembed")


def test_the_page_has_the_settings_of_all_tasks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "probes.md").read_text(encoding="utf-8")
    found = {}
    for line in page.partition("## Settings")[0].splitlines():
        if line.startswith("| `"):
            names, vocabulary, trained, lengths, chance, _ = (part.strip() for part in line.strip("|").split(" | "))
            tasks = [TASKS[name.strip("`")] for name in names.split(", ")]
            for each, task in enumerate(tasks):
                one = [text.split(", ")[min(each, text.count(","))] for text in (vocabulary, chance)]
                found[task.name] = [one[0].replace("numbers", "0"), trained, lengths, float(one[1])]
    expected = {
        name: [str(task.vocabulary), str(task.length), ", ".join(map(str, task.lengths)), round(task.chance, 3)]
        for name, task in TASKS.items()
    }
    assert found == expected


def test_a_model_without_memory_stays_at_chance_where_it_needs_one() -> None:
    results = probe(TOKENS, TASKS["parity"], steps=30)
    assert [result.length for result in results] == [40, 80, 256]
    assert all(abs(result.last_eighth - 0.5) < 0.05 for result in results)
    assert not results[0].cut


def image(order: str, size: int = 8, patch: int = 1, end: str = "{pool: mean}") -> Any:
    """Return a model that sees pairs of neighbours in one order of an image's tokens."""
    mixer = "causal_conv: {kernel: 2, mixing: true}"
    steps = f"{{patch_embed: {{patch: {patch}, features: 16}}}}, {{scan: {{order: {order}, steps: [{mixer}]}}}}, gelu"
    return spec(f"image: {{size: {size}, channels: 2}}", f"{steps}, {{linear: 16}}, gelu, {end}")


@pytest.mark.slow
@pytest.mark.parametrize(("order", "name"), [("forward", "image-rows"), ("columns", "image-columns")])
def test_a_model_sees_the_neighbours_of_its_order(order: str, name: str) -> None:
    """And not those of the other one: both are images of 8 x 8 tokens, also as patches of pixels."""
    other = "image-rows" if name == "image-columns" else "image-columns"
    (right,) = probe(image(order), TASKS[name], steps=150)
    assert right.accuracy > 0.95
    assert right.length == right.trained_length == 64
    (wrong,) = probe(image(order), TASKS[other], steps=150)
    assert abs(wrong.accuracy - 0.5) < 5 * (0.25 / 256) ** 0.5 + 0.1  # it may learn by heart how rare sums differ
    (patches,) = probe(image(order, 16, 2, "identity"), TASKS[name], steps=150)
    assert patches.accuracy > 0.95
    assert patches.length == 64


def test_a_sequence_model_reads_images_by_rows() -> None:
    model = spec("features: 16", "{causal_conv: {kernel: 2, mixing: true}}, gelu, {linear: 16}, gelu")
    seen, unseen = (probe(model, TASKS[name], steps=150)[0].accuracy for name in ("image-rows", "image-columns"))
    assert seen > 0.95
    assert unseen < 0.75


def test_adding_is_learned_where_both_numbers_are_seen() -> None:
    """A window of three knows all of three tokens; the mean square error falls below that of the guess of 1, 1/6."""
    model = spec("features: 32", "{causal_conv: {kernel: 3, mixing: true}}, gelu, {linear: 32}, gelu")
    short = replace(TASKS["adding"], length=3, lengths=(3, 30), steps=400)
    near, far = probe(model, short)
    assert near.accuracy > 0.9
    assert near.loss < 0.01
    assert far.accuracy < 0.5
    assert far.loss > 0.05


def test_resets_are_checked_exactly() -> None:
    """A recurrence keeps the law of resets; a model without memory is the same without them."""
    model = spec("tokens: vocabulary", "{embed: 8}, {causal_conv: {kernel: 3}}, unembed")
    found = reset_checks(model, TASKS["t-maze"])
    assert [check.holds for check in found] == [True, True, True]
    assert found[1].difference > 1e-3
    assert [check.holds for check in reset_checks(TOKENS, TASKS["repeat-first"])] == [True, False, True]


def test_a_wrong_reset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a model does not see the resets, and then begins one token too late."""
    model = spec("tokens: vocabulary", "{embed: 8}, {causal_conv: {kernel: 3}}, unembed")
    forward = Probed.forward
    monkeypatch.setattr(Probed, "forward", lambda self, x, resets=None: forward(self, x))
    assert [check.holds for check in reset_checks(model, TASKS["t-maze"])] == [False, False, True]
    late: Callable[..., Any] = lambda self, x, r=None: forward(self, x, None if r is None else r.roll(1, 1))  # noqa: E731
    monkeypatch.setattr(Probed, "forward", late)
    assert [check.holds for check in reset_checks(model, TASKS["t-maze"])] == [False, True, False]


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


BLOCKS = {
    "slstm": "slstm_block: {dim: dim, heads: dim / 8, multiple: 32}",
    "mlstm": "mlstm_block: {dim: dim, heads: dim / 8, multiple: 32}",
    "wide slstm": "slstm_block: {dim: dim, heads: dim / 32, multiple: 32}",
    "wide mlstm": "mlstm_block: {dim: dim, heads: dim / 32, multiple: 32}",
    "mamba": "mamba_block: {dim: dim}", "centaurus": "centaurus_block: {state: 16, sub_states: 8}",
}  # fmt: skip
STACK = """seqblocks: 1
use: [xlstm, mamba, centaurus]
let: {dim: 32, vocabulary: 16}
model:
  input: {tokens: vocabulary}
  steps:
    - embed: {features: dim, init: {weight: "normal(0, 0.3)"}}
    - repeat: {times: %d, name: layers, steps: [%s]}
    - rms_norm
    - unembed
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::seqblocks.errors.SpecWarning")
@pytest.mark.parametrize(
    ("task", "dim", "layers", "length", "rate", "able", "unable"),
    [
        ("parity", 32, 1, 256, 1e-2, ("slstm", 0.95), ("mlstm", 0.6)),
        ("copying", 32, 2, 96, 1e-2, ("mamba", 0.8), ("centaurus", 0.45)),
        ("recall", 64, 2, 96, 3e-3, ("wide mlstm", 0.6), ("wide slstm", 0.2)),
    ],
)
def test_quick_settings_separate_mixers(
    task: str, dim: int, layers: int, length: int, rate: float, able: tuple[str, float], unable: tuple[str, float]
) -> None:
    """At a longer length, and at the best of three rates, where three seeds agree (docs/probes.md)."""
    found = []
    for kind, _ in (able, unable):
        sizes = {"dim": dim, "vocabulary": max(16, TASKS[task].vocabulary)}
        _, model = seqblocks.load_text(STACK % (layers, BLOCKS[kind]), set=sizes)
        found += [result.accuracy for result in probe(model, TASKS[task], rate=rate) if result.length == length]
    assert found[0] >= able[1]
    assert found[1] <= unable[1]


@pytest.mark.slow
def test_a_solved_training_goes_on_with_the_last_steps() -> None:
    """In quick settings; those of papers take all steps."""
    model = spec("features: 16", "{causal_conv: {kernel: 2, mixing: true}}, silu, {linear: 16}, gelu")
    pair = replace(TASKS["parity"], length=2, lengths=(2,), shortest=0, steps=600)
    (short,), (whole,) = (probe(model, replace(pair, ends_early=early)) for early in (True, False))
    assert 60 + IN_A_ROW <= short.steps < 600 == whole.steps
    assert short.accuracy == whole.accuracy == 1
    assert not short.cut
    assert not any(task.ends_early for task in PAPER.values())


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


@pytest.mark.parametrize(
    ("name", "kind", "steps", "message"),
    [
        ("adding", "tokens: 4", "{embed: 8}, unembed", "2 numbers for each token"),
        ("t-maze", "features: 8", "{batch_norm: {}}, {linear: 8}", "episodes in a row, which batch_norm"),
        ("image-rows", "image: {size: [8, 16]}", "{patch_embed: {patch: 4, features: 8}}", "2 rows and 4 columns"),
        ("image-rows", "features: 8, length: 9", "{linear: 8}", "any length"),
        ("long-copying", "features: 8", "{linear: 8}, {pool: mean}", "maps each token"),
        ("recall", "features: 8", "{position_embed: {length: 47}}", "trained at 48 tokens, and the model has 47"),
        ("recall", "features: 8", "{prefix: {count: 2}}, {position_embed: {length: 49}}, {slice: {first: 2}}",
         "trained at 48 tokens, and the model has 47"),
        ("t-maze", "features: 8", "{linear: {features: 8, as: a}}], outputs: [a", "maps each token"),
        *((name, "features: 8", "{downsample: 4}, {linear: 8}, {upsample: 4}", "merges 4 tokens into one, and not all")
          for name in ("parity", "adding")),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_a_task(name: str, kind: str, steps: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(spec(kind, steps), TASKS[name])


def test_a_model_is_read_at_the_lengths_for_which_it_has_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "READ", 32)
    found = probe(spec("tokens: 2", "{embed: 8}, {position_embed: {length: 80}}, unembed"), TASKS["parity"], steps=1)
    assert [result.length for result in found] == [40, 80]
