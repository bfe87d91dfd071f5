"""Tasks of several episodes in a row, as agents see them: what is asked belongs to the episode alone."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from seqblocks.probes.batches import NOTHING, Batch, integers, make_task

SUITS, DECK = 4, 52
BACK = 3  # cards between the one that is asked and the newest
CORRIDOR, JUNCTION = 2, 3  # cues are 0 and 1
EPISODE_MIN_TOKENS = 4  # tokens of an episode


def repeat_first(g: Generator, batch: int, length: int) -> Batch:
    """Return suits of cards in three episodes; the first suit of the episode is asked at each later card.

    Nothing but the reset says that an episode begins.
    """
    x = integers(g, 0, SUITS, batch, length)
    resets = _starts(g, batch, length, 3)
    first = torch.where(resets, torch.arange(length), 0).cummax(1).values
    y = torch.where(resets, NOTHING, x.gather(1, first))
    return Batch(x, y, resets)


def repeat_previous(g: Generator, batch: int, length: int) -> Batch:
    """Return suits of cards from decks of 52, an episode each; asked is the suit three cards ago in the episode."""
    decks = -(-length // DECK)
    x = (torch.rand(batch, decks, DECK, generator=g).argsort(-1) % SUITS).flatten(1)[:, :length]
    place = torch.arange(length) % DECK
    y = torch.where(place >= BACK, x.roll(BACK, 1), NOTHING)
    return Batch(x, y, (place == 0).expand(batch, length))


def maze(g: Generator, batch: int, length: int) -> Batch:
    """Return mazes: a cue (0 or 1), a corridor (2) of random length, and a junction (3), where the cue is asked."""
    resets = _starts(g, batch, length, 3)
    cues = integers(g, 0, 2, batch, length)
    is_junction = torch.cat([resets[:, 1:], torch.ones(batch, 1, dtype=torch.bool)], 1)
    x = torch.where(resets, cues, torch.where(is_junction, JUNCTION, CORRIDOR))
    first = torch.where(resets, torch.arange(length), 0).cummax(1).values
    return Batch(x, torch.where(is_junction, cues.gather(1, first), NOTHING), resets)


def _starts(g: Generator, batch: int, length: int, count: int) -> Tensor:
    """Return where `count` episodes of random lengths begin [batch, length]; each has at least four tokens."""
    free = length - count * EPISODE_MIN_TOKENS
    cuts = integers(g, 0, free + 1, batch, count - 1).sort(1).values + EPISODE_MIN_TOKENS * torch.arange(1, count)
    starts = torch.zeros(batch, length, dtype=torch.bool).scatter(1, cuts, True)
    starts[:, 0] = True
    return starts


TASKS = (
    make_task(
        "repeat-first", SUITS, SUITS, repeat_first, (48, 192), "the first of an episode's cards (POPGym)", SUITS,
        rate=3e-3, has_resets=True,
    ),
    make_task(
        "repeat-previous", SUITS, SUITS, repeat_previous, (DECK, 208), "the card three before the newest (POPGym)",
        SUITS, rate=3e-3, has_resets=True,
    ),
    make_task(
        "t-maze", 4, 2, maze, (32, 128), "the cue at the begin of a corridor, at its end (Bakker 2001)", 2,
        rate=3e-3, has_resets=True,
    ),
)  # fmt: skip
