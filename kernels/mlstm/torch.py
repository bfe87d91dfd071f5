"""The mLSTM chunk by chunk, with a handwritten derivative.

Within a chunk, every token reads the earlier tokens of the chunk through a small matrix, as in attention; earlier
chunks are read through the state. Time is linear in S, and memory that of the inputs: there is no S x S matrix. The
backward pass recomputes the states between chunks, and W if it is larger than an input.

B batch, S sequence, H heads, DK / DV head widths, L chunk length, K number of chunks, s <= t two tokens of a chunk
in the order of the scan. Per head:

    b_t   sum of log f from the chunk's start (or the last reset) to t
    e_s   = log i_s - b_s                so that log i_s + log f_(s+1) + ... + log f_t = b_t + e_s
    p_t   stabiliser of the state before the segment of token t: the m before the chunk, or 0 after a reset
    x_t   = max(max_{s<=t} e_s, p_t)     so that m_t = b_t + x_t: exactly the recurrent m
    D_ts  = exp(e_s - x_t)               weight of token s for token t; 0 across a reset
    u_t   = exp(p_t - x_t)               weight of the chunk's initial state; 0 after a reset
    W     = (q k^T / sqrt(DK)) * D
    num_t = W_t v + u_t q_t C / sqrt(DK)          den_t = sum_s W_ts + u_t q_t n / sqrt(DK)
    h_t   = num_t / (max(|den_t|, exp(-m_t)) + eps)

and the state after the chunk is row L of the same: C' = u_L C + sum_s D_Ls k_s v_s^T, m' = m_L.
A sigmoid input gate has m = 0, that is x_t = -b_t, and the floor 1.

b, e, p and x have one value per token and are always float64, so that a difference of two e has a rounding error of
2^-53 of the sum, not 2^-24. D and other tensors of its size are computed from differences, in the dtype of the state.

So b does not have to restart with each chunk. It is summed over several chunks, and within these p is the x of the last
token before the chunk. That x only determines the scale of the stored state; no weight depends on it, so it has no
gradient.

The scan may run from right to left. Large tensors are then read in memory order; only the gates, which are small, are
flipped, and D is upper triangular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.custom_op import custom_op, is_seen
from seqblocks.kernels.mlstm import reference as mlstm_reference
from seqblocks.kernels.mlstm.chunks import (
    ChunkGates,
    chunk_gates,
    cut,
    cut_gate,
    decays,
    part_of,
    put,
    rows_of,
    rows_to_fill,
)  # fmt: skip
from seqblocks.kernels.mlstm.gates import Chunk, Gates, Plan, Scan, make_plan, prepare, prepare_backward
from seqblocks.kernels.mlstm.reference import MLSTMState
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.products import multiply
from seqblocks.kernels.resets import along, nonfinite


class Options(NamedTuple):
    """Options of a pass, as for `mlstm`. singly: see `Plan`."""

    reverse: bool
    eps: float
    exponential: bool
    normalize: bool
    singly: bool

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return what is multiplied at a time of x [N, P, Q]: each matrix [P, Q], or all."""
        return x.unbind() if self.singly else (x,)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor [N, P, Q] of all parts of a batch."""
    return parts[0] if parts[0].dim() == 3 else torch.stack(list(parts))


def _row_sums(parts: Iterable[Tensor]) -> Tensor:
    return _whole([x.sum(-1, keepdim=True) for x in parts])


def _row_dots(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    """Return the sums over each row of a * b: [N, P, 1]."""
    return _row_sums(x * y for x, y in zip(a, b, strict=True))


def _advance(
    C: Tensor | None, n: Tensor | None, k: Tensor, v: Tensor, g: ChunkGates, options: Options, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the state after a chunk from that before it (None: zeros). in_place: overwrite C and n."""
    written = (k * g.write).transpose(1, 2)
    if C is None or n is None:
        return _outer(written, v, None, options), written.sum(2, keepdim=True)
    assert g.keep is not None
    C, n = (C.mul_(g.keep), n.mul_(g.keep)) if in_place else (C * g.keep, n * g.keep)
    return _outer(written, v, C, options), n.add_(written.sum(2, keepdim=True))


def _outer(k: Tensor, v: Tensor, C: Tensor | None, options: Options) -> Tensor:
    """Return k v [N, DK, DV] for k [N, DK, L], v [N, L, DV], added to C in place if given."""
    total = v.new_empty(*k.shape[:2], v.shape[2]) if C is None else C
    multiply(options.parts(k), options.parts(v), options.parts(total), add=C is not None)
    return total


class Operands(NamedTuple):
    """q, k [N, L, DK] and v [N, L, DV] of a chunk, or their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor


class Kept(NamedTuple):
    """What the forward pass saves for the backward pass in addition to its inputs, if memory allows."""

    plan: Plan
    gates: Gates
    scan: Scan
    m: Tensor
    D: list[Tensor]  # of each block, in the order of the forward pass; empty if too large
    W: list[Tensor]  # of each block, and within it of each part

    def tensors(self) -> list[Tensor | None]:
        return [*self.gates, *self.scan, self.m, *self.D, *self.W]

    @classmethod
    def of(cls, plan: Plan, tensors: Sequence[Any]) -> Kept:
        gates, scan = len(Gates._fields), len(Gates._fields) + len(Scan._fields)
        blocks = len(plan.groups) * sum(len(chunk.blocks) for chunk in plan.chunks)
        weights = tensors[scan + 1 :]
        return cls(
            plan, Gates(*tensors[:gates]), Scan(*tensors[gates:scan]), tensors[scan], [*weights[:blocks]],
            [*weights[blocks:]],
        )  # fmt: skip


def _may_keep_weights(v: Tensor, plan: Plan) -> bool:
    """Return whether W of all blocks is at most as large as an input."""
    pairs = sum(
        (rows.stop - rows.start) * (keys.stop - keys.start) for chunk in plan.chunks for rows, keys in chunk.blocks
    )
    return pairs <= v.shape[1] * v.shape[3]


@custom_op("seqblocks::mlstm")
def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h and the last C, n, m, which are empty tensors unless return_state."""
    return _forward(
        q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize, return_state, save=False
    )[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool, save: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Kept | None]:
    """Return the outputs of `_mlstm`, and with `save` what the backward pass needs."""
    B, S, H, DK = q.shape
    DV = v.shape[-1]
    h = v.new_empty(B, S, H, DV)
    C_out, n_out, m_out = _empty_state(q, v, f, return_state)
    if h.numel() == 0 or S == 0:
        for out, given in ((C_out, C0), (n_out, n0), (m_out, m0)):
            out.zero_() if given is None or not return_state else out.copy_(given)
        return (h, C_out, n_out, m_out), None
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    with without_autocast(q.device.type):
        plan = make_plan(q, v, chunk_size, reverse)
        enters = C0 is not None or len(plan.chunks) > 1
        kept = Kept(plan, *prepare(i, f, m0, resets, plan, reverse, input_gate, enters), [], [])
        options = Options(reverse, eps, input_gate == "exp", normalize, plan.singly)
        weights = kept if save and _may_keep_weights(v, plan) else None
        for group in plan.groups:
            rows = slice(*group)
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            C, n = _group_forward(h, q, k, v, C, n, kept.gates, plan, group, weights, options, return_state)
            if return_state and C is not None and n is not None:
                C_out[rows] = C.view(-1, H, DK, DV)
                n_out[rows] = n.view(-1, H, DK)
        if return_state:
            m_out.copy_(kept.m)
            _rescale(kept.m, C_out, n_out)
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return (h, C_out, n_out, m_out), kept if save else None


def _group_forward(
    h: Tensor, q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, gates: Gates, plan: Plan,
    group: tuple[int, int], weights: Kept | None, options: Options, return_state: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write h of a group of sequences, and return the last state, which is valid only with return_state.

    weights: collects W and D, if given.
    """
    dtype = gates.floor.dtype
    parts = (cut(x, group, plan) for x in (q, k, v, h))
    all_gates = chunk_gates(gates, group, plan, decays(gates, group, plan), q.shape[3])
    for *each, out, g, chunk in zip(*parts, all_gates, plan.chunks, strict=True):
        given = Operands(*(rows_of(part, dtype, plan) for part in each))
        W = _chunk_forward(out, given, C, n, g, chunk, options)
        if weights is not None:
            weights.D.extend(g.D)
            weights.W.extend(chain.from_iterable(W))
        if return_state or chunk is not plan.chunks[-1]:
            C, n = _advance(C, n, given.k, given.v, g, options, in_place=chunk is not plan.chunks[0])
    return C, n


def _weights(q: Tensor, k: Tensor, D: Tensor, options: Options) -> list[Tensor]:
    """Return the parts of W [N, queries, keys] = (q k^T / sqrt(DK)) * D."""
    scores = multiply(options.parts(q), options.parts(k.transpose(1, 2)), alpha=q.shape[2] ** -0.5)
    return _each(Tensor.mul_, scores, options.parts(D))


def _each(operation: Callable[[Tensor, Tensor], Tensor], parts: list[Tensor], by: Iterable[Tensor]) -> list[Tensor]:
    """Apply an in-place operation to the parts of a batch and those of another, and return the first."""
    for part, operand in zip(parts, by, strict=True):
        operation(part, operand)
    return parts


def _chunk_forward(
    out: Tensor, given: Operands, C: Tensor | None, n: Tensor | None, g: ChunkGates, chunk: Chunk, options: Options
) -> list[list[Tensor]]:
    """Write h of a chunk to `out` [G, H, L, DV]; C, n: the state before it (None: zero).

    Returns W of its blocks, each as a list of parts.
    """
    parts = options.parts
    weights: list[list[Tensor]] = []
    for (rows, keys), D in zip(chunk.blocks, g.D, strict=True):
        queries, values = part_of(given.q, rows), parts(part_of(given.v, keys))
        W = _weights(queries, part_of(given.k, keys), D, options)
        weights.append(W)
        size = _row_sums(W) if options.normalize else None
        if C is None or n is None or g.us is None:
            num = multiply(W, values)
        else:
            u = part_of(g.us, rows)
            num = multiply(W, values, _each(Tensor.mul_, multiply(parts(queries), parts(C)), parts(u)), add=True)
            if size is not None:
                size.addcmul_(torch.bmm(queries, n), u)
        if size is not None:
            size = torch.maximum(size.abs_(), part_of(g.floor, rows)).add_(options.eps)
        _put_quotient(out if rows.stop - rows.start == out.shape[2] else out[:, :, rows], num, size, options)
    return weights


def _put_quotient(out: Tensor, num: Sequence[Tensor], size: Tensor | None, options: Options) -> None:
    """Write num / size (None: num), for num in parts of [N, R, DV], size [N, R, 1], out [G, H, R, DV]."""
    targets: Sequence[Tensor] = out[0].unbind() if options.singly else (out,)
    sizes: Iterable[Tensor | None] = repeat(None) if size is None else options.parts(size)
    for target, x, divisor in zip(targets, num, sizes, strict=False):
        if divisor is None:
            target.copy_(x.view(target.shape))
        else:
            torch.div(x.view(target.shape), divisor.view(*target.shape[:-1], 1), out=target)


def _rescale(m: Tensor, *parts: Tensor | None) -> None:
    """Rescale C and n in place, from the float64 stabiliser m to m rounded to their dtype, as the state stores it."""
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
    """Gradients of the gates of a chunk, [N, L, 1], and of the state before it."""

    e: Tensor
    x: Tensor
    b: Tensor | None
    p: Tensor | None
    C: Tensor | None
    n: Tensor | None


class Normaliser(NamedTuple):
    """den of a chunk, whether |den| is at least the floor, and the factor of num: [N, L, 1]."""

    den: Tensor
    wins: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, W: Sequence[Sequence[Tensor]], qn: Tensor | None, floor: Tensor, eps: float) -> Normaliser:
        den = _side_by_side([_row_sums(block) for block in W])
        den = den if qn is None else den.add_(qn)
        size = den.abs()
        return cls(den, size >= floor, torch.maximum(size, floor).add_(eps).reciprocal_())

    def backward(self, r: Tensor, floor: Tensor, options: Options) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of x, of b (None: 0) and of den, from r_t = dh_t . num_t / (max + eps).

        dden = -sign(den) r / (max + eps) where |den| attains the maximum, else 0. The gradient of m is not zero only
        because of eps.
        """
        share = r * self.inverse
        dden = torch.sign(self.den).mul_(share).mul_(self.wins).neg_()
        if options.exponential:
            return share * -options.eps, share.mul_(floor).mul_(~self.wins), dden
        return torch.addcmul(-r, dden, self.den, value=-1), None, dden


def _chunk_backward(
    grads: Operands, dh: Tensor, dC: Tensor | None, dn: Tensor | None,
    given: Operands, C: Tensor | None, n: Tensor | None, g: ChunkGates, W: Sequence[Sequence[Tensor]], chunk: Chunk,
    options: Options,
) -> ChunkGrads:
    """Write the gradients of q, k and v of a chunk, and return the others.

    dh, dC, dn: gradients of h and of the state after the chunk (None: zeros); dC and dn may be overwritten.
    C, n: the state before the chunk (None: zeros).
    """
    q, k, v = given
    us, parts = g.us, options.parts
    qn = None if n is None or us is None else torch.bmm(q, n).mul_(us)
    norm = Normaliser.of(W, qn, g.floor, options.eps) if options.normalize else None
    dnum = dh if norm is None else dh * norm.inverse

    # Gradients through num
    dW = [
        multiply(parts(part_of(dnum, rows)), parts(part_of(v, keys).transpose(1, 2))) for rows, keys in chunk.blocks
    ]
    r = _side_by_side([_row_dots(w, d) for w, d in zip(W, dW, strict=True)])
    dread = dp = None
    if C is not None and us is not None:
        dread = multiply(parts(dnum), parts(C.transpose(1, 2)))
        dp = _row_dots(parts(q), dread).mul_(us)
        r += dp

    # Gradients through den and the stabiliser
    if norm is None:
        dx, db, dden = -r, None, None
    else:
        dx, db, dden = norm.backward(r, g.floor, options)
        for (rows, _), d in zip(chunk.blocks, dW, strict=True):
            _each(Tensor.add_, d, parts(part_of(dden, rows)))
        if dread is not None and dp is not None and n is not None and qn is not None:
            dp.addcmul_(dden, qn)
            for part, dden_part, x in zip(dread, parts(dden), parts(n.transpose(1, 2)), strict=True):
                part.addcmul_(dden_part, x)
    dS = [_each(Tensor.mul_, d, parts(D)) for d, D in zip(dW, g.D, strict=True)]

    # Gradients of the operands. Those of the last token's gates are computed before dk is complete.
    _fill_q(grads.q, dread, us, k, zip(chunk.blocks, dS, strict=True), options)
    if dC is not None and dn is not None:
        _write_backward(grads, given, dC, dn, g.write, options)
        _last_backward(dx, dp, grads.k, given.k, (C, n), (dC, dn), g.keep, chunk)
    _fill_k_and_v(grads, q, dnum, zip(chunk.blocks, W, dS, strict=True), dC is not None, options)
    de = _row_dots(parts(k), parts(grads.k))  # the sums over queries of weights times their gradients
    if C is not None and n is not None and us is not None and g.keep is not None:
        read = (q * us).transpose(1, 2)
        dC = _outer(read, dnum, None if dC is None else dC.mul_(g.keep), options)
        dn = torch.zeros_like(n) if dn is None else dn.mul_(g.keep)
        dn = dn if dden is None else dn.baddbmm_(read, dden)
    return ChunkGrads(de, dx, db, dp if chunk.opens else None, dC, dn)


def _fill_q(
    dq: Tensor, dread: Sequence[Tensor] | None, us: Tensor | None, k: Tensor,
    blocks: Iterable[tuple[tuple[slice, slice], Sequence[Tensor]]], options: Options,
) -> None:
    """Write dq from the gradients dS of the scores and dread of u q / sqrt(DK), by which the state is read."""
    parts = options.parts
    if dread is not None and us is not None:
        for out, d, u in zip(parts(dq), dread, parts(us), strict=True):
            torch.mul(d, u, out=out)
    for (rows, keys), dS in blocks:
        target = parts(part_of(dq, rows))
        multiply(dS, parts(part_of(k, keys)), target, add=dread is not None, alpha=k.shape[2] ** -0.5)


def _write_backward(
    grads: Operands, given: Operands, dC: Tensor, dn: Tensor, write: Tensor, options: Options
) -> None:
    """Write the gradients of k and v through the state after the chunk."""
    parts = options.parts
    multiply(parts(given.v), parts(dC.transpose(1, 2)), parts(grads.k))
    grads.k.add_(dn.transpose(1, 2)).mul_(write)
    multiply(parts(given.k), parts(dC), parts(grads.v))
    grads.v.mul_(write)


def _last_backward(
    dx: Tensor, dp: Tensor | None, dk: Tensor, k: Tensor, state: tuple[Tensor | None, Tensor | None],
    grads: tuple[Tensor, Tensor], keep: Tensor | None, chunk: Chunk,
) -> None:
    """Add to dx and dp of the last token their gradients through the state after the chunk.

    dk: so far only the gradient through that state.
    """
    C, n = state
    kept = None
    if C is not None and n is not None and dp is not None and keep is not None and (chunk.opens or chunk.closes):
        kept = (_dot(C, grads[0]) + _dot(n, grads[1])).mul_(keep.squeeze(2))
        dp[:, chunk.last] += kept
    if chunk.closes:
        written = (k * dk).sum((1, 2)).unsqueeze(1)
        dx[:, chunk.last] -= written if kept is None else written.add_(kept)


def _fill_k_and_v(
    grads: Operands, q: Tensor, dnum: Tensor,
    blocks: Iterable[tuple[tuple[slice, slice], Sequence[Tensor], Sequence[Tensor]]], filled: bool, options: Options,
) -> None:
    """Write dk and dv, or add to them if filled, from W and the gradients of the scores."""
    blocks, parts = list(blocks), options.parts
    for (rows, keys), W, dS in blocks if options.reverse else reversed(blocks):  # The first block contains all keys.
        into = Operands(*(part_of(x, keys) for x in grads))
        multiply([x.mT for x in dS], parts(part_of(q, rows)), parts(into.k), add=filled, alpha=q.shape[2] ** -0.5)
        multiply([x.mT for x in W], parts(part_of(dnum, rows)), parts(into.v), add=filled)
        filled = True


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated queries of all blocks, without a copy if there is one block."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _given_or_zeros(
    dC: Tensor | None, dn: Tensor | None, rows: slice, shape: tuple[int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the last C [N, DK, DV] and n [N, DK, 1]: zeros if one is None, None if both are."""
    N, DK, _ = shape
    some = dC if dC is not None else dn
    if some is None:
        return None, None
    C = some.new_zeros(shape) if dC is None else dC[rows].reshape(shape)
    n = some.new_zeros(N, DK, 1) if dn is None else dn[rows].reshape(N, DK, 1)
    return C, n


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a * b over the last two axes: [N, P, Q], [N, P, Q] -> [N, 1]."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1)).unsqueeze(1)


@custom_op("seqblocks::mlstm_backward")
def _mlstm_backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, i, f and the initial C, n, m, from those of h and the last C, n, m."""
    return _backward(
        dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
    )


def _backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `_mlstm_backward` with what the forward pass saved, if given."""
    B, S, H, DK = q.shape
    DV = v.shape[-1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # contiguous, like the results of the fake op
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
        plan = make_plan(q, v, chunk_size, reverse) if kept is None else kept.plan
        enters = C0 is not None or len(plan.chunks) > 1
        kept = kept or Kept(plan, *prepare(i, f, m0, resets, plan, reverse, input_gate, enters), [], [])
        dC_out, dn_out = (None if x is None else x.clone() for x in (dC_out, dn_out))
        _rescale(kept.m, dC_out, dn_out)
        options = Options(reverse, eps, input_gate == "exp", normalize, plan.singly)
        de, dx = f.new_empty(B, H, S), f.new_empty(B, H, S)
        vectors = GateGrads(
            de, dx, torch.empty_like(dx) if options.exponential else None, torch.zeros_like(dx) if enters else None
        )
        for group in reversed(plan.groups):
            rows = slice(*group)
            C = None if C0 is None else C0[rows].flatten(0, 1)
            n = None if n0 is None else n0[rows].reshape(-1, DK, 1)
            dC, dn = _given_or_zeros(dC_out, dn_out, rows, ((group[1] - group[0]) * H, DK, DV))
            dC, dn = _group_backward(
                vectors, Operands(dq, dk, dv), dh, dC, dn, Operands(q, k, v), C, n, kept, group, options
            )
            if C0 is not None and dC is not None and dn is not None:
                dC0[rows], dn0[rows] = dC.view(-1, H, DK, DV), dn.view(-1, H, DK)
        if C0 is None:
            dC0.zero_()
            dn0.zero_()
        di, df, dm0 = prepare_backward(
            i, f, kept.scan, *vectors, dm_out, plan.summed, reverse, input_gate, m0 is not None
        )
    results = dq, dk, dv, di.contiguous(), df.to(f.dtype).contiguous(), dC0, dn0, dm0.contiguous()
    if undefined is not None:
        nonfinite.fill(results, *undefined)
    return results


class GateGrads(NamedTuple):
    """Gradients of e, x, b and p [B, H, S], in memory order. None: zeros."""

    e: Tensor
    x: Tensor
    b: Tensor | None
    p: Tensor | None


def _group_backward(
    vectors: GateGrads, grads: Operands, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None,
    given: Operands, C: Tensor | None, n: Tensor | None, kept: Kept, group: tuple[int, int],
    options: Options,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of a group of sequences, from the last chunk to the first.

    Returns those of the initial state. Saved W and D are freed chunk by chunk.
    """
    plan, dtype = kept.plan, kept.gates.floor.dtype
    parts = [cut(x, group, plan) for x in given]
    gates = [*chunk_gates(kept.gates, group, plan, _kept_decays(kept, group), given.q.shape[3])]
    states = [(C, n)]
    for g, k, v in zip(gates[:-1], *parts[1:], strict=False):
        states.append(_advance(*states[-1], rows_of(k, dtype, plan), rows_of(v, dtype, plan), g, options))
    dhs = repeat(None, len(gates)) if dh is None else reversed(cut(dh, group, plan))
    outs = [reversed(cut(x, group, plan)) for x in grads]
    columns = [repeat(None, len(gates)) if x is None else reversed(cut_gate(x, group, plan)) for x in vectors]
    for chunk, dhc, *each in zip(reversed(plan.chunks), dhs, *outs, *columns, strict=True):
        g, (C, n) = gates.pop(), states.pop()
        operands = Operands(*(rows_of(part.pop(), dtype, plan) for part in parts))
        dh_rows = torch.zeros_like(operands.v) if dhc is None else rows_of(dhc, dtype, plan)
        W = _kept_or_new_weights(kept, operands, g.D, chunk, options)
        filled = Operands(*(rows_to_fill(y, dtype, plan) for y in each[:3]))
        of_gates = _chunk_backward(filled, dh_rows, dC, dn, operands, C, n, g, W, chunk, options)
        dC, dn = of_gates.C, of_gates.n
        for out, rows in zip(each[:3], filled, strict=True):
            put(out, rows, plan)
        for column, gradient in zip(each[3:], of_gates[:4], strict=True):
            if column is not None and gradient is not None:
                column.copy_(gradient)
    return dC, dn


def _kept_decays(kept: Kept, group: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Yield D of each chunk: saved ones, which are removed from kept, or new ones."""
    if not kept.D:
        yield from decays(kept.gates, group, kept.plan)
        return
    counts = [len(chunk.blocks) for chunk in kept.plan.chunks]
    D = kept.D[-sum(counts) :]
    del kept.D[-sum(counts) :]
    at = 0
    for count in counts:
        yield D[at : at + count]
        at += count


def _kept_or_new_weights(
    kept: Kept, x: Operands, D: Sequence[Tensor], chunk: Chunk, options: Options
) -> list[Sequence[Tensor]]:
    """Return the parts of W of each block of a chunk: the last saved ones, which are removed from kept, or new ones."""
    if not kept.W:
        blocks = zip(chunk.blocks, D, strict=True)
        return [_weights(part_of(x.q, rows), part_of(x.k, keys), d, options) for (rows, keys), d in blocks]
    parts = len(options.parts(D[0]))
    W = kept.W[-len(D) * parts :]
    del kept.W[-len(D) * parts :]
    return [W[at : at + parts] for at in range(0, len(W), parts)]


@_mlstm_backward.register_fake
def _mlstm_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, reverse, chunk_size, eps, input_gate, normalize
):
    return *(x.new_empty(x.shape) for x in (q, k, v, i, f)), *_empty_state(q, v, f, True)


def _save(ctx, inputs, output, kept=None):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # Unused outputs then cost nothing.
    ctx.save_for_backward(*inputs[:9], *(() if kept is None else kept.tensors()))
    ctx.plan = None if kept is None else kept.plan
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
    tensors = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
    saved, kept = tensors[:9], tensors[9:]
    arguments: list[Any] = [dh, dC, dn, dm, *saved, *ctx.options]
    if kept and not torch.is_grad_enabled() and not is_seen((dh, dC, dn, dm)):
        grads = _backward(*[*arguments, Kept.of(ctx.plan, kept)])
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
    """Run the scan chunk by chunk. Arguments as for `mlstm`, checked; i, f and state have the dtype of the state."""
    if q.shape[1] == 1 and not torch.compiler.is_compiling():  # For one token, the reference takes a third of the time.
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
