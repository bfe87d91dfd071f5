"""Losses and optimisers on a tape."""

from __future__ import annotations

import math

from seqblocks.tape import Tape, Value

MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}  # of each parameter, by optimiser


def loss_of(tape: Tape, outputs: dict[str, Value], reads_ids: bool) -> Value:
    """Return the sum of the losses of all outputs: cross-entropy of logits for token ids, else the mean square."""
    total = None
    while outputs:
        y = outputs.pop(next(iter(outputs)))
        loss = cross_entropy(tape, y) if reads_ids and len(y.shape) == 3 else mean_square(tape, y)
        del y
        total = loss if total is None else tape.add(total, loss)
    assert total is not None
    return total


def cross_entropy(tape: Tape, logits: Value) -> Value:
    logs = tape.unary(tape.view(logits, (math.prod(logits.shape[:-1]), logits.shape[-1])), ["output"])
    loss = tape.new((), logs.item)
    tape.function([logs], [loss], [logs])
    return loss


def mean_square(tape: Tape, y: Value) -> Value:
    """Record torch's mse_loss, whose result lies in memory as large as y, which was allocated before the mean.

    The mean of 16 bits is that of a copy in float32. The gradient is contiguous.
    """
    loss = tape.new(y.shape, y.item).again(())
    tape.passing(y.bytes + (4 * y.numbers if y.item < 4 else 0))
    size = y.shape, y.item
    tape.function([y], [loss], [y], lambda grads: [tape.new(*size)])
    return loss


def update_by_adamw(tape: Tape) -> None:
    """Update all parameters, one after the other (foreach=False). The denominator of the previous one lives on."""
    tape.phase, before = "optimizer", None
    for value in tape.parameters.values():
        tape.step = value.memory.step
        root = tape.new(value.shape, value.item)
        before = tape.new(value.shape, value.item)  # noqa: F841 - as torch's variable does
        del root
