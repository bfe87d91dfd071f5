"""The selective scan, chunk by chunk (kernels/selective_scan/)."""

from __future__ import annotations

from seqblocks.tape import Tape, Value

WORKING_SET = 1 << 19
MIN_CHUNK_TOKENS = 8
SAVED_MAX_BYTES = 1 << 22  # bytes


def chunk_length(batch: int, channels: int, states: int) -> int:
    return max(MIN_CHUNK_TOKENS, min(128, WORKING_SET // max(1, batch * channels * states)))


def scan(
    tape: Tape, u: Value, dt: Value, A: Value, B: Value, C: Value, D: Value | None, z: Value | None, softplus: bool
) -> Value:
    """Record the scan of u, dt, z [B, S, E], A [E, N], B and C [B, S, G, N]; return y [B, S, E]."""
    batch, S, E = u.shape
    N, item = A.shape[1], max(u.item, 4)
    u, dt, B, C = tape.dense(u), tape.dense(dt), tape.dense(tape.cast(B, item)), tape.dense(tape.cast(C, item))
    D = None if D is None else tape.cast(D, item)
    state = tape.new((batch, E, N), item)
    length = min(chunk_length(batch, E, N), S)
    chunks, part = -(-S // length), batch * min(length, S) * E * item
    saved = u.bytes <= SAVED_MAX_BYTES
    inner = batch * S * E * item
    keeps: list[Value | int] = [x for x in (u, dt, A, B, C, D, z, state) if x is not None]
    keeps += [inner] * (saved * (softplus + (z is not None)))
    keeps += [chunks * state.bytes]
    products = 4 + softplus + 2 * (z is not None)
    y = tape.new(u.shape, u.item)
    converted = u.item < item  # u and dt, and then the gradient too
    tape.passing(2 * part * N + (4 + 2 * converted) * part + 2 * state.bytes)
    needs = 4 * part * N + (products + 3 * converted) * part + 2 * state.bytes
    tape.function([u, dt, A, B, C, D, z], [y], keeps, needs)
    return y
