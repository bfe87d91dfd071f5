"""Centaurus: a bank of complex diagonal states as a long convolution (Pei et al., ICLR 2025).

B batch, S sequence, H features in, G features out, N state channels, M sub-states of a channel. With p = exp(dt A):

    u[n] = sum_i B[n, i] x[i]      s'[n, m] = p[n, m] s[n, m] + dt[n] u[n]      y[o] = sum_n C[o, n] sum_m E[n, m] Re s'

As a convolution, the layer has the kernel K[n, l] = sum_m E[n, m] Re p[n, m]^l, where l = 0 is the current token. The
mode determines how channels are connected to features:

    neck       B [N, H], C [G, N] dense
    pointwise  each sub-state is a channel of its own: B [N M, H], C [G, N M] dense, no E (S5-like)
    dws        channel n reads feature n and writes feature n: B [H], C [H] (S4D-like)
    full       channel n reads feature n mod H and writes feature n div H: B [G H], C [G H]

Implementations: `reference.py` (token by token), `torch.py` (chunks or FFT, whichever needs fewer operations),
`triton.py` (token by token in registers, with several segments of the sequence in parallel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.centaurus.reference import MODES, Bank
from seqblocks.kernels.positions import check_resets

__all__ = ["centaurus"]

dispatch.load_implementations("centaurus")


def centaurus(
    x: Tensor, A_real: Tensor, A_imag: Tensor, dt: Tensor, B: Tensor, C: Tensor, E: Tensor | None = None, *,
    mode: str = "neck",
    hold: str = "euler",
    state: Tensor | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    plan: str | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the layer over a sequence.

    x [B, S, H]; A_real, A_imag [N, M] (states decay only where A_real < 0); dt [N] > 0; B, C shaped by the mode;
    E [N, M], None in mode pointwise. hold: how the input is discretised: "euler" multiplies it by dt, "zoh"
    (zero-order hold) by (exp(dt A) - 1) / A, which is exact for an input that is constant over dt.
    state [B, N, M, 2] (pointwise: [B, N M, 1, 2]): real and imaginary parts, zeros if not given; with "zoh" the state
    is stored without the factor (exp(dt A) - 1) / A, which is applied when it is read. resets [B, S] bool: true where
    a token is the first of a new sequence, in scan order. reverse: scan from right to left.
    plan: "chunks", "project" or "fold" instead of the cheapest that fits (see torch.py).

    Returns y [B, S, G] in x's dtype and, with return_state, the state after the last token. Computes in float32,
    in float64 if any input is. Raises ValueError for shapes that do not fit, BackendError (see dispatch).
    """
    _check(x, A_real, A_imag, dt, B, C, E, mode, hold)
    double = any(t is not None and t.dtype == torch.float64 for t in (x, A_real, A_imag, dt, B, C, E))
    real = torch.float64 if double else torch.float32
    inputs = {
        "x": x, "A_real": A_real, "A_imag": A_imag, "dt": dt, "B": B, "C": C, "E": E, "state": state, "resets": resets,
    }
    dispatch.check_real("centaurus", inputs)
    with numerics.without_autocast(x.device.type):
        A_real, A_imag, dt, B, C = (t.to(real) for t in (A_real, A_imag, dt, B, C))
        bank = discretised(A_real, A_imag, dt, B, C, None if E is None else E.to(real), mode, hold)
        shape = (x.shape[0], *bank.decay.shape, 2)
        if state is not None and state.shape != shape:
            raise ValueError(f"centaurus expects a state {list(shape)}; got {list(state.shape)}")
        check_resets("centaurus", resets, x.shape[:2])
        run = dispatch.choose(
            "centaurus", backend, inputs,
            {"batch": x.shape[0], "length": x.shape[1], "channels": bank.decay.shape[0]},
            dtype=torch.float64 if double else x.dtype, mode=mode,
            channels=bank.decay.shape[0], substates=bank.decay.shape[1], features=x.shape[2],
            keeps=state is not None or return_state, resets=resets is not None, reverse=reverse,
        )
        y, last = run(
            bank, x, None if state is None else state.to(real), None if resets is None else resets.bool(),
            reverse, return_state, plan,
        )
    y = y.to(x.dtype)
    return (y, last) if return_state else y


def discretised(
    A_real: Tensor, A_imag: Tensor, dt: Tensor, B: Tensor, C: Tensor, E: Tensor | None, mode: str, hold: str
) -> Bank:
    """Return the layer in discrete time: exponents of the decay, input weights and read-out weights."""
    step = dt.unsqueeze(-1)
    decay, turn = step * A_real, step * A_imag
    read, across = torch.ones_like(decay) if E is None else E, torch.zeros_like(decay)
    if hold == "zoh":
        gain, phase = _zoh(A_real, A_imag, step, decay, turn)
        read, across = read * gain, read * phase
    if mode == "pointwise":
        decay, turn, read, across = (t.reshape(-1, 1) for t in (decay, turn, read, across))
        dt = dt.repeat_interleave(A_real.shape[1])
    if hold == "euler":
        B = B * (dt if B.dim() == 1 else dt.unsqueeze(-1))
    return Bank(mode, decay, turn, read, across, B, C)


def _zoh(A_real: Tensor, A_imag: Tensor, step: Tensor, decay: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the real and imaginary parts of (exp(dt A) - 1) / A, or dt where A is 0.

    Avoids cancellation for small dt A.
    """
    grown = torch.exp(decay)
    re = torch.expm1(decay) - 2 * grown * torch.sin(turn / 2) ** 2
    im = grown * torch.sin(turn)
    size = A_real**2 + A_imag**2
    none = size == 0
    size = size.masked_fill(none, 1.0)
    gain, phase = (re * A_real + im * A_imag) / size, (im * A_real - re * A_imag) / size
    return torch.where(none, step.expand_as(gain), gain), phase


def _check(
    x: Tensor, A_real: Tensor, A_imag: Tensor, dt: Tensor, B: Tensor, C: Tensor, E: Tensor | None, mode: str, hold: str
) -> None:
    if mode not in MODES:
        raise ValueError(f"centaurus: mode is one of {', '.join(MODES)}, not {mode!r}")
    if hold not in ("euler", "zoh"):
        raise ValueError(f"centaurus: hold is euler or zoh, not {hold!r}")
    if x.dim() != 3 or A_real.dim() != 2 or A_imag.shape != A_real.shape or dt.shape != A_real.shape[:1]:
        raise ValueError(
            "centaurus expects x [B, S, H], A_real and A_imag [N, M], dt [N]; "
            f"got {list(x.shape)}, {list(A_real.shape)}, {list(A_imag.shape)}, {list(dt.shape)}"
        )
    H, (N, M) = x.shape[2], A_real.shape
    if (E is None) != (mode == "pointwise") or (E is not None and E.shape != (N, M)):
        expected = "no E" if mode == "pointwise" else f"E {[N, M]}"
        raise ValueError(f"centaurus, mode {mode}, expects {expected}; got {'none' if E is None else list(E.shape)}")
    channels = N * M if mode == "pointwise" else N
    if mode in ("neck", "pointwise"):
        fits = B.shape == (channels, H) and C.dim() == 2 and C.shape[1] == channels
        expected = f"B {[channels, H]} and C [G, {channels}]"
    else:
        fits = B.shape == C.shape == (N,) and (N == H if mode == "dws" else H > 0 and N % H == 0)
        expected = f"B and C [{H}]" if mode == "dws" else f"B and C [G {H}]"
        expected += f" for A [{H}, M]" if mode == "dws" else f" for A [G {H}, M]"
    if not fits:
        raise ValueError(
            f"centaurus, mode {mode}, expects {expected}; got B {list(B.shape)}, C {list(C.shape)}, A {[N, M]}"
        )
