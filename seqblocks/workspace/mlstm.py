"""The chunkwise mLSTM (kernels/mlstm/)."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks.tape import Tape, Value

WORKING_SET = 1 << 18
BLOCK_QUERIES = 64
PART_PAIRS = 1 << 17
GATE_BYTES = 8  # bytes of a sum of log gates


class Plan(NamedTuple):
    """L: length of a chunk. pairs: of queries and keys that are multiplied, for each head; `most` in one chunk."""

    L: int
    chunks: int
    together: int  # sequences processed at a time
    pairs: int
    most: int


def plan_of(B: int, S: int, H: int, width: int) -> Plan:
    most = S if 2 * width >= S else BLOCK_QUERIES
    L = -(-S // -(-S // most))
    lengths = [min(L, S - first) for first in range(0, S, L)]
    size = BLOCK_QUERIES
    each = [sum(min(size, n - a) * min(a + size, n) for a in range(0, n, size)) for n in lengths]
    together = min(B, max(1, WORKING_SET // (H * L * max(L, width))))
    return Plan(L, len(lengths), together, sum(each), max(each))


def scan(tape: Tape, q: Value, k: Value, v: Value, i: Value, f: Value) -> Value:
    """Record the scan of q, k [B, S, H, DK], v [B, S, H, DV], i, f [B, S, H]; return h [B, S, H, DV]."""
    B, S, H, DK = q.shape
    DV, item = v.shape[-1], max(q.item, 4)
    plan, tokens = plan_of(B, S, H, max(DK, DV)), B * S * H
    i, f = tape.cast(i, item), tape.cast(f, item)
    enters = plan.chunks > 1
    h = tape.new(v.shape, v.item)
    gates = tokens * (2 * GATE_BYTES + item + GATE_BYTES + 1 + (item if enters else 0))
    small = plan.pairs <= S * DV
    keeps = [gates, *([2 * plan.pairs * B * H * item, tokens * item] if small else [])]
    rows = plan.together * H * item
    states, weights, width = rows * (DK * DV + DK), rows * plan.most, rows * plan.L
    beside = plan.together > 1 or q.item != item  # the gradients of a chunk's operands are not written in place
    copied = beside and (H > 1 or q.item != item)  # so are its operands: with one head, a chunk is a view
    # The weights of pairs of a few chunks are differences of exact numbers.
    few = max(1, min(plan.chunks, PART_PAIRS // (plan.together * H * plan.L**2)))
    exact = few * plan.together * H * min(BLOCK_QUERIES, plan.L) * plan.L * GATE_BYTES
    # Forward: the operands of a chunk, the weights of its pairs twice, its numerator, and the state before and after.
    during = (width * (2 * DK + DV) if copied else 0) + width * DV + (2 * states if enters else 0)
    tape.passing(max(during + (0 if small else 2 * weights), exact + during, 6 * tokens * GATE_BYTES))
    # Backward: the states before all chunks, and those of one; D of all pairs and W of a chunk, if they are not kept;
    # the operands of a chunk and their gradients, if those are not written in place; the gradient of its numerator, of
    # what it read, and of W; and a product of two tensors whose rows are added up.
    back = (plan.chunks + 2) * states + width * DK if enters else 0
    back += 0 if small else rows * plan.pairs + weights
    back += 2 * width * (DK + DV) if copied else 0
    back += width * (2 * DK + DV) if beside or plan.L <= BLOCK_QUERIES else 0
    back += width * DV + weights + max(width * min(BLOCK_QUERIES, plan.L), width * DK)
    back = max(back, 0 if small else rows * plan.pairs + exact)
    tape.function([q, k, v, i, f], [h], [q, k, v, i, f, *keeps], max(back, 8 * tokens * GATE_BYTES))
    return h
