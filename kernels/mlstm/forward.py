"""The forward pass of the chunkwise mLSTM. For symbols see torch.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.mlstm.chunks import ChunkGates, chunk_gates, cut, decays, multiply, part_of, rows_of
from seqblocks.kernels.mlstm.gates import Chunk, Gates, Plan, Scan, make_plan, prepare
from seqblocks.kernels.numerics import without_autocast
from seqblocks.kernels.resets import along, nonfinite


class Options(NamedTuple):
    """Options of a pass, as for `mlstm`."""

    reverse: bool
    eps: float
    exponential: bool
    normalize: bool


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums over each row of a * b: [N, P, 1]."""
    return (a * b).sum(-1, keepdim=True)


def advance(
    C: Tensor | None, n: Tensor | None, k: Tensor, v: Tensor, g: ChunkGates, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the state after a chunk from that before it (None: zeros). in_place: overwrite C and n."""
    written = (k * g.write).transpose(1, 2)
    if C is None or n is None:
        return torch.bmm(written, v), written.sum(2, keepdim=True)
    assert g.keep is not None
    C, n = (C.mul_(g.keep), n.mul_(g.keep)) if in_place else (C * g.keep, n * g.keep)
    return multiply(written, v, C, add=True), n.add_(written.sum(2, keepdim=True))


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
    den: list[Tensor]  # of each chunk, [N, L, 1]; empty if D is, or without normalisation
    W: list[Tensor]  # of each block

    def tensors(self) -> list[Tensor | None]:
        return [*self.gates, *self.scan, self.m, *self.D, *self.den, *self.W]

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.D), len(self.den)

    @classmethod
    def of(cls, plan: Plan, counts: tuple[int, int], tensors: Sequence[Any]) -> Kept:
        rest = iter(tensors)
        gates, scan, m = Gates(*islice(rest, len(Gates._fields))), Scan(*islice(rest, len(Scan._fields))), next(rest)
        D, den = (list(islice(rest, count)) for count in counts)
        return cls(plan, gates, scan, m, D, den, list(rest))


def forward(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, chunk_size: int, eps: float, input_gate: str, normalize: bool, return_state: bool, save: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Kept | None]:
    """Return h and the last C, n, m, which are empty tensors unless return_state.

    With `save`, also return what the backward pass needs.
    """
    B, S, H, DK = q.shape
    DV = v.shape[-1]
    h = v.new_empty(B, S, H, DV)
    C_out, n_out, m_out = empty_state(q, v, f, return_state)
    if h.numel() == 0 or S == 0:
        for out, given in ((C_out, C0), (n_out, n0), (m_out, m0)):
            out.zero_() if given is None or not return_state else out.copy_(given)
        return (h, C_out, n_out, m_out), None
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    with without_autocast(q.device.type):
        kept = begin(q, v, i, f, C0, m0, resets, chunk_size, reverse, input_gate)
        options = Options(reverse, eps, input_gate == "exp", normalize)
        weights = kept if save and kept.plan.pairs <= S * DV else None  # if W is at most as large as an input
        for group in kept.plan.groups:
            state = state_of(C0, n0, group)
            C, n = _group_forward(h, q, k, v, *state, kept.gates, kept.plan, group, weights, options, return_state)
            if return_state and C is not None and n is not None:
                C_out[slice(*group)] = C.view(-1, H, DK, DV)
                n_out[slice(*group)] = n.view(-1, H, DK)
        if return_state:
            m_out.copy_(kept.m)
            rescale(kept.m, C_out, n_out)
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return (h, C_out, n_out, m_out), kept if save else None


def begin(
    q: Tensor, v: Tensor, i: Tensor, f: Tensor, C0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    chunk_size: int, reverse: bool, input_gate: str,
) -> Kept:
    """Divide a pass into chunks and compute the gates. Nothing is saved yet."""
    plan = make_plan(q, v, chunk_size, reverse)
    enters = C0 is not None or len(plan.chunks) > 1
    return Kept(plan, *prepare(i, f, m0, resets, plan, reverse, input_gate, enters), [], [], [])


def state_of(C: Tensor | None, n: Tensor | None, group: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Return C [N, DK, DV] and n [N, DK, 1] of a group of sequences; None if there is no state."""
    if C is None or n is None:
        return None, None
    rows = slice(*group)
    return C[rows].flatten(0, 1), n[rows].reshape(-1, n.shape[2], 1)


def _group_forward(
    h: Tensor, q: Tensor, k: Tensor, v: Tensor, C: Tensor | None, n: Tensor | None, gates: Gates, plan: Plan,
    group: tuple[int, int], weights: Kept | None, options: Options, return_state: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write h of a group of sequences, and return the last state, which is valid only with return_state.

    weights: collects D, W and den, if given.
    """
    dtype = gates.floor.dtype
    parts = (cut(x, group, plan) for x in (q, k, v, h))
    all_gates = chunk_gates(gates, group, plan, decays(gates, group, plan), q.shape[3])
    for *each, out, g, chunk in zip(*parts, all_gates, plan.chunks, strict=True):
        given = Operands(*(rows_of(part, dtype) for part in each))
        W, den = _chunk_forward(out, given, C, n, g, chunk, options)
        if weights is not None:
            weights.D.extend(g.D)
            weights.W.extend(W)
            if den is not None:
                weights.den.append(den)
        if return_state or chunk is not plan.chunks[-1]:
            C, n = advance(C, n, given.k, given.v, g, in_place=chunk is not plan.chunks[0])
    return C, n


def weights_of(chunk: Chunk, q: Tensor, k: Tensor, D: Sequence[Tensor]) -> list[Tensor]:
    """Return W = (q k^T / sqrt(DK)) * D of each block [N, queries, keys]."""
    scale = q.shape[2] ** -0.5
    return [
        multiply(part_of(q, rows), part_of(k, keys).transpose(1, 2), alpha=scale).mul_(d)
        for (rows, keys), d in zip(chunk.blocks, D, strict=True)
    ]


def read_normaliser(q: Tensor, n: Tensor | None, us: Tensor | None) -> Tensor | None:
    """Return the part of den [N, L, 1] that is read from the state before the chunk."""
    return None if n is None or us is None else torch.bmm(q, n).mul_(us)


def denominator(W: Sequence[Tensor], qn: Tensor | None) -> Tensor:
    """Return den [N, L, 1] of a chunk. qn: the part of it that is read from the state before."""
    den = side_by_side([block.sum(-1, keepdim=True) for block in W])
    return den if qn is None else den.add_(qn)


def _chunk_forward(
    out: Tensor, given: Operands, C: Tensor | None, n: Tensor | None, g: ChunkGates, chunk: Chunk, options: Options
) -> tuple[list[Tensor], Tensor | None]:
    """Write h of a chunk to `out` [G, H, L, DV]; C, n: the state before it (None: zero).

    Returns W of its blocks, and den (None: not normalised).
    """
    weights = weights_of(chunk, given.q, given.k, g.D)
    den = denominator(weights, read_normaliser(given.q, n, g.us)) if options.normalize else None
    size = None if den is None else torch.maximum(den.abs(), g.floor).add_(options.eps)
    for (rows, keys), W in zip(chunk.blocks, weights, strict=True):
        values = part_of(given.v, keys)
        if C is None or g.us is None:
            num = torch.bmm(W, values)
        else:
            num = torch.bmm(part_of(given.q, rows), C).mul_(part_of(g.us, rows)).baddbmm_(W, values)
        target = out if rows.stop - rows.start == out.shape[2] else out[:, :, rows]
        _put_quotient(target, num, None if size is None else part_of(size, rows))
    return weights, den


def _put_quotient(out: Tensor, num: Tensor, size: Tensor | None) -> None:
    """Write num / size (None: num), for num [N, R, DV], size [N, R, 1], out [G, H, R, DV]."""
    if size is None:
        out.copy_(num.view(out.shape))
    else:
        torch.div(num.view(out.shape), size.view(*out.shape[:-1], 1), out=out)


def rescale(m: Tensor, *parts: Tensor | None) -> None:
    """Rescale C and n in place, from the float64 stabiliser m to m rounded to their dtype, as the state stores it."""
    for x in parts:
        if x is not None and x.dtype != m.dtype:
            x.mul_(along(torch.exp(m - m.to(x.dtype)).to(x.dtype), x))


def empty_state(q: Tensor, v: Tensor, f: Tensor, exists: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the state C, n, m. Without a state, all three are empty tensors."""
    B, _, H, DK = q.shape
    if not exists:
        return f.new_empty(0), f.new_empty(0), f.new_empty(0)
    return f.new_empty(B, H, DK, v.shape[-1]), f.new_empty(B, H, DK), f.new_empty(B, H)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenated queries of all blocks, without a copy if there is one block."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
