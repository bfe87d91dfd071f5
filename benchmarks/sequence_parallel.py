"""Estimate how long ranks wait for states in sequence parallelism, for each way of sending the states.

    python benchmarks/sequence_parallel.py [MODEL …] [--tokens N] [--ranks 2 4 8 16]

One process runs a rank's shard of the sequence and measures the CPU time of each step that carries state: of its
forward pass from a given state, of its summary, and of applying the summary to a state. From these times the forward
pass of n ranks is simulated, with messages that take no time; the backward pass has the reverse order. Times are
relative to those of ranks that never wait and compute no summaries.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

import seqblocks
from seqblocks.distributed.relay import Relay, SequenceShard
from seqblocks.model.random_inputs import random_input
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.call import Call, Carrying

RUNS = 5
MICRO_BATCHES = 8
MODELS = ["mlstm_small", "mamba_small", "hybrid_small", "mingru_small", "transformer_small"]


class Step(NamedTuple):
    """CPU times in seconds of a step and of the computation before it, and the size of its state in bytes."""

    before: float
    run: float
    summary: float
    move: float
    bytes: int


class Recorder(Relay):
    """Run each step like a rank in the middle, from the state before the first token, and measure times."""

    def __init__(self, x: Tensor) -> None:
        link: Any = None
        super().__init__(SequenceShard(link, x.shape[0], x.device, None, None, 0, 0, None, None, False, True))
        self.steps: list[Step] = []
        self.since = time.process_time()

    def run(self, step: Carrying, p: dict[str, Any], call: Call, inputs: list[Any]) -> Tensor:
        start = time.process_time()
        transition = self._transition(step.op, p, call, inputs)
        summarised = time.process_time()
        state = self._initial(step, inputs)
        after = transition(state) if transition else state
        transitioned = time.process_time()
        y = step.op.forward(p, call, *inputs)[0]
        end = time.process_time()
        summary = summarised - start if step.op.summary_cost and transition else 0.0
        can = transitioned - summarised if transition else float("nan")
        size = sum(t.numel() * t.element_size() for t in after.values())
        self.steps.append(Step(start - self.since, end - transitioned, summary, can, size))
        self.since = time.process_time()
        return y


def recorded(model: SequenceModel, x: Tensor) -> tuple[list[Step], float]:
    """Return the steps, and the time after the last one: medians of several runs."""
    found = []
    for _ in range(RUNS):
        recorder = Recorder(x)
        model.sequence_relay = recorder
        with torch.no_grad():
            model(x)
        model.sequence_relay = None
        found.append((recorder.steps, time.process_time() - recorder.since))
    runs = zip(*(steps for steps, _ in found), strict=True)
    steps = [Step(*map(statistics.median, zip(*each, strict=True))) for each in runs]
    return steps, statistics.median(rest for _, rest in found)


def span(steps: list[Step], rest: float, ranks: int, summaries: bool) -> float:
    """Return when the last rank has finished."""
    arrived = [0.0] * len(steps)  # when the state of a step arrives from the previous rank
    now = 0.0
    for rank in range(ranks):
        now = 0.0
        for at, step in enumerate(steps):
            now += step.before
            early = step.move == step.move and (summaries or not step.summary)
            now = max(now + (step.summary if early else 0.0), arrived[at] if rank else 0.0)
            now += step.move if early else step.run
            arrived[at] = now
            now += step.run if early else 0.0
        now += rest
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of one rank")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| model | messages | kB | ranks | one by one | in turn | summaries | {MICRO_BATCHES} micro-batches |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.models:
        model = seqblocks.build(name, device="cpu").eval()
        steps, rest = recorded(model, random_input(model, 1, given.tokens).detach())
        alone = sum(step.before + step.run for step in steps) + rest
        size = sum(step.bytes for step in steps) / 1000
        for ranks in given.ranks:
            turn, early = (span(steps, rest, ranks, summaries) / alone for summaries in (False, True))
            filled = 1 + (turn - 1) / MICRO_BATCHES
            times = " | ".join(f"{each:.2f}" for each in (ranks, turn, early, filled))
            print(f"| `{name}` | {len(steps)} | {size:.0f} | {ranks} | {times} |")


if __name__ == "__main__":
    main()
