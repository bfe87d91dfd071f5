"""Cells whose states are set by formulas that are linear in the states, which an associative scan can compute.

With the states s of a token as a vector for each feature, such a cell is s[t] = A[t] s[t - 1] + b[t], where A and b
depend on no state. States that read each other form a group; its matrix A is as large as the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels.associative_scan import associative_scan
from seqblocks.language import linear_forms
from seqblocks.language.linear_forms import form_of
from seqblocks.ops.calc import applied

apply = partial(linear_forms.apply, applied)


def states(
    group: Sequence[str], forms: Mapping[str, Any], before: Mapping[str, Tensor], starts: Mapping[str, Tensor],
    resets: Tensor | None, tokens: int,
) -> dict[str, Tensor]:
    """Return the states [batch, seq, features] of a group after each token.

    forms: the new value of each state, a Form, or a value that depends on no state. before: the states [batch,
    features] before the first token; starts: those that begin a new sequence.
    """
    first = before[group[0]]
    sizes = (first.shape[0], tokens, first.shape[1])
    found = [form_of(forms[name]) for name in group]
    matrix = [[_full(form.coefficients.get(name), sizes, first) for name in group] for form in found]
    vector = [_full(form.constant, sizes, first) for form in found]
    old = [before[name].unsqueeze(1) for name in group]
    begins = None if resets is None else resets.unsqueeze(-1)
    if begins is not None:
        new = [starts[name].unsqueeze(1) for name in group]
        vector = [torch.where(begins, b + _product(row, new), b) for row, b in zip(matrix, vector, strict=True)]
    for at, (row, b) in enumerate(zip(matrix, vector, strict=True)):
        added = _product([a[:, :1] for a in row], old)
        added = added if begins is None else added.masked_fill(begins[:, :1], 0.0)
        vector[at] = torch.cat([b[:, :1] + added, b[:, 1:]], 1)
    made = associative_scan(_after, (matrix, vector), resets=resets)[0][1]
    return dict(zip(group, made, strict=True))


def _after(earlier: Any, later: Any) -> Any:
    """Return the effect of two tokens."""
    (a, b), (c, d) = earlier, later
    columns = [[row[at] for row in a] for at in range(len(a))]
    matrix = [[_product(row, column) for column in columns] for row in c]
    return matrix, [_product(row, b) + x for row, x in zip(c, d, strict=True)]


def _product(row: Sequence[Tensor], column: Sequence[Tensor]) -> Tensor:
    total = row[0] * column[0]
    for x, y in zip(row[1:], column[1:], strict=True):
        total = total + x * y
    return total


def _full(x: Any, sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a coefficient, a number or None for 0, at each token and feature."""
    if not isinstance(x, Tensor):
        x = like.new_full((1, 1, 1), 0.0 if x is None else float(x))
    return x.to(like.dtype).expand(sizes)
