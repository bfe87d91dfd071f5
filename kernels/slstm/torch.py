"""The sLSTM with a handwritten derivative: the same loop over time, without an autograd graph.

The recurrence needs y of the previous token, so the sequence cannot be split into chunks. A token takes one matrix
product and a few fused elementwise calls, and in the backward pass one product for the gradient of the previous y. The
gradient of the recurrent matrix is a single product over the whole sequence at the end.

The derivative is that of the definition, including the stabiliser. With m' = max(i, l), l = m + ls(f),
keep = exp(l - m') and write = exp(i - m'), the gradient of m' is that of the state's m minus those of both exponents.
It is added to the gradient of the argument that attains the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained, reset_times
from seqblocks.kernels.slstm import reference as slstm_reference
from seqblocks.kernels.slstm.reference import SLSTMState

PART_TOKENS = 64  # tokens for which the factors of the backward pass are computed at once


def _order(S: int, reverse: bool) -> range:
    return range(S - 1, -1, -1) if reverse else range(S)


@custom_op("seqblocks::slstm")
def _slstm(
    gates: Tensor, recurrent: Tensor, bias: Tensor, y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y [B, S, H, D] and, for the backward pass and the last state, c, n, m and the gates of all tokens."""
    B, S, _, H, D = gates.shape
    with without_autocast(gates.device.type):
        # Time is the first axis and the gates of a head are adjacent: a step adds a plain matrix product in place.
        full = gates.new_empty(S, H, B, 4, D)
        torch.add(gates.permute(1, 3, 0, 2, 4), bias.permute(1, 0, 2).unsqueeze(1), out=full)
        full = full.view(S, H, B, 4 * D)
        matrix = recurrent.reshape(H, D, 4 * D)
        y, c, n, m = (s.transpose(0, 1).contiguous() for s in (y0, c0, n0, m0))  # [H, B, D]
        ys, cs, ns, ms = (gates.new_empty(S, H, B, D) for _ in range(4))
        exponents = gates.new_empty(2, H, B, D)
        tokens = [*zip(*(x.unbind(0) for x in (full, *full.split(D, -1), ys, cs, ns, ms)), strict=True)]
        begins = reset_times(resets, S)
        fresh = True  # whether n may be 0: only before the first token of a sequence
        for t in _order(S, reverse):
            if resets is not None and begins[t]:
                ended = resets[:, t, None]
                y, c, n, m = (s.masked_fill(ended, 0.0) for s in (y, c, n, m))
                fresh = True
            gate, i, f, z, o, *place = tokens[t]
            gate.baddbmm_(y, matrix)
            y, c, n, m = _token((i, f, z, o), c, n, m, place, exponents, fresh)
            fresh = False
    # `contiguous` would leave the strides of axes of length 1, but they must equal those of the fake op.
    return ys.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format), cs, ns, ms, full


def _token(
    gates: Sequence[Tensor], c: Tensor, n: Tensor, m: Tensor, out: list[Tensor], exponents: Tensor, fresh: bool
) -> list[Tensor]:
    """Compute y and the next c, n, m into `out`, and return it.

    exponents [2, H, B, D]: working memory. fresh: whether n may be 0.
    """
    i, f, z, o = gates
    y_, c_, n_, m_ = out
    write, keep = exponents
    through = m + _log_sigmoid(f)
    torch.maximum(i, through, out=m_)
    if fresh:
        torch.where(n == 0, i, m_, out=m_)
    torch.sub(i, m_, out=write)
    torch.sub(through, m_, out=keep)
    if fresh:
        keep.clamp_(max=0.0)
    exponents.exp_()
    torch.mul(keep, c, out=c_).addcmul_(write, torch.tanh(z))
    torch.addcmul(write, keep, n, out=n_)
    torch.div(torch.sigmoid(o).mul_(c_), n_, out=y_)
    return out


def _log_sigmoid(x: Tensor) -> Tensor:
    """Return log(1 / (1 + e^-x)); below -40 it is x. For few elements it takes half the time of torch's logsigmoid."""
    return F.softplus(x, -1.0, 40.0)


@_slstm.register_fake
def _slstm_fake(gates, recurrent, bias, y0, c0, n0, m0, resets, reverse):  # type: ignore[no-untyped-def]
    B, S, _, H, D = gates.shape
    states = (gates.new_empty(S, H, B, D) for _ in range(3))
    return gates.new_empty(B, S, H, D), *states, gates.new_empty(S, H, B, 4 * D)


@custom_op("seqblocks::slstm_backward")
def _slstm_backward(
    dy: Tensor, dc_all: Tensor, dn_all: Tensor, dm_all: Tensor,
    recurrent: Tensor, y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, resets: Tensor | None,
    ys: Tensor, cs: Tensor, ns: Tensor, ms: Tensor, full: Tensor, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gates, recurrent, bias and the initial state."""
    S, H, B, D = cs.shape
    with without_autocast(cs.device.type):
        matrix = recurrent.reshape(H, D, 4 * D).transpose(1, 2)
        y_start, *start = (s.transpose(0, 1) for s in (y0, c0, n0, m0))
        begins = reset_times(resets, S)
        marks = None if resets is None or not any(begins) else resets.t()[:, None, :, None]
        dy_time = dy.permute(1, 2, 0, 3)  # [S, H, B, D]
        grads = torch.empty_like(full)
        order = list(_order(S, reverse))
        last = order[-1]
        given_after = (dy_time, dc_all, dn_all, dm_all)
        carry = [x[last] for x in given_after]
        for at in range(S, 0, -PART_TOKENS):
            part = order[max(0, at - PART_TOKENS) : at]
            span = slice(min(part), max(part) + 1)
            past = [_before(x, first, span, reverse, marks) for x, first in zip((cs, ns, ms), start, strict=True)]
            factors = _factors(full[span], cs[span], ns[span], ms[span], *past)
            d_gates = grads[span].split(D, -1)
            for t in reversed(part):
                token = t - span.start
                given = [x[token] for x in factors]
                carry = _token_backward(carry, given, [x[token] for x in d_gates])
                carry.insert(0, torch.bmm(grads[t], matrix))
                if marks is not None and begins[t]:
                    carry = [x.masked_fill(marks[t], 0.0) for x in carry]
                if t != order[0]:
                    before = t + 1 if reverse else t - 1
                    carry = [x.add_(more[before]) for x, more in zip(carry, given_after, strict=True)]
        y_before = _before(ys.permute(1, 2, 0, 3), y_start, slice(0, S), reverse, marks)
        d_recurrent = torch.einsum("shbd,shbg->hdg", y_before, grads).reshape(recurrent.shape)
        d_bias = grads.sum((0, 2)).view(H, 4, D).transpose(0, 1).contiguous()
        d_gates = grads.view(S, H, B, 4, D).permute(2, 0, 3, 1, 4).contiguous()
    return d_gates, d_recurrent, d_bias, *(g.transpose(0, 1).contiguous() for g in carry)  # type: ignore[return-value]


def _before(x: Tensor, start: Tensor, span: slice, reverse: bool, marks: Tensor | None) -> Tensor:
    """Return the state before each token of a span, 0 where a sequence begins.

    x [S, H, B, D]: the state after each token; start: the initial state.
    """
    first = span.stop if reverse else span.start - 1
    edge = x[first, None] if 0 <= first < x.shape[0] else start[None]
    inner = x[span]
    read = torch.cat([inner[1:], edge] if reverse else [edge, inner[:-1]])
    return read if marks is None else read.masked_fill_(marks[span], 0.0)


def _factors(
    full: Tensor, c: Tensor, n: Tensor, m: Tensor, c_: Tensor, n_: Tensor, m_: Tensor
) -> list[Tensor]:
    """Return the factors of `_token_backward` for several tokens: everything that does not depend on gradients."""
    i, f, z, o = full.split(c.shape[-1], -1)
    through = m_ + _log_sigmoid(f)
    first = n_ == 0
    write, keep = torch.exp(i - m), torch.exp((through - m).clamp_(max=0.0))
    gate, tz, wins = torch.sigmoid(o), torch.tanh(z), first | (i >= through)
    share, h = gate / n, c / n
    return [
        share, share * h, write, write * tz, keep, (keep * c_).masked_fill_(first, 0.0),
        (keep * n_).masked_fill_(first, 0.0), wins.to(c.dtype), (~wins).to(c.dtype),
        torch.sigmoid(-f), write * (1 - tz * tz), h * gate * (1 - gate),
    ]  # fmt: skip


def _token_backward(carry: list[Tensor], factors: list[Tensor], out: list[Tensor]) -> list[Tensor]:
    """Write the gradients of the gates to `out`; return those of the previous c, n and m."""
    g_y, g_c, g_n, g_m = carry
    share, of_n, write, written, keep, kept_c, kept_n, wins, loses, by_f, by_z, by_o = factors
    d_i, d_f, d_z, d_o = out
    g_c = torch.addcmul(g_c, g_y, share)
    g_n = torch.addcmul(g_n, g_y, of_n, value=-1)
    e_i = torch.mul(g_c, written).addcmul_(g_n, write)
    e_l = torch.mul(g_c, kept_c).addcmul_(g_n, kept_n)
    g_m = torch.sub(g_m, e_i).sub_(e_l)
    torch.addcmul(e_i, g_m, wins, out=d_i)
    g_l = e_l.addcmul_(g_m, loses)
    torch.mul(g_l, by_f, out=d_f)
    torch.mul(g_c, by_z, out=d_z)
    torch.mul(g_y, by_o, out=d_o)
    return [g_c.mul_(keep), g_n.mul_(keep), g_l]


@_slstm_backward.register_fake
def _slstm_backward_fake(  # type: ignore[no-untyped-def]
    dy, dc, dn, dm, recurrent, y0, c0, n0, m0, resets, ys, cs, ns, ms, full, reverse
):
    S, H, B, D = cs.shape
    state = (cs.new_empty(B, H, D) for _ in range(4))
    return cs.new_empty(B, S, 4, H, D), torch.empty_like(recurrent), cs.new_empty(4, H, D), *state


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, recurrent, _, *state, resets, reverse = inputs
    ctx.save_for_backward(recurrent, *state, resets, *output)
    ctx.reverse = reverse
    ctx.mark_non_differentiable(output[4])


def _differentiate(ctx, dy, dc, dn, dm, _):  # type: ignore[no-untyped-def]
    grads = _slstm_backward(dy.contiguous(), dc, dn, dm, *ctx.saved_tensors, ctx.reverse)
    return *grads, None, None


_slstm.register_autograd(_differentiate, setup_context=_save)
_slstm_backward.register_autograd(no_second_derivative("slstm", "torch"))


def run(
    inputs: Sequence[Tensor], recurrent: Tensor, bias: Tensor, state: SLSTMState, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, SLSTMState]:
    """Run the scan; arguments and results are those of `slstm_reference.run`."""
    gates = torch.stack([x.to(state.y.dtype) for x in inputs], 2).unflatten(-1, state.y.shape[1:])  # [B, S, 4, H, D]
    if gates.shape[1] == 0:
        return slstm_reference.run(inputs, recurrent, bias, state, resets, reverse)
    kinds = (TOKENS, SHARED, SHARED, *(STATE,) * 4)
    y, *last = contained(
        lambda *x: _run(*x, resets=resets, reverse=reverse), (gates, recurrent, bias, *state), kinds, resets, reverse
    )
    return y, SLSTMState(*last)


def _run(
    gates: Tensor, recurrent: Tensor, bias: Tensor, y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, *,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, ...]:
    y, c, n, m, _ = _slstm(gates, recurrent, bias, y0, c0, n0, m0, resets, reverse)
    last = 0 if reverse else -1  # During compilation, the length may be symbolic.
    state = y[:, last], *(s[last].transpose(0, 1) for s in (c, n, m))
    return y, *(s.clone() for s in state)  # A view would change with y, and keep the memory of all tokens allocated.


register("slstm", "torch", run, always("a loop over time with a handwritten derivative, on any device"), by_hand=True)
