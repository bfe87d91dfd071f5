"""The gated recurrence, block by block (kernels/gated_recurrence/)."""

from __future__ import annotations

import math

from seqblocks.tape import Tape, Value

PART_ELEMENTS = 1 << 19
TOKEN_MIN_ELEMENTS = 2048


def scan(tape: Tape, x: Value, decay: Value) -> Value:
    """Record the recurrence of x and decay [B, S, E]; return y [B, S, E], as exact as the state."""
    B, S, E = x.shape
    item = max(x.item, decay.item, 4)
    x, decay = tape.cast(x, item), tape.cast(decay, item)
    y, state = tape.new(x.shape, item), tape.new((B, E), item)
    span = min(S, max(1, PART_ELEMENTS // (B * E)))
    part = B * span * E * item
    blocks = 1 if B * E >= TOKEN_MIN_ELEMENTS else span // max(1, math.isqrt(span))
    products = 0 if blocks <= 1 else part
    tape.passing(part + products)
    unused = 0 if decay.tracked else decay.bytes  # its gradient is computed in any case
    tape.function([x, decay], [y], [y, decay, state], 3 * part + products + unused)
    return y
