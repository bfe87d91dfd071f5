"""The gates of the mLSTM for a chunkwise pass, and how the pass is cut. Symbols are those of torch.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.mlstm.reference import largest_exponent, log_input_gate

WORKING_SET = 1 << 18  # elements of one operand of one step; more sequences than this go one group after another
BLOCK = 64  # queries that are multiplied with keys at a time: they leave out the keys that all of them must not see
SUMMED = 512  # tokens over which log f is summed, at most: what is added to a large sum is rounded with it
LOG2E = math.log2(math.e)  # exp2 takes a quarter of the time of exp on processors that MKL does not serve
# A log f below it counts as this, so that sums are finite: nothing gets through either way while |log i| and |m| are
# less than a million.
LEAST = -1e6


class Chunk(NamedTuple):
    """Tokens first:end, of which `last` (from first) comes last in the scan.

    opens, closes: whether the sums of log f begin with it, and whether they end with it.
    """

    first: int
    end: int
    last: int
    opens: bool
    closes: bool


class Plan(NamedTuple):
    """How the work is cut: chunks of L tokens in the order of the scan, log f summed over so many, groups of sequences.
    """

    L: int
    summed: int
    chunks: list[Chunk]
    groups: list[tuple[int, int]]


def make_plan(q: Tensor, v: Tensor, chunk_size: int, reverse: bool) -> Plan:
    B, S, H, DK = q.shape
    # chunks of equal length, if we may choose: 197 tokens are 66 + 66 + 65, not 128 + 69
    L = min(chunk_size, S) if chunk_size else -(-S // -(-S // _chunk_size(S, max(DK, v.shape[-1]))))
    spans = [(t, min(t + L, S)) for t in range(0, S, L)]
    together = max(1, SUMMED // L)  # chunks
    chunks = [
        Chunk(a, b, b - a - 1, at % together == 0, at % together == together - 1 or b == S)
        for at, (a, b) in enumerate(spans)
    ]
    if reverse:
        chunks = [Chunk(S - b, S - a, 0, opens, closes) for a, b, _, opens, closes in chunks]
    size = max(1, WORKING_SET // (H * L * max(L, DK, v.shape[-1])))
    return Plan(L, min(together * L, S), chunks, [(b, min(b + size, B)) for b in range(0, B, size)])


def _chunk_size(S: int, width: int) -> int:
    """At most so many tokens: a pair of them costs less than a state where all are fewer than two widths."""
    return S if 2 * width >= S else 64


def blocks_of(n: int, reverse: bool) -> list[tuple[slice, slice]]:
    """The queries of a chunk of n tokens, some at a time, and the keys that these may see."""
    spans = [(a, min(a + BLOCK, n)) for a in range(0, n, BLOCK)]
    return [(slice(a, b), slice(a, n) if reverse else slice(b)) for a, b in spans]


class Gates(NamedTuple):
    """The gates of every token, ready for use: [B, H, S], tokens as they lie in memory."""

    e: Tensor  # in float64, as x, and times log2(e)
    x: Tensor
    u: Tensor
    floor: Tensor
    segment: Tensor | None  # [B, S]: resets met so far in the chunk


class Scan(NamedTuple):
    """What the derivative of the gates also needs: [B, K, L, H], tokens in the order of the scan."""

    source: Tensor  # the s that gives max e_s
    carried: Tensor  # p_t wins the maximum, not e_s
    unbroken: Tensor | None  # [B, K, L, 1]: no reset in the chunk so far
    segment: Tensor | None  # [B, K, L]: resets met so far in the chunk


def _to_scan(x: Tensor, L: int, reverse: bool) -> Tensor:
    """[B, S, ...] in memory order to [B, K, L, ...] in scan order, padded at the scan's end."""
    B, S = x.shape[:2]
    if reverse:
        x = x.flip(1)
    padding = -S % L
    if padding:
        x = torch.cat([x, x.new_zeros(B, padding, *x.shape[2:])], 1)
    return x.reshape(B, -1, L, *x.shape[2:])


def _to_memory(x: Tensor, S: int, reverse: bool) -> Tensor:
    """The inverse of `_to_scan`."""
    x = x.flatten(1, 2)[:, :S]
    return x.flip(1) if reverse else x


def _by_head(x: Tensor, S: int, reverse: bool, dtype: torch.dtype) -> Tensor:
    """[B, K, L, H] in scan order to [B, H, S] in memory order, of this dtype; new memory."""
    return _to_memory(x, S, reverse).transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format)


def prepare(
    i: Tensor, f: Tensor, m: Tensor | None, resets: Tensor | None, plan: Plan, reverse: bool, input_gate: str,
) -> tuple[Gates, Scan, Tensor]:
    """From gate pre-activations to Gates, Scan, and the stabiliser m [B, H] after the last token, in float64."""
    (B, S, H), L = i.shape, plan.summed
    exact = exact_dtype(f)
    log_i = _to_scan(log_input_gate(i, input_gate), L, reverse)
    log_f = _to_scan(F.logsigmoid(f).clamp(min=LEAST), L, reverse)
    segment = unbroken = None
    if resets is None:
        b = log_f.cumsum(2, dtype=exact)
        e = log_i - b
        best, source = e.cummax(2)
    else:
        segment = _to_scan(resets, L, reverse).cumsum(2)
        unbroken = (segment == 0).unsqueeze(-1)
        b = _sum_within(segment, log_f)
        e = log_i - b
        best, source = _max_within(segment, e)
    exponential = input_gate == "exp"

    # the stabiliser from chunk to chunk; the last chunk may be short
    last = (S - 1) % L
    m = b.new_zeros(B, H) if m is None else m.to(exact)
    starts = []
    for c in range(e.shape[1]):
        starts.append(m)
        t = L - 1 if c < e.shape[1] - 1 else last
        if not exponential:
            m = torch.zeros_like(m)
            continue
        p_last = m if unbroken is None else torch.where(unbroken[:, c, t], m, 0.0)
        m = b[:, c, t] + torch.maximum(best[:, c, t], p_last)
    start = torch.stack(starts, 1).unsqueeze(2)
    p = start.expand_as(b) if unbroken is None else torch.where(unbroken, start, 0.0)
    x = torch.maximum(best, p) if exponential else -b
    u = _before_chunk(p, x, plan.L) - x
    if segment is not None:
        same = segment == _before_chunk(torch.zeros_like(segment), segment, plan.L)
        u = torch.where(same.unsqueeze(-1), u, -torch.inf)
    u = exp_(_by_head(u, S, reverse, f.dtype))
    floor = torch.ones_like(u)
    if exponential:
        floor = _by_head(b + x, S, reverse, f.dtype).neg_().clamp_(max=largest_exponent(f.dtype)).exp_()
    e, x = (_by_head(y * LOG2E, S, reverse, exact) for y in (e, x))
    gates = Gates(e, x, u, floor, None if segment is None else _to_memory(segment, S, reverse))
    return gates, Scan(source, p > best, unbroken, segment), m


def _before_chunk(opening: Tensor, x: Tensor, L: int) -> Tensor:
    """x [B, K, S, ...] of the last token before each token's chunk of L; before the first chunk it is `opening`."""
    tokens = x.shape[2]
    if tokens <= L:
        return opening
    before = torch.cat([opening[:, :, :1], x[:, :, L - 1 : tokens - 1 : L]], 2).repeat_interleave(L, 2)[:, :, :tokens]
    before[:, :, :L] = opening[:, :, :L]
    return before


def exact_dtype(f: Tensor) -> torch.dtype:
    """The dtype of sums of log f: float64, on devices that have it. See the top of the file."""
    return f.dtype if f.device.type == "mps" else torch.float64


def _sum_within(segment: Tensor, x: Tensor) -> Tensor:
    """Running sums, in float64, of x [B, K, L, H], those of each segment [B, K, L] by themselves."""
    sums = x.cumsum(2, dtype=exact_dtype(x))
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, :, 1:] = segment[:, :, 1:] != segment[:, :, :-1]
    first = torch.where(starts, torch.arange(x.shape[2], device=x.device), 0).cummax(2).values.unsqueeze(-1)
    return sums - (sums - x).gather(2, first.expand_as(x))


def _max_within(segment: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Running maxima of x [B, K, L, H] and where they were reached, those of each segment [B, K, L] by themselves."""
    best, step = x.clone(), 1
    segment = segment.unsqueeze(-1)
    while step < x.shape[2]:
        earlier = torch.where(segment[:, :, step:] == segment[:, :, :-step], best[:, :, :-step], -torch.inf)
        torch.maximum(best[:, :, step:], earlier, out=best[:, :, step:])
        step *= 2
    places = torch.arange(x.shape[2], device=x.device).view(1, 1, -1, 1)
    return best, torch.where(x == best, places, 0).cummax(2).values


def prepare_backward(
    i: Tensor, f: Tensor, scan: Scan, de: Tensor, dx: Tensor, db: Tensor, dp: Tensor, dm: Tensor | None,
    L: int, reverse: bool, input_gate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of i, f and the initial m from those of e, x, b, p [B, S, H] and of the final m [B, H]."""
    S = i.shape[1]
    de, dx, db, dp = (_to_scan(g, L, reverse) for g in (de, dx, db, dp))
    K, last = de.shape[1], (S - 1) % L
    if input_gate == "exp":
        # x_t goes to whichever made the maximum; the m that leaves a chunk is b + x of its last token
        dp = dp + dx * scan.carried
        de = de.scatter_add(2, scan.source, dx.masked_fill(scan.carried, 0.0))
    else:
        db = db - dx
    whole = dp if scan.unbroken is None else torch.where(scan.unbroken, dp, 0.0)
    dstart = whole.sum(2)
    dm = torch.zeros_like(dstart[:, 0]) if dm is None else dm
    for c in reversed(range(K)):
        if input_gate == "exp":
            t = L - 1 if c < K - 1 else last
            carried = scan.carried[:, c, t]
            db[:, c, t] += dm
            de[:, c].scatter_add_(1, scan.source[:, c, t : t + 1], dm.masked_fill(carried, 0.0).unsqueeze(1))
            if scan.unbroken is not None:
                carried = carried & scan.unbroken[:, c, t]
            dm = dstart[:, c] + torch.where(carried, dm, 0.0)
        else:
            dm = dstart[:, c]
    through = (db - de).flip(2)
    if scan.segment is None:
        through = through.cumsum(2, dtype=exact_dtype(f))
    else:
        through = _sum_within(scan.segment.flip(2), through)
    dlog_f = through.flip(2)
    di = _to_memory(de, S, reverse)
    if input_gate != "exp":
        di = di * torch.sigmoid(-i)
    return di, _to_memory(dlog_f, S, reverse) * torch.sigmoid(-f), dm


def exp_(x: Tensor) -> Tensor:
    """exp in place, and 0 where that is negligible next to the largest weight, 1.

    Without it, products with such weights are denormal numbers, which a CPU multiplies many times more slowly: forget
    gates of 1/2 reach e^-87 within 126 tokens.
    """
    least = -60.0 if x.dtype == torch.float32 else -600.0
    return F.threshold(x, least, -torch.inf, inplace=True).exp_()


def exp2_(x: Tensor) -> Tensor:
    """The same for powers of 2."""
    least = (-60.0 if x.dtype == torch.float32 else -600.0) * LOG2E
    return F.threshold(x, least, -torch.inf, inplace=True).exp2_()
