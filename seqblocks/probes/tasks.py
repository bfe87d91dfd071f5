"""Generators of the tasks: token ids and labels, from a generator of torch on the CPU, so that all machines agree."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Generator, Tensor

from seqblocks.probes import episodes, images, long_range, mad
from seqblocks.probes.batches import NOTHING, Batch, Draw, distinct, integers, make_task


def _running_sum(modulus: int) -> Draw:
    def draw(g: Generator, batch: int, length: int) -> Batch:
        x = integers(g, 0, modulus, batch, length)
        return Batch(x, x.cumsum(1) % modulus)

    return draw


def arithmetic(g: Generator, batch: int, length: int) -> Batch:
    """Return expressions mod 5, such as `3 + 2 * 4`: ids 0 to 4 are the numbers, 5 to 7 the operators + - *.

    The value of the expression so far is asked at each number; `*` binds tighter.
    """
    numbers, operators = integers(g, 0, 5, batch, length), integers(g, 0, 3, batch, length)
    is_number = torch.arange(length) % 2 == 0
    x = torch.where(is_number, numbers, operators + 5)
    y = torch.full_like(x, NOTHING)
    total, product = torch.zeros(batch, dtype=torch.long), numbers[:, 0].clone()  # the value is total + product
    y[:, 0] = numbers[:, 0]
    for at in range(2, length, 2):
        op, number = operators[:, at - 1], numbers[:, at]
        signed = torch.where(op == 1, -number, number)
        total = torch.where(op == 2, total, total + product) % 5
        product = torch.where(op == 2, product * number, signed) % 5
        y[:, at] = (total + product) % 5
    return Batch(x, y)


def group(name: str) -> tuple[Tensor, Tensor]:
    """Return the permutations [n, points] of S3, S5 or A5, identity first, and their table of products [n, n].

    table[a, b] is the permutation that applies b, then a: (a b)(i) = a(b(i)).
    """
    points = int(name[1])
    found = [p for p in permutations(range(points)) if name[0] == "S" or _is_even(p)]
    elements = torch.tensor(found)
    composed = elements[:, elements]  # [a, b, i] = a(b(i))
    place = {p: at for at, p in enumerate(found)}
    table = torch.tensor([[place[tuple(row)] for row in rows] for rows in composed.tolist()])
    return elements, table


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(a > b for at, a in enumerate(p) for b in p[at + 1 :]) % 2 == 0


def _words(name: str) -> Draw:
    tables: list[Tensor] = []

    def draw(g: Generator, batch: int, length: int) -> Batch:
        if not tables:
            tables.append(group(name)[1])
        (table,) = tables
        x = integers(g, 0, len(table), batch, length)
        y, product = torch.empty_like(x), torch.zeros(batch, dtype=torch.long)
        for at in range(length):
            product = table[product, x[:, at]]
            y[:, at] = product
        return Batch(x, y)

    return draw


KEYS = 32  # of recall; the values are as many ids after them


def recall(g: Generator, batch: int, length: int) -> Batch:
    """Return pairs of a key and a value, then each key once more at a random place, where its value is asked.

    One pair for each 12 tokens. Id 0 stands between the queries; keys are 1 to 31, values 32 to 63.
    """
    pairs = min(max(1, length // 12), KEYS - 1)
    keys = distinct(g, batch, KEYS - 1, pairs) + 1
    values = distinct(g, batch, KEYS, pairs) + KEYS
    x = torch.zeros(batch, length, dtype=torch.long)
    y = torch.full_like(x, NOTHING)
    x[:, 0 : 2 * pairs : 2], x[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + distinct(g, batch, length - 2 * pairs, pairs)
    return Batch(x.scatter(1, places, keys), y.scatter(1, places, values))


def induction(g: Generator, batch: int, length: int) -> Batch:
    """Return random ids 1 to 15, with the trigger 0 once inside and at the end: asked is what followed it."""
    x = integers(g, 1, 16, batch, length)
    place = integers(g, 0, length - 2, batch, 1)
    y = torch.full_like(x, NOTHING)
    y[:, -1:] = x.gather(1, place + 1)
    x.scatter_(1, place, 0)
    x[:, -1] = 0
    return Batch(x, y)


def copying(g: Generator, batch: int, length: int, count: int = 4) -> Batch:
    """Return `count` data (2 to 15) at random places among noise (0), then as many 1: the data are asked in order."""
    places = distinct(g, batch, length - count, count).sort(1).values
    data = integers(g, 2, 16, batch, count)
    x = torch.zeros(batch, length, dtype=torch.long).scatter(1, places, data)
    x[:, -count:] = 1
    y = torch.full_like(x, NOTHING)
    y[:, -count:] = data
    return Batch(x, y)


_ALL = (
    make_task(
        "parity", 2, 2, _running_sum(2), (40, 80, 256), "the parity of the bits so far, at each bit", 2, shortest=3
    ),
    make_task("modular", 8, 5, arithmetic, (41, 81, 255), "the value mod 5 of an expression so far", 5, shortest=3),
    make_task(
        "s3", 6, 6, _words("S3"), (24, 64), "the product so far of permutations of 3 points (arXiv:2404.08819)", 6,
        shortest=3, steps=1500, rate=5e-3,
    ),
    make_task(
        "a5", 60, 60, _words("A5"), (24, 64), "the product so far of even permutations of 5 points (arXiv:2404.08819)",
        60, shortest=3, steps=5000, rate=3e-3,
    ),
    make_task(
        "s5", 120, 120, _words("S5"), (24, 64), "the product so far of permutations of 5 points (arXiv:2404.08819)",
        120, shortest=3, steps=5000, rate=3e-3,
    ),
    make_task(
        "recall", 64, 64, recall, (48, 96), "the values of the keys that were paired before (arXiv:2312.04927)", KEYS,
        steps=300, rate=3e-3,
    ),
    make_task(
        "induction", 16, 16, induction, (64, 256), "what followed the trigger (arXiv:2312.00752)", 15, steps=1000,
        rate=3e-3,
    ),
    make_task(
        "copying", 16, 16, copying, (48, 96), "data tokens among noise, in order (arXiv:2312.00752)", 14, steps=600,
        rate=5e-3,
    ),
    *mad.TASKS,
    *long_range.TASKS,
    *episodes.TASKS,
    *images.TASKS,
)  # fmt: skip
TASKS = {task.name: task for task in _ALL}
ALIASES = {"mqar": "recall"}  # names in papers
QUICK = ("parity", "recall", "copying")
