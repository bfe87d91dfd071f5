"""The selective scan of Mamba (arXiv:2312.00752): a diagonal recurrence with token-dependent step, input and output.

B batch, S sequence, E channels, G groups of channels, N states of a channel. With dt = softplus(dt + dt_bias):

    h' = exp(dt A) h + dt B u          y = sum_n C h' + D u          y * silu(z)

The decay is discretised exactly, the input by Euler's method. With complex A, y is twice the real part of the sum.

Implementations: `reference.py` (the definition), `torch.py` (chunk by chunk), `triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch
from seqblocks.kernels.positions import check_resets
from seqblocks.kernels.selective_scan.reference import groups_of

__all__ = ["selective_scan"]

dispatch.load_implementations("selective_scan")


def selective_scan(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    state: Tensor | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan over a sequence.

    u, dt, z [B, S, E]; A [E, N], real (negative) or complex; D, dt_bias [E].
    B, C: [E, N] constant, [B, S, N] per token, or [B, S, G, N] per token and group. If their numbers of groups differ,
    one must divide the other. state [B, E, N]: zeros if not given. B, C and the state may be complex if A is.
    resets [B, S] bool: true where a token is the first of a new sequence, in the order of the scan.
    reverse: scan from right to left.

    Returns y [B, S, E] in the dtype of u, and with return_state also the state after the last token. The scan is
    computed in float32, or in float64 if any input is float64 (with complex A: complex64, complex128). The torch and
    Triton implementations have first derivatives only. Raises ValueError for wrong shapes, BackendError (see dispatch).
    """
    _check(u, dt, A, B, C, D, z, dt_bias, state, resets)
    double = any(x.dtype in (torch.float64, torch.complex128) for x in (u, dt, A, B, C))
    inputs = {
        "u": u, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias, "state": state, "resets": resets,
    }
    groups = groups_of(B, C)
    width = u.shape[2] // groups
    run = dispatch.choose(
        "selective_scan", backend, inputs,
        {"batch": u.shape[0], "length": u.shape[1], "groups": groups, "width": width},
        may_be_complex=("A", "B", "C", "state") if A.is_complex() else (),
        dtype=torch.float64 if double else u.dtype, states=A.shape[1], width=width, groups=groups,
        constant=(B.dim() == 2, C.dim() == 2), softplus=dt_softplus,
        complex=any(x.is_complex() for x in (A, B, C)), resets=resets is not None, reverse=reverse,
        token=not torch.compiler.is_compiling() and u.shape[1] == 1,
    )
    y, last = run(u, dt, A, B, C, D, z, dt_bias, dt_softplus, state, resets, reverse)
    return (y, last) if return_state else y


def _check(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, state: Tensor | None, resets: Tensor | None,
) -> None:
    if u.dim() != 3 or dt.shape != u.shape or A.dim() != 2 or A.shape[0] != u.shape[2]:
        raise ValueError(
            "selective_scan expects u, dt [B, S, E] and A [E, N]; "
            f"got u {list(u.shape)}, dt {list(dt.shape)}, A {list(A.shape)}"
        )
    batch, S, E = u.shape
    N = A.shape[1]
    for name, x in (("B", B), ("C", C)):
        grouped = x.dim() == 4 and x.shape[:2] == (batch, S) and x.shape[3] == N and E % max(1, x.shape[2]) == 0
        # The number of dimensions comes first, because an exporter turns each comparison of sizes into a guard.
        if not (grouped or (x.dim() == 2 and x.shape == (E, N)) or (x.dim() == 3 and x.shape == (batch, S, N))):
            raise ValueError(
                f"selective_scan expects {name} [{E}, {N}], [{batch}, {S}, {N}] or [{batch}, {S}, G, {N}]; "
                f"got {list(x.shape)}"
            )
    if any(x.dim() == 4 and groups_of(B, C) % x.shape[2] for x in (B, C)):
        raise ValueError(f"selective_scan expects the number of groups of B or C to divide the other; "
                         f"got {B.shape[2]} and {C.shape[2]}")
    for name, given, shape in (("D", D, [E]), ("z", z, [batch, S, E]), ("dt_bias", dt_bias, [E])):
        if given is not None and given.shape != tuple(shape):
            raise ValueError(f"selective_scan expects {name} {shape}; got {list(given.shape)}")
    if state is not None and state.shape != (batch, E, N):
        raise ValueError(f"selective_scan expects a state [{batch}, {E}, {N}]; got {list(state.shape)}")
    check_resets("selective_scan", resets, u.shape[:2])
