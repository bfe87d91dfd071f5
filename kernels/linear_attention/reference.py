"""Reference implementation of linear attention: one token after the other.

B batch, S sequence, H heads of q and k, HV heads of values, K width of keys, V width of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.numerics import empty_with_gradients, without_autocast
from seqblocks.kernels.recurrence import States, token_by_token
from seqblocks.kernels.resets import SHARED, STATE, TOKENS, contained

KINDS = (TOKENS,) * 7 + (SHARED, STATE)  # of q, k, v, decay, beta, a, b, bonus, state


def step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    bonus: Tensor | None, state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return o [B, HV, V] and the next state [B, HV, K, V] for one token.

    q (scaled), k, a, b [B, HV, K], v [B, HV, V], decay [B, HV (, K)], beta [B, HV], bonus [HV, K].
    """

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x.unsqueeze(-1) * y.unsqueeze(-2)

    def read(x: Tensor, state: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * state).sum(-2)

    before = state
    if decay is not None:
        state = (decay if decay.dim() == 3 else decay.unsqueeze(-1)).exp().unsqueeze(-1) * state
    if a is not None and b is not None:
        state = state + outer(b, read(a, before)) + outer(k, v)
    elif beta is not None:
        state = state + outer(k, beta.unsqueeze(-1) * (v - read(k, state)))
    else:
        state = state + outer(k, v)
    if bonus is not None:
        return read(q, before) + (q * bonus * k).sum(-1, keepdim=True) * v, state
    return read(q, state), state


def run(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    bonus: Tensor | None, state: Tensor | None, resets: Tensor | None, reverse: bool, scale: float, normalize: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, S, HV, V] and the last state, in float32, or in float64 if any tensor is.

    Shapes as in `linear_attention`; with `normalize`, v and the state have a last column for z.
    """
    tensors = in_one_dtype(q, k, v, decay, beta, a, b, bonus, state)

    def whole(*x: Tensor | None) -> tuple[Tensor, Tensor]:
        return read_out(scan(x, resets, reverse, scale), normalize)

    unread = None if bonus is None else decay  # with a bonus, a token's output does not depend on its own decay
    y, last = contained(whole, tensors, KINDS, resets, reverse, unread)
    return y, last


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor, *optional: Tensor | None) -> tuple[Any, ...]:
    """Convert all tensors to float32, or to float64 if any is; the last one, the state, defaults to zeros."""
    *others, state = optional
    given = (q, k, v, *(x for x in (*others, state) if x is not None))
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    if state is None:
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    return tuple(None if x is None else x.to(dtype) for x in (q, k, v, *others, state))


def read_out(result: tuple[Tensor, Tensor], normalize: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the state; with `normalize`, divide the output by its last column."""
    y, last = result
    return (y[..., :-1] / (y[..., -1:] + 1e-10) if normalize else y), last


def scan(
    tensors: tuple[Any, ...], resets: Tensor | None, reverse: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the recurrence alone. `run` also keeps nonfinite values out of gradients across a reset."""
    q, k, v, *others, bonus, state = tensors
    groups = v.shape[2] // q.shape[2]
    if q.shape[1] == 0:
        return empty_with_gradients(v, *tensors[:-1]), state
    with without_autocast(q.device.type):
        q, k = (x.repeat_interleave(groups, 2) for x in (scale * q, k))
        bonus = None if bonus is None else bonus.repeat_interleave(groups, 0)

        def token(state: States, x: list[Any]) -> tuple[Tensor, States]:
            q, k, v, decay, beta, a, b = x
            y, new = step(q, k, v, decay, beta, a, b, bonus, state[0])
            return y, (new,)

        y, last = token_by_token(token, (state,), (q, k, v, *others), resets, reverse)
    return y, last[0]


register("linear_attention", "reference", run, always("the recurrent definition runs wherever torch does"))
