"""The tasks in published settings: sizes, lengths, batches and steps, with what papers report for them.

Batches are drawn anew for each step, where the papers repeat a fixed set of examples, and the learning rate is one of
those that they tried. Where the steps of a publication are not known to us, `OURS` in the text of a task says which
numbers are our choice. Tasks of our own, and those of agents, whose figures are rewards, have no setting here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Generator

from seqblocks.probes import long_range, mad
from seqblocks.probes.batches import NOTHING, Batch, Draw, Published, Task, distinct, integers, make_task
from seqblocks.probes.tasks import TASKS, copying

EPISODE_MIN_TOKENS, TRAINED = 3, 40  # lengths of the formal languages


def _sizes(g: Generator, batch: int, length: int) -> torch.Tensor:
    """Return the size of each row: from 3 to 40 in training, from 40 to the length beyond."""
    return integers(g, min(EPISODE_MIN_TOKENS if length <= TRAINED else TRAINED, length), length + 1, batch)


def parity(g: Generator, batch: int, length: int) -> Batch:
    """Return bits (1 and 2) of random number, then padding (0). The parity of all is asked once, at the last bit."""
    bits = integers(g, 1, 3, batch, length)
    last = _sizes(g, batch, length)[:, None] - 2  # the last place of a size is that of the answer
    x = torch.where(torch.arange(length) <= last, bits, 0)
    y = torch.full_like(x, NOTHING).scatter(1, last, ((x - 1).clamp(min=0).sum(1, keepdim=True)) % 2)
    return Batch(x, y)


def arithmetic(g: Generator, batch: int, length: int) -> Batch:
    """Return expressions mod 5 of random size, then `=`, where the value is asked, then padding.

    0 is padding, 1 to 3 are + - *, 4 is =, and 5 to 9 the numbers; `*` binds tighter.
    """
    size = _sizes(g, batch, length)
    end = size - 2 - (size % 2 == 0).long()  # the place of `=`, which follows an odd number of tokens
    numbers, operators = integers(g, 0, 5, batch, length), integers(g, 1, 4, batch, length)
    x = torch.where(torch.arange(length) % 2 == 0, numbers + 5, operators)
    place = torch.arange(length)
    x = torch.where(place < end[:, None], x, torch.where(place == end[:, None], 4, 0))
    total, product = torch.zeros(batch, dtype=torch.long), numbers[:, 0].clone()  # the value is total + product
    for at in range(2, length, 2):
        op, number = operators[:, at - 1], numbers[:, at]
        times, inside = op == 3, at < end
        signed = torch.where(op == 2, -number, number)
        total = torch.where(inside & ~times, total + product, total) % 5
        product = torch.where(inside, torch.where(times, product * number, signed), product) % 5
    return Batch(x, torch.full_like(x, NOTHING).scatter(1, end[:, None], ((total + product) % 5)[:, None]))


def zoology(pairs: int, vocabulary: int) -> Draw:
    """Return what draws pairs of keys and values, then the keys at random even places, where the values are asked.

    Places soon after the pairs are likelier: p(j) ~ j ** -0.99, without replacement. All else is 0.
    """
    half = vocabulary // 2

    def draw(g: Generator, batch: int, length: int) -> Batch:
        keys, values = distinct(g, batch, half - 1, pairs) + 1, distinct(g, batch, vocabulary - half, pairs) + half
        x = torch.zeros(batch, length, dtype=torch.long)
        y = torch.full_like(x, NOTHING)
        x[:, 0 : 2 * pairs : 2], x[:, 1 : 2 * pairs : 2] = keys, values
        slots = torch.arange(1, (length - 2 * pairs) // 2 + 1)
        noise = -torch.log(torch.empty(batch, len(slots)).exponential_(generator=g))  # Gumbel's distribution
        chosen = (-0.99 * torch.log(slots) + noise).topk(pairs, 1).indices
        places = 2 * pairs + 2 * chosen
        return Batch(x.scatter(1, places, keys), y.scatter(1, places, values))

    return draw


# --- what papers report -----------------------------------------------------------------------------------------------

_MAD_SCORES = {
    "compression": (51.6, 45.2, 52.7, 38.8, 42.2),
    "fuzzy-recall": (29.8, 7.9, 6.7, 6.9, 35.7),
    "in-context-recall": (94.1, 81.7, 90.4, 80.8, 100.0),
    "memorization": (85.2, 89.5, 89.5, 63.3, 52.8),
    "noisy-recall": (86.8, 78.8, 90.1, 81.6, 100.0),
    "selective-copying": (99.6, 93.1, 86.3, 88.6, 100.0),
}
_MAD_MODELS = ("Transformer", "Hyena", "Mamba", "GLA", "DeltaNet")
_MAD_SETTING = (
    "MAD score in percent: the mean over harder variants of the task of the best of six trainings; dim 128, two "
    "mixers, each with a SwiGLU; accuracy averaged over classes"
)
_LANGUAGES = {
    "parity": {"Transformer": 0.022, "mLSTM": 0.087, "sLSTM": 1.0, "Mamba": 0.0, "Mamba [-1, 1]": 1.0,
               "DeltaNet": 0.017, "DeltaNet [-1, 1]": 1.0},
    "modular": {"Transformer": 0.031, "mLSTM": 0.040, "sLSTM": 0.787, "Mamba": 0.095, "Mamba [-1, 1]": 0.241,
                "DeltaNet": 0.314, "DeltaNet [-1, 1]": 0.971},
}  # fmt: skip
_LANGUAGES_SETTING = (
    "scaled accuracy, 0 at chance, of lengths 40 to 256 after training on 3 to 40; [-1, 1]: the eigenvalues that the "
    "state's transition may have"
)
_COPYING = {"S4": 18.3, "S6": 97.0, "H3": 57.0, "Hyena": 30.1, "H3 with S6": 99.7, "Mamba": 99.8}


def _mad(task: Task) -> Task:
    """Return a task of MAD with 200 epochs of 12,800 examples, or of 256 for what is to be memorized."""
    length = {"selective-copying": 256, "compression": 32, "memorization": 32}.get(task.name, 128)
    figures = dict(zip(_MAD_MODELS, _MAD_SCORES[task.name], strict=True))
    return replace(
        task, length=length, lengths=(length,), batch=128, steps=400 if task.name == "memorization" else 20_000,
        rate=1e-3, warm_up=0.0, last_rate=1e-6 / 1e-3,
        published=(Published("arXiv:2406.06484", _MAD_SETTING, figures),),
    )  # fmt: skip


def _language(name: str, vocabulary: int, labels: int, draw: Draw, about: str, steps: int) -> Task:
    reported = Published("arXiv:2411.12537", _LANGUAGES_SETTING, _LANGUAGES[name])
    return make_task(
        name, vocabulary, labels, draw, (TRAINED, 256), about, labels, steps=steps, batch=256, rate=1e-3,
        last_rate=1e-6 / 1e-3, published=(reported,),
    )  # fmt: skip


OURS = "batch, steps and rate are our choice"


def _word(name: str) -> Task:
    """Return words of a group, trained at 32 and read to 500 as in arXiv:2411.12537."""
    quick, source = TASKS[name], "arXiv:2404.08819; lengths of arXiv:2411.12537"
    about = f"the product so far of permutations ({source}); {OURS}"
    return replace(
        quick, length=32, lengths=(32, 64, 128, 256, 500), about=about, batch=512, steps=20_000, rate=1e-3,
    )  # fmt: skip


_INDUCTION = Published(
    "arXiv:2312.00752",
    "lengths 64 to 1,048,576 after training at 256; two layers, 74 thousand parameters; attention, H3 and Hyena fall "
    "beyond twice the length",
    {"Mamba": 1.0},
)

_ALL = (
    _language("parity", 3, 2, parity, "the parity of all bits, asked once (github.com/NX-AI/xlstm)", 20_000),
    _language("modular", 10, 5, arithmetic, "the value mod 5, asked once (github.com/NX-AI/xlstm)", 100_000),
    make_task(
        "recall", 8192, 8192, zoology(16, 8192), (256,), "the values of 16 keys (arXiv:2312.04927)", 4096,
        steps=25_000, batch=256, rate=1e-3, warm_up=0.0, last_rate=0.0,
        published=(Published("arXiv:2406.06484", "in percent, with 64 keys in 512 tokens", {"DeltaNet": 100.0}),),
    ),
    make_task(
        "copying", 16, 16, partial(copying, count=16), (4112,),
        "16 data tokens among 4,096 places, in order (arXiv:2312.00752)", 14, steps=400_000, batch=64, rate=1e-4,
        warm_up=0.0, last_rate=1.0,
        published=(Published("arXiv:2312.00752", "in percent, two layers of width 64", _COPYING),),
    ),
    *map(_mad, mad.TASKS),
    *map(_word, ("s3", "a5", "s5")),
    replace(
        TASKS["induction"], length=256, lengths=(64, 256, 1024, 4096), steps=100_000, batch=32, rate=1e-3,
        about=f"what followed the trigger (arXiv:2312.00752); {OURS}", published=(_INDUCTION,),
    ),
    make_task(
        "long-copying", 10, long_range.SYMBOLS, long_range.copying, (520, 1020, 2020),
        f"10 symbols after 500 to 2,000 blanks (arXiv:1511.06464); {OURS}", long_range.SYMBOLS, steps=50_000, batch=64,
        rate=1e-3,
    ),
    make_task(
        "adding", 0, 1, long_range.adding, (750,),
        f"the sum of two marked numbers, right within 0.1 (arXiv:1511.06464); {OURS}", 1 / long_range.GUESS,
        steps=50_000, batch=64, rate=1e-3, features=2, tolerance=long_range.TOLERANCE,
    ),
)  # fmt: skip
PAPER = {task.name: replace(task, ends_early=False) for task in _ALL}
