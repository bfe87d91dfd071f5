"""The context of one call: the state, resets, the direction, and the grid of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.op import Op
from seqblocks.parameters import State
from seqblocks.runtime.sharing import Holder
from seqblocks.state import States

Phase = Literal["context", "stream"] | None
Size = tuple[int, int]
NO_VALUE = -1  # no value of a graph has this number


class Gridded(NamedTuple):
    """A step that reads or makes tokens with rows and columns.

    expected: those of what it reads, in the spec; source: the value that they were first of, an input or what a step
    cut; made: the value whose grid the step sets.
    """

    expected: Size | None
    source: int
    made: int | None


@dataclass(slots=True)
class Grid:
    """Rows and columns of the images from which tokens were cut. patch_embed sets them for later steps.

    sizes: those of inputs and of what steps cut, by value. context: the names of inputs that do not stream, by value.
    """

    size: Size | None = None  # the latest
    others: tuple[Size, ...] = ()  # the earlier ones, where several steps cut the image
    sizes: dict[int, Size] = field(default_factory=dict)
    context: Mapping[int, str] = field(default_factory=dict)
    step: Gridded | None = None  # the present step

    def of(self, tokens: int) -> Size | None:
        """Return the rows and columns of the tokens that the present step reads, or None where none make so many.

        Where it is not known which step cut them: those of the spec first, then the latest.
        """
        grids = [grid for grid in (self.size, *self.others) if grid and grid[0] * grid[1] == tokens]
        if self.step is None:
            return next(iter(grids), None)
        if (known := self.sizes.get(self.step.source)) and known[0] * known[1] == tokens:
            return known
        return self.step.expected if self.step.expected in grids else next(iter(grids), None)

    def set(self, size: Size) -> None:
        """Note the rows and columns of what the present step cuts."""
        if self.size and self.size != size:
            self.others = (self.size, *self.others)
        self.size = size
        if self.step and self.step.made is not None:
            self.sizes[self.step.made] = size
        else:  # the grids of the values that follow are not those that were expected
            self.sizes.clear()


class Carrying(NamedTuple):
    """A step that carries state: its path in the model, the state that it declares, input tokens per token of its."""

    path: str
    op: Op
    state: dict[str, State]
    rate: int


class Relay(Protocol):
    """Runs the steps that carry state where the ranks of a process group hold the parts of a sequence.

    next_begins [batch] bool: whether a sequence begins with the token after this part; None without resets.
    """

    next_begins: Tensor | None

    def reversed(self) -> Relay:
        """Return the relay of a scan from the other end of the sequence."""
        ...

    def run(self, step: Carrying, p: dict[str, Any], call: Call, inputs: list[Any]) -> Tensor:
        """Return a step's output for this rank's tokens: its state comes from the rank before, and goes to the next.

        p: the op's parameters; inputs: by port, None for an absent one.
        """
        ...


@dataclass(slots=True)
class Call:
    """The context of a call: all that an op reads besides its parameters and inputs.

    state: the op's own state, None before the first token; return_state: whether a new state is wanted.
    resets [batch, seq]: True where a token is the first of a new sequence, in the order that is scanned.
    reverse: scan from right to left. streaming: the sequence may be a part, continued by another call.
    grid: of the tokens of an image. directed: where a scan's direction has parameters of its own, by step path.
    phase: of a stream with context, which steps run: those that depend on the context alone, or all others.
    routed: while training, what each router chose, by step path.
    relay: where the sequence is a part of a longer one, and other ranks hold the others.
    last_only: whether the model's output is wanted for the last token alone.
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
            self.phase, self.routed,
        )  # fmt: skip

    def for_context(self) -> Call:
        """Return the call for a step that depends only on the context, without resets and direction of the stream."""
        return Call(self.training, grid=self.grid, directed=self.directed, routed=self.routed)

    def set_grid(self, size: Size) -> None:
        """Note the rows and columns of an image that was cut into tokens."""
        if self.grid:
            self.grid.set(size)

    def grid_of(self, x: Tensor) -> Size:
        """Return rows and columns of the tokens x [batch, seq, features]. Raise RunError where they are unknown."""
        found = self.grid.of(x.shape[1]) if self.grid else None
        if found is None:
            raise RunError(_without_grid(self.grid, x.shape[1]))
        return found


def _without_grid(grid: Grid | None, tokens: int) -> str:
    """Return what to do about tokens that have no rows and columns."""
    if grid and grid.step and grid.step.expected and (name := grid.context.get(grid.step.source)):
        rows, columns = grid.step.expected
        return f"the input {name} has {tokens} tokens, and its grid is {rows} x {columns}: pass {rows * columns} tokens"
    size = f" of {grid.size[0]} x {grid.size[1]}" if grid and grid.size else ""
    return f"the {tokens} tokens are not a grid{size}; pass grid=(rows, columns) in the call"
