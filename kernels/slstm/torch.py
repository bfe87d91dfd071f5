"""The sLSTM with its derivative written out: the same loop over time, without a graph of operations.

The recurrence needs y of the token before, so time cannot be cut into chunks. A token takes one matrix
product and a few fused elementwise calls, and in the backward pass one product for the gradient that goes back in time;
the gradient of the recurrent matrix is a single product over the whole sequence at the end.

The derivative is that of the definition, the stabiliser included: with m' = max(i, l), l = m + ls(f),
keep = exp(l - m'), write = exp(i - m'), the gradient of m' is what came from the state less that of both exponents,
and goes to the one that made the maximum.
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
        # time first, and a head's gates next to each other: a step is a plain matrix product, added in place
        full = gates.new_empty(S, H, B, 4, D)
        torch.add(gates.permute(1, 3, 0, 2, 4), bias.permute(1, 0, 2).unsqueeze(1), out=full)
        full = full.view(S, H, B, 4 * D)
        matrix = recurrent.reshape(H, D, 4 * D)
        y, c, n, m = (s.transpose(0, 1).contiguous() for s in (y0, c0, n0, m0))  # [H, B, D]
        ys, cs, ns, ms = (gates.new_empty(S, H, B, D) for _ in range(4))
        tokens = [*zip(*(x.unbind(0) for x in (full, ys, cs, ns, ms)), strict=True)]
        begins = reset_times(resets, S)
        fresh = True  # whether n may be 0: only before the first token of a sequence
        for t in _order(S, reverse):
            if resets is not None and begins[t]:
                ended = resets[:, t, None]
                y, c, n, m = (s.masked_fill(ended, 0.0) for s in (y, c, n, m))
                fresh = True
            gate, *place = tokens[t]
            y, c, n, m = _token(gate.baddbmm_(y, matrix).split(D, -1), c, n, m, place, fresh)
            fresh = False
    # not `contiguous`, which leaves the strides of axes one long: the fake says them all
    return ys.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format), cs, ns, ms, full


def _token(
    gates: Sequence[Tensor], c: Tensor, n: Tensor, m: Tensor, out: list[Tensor], fresh: bool
) -> list[Tensor]:
    """y and the next c, n, m, in `out`. fresh: whether n may be 0."""
    i, f, z, o = gates
    y_, c_, n_, m_ = out
    through = m + F.logsigmoid(f)
    torch.maximum(i, through, out=m_)
    if fresh:
        torch.where(n == 0, i, m_, out=m_)
    write = torch.exp(i - m_)
    keep = through.sub_(m_)
    keep = (keep.clamp_(max=0.0) if fresh else keep).exp_()
    torch.addcmul(keep * c, write, torch.tanh(z), out=c_)
    torch.addcmul(write, keep, n, out=n_)
    torch.div(torch.sigmoid(o).mul_(c_), n_, out=y_)
    return out


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
    """Gradients of gates, recurrent, bias and the initial state."""
    S, H, B, D = cs.shape
    with without_autocast(cs.device.type):
        matrix = recurrent.reshape(H, D, 4 * D).transpose(1, 2)
        start = [s.transpose(0, 1) for s in (y0, c0, n0, m0)]
        begins = reset_times(resets, S)
        y_time = ys.permute(1, 2, 0, 3)  # [S, H, B, D]
        grads = torch.empty_like(full)
        before = torch.empty_like(cs)  # y that each token read
        carry = [torch.zeros_like(cs[0]) for _ in range(4)]  # dy, dc, dn, dm from the token after
        order = list(_order(S, reverse))
        dy_time = dy.permute(1, 2, 0, 3)
        for at in range(S - 1, -1, -1):
            t = order[at]
            if at:
                past = order[at - 1]
                y_, c_, n_, m_ = y_time[past], cs[past], ns[past], ms[past]
            else:
                y_, c_, n_, m_ = start
            if resets is not None and begins[t]:
                fresh = resets[:, t, None]
                y_, c_, n_, m_ = (s.masked_fill(fresh, 0.0) for s in (y_, c_, n_, m_))
            before[t] = y_
            i, f, z, o = full[t].split(D, -1)
            c, n, m = cs[t], ns[t], ms[t]
            through = m_ + F.logsigmoid(f)
            first = n_ == 0
            write = torch.exp(i - m)
            keep = torch.exp((through - m).clamp_(max=0.0))
            gate, tz = torch.sigmoid(o), torch.tanh(z)
            g_y = dy_time[t] + carry[0]
            share = g_y * gate / n
            g_c = dc_all[t] + carry[1] + share
            g_n = dn_all[t] + carry[2] - share * c / n
            g_m = dm_all[t] + carry[3]
            e_i = (g_c * tz + g_n) * write
            e_l = ((g_c * c_ + g_n * n_) * keep).masked_fill_(first, 0.0)
            g_m = g_m - e_i - e_l
            wins = first | (i >= through)
            g_l = e_l + g_m.masked_fill(wins, 0.0)
            d_i, d_f, d_z, d_o = grads[t].split(D, -1)
            d_i.copy_(e_i + g_m.masked_fill(~wins, 0.0))
            d_f.copy_(g_l * torch.sigmoid(-f))
            d_z.copy_(g_c * write * (1 - tz * tz))
            d_o.copy_(g_y * (c / n) * gate * (1 - gate))
            carry = [torch.bmm(grads[t], matrix), g_c * keep, g_n * keep, g_l]
            if resets is not None and begins[t]:
                carry = [g.masked_fill(fresh, 0.0) for g in carry]
        d_recurrent = torch.einsum("shbd,shbg->hdg", before, grads).reshape(recurrent.shape)
        d_bias = grads.sum((0, 2)).view(H, 4, D).transpose(0, 1).contiguous()
        d_gates = grads.view(S, H, B, 4, D).permute(2, 0, 3, 1, 4).contiguous()
    return d_gates, d_recurrent, d_bias, *(g.transpose(0, 1).contiguous() for g in carry)  # type: ignore[return-value]


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
    last = 0 if reverse else -1  # while code is compiled, the length may be unknown
    return y, y[:, last], *(s[last].transpose(0, 1) for s in (c, n, m))


register("slstm", "torch", run, always("a loop over time with a written-out derivative, on any device"), by_hand=True)
