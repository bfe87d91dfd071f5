"""The context of one call: state, resets, direction, and the grid of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.op import Op
from seqblocks.runtime.shared_parameters import Holder
from seqblocks.state import States
from seqblocks.state_layout import State
from seqblocks.types import Rate

Phase = Literal["context", "stream"] | None
Size = tuple[int, int]
NO_VALUE = -1  # no value of a graph has this number


class Gridded(NamedTuple):
    """A step that reads or returns tokens with rows and columns.

    expected: rows and columns of its input according to the spec; source: the value that they come from, an input or a
    step's output; sets: the value whose grid the step sets, if any.
    """

    expected: Size | None
    source: int
    sets: int | None


@dataclass(slots=True)
class Grid:
    """Rows and columns of the images that tokens were cut from. patch_embed sets them for later steps.

    sizes: rows and columns by value, of inputs and of the outputs of steps that cut images. context: the names of
    inputs that do not stream, by value.
    """

    size: Size | None = None  # the latest one
    others: tuple[Size, ...] = ()  # earlier ones, if several steps cut images
    sizes: dict[int, Size] = field(default_factory=dict)
    context: Mapping[int, str] = field(default_factory=dict)
    step: Gridded | None = None  # the current step

    def of(self, tokens: int) -> Size | None:
        """Return the rows and columns of the tokens that the current step reads, or None if no known grid fits.

        If their source is unknown, the grid of the spec is tried first, then the latest ones.
        """
        grids = [grid for grid in (self.size, *self.others) if grid and grid[0] * grid[1] == tokens]
        if self.step is None:
            return next(iter(grids), None)
        if (known := self.sizes.get(self.step.source)) and known[0] * known[1] == tokens:
            return known
        return self.step.expected if self.step.expected in grids else next(iter(grids), None)

    def set(self, size: Size) -> None:
        """Store the rows and columns of the current step's output."""
        if self.size and self.size != size:
            self.others = (self.size, *self.others)
        self.size = size
        if self.step and self.step.sets is not None:
            self.sizes[self.step.sets] = size
        else:  # the source is unknown, so that the grids of later values are too
            self.sizes.clear()


class Carrying(NamedTuple):
    """A step that carries state: its path in the model, its declared state, and input tokens per token of the state."""

    path: str
    op: Op
    state: dict[str, State]
    rate: Rate


class Relay(Protocol):
    """Run steps that carry state on a sequence whose parts are on the ranks of a process group.

    next_begins [batch] bool: whether a sequence begins with the token after this part; None without resets.
    """

    next_begins: Tensor | None

    def reversed(self) -> Relay:
        """Return the relay of a scan from the other end of the sequence."""
        ...

    def run(self, step: Carrying, p: dict[str, Any], call: Call, inputs: list[Any]) -> Tensor:
        """Return a step's output for this rank's tokens, receiving the state from the previous rank and sending it on.

        p: the op's parameters; inputs: one per port, None for an absent one.
        """
        ...


@dataclass(slots=True)
class Call:
    """The context of a call: everything that an op reads besides its parameters and inputs.

    state: the op's own state, None before the first token; return_state: whether the caller needs the new state.
    resets [batch, seq]: True where a token is the first of a new sequence, in scan order.
    reverse: scan from right to left. streaming: another call may continue the sequence.
    grid: rows and columns of the tokens of an image. directed: parameters of the current scan direction, by step path.
    phase: in a stream with context, the steps to run: those that depend on the context only, or all others.
    routed: while training, the routers' choices by step path.
    relay: set if this sequence is a part of a longer one, whose other parts are on other ranks.
    last_only: whether only the last token's output is needed.
    made: the new states of the module that was called with this, which returns the output alone.
    exports: the values of that module, by number, that steps outside it read.
    segments [batch, seq]: tokens read only those of an equal number, in a shifted window of an image.
    batch: the number of sequences, before the first token of a stream, where no input tells it.
    """

    training: bool
    state: States | None = None
    return_state: bool = False
    resets: Tensor | None = None
    reverse: bool = False
    streaming: bool = False
    grid: Grid | None = None
    directed: dict[str, Holder] | None = None
    phase: Phase = None
    routed: dict[str, list[Any]] | None = None
    relay: Relay | None = None
    last_only: bool = False
    made: States | None = None
    exports: dict[int, Any] | None = None
    batch: int = 0
    segments: Tensor | None = None

    @property
    def compiling(self) -> bool:
        return torch.compiler.is_compiling()

    def into(self, name: str) -> Call:
        """Return the call for the step `name`, with that step's state."""
        if not self.streaming:
            return self
        state = self.state.get(name) if self.state else None
        # dataclasses.replace takes four times as long, and a stream does this for each step and token
        return Call(
            self.training, state, self.return_state, self.resets, self.reverse, True, self.grid, self.directed,
            self.phase, self.routed, batch=self.batch,
        )  # fmt: skip

    def in_mode(self, training: bool) -> Call:
        """Return the call for a step that is in training or evaluation mode itself."""
        return self if training is self.training else replace(self, training=training)

    def for_context(self) -> Call:
        """Return the call for a step that depends on the context only, without the stream's resets and direction."""
        return Call(self.training, grid=self.grid, directed=self.directed, routed=self.routed, batch=self.batch)

    def set_grid(self, size: Size) -> None:
        """Store the rows and columns of an image that was cut into tokens."""
        if self.grid:
            self.grid.set(size)

    def grid_of(self, x: Tensor) -> Size:
        """Return rows and columns of the tokens x [batch, seq, features]. Raises RunError if they are unknown."""
        found = self.grid.of(x.shape[1]) if self.grid else None
        if found is None:
            raise RunError(_without_grid(self.grid, x.shape[1]))
        return found


def _without_grid(grid: Grid | None, tokens: int) -> str:
    """Return the error message for tokens without rows and columns."""
    if grid and grid.step and grid.step.expected and (name := grid.context.get(grid.step.source)):
        rows, columns = grid.step.expected
        return f"the input {name} has {tokens} tokens, and its grid is {rows} x {columns}: pass {rows * columns} tokens"
    size = f" of {grid.size[0]} x {grid.size[1]}" if grid and grid.size else ""
    return f"the {tokens} tokens are not a grid{size}; pass grid=(rows, columns) in the call"
