"""The gated recurrence in about 2 sqrt(S) calls, with its derivative written out.

The sequence is cut into blocks of about sqrt(S) tokens. All blocks run in parallel from a zero state, token by token,
together with the products of their decays; then the state is carried from block to block. Where a single token is
enough work for a CPU, there is one block.

With d_t the gradient of h_t, which follows the same recurrence in the opposite direction:

    d_t = dy_t + e^(g_(t+1)) d_(t+1)          dx_t = d_t          dg_t = e^(g_t) h_(t-1) d_t
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.gated_recurrence import reference
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, dead_tokens, reset_times

PART_ELEMENTS = 1 << 19  # elements computed at a time on a CPU
TOKEN_MIN_ELEMENTS = 2048  # over the batch: fewer take less time than the overhead of a call


def _block_length(x: Tensor) -> int:
    B, S, E = x.shape
    return S if x.device.type == "cpu" and B * E >= TOKEN_MIN_ELEMENTS else max(1, math.isqrt(S))


def _chunks(x: Tensor, reverse: bool) -> list[slice]:
    """Return slices of tokens that are computed at a time, in scan order: on a CPU, as many as fit into its cache."""
    B, S, E = x.shape
    chunk = S if x.device.type != "cpu" else max(1, PART_ELEMENTS // (B * E))
    chunks = [slice(at, min(at + chunk, S)) for at in range(0, S, chunk)]
    return [slice(S - x.stop, S - x.start) for x in chunks] if reverse else chunks


def _scan(factor: Tensor, x: Tensor, y: Tensor, h: Tensor, resets: Tensor | None, reverse: bool) -> Tensor:
    """Write h_t = factor_t h_(t-1) + x_t [B, S, E] to y and return the last state. Factors are 0 at resets."""
    S, L = y.shape[1], _block_length(y)
    N = S // L
    rest = S - N * L
    blocks = slice(rest, S) if reverse else slice(0, N * L)
    parts = [z[:, blocks] for z in (factor, x, y)]
    marks = None if resets is None else resets[:, blocks]
    if N == 1:
        h = _one_by_one(parts[0], parts[1], parts[2], h, marks, reverse)
    else:
        factors, inputs, outputs = (z.unflatten(1, (N, L)) for z in parts)
        marks = None if marks is None else marks.unflatten(1, (N, L))
        products = _inside(factors, inputs, outputs, marks, reverse)
        h = _between(outputs, products, h, marks, reverse)
    if rest:
        left = slice(0, rest) if reverse else slice(N * L, S)
        marks = None if resets is None else resets[:, left]
        h = _one_by_one(factor[:, left], x[:, left], y[:, left], h, marks, reverse)
    return h


def _one_by_one(factor: Tensor, x: Tensor, y: Tensor, h: Tensor, resets: Tensor | None, reverse: bool) -> Tensor:
    """Write the states for inputs x [B, L, E] to y and return the last."""
    begins = reset_times(resets, y.shape[1])
    steps = [*zip(factor.unbind(1), x.unbind(1), y.unbind(1), range(y.shape[1]), strict=True)]
    for decay, now, out, t in reversed(steps) if reverse else steps:
        if begins[t] and resets is not None:
            h = h.masked_fill(along(resets[:, t], h), 0.0)
        h = torch.addcmul(now, decay, h, out=out)
    return h


def _inside(factor: Tensor, x: Tensor, y: Tensor, marks: Tensor | None, reverse: bool) -> Tensor:
    """Run all blocks [B, N, L, E] from a zero state. Return products of the factors from the start of each block."""
    L, products = y.shape[2], torch.empty_like(factor)
    steps = [*zip(factor.unbind(2), x.unbind(2), y.unbind(2), products.unbind(2), strict=True)]
    order = range(L - 1, -1, -1) if reverse else range(L)
    begins = reset_times(None if marks is None else marks.flatten(0, 1), L)
    decay, now, out, into = steps[order[0]]
    h, product = out.copy_(now), into.copy_(decay)
    for t in order[1:]:
        if begins[t] and marks is not None:
            h, product = (each.masked_fill(along(marks[:, :, t], each), 0.0) for each in (h, product))
        decay, now, out, into = steps[t]
        h = torch.addcmul(now, decay, h, out=out)
        product = torch.mul(decay, product, out=into)
    return products


def _between(tokens: Tensor, products: Tensor, h: Tensor, marks: Tensor | None, reverse: bool) -> Tensor:
    """Carry the state from block to block, in place, and return the last."""
    N, last = tokens.shape[1], 0 if reverse else -1
    begun = None
    if marks is not None:
        begun = (marks.flip(2).cumsum(2).flip(2) if reverse else marks.cumsum(2)) > 0
    for n in reversed(range(N)) if reverse else range(N):
        before = h.unsqueeze(1)
        if begun is not None:  # 0 times a nonfinite state would carry NaN across a reset
            before = before.expand_as(tokens[:, n]).masked_fill(begun[:, n].unsqueeze(-1), 0.0)
        h = tokens[:, n].addcmul_(products[:, n], before)[:, last]
    return h


def _factors(decay: Tensor, resets: Tensor | None) -> Tensor:
    factor = torch.mul(decay, math.log2(math.e)).exp2_()  # takes a quarter of the time of exp on processors without MKL
    return factor if resets is None else factor.masked_fill_(resets.unsqueeze(-1), 0.0)


def _later(x: Tensor, end: Tensor, reverse: bool) -> Tensor:
    """Shift x so that each token gets the value of the next one in scan order; the last gets `end`."""
    return torch.cat([end, x[:, :-1]] if reverse else [x[:, 1:], end], 1)


def _earlier(y: Tensor, chunk: slice, state: Tensor, reverse: bool) -> Tensor:
    """Return the states before the tokens of a chunk."""
    if reverse:
        end = y[:, chunk.stop : chunk.stop + 1] if chunk.stop < y.shape[1] else state.unsqueeze(1)
        return torch.cat([y[:, chunk.start + 1 : chunk.stop], end], 1)
    first = y[:, chunk.start - 1 : chunk.start] if chunk.start else state.unsqueeze(1)
    return torch.cat([first, y[:, chunk.start : chunk.stop - 1]], 1)


@custom_op("seqblocks::gated_recurrence")
def _op(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    with without_autocast(x.device.type):
        y, h = x.new_empty(x.shape), state
        for chunk in _chunks(x, reverse):
            marks = None if resets is None else resets[:, chunk]
            h = _scan(_factors(decay[:, chunk], marks), x[:, chunk], y[:, chunk], h, marks, reverse)
        return y, h.clone()


@_op.register_fake
def _op_fake(x, decay, state, resets, reverse):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), state.new_empty(state.shape)


@custom_op("seqblocks::gated_recurrence_backward")
def _op_backward(
    dy: Tensor, dlast: Tensor, y: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, decay and the initial state."""
    dead = begins = later = None
    if resets is not None:
        dead = dead_tokens([dy], [dlast], resets, reverse)
        begins, later = dead | resets, _later(resets, torch.zeros_like(resets[:, :1]), reverse)

    def of_chunk(marks: Tensor | None, chunk: slice) -> Tensor | None:
        return None if marks is None else marks[:, chunk]

    with without_autocast(y.device.type):
        d, ddecay = dy.new_empty(dy.shape), decay.new_empty(decay.shape)
        carry, end = dlast, torch.ones_like(decay[:, :1])
        for chunk in _chunks(y, not reverse):
            factor, past = _factors(decay[:, chunk], of_chunk(resets, chunk)), _earlier(y, chunk, state, reverse)
            if dead is not None and begins is not None:
                factor.masked_fill_(dead[:, chunk].unsqueeze(-1), 0.0)
                past.masked_fill_(begins[:, chunk].unsqueeze(-1), 0.0)
            next_factor = _later(factor, end, reverse)
            carry = _scan(next_factor, dy[:, chunk], d[:, chunk], carry, of_chunk(later, chunk), not reverse)
            torch.mul(past.mul_(factor), d[:, chunk], out=ddecay[:, chunk])
            end = factor[:, -1:] if reverse else factor[:, :1]
        return d, ddecay, end[:, 0] * d[:, -1 if reverse else 0]


@_op_backward.register_fake
def _op_backward_fake(dy, dlast, y, decay, state, resets, reverse):  # type: ignore[no-untyped-def]
    return y.new_empty(y.shape), y.new_empty(y.shape), state.new_empty(state.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, decay, state, resets, ctx.reverse = inputs
    ctx.save_for_backward(output[0], decay, state, resets)


def _differentiate(ctx, dy, dlast):  # type: ignore[no-untyped-def]
    return *_op_backward(dy, dlast, *ctx.saved_tensors, ctx.reverse), None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("gated_recurrence", "torch"))


def run(x: Tensor, decay: Tensor, state: Tensor, resets: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence, with the arguments of `reference.run`."""
    if x.numel() == 0 or (not unknown(x.shape[1]) and x.shape[1] == 1):
        return reference.run(x, decay, state, resets, reverse)
    y, last = _op(x, decay, state, resets, reverse)
    return y, last


register("gated_recurrence", "torch", run, always("block by block, on any device"), by_hand=True)
