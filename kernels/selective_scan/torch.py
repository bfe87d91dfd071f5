"""The selective scan chunk by chunk, with its derivative written out.

Within a chunk, the decays exp(dt A) and the inputs dt u B of all tokens are computed at once, and one fused call per
token runs the recurrence in place. The softplus of the step, the skip and the gate are computed in the same chunks.
Only the states between chunks are saved for the backward pass, which recomputes everything else, so the working memory
is that of one chunk for any length. For short sequences, the steps and the outputs before the gate are saved too.

States have the layout [L, B, G, N, E], tokens first and channels last: those of a token are contiguous, and a sum over
the N states of a channel is a sum of rows. Without MKL's exponential, exp2 takes a quarter of the time of exp.

With dy the gradient of the output before the gate and g_t that of h_t, running backwards
g_t = dy_t C_t + exp(dt_(t+1) A) g_(t+1):

    d(dt u)_t = sum_n g_t B_t      dB_t = sum_e g_t dt u      dC_t = sum_e dy_t h_t
    p_t = g_t h_(t-1) exp(dt_t A)  d(dt)_t += sum_n p_t A     dA += sum_bt p_t dt_t
    du_t += D dy_t                 dD += sum_bt dy_t u_t
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch import register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.numerics import filled, is_worth_saving, no_second_derivative, without_autocast
from seqblocks.kernels.resets import reset_times
from seqblocks.kernels.selective_scan import reference as selective_scan_reference
from seqblocks.kernels.selective_scan.reference import complete

WORKING_SET = 1 << 19  # elements of the states of a chunk: twice as many exceed the cache, fewer need more calls

MIN_CHUNK_TOKENS = 8  # a state is saved for the backward pass for each chunk
MAX_CHUNK_ELEMENTS = 1 << 21  # without a backward pass, fewer tokens are faster than a chunk with more elements


def _length(u: Tensor, N: int, for_backward: bool) -> int:
    """Return the number of tokens of a chunk."""
    per_token = max(1, u.shape[0] * u.shape[2] * N)
    least = MIN_CHUNK_TOKENS if for_backward or MIN_CHUNK_TOKENS * per_token < MAX_CHUNK_ELEMENTS else 1
    return max(least, min(128, WORKING_SET // per_token))


def _chunks(u: Tensor, N: int, reverse: bool, for_backward: bool) -> list[tuple[int, int]]:
    """Return the chunks (first, end) in the order of the scan."""
    S, L = u.shape[1], _length(u, N, for_backward)
    chunks = [(a, min(a + L, S)) for a in range(0, S, L)]
    return chunks[::-1] if reverse else chunks


class _Chunk(NamedTuple):
    """The inputs of a chunk in the dtype of the scan, [L, B, G, E]. raw: the steps before the softplus."""

    u: Tensor
    raw: Tensor
    step: Tensor


class _Tokens:
    """The inputs with tokens first, [S, B, G, E or N], and working memory for the decays and states of a chunk."""

    def __init__(
        self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        dt_bias: Tensor | None, resets: Tensor | None, softplus: bool, reverse: bool, buffers: int,
        steps: Tensor | None = None, outputs: Tensor | None = None, for_backward: bool = True,
    ) -> None:
        groups = A.shape[:2]
        self.u, self.dt = (x.transpose(0, 1).unflatten(-1, groups) for x in (u, dt))
        self.z = None if z is None else z.transpose(0, 1).unflatten(-1, groups)
        self.B, self.C = B.transpose(0, 1), C.transpose(0, 1)
        self.A = A.transpose(1, 2).contiguous()  # [G, N, E]
        self.D, self._bias = (None if x is None else x.view(groups) for x in (D, dt_bias))
        self._softplus, self._steps, self._outputs = softplus, steps, outputs
        self._exponents = self.A * math.log2(math.e)
        self._resets, self._reverse, self._begins = resets, reverse, reset_times(resets, u.shape[1])
        self.chunks = _chunks(u, A.shape[-1], reverse, for_backward)
        L = min(_length(u, A.shape[-1], for_backward), u.shape[1])
        self.memory = A.new_empty(buffers, L, u.shape[0], *self.A.shape)

    def chunk(self, a: int, b: int) -> _Chunk:
        """Return the inputs of tokens a to b."""
        u, raw = (x[a:b].to(self.A.dtype) for x in (self.u, self.dt))
        raw = raw if self._bias is None else raw + self._bias
        if self._steps is not None:
            return _Chunk(u, raw, self._steps[a:b])
        return _Chunk(u, raw, F.softplus(raw) if self._softplus else raw)

    def gate(self, a: int, b: int) -> Tensor | None:
        """Return the gates of tokens a to b before the SiLU."""
        return None if self.z is None else self.z[a:b].to(self.A.dtype)

    def through_softplus(self, grad: Tensor, chunk: _Chunk) -> Tensor:
        """Return the gradient of the steps before the softplus."""
        return torch.ops.aten.softplus_backward(grad, chunk.raw, 1, 20) if self._softplus else grad

    def outputs(self, states: Tensor, chunk: _Chunk, a: int, b: int) -> Tensor:
        """Return the outputs [L, B, G, E] of tokens a to b, before the gate."""
        if self._outputs is not None:
            return self._outputs[a:b]
        y = _over_states(self.C[a:b], states)
        return y if self.D is None else y.addcmul_(self.D, chunk.u)

    def begins(self, t: int) -> Tensor | None:
        """Return a mask [B, 1, 1, 1], true where a sequence begins at token t, or None if none does."""
        if self._resets is None or not self._begins[t]:
            return None
        return self._resets[:, t, None, None, None]

    def begin_among(self, a: int, b: int) -> Tensor | None:
        """Return the masks [L, B, 1, 1, 1] of tokens a to b, or None if no sequence begins among them."""
        if self._resets is None or not any(self._begins[a:b]):
            return None
        return self._resets[:, a:b].t()[..., None, None, None]

    def run(self, h: Tensor, chunk: _Chunk, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decays and states [L, B, G, N, E] of a chunk, and dt u [L, B, G, E].

        h [B, G, N, E]: the state before the chunk.
        """
        step, (decay, states) = chunk.step, self.memory[:2, : b - a]
        scaled = step * chunk.u
        torch.mul(step.unsqueeze(-2), self._exponents, out=decay).exp2_()
        torch.mul(scaled.unsqueeze(-2), self.B[a:b].unsqueeze(-1), out=states)
        tokens = list(zip(range(a, b), decay.unbind(0), states.unbind(0), strict=True))
        for t, kept, state in reversed(tokens) if self._reverse else tokens:
            if (fresh := self.begins(t)) is not None:
                h = h.masked_fill(fresh, 0.0)
            h = state.addcmul_(kept, h)
        return decay, states, scaled

    def run_back(self, grads: Tensor, decay: Tensor, carry: Tensor, a: int) -> Tensor:
        """Turn the gradients [L, B, G, N, E] from the outputs into the whole gradients of the states, in place.

        carry: gradient of the state after the chunk. Returns the gradient of the state before it.
        """
        tokens = list(zip(range(a, a + len(grads)), grads.unbind(0), decay.unbind(0), strict=True))
        for t, g, kept in tokens if self._reverse else reversed(tokens):
            g.add_(carry)
            carry = torch.mul(kept, g, out=carry)
            if (fresh := self.begins(t)) is not None:
                carry.masked_fill_(fresh, 0.0)
        return carry


    def through_decays(self, grads: Tensor, decay: Tensor, states: Tensor, before: Tensor, a: int) -> Tensor:
        """Turn the gradients [L, B, G, N, E] of the states into those of the exponents dt A, in place.

        before: the state before the chunk.
        """
        p = grads.mul_(decay)
        p[-1 if self._reverse else 0].mul_(before)
        later, earlier = (slice(-1), slice(1, None)) if self._reverse else (slice(1, None), slice(-1))
        p[later].mul_(states[earlier])
        if (fresh := self.begin_among(a, a + len(grads))) is not None:
            p.masked_fill_(fresh, 0.0)
        return p


def _over_states(x: Tensor, states: Tensor) -> Tensor:
    """Return the sums over n of x[..., n] states[..., n, e]: [L, B, G, N] and [L, B, G, N, E] to [L, B, G, E]."""
    return (x.unsqueeze(-2) @ states).squeeze(-2)


def _over_channels(states: Tensor, x: Tensor, memory: Tensor) -> Tensor:
    """Return the sums over e of states[..., n, e] x[..., e], [L, B, G, N]. A matrix product takes four times as long.

    memory: buffer like states.
    """
    return torch.mul(states, x.unsqueeze(-2), out=memory).sum(-1)


@custom_op("seqblocks::selective_scan")
def _scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor, resets: Tensor | None, softplus: bool, reverse: bool, for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the states between chunks, [chunks, B, G, N, E] flattened, or none of them.

    They are flattened because a compiler specialises on an axis of length 1, and there may be one chunk.
    """
    return _run(u, dt, A, B, C, D, z, dt_bias, h0, resets, softplus, reverse, for_backward, None, None)


def _run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor, resets: Tensor | None, softplus: bool, reverse: bool, for_backward: bool,
    steps: Tensor | None, outputs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same, and write the steps after the softplus and the outputs before the gate to the given tensors.

    steps, outputs: memory [S, B, G, E], or None if the backward pass computes them again.
    """
    with without_autocast(u.device.type):
        scan = _Tokens(u, dt, A, B, C, D, z, dt_bias, resets, softplus, reverse, 2, for_backward=for_backward)
        h = h0.transpose(2, 3).contiguous()
        y, between = torch.empty_like(u), h.new_empty(len(scan.chunks) if for_backward else 1, *h.shape)
        for at, (a, b) in enumerate(scan.chunks):
            before = between[at if for_backward else 0].copy_(h)
            chunk = scan.chunk(a, b)
            _, states, _ = scan.run(before, chunk, a, b)
            out, gate = scan.outputs(states, chunk, a, b), scan.gate(a, b)
            if steps is not None:
                steps[a:b] = chunk.step
            if outputs is not None:
                outputs[a:b] = out
            y[:, a:b] = (out if gate is None else out.mul_(F.silu(gate))).flatten(2).transpose(0, 1)
            h = states[0 if reverse else -1]
        between = between if for_backward else between[:0]
        return y, h.transpose(2, 3).clone(memory_format=torch.contiguous_format), between.flatten()


@_scan.register_fake
def _scan_fake(u, dt, A, B, C, D, z, dt_bias, h0, resets, softplus, reverse, for_backward):  # type: ignore[no-untyped-def]
    # computed without `_chunks`, because the length may be symbolic
    chunks = -(-u.shape[1] // _length(u, A.shape[-1], True)) if for_backward else 0
    return torch.empty_like(u), torch.empty_like(h0), h0.new_empty(chunks * h0.numel())


@custom_op("seqblocks::selective_scan_backward")
def _scan_backward(
    dy: Tensor, dlast: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, between: Tensor, resets: Tensor | None, softplus: bool, reverse: bool,
    steps: Tensor | None, outputs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of u, dt, A, B, C, D, z, dt_bias and the initial state; empty ones for absent inputs.

    steps, outputs: those that `_run` saved, or None.
    """
    with without_autocast(u.device.type):
        scan = _Tokens(u, dt, A, B, C, D, z, dt_bias, resets, softplus, reverse, 4, steps, outputs)
        du, ddt, dB, dC, dz = (_like(x, A) for x in (u, dt, B, C, z))
        carry = dlast.transpose(2, 3).clone(memory_format=torch.contiguous_format)
        dA, between = torch.zeros_like(scan.A), between.view(len(scan.chunks), *carry.shape)
        dD, dbias = (_like(x, A).zero_() for x in (D, dt_bias))
        dy = dy.transpose(0, 1).unflatten(-1, A.shape[:2])
        for before, (a, b) in zip(reversed(between.unbind(0)), reversed(scan.chunks), strict=True):
            chunk = scan.chunk(a, b)
            decay, states, scaled = scan.run(before, chunk, a, b)
            dout, gate = dy[a:b].to(A.dtype), scan.gate(a, b)
            if gate is not None:
                out = scan.outputs(states, chunk, a, b) * dout
                dz[:, a:b] = torch.ops.aten.silu_backward(out, gate).flatten(2).transpose(0, 1)
                dout = dout * F.silu(gate)
            grads, memory = scan.memory[2:, : b - a]
            torch.mul(dout.unsqueeze(-2), scan.C[a:b].unsqueeze(-1), out=grads)
            carry = scan.run_back(grads, decay, carry, a)
            dC[:, a:b] = _over_channels(states, dout, memory).transpose(0, 1)
            dB[:, a:b] = _over_channels(grads, scaled, memory).transpose(0, 1)
            through = _over_states(scan.B[a:b], grads)
            of_u = through * chunk.step
            if D is not None:
                dD += torch.mul(dout, chunk.u).sum((0, 1)).flatten()
                of_u.addcmul_(D.view(A.shape[:2]), dout)
            du[:, a:b] = of_u.flatten(2).transpose(0, 1)
            p = scan.through_decays(grads, decay, states, before, a)
            summed = torch.mul(p, scan.A, out=memory).sum(-2)
            of_dt = scan.through_softplus(summed.addcmul_(through, chunk.u), chunk)
            ddt[:, a:b] = of_dt.flatten(2).transpose(0, 1)
            if dt_bias is not None:
                dbias += of_dt.sum((0, 1)).flatten()
            dA += torch.mul(p, chunk.step.unsqueeze(-2), out=memory).sum((0, 1))
        return (
            du, ddt, dA.transpose(1, 2).contiguous(), dB, dC, dD, dz, dbias, carry.transpose(2, 3).contiguous()
        )


def _like(x: Tensor | None, other: Tensor) -> Tensor:
    """Return memory for the gradient of x, or an empty tensor if x is None."""
    return other.new_empty(0) if x is None else torch.empty_like(x)


@_scan_backward.register_fake
def _scan_backward_fake(  # type: ignore[no-untyped-def]
    dy, dlast, u, dt, A, B, C, D, z, dt_bias, between, resets, softplus, reverse, steps, outputs
):
    return *(_like(x, A) for x in (u, dt, A, B, C, D, z, dt_bias)), torch.empty_like(dlast)


def _save(ctx, inputs, output, steps=None, outputs=None):  # type: ignore[no-untyped-def]
    *tensors, h0, resets, softplus, reverse, _ = inputs
    ctx.save_for_backward(*tensors, h0, output[2], resets, steps, outputs)
    ctx.softplus, ctx.reverse = softplus, reverse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _forward(ctx, *inputs):  # type: ignore[no-untyped-def]
    """Run `_scan`, and save more than compiled code can, where sizes must not depend on a comparison of lengths."""
    u, _, A, _, _, _, z, *_, softplus, _, for_backward = inputs
    wanted = (softplus, z is not None) if for_backward and is_worth_saving(u) else (False, False)
    shape = (u.shape[1], u.shape[0], *A.shape[:2])
    saved = [A.new_empty(shape) if each else None for each in wanted]
    output = _run(*inputs, *saved)
    _save(ctx, inputs, output, *saved)
    return output


def _differentiate(ctx, dy, dlast, _):  # type: ignore[no-untyped-def]
    *tensors, h0, between, resets, steps, outputs = ctx.saved_tensors
    if not between.numel():  # The forward pass ran with for_backward=False.
        between = _scan(*tensors, h0, resets, ctx.softplus, ctx.reverse, True)[2]
    dy, dlast = filled(dy, tensors[0]), filled(dlast, h0)
    grads = _scan_backward(dy, dlast, *tensors, between, resets, ctx.softplus, ctx.reverse, steps, outputs)
    present = [None if x is None else grad for x, grad in zip((*tensors, h0), grads, strict=True)]
    return *present, None, None, None, None


_scan.register_autograd(_differentiate, setup_context=_save, forward=_forward)
_scan_backward.register_autograd(no_second_derivative("selective_scan", "torch"))


def scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor, resets: Tensor | None, softplus: bool, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the scan like `reference.scan`, for real A, B, C."""
    if u.numel() == 0:
        return selective_scan_reference.scan(u, dt, A, B, C, D, z, dt_bias, state, resets, softplus, reverse)
    u, dt, A, B, C, state = (x.contiguous() for x in (u, dt, A, B, C, state))
    tensors = (u, dt, A, B, C, D, z, dt_bias, state)
    for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    y, last, _ = _scan(*tensors, resets, softplus, reverse, for_backward)
    return y, last


def _can(**facts: Any) -> tuple[bool, str]:
    if facts.get("complex"):
        return False, "complex A: only supported by the reference implementation"
    return True, "chunk by chunk, on any device"


register("selective_scan", "torch", complete(scan), _can, by_hand=True)
