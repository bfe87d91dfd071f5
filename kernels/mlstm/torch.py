"""The mLSTM chunk by chunk, with its derivative written out.

Inside a chunk every token reads every earlier token of the chunk through a small matrix (attention-like);
what came before the chunk is read through the state. Time is linear in S, memory is that of the inputs: nothing
of size S x S, and the forward pass saves only its inputs (the backward pass recomputes the chunk states).

B batch, S sequence, H heads, DK / DV head widths, L chunk length, K number of chunks, s <= t two tokens of a chunk
in the order of the scan. All of it per head:

    b_t   sum of log f from the chunk's start (or the last reset) to t
    e_s   = log i_s - b_s                so that log i_s + log f_(s+1) + ... + log f_t = b_t + e_s
    p_t   stabiliser of the state that token t's segment began with: the chunk's m, or 0 after a reset
    x_t   = max(max_{s<=t} e_s, p_t)     so that m_t = b_t + x_t: exactly the recurrent m
    D_ts  = exp(e_s - x_t)               weight of token s in token t's view; 0 across a reset
    u_t   = exp(p_t - x_t)               weight of the chunk's initial state; 0 after a reset
    W     = (q k^T / sqrt(DK)) * D
    num_t = W_t v + u_t q_t C / sqrt(DK)          den_t = sum_s W_ts + u_t q_t n / sqrt(DK)
    h_t   = num_t / (max(|den_t|, exp(-m_t)) + eps)

and the state after the chunk is row L of the same: C' = u_L C + sum_s D_Ls k_s v_s^T, m' = m_L.
A sigmoid input gate has m = 0, that is x_t = -b_t, and the floor 1.

b, e, p and x, a number a token, are float64 whatever the inputs are: what is left of a difference of two e is rounded
at 2^-53 of the sum, not at 2^-24. D and all that is as large is made of differences, in the dtype of the state.

The scan may run right to left. Heavy tensors are then read as they lie; only gate vectors, which are small, are
turned, and D is the transposed triangle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.mlstm import reference as mlstm_reference
from seqblocks.kernels.mlstm.reference import MLSTMState, largest_exponent, log_input_gate
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import nonfinite

WORKING_SET = 1 << 18  # elements of one operand of one step; more sequences than this go one group after another
# A log f below it counts as this, so that sums are finite: nothing gets through either way while |log i| and |m| are
# less than a million.
LEAST = -1e6


class Gates(NamedTuple):
    """The gates of every token, ready for use: [B, H, S], tokens as they lie in memory."""

    e: Tensor  # in float64, as x
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


# ------------------------------------------------------------------------------------------------ gates


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


def _prepare(
    i: Tensor, f: Tensor, m: Tensor | None, resets: Tensor | None, L: int, reverse: bool, input_gate: str,
) -> tuple[Gates, Scan, Tensor]:
    """From gate pre-activations to Gates, Scan, and the stabiliser m [B, H] after the last token, in float64."""
    B, S, H = i.shape
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
    u = p - x if unbroken is None else torch.where(unbroken, p - x, -torch.inf)
    u = _exp_(_by_head(u, S, reverse, f.dtype))
    floor = torch.ones_like(u)
    if exponential:
        floor = _by_head(b + x, S, reverse, f.dtype).neg_().clamp_(max=largest_exponent(f.dtype)).exp_()
    e, x = (_by_head(y, S, reverse, exact) for y in (e, x))
    gates = Gates(e, x, u, floor, None if segment is None else _to_memory(segment, S, reverse))
    return gates, Scan(source, p > best, unbroken, segment), m


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


def _prepare_backward(
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


# ------------------------------------------------------------------------------------------------ chunks


class Plan(NamedTuple):
    """How the work is cut: chunk length, chunks (first, end, last in scan order), groups of sequences."""

    L: int
    chunks: list[tuple[int, int, int]]
    groups: list[tuple[int, int]]


def _plan(q: Tensor, v: Tensor, chunk_size: int, reverse: bool) -> Plan:
    B, S, H, DK = q.shape
    # chunks of equal length, if we may choose: 197 tokens are 99 + 98, not 128 + 69
    L = min(chunk_size, S) if chunk_size else -(-S // -(-S // _chunk_size(B * H, S, max(DK, v.shape[-1]))))
    spans = [(t, min(t + L, S)) for t in range(0, S, L)]
    if reverse:
        chunks = [(S - end, S - first, 0) for first, end in spans]
    else:
        chunks = [(first, end, end - first - 1) for first, end in spans]
    size = max(1, WORKING_SET // (H * L * max(L, DK, v.shape[-1])))
    return Plan(L, chunks, [(b, min(b + size, B)) for b in range(0, B, size)])


def _chunk_size(rows: int, S: int, width: int) -> int:
    """At most so many tokens (measured on a CPU, widths 16 to 256): longer ones pay triangles, shorter ones states."""
    if rows <= 8:
        return 256 if S <= 256 and width >= 128 else 128
    return 64 if width <= 96 else 128


def _rows(x: Tensor, group: tuple[int, int], first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Tokens first:end of a group of sequences: [B, S, H, D] to [G * H, L, D]; no copy if the group is one."""
    return x[group[0] : group[1], first:end].transpose(1, 2).flatten(0, 1).to(dtype)


def _put(out: Tensor, group: tuple[int, int], first: int, end: int, rows: Tensor) -> None:
    """The inverse of `_rows`, into `out`."""
    target = out[group[0] : group[1], first:end].transpose(1, 2)
    target.copy_(rows.view(target.shape))


class ChunkGates(NamedTuple):
    """The gates of one chunk of one group, N = G * H rows."""

    D: Tensor  # [N, L, L]
    u: Tensor  # [N, L, 1]
    floor: Tensor  # [N, L, 1]
    write: Tensor  # [N, L, 1]: D of the chunk's last token
    keep: Tensor  # [N, 1, 1]: u of the chunk's last token


def _chunk_gates(
    gates: Gates, group: tuple[int, int], first: int, end: int, last: int, reverse: bool
) -> ChunkGates:
    e, x, u, floor = (g[group[0] : group[1], :, first:end] for g in gates[:4])
    n = end - first
    D = _exp_((e.unsqueeze(2) - x.unsqueeze(3)).to(u.dtype))
    D = D.triu_() if reverse else D.tril_()  # the other half may be infinite: assigned, not multiplied
    if gates.segment is not None:
        s = gates.segment[group[0] : group[1], None, first:end]
        D.masked_fill_(s.unsqueeze(2) != s.unsqueeze(3), 0.0)
    D = D.flatten(0, 1)
    u, floor = (g.reshape(-1, n, 1) for g in (u, floor))
    return ChunkGates(D, u, floor, D[:, last].unsqueeze(2), u[:, last : last + 1])


def _exp_(x: Tensor) -> Tensor:
    """exp in place, and 0 where that is negligible next to the largest weight, 1.

    Without it, products with such weights are denormal numbers, which a CPU multiplies many times more slowly: forget
    gates of 1/2 reach e^-87 within 126 tokens.
    """
    least = -60.0 if x.dtype == torch.float32 else -600.0
    return F.threshold(x, least, -torch.inf, inplace=True).exp_()


def _advance(
    C: Tensor | None, n: Tensor | None, k: Tensor, v: Tensor, g: ChunkGates
) -> tuple[Tensor, Tensor]:
    """The state after a chunk; None is the empty state."""
    written = (k * g.write).transpose(1, 2)
    if C is None or n is None:
        return torch.bmm(written, v), written.sum(2, keepdim=True)
    C = torch.baddbmm(C * g.keep, written, v)
    return C, n * g.keep + written.sum(2, keepdim=True)


@torch.library.custom_op("seqblocks::mlstm", mutates_args=())
def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h and the last C, n, m, which are empty tensors if not asked for."""
    B, S, H, DK = q.shape
    DV, dtype = v.shape[-1], f.dtype
    h = v.new_empty(B, S, H, DV)
    C_out, n_out, m_out = _empty_state(q, v, f, return_state)
    if h.numel() == 0 or S == 0:
        for out, given in ((C_out, C0), (n_out, n0), (m_out, m0)):
            out.zero_() if given is None or not return_state else out.copy_(given)
        return h, C_out, n_out, m_out
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    with without_autocast(q.device.type):
        plan = _plan(q, v, chunk_size, reverse)
        gates, _, m = _prepare(i, f, m0, resets, plan.L, reverse, input_gate)
        scale = DK**-0.5
        for group in plan.groups:
            rows = slice(*group)
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            for c, (first, end, last) in enumerate(plan.chunks):
                qc, kc, vc = (_rows(y, group, first, end, dtype) for y in (q, k, v))
                g = _chunk_gates(gates, group, first, end, last, reverse)
                W = torch.baddbmm(g.D, qc, kc.transpose(1, 2), beta=0, alpha=scale).mul_(g.D)
                den = W.sum(2, keepdim=True)
                if C is None or n is None:
                    num = torch.bmm(W, vc)
                else:
                    u = g.u * scale
                    num = torch.bmm(qc, C).mul_(u).baddbmm_(W, vc)
                    den.addcmul_(torch.bmm(qc, n), u)
                if normalize:
                    num.div_(torch.maximum(den.abs_(), g.floor).add_(eps))
                _put(h, group, first, end, num)
                if return_state or c + 1 < len(plan.chunks):
                    C, n = _advance(C, n, kc, vc, g)
            if return_state and C is not None and n is not None:
                C_out[rows] = C.view(-1, H, DK, DV)
                n_out[rows] = n.view(-1, H, DK)
        if return_state:
            m_out.copy_(m)
            _rescale(C_out, n_out, m)
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return h, C_out, n_out, m_out


def _rescale(C: Tensor, n: Tensor, m: Tensor) -> None:
    """C and n of the float64 stabiliser m, in place to those of m as the state holds it: rounded to their dtype."""
    if C.dtype != m.dtype:
        by = torch.exp(m - m.to(C.dtype)).to(C.dtype)
        C.mul_(by[..., None, None])
        n.mul_(by[..., None])


def _empty_state(q: Tensor, v: Tensor, f: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, _, H, DK = q.shape
    if not wanted:
        return f.new_empty(0), f.new_empty(0), f.new_empty(0)
    return f.new_empty(B, H, DK, v.shape[-1]), f.new_empty(B, H, DK), f.new_empty(B, H)


@_mlstm.register_fake
def _mlstm_fake(  # type: ignore[no-untyped-def]
    q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize, return_state
):
    return v.new_empty(v.shape), *_empty_state(q, v, f, return_state)


class ChunkGrads(NamedTuple):
    """Gradients of one chunk: of its operands, of its gates [N, L, 1], and of the state before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    e: Tensor
    x: Tensor
    b: Tensor | None
    p: Tensor
    C: Tensor | None
    n: Tensor | None


def _chunk_backward(
    dh: Tensor, dC: Tensor | None, dn: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, g: ChunkGates,
    last: int, scale: float, eps: float, *, exponential: bool, normalize: bool,
) -> ChunkGrads:
    """From the gradients of h and of the state after the chunk (None: zero); C, n: the state before it (None: zero).

    With dC, dn those of the state after the chunk, and r_t = dh_t . h_t:
    dnum = dh / (max + eps), dden = -sign(den) r / (max + eps) where |den| wins over the floor, else 0;
    every log weight gets (its weight) x (gradient of its weight), and m itself gets what eps leaves of it.
    """
    us = g.u * scale
    W = torch.baddbmm(g.D, q, k.transpose(1, 2), beta=0, alpha=scale).mul_(g.D)
    dp, qn = torch.zeros_like(us), torch.zeros_like(us)
    db = dden = None
    dnum = dh
    if normalize:
        den = W.sum(2, keepdim=True)
        if n is not None:
            qn = torch.bmm(q, n).mul_(us)
            den += qn
        size = den.abs()
        wins = size >= g.floor
        inverse = torch.maximum(size, g.floor).add_(eps).reciprocal_()
        dnum = dh * inverse

    # through num; dq without the factor us, which den shares
    dW = torch.bmm(dnum, v.transpose(1, 2))
    r = (W * dW).sum(2, keepdim=True)
    dq = None
    if C is not None:
        dq = torch.bmm(dnum, C.transpose(1, 2))
        dp = (q * dq).sum(2, keepdim=True).mul_(us)
        r += dp
    dx = -r

    # through den and the stabiliser
    if normalize:
        share = r * inverse
        dden = -torch.sign(den) * share * wins
        dW += dden
        if n is not None and dq is not None:
            dp += dden * qn
            dq += dden * n.transpose(1, 2)
        if exponential:
            dx = -eps * share
            db = (share * g.floor).mul_(~wins)
        else:
            dx -= dden * den

    # to the operands of the chunk
    de = (dW * W).sum(1).unsqueeze(2)
    dS = dW.mul_(g.D).mul_(scale)
    dq = torch.bmm(dS, k) if dq is None else dq.mul_(us).baddbmm_(dS, k)
    if dC is None or dn is None:
        dk = torch.bmm(dS.transpose(1, 2), q)
        dv = torch.bmm(W.transpose(1, 2), dnum)
    else:
        dk = torch.bmm(v, dC.transpose(1, 2)).add_(dn.transpose(1, 2))
        dwrite = (k * dk).sum(2, keepdim=True).mul_(g.write)
        dk.mul_(g.write).baddbmm_(dS.transpose(1, 2), q)
        dv = torch.bmm(k, dC).mul_(g.write).baddbmm_(W.transpose(1, 2), dnum)
        de += dwrite
        dx[:, last] -= dwrite.sum(1)
        if C is not None and n is not None:
            kept = (_dot(C, dC) + _dot(n, dn)).mul_(g.keep.squeeze(2))
            dp[:, last] += kept
            dx[:, last] -= kept

    # to the state before it
    if C is not None and n is not None:
        read = (q * us).transpose(1, 2)
        dC = torch.bmm(read, dnum) if dC is None else torch.baddbmm(dC * g.keep, read, dnum)
        through_den = torch.zeros_like(n) if dden is None else torch.bmm(read, dden)
        dn = through_den if dn is None else dn * g.keep + through_den
    return ChunkGrads(dq, dk, dv, de, dx, db, dp, dC, dn)


def _given_or_zeros(
    dC: Tensor | None, dn: Tensor | None, rows: slice, shape: tuple[int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the last C [N, DK, DV] and n [N, DK, 1]: both or neither."""
    N, DK, _ = shape
    some = dC if dC is not None else dn
    if some is None:
        return None, None
    C = some.new_zeros(shape) if dC is None else dC[rows].reshape(shape)
    n = some.new_zeros(N, DK, 1) if dn is None else dn[rows].reshape(N, DK, 1)
    return C, n


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b over the last two axes: [N, P, Q], [N, P, Q] -> [N, 1]."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1)).unsqueeze(1)


@torch.library.custom_op("seqblocks::mlstm_backward", mutates_args=())
def _mlstm_backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, i, f and of the initial C, n, m, from those of h and of the last C, n, m."""
    B, S, H, DK = q.shape
    DV, dtype = v.shape[-1], f.dtype
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # contiguous, as the fake ones are
    dC0, dn0, _ = _empty_state(q, v, f, True)
    if v.numel() == 0 or S == 0:
        state = [f.new_zeros(shape) if g is None else g.clone()
                 for g, shape in ((dC_out, dC0.shape), (dn_out, dn0.shape), (dm_out, (B, H)))]
        return dq, dk, dv, torch.zeros_like(i), torch.zeros_like(f), state[0], state[1], state[2]
    undefined = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0, dh, dC_out, dn_out, dm_out):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        undefined = found.without_gradient(dh, dC_out, dn_out, dm_out)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
        dh, dC_out, dn_out, dm_out = found.clean_outputs(dh, dC_out, dn_out, dm_out)
    with without_autocast(q.device.type):
        plan = _plan(q, v, chunk_size, reverse)
        gates, scan, m = _prepare(i, f, m0, resets, plan.L, reverse, input_gate)
        if dC_out is not None and dn_out is not None:
            dC_out, dn_out = dC_out.clone(), dn_out.clone()
            _rescale(dC_out, dn_out, m)
        scale = DK**-0.5
        exponential = input_gate == "exp"
        de, dx, db, dp = (i.new_zeros(B, H, S) for _ in range(4))
        for group in plan.groups:
            rows = slice(*group)
            N = (group[1] - group[0]) * H
            parts = [_chunk_gates(gates, group, *chunk, reverse) for chunk in plan.chunks]
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            states = [(C, n)]
            for g, (first, end, _) in zip(parts[:-1], plan.chunks[:-1], strict=True):
                kc, vc = (_rows(y, group, first, end, dtype) for y in (k, v))
                states.append(_advance(*states[-1], kc, vc, g))
            dC, dn = _given_or_zeros(dC_out, dn_out, rows, (N, DK, DV))
            for g, (C, n), (first, end, last) in zip(
                reversed(parts), reversed(states), reversed(plan.chunks), strict=True
            ):
                qc, kc, vc = (_rows(y, group, first, end, dtype) for y in (q, k, v))
                dhc = torch.zeros_like(vc) if dh is None else _rows(dh, group, first, end, dtype)
                grads = _chunk_backward(
                    dhc, dC, dn, qc, kc, vc, C, n, g, last, scale, eps, exponential=exponential, normalize=normalize
                )
                dC, dn = grads.C, grads.n
                for out, part in ((dq, grads.q), (dk, grads.k), (dv, grads.v)):
                    _put(out, group, first, end, part)
                for vector, column in ((de, grads.e), (dx, grads.x), (db, grads.b), (dp, grads.p)):
                    if column is not None:
                        target = vector[rows, :, first:end]
                        target.copy_(column.view(target.shape))
            if C0 is not None and dC is not None and dn is not None:
                dC0[rows], dn0[rows] = dC.view(-1, H, DK, DV), dn.view(-1, H, DK)
        if C0 is None:
            dC0.zero_()
            dn0.zero_()
        de, dx, db, dp = (y.transpose(1, 2) for y in (de, dx, db, dp))
        di, df, dm0 = _prepare_backward(i, f, scan, de, dx, db, dp, dm_out, plan.L, reverse, input_gate)
    results = dq, dk, dv, di.contiguous(), df.to(f.dtype).contiguous(), dC0, dn0, dm0.contiguous()
    if undefined is not None:
        nonfinite.fill(results, *undefined)
    return results


@_mlstm_backward.register_fake
def _mlstm_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
):
    return *(x.new_empty(x.shape) for x in (q, k, v, i, f)), *_empty_state(q, v, f, True)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # an output that nobody used costs nothing
    ctx.save_for_backward(*inputs[:9])
    ctx.options, ctx.return_state = inputs[9:14], inputs[14]


def _differentiate(ctx, dh, dC, dn, dm):  # type: ignore[no-untyped-def]
    if not ctx.return_state:
        dC = dn = dm = None
    saved = ctx.saved_tensors
    if dh is None and dC is None and dn is None and dm is None:
        return (None,) * 15
    grads = _mlstm_backward(dh, dC, dn, dm, *saved, *ctx.options)
    state = [g if given is not None else None for g, given in zip(grads[5:], saved[5:8], strict=True)]
    return *grads[:5], *state, *(None,) * 7


_mlstm.register_autograd(_differentiate, setup_context=_save)
_mlstm_backward.register_autograd(no_second_derivative("mlstm", "torch"))


def run(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None, *,
    reverse: bool, chunk_size: int | None, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, MLSTMState | None]:
    """The scan, chunk by chunk. Arguments as `mlstm`, already checked; gates and state in the dtype of the state."""
    if q.shape[1] == 1 and not torch.compiler.is_compiling():  # one token is no scan: a third of the time
        return mlstm_reference.run(
            q, k, v, i, f, state, resets, reverse=reverse, chunk_size=chunk_size, eps=eps, input_gate=input_gate,
            normalize=normalize, return_state=return_state,
        )
    C, n, m = (None, None, None) if state is None else state
    h, C, n, m = _mlstm(
        q, k, v, i, f, C, n, m, resets, reverse, chunk_size or 0, eps, input_gate, normalize, return_state
    )
    return h, MLSTMState(C, n, m) if return_state else None


register("mlstm", "torch", run, always("chunkwise, on any device"), by_hand=True)
