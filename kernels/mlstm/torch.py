"""The mLSTM chunk by chunk, with its derivative written out.

Inside a chunk every token reads every earlier token of the chunk through a small matrix (attention-like);
what came before the chunk is read through the state. Time is linear in S, memory is that of the inputs: nothing
of size S x S. The backward pass computes the states of chunks again, and W too where it is larger than an input.

B batch, S sequence, H heads, DK / DV head widths, L chunk length, K number of chunks, s <= t two tokens of a chunk
in the order of the scan. All of it per head:

    b_t   sum of log f from the chunk's start (or the last reset) to t
    e_s   = log i_s - b_s                so that log i_s + log f_(s+1) + ... + log f_t = b_t + e_s
    p_t   stabiliser of the state that token t's segment began with: the m before the chunk, or 0 after a reset
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

So b need not begin with each chunk: it runs over several, and within these p is the x of the last token before the
chunk. No weight depends on that x, which only says in what scale the state is held; so it has no gradient.

The scan may run right to left. Heavy tensors are then read as they lie; only gate vectors, which are small, are
turned, and D is the transposed triangle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.custom_op import custom_op, is_seen
from seqblocks.kernels.mlstm import reference as mlstm_reference
from seqblocks.kernels.mlstm.gates import (
    Chunk,
    Gates,
    Plan,
    Scan,
    blocks_of,
    exp2_,
    make_plan,
    prepare,
    prepare_backward,
)  # fmt: skip
from seqblocks.kernels.mlstm.reference import MLSTMState
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, nonfinite


def _rows(x: Tensor, group: tuple[int, int], chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """A chunk of a group of sequences: [B, S, H, D] to [G * H, L, D]; no copy if the group is one."""
    return x[group[0] : group[1], chunk.first : chunk.end].transpose(1, 2).flatten(0, 1).to(dtype)


def _put(out: Tensor, group: tuple[int, int], first: int, rows: Tensor) -> None:
    """The inverse of `_rows`, into `out` from its token `first` on."""
    target = out[group[0] : group[1], first : first + rows.shape[1]].transpose(1, 2)
    target.copy_(rows.view(target.shape))


class ChunkGates(NamedTuple):
    """The gates of one chunk of one group, N = G * H rows."""

    D: list[Tensor]  # [N, queries, keys] of each block
    u: Tensor  # [N, L, 1]
    floor: Tensor  # [N, L, 1]
    write: Tensor  # [N, L, 1]: D of the chunk's last token
    keep: Tensor  # [N, 1, 1]: u of the chunk's last token


def _chunk_gates(gates: Gates, group: tuple[int, int], chunk: Chunk, reverse: bool) -> ChunkGates:
    first, end, last = chunk[:3]
    e, x, u, floor = (g[group[0] : group[1], :, first:end] for g in gates[:4])
    segment = None if gates.segment is None else gates.segment[group[0] : group[1], None, first:end]
    n = end - first
    D = []
    for rows, keys in blocks_of(n, reverse):
        weights = exp2_((e[:, :, None, keys] - x[:, :, rows, None]).to(u.dtype))
        # the other half may be infinite: assigned, not multiplied
        weights = weights.triu_() if reverse else weights.tril_(rows.start)
        if segment is not None:
            weights.masked_fill_(segment[:, :, None, keys] != segment[:, :, rows, None], 0.0)
        D.append(weights.flatten(0, 1))
    u, floor = (g.reshape(-1, n, 1) for g in (u, floor))
    write = D[0 if reverse else -1][:, 0 if reverse else -1].unsqueeze(2)
    return ChunkGates(D, u, floor, write, u[:, last : last + 1])


def _advance(
    C: Tensor | None, n: Tensor | None, k: Tensor, v: Tensor, g: ChunkGates, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """The state after a chunk; None is the empty state. in_place: in the memory of C and n."""
    written = (k * g.write).transpose(1, 2)
    if C is None or n is None:
        return torch.bmm(written, v), written.sum(2, keepdim=True)
    C, n = (C.mul_(g.keep), n.mul_(g.keep)) if in_place else (C * g.keep, n * g.keep)
    return C.baddbmm_(written, v), n.add_(written.sum(2, keepdim=True))


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass besides its inputs, where memory allows."""

    gates: Gates
    scan: Scan
    m: Tensor
    weights: list[Tensor]  # W of each block, in the order of the forward pass; empty if they would be too large

    def tensors(self) -> list[Tensor | None]:
        return [*self.gates, *self.scan, self.m, *self.weights]

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Kept:
        gates, scan = len(Gates._fields), len(Gates._fields) + len(Scan._fields)
        return cls(Gates(*tensors[:gates]), Scan(*tensors[gates:scan]), tensors[scan], [*tensors[scan + 1 :]])


def _may_keep_weights(v: Tensor, plan: Plan, reverse: bool) -> bool:
    """Whether W of all blocks is not larger than an input."""
    pairs = sum(
        (rows.stop - rows.start) * (keys.stop - (keys.start or 0))
        for chunk in plan.chunks
        for rows, keys in blocks_of(chunk.end - chunk.first, reverse)
    )
    return pairs <= v.shape[1] * v.shape[3]


@custom_op("seqblocks::mlstm")
def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h and the last C, n, m, which are empty tensors if not asked for."""
    return _forward(
        q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize, return_state, save=False
    )[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool, save: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor | None]]:
    """As `_mlstm`, and with `save` what is kept for the backward pass."""
    B, S, H, DK = q.shape
    DV, dtype = v.shape[-1], f.dtype
    h = v.new_empty(B, S, H, DV)
    C_out, n_out, m_out = _empty_state(q, v, f, return_state)
    if h.numel() == 0 or S == 0:
        for out, given in ((C_out, C0), (n_out, n0), (m_out, m0)):
            out.zero_() if given is None or not return_state else out.copy_(given)
        return (h, C_out, n_out, m_out), ()
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    with without_autocast(q.device.type):
        plan = make_plan(q, v, chunk_size, reverse)
        kept = Kept(*prepare(i, f, m0, resets, plan, reverse, input_gate), [])
        gates, m = kept.gates, kept.m
        weights = kept.weights if save and _may_keep_weights(v, plan, reverse) else None
        for group in plan.groups:
            rows = slice(*group)
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            for chunk in plan.chunks:
                qc, kc, vc = (_rows(y, group, chunk, dtype) for y in (q, k, v))
                g = _chunk_gates(gates, group, chunk, reverse)
                for part in _blocks_forward(qc, kc, vc, C, n, g, weights, reverse, eps, normalize):
                    _put(h, group, chunk.first + part.first, part.h)
                if return_state or chunk is not plan.chunks[-1]:
                    C, n = _advance(C, n, kc, vc, g, in_place=chunk is not plan.chunks[0])
            if return_state and C is not None and n is not None:
                C_out[rows] = C.view(-1, H, DK, DV)
                n_out[rows] = n.view(-1, H, DK)
        if return_state:
            m_out.copy_(m)
            _rescale(m, C_out, n_out)
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return (h, C_out, n_out, m_out), kept.tensors() if save else ()


def _weights(q: Tensor, k: Tensor, D: Tensor) -> Tensor:
    """W [N, queries, keys] = (q k^T / sqrt(DK)) * D."""
    return torch.baddbmm(D, q, k.transpose(1, 2), beta=0, alpha=q.shape[2] ** -0.5).mul_(D)


class Block(NamedTuple):
    """What a block of queries gives."""

    first: int
    h: Tensor  # [N, queries, DV]


def _blocks_forward(
    q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, g: ChunkGates, weights: list[Tensor] | None,
    reverse: bool, eps: float, normalize: bool,
) -> Iterator[Block]:
    """Yield h of a chunk block by block; C, n: the state before it (None: zero). weights: where W is kept."""
    us = g.u * q.shape[2] ** -0.5
    for (rows, keys), D in zip(blocks_of(q.shape[1], reverse), g.D, strict=True):
        W = _weights(q[:, rows], k[:, keys], D)
        if weights is not None:
            weights.append(W)
        den = W.sum(2, keepdim=True)
        if C is None or n is None:
            num = torch.bmm(W, v[:, keys])
        else:
            u = us[:, rows]
            num = torch.bmm(q[:, rows], C).mul_(u).baddbmm_(W, v[:, keys])
            den.addcmul_(torch.bmm(q[:, rows], n), u)
        if normalize:
            num.div_(torch.maximum(den.abs_(), g.floor[:, rows]).add_(eps))
        yield Block(rows.start, num)


def _rescale(m: Tensor, *parts: Tensor | None) -> None:
    """C and n of the float64 stabiliser m, in place to those of m as the state holds it: rounded to their dtype."""
    for x in parts:
        if x is not None and x.dtype != m.dtype:
            x.mul_(along(torch.exp(m - m.to(x.dtype)).to(x.dtype), x))


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
    p: Tensor | None
    C: Tensor | None
    n: Tensor | None


class BlockGrads(NamedTuple):
    """Gradients of a block of queries: of q, of the scores q k^T before D, of num and den, and of the gates."""

    W: Tensor
    q: Tensor
    scores: Tensor  # times sqrt(DK)
    num: Tensor
    den: Tensor | None
    e: Tensor  # of the keys
    x: Tensor
    b: Tensor | None
    p: Tensor


def _block_backward(
    dh: Tensor, q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, D: Tensor, us: Tensor,
    floor: Tensor, W: Tensor | None, eps: float, *, exponential: bool, normalize: bool,
) -> BlockGrads:
    """From the gradients of h. With r_t = dh_t . h_t:

    dnum = dh / (max + eps), dden = -sign(den) r / (max + eps) where |den| wins over the floor, else 0;
    every log weight gets (its weight) x (gradient of its weight), and m itself gets what eps leaves of it.
    """
    W = _weights(q, k, D) if W is None else W
    dp = torch.zeros_like(us)
    qn = None if n is None else torch.bmm(q, n).mul_(us)
    db = dden = dq = None
    dnum = dh
    if normalize:
        den = W.sum(2, keepdim=True)
        den = den if qn is None else den.add_(qn)
        size = den.abs()
        wins = size >= floor
        inverse = torch.maximum(size, floor).add_(eps).reciprocal_()
        dnum = dh * inverse

    # through num; dq without the factor us, which den shares
    dW = torch.bmm(dnum, v.transpose(1, 2))
    r = (W * dW).sum(2, keepdim=True)
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
        if n is not None and dq is not None and qn is not None:
            dp += dden * qn
            dq += dden * n.transpose(1, 2)
        if exponential:
            dx = -eps * share
            db = (share * floor).mul_(~wins)
        else:
            dx -= dden * den

    de = (dW * W).sum(1).unsqueeze(2)
    dS, scale = dW.mul_(D), q.shape[2] ** -0.5
    dq = torch.bmm(dS, k).mul_(scale) if dq is None else dq.mul_(us).baddbmm_(dS, k, alpha=scale)
    return BlockGrads(W, dq, dS, dnum, dden, de, dx, db, dp)


def _chunk_backward(
    dh: Tensor, dC: Tensor | None, dn: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, g: ChunkGates,
    weights: Sequence[Tensor | None], chunk: Chunk, reverse: bool, eps: float, *, exponential: bool, normalize: bool,
) -> ChunkGrads:
    """From the gradients of h and of the state after the chunk (None: zero); C, n: the state before it (None: zero)."""
    scale, last = q.shape[2] ** -0.5, chunk.last
    us = g.u * scale
    spans = blocks_of(q.shape[1], reverse)
    blocks = [
        _block_backward(
            dh[:, rows], q[:, rows], k[:, keys], v[:, keys], C, n, D, us[:, rows], g.floor[:, rows], W, eps,
            exponential=exponential, normalize=normalize,
        )
        for (rows, keys), D, W in zip(spans, g.D, weights, strict=True)
    ]  # fmt: skip
    dq, dx, db, dp = (_side_by_side([getattr(block, name) for block in blocks]) for name in "qxbp")
    assert dq is not None
    assert dx is not None
    assert dp is not None

    # through the state after the chunk
    kept = None
    if dC is None or dn is None:
        dk, dv, de = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(us)
    else:
        dk = torch.bmm(v, dC.transpose(1, 2)).add_(dn.transpose(1, 2))
        de = (k * dk).sum(2, keepdim=True).mul_(g.write)
        dk.mul_(g.write)
        dv = torch.bmm(k, dC).mul_(g.write)
        if C is not None and n is not None and (chunk.opens or chunk.closes):
            kept = (_dot(C, dC) + _dot(n, dn)).mul_(g.keep.squeeze(2))
            dp[:, last] += kept
        if chunk.closes:
            dx[:, last] -= de.sum(1) if kept is None else de.sum(1).add_(kept)

    # to keys, values and the state before the chunk, from all blocks
    if C is not None and n is not None:
        dC, dn = (None if x is None else x * g.keep for x in (dC, dn))
    for (rows, keys), block in zip(spans, blocks, strict=True):
        dk[:, keys].baddbmm_(block.scores.transpose(1, 2), q[:, rows], alpha=scale)
        dv[:, keys].baddbmm_(block.W.transpose(1, 2), block.num)
        de[:, keys] += block.e
        if C is not None and n is not None:
            read = (q[:, rows] * us[:, rows]).transpose(1, 2)
            dC = torch.bmm(read, block.num) if dC is None else dC.baddbmm_(read, block.num)
            through_den = torch.zeros_like(n) if block.den is None else torch.bmm(read, block.den)
            dn = through_den if dn is None else dn.add_(through_den)
    return ChunkGrads(dq, dk, dv, de, dx, db, dp if chunk.opens else None, dC, dn)


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The queries of all blocks."""
    given = [x for x in parts if x is not None]
    return given[0] if len(given) == 1 else torch.cat(given, 1) if given else None


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


@custom_op("seqblocks::mlstm_backward")
def _mlstm_backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, i, f and of the initial C, n, m, from those of h and of the last C, n, m."""
    return _backward(
        dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
    )


def _backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_mlstm_backward`, with what the forward pass kept."""
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
        plan = make_plan(q, v, chunk_size, reverse)
        kept = kept or Kept(*prepare(i, f, m0, resets, plan, reverse, input_gate), [])
        gates, scan, m = kept[:3]
        dC_out, dn_out = (None if x is None else x.clone() for x in (dC_out, dn_out))
        _rescale(m, dC_out, dn_out)
        weights = list(kept.weights)
        exponential = input_gate == "exp"
        de, dx, db, dp = (i.new_zeros(B, H, S) for _ in range(4))
        for group in reversed(plan.groups):
            rows = slice(*group)
            N = (group[1] - group[0]) * H
            parts = [_chunk_gates(gates, group, chunk, reverse) for chunk in plan.chunks]
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            states = [(C, n)]
            for g, chunk in zip(parts[:-1], plan.chunks[:-1], strict=True):
                kc, vc = (_rows(y, group, chunk, dtype) for y in (k, v))
                states.append(_advance(*states[-1], kc, vc, g))
            dC, dn = _given_or_zeros(dC_out, dn_out, rows, (N, DK, DV))
            for g, (C, n), chunk in zip(reversed(parts), reversed(states), reversed(plan.chunks), strict=True):
                qc, kc, vc = (_rows(y, group, chunk, dtype) for y in (q, k, v))
                dhc = torch.zeros_like(vc) if dh is None else _rows(dh, group, chunk, dtype)
                W: Sequence[Tensor | None] = weights[-len(g.D) :] if weights else [None] * len(g.D)
                del weights[-len(g.D) :]
                grads = _chunk_backward(
                    dhc, dC, dn, qc, kc, vc, C, n, g, W, chunk, reverse, eps, exponential=exponential,
                    normalize=normalize,
                )  # fmt: skip
                dC, dn = grads.C, grads.n
                for out, part in ((dq, grads.q), (dk, grads.k), (dv, grads.v)):
                    _put(out, group, chunk.first, part)
                for vector, column in ((de, grads.e), (dx, grads.x), (db, grads.b), (dp, grads.p)):
                    if column is not None:
                        target = vector[rows, :, chunk.first : chunk.end]
                        target.copy_(column.view(target.shape))
            if C0 is not None and dC is not None and dn is not None:
                dC0[rows], dn0[rows] = dC.view(-1, H, DK, DV), dn.view(-1, H, DK)
        if C0 is None:
            dC0.zero_()
            dn0.zero_()
        de, dx, db, dp = (y.transpose(1, 2) for y in (de, dx, db, dp))
        di, df, dm0 = prepare_backward(i, f, scan, de, dx, db, dp, dm_out, plan.summed, reverse, input_gate)
    results = dq, dk, dv, di.contiguous(), df.to(f.dtype).contiguous(), dC0, dn0, dm0.contiguous()
    if undefined is not None:
        nonfinite.fill(results, *undefined)
    return results


@_mlstm_backward.register_fake
def _mlstm_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
):
    return *(x.new_empty(x.shape) for x in (q, k, v, i, f)), *_empty_state(q, v, f, True)


def _save(ctx, inputs, output, kept=()):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # an output that nobody used costs nothing
    ctx.save_for_backward(*inputs[:9], *kept)
    ctx.options, ctx.return_state = inputs[9:14], inputs[14]


def _saving_gates(ctx, *inputs):  # type: ignore[no-untyped-def]
    output, kept = _forward(*inputs)
    _save(ctx, inputs, output, kept)
    return output


def _differentiate(ctx, dh, dC, dn, dm):  # type: ignore[no-untyped-def]
    if not ctx.return_state:
        dC = dn = dm = None
    if dh is None and dC is None and dn is None and dm is None:
        return (None,) * 15
    tensors = ctx.saved_tensors  # a checkpoint lets them be read once
    saved, kept = tensors[:9], tensors[9:]
    arguments: list[Any] = [dh, dC, dn, dm, *saved, *ctx.options]
    if kept and not torch.is_grad_enabled() and not is_seen((dh, dC, dn, dm)):
        grads = _backward(*[*arguments, Kept.of(kept)])
    else:
        grads = _mlstm_backward(*arguments)
    state = [g if given is not None else None for g, given in zip(grads[5:], saved[5:8], strict=True)]
    return *grads[:5], *state, *(None,) * 7


_mlstm.register_autograd(_differentiate, setup_context=_save, forward=_saving_gates)
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
