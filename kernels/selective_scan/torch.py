"""The selective scan chunk by chunk, with its derivative written out.

Within a chunk the decays exp(dt A) and the inputs dt u B of all its tokens are made at once, and one fused call per
token runs the recurrence in place. Only the states between chunks are kept for the backward pass, which makes those
inside a chunk again; so memory is that of one chunk, whatever the length.

With g_t the gradient of h_t, running backwards g_t = dy_t C_t + exp(dt_(t+1) A) g_(t+1):

    d(dt u)_t = sum_n g_t B_t      dB_t = sum_e g_t dt u      dC_t = sum_e dy_t h_t
    p_t = g_t h_(t-1) exp(dt_t A)  d(dt)_t += sum_n p_t A     dA += sum_bt p_t dt_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import register
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, reset_times
from seqblocks.kernels.selective_scan import reference as selective_scan_reference
from seqblocks.kernels.selective_scan.reference import complete

WORKING_SET = 1 << 20  # elements of one chunk's states


def _length(u: Tensor, N: int) -> int:
    """Tokens of a chunk."""
    return max(8, min(128, WORKING_SET // max(1, u.shape[0] * u.shape[2] * u.shape[3] * N)))


def _spans(u: Tensor, N: int, reverse: bool) -> list[tuple[int, int]]:
    """Chunks (first, end), in the order of the scan."""
    S, L = u.shape[1], _length(u, N)
    spans = [(a, min(a + L, S)) for a in range(0, S, L)]
    return spans[::-1] if reverse else spans


def _chunk(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, h: Tensor, resets: Tensor | None, begins: list[bool],
    span: tuple[int, int], reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decays, states [B, L, G, E, N] of a chunk, and dt u. begins: where `resets` has any."""
    a, b = span
    step = dt[:, a:b]
    scaled = step * u[:, a:b]
    decay = torch.exp(step.unsqueeze(-1) * A)
    states = scaled.unsqueeze(-1) * B[:, a:b].unsqueeze(3)
    for t in range(b - a - 1, -1, -1) if reverse else range(b - a):
        if resets is not None and begins[a + t]:
            h = h.masked_fill(along(resets[:, a + t], h), 0.0)
        h = states[:, t].addcmul_(decay[:, t], h)
    return decay, states, scaled


@torch.library.custom_op("seqblocks::selective_scan", mutates_args=())
def _scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states between chunks, [chunks, B, G, E, N] in a line.

    (An axis for the chunks could be one long, and then a compiler would take it for one of just that length.)
    """
    with without_autocast(u.device.type):
        spans, begins = _spans(u, A.shape[-1], reverse), reset_times(resets, u.shape[1])
        y, between = torch.empty_like(u), h0.new_empty(len(spans), *h0.shape)
        h = h0
        for at, (a, b) in enumerate(spans):
            between[at] = h
            _, states, _ = _chunk(u, dt, A, B, h, resets, begins, (a, b), reverse)
            y[:, a:b] = (states @ C[:, a:b].unsqueeze(-1)).squeeze(-1)
            h = states[:, 0 if reverse else -1]
        return y, h.clone(), between.flatten()


@_scan.register_fake
def _scan_fake(u, dt, A, B, C, h0, resets, reverse):  # type: ignore[no-untyped-def]
    chunks = -(-u.shape[1] // _length(u, A.shape[-1]))  # no list of them: the length may be unknown
    return torch.empty_like(u), torch.empty_like(h0), h0.new_empty(chunks * h0.numel())


@torch.library.custom_op("seqblocks::selective_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor, dlast: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, between: Tensor,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, dt, A, B, C and the initial state."""
    with without_autocast(u.device.type):
        spans, begins = _spans(u, A.shape[-1], reverse), reset_times(resets, u.shape[1])
        du, ddt, dB, dC = (torch.empty_like(x) for x in (u, dt, B, C))
        dA = torch.zeros_like(A)
        carry, between = dlast.clone(), between.view(len(spans), *dlast.shape)
        for at in range(len(spans) - 1, -1, -1):
            a, b = spans[at]
            decay, states, scaled = _chunk(u, dt, A, B, between[at], resets, begins, (a, b), reverse)
            upstream = dy[:, a:b]
            grads = upstream.unsqueeze(-1) * C[:, a:b].unsqueeze(3)
            for t in range(b - a) if reverse else range(b - a - 1, -1, -1):
                g = grads[:, t].add_(carry)
                carry = decay[:, t] * g
                if resets is not None and begins[a + t]:
                    carry.masked_fill_(along(resets[:, a + t], carry), 0.0)
            dC[:, a:b] = (upstream.unsqueeze(3) @ states).squeeze(3)
            dB[:, a:b] = (scaled.unsqueeze(3) @ grads).squeeze(3)
            through = (grads @ B[:, a:b].unsqueeze(-1)).squeeze(-1)
            du[:, a:b] = through * dt[:, a:b]
            before = between[at].unsqueeze(1)
            past = torch.cat([states[:, 1:], before] if reverse else [before, states[:, :-1]], 1)
            if resets is not None and any(begins[a:b]):
                past.masked_fill_(along(resets[:, a:b], past), 0.0)
            p = grads.mul_(past).mul_(decay)
            ddt[:, a:b] = through * u[:, a:b] + (p * A).sum(-1)
            dA += torch.einsum("blgen,blge->gen", p, dt[:, a:b])
        return du, ddt, dA, dB, dC, carry


@_scan_backward.register_fake
def _scan_backward_fake(dy, dlast, u, dt, A, B, C, between, resets, reverse):  # type: ignore[no-untyped-def]
    return *(torch.empty_like(x) for x in (u, dt, A, B, C)), torch.empty_like(dlast)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    u, dt, A, B, C, _, resets, reverse = inputs
    ctx.save_for_backward(u, dt, A, B, C, output[2], resets)
    ctx.reverse = reverse
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, dy, dlast, _):  # type: ignore[no-untyped-def]
    grads = _scan_backward(dy.contiguous(), dlast, *ctx.saved_tensors, ctx.reverse)
    return *grads, None, None


_scan.register_autograd(_differentiate, setup_context=_save)
_scan_backward.register_autograd(no_second_derivative("selective_scan", "torch"))


def run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The scan, as `selective_scan_reference.run`, for real A, B, C."""
    if u.numel() == 0:
        return selective_scan_reference.run(u, dt, A, B, C, state, resets, reverse)
    u, dt, A, B, C, state = (x.contiguous() for x in (u, dt, A, B, C, state))
    y, last, _ = _scan(u, dt, A, B, C, state, resets, reverse)
    return y, last


def _can(**facts: Any) -> tuple[bool, str]:
    if facts.get("complex"):
        return False, "complex A: only the recurrent definition has it"
    return True, "chunk by chunk, on any device"


register("selective_scan", "torch", complete(run), _can, by_hand=True)
