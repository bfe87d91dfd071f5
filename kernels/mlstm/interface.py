"""The mLSTM: a matrix memory with exponential or sigmoid input gate (arXiv:2405.04517; sigmoid: arXiv:2503.14376).

B batch, S sequence, H heads, DK width of query and key, DV width of value.

Per head and token, with ls = log sigmoid and q~ = q / sqrt(DK):

    m' = max(ls(f) + m, i)          a = exp(ls(f) + m - m')          b = exp(i - m')
    C' = a C + b k v^T              n' = a n + b k
    h  = q~ C' / (max(|q~ . n'|, exp(-m')) + eps)

Implementations: `reference.py` (token by token), `torch.py` (chunkwise), `triton`. Gradients are those of this
definition: they include the derivative of the normaliser, and flow into and out of states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.dispatch.self_check import few_heads
from seqblocks.kernels.mlstm.reference import MLSTMState

__all__ = ["MLSTMState", "mlstm", "mlstm_init_state", "mlstm_step"]

dispatch.load_implementations("mlstm")

INPUT_GATES = ("exp", "sigmoid")


def mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *,
    state: MLSTMState | tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, MLSTMState]:
    """Run the cell over a sequence.

    q, k [B, S, H, DK] (q is multiplied by 1/sqrt(DK) inside), v [B, S, H, DV], i, f [B, S, H]: gate pre-activations.
    S may be any number, including 0; sequences are not padded.
    state: C [B, H, DK, DV], n [B, H, DK], m [B, H]; zeros if not given.
    resets [B, S] bool: true where a token is the first of a new sequence, in the order of the scan; the state is
    all zeros, m included, before that token.
    reverse: scan from right to left; the given state precedes the rightmost token, the returned one follows the
    leftmost.
    chunk_size: tokens per chunk of the torch implementation (default: equal chunks of up to 64, or one); it affects
    only rounding and speed.
    input_gate: "exp", or "sigmoid" (m stays 0). normalize=False: do not divide h; only for the sigmoid gate.

    Returns h [B, S, H, DV] in the dtype of v, and with return_state also the state after the last token.
    Gates, stabiliser and state are computed in float32, or in float64 if any of q, k, v, i, f is float64.
    The torch and Triton implementations have first derivatives only; "reference" has derivatives of any order.

    Raises ValueError for wrong shapes or unknown options, BackendError (see dispatch).
    """
    _check(q, k, v, i, f, resets, chunk_size, input_gate, normalize)
    dtype = _state_dtype(q, k, v, i, f)
    if state is not None:
        state = checked_state(state, (q.shape[0], *q.shape[2:], v.shape[-1]), dtype)
    run = dispatch.choose(
        "mlstm", backend, _named(q, k, v, i, f, state, resets),
        {"batch": q.shape[0] * q.shape[2], "length": q.shape[1]}, dtype=numerics.computed_in(q, k, v, i, f),
        head_dims=(q.shape[-1], v.shape[-1]), input_gate=input_gate, normalize=normalize, resets=resets is not None,
        reverse=reverse, return_state=return_state, heads=few_heads(q.shape[2]),
    )
    h, last = run(
        q, k, v, i.to(dtype), f.to(dtype), state, None if resets is None else resets.bool(), reverse=reverse,
        chunk_size=chunk_size, eps=eps, input_gate=input_gate, normalize=normalize, return_state=return_state,
    )
    return (h, last) if return_state else h


def mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | tuple[Tensor, Tensor, Tensor], *,
    eps: float = 1e-6, input_gate: str = "exp", normalize: bool = True, backend: str | None = None,
) -> tuple[Tensor, MLSTMState]:
    """Run one token, like `mlstm` with S = 1. Returns h [B, H, DV] in the dtype of v, and the new state.

    q, k [B, H, DK], v [B, H, DV], i, f [B, H]. Raises ValueError and BackendError like `mlstm`.
    """
    h, last = mlstm(
        *(x.unsqueeze(1) for x in (q, k, v, i, f)), state=state, return_state=True, eps=eps, input_gate=input_gate,
        normalize=normalize, backend=backend,
    )
    assert isinstance(last, MLSTMState)
    return h.squeeze(1), last


def mlstm_init_state(
    batch: int, heads: int, dk: int, dv: int, *,
    device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
) -> MLSTMState:
    """Return the state before the first token: zeros."""
    return MLSTMState(
        torch.zeros(batch, heads, dk, dv, device=device, dtype=dtype),
        torch.zeros(batch, heads, dk, device=device, dtype=dtype),
        torch.zeros(batch, heads, device=device, dtype=dtype),
    )


def _state_dtype(*inputs: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _check(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    resets: Tensor | None, chunk_size: int | None, input_gate: str, normalize: bool,
) -> None:
    if q.dim() != 4 or q.shape != k.shape or v.shape[:-1] != q.shape[:-1] or v.dim() != 4:
        raise ValueError(
            "mlstm expects q, k [B, S, H, DK] and v [B, S, H, DV]; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if i.shape != q.shape[:-1] or f.shape != q.shape[:-1]:
        raise ValueError(
            f"mlstm expects gates i, f [B, S, H] = {list(q.shape[:-1])}; got i {list(i.shape)}, f {list(f.shape)}"
        )
    if resets is not None and resets.shape != q.shape[:2]:
        raise ValueError(f"mlstm expects resets [B, S] = {list(q.shape[:2])}; got {list(resets.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
    if input_gate not in INPUT_GATES:
        raise ValueError(f"unknown input_gate {input_gate!r}; choose from {', '.join(INPUT_GATES)}")
    if not normalize and input_gate == "exp":
        raise ValueError("normalize=False needs input_gate='sigmoid': an exponential gate overflows without it")


def _named(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: MLSTMState | None, resets: Tensor | None
) -> dict[str, Tensor | None]:
    C, n, m = (None, None, None) if state is None else state
    return {"q": q, "k": k, "v": v, "i": i, "f": f, "C": C, "n": n, "m": m, "resets": resets}


def checked_state(
    state: MLSTMState | tuple[Tensor, Tensor, Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> MLSTMState:
    """Return a state in a dtype. Raises ValueError for other shapes than those of the sizes B, H, DK and DV."""
    B, H, DK, DV = sizes
    shapes = ((B, H, DK, DV), (B, H, DK), (B, H))
    if len(state) != 3 or any(s.shape != shape for s, shape in zip(state, shapes, strict=True)):
        raise ValueError(
            f"mlstm expects a state C, n, m of shapes {', '.join(str(list(s)) for s in shapes)}; "
            f"got {', '.join(str(list(s.shape)) for s in state)}"
        )
    dispatch.check_real("mlstm", dict(zip(MLSTMState._fields, state, strict=True)))
    return MLSTMState(*(s.to(dtype) for s in state))
