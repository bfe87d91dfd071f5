"""Convert attention masks and position ids of transformers to resets, which mark where sequences begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.errors import RunError

LEFT = "pad on the left (tokenizer.padding_side = 'left')"


def resets_of(
    x: Tensor, mask: Tensor | None, positions: Tensor | None, past: int, causal: bool, continues: bool
) -> Tensor | None:
    """Return where sequences begin in the tokens x [batch, seq, …], of which `past` were read before; None: nowhere.

    mask: attention_mask [batch, past + seq] or [batch, seq], 1 for a token and 0 for padding. Padding before the first
    token is another sequence, which ends there, and so is padding after the last one, where the model reads both ways.
    positions: position_ids [batch, seq]; each 0 begins a sequence. continues: the state, the last output or a vector
    for the whole sequence is needed, so padding may not come last. Raises RunError for any other mask or positions,
    such as padding in the middle.
    """
    found = None if mask is None else _from_mask(x, mask, past, causal, continues)
    if positions is None:
        return found
    begins = _from_positions(x, positions, None if mask is None else mask[:, -x.shape[1] :], past)
    return begins if found is None else found if begins is None else found | begins


def _from_mask(x: Tensor, mask: Any, past: int, causal: bool, continues: bool) -> Tensor | None:
    _check_shape(x, mask, past)
    length = x.shape[1]
    known = mask.shape[1] > length  # otherwise, the mask covers only the new tokens, or there are no earlier ones
    if torch.compiler.is_compiling():
        first, after, _ = _edges(mask[:, -length:].bool(), mask[:, :-length].bool() if known else None)
        return first if causal else first | _begins(after)
    if bool((mask[:, -length - known :] == 1).all()):  # return early for the usual token of a stream
        return None
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise RunError("attention_mask must contain only 1 (token) and 0 (padding)")
    real, earlier = mask[:, -length:].bool(), mask[:, :-length].bool() if known else None
    if past and not known:
        earlier = torch.ones_like(real[:, :1])
    first, after, hole = _edges(real, earlier)
    if bool(hole.any()):
        what = "attention_mask has padding between tokens, which a state cannot skip"
        how = "Without a mask, `generate` treats pad_token_id as padding: pass attention_mask"
        raise RunError(f"{what}: {LEFT}. {how}")
    if continues and bool(after.any()):
        what = "attention_mask has padding after the last token, which would change the state or the output"
        raise RunError(f"{what}: {LEFT}")
    return _unless_empty(first if causal else first | _begins(after))


def _check_shape(x: Tensor, mask: Any, past: int) -> None:
    batch, length = x.shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        what = "the steps of the spec decide which tokens a token reads"
        raise RunError(f"attention_mask must be [batch, seq], 1 for a token and 0 for padding, not {shape}: {what}")
    if mask.shape[0] != batch or mask.shape[1] not in (length, past + length):
        tokens = f"{past} tokens were read before, and {length} are new" if past else f"there are {length} tokens"
        raise RunError(f"attention_mask is {list(mask.shape)}, and {tokens} of {batch} sequences")


def _edges(real: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return which positions are the first token, padding after a token, and tokens after such padding."""
    whole = real if earlier is None else torch.cat([earlier, real], 1)
    start = whole.shape[1] - real.shape[1]
    count = whole.cumsum(1)[:, start:]
    previous = torch.nn.functional.pad(whole, (1, 0))[:, start:-1]  # whether the previous position is a token
    first = real & (count == 1)
    if not start:
        first = torch.cat([torch.zeros_like(first[:, :1]), first[:, 1:]], 1)  # no token precedes it
    return first, ~real & (count > 0), real & ~previous & (count > 1)


def _begins(marks: Tensor) -> Tensor:
    """Return the first mark of each run of consecutive marks."""
    return marks & ~torch.nn.functional.pad(marks, (1, 0))[:, :-1]


def _from_positions(x: Tensor, positions: Any, mask: Tensor | None, past: int) -> Tensor | None:
    batch, length = x.shape[:2]
    if not isinstance(positions, Tensor) or positions.shape not in ((batch, length), (1, length)):
        shape = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise RunError(f"position_ids is {shape}, and the tokens are {[batch, length]}")
    positions = positions.expand(batch, length)
    begins = positions == 0
    if not past:
        begins = torch.cat([torch.zeros_like(begins[:, :1]), begins[:, 1:]], 1)
    if torch.compiler.is_compiling():
        return begins
    if length == 1:
        return _unless_empty(begins)
    jumps = (positions[:, 1:] != positions[:, :-1] + 1) & (positions[:, 1:] != 0)
    if mask is not None:
        jumps &= mask[:, 1:].bool()
    if bool(jumps.any()):
        what = "position_ids must increase by one from 0 in each sequence"
        raise RunError(f"{what}: a state knows only the order of its tokens")
    return _unless_empty(begins)


def _unless_empty(marks: Tensor) -> Tensor | None:
    return marks if bool(marks.any()) else None
