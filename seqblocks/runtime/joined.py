"""Steps of one op on different inputs that run as one step on their joined features.

A mixer may convolve its queries, keys and values separately. For few features, calling each function takes longer than
copying their inputs and states next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seqblocks.op import Op

MOST = 1 << 12  # Up to so many features of all tokens, copying them takes less time than separate calls.
split_copy: Any = torch.split_with_sizes_copy  # according to torch's annotations, it returns None


def prepare_joined_steps(
    op: Op, tables: Sequence[dict[str, Tensor]], widths: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return a function that computes one token of steps with the same op, or None if the op prepares none.

    tables: the parameters of each step; widths: the features of each output. It takes and returns the values of all
    steps next to each other: each part of the state and then the inputs; the outputs, then each part of the state.
    """
    separate = [op.prepare_step(table) for table in tables]
    joined = op.prepare_step({name: torch.cat([table[name] for table in tables]) for name in tables[0]})
    if joined is None or None in separate:
        return None
    count, total, sizes = len(tables), sum(widths), tuple(widths)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        if given[-1].shape[0] * total > MOST:
            each = (_as_tuple(one(*given[at::count])) for at, one in enumerate(separate))  # type: ignore[misc]
            return tuple(chain.from_iterable(zip(*each, strict=True)))
        whole = [torch.cat(given[at : at + count], -1) for at in range(0, len(given), count)]
        y, *states = _as_tuple(joined(*whole))
        made = [*y.split_with_sizes(sizes, -1)]
        for state in states:
            made += split_copy(state, sizes, -1)
        return tuple(made)

    return run


def _as_tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
