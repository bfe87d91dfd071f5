"""Steps of one op on different inputs that run as one step on their joined features.

A mixer may convolve its queries, keys and values separately. For few features, calling each function takes longer than
copying their inputs and states next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seqblocks.op import Op
from seqblocks.token_function import TokenFunction

Run = Callable[..., Any]
MAX_COPIED_FEATURES = 1 << 12  # features of all tokens: copying more of them takes longer than separate calls
split_copy: Any = torch.split_with_sizes_copy  # according to torch's annotations, it returns None


def prepare_joined_steps(op: Op, tables: Sequence[dict[str, Tensor]], widths: Sequence[int]) -> TokenFunction | None:
    """Return a function that computes one token of steps with the same op, or None if the op prepares none.

    tables: the parameters of each step; widths: the features of each output. It takes and returns the values of all
    steps next to each other: each part of the state and then the inputs; the outputs, then each part of the state.
    """
    separate = [run for table in tables if (run := op.prepare_token(table)) is not None]
    joined = op.prepare_token({name: torch.cat([table[name] for table in tables]) for name in tables[0]})
    if joined is None or len(separate) < len(tables):
        return None
    count, total, sizes = len(tables), sum(widths), tuple(widths)

    def apply(joined: Run, separate: Sequence[Run], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if given[-1].shape[0] * total > MAX_COPIED_FEATURES:
            return _in_turn(separate, given)
        whole = [torch.cat(given[at : at + count], -1) for at in range(0, len(given), count)]
        y, *states = _as_tuple(joined(*whole))
        made = [*y.split_with_sizes(sizes, -1)]
        for state in states:
            made += split_copy(state, sizes, -1)
        return tuple(made)

    each, together, all_together = [run.one for run in separate], joined.several, [run.several for run in separate]

    def one(*given: Tensor) -> tuple[Tensor, ...]:
        return apply(joined.one, each, given)

    def several(batch: int, *given: Tensor) -> tuple[Tensor, ...]:
        assert together
        return apply(partial(together, batch), [partial(run, batch) for run in all_together if run], given)

    return TokenFunction(one, several if together else None, joined.most_tokens)


def in_turn(functions: Sequence[Run]) -> Run:
    """Return a function of the batch and of the values of all steps that calls each step's function for its own."""
    return lambda batch, *given: _in_turn([partial(one, batch) for one in functions], given)


def _in_turn(functions: Sequence[Run], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    each = (_as_tuple(one(*given[at :: len(functions)])) for at, one in enumerate(functions))
    return tuple(chain.from_iterable(zip(*each, strict=True)))


def _as_tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
