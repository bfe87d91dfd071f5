"""The layout of a state: the sizes and dtype of each tensor that a stream stores for a step.

The layout of a step is what `state(wires)` of its op returns, in `seqblocks/ops/VERB.py`: {name: State(sizes)}. That
of a model is nested like its steps, {"blocks": {"0": {"mlstm": {"C": State(...)}}}}; `seqblocks.state` allocates and
checks tensors by it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from seqblocks.types import Wire, names_of

if TYPE_CHECKING:
    from torch import Tensor


class State(NamedTuple):
    """One state tensor of an op; the shape excludes the batch axis.

    dtype: "model" is the dtype of the model; "float32" is float32 (for stabilisers, accumulators), or float64 in
    float64 models. context: it is a constant value of a stream's context. length: for sequences of it, the name
    of the axis whose size is determined by a call; the shape has 0 there if the spec does not fix it.
    per_token: its first axis has one position per earlier token, and its size is the maximum length of a stream.
    period: of angles: values whose difference is a multiple of it are the same state.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: float = 0.0
    context: bool = False
    length: str = ""
    per_token: bool = False
    period: float = 0.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class NamedState(Protocol):
    """The state of a kernel that has several tensors: a NamedTuple."""

    def _asdict(self) -> dict[str, Any]: ...


def output_and_state(
    found: Tensor | tuple[Tensor, Tensor | NamedState], name: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the state of an op, {} if none is returned, given what a kernel returned.

    name: that of a state with a single tensor.
    """
    if not isinstance(found, tuple):
        return found, {}
    last: Any = found[1]
    return found[0], {name: last} if name else last._asdict()


def kept_state(wire: Wire) -> State:
    """Return the state declaration of a kept value. Sequences have an open length, as images may differ in size."""
    dtype = "int64" if wire.kind == "tokens" else "model"
    sizes = tuple(size if isinstance(size, int) else 0 for size in wire.axes[1:])
    if wire.kind not in ("sequence", "tokens"):
        return State(sizes, dtype, context=True)
    name = "length" if isinstance(wire.length, int) else names_of(wire.length or "seq")[0]
    return State(sizes, dtype, context=True, length=name)


def in_lanes(state: dict[str, State], lanes: tuple[int | str, ...]) -> dict[str, State]:
    """Return a state for all sequences that `each` makes of one; none if their number depends on a call."""
    counts = tuple(lane for lane in lanes if isinstance(lane, int))
    if len(counts) < len(lanes):
        return {}
    return {name: each._replace(shape=(*counts, *each.shape)) for name, each in state.items()}
