"""The six tasks of MAD (arXiv:2403.17844), drawn anew for each step, with labels only where the answer is known."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from seqblocks.probes.batches import NOTHING, Batch, Draw, distinct, integers, make_task

KEYS = VALUES = 8  # keys are 0 to 7, values 8 to 15, noise 16 to 31
NOISE_SHARE = 0.2
MOTIF_KEYS, MOTIF_VALUES, MOTIF, PAD = 7, 8, 3, 15  # of fuzzy recall: ids 0 to 6 and 7 to 14, at most three in a row
FACTS = 127  # of memorization: keys 0 to 126, values 127 to 253
ASK = 255


def recall(noise_share: float = 0.0) -> Draw:
    """Return what draws pairs of a key and a value; where a key comes again in a row, its value is asked.

    Each row has values of its own. The key of the last pair has always been seen. noise_share: of the pairs that are
    two tokens of noise instead. Lengths are at least 3.
    """

    def draw(g: Generator, batch: int, length: int) -> Batch:
        pairs = (length + 1) // 2
        values = integers(g, KEYS, KEYS + VALUES, batch, KEYS)
        keys = integers(g, 0, KEYS, batch, pairs)
        is_noise = torch.rand(batch, pairs, generator=g) < noise_share
        is_noise[:, [0, -1]] = False
        earlier = torch.multinomial((~is_noise[:, :-1]).float(), 1, generator=g)
        keys[:, -1:] = keys.gather(1, earlier)
        same = (keys[:, :, None] == keys[:, None, :]) & ~is_noise[:, None, :]
        is_known = same.tril(-1).any(-1) & ~is_noise
        answers = values.gather(1, keys)
        noise = integers(g, 2 * KEYS, 4 * KEYS, batch, pairs, 2)
        x = torch.where(is_noise[..., None], noise, torch.stack([keys, answers], -1))
        y = torch.full_like(x, NOTHING)
        y[..., 0] = torch.where(is_known, answers, NOTHING)
        return Batch(x.flatten(1)[:, :length], y.flatten(1)[:, :length])

    return draw


def fuzzy_recall(g: Generator, batch: int, length: int) -> Batch:
    """Return pairs of a key and a value that are one to three different tokens each, with padding on the left.

    Where a key comes again, each token of its value is asked at the token before it. The last key has always been
    seen. Lengths are at least 12.
    """
    count = length // 2  # no pair is shorter
    sizes = integers(g, 1, MOTIF + 1, batch, count, 2).tolist()
    keys = distinct(g, batch * count, MOTIF_KEYS, MOTIF).view(batch, count, MOTIF).tolist()
    values = (distinct(g, batch * count, MOTIF_VALUES, MOTIF) + MOTIF_KEYS).view(batch, count, MOTIF).tolist()
    last = torch.rand(batch, generator=g).tolist()
    rows = [
        _motifs([(k[:a], v[:b]) for k, v, (a, b) in zip(*row, strict=True)], part, length)
        for *row, part in zip(keys, values, sizes, last, strict=True)
    ]
    x, y = (torch.tensor(each) for each in zip(*rows, strict=True))
    return Batch(x, y)


Pair = tuple[list[int], list[int]]


def _motifs(drawn: list[Pair], last: float, length: int) -> tuple[list[int], list[int]]:
    """Return the tokens and labels of a row. last: which of the earlier pairs is asked at the end, from 0 to 1."""
    values: dict[tuple[int, ...], list[int]] = {}
    pairs: list[Pair] = []
    used = 0
    for key, drawn_value in drawn:
        value = values.get(tuple(key), drawn_value)
        if used + len(key) + len(value) > length - 2 * MOTIF:  # the last pair needs room
            break
        values[tuple(key)] = value
        pairs.append((key, value))
        used += len(key) + len(value)
    pairs.append(pairs[int(last * len(pairs))])
    x: list[int] = []
    y: list[int] = []
    known: set[tuple[int, ...]] = set()
    for key, value in pairs:
        x += [*key, *value]
        answers = value if tuple(key) in known else [NOTHING] * len(value)
        y += [*[NOTHING] * (len(key) - 1), *answers, NOTHING]
        known.add(tuple(key))
    free = length - len(x)
    return [PAD] * free + x, [NOTHING] * free + y


def selective_copying(g: Generator, batch: int, length: int) -> Batch:
    """Return data (0 to 13) at random places among blanks (14), then 15, then as many blanks: the data are asked.

    16 tokens of data, or a fourth of a length below 64.
    """
    count = min(16, length // 4)
    noisy = length - count - 1
    places = distinct(g, batch, noisy, count).sort(1).values
    data = integers(g, 0, 14, batch, count)
    x = torch.full((batch, length), 14).scatter(1, places, data)
    x[:, noisy] = 15
    y = torch.full_like(x, NOTHING)
    y[:, -count:] = data
    return Batch(x, y)


def compression(g: Generator, batch: int, length: int) -> Batch:
    """Return random tokens 0 to 14, then 15, whose output must give back each of the others."""
    x = integers(g, 0, 15, batch, length)
    x[:, -1] = 15
    y = x.clone()
    y[:, -1] = NOTHING
    return Batch(x, y)


def facts() -> Tensor:
    """Return the value of each key of `memorization`, the same for all seeds."""
    return FACTS + torch.randperm(FACTS, generator=torch.Generator().manual_seed(0))


def memorization(g: Generator, batch: int, length: int) -> Batch:
    """Return random keys, each followed by 255, where the value of the key is asked: it stands nowhere in the row."""
    keys = integers(g, 0, FACTS, batch, (length + 1) // 2)
    x = torch.stack([keys, torch.full_like(keys, ASK)], -1).flatten(1)[:, :length]
    y = torch.stack([torch.full_like(keys, NOTHING), facts()[keys]], -1).flatten(1)[:, :length]
    return Batch(x, y)


_SOURCE = "(MAD, arXiv:2403.17844)"
TASKS = (
    make_task(
        "in-context-recall", 16, 16, recall(), (64, 128), f"the value that a key had before in its row {_SOURCE}",
        VALUES, rate=3e-3,
    ),
    make_task(
        "noisy-recall", 32, 16, recall(NOISE_SHARE), (64, 128), f"the same among tokens of noise {_SOURCE}", VALUES,
        rate=3e-3,
    ),
    make_task(
        "fuzzy-recall", 16, 15, fuzzy_recall, (64, 128), f"the same, with keys and values of one to three tokens "
        f"{_SOURCE}", MOTIF_VALUES, rate=3e-3,
    ),
    make_task(
        "selective-copying", 16, 14, selective_copying, (64, 128), f"16 data tokens among blanks, in order {_SOURCE}",
        14, steps=600, rate=3e-3,
    ),
    make_task(
        "compression", 16, 15, compression, (32,), f"all tokens, decoded from the last output alone {_SOURCE}", 15,
        rate=3e-3, decode="last",
    ),
    make_task(
        "memorization", 256, 254, memorization, (32, 64), f"the value that a key has in all rows {_SOURCE}", FACTS,
        rate=3e-3,
    ),
)  # fmt: skip
