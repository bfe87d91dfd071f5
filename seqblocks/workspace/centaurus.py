"""Centaurus by the plan with the fewest operations (kernels/centaurus/), whose operations autograd records.

B batch, S sequence, H features in, G out, N channels, M sub-states.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from seqblocks.tape import Shape, Tape, Value

CHUNK_TOKENS = 64
PART_ELEMENTS_WITH_GRADIENTS = 1 << 20
FFT_WEIGHT = 4.0


class Bank(NamedTuple):
    """decay, turn, read, across [N, M]; B and C, which may map features ([N, H], [G, N]) or scale channels [N]."""

    mode: str
    decay: Value
    turn: Value
    read: Value
    across: Value
    B: Value
    C: Value


def bank_of(tape: Tape, p: Any, mode: str, hold: str, stable: bool) -> Bank:
    """Record `Centaurus.bank` and `discretised`. Their tensors are as small as the parameters."""
    item = max(4, p["A_real"].item)
    A_real, A_imag, log_dt = (tape.cast(p[name], item) for name in ("A_real", "A_imag", "log_dt"))
    A_real = tape.unary(tape.unary(A_real), ()) if stable else A_real
    dt, (B, C) = tape.unary(log_dt, ["output"]), (tape.cast(p[name], item) for name in "BC")
    E = tape.cast(p["E"], item) if "E" in p else None
    step = tape.view(dt, (*dt.shape, 1))
    decay, turn = tape.multiply(step, A_real), tape.multiply(step, A_imag)
    read, across = tape.new(decay.shape, item) if E is None else E, tape.new(decay.shape, item)
    if hold == "zoh":
        gain, phase = (tape.multiply(tape.unary(decay, ["output"]), tape.unary(turn)) for _ in range(2))
        read, across = tape.multiply(read, gain), tape.multiply(read, phase)
    if mode == "pointwise":
        decay, turn, read, across = (tape.view(x, (x.numbers, 1)) for x in (decay, turn, read, across))
        repeated = tape.new((decay.shape[0],), item)
        tape.function([dt], [repeated])
        dt = repeated
    if hold == "euler":
        B = tape.multiply(B, dt if len(B.shape) == 1 else tape.view(dt, (*dt.shape, 1)))
    return Bank(mode, decay, turn, read, across, B, C)


def run(tape: Tape, bank: Bank, x: Value) -> Value:
    """Record the layer for x [B, S, H]; return y [B, S, G]."""
    x = tape.cast(x, bank.decay.item)
    plan = cheapest(bank, x.shape)
    return {"chunks": _chunks, "project": _project, "fold": _fold}[plan](tape, bank, x)


def cheapest(bank: Bank, shape: Shape) -> str:
    """Return the plan with the fewest operations, like `kernels.centaurus.torch.cheapest`."""
    (batch, S, H), (N, M) = shape, bank.decay.shape
    dense = len(bank.C.shape) == 2
    G = bank.C.shape[0] if dense else N // H if bank.mode == "full" else H
    around = batch * S * N * (H + G if dense else 2)
    T, powers, size = min(CHUNK_TOKENS, S), 4 * N * M, fast_length(2 * S)
    out = {"chunks": around + batch * S * N * (T + 4 * M) + FFT_WEIGHT * T * (powers + N * T)}
    fft = 1.25 * size * max(1, size.bit_length())
    kernel = S * (powers + 2 * N * M) + fft * N
    out["project"] = around + FFT_WEIGHT * (kernel + 2 * fft * batch * N + 2 * size * batch * N)
    if bank.mode != "dws":
        fold = 0 if bank.mode == "full" else size * N * H * G
        out["fold"] = fold + FFT_WEIGHT * (kernel + fft * batch * (H + G) + 2 * size * batch * H * G)
    return min(out, key=out.__getitem__)


def fast_length(n: int) -> int:
    """Return the least even number that is at least n and has no prime factors but 2, 3 and 5."""
    size = max(2, n + n % 2)
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 2


# --- parts of the plans ---------------------------------------------------------------------------------------------


def _powers(tape: Tape, bank: Bank, lags: int, states: int) -> tuple[Value, Value]:
    """Record the real and imaginary parts of the powers [N, states, lags]."""
    shape = (bank.decay.shape[0], states, lags)
    ones = tape.new((lags,), bank.decay.item)

    def times(x: Value) -> Value:
        part = x if states == x.shape[1] else tape.slice(x, (shape[0], states))
        return tape.multiply(tape.view(part, (*shape[:2], 1)), ones)

    size, angle = tape.unary(times(bank.decay), ["output"]), times(bank.turn)
    return tape.multiply(size, tape.wave(angle)), tape.multiply(size, tape.wave(angle))


def _kernel(tape: Tape, bank: Bank, S: int) -> Value:
    """Record K [N, S], the sub-states one after the other."""
    (N, M), total = bank.decay.shape, None
    for _ in range(M):
        re, im = _powers(tape, bank, S, 1)
        re, im = (tape.view(x, (N, S)) for x in (re, im))
        read, across = (tape.slice(x, (N, 1)) for x in (bank.read, bank.across))
        seen = tape.multiply(read, re)
        seen = seen if total is None else tape.add(total, seen)
        total = tape.subtract(seen, tape.multiply(across, im))
    assert total is not None
    return total


def _enter(tape: Tape, bank: Bank, x: Value) -> Value:
    """Record the map from features [B, S, H] to channels [N, B, S]."""
    rows = math.prod(x.shape[:2])
    x = tape.rows(x)
    N = bank.B.shape[0]
    if len(bank.B.shape) == 2:
        u = tape.matmul(bank.B, tape.view(x, (x.shape[2], rows), dense=False), (N, rows))
    else:
        turned = tape.copy(tape.view(x, (x.shape[2], rows), dense=False))
        u = tape.multiply(turned, tape.view(bank.B, (N // x.shape[2], x.shape[2], 1)))
    return tape.view(u, (N, *x.shape[:2]))


def _leave(tape: Tape, bank: Bank, v: Value, H: int) -> Value:
    """Record the map from channels [N, B, S] to features [B, S, G]."""
    N, B, S = v.shape
    rows = tape.view(tape.dense(v), (N, B * S))
    if len(bank.C.shape) == 2:
        y = tape.matmul(rows, bank.C, (B * S, bank.C.shape[0]))
        return tape.view(y, (B, S, y.shape[-1]))
    rows = tape.multiply(rows, tape.view(bank.C, (N, 1)))
    if bank.mode == "full":
        rows = tape.sum(tape.view(rows, (N // H, H, B * S)), (N // H, B * S))
    y = tape.copy(tape.view(rows, rows.shape, dense=False))
    return tape.view(y, (B, S, rows.shape[0]))


def _rfft(tape: Tape, x: Value, size: int) -> Value:
    """Record the transform of the last axis, padded to a length: torch keeps the padded input.

    Its gradient is a view of complex numbers.
    """
    padded = tape.pad(tape.dense(x), (*x.shape[:-1], size))
    y = tape.new((*x.shape[:-1], size // 2 + 1), 2 * x.item)
    shape, item = padded.shape, x.item

    def backward(grads: list[Value | None]) -> list[Value | None]:
        whole = tape.new(shape, 2 * item)
        tape.passing(whole.bytes)
        return [Value(whole.memory, shape, item, dense=False)]

    tape.function([padded], [y], [padded], backward)
    return y


def _irfft(tape: Tape, x: Value, size: int, S: int) -> Value:
    y = tape.new((*x.shape[:-1], size), x.item // 2)
    tape.passing(x.bytes)
    tape.function([x], [y])
    return tape.slice(y, (*x.shape[:-1], S))


def _project(tape: Tape, bank: Bank, x: Value) -> Value:
    S = x.shape[1]
    size = fast_length(2 * S)
    spectrum = _rfft(tape, _kernel(tape, bank, S), size)
    kernel = tape.view(spectrum, (spectrum.shape[0], 1, spectrum.shape[1]))
    u = _rfft(tape, _enter(tape, bank, x), size)
    v = _irfft(tape, tape.multiply(u, kernel), size, S)
    return _leave(tape, bank, v, x.shape[2])


def _fold(tape: Tape, bank: Bank, x: Value) -> Value:
    B, S, H = x.shape
    size, N = fast_length(2 * S), bank.decay.shape[0]
    kernel = _kernel(tape, bank, S)
    if bank.mode == "full":
        kernel = tape.multiply(kernel, tape.view(tape.multiply(bank.B, bank.C), (N, 1)))
        kernel = tape.view(kernel, (N // H, H, S))
    else:
        wide = tape.multiply(tape.view(bank.B, (N, H, 1)), tape.view(kernel, (N, 1, S)))
        G = bank.C.shape[0]
        kernel = tape.view(tape.matmul(bank.C, tape.view(wide, (N, H * S)), (G, H * S)), (G, H, S))
    pairs = _rfft(tape, kernel, size)
    given = _rfft(tape, tape.view(x, (B, H, S), dense=False), size)
    G = pairs.shape[0]
    y = tape.matmul(pairs, given, (B, G, given.shape[-1]))
    return tape.view(_irfft(tape, y, size, S), (B, S, G), dense=False)


def _chunks(tape: Tape, bank: Bank, x: Value) -> Value:
    """Record the plan with chunks of T tokens, some of them at a time."""
    (B, S, H), (N, M) = x.shape, bank.decay.shape
    T = -(-S // -(-S // CHUNK_TOKENS))
    within, into, out_of, through = _matrices(tape, bank, T)
    size = max(1, PART_ELEMENTS_WITH_GRADIENTS // (N * B * T)) * T
    state = tape.view(tape.new((B, N, M, 2), x.item), (N, B, 2, M))
    sizes = [min(size, S - at) for at in range(0, S, size)]
    parts = [x] if len(sizes) == 1 else tape.split(x, sizes, 1)
    ys = []
    for part in parts:
        u = _enter(tape, bank, part)
        v, state = _span(tape, u, state, within, into, out_of, through)
        ys.append(_leave(tape, bank, v, H))
    return ys[0] if len(ys) == 1 else tape.cat(ys, 1)


def _matrices(tape: Tape, bank: Bank, T: int) -> tuple[Value, Value, Value, Value]:
    """Record `chunk_matrices`."""
    (N, M), item = bank.decay.shape, bank.decay.item
    re, im = _powers(tape, bank, T + 1, M)
    powers = tape.cat([re, im], 1)
    read, across = (tape.view(x, (N, M, 1)) for x in (bank.read, bank.across))
    seen_re = tape.subtract(tape.multiply(read, re), tape.multiply(across, im))
    seen_im = tape.add(tape.multiply(read, im), tape.multiply(across, re))
    part = (N, M, T)
    out_of = tape.cat([tape.slice(seen_re, part), tape.unary(tape.slice(seen_im, part), ())], 1)
    kernel = tape.sum(tape.slice(seen_re, part), (N, T))
    padded = tape.pad(kernel, (N, 2 * T - 1))
    windows = tape.new((N, T, T), item)
    tape.function([padded], [windows])
    into = tape.copy(tape.slice(powers, (N, 2 * M, T)))
    through = tape.slice(powers, (N, 2 * M, 1))
    return windows, tape.view(into, (N, T, 2 * M), dense=False), out_of, tape.view(through, (N, 2, M), dense=False)


def _span(
    tape: Tape, u: Value, state: Value, within: Value, into: Value, out_of: Value, through: Value
) -> tuple[Value, Value]:
    """Record `_chunk_by_chunk` for u [N, B, S]; return v and the last state."""
    (N, B, S), T, M = u.shape, within.shape[1], through.shape[2]
    full, rest = S // T * T, S % T
    pieces = [(full, T), (rest, rest)]
    found = []
    for length, chunk in pieces:
        if not length:
            continue
        part = u if length == S else tape.slice(u, (N, B, length))
        if chunk < T:  # parts of the matrices
            within = tape.slice(tape.slice(within, (N, chunk, T)), (N, chunk, chunk))
            into, out_of = tape.slice(into, (N, chunk, 2 * M)), tape.slice(out_of, (N, 2 * M, chunk))
        chunks, rows = length // chunk, B * length // chunk
        tokens = tape.view(tape.dense(part), (N, rows, chunk))
        given = tape.view(tape.matmul(tokens, into, (N, rows, 2 * M)), (N, B, chunks, 2, M))
        before, state = _between(tape, given, state, through, chunks)
        v = tape.matmul(tokens, within, (N, rows, chunk))
        flat = tape.view(before, (N, rows, 2 * M))
        y = tape.new(v.shape, v.item)
        tape.function([v, flat, out_of], [y], [flat, out_of])
        del v
        found.append(tape.view(y, (N, B, length)))
    return found[0] if len(found) == 1 else tape.cat(found), state


def _between(tape: Tape, given: Value, now: Value, through: Value, chunks: int) -> tuple[Value, Value]:
    """Record the states before each chunk, and the last."""
    N, B, _, _, M = given.shape
    one = (N, B, 2, M)
    through = tape.view(through, (N, 1, 2, M), dense=False)
    parts = tape.split(given, [1] * chunks, 2)
    befores = []
    for part in parts:
        befores.append(now)
        flipped = tape.unary(now, ())
        matrix = [through] if now.tracked else []  # for the gradient of the state
        first = tape.pointwise(tape.view(part, one), through, now, keeps=[now, *matrix])
        now = tape.pointwise(first, through, flipped, keeps=[flipped, *matrix])
    before = tape.view(befores[0], given.shape) if chunks == 1 else tape.stack(befores)
    return before, now
