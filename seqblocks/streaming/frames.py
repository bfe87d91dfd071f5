"""How the steps of a model compute several tokens of each sequence at once: those of a frame, or of a short prompt.

A step that treats each token by itself computes them as rows, as it does those of several sequences. One with a state
has a function for several tokens, or computes them one after another, or runs its `forward` on them: whichever takes
the least time. `docs/decisions/0036-a-token-is-planned-once.md` describes how these limits were measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from seqblocks.graph import Graph, Node, OpNode, frame_size, takes_frames
from seqblocks.streaming.source import Several
from seqblocks.streaming.token_rows import has_tokens
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

# Up to this many tokens of each sequence, a planned function takes less time than `forward`, unless it has a limit of
# its own (`TokenFunction.most_tokens`).
SEVERAL_MAX_TOKENS = 16  # for a function that takes several tokens in one call
SINGLE_MAX_TOKENS = 8  # for a function of one token, called once for each
WINDOW_MAX_TOKENS = 2  # the same, if its state is only a window of earlier tokens or a count of them
LARGE_STATE_MAX_TOKENS = ((1 << 18, 4), (1 << 21, 2))  # the same: (elements of all its states, limit)

PROMPT_MAX_ROWS = 256  # tokens of a prompt, in all sequences; longer ones take about as long in the modules
FRAME_MAX_ROWS = 2048  # tokens of frames of several sequences; the modules take less time for more


class Frames:
    """The frames of a model. size: input tokens of a frame; most_batch: sequences up to which plans are fast."""

    def __init__(self, graph: Graph, types: Mapping[int, Wire | None]) -> None:
        self.size, self.have_several_tokens = frame_size(graph), takes_frames(graph)
        self.most_batch: float = max(FRAME_MAX_ROWS // self.size, 1) if self.have_several_tokens else math.inf
        self._types, self._of_rows = types, False

    @contextlib.contextmanager
    def as_rows(self) -> Iterator[None]:
        """Treat tokens as rows whose order is unknown, as within an expert."""
        before = self.size, self.have_several_tokens, self._of_rows
        self.size, self.have_several_tokens, self._of_rows = 1, False, True
        try:
            yield
        finally:
            self.size, self.have_several_tokens, self._of_rows = before

    def tokens(self, node: Node) -> set[int]:
        """Return the numbers of tokens that a node reads and makes for each frame; 0 if it makes no tokens."""
        wires = [wire for value in node.reads if has_tokens(wire := self._types[value])]
        return {self.size // wire.rate if has_tokens(wire) else 0 for wire in (*wires, node.type) if wire}

    def vector_repeats(self, node: Node) -> int:
        """Return how many times each vector that a node reads is repeated to match rows of tokens; 0 for not at all."""
        count = max(self.tokens(node), default=1)
        return count if self.have_several_tokens and count > 1 and node.vectors else 0

    def is_short(self, x: Tensor) -> bool:
        """Return whether a prompt x [batch, seq] is read faster by a planned function than by the modules."""
        return not self.have_several_tokens and x.numel() <= PROMPT_MAX_ROWS

    def is_rowwise(self, node: OpNode) -> bool:
        """Return whether tokens are computed as independent rows, as if each were a sequence of its own.

        So is every step without a state, in a stream of single tokens.
        """
        if self._of_rows or (self.have_several_tokens and self.tokens(node) == {1}):
            return True
        return not node.state and (
            not self.have_several_tokens or (node.op.reads == "token" and self._is_uniform(node))
        )

    def runs(self, node: OpNode, run: TokenFunction | None) -> bool:
        """Return whether a function of tokens is used at all."""
        if run is None:
            return False
        return not self.have_several_tokens or self.is_rowwise(node) or self._when(node, run) != ""

    def several(self, node: OpNode, run: TokenFunction, whole: str) -> Several | None:
        """Return how a function of one token is called for several, or None if they are rows.

        run: the function. whole: the name of another function of several tokens, which runs `forward`, or "".
        """
        return None if self.is_rowwise(node) else Several(self._when(node, run), run.several is not None, whole)

    def _is_uniform(self, node: Node) -> bool:
        """Return whether a step only reads and makes the same number of tokens, and vectors repeated for each."""
        values = [value for value in node.reads if value not in node.vectors]
        return len(self.tokens(node)) == 1 and all(has_tokens(self._types[value]) for value in values)

    def _when(self, node: Node, run: TokenFunction) -> str:
        """Return the condition under which a function of tokens takes less time than `forward`; "" for never."""
        together = run.several is not None
        if not together and not (node.state and self._is_uniform(node)):
            return ""
        most = most_tokens(node, run)
        if most == math.inf:
            return "True"
        tokens: Any = max(self.tokens(node)) if self.have_several_tokens else "tokens"
        if self.have_several_tokens and tokens > most:
            return ""
        return f"{tokens} <= {most if together else _most_in_order(most, node)}"


def _most_in_order(most: float, node: Node) -> str:
    """Return an expression for the smallest of the limits that hold for a state of this size."""
    elements = max(sum(state.numel for state in node.state.values()), 1)
    (large, few), (larger, fewer) = ((size // elements, min(most, limit)) for size, limit in LARGE_STATE_MAX_TOKENS)
    return str(most) if most == fewer else f"({most} if batch <= {large} else {few} if batch <= {larger} else {fewer})"


def most_tokens(node: Node, run: TokenFunction) -> float:
    """Return the tokens of each sequence up to which a function of tokens takes less time than `forward`."""
    if run.most_tokens is not None:
        return run.most_tokens
    if run.several is not None:
        return SEVERAL_MAX_TOKENS if node.state else math.inf
    sums = any(state.dtype == "float32" and not state.per_token for state in node.state.values())
    return SINGLE_MAX_TOKENS if sums else WINDOW_MAX_TOKENS
