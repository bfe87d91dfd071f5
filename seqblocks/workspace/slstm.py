"""The sLSTM, token by token (kernels/slstm/)."""

from __future__ import annotations

from seqblocks.tape import Tape, Value

PART_TOKENS = 64
PART_TENSORS = 15  # tensors of a part in the backward pass: 12 factors, and the 3 states from which they are computed


def scan(tape: Tape, gates: list[Value], recurrent: Value, bias: Value) -> Value:
    """Record the scan of four gates [B, S, H * D], recurrent [H, D, 4, D], bias [4, H, D]; return y [B, S, H * D]."""
    B, S, width = gates[0].shape
    item = max(gates[0].item, 4)
    gates = [tape.cast(gate, item) for gate in gates]
    stacked, recurrent, bias = tape.stack(gates), tape.cast(recurrent, item), tape.cast(bias, item)
    full = tape.new((S, B, 4 * width), item)
    each = [tape.new((S, B, width), item) for _ in range(4)]
    y = tape.new((B, S, width), item)
    _, *states = each
    each.clear()
    token = B * width * item
    numbers, parts = S * token, [token * min(PART_TOKENS, at) for at in range(S, 0, -PART_TOKENS)]
    # Zeros for the gradients of c, n, m and of the sums, the gradients of all gates in the order of time, and the
    # factors of a part. While they are computed, those of the part before are in use; later y before each token, and
    # copies of it and of all gradients. The gradients of the gates are allocated after that.
    pairs = zip([0, *parts], parts, strict=False)
    computed = max(PART_TENSORS * before + (PART_TENSORS + 5) * part for before, part in pairs)
    back = 7 * numbers + max(computed, PART_TENSORS * parts[-1] + 6 * numbers)
    keeps: list[Value | int] = [recurrent, *(token for _ in range(4)), y, *states, full]
    tape.function([stacked, recurrent, bias], [y], keeps, back)
    return tape.view(y, (B, S, width))
