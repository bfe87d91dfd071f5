"""The gates of the chunkwise mLSTM, and the plan of its chunks. For symbols see torch.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.mlstm.reference import largest_exponent, log_input_gate

WORKING_SET = 1 << 18  # elements of one operand of one step; larger batches are processed in groups of sequences
BLOCK_QUERIES = 64  # queries that are multiplied with keys at a time, leaving out the keys that come after all of them
SUM_MAX_TOKENS = 512  # over which log f is summed: addends lose precision in a large sum
LOG2E = math.log2(math.e)  # On processors without MKL's exponential, exp2 takes a quarter of the time of exp.
# Smaller values of log f are replaced by this one, so that sums are finite. Both forget everything as long as |log i|
# and |m| are less than a million.
MIN_LOG_F = -1e6


class Chunk(NamedTuple):
    """Tokens first:end. last: index within the chunk of the token that is last in the scan.

    opens, closes: whether the chunk is the first, or the last, of those over which log f is summed.
    blocks: blocks of its queries, each with the keys that these may read.
    """

    first: int
    end: int
    last: int
    opens: bool
    closes: bool
    blocks: Sequence[tuple[slice, slice]]


class Plan(NamedTuple):
    """How a pass is divided: chunks of L tokens in the order of the scan, and groups of sequences.

    summed: the number of tokens over which log f is summed.
    pairs: the number of queries and keys that are multiplied, for each head.
    """

    L: int
    summed: int
    chunks: list[Chunk]
    groups: list[tuple[int, int]]
    reverse: bool
    pairs: int

    def cut(self, x: Tensor, axis: int) -> list[Tensor]:
        """Return views of x for each chunk, in the order of the scan. axis: that of the tokens."""
        if len(self.chunks) == 1:
            return [x]
        ordered = -1 if self.reverse else 1
        return [*x.split([chunk.end - chunk.first for chunk in self.chunks[::ordered]], axis)][::ordered]


def make_plan(q: Tensor, v: Tensor, chunk_size: int, reverse: bool) -> Plan:
    """Return the plan of a pass.

    A block of queries is also a chunk of a sequence longer than twice the width. In a shorter one, all tokens form one
    chunk, because a pair of tokens costs less than a state.
    """
    B, S, H, DK = q.shape
    return _planned(B, S, H, max(DK, v.shape[-1]), chunk_size, reverse, BLOCK_QUERIES)


@functools.lru_cache(maxsize=64)
def _planned(B: int, S: int, H: int, width: int, chunk_size: int, reverse: bool, block: int) -> Plan:
    # By default, chunks have equal lengths: 197 tokens are 66 + 66 + 65, not 128 + 69.
    L = min(chunk_size, S) if chunk_size else _equal(S, S if 2 * width >= S else block)
    together = max(1, SUM_MAX_TOKENS // L)  # chunks
    chunks = []
    for at, a in enumerate(range(0, S, L)):
        b = min(a + L, S)
        first, end, last = (S - b, S - a, 0) if reverse else (a, b, b - a - 1)
        closes = at % together == together - 1 or b == S
        chunks.append(Chunk(first, end, last, at % together == 0, closes, _blocks(b - a, block, reverse)))
    size = max(1, WORKING_SET // (H * L * max(L, width)))
    groups = [(b, min(b + size, B)) for b in range(0, B, size)]
    pairs = sum((rows.stop - rows.start) * (keys.stop - keys.start) for each in chunks for rows, keys in each.blocks)
    return Plan(L, min(together * L, S), chunks, groups, reverse, pairs)


def _equal(n: int, most: int) -> int:
    """Return the length of the fewest equal parts of n, which are at most this long."""
    return -(-n // -(-n // most))


def _blocks(n: int, most: int, reverse: bool) -> list[tuple[slice, slice]]:
    """Return blocks of the queries of a chunk of n tokens, each with the keys that these may read."""
    spans = [(a, min(a + most, n)) for a in range(0, n, most)]
    return [(slice(a, b), slice(a, n) if reverse else slice(0, b)) for a, b in spans]


class Gates(NamedTuple):
    """The gates of all tokens: [B, H, S], tokens in memory order."""

    e: Tensor  # float64, times log2(e)
    x: Tensor  # float64, times log2(e)
    u: Tensor | None  # None if no chunk reads a state
    floor: Tensor
    segment: Tensor | None  # [B, 1, S]: the number of resets so far


class Scan(NamedTuple):
    """Further values for the derivative of the gates: [B, H, K, L], tokens in the order of the scan."""

    source: Tensor  # the s that attains max e_s
    carried: Tensor  # whether p_t attains the maximum x_t, not e_s
    unbroken: Tensor | None  # [B, 1, K, L]: no reset so far
    segment: Tensor | None  # [B, 1, K, L]: the number of resets so far


def _to_scan(x: Tensor, L: int, reverse: bool) -> Tensor:
    """Convert [B, H, S] in memory order to [B, H, K, L] in scan order, padded with zeros at the end of the scan."""
    B, H, S = x.shape
    if reverse:
        x = x.flip(2)
    if S % L:
        x = torch.cat([x, x.new_zeros(B, H, -S % L)], 2)
    return x.reshape(B, H, -1, L)


def _to_memory(x: Tensor, S: int, reverse: bool) -> Tensor:
    """Convert [B, H, K, L] to [B, H, S]: the inverse of `_to_scan`."""
    x = x.flatten(2, 3)
    x = x if x.shape[2] == S else x[:, :, :S]
    return x.flip(2) if reverse else x


def prepare(
    i: Tensor, f: Tensor, m: Tensor | None, resets: Tensor | None, plan: Plan, reverse: bool, input_gate: str,
    enters: bool,
) -> tuple[Gates, Scan, Tensor]:
    """Compute Gates, Scan, and the stabiliser m [B, H] after the last token, in float64, from gate pre-activations.

    enters: whether any chunk reads a state.
    """
    S, L = i.shape[1], plan.summed
    i, f = (x.transpose(1, 2).contiguous() for x in (i, f))
    log_i = _to_scan(log_input_gate(i, input_gate), L, reverse)
    log_f = _to_scan(F.logsigmoid(f).clamp_(min=MIN_LOG_F), L, reverse)
    segment = unbroken = None
    if resets is None:
        b = log_f.cumsum(3, dtype=exact_dtype(f))
        e = log_i - b
        best, source = e.cummax(3)
    else:
        segment = _to_scan(resets.unsqueeze(1), L, reverse).cumsum(3)
        unbroken = segment == 0
        b = _sum_within(segment, log_f)
        e = log_i - b
        best, source = _max_within(segment, e)
    exponential = input_gate == "exp"
    start = _stabilisers(b, best, unbroken, m, exponential)
    p = start if unbroken is None else torch.where(unbroken, start, 0.0)
    x = torch.maximum(best, p) if exponential else -b
    after = b + x if exponential else torch.zeros_like(b)  # m of each token
    u = exp_(_to_memory(_of_state(p, x, segment, plan.L), S, reverse).to(f.dtype)) if enters else None
    floor = _to_memory(after, S, reverse).neg().to(f.dtype).clamp_(max=largest_exponent(f.dtype)).exp_()
    e, x = (_to_memory(y * LOG2E, S, reverse) for y in (e, x))
    lying = None if segment is None else _to_memory(segment, S, reverse)
    gates = Gates(e, x, u, floor, lying)
    return gates, Scan(source, p > best, unbroken, segment), after[:, :, -1, (S - 1) % L].clone()


def _stabilisers(
    b: Tensor, best: Tensor, unbroken: Tensor | None, m: Tensor | None, exponential: bool
) -> Tensor:
    """Return the stabiliser [B, H, K, 1] before each of K parts, from the initial m [B, H]."""
    B, H, K, _ = b.shape
    m = b.new_zeros(B, H) if m is None else m.to(b.dtype)
    starts = [m]
    for c in range(K - 1):
        if exponential:
            p_last = m if unbroken is None else torch.where(unbroken[:, :, c, -1], m, 0.0)
            m = b[:, :, c, -1] + torch.maximum(best[:, :, c, -1], p_last)
        else:
            m = torch.zeros_like(m)
        starts.append(m)
    return (m.unsqueeze(2) if K == 1 else torch.stack(starts, 2)).unsqueeze(3)


def _of_state(p: Tensor, x: Tensor, segment: Tensor | None, L: int) -> Tensor:
    """Return log u of each token, for chunks of L tokens."""
    u = _before_chunk(p, x, L) - x
    if segment is None:
        return u
    same = segment == _before_chunk(torch.zeros_like(segment), segment, L)
    return torch.where(same, u, -torch.inf)


def _before_chunk(opening: Tensor, x: Tensor, L: int) -> Tensor:
    """Return for each token x [B, H, K, S] of the last token before its chunk of L; `opening` in the first chunk."""
    tokens = x.shape[3]
    if tokens <= L:
        return opening
    before = x[..., L - 1 : tokens - 1 : L].repeat_interleave(L, 3)[..., : tokens - L]
    return torch.cat([opening.expand_as(x)[..., :L], before], 3)


def exact_dtype(f: Tensor) -> torch.dtype:
    """Return the dtype of sums of log f: float64, on devices that have it (see torch.py)."""
    return f.dtype if f.device.type == "mps" else torch.float64


def _sum_within(segment: Tensor, x: Tensor) -> Tensor:
    """Return cumulative sums, in float64, of x [B, H, K, L] within each segment [B, 1, K, L]."""
    sums = x.cumsum(3, dtype=exact_dtype(x))
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[..., 1:] = segment[..., 1:] != segment[..., :-1]
    first = torch.where(starts, torch.arange(x.shape[3], device=x.device), 0).cummax(3).values
    return sums - (sums - x).gather(3, first.expand_as(x))


def _max_within(segment: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cumulative maxima of x [B, H, K, L] within each segment [B, 1, K, L], and their indices."""
    best, step = x.clone(), 1
    while step < x.shape[3]:
        earlier = torch.where(segment[..., step:] == segment[..., :-step], best[..., :-step], -torch.inf)
        torch.maximum(best[..., step:], earlier, out=best[..., step:])
        step *= 2
    places = torch.arange(x.shape[3], device=x.device)
    return best, torch.where(x == best, places, 0).cummax(3).values


def prepare_backward(
    i: Tensor, f: Tensor, scan: Scan, de: Tensor, dx: Tensor, db: Tensor | None, dp: Tensor | None, dm: Tensor | None,
    L: int, reverse: bool, input_gate: str, starts: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of i, f and the initial m from those of e, x, b, p [B, H, S] and of the final m [B, H].

    starts: whether the gradient of the initial m is needed; otherwise it may be None or undefined.
    """
    S = de.shape[2]
    de, dx = (_to_scan(g, L, reverse) for g in (de, dx))
    db, dp = (None if g is None else _to_scan(g, L, reverse) for g in (db, dp))
    db = torch.zeros_like(dx) if db is None else db
    exponential = input_gate == "exp"
    if exponential:
        # The gradient of x_t goes to the argument that attains the maximum. The m after a chunk is b + x of its last
        # token.
        of_e = dx.masked_fill(scan.carried, 0.0)
        de = de.scatter_add(3, scan.source, of_e)
    else:
        db = db - dx
    if starts or dm is not None or de.shape[2] > 1:
        if exponential:
            dp = dx - of_e if dp is None else dp + (dx - of_e)
        dm = _stabilisers_backward(scan, de, db, dp, dm, S, exponential)
    through = (db - de).flip(3)
    if scan.segment is None:
        through = through.cumsum(3, dtype=exact_dtype(f))
    else:
        through = _sum_within(scan.segment.flip(3), through)
    di, dlog_f = (_to_memory(g, S, reverse).to(f.dtype).transpose(1, 2) for g in (de, through.flip(3)))
    if not exponential:
        di = di * torch.sigmoid(-i)
    return di, dlog_f * torch.sigmoid(-f), dm


def _stabilisers_backward(
    scan: Scan, de: Tensor, db: Tensor, dp: Tensor | None, dm: Tensor | None, S: int, exponential: bool
) -> Tensor:
    """Add to de and db [B, H, K, L] the gradients through the stabilisers between parts.

    Returns the gradient of the initial m.
    """
    B, H, K, L = de.shape
    dm = de.new_zeros(B, H) if dm is None else dm
    if dp is None:
        return torch.zeros_like(dm)
    whole = dp if scan.unbroken is None else torch.where(scan.unbroken, dp, 0.0)
    dstart = whole.sum(3)
    for c in reversed(range(K)):
        if not exponential:
            dm = dstart[:, :, c]
            continue
        t = L - 1 if c < K - 1 else (S - 1) % L
        carried = scan.carried[:, :, c, t]
        db[:, :, c, t] += dm
        de[:, :, c].scatter_add_(2, scan.source[:, :, c, t : t + 1], dm.masked_fill(carried, 0.0).unsqueeze(2))
        if scan.unbroken is not None:
            carried = carried & scan.unbroken[:, :, c, t]
        dm = dstart[:, :, c] + torch.where(carried, dm, 0.0)
    return dm


def exp_(x: Tensor) -> Tensor:
    """Replace x by exp(x), or by 0 where that is negligible compared to the largest weight, 1.

    Otherwise products with such weights are denormal numbers, which are many times slower on a CPU: forget gates of 1/2
    reach e^-87 within 126 tokens.
    """
    least = -60.0 if x.dtype == torch.float32 else -600.0
    return F.threshold(x, least, -torch.inf, inplace=True).exp_()


def exp2_(x: Tensor) -> Tensor:
    """Replace x by 2^x, or by 0 where that is negligible, like `exp_`."""
    least = (-60.0 if x.dtype == torch.float32 else -600.0) * LOG2E
    return F.threshold(x, least, -torch.inf, inplace=True).exp2_()
