"""Estimate the memory of a training step and of streams, from what each op declares (`Op.memory`), without torch.

A step is the forward pass, a loss of each output (cross-entropy of logits if the model reads token ids, else the mean
square), the backward pass, and the update of an optimiser. The gradients of the previous step are freed before it. The
inputs and targets are not counted. The figures are those of torch's implementations on a CPU.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from seqblocks import graph
from seqblocks.architect.designs import find_design
from seqblocks.architect.replay import MOMENTS, Replay, Sizes
from seqblocks.architect.tables import aligned, csv, markdown
from seqblocks.cost import dtype_named, longest, params_bytes, state_bytes, tokens_of
from seqblocks.descriptions.numbers import bytes_of
from seqblocks.errors import UsageError, listing, quote
from seqblocks.graph import ModelSpec
from seqblocks.suggestions import did_you_mean
from seqblocks.tape import Memory, Tape

KINDS = ("weights", "gradients", "optimizer", "activations", "temporaries")
CHECKPOINT = ("none", "blocks")
UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
MAX_BATCH = 10**9  # sequences
MAX_TOKENS = 1 << 22  # of a sequence: kernels are replayed chunk by chunk
Bytes = Mapping[str, int]  # by kind


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step, in bytes.

    peak_bytes: the most that is in use, at a point of `phase` (forward, backward or optimizer) in the step `at`. peak:
    what it consists of, by kind; steps: the same by step of the model. weights_bytes, gradients_bytes,
    optimizer_bytes: of all parameters; activations_bytes: what the forward pass keeps for the backward pass.
    state_bytes: the state of a stream of `batch` sequences, None if the model does not stream; inference_bytes: that
    state and the weights.
    undeclared: verbs that do not declare their memory, for which inputs and output are assumed to be kept.
    """

    name: str
    batch: int
    length: int
    dtype: str
    optimizer: str
    checkpoint: str
    peak_bytes: int
    phase: str
    at: str
    peak: Bytes
    steps: Mapping[str, Bytes]
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    state_bytes: int | None
    inference_bytes: int
    undeclared: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def rows(self, depth: int | None = None) -> Iterator[tuple[str, Bytes]]:
        """Yield the steps with what each has in use at the peak; those deeper than `depth` names are added up."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
        for step, sizes in self.steps.items():
            row = found[".".join(step.split(".")[:depth])]
            for kind, size in sizes.items():
                row[kind] += size
        yield from found.items()

    def text(self, depth: int | None = 2) -> str:
        """Return the table of the peak, with a row for each step."""
        return aligned(*self._table(depth))

    def markdown(self, depth: int | None = 2) -> str:
        return markdown(*self._table(depth))

    def csv(self, depth: int | None = None) -> str:
        rows = ([step or "loss", *sizes.values(), sum(sizes.values())] for step, sizes in self.rows(depth))
        return csv(["step", *KINDS, "sum"], rows)

    def _table(self, depth: int | None) -> tuple[list[str], list[list[str]]]:
        rows = [*_merged(self.rows(depth)), ("sum", self.peak)]
        shown = [
            [step or "loss", *(bytes_of(n) if n else "" for n in (*sizes.values(), sum(sizes.values())))]
            for step, sizes in rows
        ]
        return ["step", *KINDS, "sum"], shown


def _merged(rows: Iterator[tuple[str, Bytes]]) -> Iterator[tuple[str, Bytes]]:
    """Yield the rows, with equal layers that follow each other added up: `layers.0 to 23`."""
    group: list[tuple[str, Bytes]] = []
    for row in rows:
        if group and not (row[1] == group[0][1] and _layer(row[0]) and _layer(row[0]) == _layer(group[0][0])):
            yield _added(group)
            group = []
        group.append(row)
    if group:
        yield _added(group)


def _layer(step: str) -> str:
    """Return the name of the `repeat` of a layer, or an empty text."""
    name, _, label = step.rpartition(".")
    return name if label.isdecimal() else ""


def _added(group: list[tuple[str, Bytes]]) -> tuple[str, Bytes]:
    (first, sizes), last = group[0], group[-1][0].rpartition(".")[2]
    name = first if len(group) == 1 else f"{first} to {last}"
    return name, {kind: len(group) * size for kind, size in sizes.items()}


def memory(
    spec: Any, *, batch: int = 1, length: int | None = None, optimizer: str = "adamw", dtype: str = "float32",
    checkpoint: str = "none", set: Mapping[str, Any] | None = None,
) -> Estimate:
    """Return the estimated memory of a training step with `batch` inputs, and of as many streams.

    spec: a path, the name of a bundled spec, a checked or a built model. length: tokens of a sequence, if the spec does
    not fix it. optimizer: adamw, momentum (SGD with momentum) or sgd. dtype: of the weights, gradients, states of the
    optimiser and activations. checkpoint: `blocks`, to compute the layers of the outermost `repeat`s again in the
    backward pass. Raises SpecError, and UsageError for other arguments.
    """
    model = spec if isinstance(spec, ModelSpec) and not set else find_design(spec, set).load()
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch must be a whole number from 1 to {MAX_BATCH:,}, not {batch!r}")
    _check_word("optimizer", optimizer, MOMENTS)
    _check_word("checkpoint", checkpoint, CHECKPOINT)
    sizes = Sizes(batch, _tokens(model, length))
    replay = Replay(model, sizes, dtype_named(str(dtype), "dtype"), checkpoint == "blocks")
    replay.train(optimizer)
    found = _estimate(model, replay, optimizer, checkpoint)
    replay.tape.forget()
    return found


def largest_batch(
    limit: float, spec: Any, *, advance: Callable[[float], object] = lambda part: None, **options: Any
) -> Estimate | None:
    """Return the estimate with the largest batch whose peak is at most `limit` bytes; None if not even 1 fits.

    The next larger batch does not fit. options: those of `memory`. advance: is called with the part that is done, which
    is a guess, since the number of batches to try is not known.
    """
    tried = 0

    def tried_with(batch: int) -> Estimate:
        nonlocal tried
        tried += 1
        advance(1 - 0.9**tried)
        return memory(spec, **options | {"batch": batch})

    fits = tried_with(1)
    if fits.peak_bytes > limit:
        return None
    over = 2
    while (larger := tried_with(over)).peak_bytes <= limit and over < MAX_BATCH:
        fits, over = larger, min(2 * over, MAX_BATCH)
    while over - fits.batch > 1:
        middle = tried_with((fits.batch + over) // 2)
        if middle.peak_bytes <= limit:
            fits = middle
        else:
            over = middle.batch
    return fits


def read_bytes(text: str) -> float:
    """Return a number of bytes from a text such as 24GB or 512 MiB. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise UsageError(f"a size is written as 24GB, 512MB or 16GiB, not {quote(text)}")
    return float(match[1].replace("_", "")) * UNITS[match[2].lower()]


def _check_word(name: str, word: Any, known: Any) -> None:
    if word not in known:
        hint = did_you_mean(str(word), list(known)) or f"one of {listing(list(known))}"
        raise UsageError(f"there is no {name} {quote(str(word))}: {hint}")


def _tokens(model: ModelSpec, length: int | None) -> int:
    """Return the tokens of a sequence. Raises UsageError if neither the spec nor the caller gives them."""
    fixed, frame = tokens_of(model), graph.frame_size(model.graph)
    if length and fixed and length != fixed:
        raise UsageError(f"the spec fixes the input at {fixed:,} tokens; a length is only for specs that do not")
    found = fixed or length or (1 if model.input.kind == "vector" else None)
    if found is None:
        raise UsageError("the spec does not fix the length of its sequences: give one, as in --length 1024")
    if found > MAX_TOKENS:
        raise UsageError(f"memory is estimated for sequences of at most {MAX_TOKENS:,} tokens, not {found:,}")
    if not fixed and found % frame:
        raise UsageError(f"the model takes a multiple of {frame} tokens, not {found:,}")
    if found > (most := longest(model.graph)):
        raise UsageError(f"the model has positions for {most:,.0f} tokens, not for {found:,}")
    return found


def _estimate(model: ModelSpec, replay: Replay, optimizer: str, checkpoint: str) -> Estimate:
    tape = replay.tape
    at, peak = _peak(tape)
    steps: dict[str, dict[str, int]] = {}
    for held, kind in _in_use(tape, at + 1):
        row = steps.setdefault(held.step, dict.fromkeys(KINDS, 0))
        row[kind] += held.bytes
    streams = graph.stream_obstacle(model) is None
    state = replay.sizes.batch * state_bytes(model.graph, replay.dtype) if streams else None
    weights = params_bytes(model.graph, replay.dtype)
    return Estimate(
        name=model.name,
        batch=replay.sizes.batch,
        length=int(replay.sizes.length),
        dtype=replay.dtype,
        optimizer=optimizer,
        checkpoint=checkpoint,
        peak_bytes=peak,
        phase=tape.events[at].phase,
        at=tape.events[at].memory.step,
        peak={kind: sum(row[kind] for row in steps.values()) for kind in KINDS},
        steps=steps,
        weights_bytes=weights,
        gradients_bytes=sum(value.bytes for value in tape.gradients.values()),
        optimizer_bytes=sum(value.bytes for value in replay.moments),
        activations_bytes=sum(held.bytes for held, kind in _in_use(tape, replay.kept_at) if kind == "activations"),
        state_bytes=state,
        inference_bytes=weights + (state or 0),
        undeclared=tuple(sorted(replay.undeclared)),
    )


def _peak(tape: Tape) -> tuple[int, int]:
    """Return the index of the event after which the most bytes are in use, and these bytes."""
    live = most = at = 0
    for index, event in enumerate(tape.events):
        live += event.bytes
        if live > most:
            most, at = live, index
    return at, most


def _in_use(tape: Tape, end: int) -> list[tuple[Memory, str]]:
    """Return the memory that is in use after the first `end` events, each with its kind."""
    live, kept = dict[Memory, None](), set[Memory]()
    for event in tape.events[:end]:
        if event.bytes > 0:
            live[event.memory] = None
        elif event.bytes < 0:
            live.pop(event.memory, None)
        else:
            kept.add(event.memory)
    return [(held, _kind(held, kept)) for held in live]


def _kind(held: Memory, kept: set[Memory]) -> str:
    if held.kind != "work":
        return held.kind
    return "activations" if held in kept else "temporaries"
