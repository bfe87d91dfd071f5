"""Train a model on a task and read its accuracy. For real training, use Lightning, torchtitan or the Trainer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from seqblocks.graph import ModelSpec
from seqblocks.model.builder import build_model
from seqblocks.probes.batches import NOTHING, Batch, Task
from seqblocks.probes.model import Probed, fit_task
from seqblocks.training.clock import working_time
from seqblocks.training.loop import adamw, step

GROWTH = 0.6  # of the steps
READ = 256  # sequences
RECENT = 5  # steps
SOLVED = 0.01  # nats: a task is solved when the loss of so many batches in a row is below it
IN_A_ROW = 20
END = 0.1  # of the steps, in which the rate is low: a training that has solved its task goes on there


@dataclass
class Result:
    """The accuracy of one training at one length. scaled: 0 at chance, 1 if all is right. cut: whether time ran out.

    steps: fewer than the task's if it was solved earlier.
    last_eighth: accuracy over the answers in the last eighth of the sequence, where early positions do not help. loss:
    the mean cross-entropy of the answers in nats, or their mean square error if they are numbers.
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
    rate: float = 0.0
    loss: float = 0.0

    @property
    def scaled(self) -> float:
        return max(0.0, (self.accuracy - self.chance) / (1 - self.chance))

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "scaled": self.scaled, "loss": self.loss if math.isfinite(self.loss) else None}


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
    are the same for each model and seed. In quick settings, a training that has solved the task goes on with the last
    tenth of the steps. seconds: of training, which ends before; reading follows. A KeyboardInterrupt ends training, and
    the model is read as it is; one while it is read leaves the lengths before. Raises UsageError for a model that does
    not take the task's tokens.
    """
    task = fit_task(spec, task)
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
    model = Probed(build_model(spec, seed=seed), task).to(device)
    done, place, interrupted = 0, 0, False
    recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps: the next takes as long as the slowest of them
    with working_time() as clock:
        try:
            last = 0.0
            for place in _training(model, task, seed, steps, rate):
                done += 1
                if advance:
                    advance(place / steps)
                now = clock()
                recent.append(now - last)
                last = now
                if now + max(recent) > seconds:
                    break
        except KeyboardInterrupt:
            interrupted = True
        taken = clock()
    params = sum(p.numel() for p in model.parameters())
    found: list[Result] = []
    try:
        for length in task.lengths:
            whole, last, loss = read(model, task, length)
            found.append(
                Result(
                    task.name, length, whole, task.chance, seed, last, task.length, done, taken, place < steps, params,
                    interrupted, rate, loss,
                )
            )  # fmt: skip
    except KeyboardInterrupt:
        if not found:
            raise
        for result in found:
            result.interrupted = True
    return found


def _training(model: Probed, task: Task, seed: int, steps: int, rate: float) -> Iterator[int]:
    """Yield after each step its place in the schedule, which ends at `steps`."""
    own = [part for part in (model.embed, model.head) if part is not None]
    optimizer = adamw(model.model, rate, (p for part in own for p in part.parameters()))
    generator = torch.Generator().manual_seed(2 * seed + 1)
    device = next(model.parameters()).device
    model.train()
    place = easy = 0
    while place < steps:
        length = _length(task, place / steps)
        batch = _on(device, task.draw(generator, task.batch, length))
        loss = step(model, optimizer, rate * _schedule(task, place / steps), partial(_loss, model, batch))
        easy = easy + 1 if length == task.length and loss < SOLVED else 0
        place += 1
        if easy >= IN_A_ROW and task.ends_early and not task.tolerance:
            place = max(place, steps - int(END * steps))
        yield place


def _on(device: torch.device, batch: Batch) -> Batch:
    x, y, resets = batch
    return Batch(x.to(device), y.to(device), None if resets is None else resets.to(device))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return _loss_of(model(batch.x, batch.resets), batch.y)


def _loss_of(found: Tensor, y: Tensor) -> Tensor:
    """Return the mean over what is asked: the cross-entropy of labels, the square error of numbers."""
    if y.is_floating_point():
        return mse_loss(found[..., 0].float()[y != NOTHING], y[y != NOTHING])
    is_asked = y != NOTHING  # few tokens in some tasks, and a vocabulary may be large
    return cross_entropy(found[is_asked].float(), y[is_asked])


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
def read(model: nn.Module, task: Task, length: int) -> tuple[float, float, float]:
    """Return the accuracy of all answers, of those in the last eighth, and the loss."""
    generator = torch.Generator().manual_seed(1_000_000 + length)
    model.eval()
    right = torch.zeros(length, dtype=torch.float64)
    asked = torch.zeros(length, dtype=torch.float64)
    device = next(model.parameters()).device
    loss = 0.0
    for _ in range(max(1, READ // task.batch)):
        x, y, resets = _on(device, task.draw(generator, task.batch, length))
        found, is_asked = model(x, resets), y != NOTHING
        right += (_is_right(found, y, task) & is_asked).sum(0).cpu()
        asked += is_asked.sum(0).cpu()
        loss += _loss_of(found, y).item() * is_asked.sum().item()
    late = length - -(-length // 8)
    total = asked.sum()
    last = right[late:].sum() / asked[late:].sum().clamp(min=1)
    return (right.sum() / total).item(), last.item(), loss / total.item()


def _is_right(found: Tensor, y: Tensor, task: Task) -> Tensor:
    if task.tolerance:
        return (found[..., 0] - y).abs() < task.tolerance
    return found[..., : task.labels].argmax(-1) == y
