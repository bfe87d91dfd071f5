"""Reference implementation of the associative scan: one element after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqblocks.kernels.dispatch import always, register


def run(combine: Callable[[list[Tensor], list[Tensor]], list[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    """Return the states after each element, given leaves [B, S, ...]."""
    first = [leaf[:, :1] for leaf in leaves]
    if torch.compiler.is_exporting():
        return _as_one_node(combine, first, leaves)
    states = [first]
    for t in range(1, leaves[0].shape[1]):
        states.append(combine(states[-1], [leaf[:, t : t + 1] for leaf in leaves]))
    return [torch.cat(leaf, 1) for leaf in zip(*states, strict=True)]


def _as_one_node(
    combine: Callable[[list[Tensor], list[Tensor]], list[Tensor]], first: list[Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    """Run `run` as one node of an exported program, which then supports any length."""
    from torch._higher_order_ops.scan import scan

    def one(state: list[Tensor], token: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        new = combine(state, [x.unsqueeze(1) for x in token])
        return new, [x.squeeze(1).clone() for x in new]

    if isinstance(leaves[0].shape[1], int) and leaves[0].shape[1] == 1:
        return leaves
    rest = [x.transpose(0, 1)[1:] for x in leaves]
    _, states = scan(one, [x.clone() for x in first], rest)
    return [torch.cat([x, y.transpose(0, 1)], 1) for x, y in zip(first, states, strict=True)]


register("associative_scan", "reference", run, always("the sequential definition runs wherever torch does"))
