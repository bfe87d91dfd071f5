"""The selective scan by its definition, token by token (Mamba, arXiv:2312.00752, eq. 2-4 with exact decay).

B batch, S sequence, G groups of E / G channels that share B and C, N states of a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained

Pair = tuple[Tensor, Tensor]


def complete(scan: Callable[..., Pair]) -> Callable[..., Pair]:
    """Return the run function of an implementation, given its bare scan.

    It converts matrices and states to the dtype of the scan, groups their channels, and handles dead tokens.
    """

    def run(
        u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        dt_bias: Tensor | None, softplus: bool, state: Tensor | None, resets: Tensor | None, reverse: bool,
    ) -> Pair:
        tensors = (u, dt, A, B, C, D, z, dt_bias, state)
        kinds = [TOKENS, TOKENS, SHARED, *(SHARED if x.dim() == 2 else TOKENS for x in (B, C))]
        kinds += [SHARED, TOKENS, SHARED, STATE]
        options: dict[str, Any] = {"softplus": softplus, "resets": resets, "reverse": reverse}
        y, last = contained(lambda *x: grouped(*x, **options), tensors, kinds, resets, reverse)
        return y, last

    def grouped(
        u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        dt_bias: Tensor | None, state: Tensor | None, *, softplus: bool, resets: Tensor | None, reverse: bool,
    ) -> Pair:
        E, N = A.shape
        double = any(x.dtype in (torch.float64, torch.complex128) for x in (u, dt, A, B, C))
        real = torch.float64 if double else torch.float32
        kind = (torch.complex128 if double else torch.complex64) if A.is_complex() else real
        groups = groups_of(B, C)
        if any(x.dim() == 2 for x in (B, C)):
            groups = E  # A constant matrix is different for each channel.
        h = u.new_zeros(u.shape[0], E, N, dtype=kind) if state is None else state.to(kind)
        y, last = scan(
            u,
            dt,
            A.to(kind).view(groups, E // groups, N),
            per_token(B.to(kind), u.shape, groups),
            per_token(C.to(kind), u.shape, groups),
            None if D is None else D.to(real),
            z,
            None if dt_bias is None else dt_bias.to(real),
            h.view(-1, groups, E // groups, N),
            None if resets is None else resets.bool(),
            softplus,
            reverse,
        )
        return y, last.flatten(1, 2)

    return run


def groups_of(B: Tensor, C: Tensor) -> int:
    """Return the number of groups: the larger of those of B and C. Each group of the other is shared by several."""
    return max(x.shape[2] if x.dim() == 4 else 1 for x in (B, C))


def per_token(x: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """Return a constant, per-token or grouped matrix as [B, S, G, N]. shape: that of u, [B, S, E]."""
    if x.dim() == 2:
        return x.expand(shape[0], shape[1], *x.shape)
    if x.dim() == 3:
        return x.unsqueeze(2).expand(-1, -1, groups, -1)
    return x.repeat_interleave(groups // x.shape[2], 2) if x.shape[2] != groups else x


def scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    state: Tensor, resets: Tensor | None, softplus: bool, reverse: bool,
) -> Pair:
    """Return y [B, S, E] in the dtype of u, and the last state.

    u, dt, z [B, S, E], A [G, E/G, N], B, C [B, S, G, N], D, dt_bias [E], state [B, G, E/G, N]. A, B, C and
    the state may be complex. All but u, dt and z have the dtype in which the scan is computed.
    """
    real = A.real.dtype
    step = dt.to(real) if dt_bias is None else dt.to(real) + dt_bias
    x, step = (each.unflatten(-1, A.shape[:2]) for each in (u.to(real), F.softplus(step) if softplus else step))
    y, last = states(x, step, A, B, C, state, resets, reverse)
    y = y.flatten(2)
    if D is not None:
        y = torch.addcmul(y, D, u.to(real))
    if z is not None:
        y = y * F.silu(z.to(real))
    return y.to(u.dtype), last


def states(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, resets: Tensor | None, reverse: bool
) -> Pair:
    """Run the scan without softplus, skip and gate. u, dt and y are [B, S, G, E/G]."""
    with without_autocast(u.device.type):
        if u.shape[1] == 0:
            return empty_with_gradients(u, u, dt, *(x.real if x.is_complex() else x for x in (A, B, C))), state

        def token(state: States, x: list[Tensor]) -> tuple[Tensor, States]:
            u, dt, B, C = (each.unsqueeze(axis) for each, axis in zip(x, (-1, -1, -2, -2), strict=True))
            h = torch.exp(dt * A) * state[0] + dt * u * B
            y = (h * C).sum(-1)
            return 2 * y.real if y.is_complex() else y, (h,)

        y, last = token_by_token(token, (state,), (u, dt, B, C), resets, reverse)
    return y, last[0]


register("selective_scan", "reference", complete(scan), always("the recurrent definition runs wherever torch does"))
