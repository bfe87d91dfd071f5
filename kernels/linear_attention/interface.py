"""Linear attention and delta rules: a matrix state that is decayed, corrected, written and read at each token.

B batch, S sequence, H heads of queries and keys, HV heads of values (a multiple of H; value head j uses key head
j H // HV), K width of keys, V width of values. Per value head and token, with g the log decay and S [K, V] the state:

    add      S' = e^g S + k v^T
    delta    S' = e^g S + beta k (v - (e^g S)^T k)^T            DeltaNet (arXiv:2406.06484), gated: arXiv:2412.06464
    dplr     S' = (Diag(e^g) + b a^T) S + k v^T                 RWKV-7 (arXiv:2503.14456)

    o = scale q^T S'      with a bonus u, read before the write: o = scale q^T (S + Diag(u) k v^T)   RWKV-6

The decay is a scalar per head (RetNet, Mamba-2, Gated DeltaNet), a vector over key features (GLA, KDA), or absent.
With `normalize`, o is divided by scale q . z + 1e-10, where z is the sum of the keys with the same decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqblocks.kernels import dispatch, numerics
from seqblocks.kernels.dispatch.self_check import few_heads

__all__ = ["linear_attention"]

dispatch.load_implementations("linear_attention")


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    state: Tensor | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    q, k [B, S, H, K], v [B, S, HV, V]. decay: log decay, at most 0, [B, S, HV] or [B, S, HV, K]. The rule is add;
    with beta [B, S, HV] it is delta, with a and b [B, S, HV, K] dplr. bonus [H, K]: for the rule add only.
    scale: factor of q (default 1 / sqrt(K)). normalize: for the rule add without a bonus.
    state: S [B, HV, K, V], zeros if not given; with `normalize` [B, HV, K, V + 1], whose last column is z.
    resets [B, S] bool: true where a token is the first of a new sequence, in scan order; the state before it is zero.
    reverse: scan from right to left. chunk_size: tokens per chunk of the torch implementation (default 64,
    on a CPU 32, 16 for delta and dplr); it changes rounding and speed only. It is rounded down to a power of 2.

    Returns o [B, S, HV, V] in v's dtype, and with return_state the state after the last token.
    The state and all sums are float32, float64 if any input is. A decay of -inf clears the state.
    The torch implementation has first derivatives only.

    Raises ValueError for shapes and options that do not fit, BackendError (see dispatch).
    """
    _check(q, k, v, decay, beta, a, b, bonus, normalize, resets, chunk_size)
    tensors = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "a": a, "b": b, "bonus": bonus}
    given = [x for x in tensors.values() if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    B, HV, K, columns = q.shape[0], v.shape[2], q.shape[3], v.shape[3] + normalize
    if state is not None and state.shape != (B, HV, K, columns):
        what = "[B, HV, K, V + 1], since `normalize` adds a column for z" if normalize else "[B, HV, K, V]"
        raise ValueError(f"linear_attention expects a state {what} = {[B, HV, K, columns]}; got {list(state.shape)}")
    run = dispatch.choose(
        "linear_attention", backend, {**tensors, "state": state, "resets": resets},
        {"batch": B * HV, "length": q.shape[1]}, dtype=numerics.computed_in(*given),
        rule="dplr" if a is not None else "delta" if beta is not None else "add", resets=resets is not None,
        reverse=reverse, widths=(K, columns), bonus=bonus is not None,
        decay=None if decay is None else "head" if decay.dim() == 3 else "key", heads=few_heads(q.shape[2]),
        group=HV // max(1, q.shape[2]),
    )  # fmt: skip
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
    y, last = run(
        q, k, values, decay, beta, a, b, bonus, None if state is None else state.to(dtype),
        None if resets is None else resets.bool(), reverse, K**-0.5 if scale is None else scale, normalize,
        chunk_size,
    )
    return (y.to(v.dtype), last) if return_state else y.to(v.dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    bonus: Tensor | None, normalize: bool, resets: Tensor | None, chunk_size: int | None,
) -> None:
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and v.shape[:2] == q.shape[:2]
    if not fits or q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(
            "linear_attention expects q, k [B, S, H, K] and v [B, S, HV, V], HV a multiple of H; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    per_head, per_key = v.shape[:3], (*v.shape[:3], q.shape[3])
    shapes_by_name = {"decay": (decay, (per_head, per_key)), "beta": (beta, (per_head,)), "a": (a, (per_key,))}
    shapes_by_name |= {"b": (b, (per_key,)), "bonus": (bonus, (q.shape[2:],))}
    for name, (x, shapes) in shapes_by_name.items():
        if x is not None and tuple(x.shape) not in [tuple(shape) for shape in shapes]:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"linear_attention expects {name} {expected}; got {list(x.shape)}")
    if (a is None) != (b is None):
        raise ValueError("linear_attention: a and b go together")
    if beta is not None and a is not None:
        raise ValueError("linear_attention: beta selects the delta rule, a and b the rule dplr; give only one of them")
    if (bonus is not None or normalize) and not (beta is None and a is None):
        raise ValueError("linear_attention: a bonus and `normalize` are for the rule add, without beta, a and b")
    if bonus is not None and normalize:
        raise ValueError("linear_attention: give a bonus or `normalize`, not both")
    if resets is not None and resets.shape != q.shape[:2]:
        raise ValueError(f"linear_attention expects resets [B, S] = {list(q.shape[:2])}; got {list(resets.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
