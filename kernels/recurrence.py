"""Recurrences token by token, as a Python loop or as one `scan` node of an exported program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.resets import along

States = tuple[Tensor, ...]
Cell = Callable[[States, list[Any]], tuple[Tensor, States]]  # (state, inputs of a token) -> (its output, new state)


def token_by_token(
    cell: Cell, state: States, inputs: tuple[Tensor | None, ...], resets: Tensor | None, reverse: bool
) -> tuple[Tensor, States]:
    """Run a cell over a sequence and return its outputs [B, S, ...] and the last state, a tuple of [B, ...].

    inputs: tensors [B, S, ...] or None, S >= 1. resets [B, S]: true where the state is zero before the token. reverse:
    run from the last token to the first. An exported program contains one node for the loop, for any length; an
    unrolled loop would fix the length.
    """
    S = next(x.shape[1] for x in inputs if x is not None)
    if torch.compiler.is_exporting() and not (isinstance(S, int) and S == 1):
        return _as_one_node(cell, state, inputs, resets, reverse)
    outputs = []
    for t in reversed(range(S)) if reverse else range(S):
        if resets is not None:
            state = _restarted(state, resets[:, t])
        y, state = cell(state, [None if x is None else x[:, t] for x in inputs])
        outputs.append(y)
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


def _restarted(state: States, fresh: Tensor) -> States:
    return tuple(x.masked_fill(along(fresh, x), 0.0) for x in state)


def _as_one_node(
    cell: Cell, state: States, inputs: tuple[Tensor | None, ...], resets: Tensor | None, reverse: bool
) -> tuple[Tensor, States]:
    from torch._higher_order_ops.scan import scan

    present = [x is not None for x in inputs]
    tokens = [x.transpose(0, 1) for x in (*inputs, resets) if x is not None]

    def one(state: list[Tensor], token: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        rest = iter(token)
        x = [next(rest) if given else None for given in present]
        if resets is not None:
            state = list(_restarted(tuple(state), next(rest)))
        y, new = cell(tuple(state), x)
        return list(new), y.clone()  # `scan` does not allow outputs and states to alias.

    last, y = scan(one, [x.clone() for x in state], tokens, reverse=reverse)
    return y.transpose(0, 1), tuple(last)
