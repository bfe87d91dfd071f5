"""Chunks of the chunkwise mLSTM: views of the operands, and their gates. For symbols see torch.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.mlstm.gates import BLOCK_QUERIES, Chunk, Gates, Plan, exp2_

PART_PAIRS = 1 << 17  # weights of pairs of tokens that are computed in the same operations


def cut(x: Tensor, group: tuple[int, int], plan: Plan) -> list[Tensor]:
    """Cut a group of sequences into chunks, in the order of the scan: [B, S, H, D] to views [G, H, L, D]."""
    return plan.cut(_of_group(x, group).transpose(1, 2), 2)


def cut_gate(x: Tensor, group: tuple[int, int], plan: Plan) -> list[Tensor]:
    """Cut the gates of a group of sequences likewise: [B, H, S] to views [N, L, 1]."""
    return plan.cut(_of_group(x, group).flatten(0, 1).unsqueeze(2), 1)


def _of_group(x: Tensor, group: tuple[int, int]) -> Tensor:
    first, end = group
    return x if end - first == x.shape[0] else x[first:end]


def rows_of(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [G, H, L, D] as [N, L, D] in this dtype, without a copy if G is 1 and the dtype matches."""
    return part.flatten(0, 1).to(dtype)


def _fills_in_place(part: Tensor, dtype: torch.dtype) -> bool:
    """Return whether products are written directly into `part`.

    Not with one block of queries, because torch multiplies one head at a time if the result is not contiguous.
    """
    return part.shape[0] == 1 and part.dtype == dtype and part.shape[2] > BLOCK_QUERIES


def rows_to_fill(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor [N, L, D] to fill: a view of `part` [G, H, L, D], or new memory."""
    if _fills_in_place(part, dtype):
        return part[0]
    return part.new_empty(part.shape[0] * part.shape[1], *part.shape[2:], dtype=dtype)


def put(part: Tensor, rows: Tensor) -> None:
    """Copy `rows`, which `rows_to_fill` returned for `part`, into it unless they share its memory."""
    if not _fills_in_place(part, rows.dtype):
        part.copy_(rows.view(part.shape))


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False, alpha: float = 1.0) -> Tensor:
    """Return alpha a b [N, R, C] for a [N, R, I], b [N, I, C], written to `out` if given, or added to it with `add`."""
    if out is None and alpha == 1.0:
        return torch.bmm(a, b)
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    # With several threads, torch writes to other memory one matrix at a time, which takes up to twice as long.
    if out.is_contiguous() or torch.get_num_threads() == 1:
        return out.baddbmm_(a, b, beta=int(add), alpha=alpha)
    y = torch.bmm(a, b)
    return out.add_(y, alpha=alpha) if add else torch.mul(y, alpha, out=out)


def part_of(x: Tensor, span: slice) -> Tensor:
    """Return x[:, span] of x [N, L, D]."""
    return x if span.stop - span.start == x.shape[1] else x[:, span]


class ChunkGates(NamedTuple):
    """The gates of one chunk of one group, N = G * H rows."""

    D: Sequence[Tensor]  # [N, queries, keys] of each block
    us: Tensor | None  # [N, L, 1]: u / sqrt(DK); None if no chunk reads a state
    floor: Tensor  # [N, L, 1]
    last: int  # index of the chunk's last token, and of the block that contains it
    keep: Tensor | None  # [N, 1, 1]: u of the chunk's last token

    @property
    def write(self) -> Tensor:
        """Return D of the chunk's last token [N, L, 1], by which tokens enter the state."""
        return self.D[self.last][:, self.last].unsqueeze(2)


def chunk_gates(
    gates: Gates, group: tuple[int, int], plan: Plan, decays: Iterable[Sequence[Tensor]], DK: int
) -> Iterator[ChunkGates]:
    """Yield the gates of each chunk of a group. decays: D of each chunk."""
    last = 0 if plan.reverse else -1
    us: Iterable[Tensor | None] = repeat(None)
    keeps: Iterable[Tensor | None] = repeat(None)
    if gates.u is not None:
        us = cut_gate(gates.u * DK**-0.5, group, plan)
        keeps = (u[:, last].unsqueeze(1) for u in cut_gate(gates.u, group, plan))
    for D, u, keep, floor in zip(decays, us, keeps, cut_gate(gates.floor, group, plan), strict=False):
        yield ChunkGates(D, u, floor, last, keep)


def decays(gates: Gates, group: tuple[int, int], plan: Plan) -> Iterator[list[Tensor]]:
    """Yield D of each chunk as a list of blocks [N, queries, keys]. Short chunks are computed several at a time."""
    N = (group[1] - group[0]) * gates.e.shape[1]
    reverse = plan.reverse
    for few in _runs(plan.chunks, PART_PAIRS // N):
        e, x, segment = (None if g is None else _of_chunks(g, group, few) for g in (gates.e, gates.x, gates.segment))
        assert e is not None
        assert x is not None
        blocks = [_decay(e, x, segment, rows, keys, reverse, gates.floor.dtype) for rows, keys in few[0].blocks]
        for at in range(len(few))[:: -1 if reverse else 1]:
            yield [D[:, at] for D in blocks]


def _of_chunks(gate: Tensor, group: tuple[int, int], chunks: Sequence[Chunk]) -> Tensor:
    """Return T adjacent chunks of equal length of a group: [B, H, S] to a view [G, H, T, L] in memory order."""
    first, end = min(chunks[0].first, chunks[-1].first), max(chunks[0].end, chunks[-1].end)
    part = _of_group(gate, group)
    part = part if end - first == part.shape[2] else part[:, :, first:end]
    return part.view(*part.shape[:2], len(chunks), -1)


def _runs(chunks: Sequence[Chunk], pairs: int) -> Iterator[Sequence[Chunk]]:
    """Yield runs of adjacent chunks of equal length, with at most this many pairs of tokens, or one chunk."""
    lengths = [chunk.end - chunk.first for chunk in chunks]
    even = len(chunks) if lengths[-1] == lengths[0] else len(chunks) - 1  # Only the last chunk may be shorter.
    together = max(1, pairs // lengths[0] ** 2)
    yield from (chunks[at : min(at + together, even)] for at in range(0, even, together))
    if even < len(chunks):
        yield chunks[even:]


def _decay(
    e: Tensor, x: Tensor, segment: Tensor | None, rows: slice, keys: slice, reverse: bool, dtype: torch.dtype
) -> Tensor:
    """Return D [N, T, queries, keys] of T chunks from e, x [G, H, T, L]."""
    weights = exp2_((e[..., None, keys] - x[..., rows, None]).to(dtype))
    # The other triangle may be infinite, so it is set to zero rather than multiplied by zero.
    weights = weights.triu_() if reverse else weights.tril_(rows.start)
    if segment is not None:
        weights.masked_fill_(segment[..., None, keys] != segment[..., rows, None], 0.0)
    return weights.flatten(0, 1)
