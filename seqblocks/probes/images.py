"""Textures that tell in which order an image is read: neighbours in one direction alone make the difference."""

from __future__ import annotations

import math

import torch
from torch import Generator

from seqblocks.probes.batches import NOTHING, Batch, Draw, integers, make_task

LIKE = 0.85  # the share of cells that are like their neighbour, in an image of class 1
SIZE = 12


def texture(is_vertical: bool) -> Draw:
    """Return what draws square images of cells 0 and 1, by rows, and asks for their class.

    Cells of class 0 are independent. In class 1, a cell is like the one above it (or, unless is_vertical, the one on
    its left) in 85 % of cases. All else is alike: each row (or column) alone is of independent cells in both classes.
    """

    def draw(g: Generator, batch: int, length: int) -> Batch:
        side = math.isqrt(length)
        label = integers(g, 0, 2, batch)
        cells = integers(g, 0, 2, batch, side, side)
        is_other = torch.rand(batch, side, side, generator=g) >= LIKE
        chained = (cells[:, :1] + torch.cat([torch.zeros(batch, 1, side), is_other[:, 1:]], 1).cumsum(1)).long() % 2
        images = torch.where(label[:, None, None] == 1, chained, cells)  # each cell adds what differs from above
        x = (images if is_vertical else images.transpose(1, 2)).flatten(1)
        y = torch.full_like(x, NOTHING)
        y[:, -1] = label
        return Batch(x, y)

    return draw


_ABOUT = "textures that differ in how alike {} neighbours are; answers of the mean output"
TASKS = tuple(
    make_task(
        name, 2, 2, texture(is_vertical), (SIZE**2, 256), _ABOUT.format(word), 2, steps=300, decode="mean",
        is_image=True,
    )
    for name, word, is_vertical in (("image-rows", "horizontal", False), ("image-columns", "vertical", True))
)  # fmt: skip
