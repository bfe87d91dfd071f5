"""Clocks that time each step of a pass: by hooks of the modules, or by marks in the function of a stream's token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from seqblocks.bench.floors import clock_of, moved, wait
from seqblocks.graph import Graph, Node, OpNode
from seqblocks.kernels.joined import Matrix
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.primitive import is_primitive
from seqblocks.runtime.torch_modules import all_primitives
from seqblocks.streaming.maps import Reader
from seqblocks.streaming.plan import TokenPlan, plan_tokens
from seqblocks.streaming.source import Path
from seqblocks.streaming.writer import Names, PlanWriter

Mark = tuple[tuple[str, ...], float]  # names of steps, and when they were done
Traffic = tuple[list[int], int, int]  # bytes of activations, bytes of parameters, elements of the output


class Observed(NamedTuple):
    """The time of a pass, and of its steps by name; those that are computed together have one time."""

    seconds: float
    steps: dict[tuple[str, ...], float]


class Clock(Protocol):
    """Times the steps of a pass. now: the clock of whole passes."""

    device: torch.device
    now: Callable[[], float]

    def observing(self) -> AbstractContextManager[Callable[[], Observed]]:
        """Give a function that runs a pass with all steps timed."""


def reading_cost(now: Callable[[], float]) -> float:
    """Return the seconds that it takes to read a clock: more in a sandbox, and on a busy machine."""
    readings = 50
    start = now()
    for _ in range(readings):
        now()
    return (now() - start) / (readings + 1)


def fastest(found: Iterable[Observed]) -> Observed:
    """Return the pass whose steps took least: other processes only ever add to a time."""
    return min(found, key=lambda each: sum(each.steps.values()))


class Hooks:
    """Times all primitives of a model by hooks, which are attached while it observes.

    In a backward pass, a step lasts from the operation that made its output to the one that made an input of it, or of
    another step: autograd runs the operations of each step together. Hooks of modules would add operations of their
    own. traffic: what each step moves, which is known after a pass.
    """

    def __init__(self, model: SequenceModel, device: torch.device, run: Callable[[], Any], backward: bool) -> None:
        self.steps = {name: each for name, each in model.named_modules() if is_primitive(each)}
        self.model, self.device, self.run, self.backward = model, device, run, backward
        self.now, self.cost = clock_of(device), 0.0
        self.traffic: dict[str, Traffic] = {}
        self.marks: list[tuple[str, Any, Any]] = []
        self.turns: list[tuple[str, Any]] = []  # when the backward pass comes to a step; no name: to what is between
        self._hooked: set[Any] = set()

    @contextmanager
    def observing(self) -> Iterator[Callable[[], Observed]]:
        started: dict[str, Any] = {}
        self.cost = 0.0 if self.device.type == "cuda" else reading_cost(self.now)
        handles = [each for name, step in self.steps.items() for each in self._hooks(name, step, started)]
        try:
            with all_primitives(self.model):
                yield self._observed
        finally:
            for handle in handles:
                handle.remove()

    def _observed(self) -> Observed:
        self.marks.clear()
        self.turns.clear()
        wait(self.device)
        start = self.now()
        self.run()
        last = self._moment()
        wait(self.device)
        seconds = self.now() - start - self.cost * (2 * len(self.marks) + len(self.turns) + 1)
        self._hooked.clear()
        found: dict[tuple[str, ...], float] = {(name,): 0.0 for name in self.steps}
        turns = [(name, begin, end) for (name, begin), (_, end) in pairwise([*self.turns, ("", last)]) if name]
        for name, begin, end in (*self.marks, *turns):
            found[name,] += begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin - self.cost
        return Observed(seconds, found)

    def _hooks(self, name: str, step: nn.Module, started: dict[str, Any]) -> list[Any]:
        def before(_: Any, inputs: Any) -> None:
            if self.backward:
                self._when_reached("", inputs)
            started[name] = self._moment()

        def after(_: Any, inputs: Any, y: Any) -> None:
            if name in started:
                self.marks.append((name, started.pop(name), self._moment()))
            if self.backward:
                self._when_reached(name, y if isinstance(y, (tuple, list)) else (y,))
            if name not in self.traffic and isinstance(y, Tensor):
                tensors = [x for x in inputs if isinstance(x, Tensor)]
                self.traffic[name] = (*moved(tensors, [*step.parameters(), *step.buffers()], y), y.numel())

        return [step.register_forward_pre_hook(before), step.register_forward_hook(after)]

    def _when_reached(self, name: str, tensors: Iterable[Any]) -> None:
        """Note when the backward pass reaches the operations that made these tensors; of two names the first counts."""
        for x in tensors:
            made_by = x.grad_fn if isinstance(x, Tensor) else None
            if made_by is not None and made_by not in self._hooked:
                self._hooked.add(made_by)
                made_by.register_prehook(lambda _: self.turns.append((name, self._moment())))

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return self.now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Marks:
    """Times the steps of a token of a stream in a copy of its function, which notes the time after each step.

    These are so short that reading the processor time could take as long, so it is the elapsed time.
    """

    def __init__(self, model: SequenceModel, planned: TokenPlan, marks: list[Mark], hooks: Hooks) -> None:
        self.model, self.planned, self.marks, self.device, self.run = model, planned, marks, hooks.device, hooks.run
        self.now = clock_of(hooks.device)

    @classmethod
    def of(cls, model: SequenceModel, hooks: Hooks) -> Marks | None:
        """Return a clock of a model's tokens, None if its modules run them. hooks: learns what each step moves."""
        hooks.run()
        if model.token_plan is None:
            return None
        with hooks.observing() as observe:
            observe()
        made = plan_tokens(model, model.spec, model.declared_state, model.latest_stream, kind=_MarkedWriter)
        if made is None or not isinstance(made.writer, _MarkedWriter):
            return None
        return cls(model, made, made.writer.marks, hooks)

    @contextmanager
    def observing(self) -> Iterator[Callable[[], Observed]]:
        before, self.model.token_plan = self.model.token_plan, self.planned
        try:
            yield self._observed
        finally:
            self.model.token_plan = before

    def _observed(self) -> Observed:
        marks, steps = self.marks, dict[tuple[str, ...], float]()
        marks.clear()
        start = self.now()
        self.run()
        seconds = self.now() - start
        for (_, before), (names, moment) in pairwise(marks):
            if names:  # else what was before is between the steps
                steps[names] = moment - before
        return Observed(seconds, steps)


class _MarkedWriter(PlanWriter):
    """Writes a function of a token that notes the names of steps and the time when they are done in `marks`."""

    def __init__(self, *arguments: Any) -> None:
        self.marks: list[Mark] = []
        super().__init__(*arguments)

    def _mark(self, names: tuple[str, ...]) -> None:
        marks, now = self.marks, time.perf_counter
        self.source.add(f"{self.source.constant(lambda: marks.append((names, now())))}()")

    def body(self, module: nn.Module, body: Graph, inputs: Sequence[str], path: Path) -> str:
        if not path:
            self._mark(())
        return super().body(module, body, inputs, path)

    def write_one(self, module: nn.Module, node: Node, values: Names, path: Path) -> Names:
        made = super().write_one(module, node, values, path)
        self._mark((".".join((*path, node.name)),) if node.op else ())
        return made

    def write_product(self, module: nn.Module, found: list[tuple[OpNode, Matrix]], values: Names, path: Path) -> Names:
        made = super().write_product(module, found, values, path)
        self._mark(tuple(".".join((*path, node.name)) for node, _ in found))
        return made

    def write_reader(self, module: nn.Module, reader: Reader, run: str, values: Names, path: Path) -> Names:
        made = super().write_reader(module, reader, run, values, path)
        self._mark(tuple(".".join((*path, node.name)) for node in (*reader.maps, reader.node)))
        return made
