"""Train a model on a task and read its accuracy. For real training, use Lightning, torchtitan or the Trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from seqblocks import graph
from seqblocks.errors import UsageError
from seqblocks.graph import ModelSpec
from seqblocks.model.builder import build_model
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.probes.batches import NOTHING, Task
from seqblocks.training.loop import adamw, step

GROWTH = 0.6  # of the steps
READ = 256  # sequences


@dataclass
class Result:
    """The accuracy of one training at one length. scaled: 0 at chance, 1 if all is right. cut: whether time ran out.

    last_eighth: accuracy over the answers in the last eighth of the sequence, where early positions do not help.
    """

    task: str
    length: int
    accuracy: float
    chance: float
    seed: int
    last_eighth: float
    trained_length: int
    steps: int
    seconds: float
    cut: bool
    params: int
    interrupted: bool = False

    @property
    def scaled(self) -> float:
        return max(0.0, (self.accuracy - self.chance) / (1 - self.chance))

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "scaled": self.scaled}


class _Probed(nn.Module):
    """A model of features between an embedding and a head of the probe's, or a model of tokens as it is."""

    def __init__(self, model: SequenceModel, task: Task) -> None:
        super().__init__()
        self.model = model
        wire, y = model.spec.input, model.spec.output
        assert y is not None
        self.embed = nn.Embedding(task.vocabulary, wire.features) if wire.kind != "tokens" else None
        self.head: nn.Module | None = None
        if task.from_last:
            self.head = _Decoder(y.features, task.labels)
        elif self.embed or y.features < task.labels:
            self.head = nn.Linear(y.features, task.labels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x if self.embed is None else self.embed(x))
        return y if self.head is None else self.head(y)


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


def probe(
    spec: ModelSpec,
    task: Task,
    seed: int = 0,
    *,
    steps: int | None = None,
    rate: float | None = None,
    seconds: float = math.inf,
    device: str = "cpu",
    advance: Callable[[float], object] | None = None,
) -> list[Result]:
    """Train the model of a spec on a task with random batches; return its accuracy at each of the task's lengths.

    AdamW (weight decay 0.1 on matrices), gradients clipped to norm 1, and the task's warm-up and cosine: by default a
    tenth of the steps, then down to a twentieth of the rate. Sequences are the same on each device; those that are read
    are the same for each model and seed. seconds: after which training ends. A KeyboardInterrupt ends training, and the
    model is read as it is. Raises UsageError for a model that does not take the task's tokens.
    """
    check_fit(spec, task)
    steps, rate = steps or task.steps, rate or task.rate
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _probe(spec, task, seed, steps, rate, seconds, torch.device(device), advance)


def _probe(
    spec: ModelSpec,
    task: Task,
    seed: int,
    steps: int,
    rate: float,
    seconds: float,
    device: torch.device,
    advance: Callable[[float], object] | None,
) -> list[Result]:
    model = _Probed(build_model(spec, seed=seed), task).to(device)
    begin, done, interrupted = time.perf_counter(), 0, False
    try:
        for done in _training(model, task, seed, steps, rate):
            if advance:
                advance(done / steps)
            if time.perf_counter() - begin > seconds:
                break
    except KeyboardInterrupt:
        interrupted = True
    taken = time.perf_counter() - begin
    params = sum(p.numel() for p in model.parameters())
    found = []
    for length in task.lengths:
        whole, last = read(model, task, length)
        found.append(
            Result(
                task.name, length, whole, task.chance, seed, last, task.length, done, taken, done < steps, params,
                interrupted,
            )
        )  # fmt: skip
    return found


def check_fit(spec: ModelSpec, task: Task) -> None:
    """Raise UsageError unless a model takes the tokens of a task, and gives an output for each."""
    wire, y = spec.input, spec.output
    is_sequence = wire.kind in ("tokens", "sequence") and y is not None and y.kind == "sequence" and y.rate == 1
    if len(spec.inputs) > 1 or not is_sequence:
        types = f"{spec.input_text} -> {spec.output_text}"
        raise UsageError(f"a probe needs a model that maps each token of a sequence to features, not {types}")
    if not graph.count(spec.graph):
        raise UsageError("the model has no parameters, so there is nothing to train")
    if isinstance(wire.length, int):
        raise UsageError("a probe needs a model that takes sequences of any length; the spec fixes it")
    if wire.kind == "tokens" and wire.features < task.vocabulary:
        what = f"{task.name} has a vocabulary of {task.vocabulary}, and the model one of {wire.features}"
        raise UsageError(f"{what}: override it, for instance with --set vocabulary={task.vocabulary}")


def _training(model: _Probed, task: Task, seed: int, steps: int, rate: float) -> Iterator[int]:
    """Yield the number of steps after each."""
    own = [part for part in (model.embed, model.head) if part is not None]
    optimizer = adamw(model.model, rate, (p for part in own for p in part.parameters()))
    generator = torch.Generator().manual_seed(2 * seed + 1)
    device = next(model.parameters()).device
    model.train()
    for number in range(steps):
        x, y = (each.to(device) for each in task.draw(generator, task.batch, _length(task, number / steps)))
        step(model, optimizer, rate * _schedule(task, number / steps), partial(_loss, model, x, y))
        yield number + 1


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), ignore_index=NOTHING)


def _schedule(task: Task, part: float) -> float:
    """Return the rate at this part of the training, relative to the highest."""
    begin, last = task.warm_up, task.last_rate
    if part < begin:
        return (part + 1e-3) / begin
    return last + (1 - last) * (1 + math.cos(math.pi * (part - begin) / (1 - begin))) / 2


def _length(task: Task, part: float) -> int:
    if not task.shortest or part >= GROWTH:
        return task.length
    return task.shortest + round((task.length - task.shortest) * part / GROWTH)


@torch.no_grad()
def read(model: nn.Module, task: Task, length: int) -> tuple[float, float]:
    """Return the accuracy at all answers, and at those in the last eighth."""
    generator = torch.Generator().manual_seed(1_000_000 + length)
    model.eval()
    right = torch.zeros(length, dtype=torch.float64)
    asked = torch.zeros(length, dtype=torch.float64)
    device = next(model.parameters()).device
    for _ in range(max(1, READ // task.batch)):
        x, y = task.draw(generator, task.batch, length)
        found = model(x.to(device))[..., : task.labels].argmax(-1).cpu()
        right += ((found == y) & (y != NOTHING)).sum(0)
        asked += (y != NOTHING).sum(0)
    late = length - -(-length // 8)
    return (right.sum() / asked.sum()).item(), (right[late:].sum() / asked[late:].sum().clamp(min=1)).item()
