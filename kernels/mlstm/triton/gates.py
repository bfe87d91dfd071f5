"""The gates of every token: sums of log f, the stabiliser, and weights relative to it.

The symbols are those of mlstm/torch.py. b, e and p are float64, because weights depend on differences of sums.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.mlstm.triton.tensors import CARRIED, E_REST, FLOOR, KEEP, WRITE, E, U, X, start
from seqblocks.kernels.resets.nonfinite_triton import chosen, finite
from seqblocks.kernels.triton_common import binary, constexpr, jit, log_sigmoid, tl

MIN_LOG_F = constexpr(-1e6)  # so that sums over a chunk are finite
NEGLIGIBLE = constexpr(208.0)  # A weight is negligible if it is e^-208 = 2^-300 times another.
MAX_FLOOR = constexpr(125.51447)  # e^87 as a power of 2


@jit
@no_type_check
def _add_within(segment, a, other, b):
    """Combine adjacent runs, each given by its last segment and the sum over that segment's tokens in the run."""
    return other, tl.where(segment == other, a + b, b)


@jit
@no_type_check
def _max_within(segment, a, other, b):
    return other, tl.where(segment == other, tl.maximum(a, b), b)


@jit
@no_type_check
def _max(a, b):
    return tl.maximum(a, b)


@jit
@no_type_check
def _compose(sum_a, most_a, sum_b, most_b):
    """Compose two adjacent runs of tokens, each given as a function of the m before it: max(m + sum, most)."""
    return sum_a + sum_b, tl.maximum(most_a + sum_b, most_b)


@jit
@no_type_check
def _power(x):
    """Return 2^x in float32 for a float64 x, which is a difference."""
    return tl.exp2(x.to(tl.float32))


@jit
@no_type_check
def sums(segment, x, SEGMENTS: tl.constexpr):
    """Return the cumulative sums of x [BT] within each segment."""
    if SEGMENTS:
        return tl.associative_scan((segment, x), 0, _add_within)[1]
    return tl.cumsum(x, 0)


@jit
@no_type_check
def _chunk_gates(
    i, f, resets, n, H, c, S, ib, js, ih, fb, fs, fh, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr
):
    """Return the gates of chunk c, independent of other chunks.

    As binary logarithms: b, e, and the rest left out of b, in float64; e in float32, and the largest e so far in the
    token's segment. Also the index of that segment.

    Without an input gate, i is None and f is log f, or None for 0.

    A closed forget gate would make the sums large or infinite. So b includes only as much of its log as reduces all
    earlier tokens to 2^-300 of the weight of the gate's own token. The rest applies to the state before the chunk,
    whose weight may be larger.
    """
    j = tl.arange(0, BT)
    is_t = j < S - c * BT
    sign = -1 if REVERSE else 1
    # Places after S neither write nor forget, so that the last place has the values of the last token.
    if i is None:
        log_f = tl.zeros((BT,), tl.float32)
        if f is not None:
            log_f = tl.load(start(f, n, H, c, S, fb, fs, fh, REVERSE, BT) + sign * j * fs, is_t, 0.0).to(tl.float32)
        log_i = tl.zeros((BT,), tl.float32)
    else:
        raw_f = tl.load(start(f, n, H, c, S, fb, fs, fh, REVERSE, BT) + sign * j * fs, is_t, 0.0).to(tl.float32)
        log_i = tl.load(start(i, n, H, c, S, ib, js, ih, REVERSE, BT) + sign * j * js, is_t, 0.0).to(tl.float32)
        log_f = tl.where(is_t, log_sigmoid(raw_f), 0.0)
        if not EXP:
            log_i = log_sigmoid(log_i)
    log_i = tl.where(is_t, log_i, float("-inf"))
    least = tl.maximum(log_i - tl.max(log_i, 0) - NEGLIGIBLE, MIN_LOG_F)
    closed = log_f < least
    rest = tl.where(closed, binary(log_f - least), 0.0)
    log_f = binary(tl.where(closed, least, log_f).to(tl.float64))
    log_i = binary(log_i.to(tl.float64))
    segment = tl.zeros((BT,), tl.int32)
    if resets is not None:
        marks = tl.load(start(resets, n, H, c, S, S, 1, 0, REVERSE, BT) + sign * j, is_t, 0).to(tl.int32)
        segment = tl.cumsum(marks, 0)
    b = sums(segment, log_f, resets is not None)
    rest = sums(segment, rest, resets is not None)
    e = log_i - b
    high = e.to(tl.float32)
    if resets is not None:
        running_max = tl.associative_scan((segment, high), 0, _max_within)[1]
    else:
        running_max = tl.associative_scan(high, 0, _max)
    return b, e, rest, high, running_max, segment


@jit
@no_type_check
def _in_last_segment(segment, resets):
    """Return which tokens are in the last segment of the chunk, and whether there is an earlier segment.

    Without resets both are constants, which saves the maximum.
    """
    if resets is None:
        return segment == 0, tl.full((), False, tl.int1)
    else:
        return segment == tl.max(segment, 0), tl.max(segment, 0) > 0


@jit
@no_type_check
def _passage(b, e, rest, reaches, broken, BT: tl.constexpr):
    """Return the map of a chunk from the m before it to the m after it, max(m + sum, most); a reset sets m to 0.

    The code selects instead of branching, because around a branch compilers synchronise threads at every exchange.
    """
    last = tl.arange(0, BT) == BT - 1
    through = tl.sum(tl.where(last, b, 0.0), 0)
    most = tl.max(tl.where(reaches, e, float("-inf")), 0)
    enters = tl.sum(tl.where(last, rest, 0.0), 0).to(tl.float64)
    return (
        tl.where(broken, float("-inf"), through + enters),
        tl.where(broken, tl.maximum(most, enters), most) + through,
    )


@common.kernel(do_not_specialize=["S"])  # one compiled kernel for all lengths
@no_type_check
def totals(
    i, f, resets, passages, clean_f, clean_i, faults,
    S, H, ib, js, ih, fb, fs, fh, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
):
    """Compute passages [2, N, K]: sum and most of the map of every chunk from the m before it to the m after it."""
    if i is not None:
        i = chosen(i, clean_i, faults)
    if f is not None:
        f = chosen(f, clean_f, faults)
    at = tl.program_id(0)
    chunks = tl.cdiv(S, BT)
    b, e, rest, _, _, segment = _chunk_gates(
        i, f, resets, at // chunks, H, at % chunks, S, ib, js, ih, fb, fs, fh, EXP, REVERSE, BT
    )
    reaches, broken = _in_last_segment(segment, resets)
    through, most = _passage(b, e, rest, reaches, broken, BT)
    tl.store(passages + at, through)
    tl.store(passages + tl.num_programs(0) + at, most)


@common.kernel(do_not_specialize=["K"])
@no_type_check
def entering(passages, m0, m_enters, faults, K, BC: tl.constexpr):
    """Compute m_enters [N, K + 1]: m before every chunk and after the last. One program per head."""
    n = tl.program_id(0)
    j = tl.arange(0, BC)
    m = tl.full((), 0.0, tl.float64)
    if m0 is not None:
        m = binary(finite(tl.load(m0 + n), faults).to(tl.float64))
    m_enters += n * (K + 1)
    tl.store(m_enters, m)
    for first in range(0, K, BC):
        at = passages + n * K + first + j
        through = tl.load(at, first + j < K, 0.0)
        most = tl.load(at + tl.num_programs(0) * K, first + j < K, float("-inf"))
        through, most = tl.associative_scan((through, most), 0, _compose)
        after = tl.maximum(most, through + m)
        tl.store(m_enters + 1 + first + j, after, first + j < K)
        m = tl.sum(tl.where(j == BC - 1, after, 0.0), 0)


@common.kernel(do_not_specialize=["S", "N"])
@no_type_check
def gates(
    i, f, resets, m0, m_enters, planes, segments, m_out, clean_f, clean_i, faults,
    S, N, H, ib, js, ih, fb, fs, fh,
    EACH: tl.constexpr, EXP: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
):
    """Compute the gates: one program per head, which loops over the chunks; with EACH, one program per chunk.

    m_enters: with EACH, the m before each chunk. m is a binary logarithm in float64; the last one is rounded before it
    is used, because the state stores it in float32.
    """
    if i is not None:
        i = chosen(i, clean_i, faults)
    if f is not None:
        f = chosen(f, clean_f, faults)
    chunks = tl.cdiv(S, BT)
    n = tl.program_id(0) // chunks if EACH else tl.program_id(0)
    first = tl.program_id(0) % chunks if EACH else 0
    end = first + 1 if EACH else chunks
    place = n.to(tl.int64) * chunks * BT
    plane = tl.cast(N, tl.int64) * chunks * BT
    j = tl.arange(0, BT)
    last = j == BT - 1
    m = tl.full((), 0.0, tl.float64)
    if EACH and EXP:
        m = tl.load(m_enters + n * (chunks + 1) + first)
    elif m0 is not None:
        m = binary(finite(tl.load(m0 + n), faults).to(tl.float64))
    if not EXP:
        m = tl.where(first == 0, m, 0.0)  # A reset at the first token discards the given m.
    for c in range(first, end):
        b, e, rest, high, running_max, segment = _chunk_gates(
            i, f, resets, n, H, c, S, ib, js, ih, fb, fs, fh, EXP, REVERSE, BT
        )
        whole = segment == 0
        p = tl.where(whole, m, 0.0) + rest.to(tl.float64)
        reaches, broken = _in_last_segment(segment, resets)
        after = tl.full((), 0.0, tl.float64)
        if EXP:
            through, most = _passage(b, e, rest, reaches, broken, BT)
            after = tl.maximum(most, through + m)
            if c == chunks - 1:
                after = _rounded(after)
        # Any x for which weights are at most 1 would do. It is float32, and everything else is relative to its rounded
        # value.
        carried = tl.zeros((BT,), tl.int1)
        x = (-b).to(tl.float32)
        if EXP:
            carried = p.to(tl.float32) > running_max
            x = tl.maximum(running_max, p.to(tl.float32))
        to = planes + place + c * BT + j
        tl.store(to + plane * E, high)
        tl.store(to + plane * X, x)
        tl.store(to + plane * U, _power(tl.where(whole, p - x.to(tl.float64), float("-inf"))))
        tl.store(to + plane * FLOOR, tl.exp2(tl.minimum((-b - x.to(tl.float64)).to(tl.float32), MAX_FLOOR)))
        tl.store(to + plane * CARRIED, tl.where(carried, 1.0, 0.0))
        left = tl.sum(tl.where(last, b, 0.0), 0) - after
        tl.store(to + plane * WRITE, _power(tl.where(reaches, e + left, float("-inf"))))
        low = e - tl.where(high > float("-inf"), high, 0.0).to(tl.float64)
        tl.store(to + plane * E_REST, tl.where(high > float("-inf"), low, 0.0).to(tl.float32))
        tl.store(to + plane * KEEP, _power(tl.where(whole & last, m + rest.to(tl.float64) + left, float("-inf"))))
        if segments is not None:
            tl.store(segments + place + c * BT + j, segment)
        m = after
        if m_out is not None:
            if c == chunks - 1:
                tl.store(m_out + n, _natural(m).to(tl.float32))


@jit
@no_type_check
def _natural(x):
    """Convert a binary logarithm to a natural one."""
    return x * 0.6931471805599453


@jit
@no_type_check
def _rounded(m):
    """Return the binary logarithm m, rounded as in a state, which stores the natural logarithm in float32."""
    return binary(_natural(m).to(tl.float32).to(tl.float64))
