"""Time each step of a model: forward passes, training steps, or single tokens."""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.bench.floors import Limits, measured, moved, wait
from seqblocks.errors import UsageError
from seqblocks.kernels.triton_common import arch_of
from seqblocks.model.random_inputs import dtype_of, random_context, random_input
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.kernel_report import kernel_uses
from seqblocks.runtime.primitive import is_primitive
from seqblocks.runtime.torch_modules import all_primitives

MODES = ("forward", "train", "step")
MOST_SPREAD = 0.1  # of the times between the quartiles, relative to the median: above it, no ratio is stated
BEYOND_CACHES = 1 << 28  # bytes of parameters that no cache of a CPU holds from one pass to the next
PASSES = 3  # timed without hooks for each one with them
LEAST_TURNS, MOST_TURNS = 5, 500


@dataclass
class Row:
    """The steps of one place in the spec, in all layers. Times are sums over them, for one pass or one token.

    share: of a pass with hooks. kernel: the implementation that ran, "torch" for steps that call torch directly. why:
    why no faster one ran.
    """

    step: str
    count: int
    verb: str
    seconds: float
    spread: float
    floor_seconds: float
    share: float = 0.0
    kernel: str = "torch"
    why: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """The time relative to its floor, or None where the times spread too much or nothing has to be computed."""
        return self.seconds / self.floor_seconds if self.floor_seconds and self.spread <= MOST_SPREAD else None


@dataclass
class Bench:
    """Times of a model: medians over all repetitions, in seconds.

    seconds: of a pass. steps: measured in passes with hooks. A stream runs its steps together, so a token takes less
    time than they do.
    """

    name: str
    mode: str
    batch: int
    length: int | None
    dtype: str
    device: str
    processor: str
    threads: int
    repetitions: int
    seconds: float
    spread: float
    floor_seconds: float
    seconds_with_hooks: float
    flops_per_second: float
    bytes_per_second: float
    steps: list[Row]

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.floor_seconds if self.floor_seconds and self.spread <= MOST_SPREAD else None

    def as_data(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.steps]
        return {**asdict(self), "ratio": self.ratio, "steps": rows}


def bench(
    model: SequenceModel,
    mode: str = "forward",
    batch: int = 1,
    length: int | None = None,
    seconds: float = 5.0,
    advance: Callable[[float], object] | None = None,
) -> Bench:
    """Time a built model on its device.

    mode: "forward" (a pass without gradients), "train" (forward and backward of the output's sum), or "step" (a token
    of a stream). length: tokens of a pass, by default 256, or what the spec fixes. seconds: about how long to measure,
    after one warm-up; passes with and without the hooks that time each step alternate. advance: is called with the part
    of this time that is over. Then the model's mode and gradients are as before. Raises UsageError for a mode that the
    model cannot run, or a length that it does not take.
    """
    if mode not in MODES:
        raise UsageError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode == "step" and (obstacle := graph.stream_obstacle(model.spec)):
        raise UsageError(f"the model cannot stream, so it has no steps of single tokens: {': '.join(obstacle)}")
    device = model._some_tensor().device
    run, length = _call(model, mode, batch, length)
    limits = measured(device, dtype_of(model))
    clock = _Clock(model, device, backward=mode == "train")
    with _as_it_was(model):
        model.train(mode == "train")
        whole, hooked = _interleaved(run, clock, seconds, advance)
    rows = _rows(model, clock, limits, mode, length)
    total = statistics.median(whole)
    with_hooks = statistics.median(hooked)
    for row in rows:
        row.share = row.seconds / with_hooks
    return Bench(
        model.spec.name, mode, batch, length, str(dtype_of(model)).removeprefix("torch."), str(device),
        processor(device), torch.get_num_threads(), len(whole), total, _spread(whole),
        min(sum(row.floor_seconds for row in rows), *whole), with_hooks, limits.flops, limits.memory, rows,
    )  # fmt: skip


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module and the gradients of all parameters."""
    modes = [(each, each.training) for each in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


def processor(device: torch.device) -> str:
    """Return the name of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


# --- what is timed ----------------------------------------------------------------------------------------------------


def _call(model: SequenceModel, mode: str, batch: int, length: int | None) -> tuple[Callable[[], Any], int | None]:
    """Return a function that runs the model once, and the number of tokens that it takes; None: not a sequence."""
    wire, frame = model.spec.input, model.frame_size
    fixed = wire.length if isinstance(wire.length, int) else None
    if length and (wire.kind in ("image", "vector") or length != (fixed or length)):
        raise UsageError(f"the input of the spec is {model.spec.input_text}, so it has no other length")
    tokens = frame if mode == "step" else fixed or -(-(length or 256) // frame) * frame
    shown = None if wire.kind in ("image", "vector") else tokens
    x = random_input(model, batch, tokens).detach()
    context = {name: value.detach() for name, value in random_context(model, batch, seq=tokens).items()}
    if mode == "step":
        return _stepping(model, x, batch, context), None
    if mode == "forward":
        with_no_grad = torch.no_grad()(model)
        return lambda: with_no_grad(x, **context), shown

    def train() -> None:
        model.zero_grad(set_to_none=True)
        y = model(x, **context)
        sum(each.float().sum() for each in (y.values() if isinstance(y, dict) else (y,))).backward()

    return train, shown


def _stepping(model: SequenceModel, x: Tensor, batch: int, context: dict[str, Any]) -> Callable[[], Any]:
    token = x if model.frame_size > 1 else x[:, 0]
    state = model.init_state(batch, **context)

    @torch.no_grad()
    def run() -> None:
        nonlocal state
        _, state = model.step(token, state)

    return run


# --- timing -----------------------------------------------------------------------------------------------------------


class _Clock:
    """Times of all primitives of a model, through hooks that are attached within `running`."""

    def __init__(self, model: SequenceModel, device: torch.device, backward: bool) -> None:
        self.steps = {name: each for name, each in model.named_modules() if is_primitive(each)}
        self.model, self.device, self.backward = model, device, backward
        self.passes: list[dict[str, float]] = []
        self.traffic: dict[str, tuple[list[int], int, int]] = {}  # bytes of activations, of parameters; elements of y
        self.marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[list[tuple[str, Any, Any]]]:
        """Attach the hooks, and add the times to `passes`. Gives the list of times, so that some can be dropped."""
        self.marks = []
        started: dict[str, Any] = {}
        handles = [each for name, step in self.steps.items() for each in self._hooks(name, step, started)]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook is firing")  # of a step that reads token ids
                with all_primitives(self.model):
                    yield self.marks
        finally:
            for handle in handles:
                handle.remove()
        wait(self.device)
        found = dict.fromkeys(self.steps, 0.0)
        for name, start, end in self.marks:
            found[name] += start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
        self.passes.append(found)

    def _hooks(self, name: str, step: nn.Module, started: dict[str, Any]) -> list[Any]:
        def before(*_: Any) -> None:
            started[name] = self._now()

        def after(_: Any, inputs: Any, *rest: Any) -> None:
            if name in started:
                self.marks.append((name, started.pop(name), self._now()))
            y = rest[-1]
            if name not in self.traffic and isinstance(y, Tensor):
                tensors = [x for x in inputs if isinstance(x, Tensor)]
                self.traffic[name] = (*moved(tensors, [*step.parameters(), *step.buffers()], y), y.numel())

        def back(*_: Any) -> None:
            if started.get(f"{name} back") is not None:
                self.marks.append((name, started.pop(f"{name} back"), self._now()))

        def before_back(*_: Any) -> None:
            started[f"{name} back"] = self._now()

        forward = [step.register_forward_pre_hook(before), step.register_forward_hook(after)]
        if not self.backward:
            return forward
        return [
            *forward, step.register_full_backward_pre_hook(before_back), step.register_full_backward_hook(back)
        ]  # fmt: skip

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _interleaved(
    run: Callable[[], Any], clock: _Clock, seconds: float, advance: Callable[[float], object] | None
) -> tuple[list[float], list[float]]:
    """Return the times of passes without and with hooks, in turns. The first pass of a turn is not timed.

    Hooks change how a stream runs, so its next token takes longer.
    """
    plain: list[float] = []
    hooked: list[float] = []
    start = time.perf_counter()
    for turn in range(MOST_TURNS):
        run()
        times = [_timed(run, clock.device) for _ in range(PASSES)]
        with clock.running() as kept:
            run()
            kept.clear()
            with_hooks = _timed(run, clock.device)
        if not turn:  # the warm-up
            clock.passes.clear()
            start = time.perf_counter()
            continue
        plain += times
        hooked.append(with_hooks)
        done = (time.perf_counter() - start) / seconds
        if advance:
            advance(min(1.0, done))
        if done >= 1 and turn >= LEAST_TURNS:
            break
    return plain, hooked


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def _spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle else 0.0


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(model: SequenceModel, clock: _Clock, limits: Limits, mode: str, length: int | None) -> list[Row]:
    """Return a row for each place in the spec, in the order of the steps. length: tokens of a pass."""
    kernels, nodes = _kernels(model), dict(graph.walk_named(model.graph))
    from_memory = sum(p.nbytes for p in model.parameters()) >= BEYOND_CACHES
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, step in clock.steps.items():
        if name in clock.traffic:
            grouped.setdefault((_place(name), step.op.verb), []).append(name)
    rows = []
    for (place, verb), names in grouped.items():
        times = [sum(each[name] for name in names) for each in clock.passes]
        macs = [_macs(nodes.get(name), clock.traffic[name][2], length) for name in names]
        moving = (clock.traffic[name][:2] for name in names)
        floor = sum(_floor(each, *bytes_, limits, mode, from_memory) for each, bytes_ in zip(macs, moving, strict=True))
        floor = min(floor, *times)  # a step that took less has shown that it needs less
        kernel, why = kernels.get(names[0], ("torch", []))
        seconds = statistics.median(times)
        rows.append(Row(place, len(names), verb, seconds, _spread(times), floor, 0.0, kernel, why))
    return rows


def _place(name: str) -> str:
    """Return a path with * for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _macs(node: graph.Node | None, elements: int, length: int | None) -> float:
    """Return the multiply-accumulates of a step whose output has so many elements."""
    if node is None or node.type is None or not node.type.features:
        return 0.0
    return node.macs_at(length) * elements / node.type.features


def _floor(
    macs: float, activations: list[int], parameters: int, limits: Limits, mode: str, from_memory: bool
) -> float:
    """Return the least time of one step. activations, parameters: the bytes that it reads or writes.

    A backward pass computes two products for each of the forward pass. It reads the gradient of the output and writes
    those of the inputs; it reads the parameters once more and writes their gradients.
    """
    if not activations and not parameters:  # a view
        return 0.0
    if mode == "train":
        macs, activations, parameters = 3 * macs, 2 * activations, 3 * parameters
    if from_memory:
        return limits.seconds(2 * macs, activations, parameters)
    return limits.seconds(2 * macs, [*activations, parameters])


def _kernels(model: SequenceModel) -> dict[str, tuple[str, list[str]]]:
    """Return the kernel and the implementation of each step that has one, and why no faster one ran."""
    device = model._some_tensor().device
    arch = arch_of(device.index or 0) if device.type == "cuda" else "sm_90"  # which matters only there
    uses = kernel_uses(model.spec, device.type, dtype_of(model), arch)
    return {name: (f"{use.kernel}: {use.implementation}", use.reasons()) for use in uses for name in use.names}
