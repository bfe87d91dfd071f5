"""What a primitive computes for one token of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BlockMap = tuple["Tensor", "Tensor | None"]  # y = W x + b with blocks W [G, O, I] on the diagonal, b [G * O]
ReadMap = tuple["Tensor", "Tensor | None", int]  # the same, and the index of the value x that it reads


class TokenFunction(NamedTuple):
    """How a primitive computes one token without gradients, with its weights in the best layout for that.

    one(*state, *inputs): `state` are the parts of the op's state, in the order of `Op.state`, and the inputs are
    [batch, features], None for absent ones. All have one dtype (float32 or float64) and are on a CPU. It returns y
    [batch, features], or (y, *new parts of the state), and shares no memory with its arguments.

    several(batch, *state, *inputs): the same for several tokens of each sequence at once, [seq * batch, features], the
    first token of each sequence, then the second of each. It is used for short prompts and for frames; without it,
    tokens are computed one after another.

    most_tokens: the largest number of tokens of each sequence for which `forward` takes longer. By default 16 with
    `several`, 8 without it, and 2 if the state is a window of tokens; less if the state is large.

    blocks: the whole map, if it is block-diagonal. A step that reads it may compute it (`of_maps`).

    of_maps(maps): a function that also computes its inputs, or None. The input at each port is a block-diagonal map of
    another value, which no other step reads; the function takes the state and then these values.
    """

    one: Callable[..., Any]
    several: Callable[..., Any] | None = None
    most_tokens: float | None = None
    blocks: BlockMap | None = None
    of_maps: Callable[[Sequence[ReadMap]], TokenFunction | None] | None = None
