"""One token of a stream in one launch: u, dt, z, y [B, E]; A [E, N]; B, C [B, G, N]; D, bias [E]; h, last [B, E, N].

A program processes BE channels of a sequence and all their states, which are adjacent in memory.
"""

from __future__ import annotations

from typing import no_type_check

from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.triton_common import ceil_div, exp, silu, softplus, tl


@common.kernel()
@no_type_check
def token(
    u, dt, A, B, C, D, z, bias, h, y, last, E, N, W, us, ds, bs, cs, zs,
    SOFTPLUS: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
):
    """Run one token. W channels share a group of B and C, whose row strides are bs and cs; h None: zeros."""
    b = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BN)
    has = e < E
    own = has[:, None] & (n < N)[None, :]
    cell = e[:, None] * N + n[None, :]
    group = (e // W)[:, None] * N + n[None, :]
    x = tl.load(u + b * us + e, has, 0.0).to(tl.float32)
    step = tl.load(dt + b * ds + e, has, 0.0).to(tl.float32)
    if bias is not None:
        step += tl.load(bias + e, has, 0.0).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    state = (step * x)[:, None] * tl.load(B + b * bs + group, own, 0.0).to(tl.float32)
    if h is not None:
        decay = exp(step[:, None] * tl.load(A + cell, own, 0.0))
        state += decay * tl.load(h + b * E * N + cell, own, 0.0)
    tl.store(last + b * E * N + cell, state, own)
    out = tl.sum(state * tl.load(C + b * cs + group, own, 0.0).to(tl.float32), 1)
    if D is not None:
        out += tl.load(D + e, has, 0.0).to(tl.float32) * x
    if z is not None:
        out *= silu(tl.load(z + b * zs + e, has, 0.0).to(tl.float32))
    tl.store(y + b * E + e, out.to(y.dtype.element_ty), has)


def of_token(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    h: Tensor | None, softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Return y and the state after one token. u, dt, z [B, 1, E]; B, C [B, 1, G, N]; A and h are float32."""
    batch, _, E = u.shape
    N, W = A.shape[1], E // B.shape[2]
    u, dt, z = (None if x is None else common.last_contiguous(x[:, 0]) for x in (u, dt, z))  # type: ignore[assignment]
    B, C = (_row(x) for x in (B, C))
    h, A, D, bias = (None if x is None else x.contiguous() for x in (h, A, D, bias))  # type: ignore[assignment]
    y, last = u.new_empty(batch, 1, E), A.new_empty(batch, E, N)
    BN = common.power_of_two(N)
    BE = min(64, common.power_of_two(W), max(1, 1024 // BN))
    with common.on(u):
        token[batch, ceil_div(E, BE)](
            u, dt, A, B, C, D, z, bias, h, y, last, E, N, W,
            u.stride(0), dt.stride(0), B.stride(0), C.stride(0), 0 if z is None else z.stride(0),
            SOFTPLUS=softplus, BE=BE, BN=BN, num_warps=common.warps(BE * BN, 8),
        )  # fmt: skip
    return y, last


def _row(x: Tensor) -> Tensor:
    """Return x [B, 1, G, N] with the groups of a sequence contiguous."""
    return x if x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) else x.contiguous()
