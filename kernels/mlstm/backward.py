"""The backward pass of the chunkwise mLSTM. For symbols see torch.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.mlstm.chunks import (
    ChunkGates,
    chunk_gates,
    cut,
    decays,
    multiply,
    part_of,
    put,
    rows_of,
    rows_to_fill,
)  # fmt: skip
from seqblocks.kernels.mlstm.forward import (
    Kept,
    Operands,
    Options,
    advance,
    begin,
    denominator,
    empty_state,
    read_normaliser,
    rescale,
    row_dots,
    side_by_side,
    state_of,
    weights_of,
)  # fmt: skip
from seqblocks.kernels.mlstm.gates import Chunk, prepare_backward
from seqblocks.kernels.numerics import without_autocast
from seqblocks.kernels.resets import nonfinite


def backward(
    dh: Tensor | None, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, kept: Kept | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, i, f and the initial C, n, m, from those of h and the last C, n, m.

    Without an initial state, its gradients are empty tensors. kept: what the forward pass saved, if given.
    """
    grads = Operands(*(x.new_empty(x.shape) for x in (q, k, v)))  # contiguous, like the results of the fake op
    of_state = empty_state(q, v, f, C0 is not None)
    if v.numel() == 0 or q.shape[1] == 0:
        for given, out in zip((dC_out, dn_out, dm_out), of_state, strict=True):
            out.zero_() if given is None or C0 is None else out.copy_(given)
        return *grads, torch.zeros_like(i), torch.zeros_like(f), *of_state
    undefined = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0, dh, dC_out, dn_out, dm_out):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        undefined = found.without_gradient(dh, dC_out, dn_out, dm_out)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
        dh, dC_out, dn_out, dm_out = found.clean_outputs(dh, dC_out, dn_out, dm_out)
    with without_autocast(q.device.type):
        kept = kept or begin(q, v, i, f, C0, m0, resets, chunk_size, reverse, input_gate)
        dC, dn = (None if x is None else x.clone() for x in (dC_out, dn_out))
        rescale(kept.m, dC, dn)
        options = Options(reverse, eps, input_gate == "exp", normalize)
        of_gates = _operands_backward(grads, of_state[:2], dh, dC, dn, Operands(q, k, v), C0, n0, kept, options)
        di, df, dm = prepare_backward(
            i, f, kept.scan, *of_gates, dm_out, kept.plan.summed, reverse, input_gate, m0 is not None
        )
    dC0, dn0, dm0 = of_state
    dm0 = dm0 if m0 is None or dm is None else dm.contiguous()
    results = *grads, di.contiguous(), df.to(f.dtype).contiguous(), dC0, dn0, dm0
    if undefined is not None:
        nonfinite.fill(results, *undefined)
    return results


def _operands_backward(
    grads: Operands, of_state: tuple[Tensor, Tensor], dh: Tensor | None, dC: Tensor | None, dn: Tensor | None,
    given: Operands, C: Tensor | None, n: Tensor | None, kept: Kept, options: Options,
) -> GateGrads:
    """Write the gradients of q, k, v and the initial C and n; return those of the gates [B, H, S].

    dh, dC, dn: gradients of h and of the last state (None: zeros).
    """
    B, S, H, DK = given.q.shape
    of_groups = []
    for group in reversed(kept.plan.groups):
        rows = slice(*group)
        last = _given_or_zeros(dC, dn, rows, ((group[1] - group[0]) * H, DK, given.v.shape[3]))
        state = state_of(C, n, group)
        of_gates, *first = _group_backward(grads, dh, *last, given, *state, kept, group, options)
        of_groups.append(of_gates)
        for out, x in zip(of_state, first, strict=True):
            if C is not None and x is not None:
                out[rows] = x.view(-1, *out.shape[1:])
    joined = (_join(x, 0, True) for x in zip(*of_groups, strict=True))
    return GateGrads(*(None if x is None else x.view(B, H, S) for x in joined))


class GateGrads(NamedTuple):
    """Gradients of e, x, b and p, in memory order: [N, L, 1] of a chunk, [N, S, 1] of a group. None: zeros."""

    e: Any
    x: Any
    b: Any
    p: Any


def _join(parts: Sequence[Tensor | None], axis: int, backwards: bool) -> Tensor | None:
    """Concatenate gradients. backwards: they are in the opposite order. None if the first is None."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat([x for x in (reversed(parts) if backwards else parts) if x is not None], axis)


def _group_backward(
    grads: Operands, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None,
    given: Operands, C: Tensor | None, n: Tensor | None, kept: Kept, group: tuple[int, int],
    options: Options,
) -> tuple[GateGrads, Tensor | None, Tensor | None]:
    """Write the gradients of q, k and v of a group of sequences, from the last chunk to the first.

    Returns those of the gates and of the initial state. What the forward pass saved is freed chunk by chunk.
    """
    plan, dtype = kept.plan, kept.gates.floor.dtype
    parts = [cut(x, group, plan) for x in given]
    gates = [*chunk_gates(kept.gates, group, plan, _kept_decays(kept, group), given.q.shape[3])]
    states = [(C, n)]
    for g, k, v in zip(gates[:-1], *parts[1:], strict=False):
        states.append(advance(*states[-1], rows_of(k, dtype), rows_of(v, dtype), g))
    dhs = repeat(None, len(gates)) if dh is None else reversed(cut(dh, group, plan))
    outs = [reversed(cut(x, group, plan)) for x in grads]
    of_chunks = []
    for chunk, dhc, *targets in zip(reversed(plan.chunks), dhs, *outs, strict=True):
        g, (C, n) = gates.pop(), states.pop()
        operands = Operands(*(rows_of(part.pop(), dtype) for part in parts))
        dh_rows = torch.zeros_like(operands.v) if dhc is None else _unexpanded(rows_of(dhc, dtype))
        W, den = _kept_or_new_weights(kept, operands, g.D, chunk)
        filled = Operands(*(rows_to_fill(y, dtype) for y in targets))
        of_gates, dC, dn = _chunk_backward(filled, dh_rows, dC, dn, operands, C, n, g, W, den, chunk, options)
        of_chunks.append(of_gates)
        for out, rows in zip(targets, filled, strict=True):
            put(out, rows)
    return GateGrads(*(_join(x, 1, not options.reverse) for x in zip(*of_chunks, strict=True))), dC, dn


def _unexpanded(x: Tensor) -> Tensor:
    """Return x, copied if it repeats one number, as the gradient of a sum does: torch multiplies that slowly."""
    return x if x.stride(-1) else x.contiguous()


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
    kept: Kept, x: Operands, D: Sequence[Tensor], chunk: Chunk
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return W of each block of a chunk, and den.

    They are the last saved ones, which are removed from kept, or W is computed again and den is None.
    """
    if not kept.W:
        return weights_of(chunk, x.q, x.k, D), None
    W = kept.W[-len(D) :]
    del kept.W[-len(D) :]
    return W, kept.den.pop() if kept.den else None


class Normaliser(NamedTuple):
    """den of a chunk, whether |den| is at least the floor, and the factor of num: [N, L, 1]."""

    den: Tensor
    wins: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, den: Tensor, floor: Tensor, eps: float) -> Normaliser:
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
    given: Operands, C: Tensor | None, n: Tensor | None, g: ChunkGates, W: Sequence[Tensor],
    den: Tensor | None, chunk: Chunk, options: Options,
) -> tuple[GateGrads, Tensor | None, Tensor | None]:
    """Write the gradients of q, k and v of a chunk, and return those of the gates and of the state before it.

    dh, dC, dn: gradients of h and of the state after the chunk (None: zeros); dC and dn may be overwritten.
    C, n: the state before the chunk (None: zeros). den: from the forward pass, if saved.
    """
    q, k, v = given
    qn = read_normaliser(q, n, g.us)
    norm = None
    if options.normalize:
        norm = Normaliser.of(denominator(W, qn) if den is None else den, g.floor, options.eps)
    dnum = dh if norm is None else dh * norm.inverse
    through = _num_backward(dnum, q, v, C, g.us, W, chunk)
    dp = through.dp
    if norm is None:
        dx, db, dden = -through.r, None, None
    else:
        dx, db, dden = norm.backward(through.r, g.floor, options)
        _den_backward(dden, qn, n, through, chunk)
    dS = [d.mul_(D) for d, D in zip(through.dW, g.D, strict=True)]

    # Gradients of the operands. Those of the last token's gates are computed before dk is complete.
    _fill_q(grads.q, through.dread, g.us, k, zip(chunk.blocks, dS, strict=True))
    if dC is not None and dn is not None:
        _write_backward(grads, given, dC, dn, g.write)
        _last_backward(dx, dp, grads.k, given.k, (C, n), (dC, dn), g.keep, chunk)
    _fill_k_and_v(grads, q, dnum, zip(chunk.blocks, W, dS, strict=True), dC is not None, options)
    de = row_dots(k, grads.k)  # the sums over queries of weights times their gradients
    if C is not None and n is not None:
        dC, dn = _state_backward(q, dnum, dden, n, dC, dn, g)
    if g.us is not None and (dp is None or not chunk.opens):
        dp = torch.zeros_like(dx)
    return GateGrads(de, dx, db, dp), dC, dn


class _Through(NamedTuple):
    """Gradients through num: of W, in blocks; of what is read from the state; of p; and r = dh . num.

    dread, dp: None if the chunk reads no state.
    """

    dW: list[Tensor]
    dread: Tensor | None
    dp: Tensor | None
    r: Tensor


def _num_backward(
    dnum: Tensor, q: Tensor, v: Tensor, C: Tensor | None, us: Tensor | None, W: Sequence[Tensor],
    chunk: Chunk,
) -> _Through:
    """Return the gradients through num, whose gradient is dnum."""
    dW = [torch.bmm(part_of(dnum, rows), part_of(v, keys).transpose(1, 2)) for rows, keys in chunk.blocks]
    r = side_by_side([row_dots(w, d) for w, d in zip(W, dW, strict=True)])
    if C is None or us is None:
        return _Through(dW, None, None, r)
    dread = torch.bmm(dnum, C.transpose(1, 2))
    dp = row_dots(q, dread).mul_(us)
    r += dp
    return _Through(dW, dread, dp, r)


def _den_backward(
    dden: Tensor, qn: Tensor | None, n: Tensor | None, through: _Through, chunk: Chunk
) -> None:
    """Add the gradients through den to those through num."""
    for (rows, _), d in zip(chunk.blocks, through.dW, strict=True):
        d.add_(part_of(dden, rows))
    if through.dread is not None and through.dp is not None and n is not None and qn is not None:
        through.dp.addcmul_(dden, qn)
        through.dread.addcmul_(dden, n.transpose(1, 2))


def _state_backward(
    q: Tensor, dnum: Tensor, dden: Tensor | None, n: Tensor, dC: Tensor | None, dn: Tensor | None, g: ChunkGates,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the state before a chunk from those of the state after it, which may be overwritten."""
    if g.us is None or g.keep is None:
        return dC, dn
    read = (q * g.us).transpose(1, 2)
    dC = torch.bmm(read, dnum) if dC is None else multiply(read, dnum, dC.mul_(g.keep), add=True)
    dn = torch.zeros_like(n) if dn is None else dn.mul_(g.keep)
    return dC, dn if dden is None else dn.baddbmm_(read, dden)


def _fill_q(
    dq: Tensor, dread: Tensor | None, us: Tensor | None, k: Tensor,
    blocks: Iterable[tuple[tuple[slice, slice], Tensor]],
) -> None:
    """Write dq from the gradients dS of the scores and dread of u q / sqrt(DK), by which the state is read."""
    if dread is not None and us is not None:
        torch.mul(dread, us, out=dq)
    for (rows, keys), dS in blocks:
        multiply(dS, part_of(k, keys), part_of(dq, rows), add=dread is not None, alpha=k.shape[2] ** -0.5)


def _write_backward(
    grads: Operands, given: Operands, dC: Tensor, dn: Tensor, write: Tensor
) -> None:
    """Write the gradients of k and v through the state after the chunk."""
    multiply(given.v, dC.transpose(1, 2), grads.k)
    grads.k.add_(dn.transpose(1, 2)).mul_(write)
    multiply(given.k, dC, grads.v)
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
    blocks: Iterable[tuple[tuple[slice, slice], Tensor, Tensor]], filled: bool, options: Options,
) -> None:
    """Write dk and dv, or add to them if filled, from W and the gradients of the scores."""
    blocks = list(blocks)
    for (rows, keys), W, dS in blocks if options.reverse else reversed(blocks):  # The first block contains all keys.
        multiply(dS.mT, part_of(q, rows), part_of(grads.k, keys), add=filled, alpha=q.shape[2] ** -0.5)
        multiply(W.mT, part_of(dnum, rows), part_of(grads.v, keys), add=filled)
        filled = True


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
