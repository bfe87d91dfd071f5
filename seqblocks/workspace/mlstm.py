"""The chunkwise mLSTM (kernels/mlstm/)."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks.tape import Tape, Value

WORKING_SET = 1 << 18
BLOCK = 64
EXACT = 8  # bytes of a sum of log gates


class Plan(NamedTuple):
    """L: length of a chunk. pairs: of queries and keys that are multiplied, for each head; `most` in one chunk."""

    L: int
    chunks: int
    together: int  # sequences processed at a time
    pairs: int
    most: int


def plan_of(B: int, S: int, H: int, width: int) -> Plan:
    most = S if 2 * width >= S else BLOCK
    L = -(-S // -(-S // most))
    lengths = [min(L, S - first) for first in range(0, S, L)]
    each = [sum(min(BLOCK, n - a) * min(a + BLOCK, n) for a in range(0, n, BLOCK)) for n in lengths]
    together = min(B, max(1, WORKING_SET // (H * L * max(L, width))))
    return Plan(L, len(lengths), together, sum(each), max(each))


def scan(tape: Tape, q: Value, k: Value, v: Value, i: Value, f: Value, normalize: bool = True) -> Value:
    """Record the scan of q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]; return h [B, S, H, DV]."""
    B, S, H, DK = q.shape
    DV, item = v.shape[-1], max(q.item, 4)
    plan, tokens, rows = plan_of(B, S, H, max(DK, DV)), B * S * H, 0
    i, f = tape.cast(i, item), tape.cast(f, item)
    enters = plan.chunks > 1
    h = tape.new(v.shape, v.item)
    gates = tokens * (2 * EXACT + item + EXACT + 1 + (item if enters else 0))
    small = plan.pairs <= S * DV
    keeps = [gates, *([2 * plan.pairs * B * H * item, tokens * item] if small else [])]
    rows = plan.together * H
    states = rows * (DK * DV + DK) * item
    operands = rows * plan.L * (2 * DK + DV) * item
    # Forward: the operands of a chunk side by side, the weights of its pairs twice, its numerator, and a state.
    during = (operands if plan.together > 1 or q.item != item else 0) + rows * plan.L * DV * item + enters * 2 * states
    weights = rows * plan.most * item
    tape.passing(max(during + (0 if small else 2 * weights), 6 * tokens * EXACT))
    # Backward: the states between all chunks and D of all their pairs, W and its gradient, and what one chunk needs.
    back = plan.chunks * states if enters else 0
    back += 0 if small else rows * plan.pairs * item + weights
    back += 2 * weights + 2 * operands + 2 * rows * plan.L * (DV + DK) * item + enters * 2 * states
    tape.function([q, k, v, i, f], [h], [q, k, v, i, f, *keeps], max(back, 8 * tokens * EXACT))
    return h
