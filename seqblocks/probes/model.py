"""A model on a task: what it reads, what its answers are decoded from, and whether it fits at all."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.cost import longest
from seqblocks.errors import UsageError
from seqblocks.graph import ModelSpec
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.probes.batches import Task


class Probed(nn.Module):
    """A model between an input layer and a head of the probe's, or a model of tokens as it is.

    It takes the tokens of a task [batch, length] or [batch, length, features], and returns scores of labels, or a
    number, for each token [batch, length, labels].
    """

    def __init__(self, model: SequenceModel, task: Task) -> None:
        super().__init__()
        self.model, self.mean = model, task.decode == "mean"
        wire, y = model.spec.input, model.spec.output
        assert y is not None
        self.embed = _input_layer(model.spec, task)
        self.head: nn.Module | None = None
        if task.decode == "last":
            self.head = _Decoder(y.features, task.labels)
        elif wire.kind != "tokens" or y.features < task.labels:
            self.head = nn.Linear(y.features, task.labels)

    def forward(self, x: Tensor, resets: Tensor | None = None) -> Tensor:
        length = x.shape[1]
        read = x if self.embed is None else self.embed(x)
        y: Tensor = self.model(read) if resets is None else self.model(read, resets=resets)
        if self.mean and y.dim() == 3:
            y = y.mean(1)
        scores: Tensor = y if self.head is None else self.head(y)
        return scores[:, None].expand(-1, length, -1) if self.mean else scores


def _input_layer(spec: ModelSpec, task: Task) -> nn.Module | None:
    wire = spec.input
    if wire.kind == "image":
        return _Pixels(wire.features, _side(spec), *_size(spec))
    if wire.kind == "tokens":
        return None
    return nn.Linear(task.features, wire.features) if task.features else nn.Embedding(task.vocabulary, wire.features)


class _Pixels(nn.Module):
    """Cells 0 and 1 of a square image [batch, cells] become pixels -1 and 1 [batch, channels, height, width]."""

    def __init__(self, channels: int, side: int, height: int, width: int) -> None:
        super().__init__()
        self.channels, self.side, self.height, self.width = channels, side, height, width

    def forward(self, x: Tensor) -> Tensor:
        image = (2.0 * x - 1.0).view(-1, 1, self.side, self.side)
        rows = image.repeat_interleave(self.height // self.side, 2)
        return rows.repeat_interleave(self.width // self.side, 3).expand(-1, self.channels, -1, -1)


class _Decoder(nn.Module):
    """Two layers that read the last output [batch, features] and a place, and score the token at this place."""

    def __init__(self, features: int, labels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, labels))

    def forward(self, y: Tensor) -> Tensor:
        scores: Tensor = self.layers(y[:, -1:] + _places(y.shape[1], y.shape[2]).to(y))
        return scores


def _places(length: int, features: int) -> Tensor:
    """Return the sines and cosines of places [length, features] (arXiv:1706.03762)."""
    at = torch.arange(features)
    speed = 10_000.0 ** -((at - at % 2) / features)
    return torch.sin(torch.arange(length)[:, None] * speed + math.pi / 2 * (at % 2))


def fit_task(spec: ModelSpec, task: Task) -> Task:
    """Return a task as a model can take it: at the length of its images, or at the lengths for which it has positions.

    Raises UsageError if the model does not take the tokens of the task, or does not give the outputs it needs.
    """
    wire = spec.input
    _check_types(spec, task)
    if not graph.count(spec.graph):
        raise UsageError("the model has no parameters, so there is nothing to train")
    if task.has_resets and (obstacle := graph.resets_obstacle(spec)):
        step, why = obstacle
        raise UsageError(f"{task.name} has several episodes in a row, which {step} would mix: {why}")
    if wire.kind == "image":
        return replace(task, length=_side(spec) ** 2, lengths=(_side(spec) ** 2,))
    if isinstance(wire.length, int):
        raise UsageError("a probe needs a model that takes sequences of any length; the spec fixes it")
    if wire.kind == "tokens" and wire.features < task.vocabulary:
        what = f"{task.name} has a vocabulary of {task.vocabulary}, and the model one of {wire.features}"
        raise UsageError(f"{what}: override it, for instance with --set vocabulary={task.vocabulary}")
    size = graph.frame_size(spec.graph)
    if size > 1 and (task.shortest or any(length % size for length in (task.length, *task.lengths))):
        what = f"the model merges {size} tokens into one"
        raise UsageError(f"{what}, and not all sequences of {task.name} have a multiple of {size}")
    most = longest(spec.graph)
    if task.length > most:
        raise UsageError(f"{task.name} is trained at {task.length} tokens, and the model has {most:g} positions")
    return replace(task, lengths=tuple(length for length in task.lengths if length <= most))


def _check_types(spec: ModelSpec, task: Task) -> None:
    wire, y = spec.input, spec.output
    reads = ("tokens", "sequence", "image") if task.is_image else ("tokens", "sequence")
    answers = y is not None and y.kind == "sequence" and (y.rate == 1 or wire.kind == "image")
    if task.is_image and y is not None and y.kind == "vector":
        answers = True  # the model takes the mean itself
    if len(spec.inputs) > 1 or spec.outputs or wire.kind not in reads or not answers:
        types = f"{spec.input_text} -> {spec.output_text}"
        images = ", or an image to a vector" if task.is_image else ""
        needs = f"a probe needs a model that maps each token of a sequence to features{images}"
        raise UsageError(f"{task.name}: {needs}, not {types}")
    if task.features and wire.kind == "tokens":
        raise UsageError(
            f"{task.name} gives {task.features} numbers for each token, and the model reads token ids: use a spec with "
            "`input: {features: …}`"
        )


def _size(spec: ModelSpec) -> tuple[int, int]:
    """Return the height and the width of a model's images."""
    assert spec.input.grid
    return spec.input.grid


def _side(spec: ModelSpec) -> int:
    """Return the number of rows and columns of tokens that a model cuts an image into. Raises UsageError if none."""
    types = (node.type for node in graph.walk(spec.graph))
    rows, columns = next((wire.grid for wire in types if wire and wire.kind == "sequence" and wire.grid), (0, 0))
    height, width = _size(spec)
    if not rows or rows != columns or height % rows or width % rows:
        found = f"{rows} rows and {columns} columns" if rows else "none"
        needs = "a probe needs a model that cuts an image into rows and as many columns of tokens"
        raise UsageError(f"{needs}, not {found}")
    return rows
