"""Time each step of a model: forward passes, training steps, or single tokens."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.bench.clocks import Clock, Hooks, Marks, Observed, Traffic, fastest
from seqblocks.bench.floors import Limits, measured, wait
from seqblocks.errors import RunError, UsageError
from seqblocks.kernels.triton_common import arch_of
from seqblocks.model.random_inputs import dtype_of, random_context, random_input
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.kernel_report import kernel_uses

MODES = ("forward", "train", "step")
MAX_SPREAD = 0.1  # of the times between the quartiles, relative to the median: above it, no ratio is stated
BEYOND_CACHES = 1 << 28  # bytes of parameters that no cache of a CPU holds from one pass to the next
MIN_PASSES, MAX_PASSES = 3, 9  # of which the fastest counts: other processes only ever add to a time
BETWEEN = "between the steps"
TURNS = 20  # that the given time should have
MIN_TURNS, MAX_TURNS = 5, 500


@dataclass
class Row:
    """The steps of one place in the spec, in all layers. Times are sums over them, for one pass or one token.

    step: the place; steps that a stream computes together have one row. share: of a pass whose steps are timed. kernel:
    the implementation that ran, "torch" for steps that call torch directly. why: why no faster one ran.
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
        return self.seconds / self.floor_seconds if self.floor_seconds and self.spread <= MAX_SPREAD else None


@dataclass
class Bench:
    """Times of a model in seconds: medians over all repetitions, each of which is the fastest of a few passes.

    seconds: of a pass. seconds_with_hooks: of a pass whose steps are timed. steps: what they took in it, and in the
    last row what was between them: sums of residual branches, and Python. clock: "processor time" of one thread, which
    other processes do not change, or "elapsed time". interrupted: before the time was over.
    """

    name: str
    mode: str
    batch: int
    length: int | None
    dtype: str
    device: str
    processor: str
    threads: int
    clock: str
    repetitions: int
    seconds: float
    spread: float
    floor_seconds: float
    seconds_with_hooks: float
    flops_per_second: float
    bytes_per_second: float
    steps: list[Row]
    interrupted: bool = False

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.floor_seconds if self.floor_seconds and self.spread <= MAX_SPREAD else None

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
    of a stream). length: tokens of a pass, or after which a stream begins again, by default 256, or what the spec
    fixes. seconds: about how long to measure, after one warm-up; passes whose steps are timed alternate with others.
    advance: is called with the part of this time that is over. Then the model's mode and gradients are as before. A
    KeyboardInterrupt ends it once there are two repetitions. Raises UsageError for a mode that the model cannot run, or
    a length that it does not take.
    """
    if mode not in MODES:
        raise UsageError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode == "step" and (obstacle := graph.stream_obstacle(model.spec)):
        raise UsageError(f"the model cannot stream, so it has no steps of single tokens: {': '.join(obstacle)}")
    device = model.some_tensor().device
    limits = measured(device, dtype_of(model))
    with _as_it_was(model):
        model.train(mode == "train")
        run, length = _call(model, mode, batch, length)
        steps = Hooks(model, device, run, backward=mode == "train")
        clock = (Marks.of(model, steps) if mode == "step" else None) or steps
        whole, observed, interrupted = _interleaved(run, clock, seconds, advance)
    rows = _rows(model, steps.traffic, observed, limits, mode, length)
    with_hooks = statistics.median(each.seconds for each in observed)
    rest = [max(0.0, each.seconds - sum(each.steps.values())) for each in observed]
    rows.append(Row(BETWEEN, 1, "", statistics.median(rest), _spread(rest), 0.0))
    for row in rows:
        row.share = row.seconds / with_hooks
    return Bench(
        model.spec.name, mode, batch, length, str(dtype_of(model)).removeprefix("torch."), str(device),
        processor(device), torch.get_num_threads(),
        "processor time" if clock.now is time.thread_time else "elapsed time", len(whole), statistics.median(whole),
        _spread(whole), min(sum(row.floor_seconds for row in rows), *whole), with_hooks, limits.flops,
        limits.memory, rows, interrupted,
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
    """Return the name of the GPU or the CPU, for which Linux also tells the family and model of its generation."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            lines = (line.partition(":") for line in file)
            about = {name.strip(): value.strip() for name, _, value in itertools.takewhile(lambda line: line[1], lines)}
    except OSError:
        about = {}
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = f" (family {about['cpu family']} model {about['model']})" if {"cpu family", "model"} <= {*about} else ""
    return f"{name}{numbers}, {os.cpu_count()} cores"


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
        return _stepping(model, x, batch, context, length or 256), None
    if mode == "forward":
        with_no_grad = torch.no_grad()(model)
        return lambda: with_no_grad(x, **context), shown

    def train() -> None:
        model.zero_grad(set_to_none=True)
        y = model(x, **context)
        sum(each.float().sum() for each in (y.values() if isinstance(y, dict) else (y,))).backward()

    return train, shown


def _stepping(
    model: SequenceModel, x: Tensor, batch: int, context: dict[str, Any], length: int
) -> Callable[[], Any]:
    """Return a function that runs a token. The stream begins again after `length` tokens, or when a cache is full."""
    token = x if model.takes_frames else x[:, 0]
    state = first = model.init_state(batch, **context)
    seen = 0

    @torch.no_grad()
    def run() -> None:
        nonlocal state, seen
        if seen >= length:
            state, seen = first, 0
        try:
            _, state = model.step(token, state)
        except RunError:
            if not seen:
                raise
            _, state = model.step(token, first)
            seen = 0
        seen += 1

    return run


# --- timing -----------------------------------------------------------------------------------------------------------


def _interleaved(
    run: Callable[[], Any], clock: Clock, seconds: float, advance: Callable[[float], object] | None
) -> tuple[list[float], list[Observed], bool]:
    """Return the times of passes without and with their steps timed, in turns: the fastest of a few in each turn.

    The first pass of each few is not timed: a stream takes longer for its first token after hooks. The last value is
    whether an interrupt came first. Raises KeyboardInterrupt if it came before there are two turns, to tell the spread.
    """
    plain: list[float] = []
    observed: list[Observed] = []
    begin = start = time.perf_counter()
    few = MIN_PASSES
    try:
        for turn in range(MAX_TURNS + 1):
            run()
            seconds_of_fastest = min(_timed(run, clock) for _ in range(few))
            with clock.observing() as observe:
                observe()
                with_steps = fastest(observe() for _ in range(few))
            if not turn:  # the warm-up
                start = time.perf_counter()
                few = min(MAX_PASSES, max(few, int(few * seconds / TURNS / (start - begin))))
                continue
            plain.append(seconds_of_fastest)
            observed.append(with_steps)
            done = (time.perf_counter() - start) / seconds
            if advance:
                advance(min(1.0, done))
            if done >= 1 and turn >= MIN_TURNS:
                break
    except KeyboardInterrupt:
        if len(observed) < 2:
            raise
        return plain[: len(observed)], observed, True
    return plain, observed, False


def _timed(run: Callable[[], Any], clock: Clock) -> float:
    wait(clock.device)
    start = clock.now()
    run()
    wait(clock.device)
    return clock.now() - start


def _spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle else 0.0


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(
    model: SequenceModel, traffic: Mapping[str, Traffic], observed: list[Observed], limits: Limits, mode: str,
    length: int | None,
) -> list[Row]:
    """Return a row for each place in the spec, in the order of the steps. length: tokens of a pass."""
    kernels, nodes = _kernels(model), dict(graph.walk_named(model.graph))
    from_memory = sum(p.nbytes for p in model.parameters()) >= BEYOND_CACHES
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for names in observed[0].steps:
        if all(name in traffic for name in names):
            grouped.setdefault(_place(names), []).append(names)
    rows = []
    for place, together in grouped.items():
        times = [sum(each.steps[names] for names in together) for each in observed]
        floor = 0.0
        for name in (name for names in together for name in names):
            activations, parameters, elements = traffic[name]
            macs = _macs(nodes.get(name), elements, length)
            floor += _floor(macs, activations, parameters, limits, mode, from_memory)
        floor = min(floor, *times)  # a step that took less has shown that it needs less
        first = together[0][0]
        kernel, why = kernels.get(first, ("torch", []))
        verb = nodes[first].verb if first in nodes else ""
        rows.append(Row(place, len(together), verb, statistics.median(times), _spread(times), floor, 0.0, kernel, why))
    return rows


def _place(names: tuple[str, ...]) -> str:
    """Return a path with * for the numbers of layers; of several steps, the last names after the first path."""
    first, *others = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join([first, *(name.rpartition(".")[2] for name in others)])


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
    device = model.some_tensor().device
    arch = arch_of(device.index or 0) if device.type == "cuda" else "sm_90"  # which matters only there
    uses = kernel_uses(model.spec, device.type, dtype_of(model), arch)
    return {name: (f"{use.kernel}: {use.implementation}", use.reasons()) for use in uses for name in use.names}
