"""Linear attention chunk by chunk.

Let S be the state before a chunk and G the running sum of log decays from its start. Token t then reads the value
written at s with the weight E_ts = exp(G_t - G_s). A rule writes keys with given values, or with values X that depend
on S:

    add      k with v
    delta    k with X      (I + L) X = beta (v - (k e^G) S)         L_ts = beta_t (k_t E_ts k_s), s < t
    dplr     k with v, and b with X      (I - M) X = (a e^(G-g)) S + N v
                                         M, N_ts = a_t E_ts e^(-g_t) b_s, k_s, s < t

In both, rows c (-k, or a) correct the state: X = T c S + T u, where u does not depend on the state and T, the inverse
of the system, is computed for all chunks at once. Only the state is carried from chunk to chunk. The backward pass
recomputes the chunks and differentiates them with autograd.

The weights E are products of the factors e^g, so that neither a strong decay nor later weights lose digits. A decay per
key does not factor out of a product q . k, except between the two halves of a chunk: there it factors into the weights
up to the start of the second half and the weights from there. Chunks are therefore halved, down to blocks in which the
inverses of weights are in range.

On a CPU, a few hundred tokens of a few heads are computed at a time: tensors of that size fit into its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import recording, unknown
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.linear_attention import reference, separate
from seqblocks.kernels.linear_attention.decays import Decays, Operand, of_quarters
from seqblocks.kernels.linear_attention.reference import KINDS
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, contained

SYSTEM_TOKENS = 16  # size of the systems that are solved by substitution
PART_TOKENS = 512  # tokens computed at a time on a CPU
PART_ELEMENTS = 1 << 17  # elements of the largest input that are computed at a time on a CPU
Maybe = Tensor | None  # an input that some rules do not have


class Masks(NamedTuple):
    """Masks that are true where no reset lies between two tokens of a chunk.

    pairs [N, B, 1, 1, L, L]: two tokens; from_start, to_end: a token and the start or end; through: start and end.
    """

    pairs: Tensor
    from_start: Tensor
    to_end: Tensor
    through: Tensor


def _masks(resets: Tensor) -> Masks:
    """Return the masks for resets [N, B, L]."""
    segment = resets.long().cumsum(-1)[:, :, None, None]
    last = segment[..., -1:]
    return Masks(segment.unsqueeze(-1) == segment.unsqueeze(-2), segment == 0, segment == last, last == 0)


def _seen(pairs: Tensor, masks: Masks | None, itself: bool, tracked: bool) -> Tensor:
    """Zero all pairs [..., L, L] except a token with earlier ones of its sequence, and with itself if `itself`."""
    diagonal = 0 if itself else -1
    if masks is None:
        return pairs.tril(diagonal) if tracked else pairs.tril_(diagonal)
    return torch.where(masks.pairs.tril(diagonal), pairs, 0.0)


def _chunk_length(chunk_size: int, tokens: int) -> int:
    """Return the largest power of 2 that is at most chunk_size and adds no avoidable padding."""
    return min(1 << (chunk_size.bit_length() - 1), 1 << (tokens - 1).bit_length())


def _chunks(x: Tensor, heads: int, L: int) -> Tensor:
    """Reshape [B, S, heads * groups, ...] to [N, B, heads, groups, L, ...], padded with zeros at the end."""
    B, S = x.shape[:2]
    N = -(-S // L)
    if S < N * L:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, N * L - S))
    x = x.reshape(B, N, L, heads, x.shape[2] // heads, *x.shape[3:]).movedim((1, 0, 3, 4, 2), (0, 1, 2, 3, 4))
    return x.contiguous()  # otherwise each product would make a copy


def _each(function: Callable[[Tensor], Tensor], *tensors: Maybe) -> list[Any]:
    return [None if x is None else function(x) for x in tensors]


def _chunked(
    tensors: tuple[Any, ...], resets: Maybe, reverse: bool, scale: float, chunk_size: int, tracked: bool
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, HV, V] and the last state, for inputs as in `reference.run`. tracked: autograd records it."""
    *sequences, bonus, state = tensors
    if reverse:
        *sequences, resets = _each(lambda x: x.flip(1), *sequences, resets)
    H, S = sequences[0].shape[2], sequences[0].shape[1]
    L = _chunk_length(chunk_size, S)
    q, k, v, decay, beta, a, b = _each(lambda x: _chunks(x, H, L), *sequences)
    masks = None
    if resets is not None:
        state = state.masked_fill(along(resets[:, 0], state), 0.0)  # a product with 0 could be NaN
        masks = _masks(pad(resets, (0, -S % L)).unflatten(1, (-1, L)).transpose(0, 1))
    g = Decays(decay, v.shape[3], tracked)
    x = _Inputs(scale * q, k, v, beta, a, b, bonus, g, masks, tracked)
    out, last = _carried(_products(x), x, state.unflatten(1, (H, -1)))
    y = out.movedim((1, 0, 4, 2, 3), (0, 1, 2, 3, 4)).flatten(1, 2).flatten(2, 3)
    y = y if y.shape[1] == S else y[:, :S]
    return y.flip(1) if reverse else y, last.flatten(1, 2)


class _Inputs(NamedTuple):
    """Inputs of a call in chunks [N, B, H, groups, L, ...]; q is scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Maybe
    a: Maybe
    b: Maybe
    bonus: Maybe
    g: Decays
    masks: Masks | None
    tracked: bool

    def pairs(self, x: Operand, y: Operand, itself: bool) -> Tensor:
        return _seen(self.g.pairs(x, y), self.masks, itself, self.tracked)


class _Products(NamedTuple):
    """Terms of each chunk that do not depend on the state.

    `rows` [..., rows, K] read the state, and `seed` [..., rows, V] is added to the result: the first L rows yield the
    outputs, the others X. The keys `columns` [..., columns, K] are written with v, X or both. Outputs read X with
    `weights` [..., L, L].
    """

    rows: Tensor
    seed: Tensor
    columns: Tensor
    writes_v: bool
    weights: Maybe


def _products(x: _Inputs) -> _Products:
    q, k = x.g.reading(x.q, x.bonus is not None), x.g.writing(x.k)
    if x.beta is not None:
        c = x.g.reading(-x.k)
        inverse = _inverse(x.beta.unsqueeze(-1) * x.pairs(c, k, False)) * x.beta.unsqueeze(-2)
        rows = _rows(q.weighted, inverse @ c.weighted)
        seed = pad(inverse @ x.v, (0, 0, x.v.shape[4], 0))
        return _Products(rows, seed, k.weighted, False, x.pairs(q, k, True))
    seed = x.pairs(q, k, x.bonus is None) @ x.v
    if x.bonus is not None:
        seed = seed + (x.q * x.bonus[:, None, None] * x.k).sum(-1, keepdim=True) * x.v
    if x.a is None or x.b is None:
        return _Products(q.weighted, seed, k.weighted, True, None)
    c, b = x.g.reading(x.a, True), x.g.writing(x.b)
    inverse = _inverse(x.pairs(c, b, False))
    rows, columns = _rows(q.weighted, inverse @ c.weighted), _rows(k.weighted, b.weighted)
    seed = _rows(seed, inverse @ (x.pairs(c, k, False) @ x.v))
    return _Products(rows, seed, columns, True, x.pairs(q, b, True))


def _rows(*parts: Tensor) -> Tensor:
    """Concatenate rows, broadcasting those that several heads of values share."""
    return torch.cat(torch.broadcast_tensors(*parts), -2)


def _inverse(system: Tensor) -> Tensor:
    """Return (I - system)^-1 [..., L, L]: diagonal blocks by substitution, larger ones by products of these.

    No product has powers of the system, which can be large although the inverse is not.
    """
    L = system.shape[-1]
    if L <= SYSTEM_TOKENS:
        identity = torch.eye(L, dtype=system.dtype, device=system.device).expand_as(system)
        return torch.linalg.solve_triangular(-system, identity, upper=False, unitriangular=True)
    half = L // 2
    both = torch.stack([system[..., :half, :half], system[..., half:, half:]], -3)
    first, second = _inverse(both).unbind(-3)
    return of_quarters(first, second, second @ (system[..., half:, :half] @ first))


def _carried(p: _Products, x: _Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the state from chunk to chunk and return o [N, B, H, groups, L, V] and the last state."""
    N, L, heads = x.v.shape[0], x.v.shape[4], state.shape[:3]

    def each(z: Tensor) -> Tensor:
        """Expand to all heads, [N, M, ...], so that each chunk is contiguous."""
        return z.expand(N, *heads, *z.shape[4:]).flatten(1, 3)

    scan = _masked_scan if x.masks is not None else _scan
    through = None if x.g.decay is None else each(x.g.end.transpose(-1, -2))
    values = each(x.v) if p.writes_v else None
    reads, last = scan(each(p.rows), each(p.seed), each(p.columns), values, through, state.flatten(0, 2), L, x)
    out, *solved = reads.split(L, 2)
    if p.weights is not None:
        out = torch.baddbmm(*(z.flatten(0, 1) for z in (out, each(p.weights), *solved))).unflatten(0, (N, -1))
    return out.unflatten(1, heads), last.unflatten(0, heads)


def _scan(
    rows: Tensor, seed: Tensor, columns: Tensor, v: Maybe, through: Maybe, state: Tensor, L: int, x: _Inputs
) -> tuple[Tensor, Tensor]:
    """Return what rows read [N, M, rows, V] and the last state [M, K, V]. Unless tracked, overwrite the seed."""
    if x.tracked:
        reads, last, _ = _Scan.apply(rows, seed, columns, v, through, state, L, x.g.split)
        return reads, last
    state, split = state.clone(), x.g.split
    for n, (row, read, column) in enumerate(zip(rows, seed, columns.transpose(-1, -2), strict=True)):
        read.baddbmm_(row, state)
        if through is not None and not split:
            state *= through[n]
        state.baddbmm_(column, _written(read, None if v is None else v[n], L))
        if through is not None and split:
            state *= through[n]
    return seed, state


class _Scan(torch.autograd.Function):
    """`_scan` with a derivative that uses one product over all chunks wherever the recurrence allows it."""

    @staticmethod
    def forward(
        rows: Tensor, seed: Tensor, columns: Tensor, v: Maybe, through: Maybe, state: Tensor, L: int, split: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        reads, before = seed.clone(), state.new_empty(rows.shape[0], *state.shape)
        for n, (row, read, column) in enumerate(zip(rows, reads, columns.transpose(-1, -2), strict=True)):
            before[n] = state
            read.baddbmm_(row, state)
            state = _next_state(state, column, _written(read, None if v is None else v[n], L), through, n, split)
        return reads, state, before

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rows, _, columns, v, through, _, ctx.L, ctx.split = inputs
        ctx.save_for_backward(rows, columns, v, through, *output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, dreads: Tensor, dstate: Tensor, _: Any) -> tuple[Any, ...]:
        rows, columns, v, through, reads, last, before = ctx.saved_tensors
        L, dreads, later = ctx.L, dreads.clone(), torch.empty_like(before)
        dv = None if v is None else torch.empty_like(v)
        for n in reversed(range(rows.shape[0])):
            scaled = dstate if through is None else dstate * through[n]
            later[n] = scaled if ctx.split else dstate
            dwritten = torch.bmm(columns[n], later[n])
            if dv is not None:
                dv[n] = dwritten[:, :L]
            if rows.shape[2] > L:
                dreads[n, :, L:] += dwritten[:, -L:]
            dstate = torch.baddbmm(scaled, rows[n].transpose(1, 2), dreads[n])
        dcolumns = torch.cat([z for z in (v, reads[:, :, L:]) if z is not None], 2) @ later.transpose(-1, -2)
        dthrough = None
        if through is not None:
            after = torch.cat([before[1:], last.unsqueeze(0)]) / through if ctx.split else before
            dthrough = (after * (later / through if ctx.split else later)).sum_to_size(through.shape)
        return dreads @ before.transpose(-1, -2), dreads, dcolumns, dv, dthrough, dstate, None, None


def _written(read: Tensor, v: Maybe, L: int) -> Tensor:
    """Return the written values of one chunk: v, X or both; rows of `read` after the first L are X."""
    if v is None:
        return read[:, L:]
    return v if read.shape[1] == L else torch.cat([v, read[:, L:]], 1)


def _next_state(state: Tensor, column: Tensor, written: Tensor, through: Maybe, n: int, split: bool) -> Tensor:
    if through is None:
        return torch.baddbmm(state, column, written)
    if split:
        return torch.baddbmm(state, column, written) * through[n]
    return torch.baddbmm(state * through[n], column, written)


def _masked_scan(
    rows: Tensor, seed: Tensor, columns: Tensor, v: Maybe, through: Maybe, state: Tensor, L: int, x: _Inputs
) -> tuple[Tensor, Tensor]:
    """Run `_scan` with resets."""
    assert x.masks is not None
    N, M = rows.shape[:2]

    def each(mask: Tensor) -> Tensor:
        return mask.expand(N, *x.v.shape[1:4], mask.shape[4]).reshape(N, M, -1, 1)

    from_start = each(x.masks.from_start).repeat(1, 1, rows.shape[2] // L, 1)
    columns = columns.masked_fill(~each(x.masks.to_end).repeat(1, 1, columns.shape[2] // L, 1), 0.0)
    kept, found = each(x.masks.through), []
    for n, (row, read, column) in enumerate(zip(rows, seed, columns.transpose(-1, -2), strict=True)):
        found.append(read + (row @ state).masked_fill(~from_start[n], 0.0))
        written = _written(found[-1], None if v is None else v[n], L)
        state = _next_state(state.masked_fill(~kept[n], 0.0), column, written, through, n, x.g.split)
    return torch.stack(found), state


class _Group(NamedTuple):
    """Slices of sequences, heads and heads of values that are computed at a time."""

    batch: slice
    heads: slice
    values: slice

    def of(self, x: Maybe, of_values: bool = True) -> Maybe:
        """Return the group's part of a tensor [B, ..., heads, ...]."""
        return None if x is None else x[self.batch, :, self.values if of_values else self.heads]


def _groups(q: Tensor, v: Tensor, segment: int) -> list[_Group]:
    """Return the groups; a single one on devices other than the CPU, where segment is 0."""
    B, S, H, HV = *q.shape[:3], v.shape[2]
    everything = slice(None)
    room = max(1, PART_ELEMENTS // (min(segment, S) * max(q.shape[3], v.shape[3]))) if segment else B * HV
    if room >= B * HV:
        return [_Group(everything, everything, everything)]
    if room >= HV:
        return [_Group(slice(at, at + room // HV), everything, everything) for at in range(0, B, room // HV)]
    each, groups = max(1, room * H // HV), HV // H
    return [
        _Group(slice(at, at + 1), slice(h, h + each), slice(h * groups, (h + each) * groups))
        for at in range(B) for h in range(0, H, each)
    ]  # fmt: skip


def _of_group(tensors: Sequence[Maybe], group: _Group) -> list[Maybe]:
    """Return the group's parts of q, k, v, decay, beta, a, b, bonus and state."""
    *sequences, bonus, state = tensors
    parts = [group.of(x, at >= 2) for at, x in enumerate(sequences)]
    return [*parts, None if bonus is None else bonus[group.heads], state[group.batch, group.values]]  # type: ignore[index]


def _segments(S: int, segment: int, reverse: bool) -> list[slice]:
    """Return slices of tokens that are computed at a time, in scan order."""
    segment = segment or S
    found = [slice(at, min(at + segment, S)) for at in range(0, S, segment)]
    return [slice(max(0, S - x.stop), S - x.start) for x in found] if reverse else found


def _most_segments(S: int, segment: int) -> int:
    """Return an upper bound on the number of segments, at least 2: exporters treat sizes 0 and 1 as constants."""
    return S // segment + 2 if segment else 2


def _of_tokens(parts: Sequence[Maybe], tokens: slice) -> list[Maybe]:
    """Slice the tokens of q, k, v, decay, beta, a and b; the bonus is unchanged."""
    return [None if x is None else x[:, tokens] for x in parts[:7]] + [parts[7]]


@custom_op("seqblocks::linear_attention")
def _op(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Tensor, resets: Maybe, reverse: bool, scale: float, chunk_size: int, segment: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, the last state, and for the gradient the states before each segment [segments or more, B, HV, K, V]."""
    (q, k, v, decay, beta, a, b, state), found = separate.cleaned((q, k, v, decay, beta, a, b, state), resets, reverse)
    tensors = (q, k, v, decay, beta, a, b, bonus, state)
    y, last = v.new_empty(v.shape), state.new_empty(state.shape)
    segments = _segments(v.shape[1], segment, reverse)
    starts = state.new_zeros(_most_segments(v.shape[1], segment), *state.shape)
    with without_autocast(q.device.type):
        for group in _groups(q, v, segment):
            parts, marks = _of_group(tensors, group), None if resets is None else resets[group.batch]
            now: Any = parts[-1]
            for start, tokens in zip(starts, segments, strict=False):
                start[group.batch, group.values] = now
                here, begin = (*_of_tokens(parts, tokens), now), None if marks is None else marks[:, tokens]
                out, now = _chunked(here, begin, reverse, scale, chunk_size, tracked=False)
                y[group.batch, tokens, group.values] = out
            last[group.batch, group.values] = now
        if resets is not None and not _usable(y, last):
            y, last = (x.contiguous() for x in reference.scan(tensors, resets, reverse, scale))
    if found is not None:
        found.mark(y, last)
    return y, last, starts


def _usable(*results: Tensor) -> bool:
    """Return whether chunked results with resets are valid: masked products carry overflows across a reset.

    The reference implementation does not. Off the CPU the values are not checked, since reading them would synchronise.
    """
    return any(x.device.type != "cpu" for x in results) or all(bool(x.sum().isfinite()) for x in results)


@_op.register_fake
def _op_fake(q, k, v, decay, beta, a, b, bonus, state, resets, reverse, scale, chunk_size, segment):  # type: ignore[no-untyped-def]
    starts = state.new_empty(_most_segments(v.shape[1], segment), *state.shape)
    return v.new_empty(v.shape), state.new_empty(state.shape), starts


@custom_op("seqblocks::linear_attention_backward", outputs=9)
def _op_backward(
    dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe,
    bonus: Maybe, state: Tensor, resets: Maybe, starts: Tensor, reverse: bool, scale: float, chunk_size: int,
    segment: int,
) -> list[Tensor]:
    """Return the gradients of q, k, v, decay, beta, a, b, bonus and the state; empty for those that are absent."""
    sequences = (q, k, v, decay, beta, a, b, state)
    undefined = separate.without_gradient(dy, dlast, sequences, resets, reverse)
    if undefined is not None:
        (q, k, v, decay, beta, a, b, state), found = separate.cleaned(sequences, resets, reverse)
        if found is not None:
            dy, dlast = found.clean_outputs(dy, dlast)
    tensors = (q, k, v, decay, beta, a, b, bonus, state)
    with without_autocast(q.device.type):
        grads = _by_segments(dy, dlast, tensors, resets, starts, reverse, scale, chunk_size, segment)
        if grads is None:
            tokens = partial(reference.scan, resets=resets, reverse=reverse, scale=scale)
            grads = _pulled_back(tokens, tensors, (dy, dlast))[1]
    if undefined is not None:
        lines, others = ([x for x in part if x is not None] for part in (grads[:3], grads[3:7]))
        undefined.fill(lines, others, grads[8], grads[7])
    return [q.new_empty(0) if x is None else x.contiguous() for x in grads]


def _by_segments(
    dy: Tensor, dlast: Tensor, tensors: tuple[Any, ...], resets: Maybe, starts: Tensor, reverse: bool, scale: float,
    chunk_size: int, segment: int,
) -> list[Maybe] | None:
    """Return gradients, computed from the last segment to the first, None for absent tensors.

    Returns None instead of the list if chunks may not be used.
    """
    grads = [None if x is None else torch.zeros_like(x) if x is tensors[7] else torch.empty_like(x) for x in tensors]
    segments = _segments(dy.shape[1], segment, reverse)
    for group in _groups(tensors[0], tensors[2], segment):
        parts, of_parts = _of_group(tensors, group), _of_group(grads, group)
        dstate: Maybe
        marks, dstate = None if resets is None else resets[group.batch], dlast[group.batch, group.values]
        for start, tokens in [*zip(starts, segments, strict=False)][::-1]:
            chunks = partial(
                _chunked, resets=None if marks is None else marks[:, tokens], reverse=reverse, scale=scale,
                chunk_size=chunk_size, tracked=True,
            )  # fmt: skip
            here = (*_of_tokens(parts, tokens), start[group.batch, group.values])
            out, found = _pulled_back(chunks, here, (dy[group.batch, tokens, group.values], dstate))
            if resets is not None and not _usable(*out):
                return None
            for into, x in zip(_of_tokens(of_parts, tokens)[:7], found[:7], strict=True):
                if into is not None and x is not None:
                    into.copy_(x)
            if of_parts[7] is not None and found[7] is not None:
                of_parts[7] += found[7]
            dstate = found[8]
        if of_parts[8] is not None and dstate is not None:
            of_parts[8].copy_(dstate)
    return grads


def _pulled_back(
    function: Callable[[tuple[Maybe, ...]], tuple[Tensor, Tensor]], tensors: tuple[Maybe, ...],
    given: tuple[Tensor, Maybe],
) -> tuple[tuple[Tensor, Tensor], list[Maybe]]:
    """Return the function's values and the gradients of the tensors, None for absent ones."""
    with recording():
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        out = function(tuple(leaves))
        found = torch.autograd.grad(
            out, [x for x in leaves if x is not None], given, allow_unused=True, materialize_grads=True
        )
    grads = iter(found)
    return (out[0].detach(), out[1].detach()), [None if x is None else next(grads) for x in tensors]


@_op_backward.register_fake
def _op_backward_fake(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, v, decay, beta, a, b, bonus, state, resets, starts, reverse, scale, chunk_size, segment
):
    of = (q, k, v, decay, beta, a, b, bonus, state)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in of]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.reverse, ctx.scale, ctx.chunk_size, ctx.segment = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(ctx, dy, dlast, _):  # type: ignore[no-untyped-def]
    *tensors, resets, starts = ctx.saved_tensors
    grads = _op_backward(dy, dlast, *tensors, resets, starts, ctx.reverse, ctx.scale, ctx.chunk_size, ctx.segment)
    present = [None if x is None else g for x, g in zip(tensors, grads, strict=True)]
    return *present, None, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("linear_attention", "torch"))


def run(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Maybe, resets: Maybe, reverse: bool, scale: float, normalize: bool, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, with the arguments of `reference.run`."""
    tensors = reference.in_one_dtype(q, k, v, decay, beta, a, b, bonus, state)
    if v.numel() == 0 or q.shape[3] == 0 or (not unknown(q.shape[1]) and q.shape[1] == 1):
        return reference.run(q, k, v, decay, beta, a, b, bonus, state, resets, reverse, scale, normalize, chunk_size)

    on_cpu = q.device.type == "cpu"
    corrected = beta is not None or a is not None  # these rules need more products within a chunk
    size = chunk_size or (64 if not on_cpu else 16 if corrected else 32)
    segment = max(PART_TOKENS, 1 << (size.bit_length() - 1)) if on_cpu else 0

    def whole(*x: Maybe) -> tuple[Tensor, Tensor]:
        y, last, _ = _op(*x, resets, reverse, scale, size, segment)
        return reference.read_out((y, last), normalize)

    unread = None if bonus is None else decay  # with a bonus, a token's output does not depend on its own decay
    y, last = contained(whole, tensors, KINDS, resets, reverse, unread)
    return y, last


register("linear_attention", "torch", run, always("chunk by chunk, on any device"), by_hand=True)
