"""What a task is: how its batches are drawn, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

NOTHING = -100  # the label where nothing is asked, which the cross-entropy ignores


class Batch(NamedTuple):
    """Token ids x [batch, length] and the labels y [batch, length], NOTHING where nothing is asked."""

    x: Tensor
    y: Tensor


Draw = Callable[[Generator, int, int], Batch]  # of a generator, the batch size and the length


@dataclass(frozen=True)
class Published:
    """Figures of a paper, by model. They hold for its setting, which differs from that of `seqblocks probe`."""

    source: str
    setting: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:g}" for name, value in self.figures.items())
        return f"{self.source}: {figures}\n  ({self.setting})"

    def as_data(self) -> dict[str, Any]:
        return {"source": self.source, "setting": self.setting, "figures": dict(self.figures)}


@dataclass(frozen=True)
class Task:
    """One task. vocabulary: of the ids; labels: of the answers. chance: accuracy of a guess among them.

    length, steps, rate, batch: of the training. shortest: the length it begins with, if it grows to `length` over the
    first 60 % of the steps. lengths: at which it is read. about: what it asks, with its source. warm_up: the part of
    the steps in which the rate rises. last_rate: at the end of a cosine, relative to the highest. from_last: whether
    the answers are decoded from the last output alone. published: what papers report.
    """

    name: str
    vocabulary: int
    labels: int
    draw: Draw
    length: int
    lengths: tuple[int, ...]
    about: str
    chance: float
    shortest: int = 0
    steps: int = 400
    rate: float = 1e-2
    batch: int = 32
    warm_up: float = 0.1
    last_rate: float = 0.05
    from_last: bool = False
    published: tuple[Published, ...] = ()


def make_task(
    name: str, vocabulary: int, labels: int, draw: Draw, lengths: tuple[int, ...], about: str, guesses: int, **more: Any
) -> Task:
    """Return a task that is trained at the first of its lengths. guesses: the number of possible answers."""
    return Task(name, vocabulary, labels, draw, lengths[0], lengths, about, 1 / guesses, **more)


def integers(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    """Return numbers from `low` to `high` - 1."""
    return torch.randint(low, high, shape, generator=g)


def distinct(g: Generator, batch: int, limit: int, count: int) -> Tensor:
    """Return `count` different numbers below `limit` in each row, in random order."""
    return torch.rand(batch, limit, generator=g).argsort(1)[:, :count]
