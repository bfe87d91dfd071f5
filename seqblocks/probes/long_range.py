"""Tasks over long distances: copying after a delay, and adding two marked numbers (arXiv:1511.06464)."""

from __future__ import annotations

import torch
from torch import Generator

from seqblocks.probes.batches import NOTHING, Batch, distinct, integers, make_task

SYMBOLS, COUNT = 8, 10  # of delayed copying
BLANK, GO = 8, 9
TOLERANCE = 0.1  # of a sum, the root of the mean square .01 at which the problem counts as solved


def copying(g: Generator, batch: int, length: int) -> Batch:
    """Return ten symbols (0 to 7), blanks (8), 9, and nine blanks. The symbols are asked in order, from the 9 on."""
    x = torch.full((batch, length), BLANK)
    data = integers(g, 0, SYMBOLS, batch, COUNT)
    x[:, :COUNT] = data
    x[:, -COUNT] = GO
    y = torch.full_like(x, NOTHING)
    y[:, -COUNT:] = data
    return Batch(x, y)


def adding(g: Generator, batch: int, length: int) -> Batch:
    """Return numbers from 0 to 1, one of them marked in each half; the sum of these two is asked at the end."""
    half = length // 2
    places = torch.cat([distinct(g, batch, half, 1), half + distinct(g, batch, length - half, 1)], 1)
    numbers = torch.rand(batch, length, generator=g)
    marks = torch.zeros(batch, length).scatter(1, places, 1.0)
    y = torch.full((batch, length), float(NOTHING))
    y[:, -1] = numbers.gather(1, places).sum(1)
    return Batch(torch.stack([numbers, marks], -1), y)


# A guess of 1 is right for sums from .9 to 1.1. Their density is 1 at 1, and falls by 1 within 1: 2 (.1 - .1 ** 2 / 2).
GUESS = 2 * TOLERANCE - TOLERANCE**2
TASKS = (
    make_task(
        "long-copying", 10, SYMBOLS, copying, (60, 120), "10 symbols after 40 and 100 blanks (arXiv:1511.06464)",
        SYMBOLS, steps=1000, rate=5e-3,
    ),
    make_task(
        "adding", 0, 1, adding, (50, 100), "the sum of two marked numbers, right within 0.1 (arXiv:1511.06464)",
        1 / GUESS, steps=1000, rate=5e-3, features=2, tolerance=TOLERANCE,
    ),
)  # fmt: skip
