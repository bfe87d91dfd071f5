"""What a task is: how its batches are drawn, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

NOTHING = -100  # the label where nothing is asked, which the cross-entropy ignores


class Batch(NamedTuple):
    """Token ids x [batch, length], or numbers x [batch, length, features], and answers y [batch, length].

    Answers are labels or numbers, NOTHING where nothing is asked. resets [batch, length]: where an episode begins.
    """

    x: Tensor
    y: Tensor
    resets: Tensor | None = None


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
    the steps in which the rate rises. last_rate: at the end of a cosine, relative to the highest. published: what
    papers report.

    decode: what an answer is decoded from: the output at its place, the last output and the place, or the mean of all
    outputs. features: numbers of a token, or 0 if tokens are ids. tolerance: by which an answer that is a number may
    be wrong, or 0 if answers are labels. is_image: whether the ids are the cells of a square image, by rows.
    has_resets: whether a row holds several episodes, marked as `resets`. ends_early: whether a training may leave out
    steps once the task is solved.
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
    decode: Literal["each", "last", "mean"] = "each"
    features: int = 0
    tolerance: float = 0.0
    is_image: bool = False
    has_resets: bool = False
    ends_early: bool = True
    published: tuple[Published, ...] = ()


def make_task(
    name: str, vocabulary: int, labels: int, draw: Draw, lengths: tuple[int, ...], about: str, guesses: float,
    **more: Any,
) -> Task:  # fmt: skip
    """Return a task that is trained at the first of its lengths. guesses: of how many one is right."""
    return Task(name, vocabulary, labels, draw, lengths[0], lengths, about, 1 / guesses, **more)


def integers(g: Generator, low: int, high: int, *shape: int) -> Tensor:
    """Return numbers from `low` to `high` - 1."""
    return torch.randint(low, high, shape, generator=g)


def distinct(g: Generator, batch: int, limit: int, count: int) -> Tensor:
    """Return `count` different numbers below `limit` in each row, in random order."""
    return torch.rand(batch, limit, generator=g).argsort(1)[:, :count]
